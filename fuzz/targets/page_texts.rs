//! Texts of pages: an accepted text is plain text with known variables. If it is written and read again, it is the same
//! text.

use latchkey_crds::pages::{
    Language,
    texts::{MAX_TEXT_LENGTH, Text, check, default_texts},
};

use crate::{draw::texts, harness};

const FRAGMENTS: [&str; 40] = [
    "link-home",
    "login-title",
    "no-such-text",
    "-brand",
    "a",
    " = ",
    "=",
    "\n",
    "\r\n",
    "\r",
    "\n    ",
    "\n    .title = ",
    ".",
    " ",
    "\t",
    "{",
    "}",
    "{ $app }",
    "{$app}",
    "{ $nobody }",
    "{ ",
    " }",
    "$",
    "$app",
    "\"",
    "\\u0041",
    "(",
    ")",
    "NUMBER(",
    " ->",
    "[one] ",
    "*[other] ",
    "#",
    "## ",
    "text",
    "é",
    "<b>",
    "\u{feff}",
    "7",
    "\u{202e}",
];
/// The maximum length of a ConfigMap with texts, in bytes.
const MAX_FILE_BYTES: usize = 64 * 1024;

#[test]
fn page_texts() {
    harness::run("page_texts", 500, |input| {
        for file in texts(input, &FRAGMENTS) {
            check_file(&file);
            // Also checks a large file, because parsers often fail on great depth, width or length.
            check_file(&file.repeat((MAX_FILE_BYTES / file.len().max(1)).min(4096)));
        }
    });
}

fn check_file(file: &str) {
    let checked = harness::assert_bounded(20, 64 * 1024 * 1024, || check(Language::En, file));
    for (id, text) in &checked.texts {
        let written = text.to_string();
        assert!(written.chars().count() <= MAX_TEXT_LENGTH && !written.contains(['\r', '\t', '\0']), "{written:?}");
        assert_eq!(written.parse::<Text>().as_ref(), Ok(text), "{written:?}");
        let default = default_texts(Language::En).get(id).expect("only known texts are accepted");
        let known: Vec<&str> = default.variables().collect();
        assert!(text.variables().all(|variable| known.contains(&variable)), "{written:?}");
        // If the variables are removed, no brace is left.
        assert!(!text.format(|_| "").contains(['{', '}']), "{written:?}");
    }
    let lines = file.split('\n').count();
    for error in &checked.errors {
        assert!((1..=lines).contains(&error.line), "{error}");
    }
}
