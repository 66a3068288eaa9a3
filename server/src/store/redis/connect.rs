//! Creates the handle to Redis, and starts its background tasks.

use std::sync::Arc;

use super::{
    client::{
        RedisClient,
        url::{ConnectError, check_url},
    },
    eviction::watch_eviction_policy,
    handle::{RedisStore, Shared},
    metrics::Metrics,
    scripts::Scripts,
    stores::{refusal_queue::RefusalQueue, refusals::count_queued_refusals},
};
use crate::store::source::UrlSource;

/// How to reach Redis.
#[derive(Clone, Debug)]
pub struct Options {
    /// The URL: `redis://user:password@host/database`, `redis-sentinel://…` or `redis-cluster://…`. A scheme that
    /// begins with `rediss` uses TLS, with the system's certificate authorities or those of `SSL_CERT_FILE`
    /// (docs/redis.md).
    pub url: UrlSource,
    /// An offset that is added to Redis's clock. Zero outside tests.
    pub clock_offset: time::Duration,
}

// === impl Options ===

impl Options {
    pub fn new(url: UrlSource) -> Self {
        Self { url, clock_offset: time::Duration::ZERO }
    }
}

// === impl RedisStore ===

impl RedisStore {
    /// Checks the URL, and starts the tasks that watch the eviction policy and count refusals. The first command opens
    /// a connection. Must be called in a tokio runtime.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        check_url(&options.url)?;
        let scripts = Arc::new(Scripts::new());
        let client = Arc::new(RedisClient::new(options.url, Arc::clone(&scripts)));
        let metrics = Metrics::new();
        let policy_watch = tokio::spawn(watch_eviction_policy(Arc::clone(&client), metrics.clone())).abort_handle();
        let (refusal_queue, refusals) = RefusalQueue::new();
        let lost_refusals = refusal_queue.lost().clone();
        let store = Self::new(Shared { client, scripts, metrics, policy_watch, refusal_queue }, options.clock_offset);
        tokio::spawn(count_queued_refusals(store.downgrade(), refusals, lost_refusals));
        Ok(store)
    }
}
