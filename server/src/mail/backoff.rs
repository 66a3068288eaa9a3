//! When a row of the outbox is tried again.

use std::time::Duration;

/// After the first failure, the second, …; from the last on always the last.
const DELAYS: [Duration; 7] = [
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(15 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(60 * 60),
];

/// 51 minutes in the first six waits, then 47 of an hour: two days of trying. Counted in tries, not in days, so that a
/// mail does not die of time in which it could not be tried.
pub(super) const MOST_ATTEMPTS: u32 = 54;

/// How long to wait after a failure that `attempts` failures came before; none: it was the last one.
/// `unit` (0 to 1) spreads the wait by a fifth to each side, so that what failed together does not come back together.
pub(super) fn after_failure(attempts: u32, unit: f64) -> Option<Duration> {
    if attempts.saturating_add(1) >= MOST_ATTEMPTS {
        return None;
    }
    let index = usize::try_from(attempts).unwrap_or(usize::MAX).min(DELAYS.len() - 1);
    Some(spread(DELAYS[index], unit))
}

/// How long a row waits that could not be tried: a quarter of its age, so that the queue of an App whose relay is gone
/// for a week costs little, and one that is gone for a minute is not felt.
pub(super) fn while_waiting(age: Duration, unit: f64) -> Duration {
    spread((age / 4).clamp(Duration::from_secs(2), Duration::from_secs(600)), unit)
}

/// How long until Redis is told an epoch again. This never ends: a session that should have ended must end.
pub(super) fn for_epoch(attempts: u32, unit: f64) -> Duration {
    spread(Duration::from_secs(1 << attempts.min(5)), unit)
}

pub(super) fn spread(delay: Duration, unit: f64) -> Duration {
    delay.mul_f64(0.8 + 0.4 * unit.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_an_hour_and_stay() {
        let waits: Vec<_> = (0..9).map(|attempts| after_failure(attempts, 0.5).unwrap().as_secs()).collect();
        assert_eq!(waits, [5, 15, 60, 300, 900, 1800, 3600, 3600, 3600]);
    }

    #[test]
    fn all_tries_together_take_two_days() {
        let total: Duration = (0..).map_while(|attempts| after_failure(attempts, 0.5)).sum();
        let tries = (0..).take_while(|attempts| after_failure(*attempts, 0.5).is_some()).count() + 1;
        assert_eq!(tries, 54);
        assert!((47.0..49.0).contains(&(total.as_secs_f64() / 3600.0)), "{total:?}");
        assert_eq!(after_failure(u32::MAX, 0.5), None);
    }

    #[test]
    fn jitter_is_a_fifth_to_each_side() {
        assert_eq!(after_failure(0, 0.0), Some(Duration::from_secs(4)));
        assert_eq!(after_failure(0, 1.0), Some(Duration::from_secs(6)));
        assert_eq!(after_failure(0, 7.0), Some(Duration::from_secs(6)));
    }

    #[test]
    fn what_cannot_be_tried_is_looked_at_ever_more_rarely() {
        let wait = |age| while_waiting(Duration::from_secs(age), 0.5).as_secs();
        assert_eq!([wait(0), wait(20), wait(400), wait(1_000_000)], [2, 5, 100, 600]);
    }

    #[test]
    fn an_epoch_is_carried_again_within_half_a_minute() {
        let waits: Vec<_> = [0, 1, 5, 6, u32::MAX].map(|attempts| for_epoch(attempts, 0.5).as_secs()).into();
        assert_eq!(waits, [1, 2, 32, 32, 32]);
    }
}
