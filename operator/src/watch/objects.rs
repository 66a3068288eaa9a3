//! What the operator stores of a watched object.

use kube::{
    Resource, ResourceExt,
    core::{DeserializeGuard, PartialObjectMeta},
    runtime::watcher::{self, Event},
};
use latchkey_crds::{
    app::App,
    types::{AppId, HostName},
};

/// The prefix of Latchkey's annotations (`latchkey_crds::names`).
const ANNOTATION_PREFIX: &str = "latchkey.dev/";

/// The metadata of a Secret or ConfigMap. Its values are read when they are needed.
pub(super) type Metadata<K> = PartialObjectMeta<K>;

/// Removes the metadata that the operator does not read. The removed annotations and labels can have 256 KiB and more
/// per object, and a change of them is no reason to reconcile.
pub(super) fn strip_metadata<K: Resource>(event: watcher::Result<Event<K>>) -> watcher::Result<Event<K>> {
    event.map(|event| {
        event.modify(|object| {
            object.meta_mut().managed_fields = None;
            object.meta_mut().labels = None;
            object.annotations_mut().retain(|name, _| name.starts_with(ANNOTATION_PREFIX));
        })
    })
}

/// Whether two versions of an object are equal in everything that a reconcile reads, except the status.
pub(super) fn is_same_but_for_status<K: Resource>(one: &DeserializeGuard<K>, other: &DeserializeGuard<K>) -> bool {
    let read = |object: &DeserializeGuard<K>| {
        let meta = object.meta();
        (
            meta.uid.clone(),
            meta.generation,
            meta.deletion_timestamp.clone(),
            meta.annotations.clone(),
            meta.finalizers.clone(),
            object.0.is_ok(),
        )
    };
    read(one) == read(other)
}

/// Returns the own host that an App wants for its pages.
pub(super) fn claimed_pages_host(app: &DeserializeGuard<App>) -> Option<HostName> {
    app.0.as_ref().ok()?.spec.pages.enabled_host().cloned()
}

/// Returns the appID that an App claims, if it is valid.
pub(crate) fn claimed_app_id(app: &DeserializeGuard<App>) -> Option<AppId> {
    app.0.as_ref().ok()?.app_id().ok()
}
