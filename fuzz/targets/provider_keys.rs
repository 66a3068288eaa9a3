//! The keys of a fictional provider.

use std::sync::LazyLock;

use aws_lc_rs::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, jwk::Jwk};
use serde_json::{Value, json};

/// A key pair: the private key, and the published JWK.
pub(crate) struct Signer {
    key: EncodingKey,
    algorithm: Algorithm,
    /// The algorithm name in the header of tokens.
    pub(crate) alg: &'static str,
    pub(crate) jwk: Value,
}

pub(crate) static ES256: LazyLock<Signer> = LazyLock::new(|| {
    let der = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new()).unwrap();
    Signer::new("es", "ES256", Algorithm::ES256, EncodingKey::from_ec_der(der.as_ref()))
});

pub(crate) static EDDSA: LazyLock<Signer> = LazyLock::new(|| {
    let der = Ed25519KeyPair::generate_pkcs8v1(&SystemRandom::new()).unwrap();
    Signer::new("ed", "EdDSA", Algorithm::EdDSA, EncodingKey::from_ed_der(der.as_ref()))
});

// === impl Signer ===

impl Signer {
    fn new(id: &str, alg: &'static str, algorithm: Algorithm, key: EncodingKey) -> Self {
        let mut jwk = serde_json::to_value(Jwk::from_encoding_key(&key, algorithm).unwrap()).unwrap();
        jwk["kid"] = json!(id);
        jwk["use"] = json!("sig");
        Self { key, algorithm, alg, jwk }
    }

    /// Signs a token. The header can be invalid.
    pub(crate) fn sign(&self, header: &Value, claims: &Value) -> String {
        let message = signing_input(header, claims);
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &self.key, self.algorithm).unwrap();
        format!("{message}.{signature}")
    }
}

/// The encoded header and claims of a token, without a signature.
pub(crate) fn signing_input(header: &Value, claims: &Value) -> String {
    format!("{}.{}", URL_SAFE_NO_PAD.encode(header.to_string()), URL_SAFE_NO_PAD.encode(claims.to_string()))
}
