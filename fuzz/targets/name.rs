//! Names of users: 1 to 200 characters without control characters; a parsed name parses to itself.

use latchkey_server::domain::user::Name;

use crate::{
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 20] = [
    "Ada",
    " ",
    "\t",
    "\n",
    "\r",
    "\0",
    "\u{85}",
    "\u{a0}",
    "\u{2028}",
    "\u{202e}",
    "\u{feff}",
    "é",
    "e\u{301}",
    "👩‍💻",
    "<",
    "\"",
    "\u{7f}",
    "ﷺ",
    "Lovelace",
    "\u{10ffff}",
];

#[test]
fn name() {
    harness::run("name", 15_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_input(&text);
        }
        check_input(&Draw::new(input).text(&FRAGMENTS));
    });
}

fn check_input(text: &str) {
    let parsed = harness::assert_bounded(1, 16 * 1024 + 4 * text.len() as u64, || Name::parse(text));
    let trimmed = text.trim();
    let count = trimmed.chars().count();
    let is_name = (1..=200).contains(&count) && !trimmed.chars().any(char::is_control);
    assert_eq!(parsed.is_ok(), is_name, "{text:?}");
    if let Ok(name) = parsed {
        assert_eq!(name.as_str(), trimmed);
        assert_eq!(Name::parse(name.as_str()), Ok(name));
    }
}
