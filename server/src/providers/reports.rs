//! The latest results of provider checks, and their subscribers.

use std::collections::BTreeMap;

use latchkey_crds::{conditions::Reason, rendered::ProviderReport};
use parking_lot::Mutex;
use tokio::sync::broadcast;

/// How many unread reports a subscriber can have. If there are more, the oldest ones are lost, and the subscriber must
/// subscribe again.
const CHANNEL_CAPACITY: usize = 1024;

/// Namespace and name of a Provider.
pub(super) type ProviderKey = (String, String);

pub struct ProviderReports {
    /// Locked while a report is sent, so that subscribers receive reports in order.
    results: Mutex<BTreeMap<ProviderKey, Reason>>,
    updates: broadcast::Sender<ProviderReport>,
}

// === impl ProviderReports ===

impl Default for ProviderReports {
    fn default() -> Self {
        Self { results: Mutex::default(), updates: broadcast::channel(CHANNEL_CAPACITY).0 }
    }
}

impl ProviderReports {
    /// All current reports, and a receiver of every later one. No report is missed or repeated in between.
    pub fn subscribe(&self) -> (Vec<ProviderReport>, broadcast::Receiver<ProviderReport>) {
        let results = self.results.lock();
        let current = results.iter().map(|(key, reason)| report(key, *reason)).collect();
        (current, self.updates.subscribe())
    }

    /// Records a result. Subscribers receive it only if it differs from the last result of this Provider.
    pub(crate) fn record(&self, key: &ProviderKey, reason: Reason) {
        let mut results = self.results.lock();
        if results.insert(key.clone(), reason) != Some(reason) {
            // Fails if there is no subscriber.
            let _ = self.updates.send(report(key, reason));
        }
    }

    /// Removes the report of a Provider that no App references or that cannot be checked. Subscribers receive nothing,
    /// because the stream to the operator has no line for a removal.
    pub(super) fn remove(&self, key: &ProviderKey) {
        self.results.lock().remove(key);
    }
}

fn report((namespace, name): &ProviderKey, reason: Reason) -> ProviderReport {
    ProviderReport { namespace: namespace.clone(), name: name.clone(), reason: reason.as_str().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_results_are_sent_and_a_new_subscriber_gets_the_current_results() {
        let (reports, key) = (ProviderReports::default(), ("shop".to_owned(), "github".to_owned()));
        let (current, mut updates) = reports.subscribe();
        assert!(current.is_empty());
        for reason in [Reason::Reachable, Reason::Reachable, Reason::ClientRefused] {
            reports.record(&key, reason);
        }
        let reported: Vec<_> = std::iter::from_fn(|| updates.try_recv().ok()).map(|report| report.reason).collect();
        assert_eq!(reported, ["Reachable", "ClientRefused"]);
        let (current, _) = reports.subscribe();
        assert_eq!(current, [report(&key, Reason::ClientRefused)]);
        reports.remove(&key);
        assert!(reports.subscribe().0.is_empty());
    }
}
