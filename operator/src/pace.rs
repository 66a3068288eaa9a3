//! Lets fleet-wide changes out at a bounded rate, so that what one tenant edits does not wait behind them.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Fleet-wide changes a second (design, Acknowledgement).
const RATE: u32 = 100;
/// How many may go out at once after a pause; an edit of a Secret that a few Apps share is no fleet-wide change.
const BURST: u32 = 100;

/// For how long a place is kept whose turn has come.
const KEPT: Duration = Duration::from_secs(60);

/// Places in time, given out in order.
pub(crate) struct Pace(Mutex<Places>);

struct Places {
    /// When the next one is free, if everybody who has a place takes it.
    next: Instant,
    given: HashMap<String, Instant>,
}

// === impl Pace ===

impl Pace {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Places { next: Instant::now(), given: HashMap::new() }))
    }

    /// Whether this one may go out now; else when it has its turn. It keeps its place until it has gone out.
    pub(crate) fn enter(&self, who: &str) -> Result<(), Duration> {
        let each = Duration::from_secs(1) / RATE;
        let now = Instant::now();
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = places.given.get(who).copied() {
            if turn <= now {
                places.given.remove(who);
                return Ok(());
            }
            return Err(turn - now);
        }
        // What was not used is saved up to a burst.
        places.next = places.next.max(now.checked_sub(each * BURST).unwrap_or(now)) + each;
        let turn = places.next;
        if turn <= now {
            return Ok(());
        }
        // Who did not come back for its turn is gone.
        places.given.retain(|_, turn| now.saturating_duration_since(*turn) < KEPT);
        places.given.insert(who.to_owned(), turn);
        Err(turn - now)
    }

    /// It goes out without a turn, or not at all.
    pub(crate) fn leave(&self, who: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).given.remove(who);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_fleet_goes_out_at_its_rate_and_in_order() {
        let pace = Pace::new();
        let began = Instant::now();
        let mut waits = Vec::new();
        for number in 0..1000 {
            waits.push(pace.enter(&number.to_string()).err().unwrap_or_default());
        }
        assert!(waits.is_sorted());
        let last = waits[999];
        assert!(last > Duration::from_secs(8) && last <= Duration::from_secs(10), "{last:?}");
        // Who asks again does not lose the place, and who has had it asks for another.
        assert_eq!(pace.enter("999").unwrap_err(), last);
        tokio::time::advance(last).await;
        assert_eq!(pace.enter("999"), Ok(()));
        assert!(began.elapsed() >= last);
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_for_which_nobody_comes_is_not_kept() {
        let pace = Pace::new();
        let kept = || pace.0.lock().unwrap().given.len();
        for round in 0..5 {
            for number in 0..300 {
                let _ = pace.enter(&format!("{round}/{number}"));
            }
            tokio::time::advance(KEPT * 2).await;
        }
        assert!(kept() <= 300, "{}", kept());
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_do_not_wait() {
        let pace = Pace::new();
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!((0..50).all(|number| pace.enter(&number.to_string()).is_ok()));
    }
}
