//! Client assertions (RFC 7523): the verification agrees with a simple implementation of the rules, and a forged
//! assertion is rejected.

use std::sync::LazyLock;

use jsonwebtoken::EncodingKey;
use latchkey_server::domain::openid::client_assertion::{AssertionKey, unverified_client_id, verify_assertion};
use serde_json::{Value, json};

use crate::{
    app::NOW,
    draw::{Draw, texts},
    harness,
    provider_keys::{EDDSA, ES256, Signer, signing_input},
};

const CLIENT: &str = "grafana";
const AUDIENCES: [&str; 2] = ["https://auth.example.com/shop", "https://auth.example.com/v1/shop/token"];
const FRAGMENTS: [&str; 20] = [
    ".",
    ".",
    "eyJhbGciOiJub25lIn0",
    "eyJhbGciOiJIUzI1NiIsImtpZCI6ImVzIn0",
    "eyJhbGciOiJFUzI1NiIsImtpZCI6ImVzIn0",
    "eyJhbGciOiJFZERTQSJ9",
    "eyJhbGciOiJSUzI1NiIsImNyaXQiOltdfQ",
    "eyJhbGciOiJQUzI1NiIsImNyaXQiOm51bGx9",
    "e30",
    "eyJzdWIiOiJncmFmYW5hIn0",
    "eyJzdWIiOjd9",
    "W10",
    "bnVsbA",
    "MAYCAQACAQA",
    "A",
    "AAAA",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "=",
    "_-",
    "é",
];

static KEYS: LazyLock<Vec<AssertionKey>> = LazyLock::new(|| {
    let keys = AssertionKey::parse_set(&json!({ "keys": [ES256.jwk, EDDSA.jwk] }).to_string()).unwrap();
    assert_eq!(keys.len(), 2);
    keys
});

#[test]
fn client_assertion() {
    harness::run("client_assertion", 1_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            assert_rejected(&text);
            check_key_set(&text);
        }
        check_input(&mut Draw::new(input));
    });
}

fn assert_rejected(assertion: &str) {
    let max_heap = 64 * 1024 + 16 * assertion.len() as u64;
    let verified =
        harness::assert_bounded(1, max_heap, || verify_assertion(&KEYS, CLIENT, &AUDIENCES, NOW, assertion).is_some());
    assert!(!verified, "{assertion} is accepted");
    let named = harness::assert_bounded(1, max_heap, || unverified_client_id(assertion));
    assert!(named.is_none_or(|named| named.len() < assertion.len()), "{assertion}");
}

/// Checks that parsing any text as a key set has a bounded cost and returns at most eight keys. Servers do not depend
/// on this, because the operator publishes only key sets that it has checked.
fn check_key_set(text: &str) {
    let max_heap = 1024 * 1024 + 256 * text.len() as u64;
    let keys = harness::assert_bounded(2, max_heap, || AssertionKey::parse_set(text));
    assert!(keys.is_none_or(|keys| keys.len() <= 8), "{text}");
}

/// The value of a claim; `None` if the assertion does not have it.
type Claim = Option<Value>;

/// Random claims of an assertion. `claims` contains all of them. The other fields repeat those that the rules check.
struct DrawnClaims {
    claims: Value,
    iss: Claim,
    sub: Claim,
    aud: Claim,
    exp: Claim,
    nbf: Claim,
    iat: Claim,
    jti: Claim,
}

impl DrawnClaims {
    fn draw(draw: &mut Draw<'_>, now: i64) -> Self {
        // Most of the lists below repeat a valid value, so that most assertions have few errors.
        let mut claims = json!({});
        let mut claim = |name: &str, values: &[Value]| -> Claim {
            let value = values.get(draw.below(values.len() + 1)).cloned();
            if let Some(value) = &value {
                claims[name] = value.clone();
            }
            value
        };
        let names = [json!(CLIENT), json!(CLIENT), json!(CLIENT), json!(CLIENT), json!("argocd"), json!(1)];
        let [issuer, token_url] = AUDIENCES.map(|audience| json!(audience));
        let audiences = [
            issuer.clone(),
            token_url.clone(),
            json!([issuer]),
            json!([token_url]),
            token_url.clone(),
            json!([issuer, token_url]),
            json!([token_url, "https://evil.example"]),
            json!("https://evil.example"),
            json!([]),
            json!(1),
        ];
        let exp_values = [
            json!(now + 60),
            json!(now + 60),
            json!(now + 60),
            json!(now + 310),
            json!(now + 311),
            json!(now - 9),
            json!(now - 10),
            json!("soon"),
            json!(1e300),
            json!(-1),
            Value::Null,
        ];
        let begins = [json!(now), json!(now), json!(now + 10), json!(now + 11), json!(0.5), Value::Null, json!("now")];
        let ids =
            [json!("j"), json!("j"), json!("j"), json!("j".repeat(256)), json!("j".repeat(257)), json!(""), json!(7)];
        let (iss, sub, aud) = (claim("iss", &names), claim("sub", &names), claim("aud", &audiences));
        let (exp, nbf, iat) = (claim("exp", &exp_values), claim("nbf", &begins), claim("iat", &begins));
        let jti = claim("jti", &ids);
        Self { claims, iss, sub, aud, exp, nbf, iat, jti }
    }
}

fn check_input(draw: &mut Draw<'_>) {
    let now = NOW.unix_timestamp();
    let signer: &Signer = if draw.flag() { &ES256 } else { &EDDSA };
    let has_crit = draw.byte() == 7;
    let kid =
        (draw.byte() > 63).then(|| draw.pick(&[signer.jwk["kid"].clone(), signer.jwk["kid"].clone(), json!("x")]));
    let drawn = DrawnClaims::draw(draw, now);
    let mut header = json!({ "alg": signer.alg });
    if has_crit {
        header["crit"] = json!(["exp"]);
    }
    if let Some(kid) = &kid {
        header["kid"] = kid.clone();
    }

    let audience = match &drawn.aud {
        Some(Value::Array(audiences)) => audiences.clone(),
        Some(text @ Value::String(_)) => vec![text.clone()],
        _ => Vec::new(),
    };
    let number = |claim: &Claim| claim.as_ref().and_then(Value::as_f64);
    let text = |claim: &Claim| claim.as_ref().and_then(Value::as_str).map(str::to_owned);
    #[expect(clippy::cast_precision_loss, reason = "Unix seconds of this century are exact in f64")]
    let now = now as f64;
    let has_begun = |claim: &Claim| {
        claim.as_ref().is_none_or(Value::is_null) || number(claim).is_some_and(|time| time <= now + 10.0)
    };
    let rules = [
        !has_crit,
        kid.is_none_or(|kid| kid == signer.jwk["kid"]),
        text(&drawn.iss).as_deref() == Some(CLIENT),
        text(&drawn.sub).as_deref() == Some(CLIENT),
        matches!(&audience[..], [only] if AUDIENCES.iter().any(|ours| only == ours)),
        number(&drawn.exp).is_some_and(|exp| now < exp + 10.0 && exp <= now + 310.0),
        has_begun(&drawn.nbf),
        has_begun(&drawn.iat),
        text(&drawn.jti).is_some_and(|jti| (1..=256).contains(&jti.len())),
    ];
    let assertion = signer.sign(&header, &drawn.claims);
    let verified = verify_assertion(&KEYS, CLIENT, &AUDIENCES, NOW, &assertion);
    assert_eq!(verified.is_some(), rules.iter().all(|rule| *rule), "{header} {} {rules:?}", drawn.claims);
    if let Some(verified) = verified {
        assert_eq!(Some(verified.jti), text(&drawn.jti));
        assert_eq!(Some(verified.expires_at), drawn.exp.as_ref().and_then(Value::as_i64));
        assert!(verify_assertion(&KEYS, "argocd", &AUDIENCES, NOW, &assertion).is_none(), "of another client");
        assert!(verify_assertion(&[], CLIENT, &AUDIENCES, NOW, &assertion).is_none(), "of a client without keys");
    }
    assert_eq!(unverified_client_id(&assertion), text(&drawn.sub));
    check_forged_assertions(draw, signer, header, &drawn.claims, &assertion);
}

/// Checks that an assertion with these claims is rejected if the client has not signed it, and that `assertion` is
/// rejected if one bit is changed.
fn check_forged_assertions(draw: &mut Draw<'_>, signer: &Signer, mut header: Value, claims: &Value, assertion: &str) {
    for alg in ["none", "HS256", "RS256", "PS256", "ES384", ""] {
        header["alg"] = json!(alg);
        assert_rejected(&format!("{}.", signing_input(&header, claims)));
    }
    // Signs with HS256, with the public key as the secret.
    header["alg"] = json!("HS256");
    let message = signing_input(&header, claims);
    let secret = EncodingKey::from_secret(signer.jwk.to_string().as_bytes());
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &secret, jsonwebtoken::Algorithm::HS256).unwrap();
    assert_rejected(&format!("{message}.{signature}"));
    // Flips one bit of the signed assertion.
    let mut changed = assertion.to_owned().into_bytes();
    let at = draw.below(changed.len());
    changed[at] ^= 1 << (draw.byte() & 7);
    if let Ok(changed) = String::from_utf8(changed) {
        assert_rejected(&changed);
    }
}
