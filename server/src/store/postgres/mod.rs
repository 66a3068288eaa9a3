//! Users, the outbox and audit events, in Postgres: the pool, its limits, and what its errors mean.

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

use super::{Unreadable, UrlSource};
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

pub use apps::{AppClaim, Claim, Deleting, Releasing};
pub use audit::AuditMetrics;
pub(crate) use audit::RefusalColumns;
pub use errors::{Fault, FaultKind};
pub use outbox::DeadLetter;
pub use unverified::{Batch, Position, Unverified};

use metrics::Metrics;
use outage::Availability;

/// What a call may take in all, waiting for a connection included: a stalled server becomes a 503, not a queue.
const CALL_LIMIT: Duration = Duration::from_secs(4);
/// What waiting for a connection may take of that.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(3);
/// A connection that rested longer than this is asked whether it still lives; a busy one costs no extra round trip.
const RESTED: Duration = Duration::from_secs(5);
/// How long that question may take.
const PING_LIMIT: Duration = Duration::from_secs(1);
/// How long after its use a connection may be on its way back to the pool.
const COMING_BACK: Duration = Duration::from_secs(1);
/// How often the file of the URL is looked at: a password that was rotated is used before the old one ends.
const REREAD: Duration = Duration::from_secs(10);
/// Connections are renewed now and then, so that they spread over servers that came up since.
const LIFETIME: Duration = Duration::from_secs(30 * 60);
const IDLE: Duration = Duration::from_secs(5 * 60);
/// Said once on each connection, by a statement: start-up parameters are refused by poolers. Behind a pooler that gives
/// out connections by transaction these stay on whichever server connection they reached, which does no harm; the time
/// limits that always hold are those of this module.
const SESSION: &str = "SET statement_timeout = 5000; SET idle_in_transaction_session_timeout = 10000";

/// How to reach Postgres.
#[derive(Clone, Debug)]
pub struct Options {
    /// `postgres://user:password@host/database`; `sslmode` and `sslrootcert` as libpq has them. Behind a pooler that
    /// gives out connections by transaction add `statement-cache-capacity=0`.
    pub url: UrlSource,
    pub max_connections: u32,
    /// Whether to LISTEN for new rows of the outbox; off behind poolers.
    pub listen: bool,
}

/// The URL is not there or not one of Postgres. The text does not hold it.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("the URL of Postgres is not of the form postgres://user:password@host:port/database")]
    Malformed,
}

/// A handle to the database.
#[derive(Clone)]
pub struct Postgres {
    shared: Arc<Shared>,
}

struct Shared {
    pool: PgPool,
    source: Source,
    metrics: Metrics,
    /// Pinged by our own enqueuing and, where it listens, by that of others.
    news: Arc<Notify>,
    listen: bool,
    listener: Option<AbortHandle>,
    /// When a connection was last found broken: those that rest since before are suspect.
    fault: Arc<Mutex<Option<Instant>>>,
    availability: Availability,
    audit: audit::Writer,
    /// For tasks that end when the last handle goes.
    own: Weak<Shared>,
}

struct Source {
    url: UrlSource,
    seen: Mutex<Seen>,
}

struct Seen {
    url: zeroize::Zeroizing<String>,
    at: Instant,
}

/// A connection for one call, with the time at which the call is given up. A call that does not come to its end, by the
/// deadline or because the request went away, leaves a connection in an unknown state: it is closed.
struct Held {
    connection: Option<PoolConnection<Driver>>,
    until: Instant,
    postgres: Postgres,
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

fn parse(url: &str) -> Result<PgConnectOptions, ConnectError> {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(ConnectError::Malformed);
    }
    let options: PgConnectOptions = url.parse().map_err(|_| ConnectError::Malformed)?;
    // Poolers refuse the parameter, and no float goes over the wire as text.
    Ok(options.application_name("latchkey").extra_float_digits(None).disable_statement_logging())
}

// === impl Postgres ===

impl Postgres {
    /// Reads the URL and makes the pool; connections are made when they are needed. Needs a running tokio.
    pub fn connect(options: Options) -> Result<Self, ConnectError> {
        let url = options.url.read()?;
        let connect = parse(&url)?;
        let fault = Arc::new(Mutex::new(None));
        let pool = pool(options.max_connections, connect, Arc::clone(&fault));
        let news = Arc::new(Notify::new());
        let source = Source { url: options.url, seen: Mutex::new(Seen { url, at: Instant::now() }) };
        let listener =
            options.listen.then(|| tokio::spawn(outbox::listen(pool.clone(), Arc::clone(&news))).abort_handle());
        let metrics = Metrics::new(&pool);
        let shared = Arc::new_cyclic(|shared| Shared {
            pool,
            source,
            metrics,
            news,
            listen: options.listen,
            listener,
            fault,
            availability: Availability::new(),
            audit: audit::Writer::start(Weak::clone(shared)),
            own: Weak::clone(shared),
        });
        Ok(Self { shared })
    }

    /// Under names without a prefix: the registry is to be one of Postgres's own.
    pub fn register(&self, registry: &mut Registry) {
        self.shared.metrics.register(registry);
    }

    /// The newest migration that the database has seen; none where it is empty.
    pub async fn schema_version(&self) -> Result<Option<i64>, StoreError> {
        let mut held = self.hold("schema_version").await?;
        let (connection, until) = held.parts();
        let answer = timeout_at(until, migrate::seen_version(connection)).await;
        held.done(answer)
    }

    /// Closes the connections; what runs comes to its end first, and what was recorded is written.
    pub async fn close(&self) {
        self.flush_audit().await;
        self.shared.pool.close().await;
    }

    /// Whether enqueuing tells other servers. NOTIFY makes commits wait for each other, so it is sent only where somebody
    /// listens.
    fn tells(&self) -> bool {
        self.shared.listen
    }

    /// Tells our own worker that there are rows.
    fn wake(&self) {
        self.shared.news.notify_one();
    }

    /// A connection for a call; the operation's name is that of the call's span.
    async fn hold(&self, operation: &'static str) -> Result<Held, StoreError> {
        let span = latchkey_trace::child!(
            "client",
            "postgres",
            otel.name = operation,
            db.system.name = "postgresql",
            db.operation.name = operation,
        );
        let until = Instant::now() + CALL_LIMIT;
        self.reread(false);
        let started = Instant::now();
        let mut acquired = self.shared.acquire().await;
        if let Err(fault) = &acquired
            && fault.is_about_the_url()
            && self.reread(true)
        {
            acquired = self.shared.acquire().await;
        }
        self.shared.metrics.waited(started.elapsed());
        let connection = acquired.map_err(|fault| self.refused_in(&span, fault))?;
        Ok(Held { connection: Some(connection), until, postgres: self.clone(), span })
    }

    /// Whether the URL is another than before; new connections are then made with it.
    fn reread(&self, now: bool) -> bool {
        let source = &self.shared.source;
        let mut seen = source.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if !now && seen.at.elapsed() < REREAD {
            return false;
        }
        seen.at = Instant::now();
        match source.url.read().map_err(ConnectError::from) {
            Ok(url) if url == seen.url => false,
            Ok(url) => match parse(&url) {
                Ok(options) => {
                    info!("the URL of Postgres has changed");
                    self.shared.pool.set_connect_options(options);
                    self.shared.availability.reset();
                    seen.url = url;
                    true
                }
                Err(error) => {
                    warn!(error = &error as &dyn std::error::Error, "the new URL of Postgres is not used");
                    false
                }
            },
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "the URL of Postgres cannot be read again");
                false
            }
        }
    }

    fn refused_in(&self, span: &Span, fault: Fault) -> StoreError {
        latchkey_trace::fail(span, fault.kind.as_str());
        self.refused(fault)
    }

    fn refused(&self, fault: Fault) -> StoreError {
        if fault.breaks_the_connection() {
            *self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        self.shared.metrics.failed(fault.kind);
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

fn pool(max_connections: u32, connect: PgConnectOptions, fault: Arc<Mutex<Option<Instant>>>) -> PgPool {
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(ACQUIRE_LIMIT)
        .max_lifetime(LIFETIME)
        .idle_timeout(IDLE)
        // Asked below, and only where there is reason to.
        .test_before_acquire(false)
        .before_acquire(move |connection, meta| {
            let known = *fault.lock().unwrap_or_else(PoisonError::into_inner);
            // One that came back to rest a moment after the fault may have been on its way back when it happened.
            let suspect = known.is_some_and(|fault| fault.elapsed() <= meta.idle_for + COMING_BACK);
            let fault = Arc::clone(&fault);
            Box::pin(async move {
                if meta.idle_for < RESTED && !suspect {
                    return Ok(true);
                }
                let ping = sqlx::Connection::ping(connection);
                let alive = matches!(timeout(PING_LIMIT, ping).await, Ok(Ok(())));
                if !alive {
                    // Those that rested beside it are suspect too.
                    *fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                }
                Ok(alive)
            })
        })
        .after_connect(|connection, _| {
            Box::pin(async move { sqlx::raw_sql(SESSION).execute(connection).await.map(drop) })
        })
        .connect_lazy_with(connect)
}

// === impl Held ===

impl Held {
    /// The connection, and when to stop waiting for it.
    fn parts(&mut self) -> (&mut PgConnection, Instant) {
        (self.connection.as_mut().expect("held until it is done"), self.until)
    }

    /// Ends the call: the connection goes back unless the call was given up.
    fn done<T>(mut self, answer: Result<Result<T, sqlx::Error>, Elapsed>) -> Result<T, StoreError> {
        let Ok(answer) = answer else {
            return Err(self.postgres.refused_in(&self.span, Fault::deadline()));
        };
        drop(self.connection.take());
        if answer.is_ok() {
            self.postgres.shared.availability.succeeded();
        }
        answer.map_err(|error| self.postgres.refused_in(&self.span, Fault::from(&error)))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.close_on_drop();
        }
    }
}
