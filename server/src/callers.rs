//! Callers in the cluster: ServiceAccounts, known by the tokens that the cluster signs for them (contract, 6).

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
pub use file::Unusable;
pub use keys::{KeySet, NotKeys};

/// The audience of tokens that are meant for us.
pub const AUDIENCE: &str = "latchkey";
/// What clocks may differ by, for tokens that were only just made; as the API server itself has it.
const NOT_YET_LEEWAY: i64 = 60;
/// What the cluster calls its ServiceAccounts.
const SUBJECT_PREFIX: &str = "system:serviceaccount:";

/// By which keys callers are known.
pub enum Callers {
    /// There are none, so nobody is known.
    Nobody,
    File(FileKeys),
    Cluster(ClusterKeys),
}

/// A ServiceAccount that has shown its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    namespace: String,
    name: String,
}

/// Why a caller is not known.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    #[error("the caller's token is refused")]
    Refused(#[from] Refusal),
    /// It may be a good one: try again shortly.
    #[error("the keys of the cluster are not known now")]
    KeysAway,
}

/// What is wrong with a token; told in the log alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("it is not a JWT with a key id")]
    Malformed,
    #[error("this server knows no keys to check it by")]
    NoKeys,
    #[error("it is signed by a key that is not one of the cluster's")]
    UnknownKey,
    #[error("its signature does not hold")]
    Signature,
    #[error("its time is over")]
    Expired,
    #[error("its time has not begun")]
    NotYet,
    #[error("its audience is not {AUDIENCE}")]
    Audience,
    #[error("its issuer is not the cluster")]
    Issuer,
    #[error("it is not of a ServiceAccount")]
    Subject,
}

/// What a ServiceAccount's token says.
#[derive(Deserialize)]
struct Claims {
    iss: Option<String>,
    sub: String,
    aud: Audiences,
    exp: i64,
    nbf: Option<i64>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Deserialize)]
struct Kubernetes {
    namespace: String,
    serviceaccount: Object,
}

#[derive(Deserialize)]
struct Object {
    name: String,
}

// === impl Callers ===

impl Callers {
    /// By a file: a JWKS, which must be there; read again when it changes.
    pub fn by_file(path: PathBuf) -> Result<Self, Unusable> {
        FileKeys::open(path, Instant::now()).map(Self::File)
    }

    /// By the keys of the cluster that this API server is of. Needs a running tokio.
    pub fn by_cluster(api_server: kube::Config) -> Result<Self, kube::Error> {
        ClusterKeys::of(api_server).map(Self::Cluster)
    }

    /// Asks for the keys, so that one who lacks the permission hears of it before somebody calls.
    pub async fn look(&self) {
        match self {
            Self::Cluster(cluster) => drop(cluster.keys("", Instant::now()).await),
            Self::Nobody | Self::File(_) => {}
        }
    }

    /// The ServiceAccount whose token it is.
    pub async fn prove(&self, env: &Env, token: &str) -> Result<ServiceAccount, Unknown> {
        let header = jsonwebtoken::decode_header(token).map_err(|_| Refusal::Malformed)?;
        let id = header.kid.as_deref().ok_or(Refusal::Malformed)?;
        let keys = match self {
            Self::Nobody => return Err(Refusal::NoKeys.into()),
            Self::File(file) => file.keys(Instant::now()).await,
            Self::Cluster(cluster) => cluster.keys(id, Instant::now()).await.ok_or(Unknown::KeysAway)?,
        };
        Ok(judge(&keys, id, header.alg, env.now(), token)?)
    }
}

fn judge(
    keys: &KeySet,
    id: &str,
    algorithm: jsonwebtoken::Algorithm,
    now: OffsetDateTime,
    token: &str,
) -> Result<ServiceAccount, Refusal> {
    let key = keys.get(id).ok_or(Refusal::UnknownKey)?;
    if algorithm != key.algorithm {
        return Err(Refusal::Signature);
    }
    let mut validation = Validation::new(key.algorithm);
    // All of these are judged below, by the clock that was handed in, and with a name for each refusal.
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation.required_spec_claims.clear();
    let claims =
        jsonwebtoken::decode::<Claims>(token, &key.decoding, &validation).map_err(|error| match error.into_kind() {
            jsonwebtoken::errors::ErrorKind::Json(_) => Refusal::Subject,
            _ => Refusal::Signature,
        })?;
    let claims = claims.claims;
    let now = now.unix_timestamp();
    if now >= claims.exp {
        return Err(Refusal::Expired);
    }
    if claims.nbf.is_some_and(|begins| now < begins.saturating_sub(NOT_YET_LEEWAY)) {
        return Err(Refusal::NotYet);
    }
    if !claims.aud.has(AUDIENCE) {
        return Err(Refusal::Audience);
    }
    if keys.issuer().is_some_and(|issuer| claims.iss.as_deref() != Some(issuer)) {
        return Err(Refusal::Issuer);
    }
    ServiceAccount::of(claims).ok_or(Refusal::Subject)
}

// === impl ServiceAccount ===

impl ServiceAccount {
    /// Where subject and claims of the cluster agree.
    fn of(claims: Claims) -> Option<Self> {
        let (namespace, name) = claims.sub.strip_prefix(SUBJECT_PREFIX)?.split_once(':')?;
        let Kubernetes { namespace: claimed, serviceaccount } = claims.kubernetes;
        let agree = !name.is_empty() && namespace == claimed && name == serviceaccount.name;
        agree.then_some(Self { namespace: claimed, name: serviceaccount.name })
    }

    /// Of a test's making.
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

    fn judged(keys: &KeySet, token: &str) -> Result<String, Refusal> {
        let header = jsonwebtoken::decode_header(token).unwrap();
        let now = OffsetDateTime::from_unix_timestamp(NOW).unwrap();
        judge(keys, header.kid.as_deref().unwrap(), header.alg, now, token).map(|account| account.to_string())
    }

    fn set(signers: &[&Signer], issuer: Option<&str>) -> KeySet {
        let jwks = json!({ "keys": signers.iter().map(|signer| signer.jwk()).collect::<Vec<_>>() });
        KeySet::parse(jwks.to_string().as_bytes(), issuer.map(str::to_owned)).unwrap()
    }

    #[test]
    fn a_token_of_the_cluster_names_its_service_account() {
        let signer = Signer::new("a");
        let good = signer.sign(&claims());
        assert_eq!(judged(&set(&[&signer], Some(ISSUER)), &good).as_deref(), Ok("shop/backoffice"));
        assert_eq!(judged(&set(&[&signer], None), &good).as_deref(), Ok("shop/backoffice"));
        // One audience as a string, others beside ours, no time to begin, a clock that is a little behind.
        for (claim, value) in [
            ("aud", json!("latchkey")),
            ("aud", json!(["https://kubernetes.default.svc", "latchkey"])),
            ("nbf", json!(NOW + NOT_YET_LEEWAY)),
            ("exp", json!(NOW + 1)),
        ] {
            let mut claims = claims();
            claims[claim] = value;
            let token = signer.sign(&claims);
            assert!(judged(&set(&[&signer], Some(ISSUER)), &token).is_ok(), "{claims}");
        }
    }

    #[test]
    fn a_token_with_one_thing_wrong_is_refused() {
        let signer = Signer::new("a");
        let keys = set(&[&signer], Some(ISSUER));
        for (pointer, value, refusal) in [
            ("/aud", json!("https://kubernetes.default.svc"), Refusal::Audience),
            ("/aud", json!(["latchkeys"]), Refusal::Audience),
            ("/aud", json!([]), Refusal::Audience),
            ("/exp", json!(NOW), Refusal::Expired),
            ("/nbf", json!(NOW + NOT_YET_LEEWAY + 1), Refusal::NotYet),
            ("/iss", json!("https://another.cluster"), Refusal::Issuer),
            ("/iss", Value::Null, Refusal::Issuer),
            ("/sub", json!("system:serviceaccount:other:backoffice"), Refusal::Subject),
            ("/sub", json!("system:serviceaccount:shop:other"), Refusal::Subject),
            ("/sub", json!("shop:backoffice"), Refusal::Subject),
            ("/sub", json!("system:node:one"), Refusal::Subject),
            ("/kubernetes.io/namespace", json!("other"), Refusal::Subject),
            ("/kubernetes.io/serviceaccount/name", json!("other"), Refusal::Subject),
            ("/kubernetes.io", json!({}), Refusal::Subject),
            ("/exp", Value::Null, Refusal::Subject),
        ] {
            let mut claims = claims();
            *claims.pointer_mut(pointer).unwrap() = value;
            assert_eq!(judged(&keys, &signer.sign(&claims)), Err(refusal), "{claims}");
        }
    }

    #[test]
    fn only_the_clusters_own_keys_sign() {
        let (signer, stranger) = (Signer::new("a"), Signer::new("b"));
        let keys = set(&[&signer], Some(ISSUER));
        assert_eq!(judged(&keys, &stranger.sign(&claims())), Err(Refusal::UnknownKey));
        // Under the name of a key that is known.
        assert_eq!(judged(&keys, &Signer::new("a").sign(&claims())), Err(Refusal::Signature));
        // The public key as a shared secret.
        let secret = jsonwebtoken::EncodingKey::from_secret(signer.jwk().to_string().as_bytes());
        let header = jsonwebtoken::Header {
            kid: Some("a".to_owned()),
            ..jsonwebtoken::Header::new(jsonwebtoken::Algorithm::HS256)
        };
        let forged = jsonwebtoken::encode(&header, &claims(), &secret).unwrap();
        assert_eq!(judged(&keys, &forged), Err(Refusal::Signature));
        let good = signer.sign(&claims());
        let (head, _) = good.rsplit_once('.').unwrap();
        assert_eq!(judged(&keys, &format!("{head}.")), Err(Refusal::Signature));
    }

    #[tokio::test]
    async fn without_keys_nobody_is_known() {
        let token = Signer::new("a").sign(&claims());
        let outcome = Callers::Nobody.prove(&Env::system(), &token).await;
        assert!(matches!(outcome, Err(Unknown::Refused(Refusal::NoKeys))));
        for bad in ["", "a.b.c", "lkr_abc", "e30.e30."] {
            let outcome = Callers::Nobody.prove(&Env::system(), bad).await;
            assert!(matches!(outcome, Err(Unknown::Refused(Refusal::Malformed))), "{bad}");
        }
    }
}
