//! Email addresses: the parser agrees with a simple implementation of the grammar, and lettre can send mails to every
//! address that the parser accepts.

use latchkey_server::domain::email::Email;

use crate::{
    app::app_id,
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 32] = [
    "a",
    "ada",
    "@",
    "@",
    ".",
    ".",
    "example.com",
    "example",
    "com",
    "-",
    "_",
    "+",
    "'",
    "\"",
    "(",
    ")",
    "<",
    ">",
    ",",
    ";",
    ":",
    "\\",
    " ",
    "\r\n",
    "\n",
    "\0",
    "é",
    "xn--bcher-kva",
    "127.0.0.1",
    "[",
    "]",
    "1",
];

#[test]
fn address() {
    harness::run("address", 5_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            check_input(&text);
            check_input(&format!("{text}@example.com"));
            check_input(&format!("ada@{text}.com"));
        }
        check_input(&Draw::new(input).text(&FRAGMENTS));
    });
}

/// Whether the text is an email address: a dot-atom (RFC 5322, section 3.2.3), `@`, and a host name of at least two
/// labels (RFC 1123, section 2.1), within the lengths of RFC 5321, section 4.5.3.1.
fn is_email_address(text: &str) -> bool {
    let is_atom_character = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-/=?^_`{|}~".contains(c);
    let Some(at) = text.rfind('@') else { return false };
    let (local, domain) = (&text[..at], &text[at + 1..]);
    let labels: Vec<&str> = domain.split('.').collect();
    let is_label = |label: &&str| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= 254
        && (1..=64).contains(&local.len())
        && local.split('.').all(|atom| !atom.is_empty() && atom.chars().all(is_atom_character))
        && domain.len() <= 253
        && labels.len() >= 2
        && labels.iter().all(is_label)
        && !labels[labels.len() - 1].chars().all(|c| c.is_ascii_digit())
}

fn check_input(text: &str) {
    let parsed = harness::assert_bounded(1, 16 * 1024 + 4 * text.len() as u64, || Email::parse(text));
    assert_eq!(parsed.is_ok(), is_email_address(text), "{text:?}");
    let Ok(email) = parsed else { return };
    assert_eq!(email.as_str(), text);
    assert_eq!(format!("{}@{}", email.local_part().to_ascii_lowercase(), email.domain()), email.canonical());
    let canonical = Email::parse(email.canonical()).expect("the canonical form is an address");
    assert_eq!(canonical.canonical(), email.canonical());
    assert_eq!(canonical.account_key(&app_id("shop")), email.account_key(&app_id("shop")));

    // lettre accepts the email address as a recipient, and writes a header with exactly this email address.
    let sendable: lettre::Address = text.parse().unwrap_or_else(|error| panic!("{text:?} cannot be sent to: {error}"));
    let header = lettre::message::Mailbox::new(None, sendable).to_string();
    let read = mailparse::addrparse(&header).unwrap_or_else(|error| panic!("{header:?} does not parse: {error}"));
    let [mailparse::MailAddr::Single(only_entry)] = &read[..] else { panic!("{header:?} is {read:?}") };
    assert_eq!(only_entry.addr, text);
}
