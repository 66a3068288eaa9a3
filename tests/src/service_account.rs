//! ServiceAccount tokens like those of a cluster, for servers outside a cluster.

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

/// The audience of ServiceAccount tokens for Latchkey.
pub const AUDIENCE: &str = "latchkey";

/// Signs ServiceAccount tokens.
pub struct ServiceAccountIssuer {
    id: String,
    pem: String,
    key: EncodingKey,
}

// === impl ServiceAccountIssuer ===

impl ServiceAccountIssuer {
    /// An issuer with a new key.
    pub fn new() -> Result<Self> {
        Self::from_pem(&KeyPair::generate()?.serialize_pem())
    }

    /// An issuer with the key in this file. Creates key and file if the file does not exist.
    pub fn load_or_create(path: &Path) -> Result<Self> {
        if path.exists() {
            let pem = fs::read_to_string(path)?;
            return Self::from_pem(&pem)
                .with_context(|| format!("{} is not a key; delete it to renew it", path.display()));
        }
        let issuer = Self::new()?;
        write_private(path, &issuer.pem)?;
        Ok(issuer)
    }

    fn from_pem(pem: &str) -> Result<Self> {
        let key = EncodingKey::from_ec_pem(pem.as_bytes())?;
        let jwk = Jwk::from_encoding_key(&key, Algorithm::ES256)?;
        let id = jwk.thumbprint(jsonwebtoken::jwk::ThumbprintHash::SHA256)?;
        Ok(Self { id, pem: pem.to_owned(), key })
    }

    /// The private key, PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The public key in the format of the API server's `/openid/v1/jwks`.
    pub fn jwks(&self) -> Result<Value> {
        let mut jwk = json!(Jwk::from_encoding_key(&self.key, Algorithm::ES256)?);
        jwk["kid"] = json!(self.id);
        jwk["use"] = json!("sig");
        jwk["alg"] = json!("ES256");
        Ok(json!({ "keys": [jwk] }))
    }

    /// A token of a ServiceAccount, as in a projected volume.
    pub fn token(&self, namespace: &str, name: &str, audience: &str, lifetime: Duration) -> Result<String> {
        self.sign(&claims(namespace, name, audience, lifetime)?)
    }

    /// A token with any claims.
    pub fn sign(&self, claims: &Value) -> Result<String> {
        let header = Header { kid: Some(self.id.clone()), ..Header::new(Algorithm::ES256) };
        Ok(jsonwebtoken::encode(&header, claims, &self.key)?)
    }
}

/// The claims of a ServiceAccount token.
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

#[expect(clippy::disallowed_methods, reason = "programs check tokens by the machine's clock")]
fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}
