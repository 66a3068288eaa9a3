//! Refresh tokens: what an App writes it reads, and nothing else.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_server::domain::{
    session::SessionId,
    token::{BadRefreshToken, REFRESH_PREFIX, RefreshToken},
    user::UserId,
};
use uuid::Uuid;

use crate::{
    app::app,
    draw::{Draw, texts},
    harness,
};

const TOKENS: [&str; 12] = ["lkr_", "lkc_", "A", "AAAA", "AAAB", "_-_-", "B", "=", "g", "/", "+", " "];

#[test]
fn refresh_token() {
    harness::run("refresh_token", 5_000, |input| {
        for text in texts(input, &TOKENS) {
            foreign(&text);
            foreign(&format!("{REFRESH_PREFIX}{text}"));
        }
        // Of the right length, under a key number that is known or not.
        let mut draw = Draw::new(input);
        foreign(&format!("{REFRESH_PREFIX}{}", URL_SAFE_NO_PAD.encode(draw.array::<60>())));
        own(&mut Draw::new(input));
    });
}

/// Nobody guesses a MAC, so no input is a token. Work is bounded whatever it is.
fn foreign(text: &str) {
    let opened = harness::bounded(1, 16 * 1024 + 4 * text.len() as u64, || RefreshToken::open(app("shop"), text));
    assert!(opened.is_err(), "{text} opens");
}

fn own(draw: &mut Draw<'_>) {
    let app = app("shop");
    let token = RefreshToken {
        user: UserId(Uuid::from_bytes(draw.array())),
        session: SessionId(Uuid::from_bytes(draw.array())),
        generation: draw.number(),
    };
    let text = token.seal(app);
    assert_eq!(RefreshToken::open(app, &text), Ok(token));
    assert_eq!(token.seal(app), text, "one generation has one text");
    assert_eq!(RefreshToken::open(crate::app::app("other"), &text), Err(BadRefreshToken::Invalid));

    // One bit of the text, and one of what it encodes.
    let (at, bit) = (draw.below(text.len()), 1 << (draw.byte() & 7));
    let mut changed = text.clone().into_bytes();
    changed[at] ^= bit;
    if let Ok(changed) = String::from_utf8(changed) {
        assert!(RefreshToken::open(app, &changed).is_err(), "{changed} is as good as {text}");
    }
    let mut bytes = URL_SAFE_NO_PAD.decode(&text[REFRESH_PREFIX.len()..]).unwrap();
    let at = draw.below(bytes.len());
    bytes[at] ^= bit;
    let changed = format!("{REFRESH_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
    assert!(RefreshToken::open(app, &changed).is_err(), "{changed} is as good as {text}");
}
