//! Users, the outbox and audit events in Postgres, and the connection pool that they share.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use prometheus_client::registry::Registry;
use sqlx::{
    ConnectOptions, PgConnection, PgPool, Postgres as Driver,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    sync::Notify,
    task::AbortHandle,
    time::{Instant, error::Elapsed, timeout, timeout_at},
};
use tracing::{Span, info, warn};

use super::{UrlReadError, UrlSource};
use crate::domain::ports::StoreError;

mod accounts;
mod apps;
mod audit;
mod errors;
mod identities;
mod metrics;
pub mod migrate;
mod outage;
mod outbox;
mod unverified;
mod users;

pub use apps::{ClaimOutcome, DeleteOutcome, OwnershipClaim, ReleaseOutcome};
pub use audit::AuditMetrics;
pub(crate) use audit::RefusalColumns;
pub use errors::{CallError, CallErrorKind};
pub use outbox::DeadLetter;
pub use unverified::{UnverifiedBatch, UnverifiedExpiry, UnverifiedPosition};

use metrics::Metrics;
use outage::Availability;

/// The time limit of a call, including the wait for a connection: a stalled Postgres causes 503s, not a queue.
const CALL_TIMEOUT: Duration = Duration::from_secs(4);
/// The part of `CALL_TIMEOUT` that a call can wait for a connection.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection that was idle longer than this is pinged before use. Busy connections cost no extra round trip.
const PING_AFTER_IDLE: Duration = Duration::from_secs(5);
/// The time limit of that ping.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection can take to return to the pool after its use.
const RETURN_TIME: Duration = Duration::from_secs(1);
/// How often the file of the URL is read, so that a rotated password is used before the old one ends.
const URL_READ_INTERVAL: Duration = Duration::from_secs(10);
/// Connections are replaced at this age, so that they spread over Postgres servers that were added.
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);
const IDLE_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Runs once on each new connection. A statement, since poolers refuse startup parameters. Behind a pooler in
/// transaction mode, the settings stay on the server connection that they reached, which is harmless: the limits that
/// always hold are those of this module.
const SESSION_SETTINGS: &str = "SET statement_timeout = 5000; SET idle_in_transaction_session_timeout = 10000";

/// How to reach Postgres.
#[derive(Clone, Debug)]
pub struct Options {
    /// `postgres://user:password@host/database`, with `sslmode` and `sslrootcert` as in libpq. Behind a pooler in
    /// transaction mode, add `statement-cache-capacity=0`.
    pub url: UrlSource,
    pub max_connections: u32,
    /// Whether to LISTEN for new outbox rows. Off behind poolers.
    pub listen: bool,
}

/// The URL cannot be read or is not a Postgres URL. The message does not contain the URL.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    UnreadableUrl(#[from] UrlReadError),
    #[error("the URL of Postgres does not have the form postgres://user:password@host:port/database")]
    InvalidUrl,
}

/// A handle to the database. Clones share the pool.
#[derive(Clone)]
pub struct PostgresStore {
    shared: Arc<Shared>,
}

struct Shared {
    pool: PgPool,
    url: UrlState,
    metrics: Metrics,
    /// Notified when this server enqueues outbox rows and, if `listen`, when other servers do.
    outbox_notify: Arc<Notify>,
    listen: bool,
    listener: Option<AbortHandle>,
    /// When a connection was last found broken. Connections that have been idle since before that are suspect.
    last_broken: Arc<Mutex<Option<Instant>>>,
    availability: Availability,
    audit: audit::EventWriter,
    /// For tasks that end when the last handle is dropped.
    weak_self: Weak<Shared>,
}

struct UrlState {
    url: UrlSource,
    current: Mutex<CurrentUrl>,
}

struct CurrentUrl {
    url: zeroize::Zeroizing<String>,
    read_at: Instant,
}

/// A connection for one call, with the call's deadline. A call that is cut off, by the deadline or by cancellation,
/// leaves the connection in an unknown state, so the connection is closed.
struct CallConnection {
    connection: Option<PoolConnection<Driver>>,
    deadline: Instant,
    postgres: PostgresStore,
    span: Span,
}

// === impl Options ===

impl Options {
    pub fn new(url: UrlSource) -> Self {
        let cpus = std::thread::available_parallelism().map_or(2, usize::from);
        let max_connections = u32::try_from(2 * cpus + 4).unwrap_or(16).min(16);
        Self { url, max_connections, listen: true }
    }
}

fn parse_url(url: &str) -> Result<PgConnectOptions, ConnectError> {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(ConnectError::InvalidUrl);
    }
    let options: PgConnectOptions = url.parse().map_err(|_| ConnectError::InvalidUrl)?;
    // Poolers refuse the parameter extra_float_digits, and no float is sent as text.
    Ok(options.application_name("latchkey").extra_float_digits(None).disable_statement_logging())
}

// === impl Postgres ===

impl PostgresStore {
    /// Reads the URL and creates the pool. Connections are opened on first use. Must be called in a tokio runtime.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        let url = options.url.read()?;
        let connect = parse_url(&url)?;
        let fault = Arc::new(Mutex::new(None));
        let pool = new_pool(options.max_connections, connect, Arc::clone(&fault));
        let news = Arc::new(Notify::new());
        let source = UrlState { url: options.url, current: Mutex::new(CurrentUrl { url, read_at: Instant::now() }) };
        let listener =
            options.listen.then(|| tokio::spawn(outbox::listen(pool.clone(), Arc::clone(&news))).abort_handle());
        let metrics = Metrics::new(&pool);
        let shared = Arc::new_cyclic(|shared| Shared {
            pool,
            url: source,
            metrics,
            outbox_notify: news,
            listen: options.listen,
            listener,
            last_broken: fault,
            availability: Availability::new(),
            audit: audit::EventWriter::start(Weak::clone(shared)),
            weak_self: Weak::clone(shared),
        });
        Ok(Self { shared })
    }

    /// Registers metrics under names without a prefix; the caller passes a registry with the prefix.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }

    /// The version of the newest applied migration. `None` if the database has no schema.
    pub async fn schema_version(&self) -> Result<Option<i64>, StoreError> {
        let mut held = self.begin_call("schema_version").await?;
        let (connection, until) = held.parts();
        let answer = timeout_at(until, migrate::applied_version(connection)).await;
        held.end_call(answer)
    }

    /// Writes the recorded audit events, waits for running calls, and closes the connections.
    pub async fn close(&self) {
        self.flush_audit().await;
        self.shared.pool.close().await;
    }

    /// Whether to NOTIFY other servers of new outbox rows. NOTIFY serializes commits, so it is sent only if servers
    /// LISTEN.
    fn should_notify(&self) -> bool {
        self.shared.listen
    }

    /// Wakes this server's deliverer for new outbox rows.
    fn notify_deliverer(&self) {
        self.shared.outbox_notify.notify_one();
    }

    /// Acquires a connection for a call. `operation` names the call's trace span.
    async fn begin_call(&self, operation: &'static str) -> Result<CallConnection, StoreError> {
        let span = latchkey_telemetry::child_span!(
            "client",
            "postgres",
            otel.name = operation,
            db.system.name = "postgresql",
            db.operation.name = operation,
        );
        let until = Instant::now() + CALL_TIMEOUT;
        self.reread_url(false);
        let started = Instant::now();
        let mut acquired = self.shared.acquire().await;
        if let Err(fault) = &acquired
            && fault.is_about_the_url()
            && self.reread_url(true)
        {
            acquired = self.shared.acquire().await;
        }
        self.shared.metrics.observe_wait(started.elapsed());
        let connection = acquired.map_err(|fault| self.record_error_in(&span, fault))?;
        Ok(CallConnection { connection: Some(connection), deadline: until, postgres: self.clone(), span })
    }

    /// Reads the URL again and returns whether it changed. New connections then use the new URL.
    fn reread_url(&self, now: bool) -> bool {
        let source = &self.shared.url;
        let mut seen = source.current.lock().unwrap_or_else(PoisonError::into_inner);
        if !now && seen.read_at.elapsed() < URL_READ_INTERVAL {
            return false;
        }
        seen.read_at = Instant::now();
        match source.url.read().map_err(ConnectError::from) {
            Ok(url) if url == seen.url => false,
            Ok(url) => match parse_url(&url) {
                Ok(options) => {
                    info!("the URL of Postgres has changed");
                    self.shared.pool.set_connect_options(options);
                    self.shared.availability.reset();
                    seen.url = url;
                    true
                }
                Err(error) => {
                    warn!(error = &error as &dyn std::error::Error, "the new URL of Postgres is invalid");
                    false
                }
            },
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "the URL of Postgres cannot be read again");
                false
            }
        }
    }

    fn record_error_in(&self, span: &Span, fault: CallError) -> StoreError {
        latchkey_telemetry::record_error(span, fault.kind.as_str());
        self.record_error(fault)
    }

    fn record_error(&self, fault: CallError) -> StoreError {
        if fault.breaks_the_connection() {
            *self.shared.last_broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        self.shared.metrics.count_error(fault.kind);
        fault.into()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(listener) = &self.listener {
            listener.abort();
        }
    }
}

fn new_pool(max_connections: u32, connect: PgConnectOptions, fault: Arc<Mutex<Option<Instant>>>) -> PgPool {
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .max_lifetime(MAX_LIFETIME)
        .idle_timeout(IDLE_TIMEOUT)
        // `before_acquire` pings only connections that may be broken.
        .test_before_acquire(false)
        .before_acquire(move |connection, meta| {
            let known = *fault.lock().unwrap_or_else(PoisonError::into_inner);
            // A connection that became idle a moment after the failure may have been on its way back when it happened.
            let suspect = known.is_some_and(|fault| fault.elapsed() <= meta.idle_for + RETURN_TIME);
            let fault = Arc::clone(&fault);
            Box::pin(async move {
                if meta.idle_for < PING_AFTER_IDLE && !suspect {
                    return Ok(true);
                }
                let ping = sqlx::Connection::ping(connection);
                let alive = matches!(timeout(PING_TIMEOUT, ping).await, Ok(Ok(())));
                if !alive {
                    // The other idle connections are suspect too.
                    *fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                }
                Ok(alive)
            })
        })
        .after_connect(|connection, _| {
            Box::pin(async move { sqlx::raw_sql(SESSION_SETTINGS).execute(connection).await.map(drop) })
        })
        .connect_lazy_with(connect)
}

// === impl CallConnection ===

impl CallConnection {
    /// The connection and the call's deadline.
    fn parts(&mut self) -> (&mut PgConnection, Instant) {
        (self.connection.as_mut().expect("the connection is present until `done`"), self.deadline)
    }

    /// Ends the call. The connection returns to the pool, or is closed if the deadline has passed.
    fn end_call<T>(mut self, answer: Result<Result<T, sqlx::Error>, Elapsed>) -> Result<T, StoreError> {
        let Ok(answer) = answer else {
            return Err(self.postgres.record_error_in(&self.span, CallError::deadline()));
        };
        drop(self.connection.take());
        if answer.is_ok() {
            self.postgres.shared.availability.record_success();
        }
        answer.map_err(|error| self.postgres.record_error_in(&self.span, CallError::from(&error)))
    }
}

impl Drop for CallConnection {
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.close_on_drop();
        }
    }
}
