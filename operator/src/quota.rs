//! What each namespace holds of appIDs and of bytes of rendered documents, against the platform's bounds.
//!
//! An appID counts while its key Secret is there: for the App that is served, and for the App that is gone but left
//! users. So a namespace cannot make more of them by creating and deleting Apps. Everything here follows from what the
//! watches report, so it survives a restart and a change of leader; reservations only bridge the time until they do.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::jiff::Timestamp;
use latchkey_crds::{rendered::RenderedKeys, types::AppId};
use serde::Deserialize;

use crate::{app::keys::secret::Holder, watch::Place};

/// The platform's bounds for each namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) apps: u32,
    pub(crate) bytes: u64,
}

/// Ten times what a large tenant is expected to have; an ordinary App costs a server about 8 KiB, so 16 MiB.
pub(crate) const MAX_APPS: u32 = 2_000;
/// A server holds a document twice, parsed and in `--cache-dir`: 64 MiB of the chart's 256 MiB, and half of its
/// `cacheSizeLimit`. So no namespace alone ends a server or keeps the others' documents out of the cache.
pub(crate) const MAX_BYTES: u64 = 32 * 1024 * 1024;

/// The size of a rendered document, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    all: u64,
    /// Those of the keys: they grow by rotation, without anything that the App's author wrote.
    keys: u64,
}

/// What an App needs beyond what its namespace holds for it already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) apps: u32,
    pub(crate) bytes: u64,
}

/// The bound that an App would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Exceeded {
    #[error(
        "this namespace holds {0} appIDs, as many as the platform allows; delete Apps that are not needed (one that \
         leaves users keeps its appID), or ask the platform team to raise --max-apps-per-namespace"
    )]
    Apps(u32),
    #[error(
        "the rendered documents of this namespace would have more than the {0} bytes that the platform allows; shorten \
         templates and lists, delete Apps, or ask the platform team to raise --max-rendered-bytes-per-namespace"
    )]
    Bytes(u64),
}

/// Counts what every namespace holds.
pub(crate) struct Quotas {
    limits: Limits,
    namespaces: Mutex<Namespaces>,
}

#[derive(Default)]
struct Namespaces {
    ids: HashMap<AppId, HeldId>,
    /// By the name of the rendered Secret.
    documents: HashMap<String, HeldDocument>,
    usage: HashMap<String, Need>,
    /// Apps that were refused, by namespace and name.
    waiting: HashMap<String, HashMap<String, Waiting>>,
}

struct HeldId {
    holder: Holder,
    /// The key Secret was seen. Otherwise it is about to be made.
    seen: bool,
}

struct HeldDocument {
    namespace: String,
    /// What counts: the larger of what is published and what is about to be.
    counted: u64,
    published: Option<Size>,
}

#[derive(Clone, Copy)]
struct Waiting {
    created: Option<Timestamp>,
    need: Need,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self { apps: MAX_APPS, bytes: MAX_BYTES }
    }
}

impl Limits {
    /// Whether a namespace that holds this can hold so much more.
    fn check(&self, used: Need, need: Need) -> Result<(), Exceeded> {
        if need.apps > 0 && used.apps.saturating_add(need.apps) > self.apps {
            Err(Exceeded::Apps(self.apps))
        } else if need.bytes > 0 && used.bytes.saturating_add(need.bytes) > self.bytes {
            Err(Exceeded::Bytes(self.bytes))
        } else {
            Ok(())
        }
    }
}

// === impl Size ===

impl Size {
    pub(crate) fn of(document: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Keys {
            keys: RenderedKeys,
        }
        let bytes = |text: &[u8]| u64::try_from(text.len()).unwrap_or(u64::MAX);
        // A document of an App that is gone has none.
        let keys = serde_json::from_slice::<Keys>(document).ok().and_then(|keys| serde_json::to_vec(&keys.keys).ok());
        Self { all: bytes(document), keys: keys.map_or(0, |keys| bytes(&keys)) }
    }

    fn without_keys(self) -> u64 {
        self.all.saturating_sub(self.keys)
    }

    /// How many bytes more this document needs than the published one. 0 if nothing grew that its author wrote: a key
    /// is never held back by the bound.
    fn growth(self, published: Option<Self>) -> u64 {
        match published {
            Some(published) if self.without_keys() <= published.without_keys() => 0,
            Some(published) => self.all.saturating_sub(published.all),
            None => self.all,
        }
    }
}

// === impl Quotas ===

impl Quotas {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, namespaces: Mutex::default() }
    }

    // --- What the watches report

    /// The key Secret of an appID, with the App that it names; none if there is no such Secret any more.
    pub(crate) fn keys(&self, id: &AppId, holder: Option<Holder>) {
        let mut namespaces = self.namespaces();
        namespaces.set_id(id, holder.map(|holder| HeldId { holder, seen: true }));
    }

    /// The document in a rendered Secret; none if there is no such Secret any more.
    pub(crate) fn document(&self, secret: &str, document: Option<(&str, Size)>) {
        let held = document.map(|(namespace, size)| HeldDocument {
            namespace: namespace.to_owned(),
            counted: size.all,
            published: Some(size),
        });
        self.namespaces().set_document(secret, held);
    }

    // --- Decisions

    /// Takes what the first keys and the first document of an App need, or says which bound is in the way. `ahead`: so
    /// many older Apps come first.
    pub(crate) fn admit_app(
        &self,
        id: &AppId,
        holder: &Holder,
        secret: &str,
        size: Size,
        ahead: u32,
    ) -> Result<(), (Exceeded, Need)> {
        let mut namespaces = self.namespaces();
        let is_held = namespaces.ids.get(id).is_some_and(|held| held.holder.namespace == holder.namespace);
        let need = Need { apps: u32::from(!is_held), bytes: namespaces.growth(secret, &holder.namespace, size) };
        let mut used = namespaces.used_beside(secret, &holder.namespace);
        used.apps = used.apps.saturating_add(ahead);
        self.limits.check(used, need).map_err(|exceeded| (exceeded, need))?;
        if !is_held {
            namespaces.set_id(id, Some(HeldId { holder: holder.clone(), seen: false }));
        }
        namespaces.reserve(secret, &holder.namespace, size);
        Ok(())
    }

    /// The same for a document of an App that has its keys.
    pub(crate) fn admit_document(&self, secret: &str, namespace: &str, size: Size) -> Result<(), (Exceeded, Need)> {
        let mut namespaces = self.namespaces();
        let need = Need { apps: 0, bytes: namespaces.growth(secret, namespace, size) };
        let used = namespaces.used_beside(secret, namespace);
        self.limits.check(used, need).map_err(|exceeded| (exceeded, need))?;
        namespaces.reserve(secret, namespace, size);
        Ok(())
    }

    /// Gives back what was taken and not used: what counts from now on is what the watches report.
    pub(crate) fn settle(&self, id: &AppId, secret: &str) {
        let mut namespaces = self.namespaces();
        if namespaces.ids.get(id).is_some_and(|held| !held.seen) {
            namespaces.set_id(id, None);
        }
        let published =
            namespaces.documents.get(secret).map(|held| held.published.map(|size| (held.namespace.clone(), size)));
        if let Some(published) = published {
            let held =
                published.map(|(namespace, size)| HeldDocument { namespace, counted: size.all, published: Some(size) });
            namespaces.set_document(secret, held);
        }
    }

    /// Whether so many Apps more than now can come, whatever their order.
    pub(crate) fn has_room(&self, namespace: &str, apps: usize) -> bool {
        let used = self.namespaces().used(namespace).apps;
        u32::try_from(apps).is_ok_and(|apps| used.saturating_add(apps) <= self.limits.apps)
    }

    /// Whether the documents of a namespace have reached the bound.
    pub(crate) fn is_full(&self, namespace: &str) -> bool {
        self.namespaces().used(namespace).bytes >= self.limits.bytes
    }

    /// The App of that name holds an appID.
    pub(crate) fn holds_id(&self, id: &AppId, namespace: &str) -> bool {
        self.namespaces().ids.get(id).is_some_and(|held| held.holder.namespace == namespace)
    }

    /// The App that a key Secret names.
    pub(crate) fn holder(&self, id: &AppId) -> Option<Holder> {
        self.namespaces().ids.get(id).map(|held| held.holder.clone())
    }

    /// Every appID with keys.
    pub(crate) fn ids(&self) -> Vec<AppId> {
        self.namespaces().ids.keys().cloned().collect()
    }

    // --- Apps that wait

    pub(crate) fn wait(&self, namespace: &str, name: &str, created: Option<Timestamp>, need: Need) {
        let waiting = Waiting { created, need };
        self.namespaces().waiting.entry(namespace.to_owned()).or_default().insert(name.to_owned(), waiting);
    }

    pub(crate) fn wait_no_more(&self, namespace: &str, name: &str) {
        let mut namespaces = self.namespaces();
        if let Some(waiting) = namespaces.waiting.get_mut(namespace) {
            waiting.remove(name);
            if waiting.is_empty() {
                namespaces.waiting.remove(namespace);
            }
        }
    }

    /// Whether the App waits for an appID.
    pub(crate) fn waits(&self, namespace: &str, name: &str) -> bool {
        let namespaces = self.namespaces();
        namespaces.waiting.get(namespace).and_then(|waiting| waiting.get(name)).is_some_and(|one| one.need.apps > 0)
    }

    /// The Apps that wait and now fit, the oldest first.
    pub(crate) fn admissible(&self, namespace: &str) -> Vec<Place> {
        let namespaces = self.namespaces();
        let Some(waiting) = namespaces.waiting.get(namespace) else { return Vec::new() };
        let mut waiting: Vec<_> = waiting.iter().collect();
        waiting.sort_by_key(|(name, one)| (one.created.unwrap_or(Timestamp::MAX), (*name).clone()));
        let mut used = namespaces.used(namespace);
        let fits = waiting.into_iter().filter(|(_, one)| {
            let fits = self.limits.check(used, one.need).is_ok();
            if fits {
                used.apps = used.apps.saturating_add(one.need.apps);
                used.bytes = used.bytes.saturating_add(one.need.bytes);
            }
            fits
        });
        fits.map(|(name, _)| Place::new(namespace, name)).collect()
    }

    fn namespaces(&self) -> MutexGuard<'_, Namespaces> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Namespaces ===

impl Namespaces {
    fn used(&self, namespace: &str) -> Need {
        self.usage.get(namespace).copied().unwrap_or_default()
    }

    /// What is used, without what is reserved for this document.
    fn used_beside(&self, secret: &str, namespace: &str) -> Need {
        let mut used = self.used(namespace);
        if let Some(held) = self.documents.get(secret).filter(|held| held.namespace == namespace) {
            let published = held.published.map_or(0, |published| published.all);
            used.bytes = used.bytes.saturating_sub(held.counted.saturating_sub(published));
        }
        used
    }

    fn growth(&self, secret: &str, namespace: &str, size: Size) -> u64 {
        let held = self.documents.get(secret).filter(|held| held.namespace == namespace);
        size.growth(held.and_then(|held| held.published))
    }

    /// Counts a document that is about to be published.
    fn reserve(&mut self, secret: &str, namespace: &str, size: Size) {
        let held = self.documents.get(secret).filter(|held| held.namespace == namespace);
        let published = held.and_then(|held| held.published);
        let counted = size.all.max(published.map_or(0, |published| published.all));
        self.set_document(secret, Some(HeldDocument { namespace: namespace.to_owned(), counted, published }));
    }

    fn set_id(&mut self, id: &AppId, held: Option<HeldId>) {
        if let Some(held) = &held {
            self.add(&held.holder.namespace.clone(), Need { apps: 1, bytes: 0 });
        }
        let before = match held {
            Some(held) => self.ids.insert(id.clone(), held),
            None => self.ids.remove(id),
        };
        if let Some(before) = before {
            self.subtract(&before.holder.namespace, Need { apps: 1, bytes: 0 });
        }
    }

    fn set_document(&mut self, secret: &str, held: Option<HeldDocument>) {
        if let Some(held) = &held {
            self.add(&held.namespace.clone(), Need { apps: 0, bytes: held.counted });
        }
        let before = match held {
            Some(held) => self.documents.insert(secret.to_owned(), held),
            None => self.documents.remove(secret),
        };
        if let Some(before) = before {
            self.subtract(&before.namespace, Need { apps: 0, bytes: before.counted });
        }
    }

    fn add(&mut self, namespace: &str, need: Need) {
        let used = self.usage.entry(namespace.to_owned()).or_default();
        used.apps = used.apps.saturating_add(need.apps);
        used.bytes = used.bytes.saturating_add(need.bytes);
    }

    fn subtract(&mut self, namespace: &str, need: Need) {
        let Some(used) = self.usage.get_mut(namespace) else { return };
        used.apps = used.apps.saturating_sub(need.apps);
        used.bytes = used.bytes.saturating_sub(need.bytes);
        if *used == Need::default() {
            self.usage.remove(namespace);
        }
    }
}

#[cfg(test)]
mod tests;
