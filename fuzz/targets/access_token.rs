//! Access tokens: an App accepts exactly the tokens that it has issued, until they expire.

use latchkey_crds::rendered::SigningAlgorithm;
use latchkey_server::domain::{
    session::{Amr, Profile, Session, SessionId},
    token::{issue_tokens, verify_access_token},
    user::{Epoch, UserId},
};
use time::Duration;
use uuid::Uuid;

use crate::{
    app::{NOW, app, app_signing_with, env_at},
    draw::{Draw, texts},
    harness,
};

const FRAGMENTS: [&str; 16] = [
    ".",
    ".",
    "eyJhbGciOiJub25lIn0",
    "eyJhbGciOiJIUzI1NiIsImtpZCI6InMxIiwidHlwIjoiYXQrand0In0",
    "eyJhbGciOiJFUzI1NiIsImtpZCI6InMxIiwidHlwIjoiYXQrand0In0",
    "e30",
    "eyJzdWIiOiIxIn0",
    "A",
    "AAAA",
    "=",
    "_-",
    "bnVsbA",
    "W10",
    "eyJhbGciOiJFUzI1NiJ9",
    "MAYCAQACAQA",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
];

#[test]
fn access_token() {
    harness::run("access_token", 500, |input| {
        for text in texts(input, &FRAGMENTS) {
            let max_heap = 64 * 1024 + 64 * text.len() as u64;
            let claims = harness::assert_bounded(1, max_heap, || verify_access_token(app("shop"), NOW, &text));
            assert_eq!(claims, None, "{text} is accepted");
        }
        check_own_token(&mut Draw::new(input));
    });
}

fn check_own_token(draw: &mut Draw<'_>) {
    // RSA is rare, because its signatures are slow.
    let algorithm = match draw.byte() {
        0..8 => SigningAlgorithm::RS256,
        8..128 => SigningAlgorithm::EdDSA,
        _ => SigningAlgorithm::ES256,
    };
    let issuer = app_signing_with(algorithm);
    let session = Session {
        id: SessionId(Uuid::from_bytes(draw.array())),
        user: UserId(Uuid::from_bytes(draw.array())),
        epoch: Epoch(1),
        generation: 1,
        amr: draw.pick(&[Amr::Password, Amr::Code, Amr::Federated]),
        auth_time: NOW - Duration::seconds(i64::from(draw.byte())),
    };
    let (position, bit) = (draw.below(2000), 1 << (draw.byte() & 7));
    let email = draw.flag().then(|| draw.any_text(60));
    let profile = Profile { version: 1, email, email_verified: draw.flag(), name: draw.any_text(200) };
    let tokens = issue_tokens(issuer, &env_at(NOW), &profile, &session).unwrap();
    let token = tokens.access_token;

    let claims = verify_access_token(issuer, NOW, &token).expect("an App accepts its own token");
    assert_eq!((claims.sub, claims.sid), (session.user, session.id));
    assert_eq!((claims.iat, claims.exp), (NOW.unix_timestamp(), tokens.expires_at));
    assert_eq!(claims.auth_time, session.auth_time.unix_timestamp());
    assert!(claims.aud.contains(issuer.id().as_str()));
    let end = NOW + Duration::seconds(tokens.expires_in);
    assert!(verify_access_token(issuer, end - Duration::SECOND, &token).is_some());
    assert_eq!(verify_access_token(issuer, end, &token), None, "the token has expired");
    assert_eq!(verify_access_token(app("other"), NOW, &token), None, "the token is from another App");

    // Flips one bit of the token.
    let mut changed = token.clone().into_bytes();
    changed[position % token.len()] ^= bit;
    if let Ok(changed) = String::from_utf8(changed) {
        assert_eq!(verify_access_token(issuer, NOW, &changed), None, "{changed} is accepted instead of {token}");
    }
    for part in token.split('.') {
        assert_eq!(verify_access_token(issuer, NOW, &token.replacen(part, "", 1)), None);
    }
}
