//! Turns the events of all watches of one kind into changes: what was applied or deleted, and when all watches are
//! synced.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, RandomState},
};

use futures::{StreamExt, stream::select_all};
use kube::{Resource, ResourceExt, runtime::watcher::Event};
use strum::{IntoStaticStr, VariantNames};
use tracing::warn;

use super::streams::Watch;
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

/// A change that a watch reports, or that a new list reveals.
pub(super) enum WatchEvent<K> {
    Applied(K),
    Deleted {
        namespace: String,
        name: String,
        /// The resourceVersion of the deletion. `None`: a new list revealed the deletion.
        version: Option<u64>,
    },
    /// Every watch has reported its first complete list.
    Synced,
}

/// A namespace and a name in it.
type ObjectKey = (String, String);

/// What one watch has reported.
#[derive(Default)]
struct WatchedObjects {
    /// For each object, a hash of its uid and its resourceVersion.
    versions: HashMap<ObjectKey, u64>,
    hasher: RandomState,
    /// The objects of the list that is being read.
    listed: HashSet<ObjectKey>,
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
                if objects.record_listed(&object) {
                    handle(WatchEvent::Applied(object));
                }
            }
            Ok(Event::InitDone) => {
                for (namespace, name) in objects.end_list() {
                    handle(WatchEvent::Deleted { namespace, name, version: None });
                }
                if !std::mem::replace(&mut objects.is_synced, true) && watched.iter().all(|objects| objects.is_synced) {
                    handle(WatchEvent::Synced);
                    health.set_synced(name);
                }
            }
            Ok(Event::Apply(object)) => {
                objects.record(&object);
                handle(WatchEvent::Applied(object));
            }
            Ok(Event::Delete(object)) => {
                let (namespace, name) = objects.remove(&object);
                let version = object.resource_version().as_deref().map(parse_version);
                handle(WatchEvent::Deleted { namespace, name, version });
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

    /// Returns whether the object has changed since the watch last reported it.
    fn record_listed(&mut self, object: &impl Resource) -> bool {
        self.listed.insert(key(object));
        self.record(object)
    }

    /// Removes the objects that are not in the new list, and returns their keys.
    fn end_list(&mut self) -> Vec<ObjectKey> {
        let listed = std::mem::take(&mut self.listed);
        let gone: Vec<_> = self.versions.keys().filter(|key| !listed.contains(*key)).cloned().collect();
        for key in &gone {
            self.versions.remove(key);
        }
        gone
    }

    /// Returns whether the object has changed since the watch last reported it.
    fn record(&mut self, object: &impl Resource) -> bool {
        let meta = object.meta();
        let version = self.hasher.hash_one((meta.uid.as_deref(), meta.resource_version.as_deref()));
        self.versions.insert(key(object), version) != Some(version)
    }

    fn remove(&mut self, object: &impl Resource) -> ObjectKey {
        let key = key(object);
        self.versions.remove(&key);
        key
    }
}

fn key(object: &impl Resource) -> ObjectKey {
    (object.namespace().unwrap_or_default(), object.name_any())
}
