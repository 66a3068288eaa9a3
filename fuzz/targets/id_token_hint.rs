//! `id_token_hint`: an App accepts only ID tokens that it has issued, but of any age. A logout leads only to a URL that
//! the client has registered.

use latchkey_server::domain::{
    openid::{
        authorization_request::RequestParameters,
        id_token::{Hint, HintError, verify_hint},
        logout::{LogoutRequest, LogoutRequestError},
    },
    session::SessionId,
};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    app::NOW,
    draw::{Draw, texts},
    harness,
    openid_app::{CLI, POST_LOGOUT_URLS, WEB, id_token, openid_app},
    provider_keys::{ES256, signing_input},
    redirect,
};

const FRAGMENTS: [&str; 18] = [
    ".",
    ".",
    "eyJhbGciOiJub25lIn0",
    "eyJhbGciOiJub25lIiwidHlwIjoiSldUIiwia2lkIjoiczEifQ",
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6InMxIn0",
    "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6InMxIn0",
    "eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCIsImtpZCI6InM5OSJ9",
    "eyJhbGciOiJFUzI1NiIsInR5cCI6ImF0K2p3dCIsImtpZCI6InMxIn0",
    "eyJhdWQiOiJ3ZWIifQ",
    "e30",
    "W10",
    "bnVsbA",
    "A",
    "AAAA",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "=",
    "_-",
    "é",
];

#[test]
fn id_token_hint() {
    harness::run("id_token_hint", 1_000, |input| {
        let mut draw = Draw::new(input);
        let url = a_logout_url(&mut draw);
        for text in texts(input, &FRAGMENTS) {
            assert_rejected(&text);
            check_logout(&text, None, draw.pick(&[None, Some(WEB), Some(CLI), Some("x")]), &url);
        }
        check_input(&mut draw, &url);
    });
}

/// Checks that a text is not accepted as an ID token of the App: no random text has a valid signature.
fn assert_rejected(hint: &str) {
    let max_heap = 64 * 1024 + 64 * hint.len() as u64;
    let verified = harness::assert_bounded(1, max_heap, || verify_hint(openid_app(), hint));
    assert!(verified.is_err(), "{hint} is accepted");
}

fn a_logout_url(draw: &mut Draw<'_>) -> String {
    let [web, local] = POST_LOGOUT_URLS;
    let url = draw.pick(&[web, web, local, "http://localhost:8080/bye", "https://evil.example/bye", ""]);
    if draw.flag() { url.to_owned() } else { format!("{url}{}", draw.any_text(8)) }
}

/// Returns claims, and the hint that the server must find in an ID token with these claims; `None` if the server must
/// reject the token.
fn claims(draw: &mut Draw<'_>) -> (Value, Option<Hint>) {
    let [user, session] = [Uuid::from_bytes(draw.array()), Uuid::from_bytes(draw.array())];
    let now = NOW.unix_timestamp();
    let mut claims = json!({
        "iss": openid_app().doc.issuer.as_str(), "aud": draw.pick(&[WEB, CLI, "gone"]),
        "sub": user, "sid": session, "exp": now + 300, "iat": now,
    });
    let hint = json!({ "sub": user, "sid": session, "aud": claims["aud"] });
    let wrong = [
        ("iss", json!("https://auth.example.com/other")),
        ("iss", Value::Null),
        ("aud", json!([WEB])),
        ("aud", json!(7)),
        ("sub", json!("ada")),
        ("sub", json!(7)),
        ("sid", json!("")),
        ("sid", Value::Null),
    ];
    let harmless =
        [("exp", json!(now - 99_999_999)), ("iat", json!(now + 300)), ("nonce", json!("n")), ("x", json!([]))];
    let (name, value) = draw.pick(&harmless);
    claims[name] = value;
    let is_wrong = draw.byte() > 127;
    if is_wrong {
        let (name, value) = draw.pick(&wrong);
        claims[name] = value;
    }
    let hint = (!is_wrong).then(|| Hint {
        sub: serde_json::from_value(hint["sub"].clone()).unwrap(),
        sid: serde_json::from_value(hint["sid"].clone()).unwrap(),
        client_id: hint["aud"].as_str().unwrap().to_owned(),
    });
    (claims, hint)
}

fn check_input(draw: &mut Draw<'_>, url: &str) {
    let app = openid_app();
    let (claims, expected) = claims(draw);
    let token = id_token(&claims);
    assert_eq!(verify_hint(app, &token).ok(), expected, "{claims}");
    check_logout(&token, expected.as_ref(), draw.pick(&[None, Some(WEB), Some(CLI), Some("x")]), url);

    // An access token must not be accepted as a hint, although the App has signed it.
    let access_token = app.keys.signer().sign_access_token(&claims).unwrap();
    assert_eq!(verify_hint(app, &access_token), Err(HintError::Invalid));
    // Signs the claims with a key that is not the App's.
    let of_app = app.keys.signer().id.as_str();
    let header = json!({ "alg": "ES256", "typ": "JWT", "kid": of_app });
    assert_eq!(verify_hint(app, &ES256.sign(&header, &claims)), Err(HintError::Invalid));
    let unknown_key = json!({ "alg": "ES256", "typ": "JWT", "kid": "s99" });
    assert_eq!(verify_hint(app, &ES256.sign(&unknown_key, &claims)), Err(HintError::UnknownKey));
    for alg in ["none", "HS256", "RS256"] {
        let header = json!({ "alg": alg, "typ": "JWT", "kid": of_app });
        assert_rejected(&format!("{}.", signing_input(&header, &claims)));
    }
    // Flips one bit of the token.
    let mut changed = token.into_bytes();
    let at = draw.below(changed.len());
    changed[at] ^= 1 << (draw.byte() & 7);
    if let Ok(changed) = String::from_utf8(changed) {
        assert_rejected(&changed);
    }
}

/// Checks a logout request with this hint. `verified` is the content of the hint, if it is valid.
fn check_logout(hint: &str, verified: Option<&Hint>, client_id: Option<&str>, url: &str) {
    let app = openid_app();
    let all = [("id_token_hint", Some(hint)), ("client_id", client_id), ("post_logout_redirect_uri", Some(url))];
    let sent = all.iter().filter_map(|(name, value)| Some((*name, (*value)?)));
    let parameters = RequestParameters::new(sent.chain([("state", "s 1&")]));
    let max_heap = 64 * 1024 + 64 * (hint.len() + url.len()) as u64;
    let checked = harness::assert_bounded(1, max_heap, || LogoutRequest::check(app, &parameters));
    let is_registered = POST_LOGOUT_URLS.iter().any(|entry| redirect::matches(entry, url));
    match checked {
        Ok(request) => {
            let target = request.redirect_url();
            assert_eq!(target.is_some(), !url.is_empty(), "{url}");
            if let Some(target) = target {
                assert!(is_registered, "{url} is not registered");
                assert_eq!(target, format!("{url}?state=s%201%26"));
            }
            let session = verified.map_or(SessionId(Uuid::nil()), |hint| hint.sid);
            assert_eq!(request.must_ask(Some(session)), verified.is_none(), "without a hint, the user is asked");
        }
        Err(LogoutRequestError::RedirectUrlNotAllowed) => {
            // Only the client WEB has registered logout URLs.
            let named = client_id.or(verified.map(|hint| hint.client_id.as_str()));
            assert!(!is_registered || named != Some(WEB), "{url} is registered");
        }
        Err(LogoutRequestError::InvalidRequest(_) | LogoutRequestError::InvalidClient) => {}
    }
}
