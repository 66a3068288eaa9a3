//! Key sets, discovery documents and profiles of providers: every value that the parser returns is in the document, and
//! no symmetric key is accepted.

use std::sync::LazyLock;

use latchkey_crds::rendered::ProviderSettings;
use latchkey_server::{
    callers,
    domain::{email::Email, user::Name},
    providers::fuzzing::{Expectation, GROUPS_PREFIX, KeySet, discovery_urls, has_posted_name, identity_from_profile},
};
use serde_json::{Value, json};

use crate::{
    app::NOW,
    draw::{Draw, texts},
    harness,
    provider_keys::{EDDSA, ES256, Signer},
};

const URL_NAMES: [&str; 4] = ["issuer", "authorization_endpoint", "token_endpoint", "jwks_uri"];
const FRAGMENTS: [&str; 48] = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"",
    "\"\"",
    "1",
    "-1",
    "true",
    "null",
    "\"keys\":[",
    "\"kty\":",
    "\"EC\"",
    "\"RSA\"",
    "\"OKP\"",
    "\"oct\"",
    "\"crv\":",
    "\"P-256\"",
    "\"P-384\"",
    "\"Ed25519\"",
    "\"x\":",
    "\"y\":",
    "\"n\":",
    "\"e\":",
    "\"k\":",
    "\"AQAB\"",
    "\"AAAA\"",
    "\"kid\":",
    "\"a\"",
    "\"use\":\"sig\"",
    "\"use\":\"enc\"",
    "\"alg\":\"ES256\"",
    "\"alg\":\"HS256\"",
    "\"issuer\":",
    "\"https://id.example\"",
    "\"authorization_endpoint\":\"https://id.example/a\"",
    "\"token_endpoint\":\"https://id.example/t\"",
    "\"jwks_uri\":\"https://id.example/k\"",
    "\"userinfo_endpoint\":",
    "\"sub\":",
    "\"email\":",
    "\"email_verified\":",
    "\"ada@example.com\"",
    "\"name\":",
    "\"Ada\"",
    "\"true\"",
];

static CLIENT: LazyLock<ProviderSettings> = LazyLock::new(|| {
    serde_json::from_value(json!({
        "preset": "oauth2", "clientID": "ours", "secret": "hush",
        "options": {
            "userInfoURL": "https://id.example/u",
            "claims": { "subject": "sub", "email": "email", "emailVerified": "email_verified", "name": "name" },
        },
    }))
    .unwrap()
});

#[test]
fn provider_documents() {
    harness::run("provider_documents", 500, |input| {
        check_input(input);
        for text in texts(input, &FRAGMENTS) {
            check_input(text.as_bytes());
            check_input(format!("{{{text}}}").as_bytes());
            check_input(format!("{{\"keys\":[{{{text}}}]}}").as_bytes());
        }
        check_key_sets(&mut Draw::new(input));
        check_discovery_documents(&mut Draw::new(input));
        check_profiles(&mut Draw::new(input));
    });
}

fn check_input(body: &[u8]) {
    let max_heap = 128 * 1024 + 256 * body.len() as u64;
    let document = serde_json::from_slice::<Value>(body).ok();
    if let Some(urls) = harness::assert_bounded(1, max_heap, || discovery_urls(body)) {
        let document = document.as_ref().expect("a document that parses is JSON");
        for (name, url) in URL_NAMES.into_iter().zip(&urls) {
            assert_eq!(document[name], json!(url), "{name}");
        }
    }
    harness::assert_bounded(1, max_heap, || KeySet::parse(body));
    if let Some(identity) = harness::assert_bounded(1, max_heap, || identity_from_profile(body, &CLIENT)) {
        let document = document.as_ref().expect("a document that parses is JSON");
        assert_matches_document(&identity, document);
    }
    if let Ok(text) = std::str::from_utf8(body) {
        harness::assert_bounded(1, max_heap, || has_posted_name(text));
    }
    drop(harness::assert_bounded(1, max_heap, || callers::KeySet::parse(body, None)));
}

fn assert_matches_document(identity: &latchkey_server::domain::identity::VerifiedIdentity, document: &Value) {
    let subject = &document["sub"];
    let subject = subject.as_str().map_or_else(|| subject.to_string(), str::to_owned);
    assert_eq!(subject, identity.subject, "{identity:?} of {document}");
    assert!((1..=255).contains(&identity.subject.len()));
    if let Some(reported) = &identity.email {
        assert_eq!(document["email"], json!(reported.email.as_str()));
        let claim = &document["email_verified"];
        assert_eq!(reported.is_verified, *claim == json!(true) || *claim == json!("true"), "{document}");
    }
    if let Some(name) = &identity.name {
        let claim = &document["name"];
        assert_eq!(claim.as_str().map_or_else(|| claim.to_string(), |text| text.trim().to_owned()), name.as_str());
    }
    assert!(identity.groups.len() <= 500 && identity.groups.is_sorted());
    for group in &identity.groups {
        let name = group.as_str().strip_prefix(GROUPS_PREFIX).expect("each group has the prefix");
        let claim = document["groups"].as_array().expect("only an array has groups");
        assert!(claim.iter().any(|item| item == name), "{group} of {document}");
    }
}

/// In a set of valid and invalid keys, only the valid keys verify signatures.
fn check_key_sets(draw: &mut Draw<'_>) {
    let jwk_with = |signer: &Signer, name: &str, value: Value| {
        let mut jwk = signer.jwk.clone();
        jwk[name] = value;
        jwk
    };
    let invalid_keys = [
        jwk_with(&ES256, "use", json!("enc")),
        jwk_with(&ES256, "x", json!("AAAA")),
        jwk_with(&ES256, "y", ES256.jwk["x"].clone()),
        jwk_with(&ES256, "crv", json!("P-521x")),
        jwk_with(&ES256, "alg", json!("HS256")),
        jwk_with(&EDDSA, "alg", json!("ES256")),
        jwk_with(&EDDSA, "kty", json!("future")),
        json!({ "kty": "oct", "kid": "es", "k": ES256.jwk["x"], "alg": "HS256" }),
        json!({ "kty": "oct", "kid": "ed", "k": EDDSA.jwk["x"], "alg": "HS256" }),
        json!(7),
        json!(null),
    ];
    let (mut keys, mut has_es256) = (Vec::new(), false);
    for _ in 0..draw.byte() & 7 {
        if draw.byte() < 64 {
            has_es256 = true;
            keys.push(ES256.jwk.clone());
        } else {
            keys.push(draw.pick(&invalid_keys));
        }
    }
    let body = json!({ "keys": keys }).to_string();
    let set = KeySet::parse(body.as_bytes()).expect("a key set");
    // If the parser for provider keys accepts no key of the set, the parser for cluster keys rejects the set.
    assert!(!set.is_empty() || callers::KeySet::parse(body.as_bytes(), None).is_err(), "{body}");
    let supported = ["ES256", "EdDSA", "HS256"].map(str::to_owned);
    let client: ProviderSettings =
        serde_json::from_value(json!({ "preset": "google", "clientID": "ours", "secret": "hush" })).unwrap();
    let expected = Expectation { issuer: "https://accounts.google.com", client: &client, is_login: true, nonce: None };
    let now = NOW.unix_timestamp();
    let claims = json!({ "iss": expected.issuer, "aud": "ours", "sub": "1", "iat": now, "exp": now + 300 });
    let verifies = |signer: &Signer| {
        let token = signer.sign(&json!({ "alg": signer.alg, "kid": signer.jwk["kid"] }), &claims);
        set.verify(&token, &supported, expected, NOW).is_ok()
    };
    assert_eq!(verifies(&ES256), has_es256, "{keys:?}");
    assert!(!verifies(&EDDSA), "{keys:?}");
    // Signs with the symmetric key that has the key id of the ES256 key.
    let symmetric_jwk: jsonwebtoken::jwk::Jwk = serde_json::from_value(invalid_keys[7].clone()).unwrap();
    let secret = jsonwebtoken::DecodingKey::from_jwk(&symmetric_jwk).unwrap();
    let secret = jsonwebtoken::EncodingKey::from_secret(secret.try_get_as_bytes().unwrap());
    let header = jsonwebtoken::Header { kid: Some("es".to_owned()), ..Default::default() };
    let forged = jsonwebtoken::encode(&header, &claims, &secret).unwrap();
    assert!(set.verify(&forged, &supported, expected, NOW).is_err(), "a symmetric key is accepted: {keys:?}");
}

fn check_discovery_documents(draw: &mut Draw<'_>) {
    let mut document = json!({});
    for name in URL_NAMES.into_iter().chain(["userinfo_endpoint", "introspection_endpoint"]) {
        document[name] = json!(format!("https://id.example/{}", draw.any_text(40)));
    }
    document["id_token_signing_alg_values_supported"] = json!(["RS256", "none"]);
    document["scopes_supported"] = json!([draw.any_text(20)]);
    let expected: Vec<_> = URL_NAMES.into_iter().map(|name| document[name].clone()).collect();
    let urls = discovery_urls(document.to_string().as_bytes()).expect("a discovery document");
    assert_eq!(urls[..4].iter().map(|url| json!(url)).collect::<Vec<_>>(), expected);

    let dropped = draw.pick(&URL_NAMES);
    document.as_object_mut().unwrap().remove(dropped);
    assert_eq!(discovery_urls(document.to_string().as_bytes()), None, "without {dropped}");
}

fn check_profiles(draw: &mut Draw<'_>) {
    let values = [
        json!("1"),
        json!("ada@example.com"),
        json!("Ada"),
        json!(""),
        json!(7),
        json!(1.5),
        json!(true),
        json!("true"),
        json!(1),
        json!([]),
        json!(null),
    ];
    let mut document = json!({});
    for name in ["sub", "email", "email_verified", "name"] {
        document[name] = if draw.byte() < 64 { json!(draw.any_text(260)) } else { draw.pick(&values) };
    }
    let groups = [json!(draw.any_text(140)), json!(draw.any_text(140)), draw.pick(&values)];
    document["groups"] = if draw.byte() < 200 { json!(groups) } else { draw.pick(&values) };
    let identity = identity_from_profile(document.to_string().as_bytes(), &CLIENT);
    let has_valid_subject = match &document["sub"] {
        Value::String(text) => (1..=255).contains(&text.len()),
        number => number.is_i64() || number.is_u64(),
    };
    assert_eq!(identity.is_some(), has_valid_subject, "{document}");
    if let Some(identity) = identity {
        assert_matches_document(&identity, &document);
        let is_email_address = document["email"].as_str().is_some_and(|email| Email::parse(email).is_ok());
        assert_eq!(identity.email.is_some(), is_email_address, "{document}");
        let name = &document["name"];
        let is_name = name.is_i64() || name.as_str().is_some_and(|name| Name::parse(name).is_ok());
        assert_eq!(identity.name.is_some(), is_name, "{document}");
    }
}
