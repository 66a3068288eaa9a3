//! Turns the events of several watches of one kind into changes.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, RandomState},
};

use futures::{StreamExt, stream::select_all};
use kube::{Resource, ResourceExt, runtime::watcher::Event};
use tracing::warn;

use super::streams::Watch;
use crate::admin::{Health, error_message};

/// A change that a watch reports, or that a new list reveals.
pub(super) enum WatchEvent<K> {
    Applied(K),
    Deleted {
        namespace: String,
        name: String,
        /// `None`: a new list revealed it.
        version: Option<u64>,
    },
    /// Every watch has reported its first complete list.
    Synced,
}

/// Passes every change that the watches report to the callback. Objects that a new list shows unchanged are skipped.
pub(super) async fn follow_watches<K>(
    what: &'static str,
    watches: Vec<Watch<K>>,
    health: Health,
    mut handle: impl FnMut(WatchEvent<K>),
) where
    K: Resource + Send + 'static,
{
    /// By namespace and name, a hash that identifies the version of an object.
    type Versions = HashMap<(String, String), u64>;
    #[derive(Default)]
    struct Scope {
        known: Versions,
        listing: Option<HashSet<(String, String)>>,
        synced: bool,
    }
    let hasher = RandomState::new();
    let version =
        |object: &K| hasher.hash_one((object.meta().uid.as_deref(), object.meta().resource_version.as_deref()));
    let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());

    let mut scopes: Vec<Scope> = watches.iter().map(|_| Scope::default()).collect();
    let numbered =
        watches.into_iter().enumerate().map(|(number, watch)| watch.map(move |event| (number, event)).boxed());
    let mut events = select_all(numbered);
    while let Some((number, event)) = events.next().await {
        let scope = &mut scopes[number];
        match event {
            Ok(Event::Init) => scope.listing = Some(HashSet::new()),
            Ok(Event::InitApply(object)) => {
                let key = key(&object);
                if let Some(listing) = &mut scope.listing {
                    listing.insert(key.clone());
                }
                let version = version(&object);
                if scope.known.insert(key, version) != Some(version) {
                    handle(WatchEvent::Applied(object));
                }
            }
            Ok(Event::InitDone) => {
                let listed = scope.listing.take().unwrap_or_default();
                let gone: Vec<_> = scope.known.keys().filter(|key| !listed.contains(*key)).cloned().collect();
                for (namespace, name) in gone {
                    scope.known.remove(&(namespace.clone(), name.clone()));
                    handle(WatchEvent::Deleted { namespace, name, version: None });
                }
                if !std::mem::replace(&mut scope.synced, true) && scopes.iter().all(|scope| scope.synced) {
                    handle(WatchEvent::Synced);
                    health.set_synced(what);
                }
            }
            Ok(Event::Apply(object)) => {
                scope.known.insert(key(&object), version(&object));
                handle(WatchEvent::Applied(object));
            }
            Ok(Event::Delete(object)) => {
                let (namespace, name) = key(&object);
                scope.known.remove(&(namespace.clone(), name.clone()));
                let version = object.resource_version().as_deref().map(parse_version);
                handle(WatchEvent::Deleted { namespace, name, version });
            }
            Err(error) => {
                warn!(watch = what, error = error_message(&error), "a watch failed; retrying");
                health.record_watch_failure(what, &error);
            }
        }
    }
}

/// The versions of one resource increase. A version that is no number counts as older than all others.
pub(super) fn parse_version(resource_version: &str) -> u64 {
    resource_version.parse().unwrap_or(0)
}
