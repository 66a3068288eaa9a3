//! The wait before a failed operation is retried.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// Exponential backoff with jitter. The maximum is short, because a silently dropped watch must be current again within
/// 40 s.
pub(crate) struct ShortBackoff {
    next: Duration,
    min_delay: Duration,
    max_delay: Duration,
}

// === impl ShortBackoff ===

impl ShortBackoff {
    /// For a watch: the longest wait is 5 s.
    pub(crate) fn for_watch() -> Self {
        Self::between(Duration::from_millis(200), Duration::from_secs(5))
    }

    pub(crate) fn between(least: Duration, most: Duration) -> Self {
        Self { next: least, min_delay: least, max_delay: most }
    }
}

impl Iterator for ShortBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = self.next;
        self.next = (now * 2).min(self.max_delay);
        // Jitter: clients that lost the same server must not reconnect at the same moment.
        Some(now.mul_f64(rand::random_range(0.5..=1.0)))
    }
}

impl Backoff for ShortBackoff {
    fn reset(&mut self) {
        self.next = self.min_delay;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_maximum_and_restart_after_a_success() {
        let mut backoff = ShortBackoff::for_watch();
        let waits: Vec<_> = backoff.by_ref().take(20).collect();
        assert!(waits[0] <= Duration::from_millis(200), "{waits:?}");
        assert!(waits[10..].iter().all(|wait| (2500..=5000).contains(&wait.as_millis())), "{waits:?}");
        backoff.reset();
        assert!(backoff.next().is_some_and(|wait| wait <= Duration::from_millis(200)));
    }
}
