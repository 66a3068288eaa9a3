//! The public keys that verify the tokens of a cluster's ServiceAccounts.

use std::{collections::HashMap, fmt};

use jsonwebtoken::{
    Algorithm, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, PublicKeyUse},
};
use serde::Deserialize;
use serde_json::Value;

/// A set of keys, by their ids.
#[derive(Default)]
pub struct KeySet {
    keys: HashMap<String, VerificationKey>,
    /// The issuer of the tokens, if known.
    issuer: Option<String>,
}

/// A key and its algorithm.
pub(super) struct VerificationKey {
    pub(super) algorithm: Algorithm,
    pub(super) decoding_key: DecodingKey,
}

/// Why a document has no usable keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeySetError {
    #[error("it is not a JWK Set (RFC 7517) at line {line}, column {column}")]
    Malformed { line: usize, column: usize },
    #[error("it has no public key that can verify tokens")]
    Empty,
}

#[derive(Deserialize)]
struct JwksDocument {
    keys: Vec<Value>,
}

// === impl KeySet ===

impl KeySet {
    /// Parses a JWK Set. Keys without an id and keys that cannot verify a token are ignored (RFC 7517, section 5).
    pub fn parse(jwks: &[u8], issuer: Option<String>) -> Result<Self, KeySetError> {
        let document: JwksDocument = serde_json::from_slice(jwks)
            .map_err(|error| KeySetError::Malformed { line: error.line(), column: error.column() })?;
        let keys: HashMap<_, _> = document.keys.into_iter().filter_map(parse_key).collect();
        if keys.is_empty() { Err(KeySetError::Empty) } else { Ok(Self { keys, issuer }) }
    }

    pub fn issuer(&self) -> Option<&str> {
        self.issuer.as_deref()
    }

    pub fn contains(&self, id: &str) -> bool {
        self.keys.contains_key(id)
    }

    pub(super) fn get(&self, id: &str) -> Option<&VerificationKey> {
        self.keys.get(id)
    }
}

impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySet").field("keys", &self.keys.len()).field("issuer", &self.issuer).finish_non_exhaustive()
    }
}

fn parse_key(jwk: Value) -> Option<(String, VerificationKey)> {
    let jwk: Jwk = serde_json::from_value(jwk).ok()?;
    let algorithm = algorithm_of(&jwk)?;
    let decoding_key = DecodingKey::from_jwk(&jwk).ok()?;
    Some((jwk.common.key_id?, VerificationKey { algorithm, decoding_key }))
}

/// The algorithm that the key names, or the default of its type. `None` if the key cannot verify a token. The result is
/// never a symmetric algorithm.
fn algorithm_of(jwk: &Jwk) -> Option<Algorithm> {
    if jwk.common.public_key_use.as_ref().is_some_and(|purpose| *purpose != PublicKeyUse::Signature) {
        return None;
    }
    let (default, family): (_, &[Algorithm]) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, &[Algorithm::RS256, Algorithm::RS384, Algorithm::RS512]),
        AlgorithmParameters::EllipticCurve(curve) => match curve.curve {
            EllipticCurve::P256 => (Algorithm::ES256, &[Algorithm::ES256]),
            EllipticCurve::P384 => (Algorithm::ES384, &[Algorithm::ES384]),
            _ => return None,
        },
        AlgorithmParameters::OctetKeyPair(_) => (Algorithm::EdDSA, &[Algorithm::EdDSA]),
        // The key is symmetric or has an unknown type.
        _ => return None,
    };
    match jwk.common.key_algorithm {
        None => Some(default),
        Some(named) => Algorithm::try_from(named).ok().filter(|named| family.contains(named)),
    }
}

/// Signs tokens in tests.
#[cfg(test)]
pub(super) mod fixtures {
    use aws_lc_rs::{
        rand::SystemRandom,
        signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
    };
    use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
    use serde_json::{Value, json};

    pub(in crate::callers) struct Signer {
        id: &'static str,
        key: EncodingKey,
    }

    impl Signer {
        pub(in crate::callers) fn new(id: &'static str) -> Self {
            let der = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new()).unwrap();
            Self { id, key: EncodingKey::from_ec_der(der.as_ref()) }
        }

        /// The public key, as the API server writes it.
        pub(in crate::callers) fn jwk(&self) -> Value {
            let mut jwk = json!(Jwk::from_encoding_key(&self.key, Algorithm::ES256).unwrap());
            jwk["kid"] = self.id.into();
            jwk["use"] = "sig".into();
            jwk["alg"] = "ES256".into();
            jwk
        }

        pub(in crate::callers) fn sign(&self, claims: &Value) -> String {
            let header = Header { kid: Some(self.id.to_owned()), ..Header::new(Algorithm::ES256) };
            jsonwebtoken::encode(&header, claims, &self.key).unwrap()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{fixtures::Signer, *};

    fn parse(keys: &Value) -> Result<KeySet, KeySetError> {
        KeySet::parse(json!({ "keys": keys }).to_string().as_bytes(), None)
    }

    #[test]
    fn keys_that_cannot_verify_a_signature_are_ignored() {
        let good = Signer::new("good").jwk();
        let key_with = |name: &str, value: &str| {
            let mut key = Signer::new("other").jwk();
            key[name] = value.into();
            key
        };
        let keys = json!([
            good,
            key_with("use", "enc"),
            key_with("alg", "HS256"),
            key_with("alg", "ES384"),
            key_with("alg", "ES512"),
            key_with("kty", "future"),
            { "kty": "oct", "kid": "secret", "k": "c2VjcmV0", "alg": "HS256" },
            { "kid": "nothing" },
            7,
        ]);
        let set = parse(&keys).unwrap();
        assert_eq!(set.keys.keys().collect::<Vec<_>>(), ["good"]);
        assert!(matches!(parse(&json!([key_with("use", "enc")])), Err(KeySetError::Empty)));
    }

    #[test]
    fn a_key_without_an_algorithm_uses_the_default_of_its_type() {
        let mut key = Signer::new("a").jwk();
        key.as_object_mut().unwrap().remove("alg");
        assert_eq!(parse(&json!([key])).unwrap().get("a").unwrap().algorithm, Algorithm::ES256);
    }

    #[test]
    fn the_error_of_an_invalid_key_set_contains_only_the_position() {
        let error = KeySet::parse(b"{\n \"keys\": \"secret\" }", None).unwrap_err();
        assert!(matches!(error, KeySetError::Malformed { line: 2, .. }));
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
