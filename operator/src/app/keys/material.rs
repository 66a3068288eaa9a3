//! Generates the secret values of keys, and checks stored values.

use aws_lc_rs::{
    encoding::AsDer,
    error::Unspecified,
    rand::{SecureRandom, SystemRandom},
    rsa::{KeyPair as RsaKeyPair, KeySize},
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::rendered::{SecretString, SigningAlgorithm};

const PEM_BEGIN: &str = "-----BEGIN PRIVATE KEY-----";
const PEM_END: &str = "-----END PRIVATE KEY-----";
/// The length of an HMAC key, in bytes.
const HMAC_KEY_LENGTH: usize = 32;

/// The error if no key could be generated, for example because the system returned no random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no key could be generated")]
pub(crate) struct KeyGenerationError;

impl From<Unspecified> for KeyGenerationError {
    fn from(_: Unspecified) -> Self {
        Self
    }
}

/// Generates a private key, in PEM.
pub(super) fn generate_private_key(algorithm: SigningAlgorithm) -> Result<SecretString, KeyGenerationError> {
    let random = SystemRandom::new();
    let der = match algorithm {
        SigningAlgorithm::ES256 => {
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)?.as_ref().to_vec()
        }
        // The private key is written in version 1 of PKCS#8, which every library reads.
        SigningAlgorithm::EdDSA => Ed25519KeyPair::generate_pkcs8v1(&random)?.as_ref().to_vec(),
        SigningAlgorithm::RS256 => RsaKeyPair::generate(KeySize::Rsa2048)?.as_der()?.as_ref().to_vec(),
    };
    Ok(SecretString::new(to_pem(&der)))
}

pub(super) fn is_private_key(pem: &str, algorithm: SigningAlgorithm) -> bool {
    let Some(der) = from_pem(pem) else { return false };
    match algorithm {
        SigningAlgorithm::ES256 => EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &der).is_ok(),
        SigningAlgorithm::EdDSA => Ed25519KeyPair::from_pkcs8(&der).is_ok(),
        SigningAlgorithm::RS256 => RsaKeyPair::from_pkcs8(&der).is_ok(),
    }
}

/// Generates an HMAC key, in base64.
pub(super) fn generate_hmac_secret() -> Result<SecretString, KeyGenerationError> {
    let mut secret = [0; HMAC_KEY_LENGTH];
    SystemRandom::new().fill(&mut secret)?;
    Ok(SecretString::new(STANDARD.encode(secret)))
}

pub(super) fn is_hmac_secret(secret: &str) -> bool {
    STANDARD.decode(secret).is_ok_and(|key| key.len() == HMAC_KEY_LENGTH)
}

/// Generates a random value for [`KeyDocument::incarnation`](super::KeyDocument::incarnation).
pub(super) fn new_incarnation() -> Result<String, KeyGenerationError> {
    let mut random = [0; 16];
    SystemRandom::new().fill(&mut random)?;
    Ok(uuid::Builder::from_random_bytes(random).into_uuid().to_string())
}

/// Encodes PKCS#8 as PEM: base64 in lines of 64 characters (RFC 7468).
fn to_pem(der: &[u8]) -> String {
    let base64 = STANDARD.encode(der);
    let mut pem = format!("{PEM_BEGIN}\n");
    for (index, symbol) in base64.chars().enumerate() {
        if index > 0 && index % 64 == 0 {
            pem.push('\n');
        }
        pem.push(symbol);
    }
    pem.push_str(&format!("\n{PEM_END}\n"));
    pem
}

/// Decodes a private key in PEM to DER.
pub(crate) fn from_pem(pem: &str) -> Option<Vec<u8>> {
    let body = pem.trim().strip_prefix(PEM_BEGIN)?.strip_suffix(PEM_END)?;
    STANDARD.decode(body.split_ascii_whitespace().collect::<String>()).ok()
}
