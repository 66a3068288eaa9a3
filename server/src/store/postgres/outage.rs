//! Detects an outage of Postgres, so that calls fail immediately instead of waiting for a connection.
//!
//! sqlx retries a refused connection until the pool's time limit. Therefore one task, the probe, tries to open its own
//! connection. While the probe fails, no call waits for a connection.

use std::{
    future::pending,
    pin::pin,
    sync::{
        Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use sqlx::{ConnectOptions, Connection, PgPool, Postgres as Driver, pool::PoolConnection};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    Shared,
    errors::{CallError, CallErrorKind},
    pool::ACQUIRE_TIMEOUT,
};

/// Maximum number of calls that wait for a connection at the same time. Further calls fail. With 8 connections and 2 ms
/// per call, the last of these calls waits 0.3 s.
const MAX_WAITING_CALLS: usize = 1024;
/// A call that waits longer than this while no other call succeeds starts the probe. While a busy pool still serves
/// calls, the probe does not start.
const PROBE_AFTER: Duration = Duration::from_millis(50);
/// How often the probe connects during an outage. The end of the outage is detected within this time plus the time to
/// connect.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);
/// If the probe cannot open a connection within this time, there is an outage, too. This time is longer than
/// `ACQUIRE_TIMEOUT` (3 s), so that there is no outage while connecting is slow, but fast enough for calls.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// Whether Postgres accepts connections.
pub(super) struct Availability {
    outage: watch::Sender<Option<Outage>>,
    last_success: Mutex<Instant>,
    is_probing: AtomicBool,
    waiting_permits: Semaphore,
    /// One permit per connection of the pool. Only calls with a permit wait in the pool, because a wait there costs 10
    /// KiB. Further calls wait for a permit.
    pool_permits: Semaphore,
}

/// A failed attempt of the probe to open a connection.
struct Outage {
    /// When the attempt began. A call that succeeds after this time disproves the outage.
    since: Instant,
    error: CallError,
}

// === impl Availability ===

impl Availability {
    pub(super) fn new(max_connections: u32) -> Self {
        Self {
            outage: watch::Sender::new(None),
            last_success: Mutex::new(Instant::now()),
            is_probing: AtomicBool::new(false),
            waiting_permits: Semaphore::new(MAX_WAITING_CALLS),
            pool_permits: Semaphore::new(max_connections as usize),
        }
    }

    /// Records that a call has succeeded.
    pub(super) fn record_success(&self) {
        *self.last_success.lock() = Instant::now();
    }

    /// Clears the outage, because connections work again or the URL changed. Failed attempts that began earlier are
    /// ignored.
    pub(super) fn reset(&self) {
        self.record_success();
        self.outage.send_replace(None);
    }

    fn last_success(&self) -> Instant {
        *self.last_success.lock()
    }

    /// Returns the reason that no connection can be opened, if there is an outage.
    fn outage_error(&self) -> Option<CallError> {
        let outage = self.outage.borrow();
        outage.as_ref().filter(|outage| self.last_success() < outage.since).map(|outage| outage.error.duplicate())
    }

    /// Completes when an outage is detected.
    async fn wait_for_outage(&self, mut changes: watch::Receiver<Option<Outage>>) -> CallError {
        loop {
            if let Some(error) = self.outage_error() {
                return error;
            }
            if changes.changed().await.is_err() {
                return pending().await;
            }
        }
    }
}

impl Shared {
    /// Acquires a connection within the pool's time limit. Fails immediately if too many calls wait, or if there is an
    /// outage and no connection is idle.
    pub(super) async fn acquire(&self) -> Result<PoolConnection<Driver>, CallError> {
        let Ok(_permit) = self.availability.waiting_permits.try_acquire() else {
            return Err(CallError::pool_timeout());
        };
        if let Some(error) = self.availability.outage_error()
            // Open connections may still work, for example if Postgres rejects only new connections.
            && self.pool.num_idle() == 0
        {
            self.probe();
            return Err(error);
        }
        let changes = self.availability.outage.subscribe();
        let mut acquire = pin!(timeout(ACQUIRE_TIMEOUT, async {
            let _permit = self.availability.pool_permits.acquire().await.expect("the semaphore is never closed");
            // Boxed: otherwise every future that calls Postgres would be larger by what connecting needs.
            Box::pin(self.pool.acquire()).await
        }));
        let acquired = match timeout(PROBE_AFTER, &mut acquire).await {
            Ok(acquired) => acquired,
            Err(_) => {
                if self.availability.last_success().elapsed() >= PROBE_AFTER {
                    self.probe();
                }
                tokio::select! {
                    biased;
                    acquired = &mut acquire => acquired,
                    error = self.availability.wait_for_outage(changes) => return Err(error),
                }
            }
        };
        let Ok(acquired) = acquired else { return Err(CallError::pool_timeout()) };
        acquired.map_err(|error| {
            let error = CallError::from(&error);
            if error.is_outage() {
                self.probe();
            }
            error
        })
    }

    /// Starts the task that checks whether connections can be opened, unless the task is already running.
    fn probe(&self) {
        if !self.availability.is_probing.swap(true, Ordering::AcqRel) {
            tokio::spawn(probe(Weak::clone(&self.weak_self)));
        }
    }
}

/// Tries to open a connection until an attempt succeeds. Until then, reports an outage.
async fn probe(shared: Weak<Shared>) {
    let mut is_reported = false;
    loop {
        let Some(pool) = shared.upgrade().map(|shared| shared.pool.clone()) else { return };
        let since = Instant::now();
        let result = try_connect(&pool).await;
        let Some(shared) = shared.upgrade().filter(|_| !pool.is_closed()) else { return };
        let availability = &shared.availability;
        match result {
            Err(error) if error.is_outage() => {
                if !std::mem::replace(&mut is_reported, true) {
                    warn!(error = &error as &dyn std::error::Error, "Postgres does not accept connections");
                }
                availability.outage.send_replace(Some(Outage { since, error }));
            }
            // The error "too many connections" is no outage: a connection may become free at any moment.
            Ok(()) | Err(_) => {
                if is_reported {
                    info!("Postgres accepts connections again");
                }
                availability.reset();
                availability.is_probing.store(false, Ordering::Release);
                return;
            }
        }
        drop(shared);
        sleep(PROBE_INTERVAL).await;
    }
}

async fn try_connect(pool: &PgPool) -> Result<(), CallError> {
    let options = pool.connect_options();
    let connection = match timeout(PROBE_TIMEOUT, options.connect()).await {
        Ok(connected) => connected.map_err(|error| CallError::from(&error))?,
        Err(_) => return Err(CallError::deadline()),
    };
    // Postgres accepts connections. Whether this connection closes without an error does not matter.
    drop(timeout(PROBE_TIMEOUT, connection.close()).await);
    Ok(())
}

// === impl CallError ===

impl CallError {
    /// Whether the next attempt to connect will most likely fail, too.
    fn is_outage(&self) -> bool {
        match self.kind {
            CallErrorKind::Connection
            | CallErrorKind::Tls
            | CallErrorKind::Configuration
            | CallErrorKind::AccessDenied
            | CallErrorKind::Deadline
            | CallErrorKind::Unavailable => true,
            CallErrorKind::PoolTimeout
            | CallErrorKind::Overloaded
            | CallErrorKind::Conflict
            | CallErrorKind::Unexpected => false,
        }
    }
}
