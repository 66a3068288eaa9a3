//! Tokens as a cluster makes them for its ServiceAccounts, signed by a key of our own: for servers without a cluster.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
use rcgen::KeyPair;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::postgres::write_private;

/// The audience that callers of Latchkey ask for.
pub const AUDIENCE: &str = "latchkey";

/// Signs tokens of ServiceAccounts.
pub struct Issuer {
    id: String,
    pem: String,
    key: EncodingKey,
}

// === impl Issuer ===

impl Issuer {
    /// With a new key.
    pub fn new() -> Result<Self> {
        Self::of(&KeyPair::generate()?.serialize_pem())
    }

    /// With the key in this file, made where it is missing.
    pub fn kept_in(path: &Path) -> Result<Self> {
        if path.exists() {
            let pem = fs::read_to_string(path)?;
            return Self::of(&pem).with_context(|| format!("{} is no key; remove it to get a new one", path.display()));
        }
        let issuer = Self::new()?;
        write_private(path, &issuer.pem)?;
        Ok(issuer)
    }

    fn of(pem: &str) -> Result<Self> {
        let key = EncodingKey::from_ec_pem(pem.as_bytes())?;
        let jwk = Jwk::from_encoding_key(&key, Algorithm::ES256)?;
        let id = jwk.thumbprint(jsonwebtoken::jwk::ThumbprintHash::SHA256)?;
        Ok(Self { id, pem: pem.to_owned(), key })
    }

    /// The private key, PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The public key, as the API server has it under `/openid/v1/jwks`.
    pub fn jwks(&self) -> Result<Value> {
        let mut jwk = json!(Jwk::from_encoding_key(&self.key, Algorithm::ES256)?);
        jwk["kid"] = json!(self.id);
        jwk["use"] = json!("sig");
        jwk["alg"] = json!("ES256");
        Ok(json!({ "keys": [jwk] }))
    }

    /// A token of a ServiceAccount, as a projected volume holds it.
    pub fn token(&self, namespace: &str, name: &str, audience: &str, lifetime: Duration) -> Result<String> {
        self.sign(&claims(namespace, name, audience, lifetime)?)
    }

    /// Any claims.
    pub fn sign(&self, claims: &Value) -> Result<String> {
        let header = Header { kid: Some(self.id.clone()), ..Header::new(Algorithm::ES256) };
        Ok(jsonwebtoken::encode(&header, claims, &self.key)?)
    }
}

/// What such a token says.
pub fn claims(namespace: &str, name: &str, audience: &str, lifetime: Duration) -> Result<Value> {
    let now = now()?;
    Ok(json!({
        "iss": "https://kubernetes.default.svc.cluster.local",
        "sub": format!("system:serviceaccount:{namespace}:{name}"),
        "aud": [audience],
        "iat": now,
        "nbf": now,
        "exp": now + lifetime.as_secs(),
        "jti": Uuid::now_v7(),
        "kubernetes.io": { "namespace": namespace, "serviceaccount": { "name": name, "uid": Uuid::now_v7() } },
    }))
}

#[expect(clippy::disallowed_methods, reason = "tokens are made for programs that go by the machine's clock")]
fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}
