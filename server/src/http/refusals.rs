//! Slows down clients that return early, which means before the time in `Retry-After` is over. Refusals of their
//! requests are held for a while before they are sent. A held refusal needs a timer, but no place in the hashing queue.
//! This module also limits the number of log lines for refusals.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::quota::{Quota, QuotaPermit};
use crate::domain::client::ClientAddress;

/// How many early returns a client can make before its refusals are held. A page that sends a few requests at the same
/// time, or a person who tries again, is not slowed down.
const MAX_UNHELD_RETURNS: u32 = 3;
/// How long the first held refusal is held. Each further early return doubles this time, up to [`MAX_HOLD`].
const FIRST_HOLD: Duration = Duration::from_millis(500);
/// The longest time for which a refusal is held. It is far below the time (NGINX: 60 s) that proxies wait for a
/// response, but slows a connection down from thousands of requests per second to one every four seconds.
const MAX_HOLD: Duration = Duration::from_secs(4);
/// Early returns are forgotten after the time in `Retry-After`, but at the latest after this time.
const MAX_REMEMBERED: Duration = Duration::from_secs(60);
/// Maximum number of client addresses that are remembered. They take at most 1 MiB. Refusals of further clients are not
/// held.
const MAX_CLIENTS: usize = 8192;
/// If the map of clients is full, clients that can no longer return early are removed, at most once per interval.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// At most an eighth of the refusals that can be held are for one client address.
const CLIENT_DIVISOR: usize = 8;
/// At most half of the refusals that can be held are for one IPv6 /48.
const SITE_DIVISOR: usize = 2;
/// Maximum number of refusals that are logged individually in one [`LOG_WINDOW`].
const MAX_LOGGED: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(1);

/// The refusals of one process: errors because of a limit, lack of capacity or an outage.
#[derive(Debug)]
pub struct Refusals {
    /// The refusals that are held with their connection.
    held_quota: Arc<Quota>,
    /// The refusals that are held without their connection.
    parked_quota: Arc<Quota>,
    returning_clients: Mutex<ReturningClients>,
    log: RefusalLog,
}

#[derive(Debug)]
struct ReturningClients {
    clients: HashMap<ClientAddress, EarlyReturns>,
    next_sweep: Instant,
}

/// How often a client address has returned early.
#[derive(Clone, Copy, Debug)]
struct EarlyReturns {
    count: u32,
    /// When the last counted refusal is sent. A request that began before this time was concurrent with the refused
    /// request, so it is not counted.
    sent_at: Instant,
    /// A request that begins at or after this time is no early return.
    retry_at: Instant,
}

/// A refusal that is sent later.
#[derive(Debug)]
pub struct HeldRefusal {
    until: Instant,
    place: HoldPlace,
    _permit: QuotaPermit,
}

/// What a held refusal occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldPlace {
    /// Its connection.
    Connection,
    /// Only the socket: the refusal is the last response of its connection.
    Socket,
}

/// Decides which refusals are logged individually.
#[derive(Debug)]
struct RefusalLog {
    window: Mutex<LogWindow>,
    has_omitted: AtomicBool,
}

#[derive(Debug)]
struct LogWindow {
    began: Instant,
    logged: u32,
    /// The number of refusals that were not logged individually, by route and status. The map is small, because there
    /// are few routes and statuses.
    omitted: HashMap<(&'static str, StatusCode), u64>,
}

// === impl Refusals ===

impl Refusals {
    /// Holds at most `max_held` refusals with their connections at a time, and `max_parked` without.
    pub(super) fn new(max_held: usize, max_parked: usize) -> Self {
        let now = Instant::now();
        let quota = |total| Quota::new(total, total / CLIENT_DIVISOR, total / SITE_DIVISOR);
        Self {
            held_quota: quota(max_held),
            parked_quota: quota(max_parked),
            returning_clients: Mutex::new(ReturningClients { clients: HashMap::new(), next_sweep: now }),
            log: RefusalLog {
                window: Mutex::new(LogWindow { began: now, logged: 0, omitted: HashMap::new() }),
                has_omitted: AtomicBool::new(false),
            },
        }
    }

    /// Counts a refusal, and decides until when its response is held. The request started at `began`. Returns `None` if
    /// the response must be sent immediately: the client has made at most [`MAX_UNHELD_RETURNS`] early returns, or no
    /// more refusals can be held.
    pub(super) fn hold(
        &self,
        client: ClientAddress,
        began: Instant,
        now: Instant,
        retry_after: Duration,
        place: HoldPlace,
    ) -> Option<HeldRefusal> {
        let hold = self.returning_clients.lock().count_refusal(client, began, now, retry_after);
        if hold.is_zero() {
            return None;
        }
        let quota = match place {
            HoldPlace::Connection => &self.held_quota,
            HoldPlace::Socket => &self.parked_quota,
        };
        let permit = quota.try_acquire(Some(client), 1).ok()?;
        Some(HeldRefusal { until: now + hold, place, _permit: permit })
    }

    /// Counts a refusal for the log, and returns whether it is logged individually. For the other refusals, only their
    /// number is logged, by route and status.
    pub(super) fn count_for_log(&self, route: &'static str, status: StatusCode, now: Instant) -> bool {
        let mut window = self.log.window.lock();
        self.log.log_omitted(&mut window, now);
        if window.logged < MAX_LOGGED {
            window.logged += 1;
            return true;
        }
        *window.omitted.entry((route, status)).or_insert(0) += 1;
        self.log.has_omitted.store(true, Ordering::Relaxed);
        false
    }

    /// Logs the numbers of refusals that were not logged individually, if the log window is over. Every request calls
    /// this, so that the last refusals of a flood are logged too.
    pub(super) fn log_omitted(&self, now: Instant) {
        if self.log.has_omitted.load(Ordering::Relaxed) {
            let mut window = self.log.window.lock();
            self.log.log_omitted(&mut window, now);
        }
    }

    /// The number of refusals that are held now.
    pub(super) fn held_count(&self) -> usize {
        self.held_quota.used() + self.parked_quota.used()
    }
}

// === impl ReturningClients ===

impl ReturningClients {
    /// Counts the refusal. Returns how long to hold it.
    fn count_refusal(
        &mut self,
        client: ClientAddress,
        began: Instant,
        now: Instant,
        retry_after: Duration,
    ) -> Duration {
        let wait = retry_after.min(MAX_REMEMBERED);
        if let Some(early_returns) = self.clients.get_mut(&client) {
            if began >= early_returns.retry_at {
                *early_returns = EarlyReturns { count: 0, sent_at: now, retry_at: now + wait };
                return Duration::ZERO;
            }
            if began >= early_returns.sent_at {
                early_returns.count = early_returns.count.saturating_add(1);
                early_returns.sent_at = now + hold_duration(early_returns.count);
            }
            let hold = hold_duration(early_returns.count);
            early_returns.retry_at = now + hold + wait;
            return hold;
        }
        if self.clients.len() >= MAX_CLIENTS && now >= self.next_sweep {
            self.clients.retain(|_, early_returns| early_returns.retry_at > now);
            self.next_sweep = now + SWEEP_INTERVAL;
        }
        if self.clients.len() < MAX_CLIENTS {
            self.clients.insert(client, EarlyReturns { count: 0, sent_at: now, retry_at: now + wait });
        }
        Duration::ZERO
    }
}

fn hold_duration(early_returns: u32) -> Duration {
    match early_returns.checked_sub(MAX_UNHELD_RETURNS + 1) {
        None => Duration::ZERO,
        Some(doublings) => FIRST_HOLD.saturating_mul(1 << doublings.min(16)).min(MAX_HOLD),
    }
}

// === impl HeldRefusal ===

impl HeldRefusal {
    /// Whether the refusal is the last response of its connection.
    pub(super) fn closes_connection(&self) -> bool {
        self.place == HoldPlace::Socket
    }

    /// Waits until the hold is over or the listener drains.
    pub(super) async fn wait(&self, drain: &CancellationToken) {
        tokio::select! {
            () = sleep_until(self.until) => {}
            () = drain.cancelled() => {}
        }
    }
}

// === impl RefusalLog ===

impl RefusalLog {
    fn log_omitted(&self, window: &mut LogWindow, now: Instant) {
        if now.duration_since(window.began) < LOG_WINDOW {
            return;
        }
        for ((route, status), count) in window.omitted.drain() {
            let status = status.as_u16();
            info!(target: "access", route, status, count, "more requests were refused");
        }
        window.began = now;
        window.logged = 0;
        self.has_omitted.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY_AFTER: Duration = Duration::from_secs(2);

    fn client(number: u16) -> ClientAddress {
        let [high, low] = number.to_be_bytes();
        ClientAddress::from_ip([192, 0, high, low].into())
    }

    fn hold_time(refusals: &Refusals, number: u16, now: Instant) -> Option<Duration> {
        refusals.hold(client(number), now, now, RETRY_AFTER, HoldPlace::Connection).map(|held| held.until - now)
    }

    #[test]
    fn a_client_that_returns_early_is_held_longer_each_time_up_to_a_limit() {
        let refusals = Refusals::new(64, 64);
        let mut now = Instant::now();
        let mut holds = Vec::new();
        for _ in 0..10 {
            let hold = hold_time(&refusals, 1, now).unwrap_or_default();
            holds.push(hold.as_millis());
            now += hold;
        }
        assert_eq!(holds, [0, 0, 0, 0, 500, 1000, 2000, 4000, 4000, 4000]);
        assert_eq!(hold_time(&refusals, 2, now), None, "another client is not held");
        now += RETRY_AFTER;
        assert_eq!(hold_time(&refusals, 1, now), None, "a client that waits as asked is not held");
    }

    #[test]
    fn requests_sent_together_count_once() {
        let refusals = Refusals::new(64, 64);
        let began = Instant::now();
        for millis in 1..100 {
            let now = began + Duration::from_millis(millis);
            assert!(refusals.hold(client(1), began, now, RETRY_AFTER, HoldPlace::Connection).is_none());
        }
    }

    #[test]
    fn held_refusals_and_remembered_clients_are_bounded() {
        // Room for 16 held refusals; one client can have two of them.
        let refusals = Refusals::new(16, 0);
        let now = Instant::now();
        let mut held_refusals = Vec::new();
        for number in 0..20 {
            for _ in 0..=MAX_UNHELD_RETURNS {
                assert!(hold_time(&refusals, number, now).is_none());
            }
            let mut of_client = 0;
            while let Some(held) = refusals.hold(client(number), now, now, RETRY_AFTER, HoldPlace::Connection) {
                held_refusals.push(held);
                of_client += 1;
            }
            assert!(of_client <= 2, "{of_client}");
        }
        assert_eq!((held_refusals.len(), refusals.held_count()), (16, 16));
        held_refusals.clear();
        assert_eq!(refusals.held_count(), 0);

        for number in 0..=u16::MAX {
            hold_time(&refusals, number, now);
        }
        let remembered = || refusals.returning_clients.lock().clients.len();
        assert_eq!(remembered(), MAX_CLIENTS);
        hold_time(&refusals, u16::MAX, now + MAX_REMEMBERED);
        assert_eq!(remembered(), 1, "expired clients make room");
    }

    #[test]
    fn a_flood_of_refusals_is_logged_as_a_count() {
        let refusals = Refusals::new(64, 64);
        let now = Instant::now();
        let is_logged = |now| refusals.count_for_log("login", StatusCode::SERVICE_UNAVAILABLE, now);
        assert_eq!((0..1000).filter(|_| is_logged(now)).count(), 10);
        let omitted = || refusals.log.window.lock().omitted.values().sum::<u64>();
        refusals.log_omitted(now + LOG_WINDOW / 2);
        assert_eq!(omitted(), 990, "nothing is logged before the second is over");
        refusals.log_omitted(now + LOG_WINDOW * 2);
        assert_eq!(omitted(), 0);
        assert!(is_logged(now + LOG_WINDOW * 2));
    }
}
