//! The connection pool, and the URL that its new connections use.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use sqlx::{
    ConnectOptions, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::PostgresStore;
use crate::store::{UrlReadError, UrlSource};

/// How long a call can wait for a connection. This is a part of the call's time limit.
pub(super) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection that was idle for at least this time is pinged before use. A connection that was idle for a shorter
/// time is pinged only if another connection was found broken, so a busy connection costs no extra round trip.
const PING_AFTER_IDLE: Duration = Duration::from_secs(5);
/// The time limit of the ping of an idle connection.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a connection can take to return to the pool after its use.
const RETURN_TIME: Duration = Duration::from_secs(1);
/// How often the file with the URL is read, so that a rotated password is used before the old password stops working.
const URL_READ_INTERVAL: Duration = Duration::from_secs(10);
/// Connections are replaced at this age, so that new connections also go to Postgres servers that were added.
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);
const IDLE_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Runs once on each new connection. The settings are sent as a statement, because poolers reject startup parameters.
/// Behind a pooler in transaction mode, the settings stay on the server connection that they reached, so a call can run
/// without the settings. This is harmless, because the module `call` limits the time of every call itself.
const SESSION_SETTINGS: &str = "SET statement_timeout = 5000; SET idle_in_transaction_session_timeout = 10000";

/// The URL cannot be read or is not a Postgres URL. The message does not contain the URL.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    UnreadableUrl(#[from] UrlReadError),
    #[error("the URL of Postgres does not have the form postgres://user:password@host:port/database")]
    InvalidUrl,
}

/// The source of the URL, and the URL as it was last read.
pub(super) struct UrlState {
    source: UrlSource,
    current: Mutex<CurrentUrl>,
}

struct CurrentUrl {
    url: Zeroizing<String>,
    read_at: Instant,
}

/// Creates the pool. `last_broken` is when a connection was last found broken.
pub(super) fn new(
    max_connections: u32,
    connect_options: PgConnectOptions,
    last_broken: Arc<Mutex<Option<Instant>>>,
) -> PgPool {
    PgPoolOptions::new()
        .max_connections(max_connections)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .max_lifetime(MAX_LIFETIME)
        .idle_timeout(IDLE_TIMEOUT)
        // `before_acquire` pings only connections that may be broken.
        .test_before_acquire(false)
        .before_acquire(move |connection, meta| {
            let broken_at = *last_broken.lock();
            // A connection can take up to `RETURN_TIME` to return to the pool. So a connection that became idle shortly
            // after the failure may have been in use before the failure.
            let is_suspect = broken_at.is_some_and(|broken_at| broken_at.elapsed() <= meta.idle_for + RETURN_TIME);
            let last_broken = Arc::clone(&last_broken);
            Box::pin(async move {
                if meta.idle_for < PING_AFTER_IDLE && !is_suspect {
                    return Ok(true);
                }
                let ping = sqlx::Connection::ping(connection);
                let is_alive = matches!(timeout(PING_TIMEOUT, ping).await, Ok(Ok(())));
                if !is_alive {
                    // The other idle connections are suspect too.
                    *last_broken.lock() = Some(Instant::now());
                }
                Ok(is_alive)
            })
        })
        .after_connect(|connection, _| {
            Box::pin(async move { sqlx::raw_sql(SESSION_SETTINGS).execute(connection).await.map(drop) })
        })
        .connect_lazy_with(connect_options)
}

pub(super) fn parse_url(url: &str) -> Result<PgConnectOptions, ConnectError> {
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(ConnectError::InvalidUrl);
    }
    let options: PgConnectOptions = url.parse().map_err(|_| ConnectError::InvalidUrl)?;
    // Poolers reject the parameter extra_float_digits, and no float is sent as text.
    Ok(options.application_name("latchkey").extra_float_digits(None).disable_statement_logging())
}

// === impl UrlState ===

impl UrlState {
    pub(super) fn read(source: UrlSource) -> Result<(Self, PgConnectOptions), ConnectError> {
        let url = source.read()?;
        let options = parse_url(&url)?;
        Ok((Self { source, current: Mutex::new(CurrentUrl { url, read_at: Instant::now() }) }, options))
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Reads the URL again, unless it was read recently and `force` is false. Returns whether the URL has changed. If
    /// so, new connections use the new URL.
    pub(super) fn reread_url(&self, force: bool) -> bool {
        let state = &self.shared.url;
        let mut current = state.current.lock();
        if !force && current.read_at.elapsed() < URL_READ_INTERVAL {
            return false;
        }
        current.read_at = Instant::now();
        match state.source.read().map_err(ConnectError::from) {
            Ok(url) if url == current.url => false,
            Ok(url) => match parse_url(&url) {
                Ok(options) => {
                    info!("the URL of Postgres has changed");
                    self.shared.pool.set_connect_options(options);
                    self.shared.availability.reset();
                    current.url = url;
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
}
