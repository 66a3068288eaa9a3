//! Delays before a row of the outbox is retried.

use std::time::Duration;

/// The delays after the first failure, the second failure and so on. The last delay repeats.
const DELAYS: [Duration; 7] = [
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(15 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(60 * 60),
];

/// The maximum number of attempts. The first six delays take 51 minutes, and the other 47 take an hour each: two days
/// in total. The limit counts attempts, not days, so that time in which no attempt was possible does not turn a mail
/// into a dead letter.
pub(super) const MAX_ATTEMPTS: u32 = 54;

/// The delay after a failure. `attempts` is the number of failures before this one. `None` after the last attempt.
/// `random_unit` (0 to 1) varies the delay by ±20 %, so that rows that failed together are not retried together.
pub(super) fn after_failure(attempts: u32, random_unit: f64) -> Option<Duration> {
    if attempts.saturating_add(1) >= MAX_ATTEMPTS {
        return None;
    }
    let index = usize::try_from(attempts).unwrap_or(usize::MAX).min(DELAYS.len() - 1);
    Some(jitter(DELAYS[index], random_unit))
}

/// The delay of a row for which no attempt was possible: a quarter of its age, from 2 s to 10 min. Therefore the
/// waiting rows of an App cost little if its relay is missing for a week, and are delayed little if the relay is
/// missing for a minute.
pub(super) fn while_waiting(age: Duration, random_unit: f64) -> Duration {
    jitter((age / 4).clamp(Duration::from_secs(2), Duration::from_secs(600)), random_unit)
}

/// The delay before a raised epoch (which ends sessions), a changed profile or changed groups are sent to Redis again.
/// There is no last attempt: a session that should end must end.
pub(super) fn for_propagation(attempts: u32, random_unit: f64) -> Duration {
    jitter(Duration::from_secs(1 << attempts.min(5)), random_unit)
}

pub(super) fn jitter(delay: Duration, random_unit: f64) -> Duration {
    delay.mul_f64(0.8 + 0.4 * random_unit.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_an_hour_and_stay_there() {
        let waits: Vec<_> = (0..9).map(|attempts| after_failure(attempts, 0.5).unwrap().as_secs()).collect();
        assert_eq!(waits, [5, 15, 60, 300, 900, 1800, 3600, 3600, 3600]);
    }

    #[test]
    fn all_attempts_together_take_two_days() {
        let total: Duration = (0..).map_while(|attempts| after_failure(attempts, 0.5)).sum();
        let tries = (0..).take_while(|attempts| after_failure(*attempts, 0.5).is_some()).count() + 1;
        assert_eq!(tries, 54);
        assert!((47.0..49.0).contains(&(total.as_secs_f64() / 3600.0)), "{total:?}");
        assert_eq!(after_failure(u32::MAX, 0.5), None);
    }

    #[test]
    fn jitter_is_at_most_a_fifth_in_each_direction() {
        assert_eq!(after_failure(0, 0.0), Some(Duration::from_secs(4)));
        assert_eq!(after_failure(0, 1.0), Some(Duration::from_secs(6)));
        assert_eq!(after_failure(0, 7.0), Some(Duration::from_secs(6)));
    }

    #[test]
    fn rows_that_cannot_be_attempted_are_checked_less_and_less_often() {
        let wait = |age| while_waiting(Duration::from_secs(age), 0.5).as_secs();
        assert_eq!([wait(0), wait(20), wait(400), wait(1_000_000)], [2, 5, 100, 600]);
    }

    #[test]
    fn the_delay_before_a_propagation_is_repeated_grows_to_32_seconds() {
        let waits: Vec<_> = [0, 1, 5, 6, u32::MAX].map(|attempts| for_propagation(attempts, 0.5).as_secs()).into();
        assert_eq!(waits, [1, 2, 32, 32, 32]);
    }
}
