//! The labels of namespaces, which decide whether an App accepts the Clients of a namespace.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

use crate::client::select::{NamespaceLabels, implied_labels};

/// The labels of all namespaces. If the operator watches only listed namespaces, it cannot read Namespaces, and a
/// namespace has only the label with its name.
#[derive(Default)]
pub(crate) struct Namespaces {
    /// The labels by namespace. `None`: Namespaces are not watched.
    labels: Option<Mutex<HashMap<String, BTreeMap<String, String>>>>,
}

// === impl Namespaces ===

impl Namespaces {
    /// Returns a value without any namespaces, which a watch then fills.
    pub(super) fn watched() -> Self {
        Self { labels: Some(Mutex::default()) }
    }

    /// Records the labels of a namespace, or its deletion (`None`). Returns whether they have changed.
    pub(super) fn record(&self, namespace: &str, labels: Option<BTreeMap<String, String>>) -> bool {
        let Some(all) = &self.labels else { return false };
        let mut all = all.lock();
        match labels {
            Some(labels) => {
                let has_changed = all.get(namespace) != Some(&labels);
                all.insert(namespace.to_owned(), labels);
                has_changed
            }
            None => all.remove(namespace).is_some(),
        }
    }
}

impl NamespaceLabels for Namespaces {
    /// If the watch has not reported a namespace yet, its labels are unknown. This can happen although the watch of
    /// Clients has already reported a Client of this namespace.
    fn labels(&self, namespace: &str) -> Option<BTreeMap<String, String>> {
        let mut labels = match &self.labels {
            Some(all) => all.lock().get(namespace)?.clone(),
            None => BTreeMap::new(),
        };
        // The API server sets these labels itself, so nobody can set other values.
        labels.extend(implied_labels(namespace));
        Some(labels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_namespace_always_has_the_label_with_its_name() {
        let own = Some(implied_labels("shop"));
        let unwatched = Namespaces::default();
        assert!(!unwatched.record("shop", Some(labels(&[("env", "test")]))));
        assert_eq!(unwatched.labels("shop"), own);

        let watched = Namespaces::watched();
        assert_eq!(watched.labels("shop"), None, "the watch has not reported it");
        assert!(watched.record("shop", Some(labels(&[]))));
        assert_eq!(watched.labels("shop"), own);
        assert!(watched.record("shop", Some(labels(&[("env", "test")]))));
        let both = labels(&[("env", "test"), ("kubernetes.io/metadata.name", "shop")]);
        assert_eq!(watched.labels("shop"), Some(both));
        assert!(watched.record("shop", None));
        assert_eq!(watched.labels("shop"), None);
    }

    #[test]
    fn only_a_change_of_the_labels_is_a_change() {
        let namespaces = Namespaces::watched();
        assert!(namespaces.record("shop", Some(labels(&[("env", "test")]))));
        assert!(!namespaces.record("shop", Some(labels(&[("env", "test")]))));
        assert!(namespaces.record("shop", Some(labels(&[("env", "live")]))));
        assert!(namespaces.record("shop", None) && !namespaces.record("shop", None));
    }
}
