//! What the checks of providers found last, told to whoever listens.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use latchkey_crds::{conditions::Reason, rendered::ProviderReport};
use tokio::sync::broadcast;

/// How many reports a slow listener may lag behind before it must start from all of them again.
const BACKLOG: usize = 1024;

/// A Provider, by namespace and name.
pub(super) type Key = (String, String);

pub struct Reports {
    /// Held while it is changed, so that listeners hear reports in order.
    found: Mutex<BTreeMap<Key, Reason>>,
    news: broadcast::Sender<ProviderReport>,
}

// === impl Reports ===

impl Default for Reports {
    fn default() -> Self {
        Self { found: Mutex::default(), news: broadcast::channel(BACKLOG).0 }
    }
}

impl Reports {
    /// All that is known and, from that very moment on, what is new.
    pub fn subscribe(&self) -> (Vec<ProviderReport>, broadcast::Receiver<ProviderReport>) {
        let found = self.found();
        let known = found.iter().map(|(key, reason)| report(key, *reason)).collect();
        (known, self.news.subscribe())
    }

    /// Told only where it is another finding than before.
    pub(crate) fn tell(&self, key: &Key, reason: Reason) {
        let mut found = self.found();
        if found.insert(key.clone(), reason) != Some(reason) {
            // Nobody may listen.
            let _ = self.news.send(report(key, reason));
        }
    }

    /// Nothing is known of it any more. There is no line for that: who names it no more does not ask.
    pub(super) fn forget(&self, key: &Key) {
        self.found().remove(key);
    }

    fn found(&self) -> MutexGuard<'_, BTreeMap<Key, Reason>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report((namespace, name): &Key, reason: Reason) -> ProviderReport {
    ProviderReport { namespace: namespace.clone(), name: name.clone(), reason: reason.as_str().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changes_is_told_and_who_comes_late_hears_all() {
        let (reports, key) = (Reports::default(), ("shop".to_owned(), "github".to_owned()));
        let (known, mut news) = reports.subscribe();
        assert!(known.is_empty());
        for reason in [Reason::Reachable, Reason::Reachable, Reason::ClientRefused] {
            reports.tell(&key, reason);
        }
        let told: Vec<_> = std::iter::from_fn(|| news.try_recv().ok()).map(|report| report.reason).collect();
        assert_eq!(told, ["Reachable", "ClientRefused"]);
        let (known, _) = reports.subscribe();
        assert_eq!(known, [report(&key, Reason::ClientRefused)]);
        reports.forget(&key);
        assert!(reports.subscribe().0.is_empty());
    }
}
