//! Emailed codes as users type them: the parser ignores case, hyphens and white space, and reads O, I and L as digits.

use latchkey_server::domain::{clock::Env, code::Code};

use crate::{
    app::app,
    draw::{Draw, texts},
    harness,
};

const SYMBOLS: &str = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const FRAGMENTS: [&str; 44] = [
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "A", "b", "C", "d", "E", "f", "G", "h", "J", "k", "M", "n", "P",
    "q", "R", "s", "T", "v", "W", "x", "Y", "z", "O", "o", "I", "i", "L", "l", "-", " ", "u", "U", "\u{a0}", "é",
];

#[test]
fn code() {
    harness::run("code", 15_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_input(&text);
        }
        // A code has ten symbols. The first 40 fragments can all occur in a typed code.
        let ten_symbols: String = input.iter().take(10).map(|byte| FRAGMENTS[usize::from(*byte) % 40]).collect();
        check_input(&ten_symbols);
        check_typed(&mut Draw::new(input));
    });
}

/// The normal form of a code; `None` if the text is not a code.
fn normal_form(text: &str) -> Option<String> {
    let symbols: Vec<char> = text.chars().filter(|c| *c != '-' && !c.is_whitespace()).collect();
    let upper = symbols.into_iter().map(|c| match c.to_ascii_uppercase() {
        'O' => '0',
        'I' | 'L' => '1',
        other => other,
    });
    let code: String = upper.collect();
    (code.chars().count() == 10 && code.chars().all(|c| SYMBOLS.contains(c))).then_some(code)
}

fn check_input(text: &str) {
    let parsed = harness::assert_bounded(1, 16 * 1024 + 4 * text.len() as u64, || Code::parse(text));
    let normal = normal_form(text);
    assert_eq!(parsed.is_ok(), normal.is_some(), "{text:?}");
    if let (Ok(code), Some(normal)) = (parsed, normal) {
        assert_eq!(code.display_form(), format!("{}-{}", &normal[..5], &normal[5..]));
        assert_eq!(Code::parse(&code.display_form()), Ok(code));
    }
}

/// Checks that all ways to type a code parse to the same code. For the App that issued the code, the Redis keys to try
/// include the key of the stored code. For another App, they do not.
fn check_typed(draw: &mut Draw<'_>) {
    let code = Code::generate(&Env::system());
    let mut typed = String::new();
    for symbol in code.display_form().chars() {
        let symbol = match symbol {
            '0' => draw.pick(&['0', 'O', 'o']),
            '1' => draw.pick(&['1', 'I', 'i', 'L', 'l']),
            other if draw.flag() => other.to_ascii_lowercase(),
            other => other,
        };
        typed.push(symbol);
        typed.push_str(draw.pick(&["", "", "-", " ", "\t", "\u{a0}"]));
    }
    assert_eq!(Code::parse(&typed), Ok(code.clone()), "{typed:?}");
    assert!(code.keys_to_try(app("shop")).contains(&code.key_to_store(app("shop"))));
    assert!(!code.keys_to_try(app("other")).contains(&code.key_to_store(app("shop"))));
}
