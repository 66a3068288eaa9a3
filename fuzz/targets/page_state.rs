//! The state of pages: session cookies, browser cookies, the field `csrf`, transactions, and the cookies of
//! registrations and social logins. An App accepts only what it has issued, for the same purpose and in the same
//! browser.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_server::domain::{
    email::Email,
    pages::{
        AccountPage, BrowserId, MAX_TRANSACTION_CHARS, Registration, SessionCookie, SessionCookieError, SocialState,
        Target, Transaction, csrf_token, is_valid_csrf_token,
    },
    session::SessionId,
    user::UserId,
};
use time::Duration;
use uuid::Uuid;

use crate::{
    app::{NOW, app, env_at},
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 12] = ["A", "AAAA", "AAAAAAAAAAAAAAAA", "AAAB", "_-_-", "B", "=", "g", "/", "+", " ", "é"];

#[test]
fn page_state() {
    harness::run("page_state", 3_000, |input| {
        let mut draw = Draw::new(input);
        let browser = BrowserId::parse(&URL_SAFE_NO_PAD.encode(draw.array::<16>())).unwrap();
        for text in texts(input, &FRAGMENTS) {
            check_browser_cookie(&text);
            assert_rejected(&text, &browser);
            assert_rejected(&URL_SAFE_NO_PAD.encode(text.as_bytes()), &browser);
        }
        // A session cookie of the right length, with the number of a known or unknown key.
        assert_rejected(&URL_SAFE_NO_PAD.encode(draw.array::<60>()), &browser);
        // A field `csrf` of the right length.
        assert_rejected(&URL_SAFE_NO_PAD.encode(draw.array::<32>()), &browser);
        check_session_cookie(&mut Draw::new(input));
        check_bound_texts(&mut Draw::new(input), &browser);
    });
}

/// A text is accepted as a browser cookie only if it is 16 bytes in base64url. An accepted cookie is encoded to the
/// same text again.
fn check_browser_cookie(text: &str) {
    let is_16_bytes = URL_SAFE_NO_PAD.decode(text).is_ok_and(|bytes| bytes.len() == 16);
    let parsed = harness::assert_bounded(1, 16 * 1024, || BrowserId::parse(text));
    assert_eq!(parsed.is_some(), is_16_bytes, "{text}");
    if let Some(browser) = parsed {
        assert_eq!(browser.encode(), text);
    }
}

/// No input is valid, because nobody can guess an HMAC or a tag. The cost of the check is bounded for all inputs.
fn assert_rejected(text: &str, browser: &BrowserId) {
    let app = app("shop");
    let is_accepted = harness::assert_bounded(1, 64 * 1024, || {
        SessionCookie::decode(app, text, NOW).is_ok()
            || is_valid_csrf_token(app, browser, text)
            || Transaction::open(app, browser, text, NOW).is_some()
            || Registration::open(app, browser, text, NOW).is_some()
            || SocialState::open(app, text, NOW).is_some()
    });
    assert!(!is_accepted, "{text} is accepted");
    // The server reads the issue time of a session cookie without checking the tag, so only encoding and length matter.
    let time = harness::assert_bounded(1, 16 * 1024, || SessionCookie::unverified_issued_ms(text));
    assert_eq!(time.is_some(), URL_SAFE_NO_PAD.decode(text).is_ok_and(|bytes| bytes.len() == 60), "{text}");
}

fn check_session_cookie(draw: &mut Draw<'_>) {
    let app = app("shop");
    let cookie = SessionCookie {
        issued_ms: draw.number(),
        user: UserId(Uuid::from_bytes(draw.array())),
        session: SessionId(Uuid::from_bytes(draw.array())),
    };
    let text = cookie.encode(app);
    assert_eq!(SessionCookie::decode(app, &text, NOW), Ok(cookie));
    assert_eq!(SessionCookie::unverified_issued_ms(&text), Some(cookie.issued_ms));
    assert_eq!(SessionCookie::decode(crate::app::app("other"), &text, NOW), Err(SessionCookieError::Invalid));
    let changed = with_flipped_bit(draw, &text);
    assert!(SessionCookie::decode(app, &changed, NOW).is_err(), "{changed} is accepted instead of {text}");
}

/// A text that is bound to a browser is accepted only from this browser, in the same App, for the same purpose, and
/// until it expires.
fn check_bound_texts(draw: &mut Draw<'_>, browser: &BrowserId) {
    let (app, other_app, env) = (app("shop"), crate::app::app("other"), env_at(NOW));
    let other_browser = BrowserId::generate(&env);

    let csrf = csrf_token(app, browser);
    assert!(is_valid_csrf_token(app, browser, &csrf));
    assert!(!is_valid_csrf_token(app, &other_browser, &csrf) && !is_valid_csrf_token(other_app, browser, &csrf));
    assert!(!is_valid_csrf_token(app, browser, &with_flipped_bit(draw, &csrf)));

    let transaction = Transaction::start(&env, Target::Account(draw.pick(&AccountPage::ALL)));
    let text = transaction.seal(&env, app, browser).unwrap();
    assert!(text.len() <= MAX_TRANSACTION_CHARS);
    assert_eq!(Transaction::open(app, browser, &text, NOW + Duration::seconds(3_599)), Some(transaction));
    assert_eq!(Transaction::open(app, browser, &text, NOW + Duration::seconds(3_600)), None);
    assert_eq!(Transaction::open(app, &other_browser, &text, NOW), None);
    assert_eq!(Transaction::open(other_app, browser, &text, NOW), None);
    assert_eq!(Transaction::open(app, browser, &with_flipped_bit(draw, &text), NOW), None);
    assert_eq!(Registration::open(app, browser, &text, NOW), None);
    assert_eq!(SocialState::open(app, &text, NOW), None);

    // A registration can carry a transaction, which is a text in base64url.
    let mut carried = URL_SAFE_NO_PAD.encode(draw.any_text(800));
    carried.truncate(2_048);
    let email = Email::parse("Ada@example.com").unwrap();
    let registration = Registration::new(&email, Some(&carried), NOW.unix_timestamp() + 300);
    let value = registration.seal(&env, app, browser);
    assert_eq!(Registration::open(app, browser, &value, NOW), Some(registration));
    assert_eq!(Registration::open(app, browser, &value, NOW + Duration::seconds(300)), None);
    assert_eq!(Registration::open(app, &other_browser, &value, NOW), None);
    assert_eq!(Registration::open(app, browser, &with_flipped_bit(draw, &value), NOW), None);
    assert_eq!(Transaction::open(app, browser, &value, NOW), None);
}

/// The text with one flipped bit in its decoded bytes.
fn with_flipped_bit(draw: &mut Draw<'_>, text: &str) -> String {
    let mut bytes = URL_SAFE_NO_PAD.decode(text).unwrap();
    let at = draw.below(bytes.len());
    bytes[at] ^= 1 << (draw.byte() & 7);
    URL_SAFE_NO_PAD.encode(bytes)
}
