//! Writes the changes of several watches into one store.

use std::{collections::HashMap, sync::Arc};

use kube::{
    Resource,
    runtime::{
        reflector::{ObjectRef, Store, store::Writer},
        watcher::Event,
    },
};

use super::changes::WatchEvent;

/// Writes the watch events into a store.
pub(super) struct StoreWriter<K: Resource<DynamicType = ()> + Clone + 'static> {
    writer: Writer<K>,
    store: Store<K>,
    /// The objects that are reported before all watches are synced. When all watches are synced, the objects are added
    /// to the store, and this field becomes `None`. So an object that is deleted before that is never in the store.
    before_sync: Option<HashMap<ObjectRef<K>, Arc<K>>>,
}

// === impl StoreWriter ===

impl<K: Resource<DynamicType = ()> + Clone + 'static> StoreWriter<K> {
    pub(super) fn new(writer: Writer<K>) -> Self {
        let store = writer.as_reader();
        Self { writer, store, before_sync: Some(HashMap::new()) }
    }

    /// Applies an event and returns the object as it was before.
    pub(super) fn apply(&mut self, event: &WatchEvent<K>) -> Option<Arc<K>> {
        match (event, &mut self.before_sync) {
            (WatchEvent::Applied(_, object), Some(before_sync)) => {
                before_sync.insert(ObjectRef::from_obj(object), Arc::new(object.clone()))
            }
            (WatchEvent::Applied(_, object), None) => {
                let before = self.store.get(&ObjectRef::from_obj(object));
                self.writer.apply_watcher_event(&Event::Apply(object.clone()));
                before
            }
            (WatchEvent::Deleted { name, .. }, Some(before_sync)) => before_sync.remove(&name.object_ref::<K>()),
            (WatchEvent::Deleted { name, .. }, None) => {
                let before = self.store.get(&name.object_ref())?;
                self.writer.apply_watcher_event(&Event::Delete(K::clone(&before)));
                Some(before)
            }
            (WatchEvent::Synced, before_sync) => {
                self.writer.apply_watcher_event(&Event::Init);
                for (_, object) in before_sync.take().unwrap_or_default() {
                    self.writer.apply_watcher_event(&Event::InitApply(Arc::unwrap_or_clone(object)));
                }
                self.writer.apply_watcher_event(&Event::InitDone);
                None
            }
        }
    }
}
