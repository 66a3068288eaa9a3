//! The wait before a failed operation is retried.

use std::time::Duration;

use backon::ExponentialBuilder;
use kube::runtime::watcher::ExponentialBackoff;

/// Returns the waits before a failed watch is opened again. A watch lasts 30 s. If its connection is dropped silently,
/// kube notices this after 35 s. The watch must be current again within 40 s, so the longest wait is 5 s.
pub(crate) fn for_watch() -> ExponentialBackoff {
    between(Duration::from_millis(200), Duration::from_secs(5))
}

/// Returns exponential waits with jitter, because clients that lost the same server must not reconnect at the same
/// moment. Each wait is between half of the exponential delay and the whole delay, so it is never longer than `max`.
pub(crate) fn between(min: Duration, max: Duration) -> ExponentialBackoff {
    // backon adds random jitter to each delay, also to the longest. The jitter can be as long as the delay itself, so
    // both limits are halved here.
    ExponentialBuilder::default()
        .with_min_delay(min / 2)
        .with_max_delay(max / 2)
        .without_max_times()
        .with_jitter()
        .into()
}

#[cfg(test)]
mod tests {
    use kube::runtime::utils::Backoff;

    use super::*;

    #[test]
    fn waits_grow_to_the_maximum_and_restart_after_a_success() {
        let mut backoff = for_watch();
        let waits: Vec<_> = backoff.by_ref().take(20).collect();
        assert!(waits[0] <= Duration::from_millis(200), "{waits:?}");
        assert!(waits[10..].iter().all(|wait| (2500..=5000).contains(&wait.as_millis())), "{waits:?}");
        backoff.reset();
        assert!(backoff.next().is_some_and(|wait| wait <= Duration::from_millis(200)));
    }
}
