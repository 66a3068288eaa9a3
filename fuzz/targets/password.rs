//! Passwords: checking the strength of a password costs less than hashing it.

use latchkey_crds::rendered::PasswordPolicy;
use latchkey_server::{
    domain::{
        email::Email,
        password::{MAX_PASSWORD_CHARS, Password, WeakPassword, likely_guesses},
        user::Name,
    },
    hashing::strength::score,
};

use crate::{
    draw::{Draw, texts},
    harness,
};

const POLICY: PasswordPolicy =
    PasswordPolicy { minimum_length: 8, minimum_strength: 2, foreign_hash_retention_days: None, firebase_scrypt: None };
/// Parts of the patterns that zxcvbn looks for: l33t, keyboard, dates, repeats, sequences, dictionary words.
const FRAGMENTS: [&str; 48] = [
    "4",
    "@",
    "8",
    "(",
    "{",
    "[",
    "<",
    "3",
    "6",
    "9",
    "1",
    "!",
    "|",
    "0",
    "$",
    "5",
    "+",
    "7",
    "%",
    "2",
    "4@",
    "1!|",
    "{[<(",
    "69",
    "$5",
    "a",
    "e",
    "password",
    "P4$$w0rd",
    "qwerty",
    "zxcvbn",
    "asdf",
    "1qaz2wsx",
    "1999",
    "2026-02-01",
    "31.12.99",
    "abc",
    "cba",
    "123",
    "aaa",
    "correct",
    "horse",
    "ada",
    "example",
    "é",
    "e\u{301}",
    " ",
    "\u{10ffff}",
];

#[test]
fn password() {
    harness::run("password", 100, |input| {
        let mut draw = Draw::new(input);
        let name = Name::parse(&draw.text(&FRAGMENTS)).ok();
        let [as_text, joined_tokens] = texts(input, &FRAGMENTS);
        let four_tokens: Vec<&str> = (0..4).map(|_| draw.pick(&FRAGMENTS)).collect();
        let repetitive: String = input.iter().map(|byte| four_tokens[usize::from(byte % 4)]).collect();
        for typed in [as_text.as_ref(), joined_tokens.as_ref(), &repetitive, &draw.text(&FRAGMENTS)] {
            // The check is most expensive if the email address has the same characters as the password.
            let local: String = typed.chars().filter(|c| c.is_ascii_alphanumeric() || "$!|{+%".contains(*c)).collect();
            let local = local.get(..local.len().min(64)).unwrap_or_default();
            let email = Email::parse(&format!("{local}@example.com")).ok();
            check_input(typed, email.as_ref(), name.as_ref());
            check_input(local, email.as_ref(), name.as_ref());
        }
    });
}

fn check_input(typed: &str, email: Option<&Email>, name: Option<&Name>) {
    let typed: String = typed.chars().take(2 * MAX_PASSWORD_CHARS).collect();
    let password = Password::new(&typed);
    assert_eq!(Password::new(password.expose()).expose(), password.expose(), "NFC is idempotent");
    let count = password.expose().chars().count();
    let expected = match count {
        0..8 => Err(WeakPassword::TooShort { minimum: 8 }),
        8..=MAX_PASSWORD_CHARS => Ok(()),
        _ => Err(WeakPassword::TooLong),
    };
    assert_eq!(password.check_length(&POLICY), expected);
    if expected.is_err() {
        return;
    }
    let guesses = likely_guesses(email, name);
    // The check needs less memory than a hash (19 MiB).
    let strength_score = harness::assert_bounded(1, 16 * 1024 * 1024, || score(password.expose(), &guesses));
    assert!(strength_score <= 4);
    assert_eq!(score(password.expose(), &guesses), strength_score, "a password has one score");
}
