//! ID tokens of providers: the validation agrees with a simple implementation of the rules (OpenID Connect Core 1.0,
//! section 3.1.3.7).

use std::sync::LazyLock;

use aws_lc_rs::digest::{SHA256, digest};
use jsonwebtoken::EncodingKey;
use latchkey_crds::rendered::ProviderSettings;
use latchkey_server::providers::fuzzing::{Expectation, KeySet};
use serde_json::{Value, json};

use crate::{
    app::NOW,
    draw::{Draw, texts},
    harness,
    provider_keys::{EDDSA, ES256, Signer, signing_input},
};

const ISSUER: &str = "https://accounts.google.com";
const FRAGMENTS: [&str; 14] = [
    ".",
    ".",
    "eyJhbGciOiJub25lIn0",
    "eyJhbGciOiJIUzI1NiIsImtpZCI6ImVzIn0",
    "eyJhbGciOiJFUzI1NiIsImtpZCI6ImVzIn0",
    "e30",
    "A",
    "AAAA",
    "=",
    "_-",
    "bnVsbA",
    "W10",
    "MAYCAQACAQA",
    "eyJhbGciOiJSUzI1NiIsImNyaXQiOltdfQ",
];

static CLIENT: LazyLock<ProviderSettings> = LazyLock::new(|| {
    serde_json::from_value(json!({
        "preset": "google", "clientID": "ours", "additionalClientIDs": ["ours-too"], "secret": "hush",
    }))
    .unwrap()
});

static KEYS: LazyLock<KeySet> =
    LazyLock::new(|| KeySet::parse(json!({ "keys": [ES256.jwk, EDDSA.jwk] }).to_string().as_bytes()).unwrap());

#[test]
fn id_token() {
    harness::run("id_token", 1_000, |input| {
        for text in texts(input, &FRAGMENTS) {
            assert_rejected(&text);
        }
        check_input(&mut Draw::new(input));
    });
}

fn supported_algorithms() -> Vec<String> {
    ["ES256", "EdDSA", "RS256", "HS256", "none"].map(str::to_owned).to_vec()
}

fn expectation(is_login: bool, nonce: Option<&str>) -> Expectation<'_> {
    Expectation { issuer: ISSUER, client: &CLIENT, is_login, nonce }
}

fn assert_rejected(token: &str) {
    let max_heap = 64 * 1024 + 64 * token.len() as u64;
    let verified = harness::assert_bounded(1, max_heap, || {
        KEYS.verify(token, &supported_algorithms(), expectation(true, None), NOW).is_ok()
    });
    assert!(!verified, "{token} is accepted");
}

/// The value of a claim; `None` if the token does not have it.
type Claim = Option<Value>;

/// Random claims of a token. `claims` contains all of them. The other fields repeat those that the rules check.
struct DrawnClaims {
    claims: Value,
    iss: Claim,
    aud: Claim,
    azp: Claim,
    exp: Claim,
    iat: Claim,
    nbf: Claim,
    nonce: Claim,
    sub: Claim,
    typ: Claim,
}

impl DrawnClaims {
    fn draw(draw: &mut Draw<'_>, now: i64, hashed_nonce: &str) -> Self {
        // Most of the lists below repeat a valid value, so that most tokens have few errors.
        let mut claims = json!({});
        let mut claim = |name: &str, values: &[Value], can_be_absent: bool| -> Claim {
            let at = draw.below(values.len() + usize::from(can_be_absent));
            let value = values.get(at).cloned();
            if let Some(value) = &value {
                claims[name] = value.clone();
            }
            value
        };
        let iss =
            claim("iss", &[json!(ISSUER), json!(ISSUER), json!(ISSUER), json!("https://evil.example"), json!(1)], true);
        let audiences = [
            json!("ours"),
            json!("ours"),
            json!("ours"),
            json!(["ours"]),
            json!("ours-too"),
            json!(["ours", "ours-too"]),
            json!("other"),
            json!(["ours", "other"]),
            json!([]),
            json!(["ours", 1]),
            json!(1),
            json!("Ours"),
        ];
        let aud = claim("aud", &audiences, true);
        let parties = [json!("ours"), json!("ours-too"), json!("other"), json!(1)];
        // At least half of the tokens have no `azp`: those that have 0 in `x`, a claim that no rule checks.
        let azp = if claim("x", &[json!(0), json!(1)], false) == Some(json!(0)) {
            None
        } else {
            claim("azp", &parties, true)
        };
        let exp_values = [
            json!(now + 300),
            json!(now + 300),
            json!(now - 59),
            json!(now - 60),
            json!("soon"),
            json!(1e300),
            json!(-1),
        ];
        let exp = claim("exp", &exp_values, true);
        let iat_values =
            [json!(now), json!(now), json!(now + 60), json!(now + 61), json!(0.5), json!(null), json!("now")];
        let iat = claim("iat", &iat_values, true);
        let nbf = claim("nbf", &[json!(now), json!(now + 60), json!(now + 61), json!(true)], true);
        let nonces = [json!("n"), json!("n"), json!(hashed_nonce), json!("m"), json!(1)];
        let nonce = claim("nonce", &nonces, true);
        let subjects = [json!("1"), json!("1"), json!(""), json!(5), json!("s".repeat(255)), json!("s".repeat(256))];
        let sub = claim("sub", &subjects, true);
        let typ = claim("typ", &[json!("JWT"), json!("JWT"), json!("at+jwt"), json!("application/AT+JWT")], true);
        Self { claims, iss, aud, azp, exp, iat, nbf, nonce, sub, typ }
    }
}

fn check_input(draw: &mut Draw<'_>) {
    let now = NOW.unix_timestamp();
    let signer: &Signer = if draw.flag() { &ES256 } else { &EDDSA };
    let (is_login, nonce) = (draw.flag(), draw.flag().then_some("n"));
    let hashed: String = digest(&SHA256, b"n").as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let drawn = DrawnClaims::draw(draw, now, &hashed);
    let has_crit = draw.byte() == 7;
    let kid = draw.pick(&[signer.jwk["kid"].clone(), signer.jwk["kid"].clone(), json!("other")]);
    let has_kid = draw.byte() > 15;

    let mut header = json!({ "alg": signer.alg });
    if let Some(typ) = &drawn.typ {
        header["typ"] = typ.clone();
    }
    if has_crit {
        header["crit"] = json!(["exp"]);
    }
    if has_kid {
        header["kid"] = kid.clone();
    }

    let is_expected_client = |id: &Value| id == "ours" || is_login && id == "ours-too";
    let is_own_client = |id: &Value| id == "ours" || id == "ours-too";
    let audience = match &drawn.aud {
        Some(Value::Array(audiences)) => audiences.clone(),
        Some(text @ Value::String(_)) => vec![text.clone()],
        _ => Vec::new(),
    };
    let number = |claim: &Claim| claim.as_ref().and_then(Value::as_f64);
    #[expect(clippy::cast_precision_loss, reason = "Unix seconds of this century are exact in f64")]
    let now = now as f64;
    let rules = [
        !has_crit,
        !drawn.typ.as_ref().and_then(Value::as_str).is_some_and(|typ| typ.to_ascii_lowercase().ends_with("at+jwt")),
        !has_kid || kid == signer.jwk["kid"],
        drawn.iss == Some(json!(ISSUER)),
        audience.iter().any(is_expected_client),
        audience.iter().all(is_own_client),
        drawn.azp.as_ref().is_none_or(is_expected_client),
        number(&drawn.exp).is_some_and(|exp| now < exp + 60.0),
        number(&drawn.iat).is_some_and(|iat| iat <= now + 60.0),
        drawn.nbf.is_none() || number(&drawn.nbf).is_some_and(|nbf| nbf <= now + 60.0),
        nonce.is_none() || drawn.nonce == Some(json!("n")) || is_login && drawn.nonce == Some(json!(hashed)),
        drawn.sub.as_ref().and_then(Value::as_str).is_some_and(|sub| (1..=255).contains(&sub.len())),
    ];
    let token = signer.sign(&header, &drawn.claims);
    let verified = KEYS.verify(&token, &supported_algorithms(), expectation(is_login, nonce), NOW);
    assert_eq!(verified.is_ok(), rules.iter().all(|rule| *rule), "{header} {} {rules:?} {verified:?}", drawn.claims);
    check_forged_tokens(draw, signer, header, &drawn.claims, &token);
}

/// Checks that a token with these claims is rejected if the provider has not signed it, and that `token` is rejected if
/// one bit is changed.
fn check_forged_tokens(draw: &mut Draw<'_>, signer: &Signer, mut header: Value, claims: &Value, token: &str) {
    for alg in ["none", "HS256", "RS256", "ES384", "PS256", ""] {
        header["alg"] = json!(alg);
        assert_rejected(&format!("{}.", signing_input(&header, claims)));
    }
    // Signs with HS256, with the public key as the secret.
    header["alg"] = json!("HS256");
    let message = signing_input(&header, claims);
    let secret = EncodingKey::from_secret(signer.jwk.to_string().as_bytes());
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &secret, jsonwebtoken::Algorithm::HS256).unwrap();
    assert_rejected(&format!("{message}.{signature}"));
    // Flips one bit of the signed token.
    let mut changed = token.to_owned().into_bytes();
    let at = draw.below(changed.len());
    changed[at] ^= 1 << (draw.byte() & 7);
    if let Ok(changed) = String::from_utf8(changed) {
        assert_rejected(&changed);
    }
}
