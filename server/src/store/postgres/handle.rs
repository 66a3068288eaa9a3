//! The handle to the database, and the state that all calls share.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use sqlx::PgPool;
use tokio::{
    sync::{Notify, Semaphore, broadcast},
    task::AbortHandle,
    time::{Instant, timeout_at},
};

use super::{
    audit::EventWriter,
    listener,
    metrics::Metrics,
    migrate,
    outage::Availability,
    pool::{self, ConnectError, UrlState},
    webhooks,
};
use crate::{domain::ports::StoreError, store::UrlSource};

/// How to reach Postgres.
#[derive(Clone, Debug)]
pub struct Options {
    /// `postgres://user:password@host/database`, with `sslmode` and `sslrootcert` as in libpq. A pooler in transaction
    /// mode must support protocol-level prepared statements (PgBouncer 1.21 or later with `max_prepared_statements`
    /// above 0).
    pub url: UrlSource,
    pub max_connections: u32,
    /// Whether to LISTEN for new outbox rows and webhook events. Must be false behind a pooler in transaction mode.
    pub listen: bool,
}

/// A handle to the database. Clones share the pool.
#[derive(Clone)]
pub struct PostgresStore {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) pool: PgPool,
    pub(super) url: UrlState,
    pub(super) metrics: Metrics,
    /// Notified when this server enqueues outbox rows and, if `listen` is set, when other servers do.
    pub(super) outbox_notify: Arc<Notify>,
    /// If `listen` is set, sends a message when a webhook has new events: the appID, a slash and the name of the
    /// webhook.
    pub(super) new_events: broadcast::Sender<String>,
    listen: bool,
    listener: Option<AbortHandle>,
    /// When a connection was last found broken. Connections that became idle before that time are suspect.
    pub(super) last_broken: Arc<Mutex<Option<Instant>>>,
    pub(super) availability: Availability,
    pub(super) audit: EventWriter,
    /// The connections that calls of administrators and of consumers of webhook events can use at the same time.
    pub(super) administration: Arc<Semaphore>,
    /// The connections that the workers of webhooks can use at the same time.
    pub(super) webhooks: Arc<Semaphore>,
    /// A reference to this value for tasks that must not keep the pool open: they end when the last handle is dropped.
    pub(super) weak_self: Weak<Shared>,
}

// === impl Options ===

impl Options {
    pub fn new(url: UrlSource) -> Self {
        let cpus = std::thread::available_parallelism().map_or(2, usize::from);
        let max_connections = u32::try_from(2 * cpus + 4).unwrap_or(16).min(16);
        Self { url, max_connections, listen: true }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Reads the URL and creates the pool. Connections are opened on first use. Must be called in a tokio runtime.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        let (url, connect_options) = UrlState::read(options.url)?;
        let last_broken = Arc::new(Mutex::new(None));
        let pool = pool::new(options.max_connections, connect_options, Arc::clone(&last_broken));
        let outbox_notify = Arc::new(Notify::new());
        let new_events = broadcast::Sender::new(webhooks::SUBSCRIBER_CAPACITY);
        let listener = options.listen.then(|| {
            tokio::spawn(listener::listen(pool.clone(), Arc::clone(&outbox_notify), new_events.clone())).abort_handle()
        });
        let metrics = Metrics::new(&pool);
        let shared = Arc::new_cyclic(|shared| Shared {
            pool,
            url,
            metrics,
            outbox_notify,
            new_events,
            listen: options.listen,
            listener,
            last_broken,
            availability: Availability::new(options.max_connections),
            audit: EventWriter::start(Weak::clone(shared)),
            administration: Arc::new(Semaphore::new(administration_connections(options.max_connections))),
            webhooks: Arc::new(Semaphore::new(webhooks::CONNECTIONS)),
            weak_self: Weak::clone(shared),
        });
        Ok(Self { shared })
    }

    /// Registers the metrics under names without a prefix. `registry` must add the prefix `postgres`.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }

    /// Returns the version of the newest applied migration. `None` if the database has no schema.
    pub async fn schema_version(&self) -> Result<Option<i64>, StoreError> {
        let mut call = self.begin_call("schema_version").await?;
        let (connection, deadline) = call.parts();
        let version = timeout_at(deadline, migrate::applied_version(connection)).await;
        call.end_call(version)
    }

    /// Writes the recorded audit events, waits for running calls, and closes the connections.
    pub async fn close(&self) {
        self.flush_audit().await;
        self.shared.pool.close().await;
    }

    /// Whether to NOTIFY other servers of new outbox rows and webhook events. NOTIFY serializes commits, so it is sent
    /// only if servers LISTEN.
    pub(super) fn should_notify(&self) -> bool {
        self.shared.listen
    }

    /// Wakes this server's deliverer for new outbox rows. Must be called after the commit.
    pub(super) fn notify_deliverer(&self) {
        self.shared.outbox_notify.notify_one();
    }
}

/// Returns how many connections the calls of administrators and of consumers of webhook events can use at the same time
/// (specification: Administration). The other connections are for the calls of users.
fn administration_connections(max_connections: u32) -> usize {
    (max_connections as usize / 4).max(2)
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(listener) = &self.listener {
            listener.abort();
        }
    }
}
