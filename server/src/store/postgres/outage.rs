//! What is known of an outage of Postgres, so that calls fail at once instead of waiting for a connection.
//!
//! sqlx tries a refused connection again until its time is over. Here one task makes a connection of its own, and as long
//! as that fails nobody waits.

use std::{
    future::pending,
    sync::{
        Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sqlx::{ConnectOptions, Connection, PgPool, Postgres as Driver, pool::PoolConnection};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    Shared,
    errors::{Fault, FaultKind},
};

/// Calls that wait for a connection at the same time; more are refused. Each costs about 14 KiB while it waits, so all of
/// them 14 MiB. With 8 connections and 2 ms for a call the last of them waits 0.3 s.
const MAX_WAITING: usize = 1024;
/// A call that waits longer while no other call succeeds is a reason to look. A pool that is merely busy is none.
const PROBE_AFTER: Duration = Duration::from_millis(50);
/// How often is looked during an outage; its end is noticed within this time and that of a connection.
const PROBE_EVERY: Duration = Duration::from_millis(250);
/// A connection that is not made in this time counts as an outage too. Longer than the pool waits for one
/// (3 s): where making one is slow, and calls still get theirs, there is no outage.
const PROBE_LIMIT: Duration = Duration::from_secs(4);

/// Whether Postgres takes connections.
pub(super) struct Availability {
    outage: watch::Sender<Option<Outage>>,
    last_success: Mutex<Instant>,
    probing: AtomicBool,
    waiting: Semaphore,
}

/// A connection could not be made.
struct Outage {
    /// When the attempt began: a call that succeeds later disproves it.
    since: Instant,
    fault: Fault,
}

// === impl Availability ===

impl Availability {
    pub(super) fn new() -> Self {
        Self {
            outage: watch::Sender::new(None),
            last_success: Mutex::new(Instant::now()),
            probing: AtomicBool::new(false),
            waiting: Semaphore::new(MAX_WAITING),
        }
    }

    /// A call has succeeded.
    pub(super) fn succeeded(&self) {
        *self.last_success.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Forgets an outage, since connections can be made now, or in another way. An attempt that began before counts no more.
    pub(super) fn reset(&self) {
        self.succeeded();
        self.outage.send_replace(None);
    }

    fn last_success(&self) -> Instant {
        *self.last_success.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why no connection can be made, if that is known.
    fn known(&self) -> Option<Fault> {
        let outage = self.outage.borrow();
        outage.as_ref().filter(|outage| self.last_success() < outage.since).map(|outage| outage.fault.duplicate())
    }

    /// Resolves when an outage becomes known.
    async fn becomes_known(&self, mut news: watch::Receiver<Option<Outage>>) -> Fault {
        loop {
            if let Some(fault) = self.known() {
                return fault;
            }
            if news.changed().await.is_err() {
                return pending().await;
            }
        }
    }
}

impl Shared {
    /// A connection, within the pool's own time limit; at once a fault if the outage is known or too many wait.
    pub(super) async fn acquire(&self) -> Result<PoolConnection<Driver>, Fault> {
        let Ok(_place) = self.availability.waiting.try_acquire() else { return Err(Fault::pool_timeout()) };
        if let Some(fault) = self.availability.known()
            // Those that are there may still work, for example while only new logins are refused.
            && self.pool.num_idle() == 0
        {
            self.probe();
            return Err(fault);
        }
        let news = self.availability.outage.subscribe();
        // In a box, or everything that asks Postgres would be larger by the 14 KiB that making a connection needs.
        let mut acquire = Box::pin(self.pool.acquire());
        let acquired = match timeout(PROBE_AFTER, &mut acquire).await {
            Ok(acquired) => acquired,
            Err(_) => {
                if self.availability.last_success().elapsed() >= PROBE_AFTER {
                    self.probe();
                }
                tokio::select! {
                    biased;
                    acquired = &mut acquire => acquired,
                    fault = self.availability.becomes_known(news) => return Err(fault),
                }
            }
        };
        acquired.map_err(|error| {
            let fault = Fault::from(&error);
            if fault.is_outage() {
                self.probe();
            }
            fault
        })
    }

    /// Starts the task that looks whether connections can be made, unless it runs.
    fn probe(&self) {
        if !self.availability.probing.swap(true, Ordering::AcqRel) {
            tokio::spawn(probe(Weak::clone(&self.own)));
        }
    }
}

/// Makes connections until one succeeds, and reports the outage as long as none does.
async fn probe(shared: Weak<Shared>) {
    let mut reported = false;
    loop {
        let Some(pool) = shared.upgrade().map(|shared| shared.pool.clone()) else { return };
        let since = Instant::now();
        let result = connect(&pool).await;
        let Some(shared) = shared.upgrade().filter(|_| !pool.is_closed()) else { return };
        let availability = &shared.availability;
        match result {
            Err(fault) if fault.is_outage() => {
                if !std::mem::replace(&mut reported, true) {
                    warn!(error = &fault as &dyn std::error::Error, "Postgres takes no connections");
                }
                availability.outage.send_replace(Some(Outage { since, fault }));
            }
            // Full is not away: a place may come free at any moment.
            Ok(()) | Err(_) => {
                if reported {
                    info!("Postgres takes connections again");
                }
                availability.reset();
                availability.probing.store(false, Ordering::Release);
                return;
            }
        }
        drop(shared);
        sleep(PROBE_EVERY).await;
    }
}

async fn connect(pool: &PgPool) -> Result<(), Fault> {
    let options = pool.connect_options();
    let connection = match timeout(PROBE_LIMIT, options.connect()).await {
        Ok(connected) => connected.map_err(|error| Fault::from(&error))?,
        Err(_) => return Err(Fault::deadline()),
    };
    // It was made, which is all there is to know; how it ends does not matter.
    drop(timeout(PROBE_LIMIT, connection.close()).await);
    Ok(())
}

// === impl Fault ===

impl Fault {
    /// Whether the next connection will most likely fail as well.
    fn is_outage(&self) -> bool {
        match self.kind {
            FaultKind::Connection
            | FaultKind::Tls
            | FaultKind::Configuration
            | FaultKind::Refused
            | FaultKind::Deadline
            | FaultKind::Away => true,
            FaultKind::PoolTimeout | FaultKind::Overloaded | FaultKind::Conflict | FaultKind::Unexpected => false,
        }
    }
}
