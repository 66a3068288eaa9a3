//! Callers in the cluster: ServiceAccounts, authenticated by the tokens that the cluster signs for them.

use std::{fmt, path::PathBuf, time::Instant};

use jsonwebtoken::Validation;
use serde::Deserialize;
use time::OffsetDateTime;

use crate::domain::{clock::Env, token::Audiences};

pub mod cluster;
mod file;
#[doc(hidden)]
pub mod fuzzing;
mod keys;

use cluster::ClusterKeys;
use file::FileKeys;
pub use file::KeyFileError;
pub use keys::{KeySet, KeySetError};

/// The audience of ServiceAccount tokens for Latchkey.
pub const AUDIENCE: &str = "latchkey";
/// A new token is accepted this many seconds before its `nbf`, because clocks differ. The API server uses the same
/// value.
const NBF_LEEWAY_SECONDS: i64 = 60;
/// The prefix of the `sub` claim in a ServiceAccount token.
const SUBJECT_PREFIX: &str = "system:serviceaccount:";

/// The keys that authenticate callers.
pub enum Callers {
    /// No keys: every caller is rejected.
    Disabled,
    File(FileKeys),
    Cluster(ClusterKeys),
}

/// An authenticated ServiceAccount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    namespace: String,
    name: String,
}

/// Why a caller is not authenticated.
#[derive(Debug, thiserror::Error)]
pub enum CallerError {
    #[error("the caller's token is refused")]
    InvalidToken(#[from] TokenError),
    /// The keys cannot be fetched now. The token may be valid, so the caller can retry.
    #[error("the keys for ServiceAccount tokens are unavailable")]
    KeysUnavailable,
}

/// What is wrong with a token. This is only logged: the caller does not get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("it is not a JWT with a key id")]
    Malformed,
    #[error("this server has no keys to verify it")]
    NoKeys,
    #[error("it is signed by a key that the cluster does not have")]
    UnknownKey,
    #[error("its signature is invalid")]
    InvalidSignature,
    #[error("it is expired")]
    Expired,
    #[error("it is not valid yet")]
    NotYetValid,
    #[error("its audience is not {AUDIENCE}")]
    WrongAudience,
    #[error("its issuer is not the cluster")]
    WrongIssuer,
    #[error("it does not belong to a ServiceAccount")]
    InvalidSubject,
}

/// The claims of a ServiceAccount token.
#[derive(Deserialize)]
struct Claims {
    iss: Option<String>,
    sub: String,
    aud: Audiences,
    exp: i64,
    nbf: Option<i64>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: KubernetesClaims,
}

#[derive(Deserialize)]
struct KubernetesClaims {
    namespace: String,
    serviceaccount: ObjectClaim,
}

#[derive(Deserialize)]
struct ObjectClaim {
    name: String,
}

// === impl Callers ===

impl Callers {
    /// Reads the keys from a JWKS file. The file must exist, and is read again when it changes.
    pub fn from_file(path: PathBuf) -> Result<Self, KeyFileError> {
        FileKeys::open(path, Instant::now()).map(Self::File)
    }

    /// Uses the keys of the cluster's API server. Must be called in a tokio runtime.
    pub fn from_cluster(api_server: kube::Config) -> Result<Self, kube::Error> {
        ClusterKeys::new(api_server).map(Self::Cluster)
    }

    /// Fetches the API server's keys for ServiceAccount tokens, so that a missing permission is logged before the first
    /// caller needs the keys.
    pub async fn prefetch_keys(&self) {
        match self {
            Self::Cluster(cluster) => drop(cluster.keys("", Instant::now()).await),
            Self::Disabled | Self::File(_) => {}
        }
    }

    /// Returns the ServiceAccount that the token belongs to, if the token is valid.
    pub async fn authenticate(&self, env: &Env, token: &str) -> Result<ServiceAccount, CallerError> {
        let header = jsonwebtoken::decode_header(token).map_err(|_| TokenError::Malformed)?;
        let id = header.kid.as_deref().ok_or(TokenError::Malformed)?;
        let keys = match self {
            Self::Disabled => return Err(TokenError::NoKeys.into()),
            Self::File(file) => file.keys(Instant::now()).await,
            Self::Cluster(cluster) => cluster.keys(id, Instant::now()).await.ok_or(CallerError::KeysUnavailable)?,
        };
        Ok(validate_token(&keys, id, header.alg, env.now(), token)?)
    }
}

fn validate_token(
    keys: &KeySet,
    id: &str,
    algorithm: jsonwebtoken::Algorithm,
    now: OffsetDateTime,
    token: &str,
) -> Result<ServiceAccount, TokenError> {
    let key = keys.get(id).ok_or(TokenError::UnknownKey)?;
    if algorithm != key.algorithm {
        return Err(TokenError::InvalidSignature);
    }
    let mut validation = Validation::new(key.algorithm);
    // These claims are checked below, with the time `now` and with a separate error for each claim.
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation.required_spec_claims.clear();
    let claims = jsonwebtoken::decode::<Claims>(token, &key.decoding_key, &validation).map_err(|error| match error
        .into_kind()
    {
        jsonwebtoken::errors::ErrorKind::Json(_) => TokenError::InvalidSubject,
        _ => TokenError::InvalidSignature,
    })?;
    let claims = claims.claims;
    let now = now.unix_timestamp();
    if now >= claims.exp {
        return Err(TokenError::Expired);
    }
    if claims.nbf.is_some_and(|begins| now < begins.saturating_sub(NBF_LEEWAY_SECONDS)) {
        return Err(TokenError::NotYetValid);
    }
    if !claims.aud.contains(AUDIENCE) {
        return Err(TokenError::WrongAudience);
    }
    if keys.issuer().is_some_and(|issuer| claims.iss.as_deref() != Some(issuer)) {
        return Err(TokenError::WrongIssuer);
    }
    ServiceAccount::from_claims(claims).ok_or(TokenError::InvalidSubject)
}

// === impl ServiceAccount ===

impl ServiceAccount {
    /// Converts the claims. Returns `None` if `sub` does not name a ServiceAccount, or if the `kubernetes.io` claim
    /// names another one.
    fn from_claims(claims: Claims) -> Option<Self> {
        let (namespace, name) = claims.sub.strip_prefix(SUBJECT_PREFIX)?.split_once(':')?;
        let KubernetesClaims { namespace: claimed, serviceaccount } = claims.kubernetes;
        let is_consistent = !name.is_empty() && namespace == claimed && name == serviceaccount.name;
        is_consistent.then_some(Self { namespace: claimed, name: serviceaccount.name })
    }

    #[cfg(test)]
    pub(crate) fn named(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::callers::keys::fixtures::Signer;

    const NOW: i64 = 1_900_000_000;
    const ISSUER: &str = "https://kubernetes.default.svc";

    fn claims() -> Value {
        json!({
            "iss": ISSUER,
            "sub": "system:serviceaccount:shop:backoffice",
            "aud": ["latchkey"],
            "iat": NOW - 10,
            "nbf": NOW - 10,
            "exp": NOW + 600,
            "kubernetes.io": {
                "namespace": "shop",
                "serviceaccount": { "name": "backoffice", "uid": "e3b0c442-98fc-4c14-9afb-f4c8996fb924" },
            },
        })
    }

    fn validate(keys: &KeySet, token: &str) -> Result<String, TokenError> {
        let header = jsonwebtoken::decode_header(token).unwrap();
        let now = OffsetDateTime::from_unix_timestamp(NOW).unwrap();
        validate_token(keys, header.kid.as_deref().unwrap(), header.alg, now, token).map(|account| account.to_string())
    }

    fn key_set(signers: &[&Signer], issuer: Option<&str>) -> KeySet {
        let jwks = json!({ "keys": signers.iter().map(|signer| signer.jwk()).collect::<Vec<_>>() });
        KeySet::parse(jwks.to_string().as_bytes(), issuer.map(str::to_owned)).unwrap()
    }

    #[test]
    fn a_valid_token_authenticates_its_service_account() {
        let signer = Signer::new("a");
        let good = signer.sign(&claims());
        assert_eq!(validate(&key_set(&[&signer], Some(ISSUER)), &good).as_deref(), Ok("shop/backoffice"));
        assert_eq!(validate(&key_set(&[&signer], None), &good).as_deref(), Ok("shop/backoffice"));
        // These claims are valid, too: an audience as a string, several audiences, the latest accepted `nbf` and the
        // earliest accepted `exp`.
        for (claim, value) in [
            ("aud", json!("latchkey")),
            ("aud", json!(["https://kubernetes.default.svc", "latchkey"])),
            ("nbf", json!(NOW + NBF_LEEWAY_SECONDS)),
            ("exp", json!(NOW + 1)),
        ] {
            let mut claims = claims();
            claims[claim] = value;
            let token = signer.sign(&claims);
            assert!(validate(&key_set(&[&signer], Some(ISSUER)), &token).is_ok(), "{claims}");
        }
    }

    #[test]
    fn a_token_with_one_invalid_claim_is_rejected() {
        let signer = Signer::new("a");
        let keys = key_set(&[&signer], Some(ISSUER));
        for (pointer, value, error) in [
            ("/aud", json!("https://kubernetes.default.svc"), TokenError::WrongAudience),
            ("/aud", json!(["latchkeys"]), TokenError::WrongAudience),
            ("/aud", json!([]), TokenError::WrongAudience),
            ("/exp", json!(NOW), TokenError::Expired),
            ("/nbf", json!(NOW + NBF_LEEWAY_SECONDS + 1), TokenError::NotYetValid),
            ("/iss", json!("https://another.cluster"), TokenError::WrongIssuer),
            ("/iss", Value::Null, TokenError::WrongIssuer),
            ("/sub", json!("system:serviceaccount:other:backoffice"), TokenError::InvalidSubject),
            ("/sub", json!("system:serviceaccount:shop:other"), TokenError::InvalidSubject),
            ("/sub", json!("shop:backoffice"), TokenError::InvalidSubject),
            ("/sub", json!("system:node:one"), TokenError::InvalidSubject),
            ("/kubernetes.io/namespace", json!("other"), TokenError::InvalidSubject),
            ("/kubernetes.io/serviceaccount/name", json!("other"), TokenError::InvalidSubject),
            ("/kubernetes.io", json!({}), TokenError::InvalidSubject),
            ("/exp", Value::Null, TokenError::InvalidSubject),
        ] {
            let mut claims = claims();
            *claims.pointer_mut(pointer).unwrap() = value;
            assert_eq!(validate(&keys, &signer.sign(&claims)), Err(error), "{claims}");
        }
    }

    #[test]
    fn only_keys_of_the_cluster_are_accepted() {
        let (signer, other_signer) = (Signer::new("a"), Signer::new("b"));
        let keys = key_set(&[&signer], Some(ISSUER));
        assert_eq!(validate(&keys, &other_signer.sign(&claims())), Err(TokenError::UnknownKey));
        // The token is signed by another key with the id of a known key.
        assert_eq!(validate(&keys, &Signer::new("a").sign(&claims())), Err(TokenError::InvalidSignature));
        // The token has an HMAC signature with the public key as the secret.
        let secret = jsonwebtoken::EncodingKey::from_secret(signer.jwk().to_string().as_bytes());
        let header = jsonwebtoken::Header {
            kid: Some("a".to_owned()),
            ..jsonwebtoken::Header::new(jsonwebtoken::Algorithm::HS256)
        };
        let forged = jsonwebtoken::encode(&header, &claims(), &secret).unwrap();
        assert_eq!(validate(&keys, &forged), Err(TokenError::InvalidSignature));
        let good = signer.sign(&claims());
        let (unsigned, _) = good.rsplit_once('.').unwrap();
        assert_eq!(validate(&keys, &format!("{unsigned}.")), Err(TokenError::InvalidSignature));
    }

    #[tokio::test]
    async fn every_caller_is_rejected_without_keys() {
        let token = Signer::new("a").sign(&claims());
        let outcome = Callers::Disabled.authenticate(&Env::system(), &token).await;
        assert!(matches!(outcome, Err(CallerError::InvalidToken(TokenError::NoKeys))));
        for bad in ["", "a.b.c", "lkr_abc", "e30.e30."] {
            let outcome = Callers::Disabled.authenticate(&Env::system(), bad).await;
            assert!(matches!(outcome, Err(CallerError::InvalidToken(TokenError::Malformed))), "{bad}");
        }
    }
}
