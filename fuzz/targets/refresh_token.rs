//! Refresh tokens: an App accepts only the tokens that it has issued.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use latchkey_server::domain::{
    session::SessionId,
    token::{REFRESH_PREFIX, RefreshToken, RefreshTokenError},
    user::UserId,
};
use uuid::Uuid;

use crate::{
    app::app,
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 12] = ["lkr_", "lkc_", "A", "AAAA", "AAAB", "_-_-", "B", "=", "g", "/", "+", " "];

#[test]
fn refresh_token() {
    harness::run("refresh_token", 5_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            assert_rejected(&text);
            assert_rejected(&format!("{REFRESH_PREFIX}{text}"));
        }
        // A token of the right length, with the number of a known or unknown key.
        let mut draw = Draw::new(input);
        assert_rejected(&format!("{REFRESH_PREFIX}{}", URL_SAFE_NO_PAD.encode(draw.array::<60>())));
        check_own_token(&mut Draw::new(input));
    });
}

/// No input is a valid token, because nobody can guess a MAC. The cost of the check is bounded for all inputs.
fn assert_rejected(text: &str) {
    let token_or_error =
        harness::assert_bounded(1, 16 * 1024 + 4 * text.len() as u64, || RefreshToken::decode(app("shop"), text));
    assert!(token_or_error.is_err(), "{text} is accepted");
}

fn check_own_token(draw: &mut Draw<'_>) {
    let app = app("shop");
    let token = RefreshToken {
        user: UserId(Uuid::from_bytes(draw.array())),
        session: SessionId(Uuid::from_bytes(draw.array())),
        // Higher generations than 2^53 - 3 are rejected.
        generation: draw.number() >> 12,
    };
    let text = token.encode(app);
    assert_eq!(RefreshToken::decode(app, &text), Ok(token));
    assert_eq!(token.encode(app), text, "a generation has one serialization");
    assert_eq!(RefreshToken::decode(crate::app::app("other"), &text), Err(RefreshTokenError::Invalid));

    // Flips one bit of the text. Then flips one bit of the decoded bytes of the original token.
    let (at, bit) = (draw.below(text.len()), 1 << (draw.byte() & 7));
    let mut changed = text.clone().into_bytes();
    changed[at] ^= bit;
    if let Ok(changed) = String::from_utf8(changed) {
        assert!(RefreshToken::decode(app, &changed).is_err(), "{changed} is accepted instead of {text}");
    }
    let mut bytes = URL_SAFE_NO_PAD.decode(&text[REFRESH_PREFIX.len()..]).unwrap();
    let at = draw.below(bytes.len());
    bytes[at] ^= bit;
    let changed = format!("{REFRESH_PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
    assert!(RefreshToken::decode(app, &changed).is_err(), "{changed} is accepted instead of {text}");
}
