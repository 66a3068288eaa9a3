//! Fetches and caches the API server's keys for ServiceAccount tokens: its JWKS, and the issuer from its discovery
//! document.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use http::Request;
use kube::Client;
use serde::Deserialize;
use tokio::{sync::Mutex, time::timeout};
use tracing::{info, warn};

use super::keys::{KeySet, KeySetError};

/// How long keys are used without another fetch. Tokens that were signed with a removed key are rejected after at most
/// this time. But while the API server is unavailable, the cached keys stay in use for longer.
const CACHE_TTL: Duration = Duration::from_secs(300);
/// The minimum time between two fetches if their only reason is an unknown key id. Without it, anybody could cause many
/// fetches with invented key ids.
const UNKNOWN_KEY_INTERVAL: Duration = Duration::from_secs(60);
/// The minimum time between a failed fetch and the next fetch if there are cached keys.
const RETRY_DELAY: Duration = Duration::from_secs(30);
/// The minimum time between a failed fetch and the next fetch if there are no cached keys.
const RETRY_DELAY_WITHOUT_KEYS: Duration = Duration::from_secs(2);
/// Timeout for fetching the discovery document and the JWKS together. The request of a caller can wait for both.
const FETCH_TIMEOUT: Duration = Duration::from_secs(3);

/// The document that names the issuer of ServiceAccount tokens. The API server serves this document and the JWKS
/// itself, whatever the issuer URL is. The ClusterRole `system:service-account-issuer-discovery` lets all
/// ServiceAccounts read both.
const DISCOVERY_PATH: &str = "/.well-known/openid-configuration";
/// The JWKS with the keys for ServiceAccount tokens.
const JWKS_PATH: &str = "/openid/v1/jwks";

/// A cache of the keys that the API server publishes.
pub struct ClusterKeys {
    source: Box<dyn KeySource>,
    cached: ArcSwapOption<CachedKeys>,
    /// Locked during a fetch from the API server.
    limiter: Mutex<FetchLimiter>,
}

struct CachedKeys {
    keys: Arc<KeySet>,
    fetched_at: Instant,
}

#[derive(Default)]
struct FetchLimiter {
    /// When keys were last fetched only because of an unknown key id.
    last_unknown: Option<Instant>,
    /// The time of the last fetch if it failed. `None`: the last fetch succeeded, or there was none yet.
    last_failure: Option<Instant>,
}

/// Why keys could not be fetched. The texts contain no secrets.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("the API server does not answer")]
    Timeout,
    #[error("the API server refused the request: {0}")]
    Refused(String),
    #[error("the API server cannot be reached")]
    Unreachable(#[source] kube::Error),
    #[error("the discovery document of the API server cannot be read")]
    Discovery,
    #[error("the JWKS of the API server cannot be used: {0}")]
    Keys(#[from] KeySetError),
}

type FetchFuture<'a> = Pin<Box<dyn Future<Output = Result<KeySet, FetchError>> + Send + 'a>>;

/// Where keys come from: the API server, except in tests.
trait KeySource: Send + Sync {
    fn fetch(&self) -> FetchFuture<'_>;
}

/// The discovery document. Only this field of it is used.
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
}

// === impl ClusterKeys ===

impl ClusterKeys {
    /// A cache that fetches keys on demand. Needs a running Tokio runtime.
    pub fn new(mut config: kube::Config) -> Result<Self, kube::Error> {
        config.connect_timeout = Some(FETCH_TIMEOUT);
        config.read_timeout = Some(FETCH_TIMEOUT);
        config.write_timeout = Some(FETCH_TIMEOUT);
        // Without this setting, the read timeout would include the time for which a connection was idle.
        config.reset_reader_on_write = true;
        Ok(Self::with_source(Client::try_from(config)?))
    }

    fn with_source(source: impl KeySource + 'static) -> Self {
        Self { source: Box::new(source), cached: ArcSwapOption::empty(), limiter: Mutex::default() }
    }

    /// Returns the keys to verify a token with this key id. If the returned keys do not contain the id, the cluster has
    /// no such key. Returns `None` if the keys cannot be fetched. In this case, the token may be valid.
    pub async fn keys(&self, id: &str, now: Instant) -> Option<Arc<KeySet>> {
        if let Some(cached) = &*self.cached.load()
            && cached.is_fresh(now)
            && cached.keys.contains(id)
        {
            return Some(Arc::clone(&cached.keys));
        }
        let mut limiter = match self.limiter.try_lock() {
            Ok(limiter) => limiter,
            Err(_) => match self.cached.load_full() {
                // Another task is fetching. If the cached keys contain the id, they are used. Otherwise this call
                // waits.
                Some(cached) if cached.keys.contains(id) => return Some(Arc::clone(&cached.keys)),
                Some(_) | None => self.limiter.lock().await,
            },
        };
        let cached = self.cached.load_full();
        let only_for_unknown_id = cached.as_ref().is_some_and(|cached| cached.is_fresh(now));
        if only_for_unknown_id && cached.as_ref().is_some_and(|cached| cached.keys.contains(id)) {
            return cached.map(|cached| Arc::clone(&cached.keys));
        }
        if limiter.try_acquire(only_for_unknown_id, cached.is_some(), now)
            && let Some(keys) = self.fetch(&mut limiter, now).await
        {
            return Some(keys);
        }
        // If the last fetch succeeded, the cached keys are at most `UNKNOWN_KEY_INTERVAL` old. In this case, the
        // cluster is assumed to have no other keys.
        cached
            .filter(|cached| cached.keys.contains(id) || limiter.last_failure.is_none())
            .map(|cached| Arc::clone(&cached.keys))
    }

    async fn fetch(&self, limiter: &mut FetchLimiter, now: Instant) -> Option<Arc<KeySet>> {
        let fetched = timeout(FETCH_TIMEOUT, self.source.fetch()).await.unwrap_or(Err(FetchError::Timeout));
        match fetched {
            Ok(keys) => {
                if limiter.last_failure.take().is_some() {
                    info!("the keys of the cluster's ServiceAccounts can be read again");
                }
                let keys = Arc::new(keys);
                self.cached.store(Some(Arc::new(CachedKeys { keys: Arc::clone(&keys), fetched_at: now })));
                Some(keys)
            }
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    known = self.cached.load().is_some(),
                    "the keys of the cluster's ServiceAccounts cannot be read; cached keys stay in use"
                );
                limiter.last_failure = Some(now);
                None
            }
        }
    }
}

// === impl CachedKeys ===

impl CachedKeys {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.fetched_at) < CACHE_TTL
    }
}

// === impl FetchLimiter ===

impl FetchLimiter {
    /// Whether a fetch is allowed now. `only_for_unknown_id`: the only reason for the fetch is an unknown key id.
    fn try_acquire(&mut self, only_for_unknown_id: bool, has_cached_keys: bool, now: Instant) -> bool {
        let has_passed = |at: Option<Instant>, pause| at.is_none_or(|at| now.saturating_duration_since(at) >= pause);
        if only_for_unknown_id {
            let admitted = has_passed(self.last_unknown, UNKNOWN_KEY_INTERVAL);
            if admitted {
                self.last_unknown = Some(now);
            }
            return admitted;
        }
        has_passed(self.last_failure, if has_cached_keys { RETRY_DELAY } else { RETRY_DELAY_WITHOUT_KEYS })
    }
}

// === impl KeySource ===

impl KeySource for Client {
    fn fetch(&self) -> FetchFuture<'_> {
        Box::pin(async move {
            let discovery = get(self, DISCOVERY_PATH).await?;
            let Discovery { issuer } = serde_json::from_str(&discovery).map_err(|_| FetchError::Discovery)?;
            Ok(KeySet::parse(get(self, JWKS_PATH).await?.as_bytes(), Some(issuer))?)
        })
    }
}

async fn get(client: &Client, path: &str) -> Result<String, FetchError> {
    let request =
        Request::get(path).body(Vec::new()).map_err(|error| FetchError::Unreachable(kube::Error::HttpError(error)))?;
    client.request_text(request).await.map_err(|error| match error {
        kube::Error::Api(status) => FetchError::Refused(status.message.clone()),
        error => FetchError::Unreachable(error),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex as StdMutex,
        atomic::{AtomicUsize, Ordering},
    };

    use serde_json::json;

    use super::*;
    use crate::callers::keys::fixtures::Signer;

    #[derive(Clone, Default)]
    struct FakeApiServer {
        /// The ids of the keys that the API server returns. `None` if the API server is unavailable.
        key_ids: Arc<StdMutex<Option<Vec<&'static str>>>>,
        fetches: Arc<AtomicUsize>,
    }

    impl KeySource for FakeApiServer {
        fn fetch(&self) -> FetchFuture<'_> {
            self.fetches.fetch_add(1, Ordering::Relaxed);
            let keys = self.key_ids.lock().unwrap().clone().ok_or(FetchError::Timeout).and_then(|ids| {
                let jwks: Vec<_> = ids.into_iter().map(|id| Signer::new(id).jwk()).collect();
                Ok(KeySet::parse(json!({ "keys": jwks }).to_string().as_bytes(), Some("cluster".to_owned()))?)
            });
            Box::pin(std::future::ready(keys))
        }
    }

    impl FakeApiServer {
        fn set_keys(&self, ids: Option<&[&'static str]>) {
            *self.key_ids.lock().unwrap() = ids.map(<[_]>::to_vec);
        }
    }

    struct Fixture {
        api: FakeApiServer,
        keys: ClusterKeys,
        start: Instant,
    }

    impl Fixture {
        fn new(ids: Option<&[&'static str]>) -> Self {
            let api = FakeApiServer::default();
            api.set_keys(ids);
            Self { keys: ClusterKeys::with_source(api.clone()), api, start: Instant::now() }
        }

        /// Looks up a key `seconds` after the start. Returns whether the key exists (`None`: unknown), and the number
        /// of fetches so far.
        async fn look_up(&self, id: &str, seconds: u64) -> (Option<bool>, usize) {
            let keys = self.keys.keys(id, self.start + Duration::from_secs(seconds)).await;
            (keys.map(|keys| keys.contains(id)), self.api.fetches.load(Ordering::Relaxed))
        }
    }

    #[tokio::test]
    async fn keys_are_cached_and_a_removed_key_is_rejected_after_five_minutes() {
        let fixture = Fixture::new(Some(&["a"]));
        assert_eq!(fixture.look_up("a", 0).await, (Some(true), 1));
        assert_eq!(fixture.look_up("a", 299).await, (Some(true), 1));
        fixture.api.set_keys(Some(&["b"]));
        assert_eq!(fixture.look_up("a", 299).await, (Some(true), 1));
        assert_eq!(fixture.look_up("a", 300).await, (Some(false), 2));
    }

    #[tokio::test]
    async fn a_new_key_is_accepted_immediately_and_unknown_ids_cause_one_fetch_per_minute() {
        let fixture = Fixture::new(Some(&["a"]));
        assert_eq!(fixture.look_up("a", 0).await, (Some(true), 1));
        fixture.api.set_keys(Some(&["a", "b"]));
        assert_eq!(fixture.look_up("b", 1).await, (Some(true), 2));
        for seconds in [2, 30, 60] {
            assert_eq!(fixture.look_up("c", seconds).await, (Some(false), 2));
        }
        assert_eq!(fixture.look_up("c", 61).await, (Some(false), 3));
        assert_eq!(fixture.look_up("d", 61).await, (Some(false), 3));
        assert_eq!(fixture.look_up("a", 61).await, (Some(true), 3));
    }

    #[tokio::test]
    async fn cached_keys_are_used_while_the_api_server_is_unavailable() {
        let fixture = Fixture::new(Some(&["a"]));
        assert_eq!(fixture.look_up("a", 0).await, (Some(true), 1));
        fixture.api.set_keys(None);
        assert_eq!(fixture.look_up("a", 300).await, (Some(true), 2));
        assert_eq!(fixture.look_up("a", 329).await, (Some(true), 2), "not every call fetches again");
        assert_eq!(fixture.look_up("a", 330).await, (Some(true), 3));
        // `b` may be a new key, so the result is unknown.
        assert_eq!(fixture.look_up("b", 331).await, (None, 3));
        assert_eq!(fixture.look_up("a", 100_000).await, (Some(true), 4));
        fixture.api.set_keys(Some(&["b"]));
        assert_eq!(fixture.look_up("b", 100_030).await, (Some(true), 5));
        assert_eq!(fixture.look_up("a", 100_031).await, (Some(false), 6));
    }

    #[tokio::test]
    async fn no_token_can_be_verified_without_any_keys() {
        let fixture = Fixture::new(None);
        assert_eq!(fixture.look_up("a", 0).await, (None, 1));
        assert_eq!(fixture.look_up("a", 1).await, (None, 1));
        fixture.api.set_keys(Some(&["a"]));
        assert_eq!(fixture.look_up("a", 2).await, (Some(true), 2));
    }
}
