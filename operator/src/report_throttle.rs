//! Limits how often the progress of an object is reported.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

/// When progress was last reported, by the uid of the object.
#[derive(Default)]
pub(crate) struct ReportThrottle(Mutex<HashMap<String, Instant>>);

// === impl ReportThrottle ===

impl ReportThrottle {
    /// Whether the progress of the object can be reported now, because it was not reported during the last `interval`.
    /// If so, records that it is reported now.
    pub(crate) fn try_report(&self, uid: &str, interval: Duration) -> bool {
        let mut reported = self.0.lock();
        let now = Instant::now();
        // Older entries have no effect any more.
        reported.retain(|_, at| now - *at < interval);
        if reported.contains_key(uid) {
            return false;
        }
        reported.insert(uid.to_owned(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn progress_is_reported_at_intervals() {
        let (throttle, interval) = (ReportThrottle::default(), Duration::from_secs(10));
        assert!(throttle.try_report("a", interval) && !throttle.try_report("a", interval));
        assert!(throttle.try_report("b", interval));
        tokio::time::advance(interval).await;
        assert!(throttle.try_report("a", interval));
    }
}
