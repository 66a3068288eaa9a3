//! Turns the events of all watches of one kind into changes: what was applied or deleted, and when all watches are
//! synced.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    hash::{BuildHasher, RandomState},
};

use futures::{StreamExt, stream::select_all};
use kube::{Resource, ResourceExt, runtime::watcher::Event};
use strum::{IntoStaticStr, VariantNames};
use tracing::warn;

use super::{index::NamespacedName, streams::Watch};
use crate::admin::{Health, error_message};

/// The kinds that are watched. Their names appear in `/readyz` and in the log.
#[derive(Clone, Copy, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub(super) enum WatchName {
    Apps,
    Providers,
    Keys,
    #[strum(serialize = "rendered apps")]
    RenderedApps,
    Secrets,
    ConfigMaps,
    Clients,
    #[strum(serialize = "client secrets")]
    ClientSecrets,
    Namespaces,
}

/// A change that a watch reports, or that a new list reveals. All changes of an object until its deletion share one
/// copy of its name in memory.
pub(super) enum WatchEvent<K> {
    Applied(NamespacedName, K),
    Deleted {
        name: NamespacedName,
        /// The resourceVersion of the deletion. `None`: a new list revealed the deletion.
        version: Option<u64>,
    },
    /// Every watch has reported its first complete list.
    Synced,
}

/// What one watch has reported.
#[derive(Default)]
struct WatchedObjects {
    /// For each object, a hash of its uid and its resourceVersion.
    versions: HashMap<NamespacedName, u64>,
    hasher: RandomState,
    /// The objects of the list that is being read.
    listed: HashSet<NamespacedName>,
    is_synced: bool,
}

/// Calls `handle` with every change that the watches report. Objects that are unchanged in a new list are skipped.
pub(super) async fn follow_watches<K>(
    name: WatchName,
    watches: Vec<Watch<K>>,
    health: Health,
    mut handle: impl FnMut(WatchEvent<K>),
) where
    K: Resource + Send + 'static,
{
    let name: &'static str = name.into();
    let mut watched: Vec<_> = watches.iter().map(|_| WatchedObjects::default()).collect();
    let numbered =
        watches.into_iter().enumerate().map(|(number, watch)| watch.map(move |event| (number, event)).boxed());
    let mut events = select_all(numbered);
    while let Some((number, event)) = events.next().await {
        let objects = &mut watched[number];
        match event {
            Ok(Event::Init) => objects.begin_list(),
            Ok(Event::InitApply(object)) => {
                if let Some(name) = objects.record_listed(&object) {
                    handle(WatchEvent::Applied(name, object));
                }
            }
            Ok(Event::InitDone) => {
                for name in objects.end_list() {
                    handle(WatchEvent::Deleted { name, version: None });
                }
                if !std::mem::replace(&mut objects.is_synced, true) && watched.iter().all(|objects| objects.is_synced) {
                    handle(WatchEvent::Synced);
                    health.set_synced(name);
                }
            }
            Ok(Event::Apply(object)) => {
                let (name, _) = objects.record(&object);
                handle(WatchEvent::Applied(name, object));
            }
            Ok(Event::Delete(object)) => {
                let name = objects.remove(&object);
                let version = object.resource_version().as_deref().map(parse_version);
                handle(WatchEvent::Deleted { name, version });
            }
            Err(error) => {
                warn!(watch = name, error = error_message(&error), "a watch failed; retrying");
                health.record_watch_failure(name, &error);
            }
        }
    }
}

/// Parses a resourceVersion as a number, so that it can be compared: a newer version of an object is greater. A version
/// that is not a number counts as older than all others.
pub(super) fn parse_version(resource_version: &str) -> u64 {
    resource_version.parse().unwrap_or(0)
}

// === impl WatchedObjects ===

impl WatchedObjects {
    fn begin_list(&mut self) {
        self.listed.clear();
    }

    /// Returns the name of the object if the object has changed since the watch last reported it.
    fn record_listed(&mut self, object: &impl Resource) -> Option<NamespacedName> {
        let (name, has_changed) = self.record(object);
        self.listed.insert(name.clone());
        has_changed.then_some(name)
    }

    /// Removes the objects that are not in the new list, and returns their names.
    fn end_list(&mut self) -> Vec<NamespacedName> {
        let listed = std::mem::take(&mut self.listed);
        let gone: Vec<_> = self.versions.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in &gone {
            self.versions.remove(name);
        }
        gone
    }

    /// Returns the name of the object, and whether the object has changed since the watch last reported it.
    fn record(&mut self, object: &impl Resource) -> (NamespacedName, bool) {
        let meta = object.meta();
        let version = self.hasher.hash_one((meta.uid.as_deref(), meta.resource_version.as_deref()));
        match self.versions.entry(NamespacedName::from_metadata(meta)) {
            Entry::Occupied(mut known) => {
                let before = known.insert(version);
                (known.key().clone(), before != version)
            }
            Entry::Vacant(new) => {
                let name = new.key().clone();
                new.insert(version);
                (name, true)
            }
        }
    }

    fn remove(&mut self, object: &impl Resource) -> NamespacedName {
        let name = NamespacedName::from_metadata(object.meta());
        self.versions.remove(&name);
        name
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;
    use serde_json::json;

    use super::*;

    fn secret(name: &str, version: &str) -> Secret {
        let metadata = json!({ "namespace": "shop", "name": name, "uid": name, "resourceVersion": version });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    #[test]
    fn all_changes_of_an_object_share_its_name() {
        let mut objects = WatchedObjects::default();
        objects.begin_list();
        let first = objects.record_listed(&secret("one", "1")).unwrap();
        assert_eq!(objects.record_listed(&secret("one", "1")), None, "it is unchanged");
        let (second, has_changed) = objects.record(&secret("one", "2"));
        assert!(has_changed && second.shares_memory_with(&first));
        assert_eq!(objects.end_list(), []);
        objects.begin_list();
        let gone = objects.end_list();
        assert!(gone.len() == 1 && gone[0].shares_memory_with(&first));
    }
}
