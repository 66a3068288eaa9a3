//! Mails as relays receive them: another library that parses a mail finds the expected headers and no other headers.

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use latchkey_crds::{
    rendered::{RenderedMail, RenderedSmtp, SmtpRelay, SmtpTls},
    templates::{TemplateValues, to_one_line},
    types::Mailbox,
};
use latchkey_server::{
    domain::{email::Email, mail::MailKind},
    mail::fuzzing::{Sender, render},
};
use mailparse::{MailHeaderMap, addrparse_header, parse_mail};

use crate::{app::app_id, draw::Draw, harness};

const FRAGMENTS: [&str; 40] = [
    "Ada",
    "The Shop",
    "\r\n",
    "\n",
    "\r",
    "Bcc: victim@example.com",
    "\r\n\r\n",
    "\r\n.\r\n",
    "\0",
    "\u{85}",
    "\u{2028}",
    "é",
    "👩‍💻",
    "<",
    ">",
    "@",
    ",",
    ";",
    ":",
    "\"",
    "\\",
    "(",
    ")",
    "=?utf-8?q?x?=",
    "=?",
    "?=",
    "=",
    "_",
    " ",
    "\t",
    "--",
    ".",
    "a",
    "ß",
    "ﷺ",
    "<evil@example.com>",
    "Content-Type: text/html",
    "\u{feff}",
    "\u{202e}",
    "0123456789012345678901234567890123456789",
];
const LOCAL_PARTS: [&str; 8] = ["a", "ada", ".", "+", "'", "=?", "{}", "|`~"];

static RELAY: LazyLock<SmtpRelay> = LazyLock::new(|| SmtpRelay {
    host: "relay.example.com".to_owned(),
    port: 587,
    tls: SmtpTls::Starttls,
    username: None,
    password: None,
});

#[test]
fn mail() {
    harness::run("mail", 500, |input| {
        let mut draw = Draw::new(input);
        let mut text = |max_chars: usize| {
            let text = if draw.byte() < 32 { draw.any_text(300) } else { draw.text(&FRAGMENTS) };
            text.chars().take(max_chars).collect::<String>()
        };
        // An App's display name has at most 100 characters, a user's name at most 200.
        let (app, name, own_template, from_name) = (text(100), text(200), text(1000), text(200));
        let kind = draw.pick(&MailKind::ALL);
        let from = format!("{from_name} <shop@example.com>").parse::<Mailbox>().ok();
        let to = Email::parse(&format!("{}@example.com", draw.text(&LOCAL_PARTS)));
        let to = to.unwrap_or_else(|_| Email::parse("ada@example.com").unwrap());
        let templates: BTreeMap<String, String> = match draw.byte() & 3 {
            0 => BTreeMap::new(),
            1 => [(format!("{}.subject", kind.as_str()), own_template)].into(),
            2 => [(format!("{}.subject", kind.as_str()), "{{ name }} {{ app }}".to_owned())].into(),
            _ => [(format!("{}.txt", kind.as_str()), own_template)].into(),
        };
        let templates = templates.into_iter().map(|(name, text)| (name, Arc::new(text))).collect();
        let has_own_relay = draw.flag();
        check_input(&app, &name, kind, from, &to, templates, has_own_relay);
    });
}

fn check_input(
    app: &str,
    name: &str,
    kind: MailKind,
    from: Option<Mailbox>,
    to: &Email,
    templates: BTreeMap<String, Arc<String>>,
    has_own_relay: bool,
) {
    let mail = RenderedMail {
        from,
        confirm_url: None,
        reset_url: None,
        confirm_code_lifetime_seconds: 86_400,
        reset_code_lifetime_seconds: 1800,
        own_invitation_url: None,
        own_invitation_code_lifetime_seconds: None,
        templates,
        smtp: if has_own_relay { RenderedSmtp::Own(RELAY.clone()) } else { RenderedSmtp::Install },
    };
    let id = app_id("shop");
    let installation_from = "The Install <noreply@auth.example.net>".parse().unwrap();
    let sender = Sender { app: &id, display_name: app, mail: &mail, relay: &RELAY, from: &installation_from };
    let values = TemplateValues {
        app,
        name,
        code: "ABCDE-01XYZ",
        url: "https://shop.example.com/c?code=ABCDE-01XYZ",
        registered_at: "1 February 2026, 09:30 UTC",
        expires_at: "2 February 2026, 10:31 UTC",
    };
    let Some(written) = harness::assert_bounded(20, 16 * 1024 * 1024, || render(sender, to.as_str(), kind, values))
    else {
        panic!("no mail is written to {to:?}", to = to.as_str());
    };
    check_lines(&written.message);

    let read = parse_mail(&written.message).expect("the mail parses");
    let mut names: Vec<String> = read.headers.iter().map(|header| header.get_key().to_ascii_lowercase()).collect();
    names.sort();
    let mut expected_names = vec![
        "auto-submitted",
        "content-type",
        "date",
        "from",
        "message-id",
        "mime-version",
        "subject",
        "to",
        "x-auto-response-suppress",
    ];
    if mail.from.is_some() && !has_own_relay {
        // Inserted after `mime-version`, so that the list stays sorted.
        expected_names.insert(6, "reply-to");
    }
    assert_eq!(names, expected_names, "{}", String::from_utf8_lossy(&written.message));

    let subject = read.headers.get_first_value("Subject").unwrap();
    assert_eq!(
        without_white_space(&subject),
        without_white_space(&written.subject),
        "{}",
        String::from_utf8_lossy(&written.message)
    );
    assert_eq!(written.subject, to_one_line(&written.subject), "a subject is one line");
    assert_eq!(mailbox(&read, "To").1, to.as_str());
    let (from_name, from_address) = mailbox(&read, "From");
    let (expected_address, own_name) = match &mail.from {
        Some(own) if has_own_relay => (own.address(), own.name()),
        Some(own) => ("noreply@auth.example.net", own.name()),
        None => ("noreply@auth.example.net", None),
    };
    assert_eq!(from_address, expected_address);
    let expected_name = own_name.map(to_one_line).filter(|name| !name.is_empty()).unwrap_or_else(|| to_one_line(app));
    assert_eq!(
        without_white_space(&from_name),
        without_white_space(&expected_name),
        "{}",
        String::from_utf8_lossy(&written.message)
    );

    let [text, html] = &read.subparts[..] else { panic!("a mail has two parts") };
    for (part, content, mime) in [(text, &written.text, "text/plain"), (html, &written.html, "text/html")] {
        assert_eq!(part.ctype.mimetype, mime);
        assert!(part.subparts.is_empty());
        let body = part.get_body().expect("a part that can be decoded");
        assert_eq!(normalize_text(&body), normalize_text(content));
    }
}

/// The text with LF as line ending, without NUL characters and without white space at the end. Also without a byte
/// order mark at the start, because UTF-8 decoders drop it.
fn normalize_text(text: &str) -> String {
    let text = text.replace("\r\n", "\n").replace('\r', "\n").replace('\0', "");
    let text = text.trim_start_matches('\u{feff}').lines().collect::<Vec<_>>().join("\n");
    text.trim_end().to_owned()
}

/// The header without its white space, because folding can change white space.
fn without_white_space(header: &str) -> String {
    header.split_whitespace().collect()
}

/// The display name and the email address in the header `name`, which contains exactly one mailbox.
fn mailbox(mail: &mailparse::ParsedMail<'_>, name: &str) -> (String, String) {
    let header = mail.headers.get_first_header(name).unwrap();
    let list = addrparse_header(header).unwrap_or_else(|error| panic!("{name} {:?}: {error}", header.get_value()));
    let [mailparse::MailAddr::Single(single)] = &list[..] else { panic!("{name} is {list:?}") };
    (single.display_name.clone().unwrap_or_default(), single.addr.clone())
}

/// RFC 5322, sections 2.1.1 and 2.3: lines have at most 998 bytes and end with CR LF; neither CR nor LF occurs alone.
fn check_lines(message: &[u8]) {
    for line in message.split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        assert!(line.len() <= 998, "a line has {} bytes", line.len());
        assert!(!line.contains(&b'\r') && !line.contains(&0), "{:?}", String::from_utf8_lossy(line));
    }
    let ends = message.windows(2).filter(|pair| pair == b"\r\n").count();
    assert_eq!(ends, message.iter().filter(|byte| **byte == b'\n').count(), "a line ends without CR");
    let (head, _) = message.split_at(message.windows(4).position(|four| four == b"\r\n\r\n").expect("a head"));
    assert!(head.is_ascii());
}
