//! Keys from the cluster's API server: its issuer's discovery document and its JWKS, kept.

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

use super::keys::{KeySet, NotKeys};

/// A key that the cluster drops is refused within so long.
const FRESH: Duration = Duration::from_secs(300);
/// Anybody may make up key ids: one that is not known is asked for at most so often (contract, 5).
const UNKNOWN_AGAIN: Duration = Duration::from_secs(60);
/// After a failure: with keys to go on with, and without.
const RETRY: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_secs(2);
/// What both answers may take together; a caller waits for them.
const LIMIT: Duration = Duration::from_secs(3);

/// Where the API server says who signs the tokens of ServiceAccounts, and by which keys. It serves both itself, whatever
/// address the issuer has. Both are open to all ServiceAccounts, by `system:service-account-issuer-discovery`.
const DISCOVERY: &str = "/.well-known/openid-configuration";
const JWKS: &str = "/openid/v1/jwks";

/// The keys of the cluster that this server runs in.
pub struct ClusterKeys {
    source: Box<dyn Source>,
    known: ArcSwapOption<Known>,
    /// Held by the one who asks the API server.
    tries: Mutex<Tries>,
}

struct Known {
    keys: Arc<KeySet>,
    at: Instant,
}

#[derive(Default)]
struct Tries {
    /// When keys were last asked for only because a key id was not known.
    unknown: Option<Instant>,
    /// When the API server last failed, where it has not answered since.
    failed: Option<Instant>,
}

/// Why there are no newer keys; the texts can be shown.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("the API server does not answer")]
    Silent,
    #[error("the API server refuses: {0}")]
    Refused(String),
    #[error("the API server cannot be reached")]
    Away(#[source] kube::Error),
    #[error("what the API server says of its issuer cannot be read")]
    Discovery,
    #[error("what the API server has for keys cannot be used: {0}")]
    Keys(#[from] NotKeys),
}

type Fetching<'a> = Pin<Box<dyn Future<Output = Result<KeySet, Failure>> + Send + 'a>>;

/// Where keys come from; the API server, outside tests.
trait Source: Send + Sync {
    fn fetch(&self) -> Fetching<'_>;
}

/// The part of the discovery document that counts.
#[derive(Deserialize)]
struct Discovery {
    issuer: String,
}

// === impl ClusterKeys ===

impl ClusterKeys {
    /// Keys are asked for when they are needed. Needs a running tokio.
    pub fn of(mut config: kube::Config) -> Result<Self, kube::Error> {
        config.connect_timeout = Some(LIMIT);
        config.read_timeout = Some(LIMIT);
        config.write_timeout = Some(LIMIT);
        // Else the time for which a connection rested would count.
        config.reset_reader_on_write = true;
        Ok(Self::from(Client::try_from(config)?))
    }

    fn from(source: impl Source + 'static) -> Self {
        Self { source: Box::new(source), known: ArcSwapOption::empty(), tries: Mutex::default() }
    }

    /// The keys to judge a token by that names this one; none where they cannot be had, and the token may be good.
    pub async fn keys(&self, id: &str, now: Instant) -> Option<Arc<KeySet>> {
        if let Some(known) = &*self.known.load()
            && known.is_fresh(now)
            && known.keys.has(id)
        {
            return Some(Arc::clone(&known.keys));
        }
        let mut tries = match self.tries.try_lock() {
            Ok(tries) => tries,
            Err(_) => match self.known.load_full() {
                // Somebody else is asking; until then the old copy does.
                Some(known) if known.keys.has(id) => return Some(Arc::clone(&known.keys)),
                Some(_) | None => self.tries.lock().await,
            },
        };
        let known = self.known.load_full();
        let only_unknown = known.as_ref().is_some_and(|known| known.is_fresh(now));
        if only_unknown && known.as_ref().is_some_and(|known| known.keys.has(id)) {
            return known.map(|known| Arc::clone(&known.keys));
        }
        if tries.admit(only_unknown, known.is_some(), now)
            && let Some(keys) = self.ask(&mut tries, now).await
        {
            return Some(keys);
        }
        // Where the API server has answered a short while ago, a key that is not there is none of the cluster's.
        known.filter(|known| known.keys.has(id) || tries.failed.is_none()).map(|known| Arc::clone(&known.keys))
    }

    async fn ask(&self, tries: &mut Tries, now: Instant) -> Option<Arc<KeySet>> {
        let fetched = timeout(LIMIT, self.source.fetch()).await.unwrap_or(Err(Failure::Silent));
        match fetched {
            Ok(keys) => {
                if tries.failed.take().is_some() {
                    info!("the keys of the cluster's ServiceAccounts can be read again");
                }
                let keys = Arc::new(keys);
                self.known.store(Some(Arc::new(Known { keys: Arc::clone(&keys), at: now })));
                Some(keys)
            }
            Err(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    known = self.known.load().is_some(),
                    "the keys of the cluster's ServiceAccounts cannot be read; those that are known go on"
                );
                tries.failed = Some(now);
                None
            }
        }
    }
}

// === impl Known ===

impl Known {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < FRESH
    }
}

// === impl Tries ===

impl Tries {
    /// Whether the API server may be asked now.
    fn admit(&mut self, only_unknown: bool, known: bool, now: Instant) -> bool {
        let past = |at: Option<Instant>, pause| at.is_none_or(|at| now.saturating_duration_since(at) >= pause);
        if only_unknown {
            let admitted = past(self.unknown, UNKNOWN_AGAIN);
            if admitted {
                self.unknown = Some(now);
            }
            return admitted;
        }
        past(self.failed, if known { RETRY } else { FIRST_RETRY })
    }
}

// === impl Source ===

impl Source for Client {
    fn fetch(&self) -> Fetching<'_> {
        Box::pin(async move {
            let discovery = get(self, DISCOVERY).await?;
            let Discovery { issuer } = serde_json::from_str(&discovery).map_err(|_| Failure::Discovery)?;
            Ok(KeySet::parse(get(self, JWKS).await?.as_bytes(), Some(issuer))?)
        })
    }
}

async fn get(client: &Client, path: &str) -> Result<String, Failure> {
    let request = Request::get(path).body(Vec::new()).map_err(|error| Failure::Away(kube::Error::HttpError(error)))?;
    client.request_text(request).await.map_err(|error| match error {
        kube::Error::Api(status) => Failure::Refused(status.message.clone()),
        error => Failure::Away(error),
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

    /// An API server that has these keys, or is away.
    #[derive(Clone, Default)]
    struct Scripted {
        ids: Arc<StdMutex<Option<Vec<&'static str>>>>,
        asked: Arc<AtomicUsize>,
    }

    impl Source for Scripted {
        fn fetch(&self) -> Fetching<'_> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let keys = self.ids.lock().unwrap().clone().ok_or(Failure::Silent).and_then(|ids| {
                let jwks: Vec<_> = ids.into_iter().map(|id| Signer::new(id).jwk()).collect();
                Ok(KeySet::parse(json!({ "keys": jwks }).to_string().as_bytes(), Some("cluster".to_owned()))?)
            });
            Box::pin(std::future::ready(keys))
        }
    }

    impl Scripted {
        fn has(&self, ids: Option<&[&'static str]>) {
            *self.ids.lock().unwrap() = ids.map(<[_]>::to_vec);
        }
    }

    struct Scene {
        api: Scripted,
        keys: ClusterKeys,
        start: Instant,
    }

    impl Scene {
        fn new(ids: Option<&[&'static str]>) -> Self {
            let api = Scripted::default();
            api.has(ids);
            Self { keys: ClusterKeys::from(api.clone()), api, start: Instant::now() }
        }

        /// Whether the key is there (none: it cannot be told), and how often the API server was asked so far.
        async fn asks(&self, id: &str, seconds: u64) -> (Option<bool>, usize) {
            let keys = self.keys.keys(id, self.start + Duration::from_secs(seconds)).await;
            (keys.map(|keys| keys.has(id)), self.api.asked.load(Ordering::Relaxed))
        }
    }

    #[tokio::test]
    async fn keys_are_kept_and_a_dropped_one_is_refused_after_a_while() {
        let scene = Scene::new(Some(&["a"]));
        assert_eq!(scene.asks("a", 0).await, (Some(true), 1));
        assert_eq!(scene.asks("a", 299).await, (Some(true), 1));
        scene.api.has(Some(&["b"]));
        assert_eq!(scene.asks("a", 299).await, (Some(true), 1));
        assert_eq!(scene.asks("a", 300).await, (Some(false), 2));
    }

    #[tokio::test]
    async fn a_new_key_counts_at_once_and_made_up_ones_are_asked_for_once_a_minute() {
        let scene = Scene::new(Some(&["a"]));
        assert_eq!(scene.asks("a", 0).await, (Some(true), 1));
        scene.api.has(Some(&["a", "b"]));
        assert_eq!(scene.asks("b", 1).await, (Some(true), 2));
        for seconds in [2, 30, 60] {
            assert_eq!(scene.asks("c", seconds).await, (Some(false), 2));
        }
        assert_eq!(scene.asks("c", 61).await, (Some(false), 3));
        assert_eq!(scene.asks("d", 61).await, (Some(false), 3));
        assert_eq!(scene.asks("a", 61).await, (Some(true), 3));
    }

    #[tokio::test]
    async fn the_old_copy_goes_on_while_the_api_server_is_away() {
        let scene = Scene::new(Some(&["a"]));
        assert_eq!(scene.asks("a", 0).await, (Some(true), 1));
        scene.api.has(None);
        assert_eq!(scene.asks("a", 300).await, (Some(true), 2));
        assert_eq!(scene.asks("a", 329).await, (Some(true), 2), "it is not asked again at each call");
        assert_eq!(scene.asks("a", 330).await, (Some(true), 3));
        // It may be a new one.
        assert_eq!(scene.asks("b", 331).await, (None, 3));
        assert_eq!(scene.asks("a", 100_000).await, (Some(true), 4));
        scene.api.has(Some(&["b"]));
        assert_eq!(scene.asks("b", 100_030).await, (Some(true), 5));
        assert_eq!(scene.asks("a", 100_031).await, (Some(false), 6));
    }

    #[tokio::test]
    async fn without_any_keys_nobody_can_be_told() {
        let scene = Scene::new(None);
        assert_eq!(scene.asks("a", 0).await, (None, 1));
        assert_eq!(scene.asks("a", 1).await, (None, 1));
        scene.api.has(Some(&["a"]));
        assert_eq!(scene.asks("a", 2).await, (Some(true), 2));
    }
}
