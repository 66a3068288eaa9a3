//! Forms: the server's two parsers of `application/x-www-form-urlencoded` agree, and a form that another library has
//! encoded parses to the same values.

use latchkey_server::http::{parameters::Parameters, request::parse_form};
use url::form_urlencoded::Serializer;

use crate::{
    draw::{Draw, texts},
    harness,
};

const NAMES: [&str; 6] = ["a", "b", "grant_type", "refresh_token", "é", ""];
const FRAGMENTS: [&str; 24] = [
    "a",
    "b",
    "grant_type",
    "refresh_token",
    "é",
    "=",
    "=",
    "&",
    "&",
    "+",
    "%",
    "%61",
    "%C3%A9",
    "%FF",
    "%EF%BF%BD",
    "%26",
    "%3D",
    "%2B",
    "%00",
    "%0",
    ";",
    "x",
    "1",
    "\u{fffd}",
];

#[test]
fn request_form() {
    harness::run("request_form", 12_000, |input| {
        check_input(input);
        for text in texts(input, &FRAGMENTS) {
            check_input(text.as_bytes());
        }
        check_round_trip(input);
    });
}

fn check_input(body: &[u8]) {
    let max_heap = 16 * 1024 + 128 * body.len() as u64;
    let form = harness::assert_bounded(1, max_heap, || parse_form(body));
    let parameters = std::str::from_utf8(body).ok().and_then(|text| Parameters::parse(text).ok());
    match (form, parameters) {
        (Ok(object), Some(parameters)) => {
            for name in NAMES {
                let value = object.get(name).and_then(|value| value.as_str());
                // `parse_form` omits empty parameters.
                let expected = parameters.get_once(name).unwrap().filter(|value| !value.is_empty());
                assert_eq!(value, expected, "{name}");
            }
        }
        (Ok(_), None) => panic!("the form parses, the parameters do not"),
        (Err(_), Some(_)) => {
            let text = std::str::from_utf8(body).unwrap();
            let pairs: Vec<_> = url::form_urlencoded::parse(body).collect();
            let has_duplicate_name =
                (0..pairs.len()).any(|at| pairs[..at].iter().any(|(name, _)| *name == pairs[at].0));
            let has_replacement_character =
                pairs.iter().any(|(name, value)| name.contains('\u{fffd}') || value.contains('\u{fffd}'));
            assert!(has_duplicate_name || has_replacement_character, "the form {text:?} is rejected");
        }
        (Err(_), None) => {}
    }
}

fn check_round_trip(input: &[u8]) {
    let mut draw = Draw::new(input);
    let mut written = Serializer::new(String::new());
    let mut expected = serde_json::Map::new();
    for name in NAMES {
        let value = draw.any_text(40);
        if value.contains('\u{fffd}') {
            continue;
        }
        written.append_pair(name, &value);
        if !value.is_empty() {
            expected.insert(name.to_owned(), value.into());
        }
    }
    let written = written.finish();
    assert_eq!(parse_form(written.as_bytes()).ok(), Some(expected), "{written}");
}
