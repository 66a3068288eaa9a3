//! Slows down clients that ask again before `Retry-After`: their refusals are held for a while before they are sent,
//! which costs a timer and no place in a queue. And keeps a flood of refusals from flooding the log.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::quota::{Quota, QuotaPermit};
use crate::domain::client::ClientAddress;

/// How often a client can come back early before its refusals are held: a page that sends a few requests at once, or a
/// person who tries again, is not slowed down.
const FREE_RETURNS: u32 = 3;
/// The first hold; each early return doubles it, up to [`MAX_HOLD`].
const FIRST_HOLD: Duration = Duration::from_millis(500);
/// Far below the time that proxies wait for an answer (NGINX: 60 s). Slows a connection down from thousands of requests
/// a second to one in four seconds.
const MAX_HOLD: Duration = Duration::from_secs(4);
/// An early return is forgotten after the time in `Retry-After`, at the latest after this.
const MAX_MEMORY: Duration = Duration::from_secs(60);
/// Client addresses that are remembered, in at most 1 MiB. Those that do not fit are not held.
const MAX_CLIENTS: usize = 8192;
/// How often those that have expired are looked for while the list is full.
const SWEEP: Duration = Duration::from_secs(1);
/// One client address can have a part of all held refusals.
const CLIENT_SHARE: usize = 8;
/// And the /48 of an IPv6 address half of them.
const SITE_SHARE: usize = 2;
/// Refusals that are logged one by one, in a second.
const LOGGED: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(1);

/// The refusals of one process, by a limit or for lack of capacity.
#[derive(Debug)]
pub struct Refusals {
    places: Arc<Quota>,
    returns: Mutex<Returns>,
    log: RefusalLog,
}

#[derive(Debug)]
struct Returns {
    clients: HashMap<ClientAddress, EarlyReturns>,
    next_sweep: Instant,
}

/// How often a client address has come back early.
#[derive(Clone, Copy, Debug)]
struct EarlyReturns {
    count: u32,
    /// Requests that began before this were sent together with the one that was counted last.
    counted: Instant,
    /// When it was asked to come again.
    until: Instant,
}

/// A refusal that is sent later.
#[derive(Debug)]
pub struct HeldRefusal {
    until: Instant,
    _place: QuotaPermit,
}

/// Which refusals get a line of their own.
#[derive(Debug)]
struct RefusalLog {
    window: Mutex<LogWindow>,
    has_omitted: AtomicBool,
}

#[derive(Debug)]
struct LogWindow {
    began: Instant,
    logged: u32,
    /// Bounded: by names of routes and statuses.
    omitted: HashMap<(&'static str, StatusCode), u64>,
}

// === impl Refusals ===

impl Refusals {
    /// `places`: how many refusals can be held at a time.
    pub(super) fn new(places: usize) -> Self {
        let now = Instant::now();
        Self {
            places: Quota::new(places, places / CLIENT_SHARE, places / SITE_SHARE),
            returns: Mutex::new(Returns { clients: HashMap::new(), next_sweep: now }),
            log: RefusalLog {
                window: Mutex::new(LogWindow { began: now, logged: 0, omitted: HashMap::new() }),
                has_omitted: AtomicBool::new(false),
            },
        }
    }

    /// Counts a refusal, made `now`, of a request that `began` then. `None` if it must be sent at once: the client did not come
    /// back early, or there is no place to hold the refusal.
    pub(super) fn hold(
        &self,
        client: ClientAddress,
        began: Instant,
        now: Instant,
        retry_after: Duration,
    ) -> Option<HeldRefusal> {
        let hold = self.returns.lock().unwrap_or_else(PoisonError::into_inner).count(client, began, now, retry_after);
        if hold.is_zero() {
            return None;
        }
        let place = self.places.try_acquire(Some(client), 1).ok()?;
        Some(HeldRefusal { until: now + hold, _place: place })
    }

    /// Whether a refusal gets a log line of its own. Others are counted, and logged together.
    pub(super) fn is_logged(&self, route: &'static str, status: StatusCode, now: Instant) -> bool {
        let mut window = self.log.window.lock().unwrap_or_else(PoisonError::into_inner);
        self.log.report(&mut window, now);
        if window.logged < LOGGED {
            window.logged += 1;
            return true;
        }
        *window.omitted.entry((route, status)).or_insert(0) += 1;
        self.log.has_omitted.store(true, Ordering::Relaxed);
        false
    }

    /// Logs the refusals that were counted, if it is time. Every request calls this, so that the last of a flood are
    /// logged too.
    pub(super) fn report(&self, now: Instant) {
        if self.log.has_omitted.load(Ordering::Relaxed) {
            let mut window = self.log.window.lock().unwrap_or_else(PoisonError::into_inner);
            self.log.report(&mut window, now);
        }
    }

    /// Refusals that are held now.
    pub(super) fn held(&self) -> usize {
        self.places.used()
    }
}

// === impl Returns ===

impl Returns {
    /// How long the refusal is held.
    fn count(&mut self, client: ClientAddress, began: Instant, now: Instant, retry_after: Duration) -> Duration {
        let wait = retry_after.min(MAX_MEMORY);
        if let Some(known) = self.clients.get_mut(&client) {
            if began >= known.until {
                *known = EarlyReturns { count: 0, counted: now, until: now + wait };
                return Duration::ZERO;
            }
            if began >= known.counted {
                known.count = known.count.saturating_add(1);
                known.counted = now + hold_after(known.count);
            }
            let hold = hold_after(known.count);
            known.until = now + hold + wait;
            return hold;
        }
        if self.clients.len() >= MAX_CLIENTS && now >= self.next_sweep {
            self.clients.retain(|_, known| known.until > now);
            self.next_sweep = now + SWEEP;
        }
        if self.clients.len() < MAX_CLIENTS {
            self.clients.insert(client, EarlyReturns { count: 0, counted: now, until: now + wait });
        }
        Duration::ZERO
    }
}

fn hold_after(early_returns: u32) -> Duration {
    match early_returns.checked_sub(FREE_RETURNS + 1) {
        None => Duration::ZERO,
        Some(doublings) => FIRST_HOLD.saturating_mul(1 << doublings.min(16)).min(MAX_HOLD),
    }
}

// === impl HeldRefusal ===

impl HeldRefusal {
    /// Ends early if the listener drains.
    pub(super) async fn wait(self, drain: &CancellationToken) {
        tokio::select! {
            () = sleep_until(self.until) => {}
            () = drain.cancelled() => {}
        }
    }
}

// === impl RefusalLog ===

impl RefusalLog {
    fn report(&self, window: &mut LogWindow, now: Instant) {
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
        ClientAddress::of([192, 0, high, low].into())
    }

    fn held(refusals: &Refusals, number: u16, now: Instant) -> Option<Duration> {
        refusals.hold(client(number), now, now, RETRY_AFTER).map(|held| held.until - now)
    }

    #[test]
    fn a_client_that_comes_back_early_is_held_longer_each_time_up_to_a_bound() {
        let refusals = Refusals::new(64);
        let mut now = Instant::now();
        let mut holds = Vec::new();
        for _ in 0..10 {
            let hold = held(&refusals, 1, now).unwrap_or_default();
            holds.push(hold.as_millis());
            now += hold;
        }
        assert_eq!(holds, [0, 0, 0, 0, 500, 1000, 2000, 4000, 4000, 4000]);
        assert_eq!(held(&refusals, 2, now), None, "another client is not");
        now += RETRY_AFTER;
        assert_eq!(held(&refusals, 1, now), None, "who waits as asked is not");
    }

    #[test]
    fn requests_sent_together_count_once() {
        let refusals = Refusals::new(64);
        let began = Instant::now();
        for millis in 1..100 {
            let now = began + Duration::from_millis(millis);
            assert!(refusals.hold(client(1), began, now, RETRY_AFTER).is_none());
        }
    }

    #[test]
    fn held_refusals_and_remembered_clients_are_bounded() {
        // Places for 16, of which one client can have two.
        let refusals = Refusals::new(16);
        let now = Instant::now();
        let mut all = Vec::new();
        for number in 0..20 {
            for _ in 0..=FREE_RETURNS {
                assert!(held(&refusals, number, now).is_none());
            }
            let mut of_client = 0;
            while let Some(held) = refusals.hold(client(number), now, now, RETRY_AFTER) {
                all.push(held);
                of_client += 1;
            }
            assert!(of_client <= 2, "{of_client}");
        }
        assert_eq!((all.len(), refusals.held()), (16, 16));
        all.clear();
        assert_eq!(refusals.held(), 0);

        for number in 0..=u16::MAX {
            held(&refusals, number, now);
        }
        let remembered = || refusals.returns.lock().unwrap().clients.len();
        assert_eq!(remembered(), MAX_CLIENTS);
        held(&refusals, u16::MAX, now + MAX_MEMORY);
        assert_eq!(remembered(), 1, "those that have expired make room");
    }

    #[test]
    fn a_flood_of_refusals_is_logged_by_its_number() {
        let refusals = Refusals::new(64);
        let now = Instant::now();
        let is_logged = |now| refusals.is_logged("login", StatusCode::SERVICE_UNAVAILABLE, now);
        assert_eq!((0..1000).filter(|_| is_logged(now)).count(), 10);
        let omitted = || refusals.log.window.lock().unwrap().omitted.values().sum::<u64>();
        refusals.report(now + LOG_WINDOW / 2);
        assert_eq!(omitted(), 990, "not before the second is over");
        refusals.report(now + LOG_WINDOW * 2);
        assert_eq!(omitted(), 0);
        assert!(is_logged(now + LOG_WINDOW * 2));
    }
}
