//! Forms: the two readers of `application/x-www-form-urlencoded` agree, and what is written is read back.

use latchkey_server::http::{parameters::Parameters, request::form};
use url::form_urlencoded::Serializer;

use crate::{
    draw::{Draw, texts},
    harness,
};

const NAMES: [&str; 6] = ["a", "b", "grant_type", "refresh_token", "é", ""];
const TOKENS: [&str; 24] = [
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
        judge(input);
        for text in texts(input, &TOKENS) {
            judge(text.as_bytes());
        }
        written_is_read(input);
    });
}

fn judge(body: &[u8]) {
    let most = 16 * 1024 + 128 * body.len() as u64;
    let read = harness::bounded(1, most, || form(body));
    let parameters = std::str::from_utf8(body).ok().and_then(|text| Parameters::parse(text).ok());
    match (read, parameters) {
        (Ok(object), Some(parameters)) => {
            for name in NAMES {
                let value = object.get(name).and_then(|value| value.as_str());
                // An empty parameter is as good as none in a form.
                let expected = parameters.once(name).unwrap().filter(|value| !value.is_empty());
                assert_eq!(value, expected, "{name}");
            }
        }
        (Ok(_), None) => panic!("the form is read, the parameters are not"),
        (Err(_), Some(_)) => {
            let text = std::str::from_utf8(body).unwrap();
            let pairs: Vec<_> = url::form_urlencoded::parse(body).collect();
            let twice = (0..pairs.len()).any(|at| pairs[..at].iter().any(|(name, _)| *name == pairs[at].0));
            let replaced = pairs.iter().any(|(name, value)| name.contains('\u{fffd}') || value.contains('\u{fffd}'));
            assert!(twice || replaced, "refused the form {text:?}");
        }
        (Err(_), None) => {}
    }
}

fn written_is_read(input: &[u8]) {
    let mut draw = Draw::new(input);
    let mut written = Serializer::new(String::new());
    let mut expected = serde_json::Map::new();
    for name in NAMES {
        let value = draw.wild(40);
        if value.contains('\u{fffd}') {
            continue;
        }
        written.append_pair(name, &value);
        if !value.is_empty() {
            expected.insert(name.to_owned(), value.into());
        }
    }
    let written = written.finish();
    assert_eq!(form(written.as_bytes()).ok(), Some(expected), "{written}");
}
