//! Limits the rate of writes that are not caused by an edit of the object itself. So an edit does not wait behind the
//! many writes after a change that affects all Apps.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// The maximum number of writes per second.
const RATE: u32 = 100;
/// After a pause, this many writes need not wait. So an edit to a Secret that a few Apps share is not delayed.
const BURST: u32 = 100;

/// How long a reservation is stored after its time slot.
const RESERVATION_TTL: Duration = Duration::from_secs(60);
/// How often expired reservations are dropped. Each time reads all reservations, which can be tens of thousands.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);

/// Gives each object a time slot, which is the time at which it can write. The slots are in the order in which
/// [`RateLimiter::try_acquire`] is called for the objects. An object that must wait has a reservation.
pub(crate) struct RateLimiter(Mutex<Reservations>);

struct Reservations {
    /// The time slot that was given last. It may be in the future.
    last_slot: Instant,
    /// The time slot of each object that waits.
    by_object: HashMap<String, Instant>,
    /// When expired reservations were dropped for the last time.
    last_expiry: Instant,
}

// === impl RateLimiter ===

impl RateLimiter {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self(Mutex::new(Reservations { last_slot: now, by_object: HashMap::new(), last_expiry: now }))
    }

    /// Returns `Ok` if this object can write now. Otherwise reserves a time slot, and returns the wait until this slot.
    /// The caller must then call this function again for the object. Otherwise the object loses its slot.
    pub(crate) fn try_acquire(&self, object: &str) -> Result<(), Duration> {
        let interval = Duration::from_secs(1) / RATE;
        let now = Instant::now();
        let mut reservations = self.0.lock();
        if let Some(slot) = reservations.by_object.get(object).copied() {
            if slot <= now {
                reservations.remove(object);
                return Ok(());
            }
            return Err(slot - now);
        }
        // After a pause, at most `BURST` unused slots are available.
        reservations.last_slot =
            reservations.last_slot.max(now.checked_sub(interval * BURST).unwrap_or(now)) + interval;
        let slot = reservations.last_slot;
        if slot <= now {
            return Ok(());
        }
        reservations.drop_expired(now);
        reservations.by_object.insert(object.to_owned(), slot);
        Err(slot - now)
    }

    /// Drops the reservation of an object that has nothing to write any more.
    pub(crate) fn cancel(&self, object: &str) {
        self.0.lock().remove(object);
    }
}

// === impl Reservations ===

impl Reservations {
    /// Drops the reservations of objects for which `try_acquire` was not called again.
    fn drop_expired(&mut self, now: Instant) {
        if now - self.last_expiry >= EXPIRY_INTERVAL {
            self.by_object.retain(|_, slot| now.saturating_duration_since(*slot) < RESERVATION_TTL);
            self.last_expiry = now;
        }
    }

    fn remove(&mut self, object: &str) {
        self.by_object.remove(object);
        if self.by_object.is_empty() {
            // Thousands of objects may have waited.
            self.by_object.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_objects_proceed_at_the_rate_and_in_order() {
        let limiter = RateLimiter::new();
        let began = Instant::now();
        let mut waits = Vec::new();
        for number in 0..1000 {
            waits.push(limiter.try_acquire(&number.to_string()).err().unwrap_or_default());
        }
        assert!(waits.is_sorted());
        let last = waits[999];
        assert!(last > Duration::from_secs(8) && last <= Duration::from_secs(10), "{last:?}");
        // A second call returns the wait for the same reservation. After that wait, the object can proceed.
        assert_eq!(limiter.try_acquire("999").unwrap_err(), last);
        tokio::time::advance(last).await;
        assert_eq!(limiter.try_acquire("999"), Ok(()));
        assert!(began.elapsed() >= last);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unused_reservation_expires() {
        let limiter = RateLimiter::new();
        let reservation_count = || limiter.0.lock().by_object.len();
        for round in 0..5 {
            for number in 0..300 {
                let _ = limiter.try_acquire(&format!("{round}/{number}"));
            }
            tokio::time::advance(RESERVATION_TTL * 2).await;
        }
        assert!(reservation_count() <= 300, "{}", reservation_count());
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_objects_do_not_wait() {
        let limiter = RateLimiter::new();
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!((0..50).all(|number| limiter.try_acquire(&number.to_string()).is_ok()));
    }
}
