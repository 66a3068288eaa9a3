//! How long is waited before something that failed is tried again.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// Exponential, with jitter, and short: what is silently dropped must be current again within 40 s.
pub(crate) struct ShortBackoff {
    next: Duration,
    least: Duration,
    most: Duration,
}

// === impl ShortBackoff ===

impl ShortBackoff {
    /// Of a watch (design, "How config reaches the servers").
    pub(crate) fn of_watch() -> Self {
        Self::between(Duration::from_millis(200), Duration::from_secs(5))
    }

    pub(crate) fn between(least: Duration, most: Duration) -> Self {
        Self { next: least, least, most }
    }
}

impl Iterator for ShortBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = self.next;
        self.next = (now * 2).min(self.most);
        // Many that lost one server do not come back at one moment.
        Some(now.mul_f64(rand::random_range(0.5..=1.0)))
    }
}

impl Backoff for ShortBackoff {
    fn reset(&mut self) {
        self.next = self.least;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_the_most_and_begin_anew_after_a_success() {
        let mut backoff = ShortBackoff::of_watch();
        let waits: Vec<_> = backoff.by_ref().take(20).collect();
        assert!(waits[0] <= Duration::from_millis(200), "{waits:?}");
        assert!(waits[10..].iter().all(|wait| (2500..=5000).contains(&wait.as_millis())), "{waits:?}");
        backoff.reset();
        assert!(backoff.next().is_some_and(|wait| wait <= Duration::from_millis(200)));
    }
}
