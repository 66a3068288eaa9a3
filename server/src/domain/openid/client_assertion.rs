//! Client assertions: `private_key_jwt` (OpenID Connect Core 1.0, 9; RFC 7523, 3).

use std::fmt;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{
    Algorithm, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse},
};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;
use time::OffsetDateTime;

use crate::domain::token::Audiences;

/// The value of `client_assertion_type` (RFC 7523, 2.2).
pub const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
/// The maximum length of an assertion, in bytes. Most have about 1 KiB.
const MAX_ASSERTION_BYTES: usize = 8 * 1024;
/// The maximum number of keys of a client.
const MAX_KEYS: usize = 8;
/// The maximum length of `jti`, in bytes.
const MAX_JTI_BYTES: usize = 256;
/// The longest time from now until an assertion expires, in seconds. Its `jti` is stored until then.
const MAX_LIFETIME: f64 = 300.0;
/// Tolerated clock difference, in seconds.
const LEEWAY: f64 = 10.0;

/// A public key of a client.
pub struct AssertionKey {
    id: Option<Box<str>>,
    algorithms: &'static [Algorithm],
    decoding: DecodingKey,
}

/// A verified assertion. Its content does not show whether it was used before: the caller checks `jti` for that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedAssertion {
    pub jti: String,
    /// Unix seconds.
    pub expires_at: i64,
}

/// The header of an assertion (RFC 7515, 4).
#[derive(Deserialize)]
struct AssertionHeader {
    alg: String,
    kid: Option<String>,
    crit: Option<IgnoredAny>,
}

/// The claims that are read from an assertion. Their numbers can have fractions (RFC 7519, 2).
#[derive(Deserialize)]
struct AssertionClaims {
    iss: String,
    sub: String,
    aud: Audiences,
    exp: f64,
    nbf: Option<f64>,
    iat: Option<f64>,
    jti: String,
}

/// The claim that names the client, before anything is verified.
#[derive(Deserialize)]
struct UnverifiedSubject {
    sub: String,
}

/// The document of a client's keys (RFC 7517, 5).
#[derive(Deserialize)]
struct KeyDocument {
    keys: Vec<Value>,
}

/// Returns the `client_id` that an assertion names. It is not verified: it only selects the keys.
pub fn unverified_client_id(assertion: &str) -> Option<String> {
    if assertion.len() > MAX_ASSERTION_BYTES {
        return None;
    }
    let claims = URL_SAFE_NO_PAD.decode(assertion.split('.').nth(1)?).ok()?;
    serde_json::from_slice::<UnverifiedSubject>(&claims).ok().map(|claims| claims.sub)
}

/// Verifies an assertion of this client: the signature, `iss` = `sub` = `client_id`, the times, and that the only `aud`
/// is one of `audiences`. Returns `None` if a check fails. The caller must check that `jti` is used only once.
pub fn verify_assertion(
    keys: &[AssertionKey],
    client_id: &str,
    audiences: &[&str],
    now: OffsetDateTime,
    assertion: &str,
) -> Option<VerifiedAssertion> {
    if assertion.len() > MAX_ASSERTION_BYTES {
        return None;
    }
    let mut parts = assertion.split('.');
    let (Some(header), Some(claims), Some(signature), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let message = &assertion[..header.len() + 1 + claims.len()];
    let header: AssertionHeader = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header).ok()?).ok()?;
    // No extension is supported, so a header with `crit` must be rejected (RFC 7515, 4.1.11).
    if header.crit.is_some() {
        return None;
    }
    let algorithm = match header.alg.as_str() {
        "RS256" => Algorithm::RS256,
        "PS256" => Algorithm::PS256,
        "ES256" => Algorithm::ES256,
        "EdDSA" => Algorithm::EdDSA,
        _ => return None,
    };
    let mut candidates = keys.iter().filter(|key| key.can_verify(header.kid.as_deref(), algorithm));
    let is_signed = candidates.any(|key| {
        jsonwebtoken::crypto::verify(signature, message.as_bytes(), &key.decoding, algorithm).unwrap_or(false)
    });
    if !is_signed {
        return None;
    }
    let claims: AssertionClaims = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    let is_for_us = match &claims.aud {
        Audiences::One(audience) => audiences.contains(&audience.as_str()),
        Audiences::Several(several) => matches!(&several[..], [one] if audiences.contains(&one.as_str())),
    };
    let is_own = claims.iss == client_id && claims.sub == client_id;
    let has_jti = (1..=MAX_JTI_BYTES).contains(&claims.jti.len());
    if !is_for_us || !is_own || !has_jti || !claims.is_valid_at(now) {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "the time is at most 310 s after now")]
    let expires_at = claims.exp.ceil() as i64;
    Some(VerifiedAssertion { jti: claims.jti, expires_at })
}

// === impl AssertionClaims ===

impl AssertionClaims {
    fn is_valid_at(&self, now: OffsetDateTime) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "an f64 represents seconds since 1970 exactly up to 2^53")]
        let now = now.unix_timestamp() as f64;
        let has_begun = |time: Option<f64>| time.is_none_or(|time| time <= now + LEEWAY);
        let ends_in_time = now < self.exp + LEEWAY && self.exp <= now + MAX_LIFETIME + LEEWAY;
        ends_in_time && has_begun(self.nbf) && has_begun(self.iat)
    }
}

// === impl AssertionKey ===

impl AssertionKey {
    /// Parses a JWK Set. Keys that cannot verify an assertion are left out. `None` if the text is not a JWK Set.
    pub fn parse_set(jwks: &str) -> Option<Vec<Self>> {
        let document: KeyDocument = serde_json::from_str(jwks).ok()?;
        Some(document.keys.into_iter().take(MAX_KEYS).filter_map(Self::parse).collect())
    }

    fn parse(jwk: Value) -> Option<Self> {
        let jwk: Jwk = serde_json::from_value(jwk).ok()?;
        if jwk.common.public_key_use.as_ref().is_some_and(|purpose| *purpose != PublicKeyUse::Signature) {
            return None;
        }
        let of_type: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => &[Algorithm::RS256, Algorithm::PS256],
            AlgorithmParameters::EllipticCurve(curve) if curve.curve == EllipticCurve::P256 => &[Algorithm::ES256],
            AlgorithmParameters::OctetKeyPair(pair) if pair.curve == EllipticCurve::Ed25519 => &[Algorithm::EdDSA],
            // A symmetric key, or a type that is not supported.
            _ => return None,
        };
        let algorithms = match jwk.common.key_algorithm {
            None => of_type,
            Some(named) => {
                let named = Algorithm::try_from(named).ok()?;
                let index = of_type.iter().position(|algorithm| *algorithm == named)?;
                &of_type[index..=index]
            }
        };
        let decoding = DecodingKey::from_jwk(&jwk).ok()?;
        Some(Self { id: jwk.common.key_id.map(String::into_boxed_str), algorithms, decoding })
    }

    /// Whether the id and the algorithms of the key allow it to verify the assertion. A key without an id matches every
    /// `kid`, and an assertion without a `kid` matches every key.
    fn can_verify(&self, key_id: Option<&str>, algorithm: Algorithm) -> bool {
        let is_named = match (&self.id, key_id) {
            (Some(own), Some(named)) => **own == *named,
            (None, _) | (_, None) => true,
        };
        is_named && self.algorithms.contains(&algorithm)
    }
}

impl fmt::Debug for AssertionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AssertionKey").field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header};
    use latchkey_crds::rendered::{KeyState, SigningAlgorithm};
    use serde_json::json;
    use time::macros::datetime;

    use super::*;
    use crate::fixtures;

    const NOW: OffsetDateTime = datetime!(2030-01-02 03:04:05 UTC);
    const ISSUER: &str = "https://auth.example.com/shop";
    const TOKEN_URL: &str = "https://auth.example.com/v1/shop/token";

    /// A client's key pair.
    struct Signer {
        key: EncodingKey,
        algorithm: Algorithm,
        jwk: Value,
    }

    impl Signer {
        fn new(algorithm: SigningAlgorithm) -> Self {
            let pem = fixtures::signing_key("k", algorithm, KeyState::Active).private_key;
            let pem = pem.expose().as_bytes();
            let (key, algorithm) = match algorithm {
                SigningAlgorithm::ES256 => (EncodingKey::from_ec_pem(pem), Algorithm::ES256),
                SigningAlgorithm::EdDSA => (EncodingKey::from_ed_pem(pem), Algorithm::EdDSA),
                SigningAlgorithm::RS256 => (EncodingKey::from_rsa_pem(pem), Algorithm::RS256),
            };
            let key = key.unwrap();
            let mut jwk = json!(Jwk::from_encoding_key(&key, algorithm).unwrap());
            jwk["kid"] = "k1".into();
            Self { key, algorithm, jwk }
        }

        fn keys(&self) -> Vec<AssertionKey> {
            AssertionKey::parse_set(&json!({ "keys": [self.jwk] }).to_string()).unwrap()
        }

        fn sign(&self, claims: &Value) -> String {
            self.sign_with(Header { kid: Some("k1".to_owned()), ..Header::new(self.algorithm) }, claims)
        }

        fn sign_with(&self, header: Header, claims: &Value) -> String {
            jsonwebtoken::encode(&header, claims, &self.key).unwrap()
        }
    }

    fn good_claims() -> Value {
        let now = NOW.unix_timestamp();
        json!({ "iss": "grafana", "sub": "grafana", "aud": TOKEN_URL, "exp": now + 60, "iat": now, "jti": "j-1" })
    }

    fn verify(keys: &[AssertionKey], assertion: &str) -> Option<VerifiedAssertion> {
        verify_assertion(keys, "grafana", &[ISSUER, TOKEN_URL], NOW, assertion)
    }

    #[test]
    fn an_assertion_of_each_algorithm_is_accepted() {
        let expected = VerifiedAssertion { jti: "j-1".to_owned(), expires_at: NOW.unix_timestamp() + 60 };
        for algorithm in [SigningAlgorithm::ES256, SigningAlgorithm::EdDSA, SigningAlgorithm::RS256] {
            let signer = Signer::new(algorithm);
            let assertion = signer.sign(&good_claims());
            assert_eq!(verify(&signer.keys(), &assertion), Some(expected.clone()), "{algorithm:?}");
            assert_eq!(unverified_client_id(&assertion).as_deref(), Some("grafana"));
            let without_kid = signer.sign_with(Header::new(signer.algorithm), &good_claims());
            assert!(verify(&signer.keys(), &without_kid).is_some());
            assert!(verify(&Signer::new(algorithm).keys(), &assertion).is_none(), "another key");
        }
        let mut signer = Signer::new(SigningAlgorithm::RS256);
        let assertion =
            signer.sign_with(Header { kid: Some("k1".to_owned()), ..Header::new(Algorithm::PS256) }, &good_claims());
        assert!(verify(&signer.keys(), &assertion).is_none(), "the key is for RS256 only");
        signer.jwk.as_object_mut().unwrap().remove("alg");
        assert!(verify(&signer.keys(), &assertion).is_some());
    }

    #[test]
    fn an_assertion_with_a_wrong_claim_is_refused() {
        let signer = Signer::new(SigningAlgorithm::ES256);
        let now = NOW.unix_timestamp();
        let is_accepted = |name: &str, value: Value| {
            let mut claims = good_claims();
            claims[name] = value;
            verify(&signer.keys(), &signer.sign(&claims)).is_some()
        };
        for (name, value) in [
            ("aud", json!(ISSUER)),
            ("aud", json!([TOKEN_URL])),
            ("exp", json!(now + 310)),
            ("exp", json!(now - 9)),
            ("exp", serde_json::from_str(&format!("{now}.5")).unwrap()),
            ("nbf", json!(now + 10)),
            ("iat", json!(now + 10)),
            ("jti", json!("j".repeat(256))),
        ] {
            assert!(is_accepted(name, value.clone()), "{name}: {value}");
        }
        for (name, value) in [
            ("iss", json!("argocd")),
            ("sub", json!("argocd")),
            ("iss", Value::Null),
            ("aud", json!("https://auth.example.com/other")),
            ("aud", json!([TOKEN_URL, ISSUER])),
            ("aud", json!([])),
            ("aud", Value::Null),
            ("exp", json!(now + 311)),
            ("exp", json!(now - 10)),
            ("exp", json!("soon")),
            ("exp", Value::Null),
            ("nbf", json!(now + 11)),
            ("iat", json!(now + 11)),
            ("jti", json!("")),
            ("jti", json!("j".repeat(257))),
            ("jti", Value::Null),
            ("jti", json!(7)),
        ] {
            assert!(!is_accepted(name, value.clone()), "{name}: {value}");
        }
    }

    #[test]
    fn malformed_assertions_are_refused() {
        let signer = Signer::new(SigningAlgorithm::ES256);
        let good = signer.sign(&good_claims());
        let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let [header, claims, signature] = good.split('.').collect::<Vec<_>>()[..] else { panic!("three parts") };
        let none = encode(r#"{"alg":"none","kid":"k1"}"#);
        let hmac = encode(r#"{"alg":"HS256","kid":"k1"}"#);
        let critical = encode(r#"{"alg":"ES256","kid":"k1","crit":["exp"]}"#);
        let other_key = encode(r#"{"alg":"ES256","kid":"k2"}"#);
        for bad in [
            String::new(),
            "x".to_owned(),
            "..".to_owned(),
            format!("{header}.{claims}"),
            format!("{header}.{claims}."),
            format!("{good}.x"),
            format!("{none}.{claims}."),
            format!("{none}.{claims}.{signature}"),
            format!("{hmac}.{claims}.{signature}"),
            format!("{critical}.{claims}.{signature}"),
            format!("{other_key}.{claims}.{signature}"),
            format!("{header}.{}.{signature}", encode("{}")),
            format!("{}.{claims}.{signature}", encode("[]")),
            format!("{header}=.{claims}.{signature}"),
            format!("{header}.{claims}.{}", &signature[1..]),
            format!("{header}.{claims}.é"),
            format!("{}.{claims}.{signature}", "a".repeat(9000)),
        ] {
            assert_eq!(verify(&signer.keys(), &bad), None, "{bad:.60}");
        }
        for bad in ["", "x", "a.%.c", "a.e30.c", &"a".repeat(9000)] {
            assert_eq!(unverified_client_id(bad), None, "{bad:.20}");
        }
    }

    #[test]
    fn only_keys_that_can_verify_an_assertion_are_read() {
        let mut keys: Vec<Value> = Vec::new();
        for (name, value) in [("use", "enc"), ("alg", "RS256"), ("alg", "HS256"), ("kty", "oct"), ("crv", "P-384")] {
            let mut jwk = Signer::new(SigningAlgorithm::ES256).jwk;
            jwk[name] = value.into();
            keys.push(jwk);
        }
        keys.push(json!(7));
        assert!(AssertionKey::parse_set(&json!({ "keys": keys }).to_string()).unwrap().is_empty());
        let mut rsa = Signer::new(SigningAlgorithm::RS256);
        rsa.jwk["alg"] = "PS256".into();
        let keys = rsa.keys();
        assert!(keys[0].can_verify(Some("k1"), Algorithm::PS256));
        assert!(!keys[0].can_verify(Some("k1"), Algorithm::RS256), "the key names its algorithm");
        assert!(!keys[0].can_verify(Some("k2"), Algorithm::PS256));
        assert_eq!(AssertionKey::parse_set(&json!({ "keys": vec![&rsa.jwk; 9] }).to_string()).unwrap().len(), 8);
    }
}
