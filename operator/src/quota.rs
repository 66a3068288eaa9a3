//! Counts the appIDs and the bytes of rendered documents of each namespace against the platform's quotas.
//!
//! An appID counts while its key Secret exists: for an App that is served, and for a deleted App that left users. So a
//! namespace cannot get more by creating and deleting Apps. Everything follows from what the watches report, so it
//! survives a restart and a change of leader; reservations only bridge the time until they do.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::jiff::Timestamp;
use latchkey_crds::{rendered::RenderedKeys, types::AppId};
use serde::Deserialize;

use crate::{app::keys::secret::AppIdOwner, watch::NamespacedName};

/// The platform's quotas for each namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuotaLimits {
    pub(crate) apps: u32,
    pub(crate) bytes: u64,
}

/// Ten times what a large tenant is expected to have. An ordinary App costs a server about 8 KiB, so this is 16 MiB.
pub(crate) const DEFAULT_MAX_APPS: u32 = 2_000;
/// A server holds a document twice, parsed and in `--cache-dir`: 64 MiB of the chart's 256 MiB, and half of its
/// `cacheSizeLimit`. So a single namespace can neither exhaust a server's memory nor displace the documents of others
/// from the cache.
pub(crate) const DEFAULT_MAX_BYTES: u64 = 32 * 1024 * 1024;

/// The size of a rendered document, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DocumentSize {
    total: u64,
    /// The bytes of the keys, which grow by rotation although the App's author changes nothing.
    keys: u64,
}

/// What an App needs beyond what is already counted for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) apps: u32,
    pub(crate) bytes: u64,
}

/// The quota that an App would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum QuotaExceeded {
    #[error(
        "this namespace has {0} appIDs, as many as the platform allows; delete Apps that are not needed (a deleted App \
         that leaves users keeps its appID), or ask the platform team to raise --max-apps-per-namespace"
    )]
    Apps(u32),
    #[error(
        "the rendered documents of this namespace would exceed the {0} bytes that the platform allows; shorten \
         templates and lists, delete Apps, or ask the platform team to raise --max-rendered-bytes-per-namespace"
    )]
    Bytes(u64),
}

/// Counts the usage of every namespace.
pub(crate) struct Quotas {
    limits: QuotaLimits,
    namespaces: Mutex<Namespaces>,
}

#[derive(Default)]
struct Namespaces {
    app_ids: HashMap<AppId, CountedAppId>,
    /// By the name of the rendered Secret.
    documents: HashMap<String, CountedDocument>,
    usage: HashMap<String, Amount>,
    /// Apps without room, by namespace and name.
    waiting: HashMap<String, HashMap<String, WaitingApp>>,
}

struct CountedAppId {
    owner: AppIdOwner,
    /// The key Secret was reported. Otherwise it is about to be created.
    is_reported: bool,
}

struct CountedDocument {
    namespace: String,
    /// The size that counts: the larger of the published one and the one about to be published.
    counted: u64,
    published: Option<DocumentSize>,
}

#[derive(Clone, Copy)]
struct WaitingApp {
    created: Option<Timestamp>,
    need: Amount,
}

// === impl QuotaLimits ===

impl Default for QuotaLimits {
    fn default() -> Self {
        Self { apps: DEFAULT_MAX_APPS, bytes: DEFAULT_MAX_BYTES }
    }
}

impl QuotaLimits {
    /// Checks that `used` plus `need` is within the quotas.
    fn check(&self, used: Amount, need: Amount) -> Result<(), QuotaExceeded> {
        if need.apps > 0 && used.apps.saturating_add(need.apps) > self.apps {
            Err(QuotaExceeded::Apps(self.apps))
        } else if need.bytes > 0 && used.bytes.saturating_add(need.bytes) > self.bytes {
            Err(QuotaExceeded::Bytes(self.bytes))
        } else {
            Ok(())
        }
    }
}

// === impl DocumentSize ===

impl DocumentSize {
    pub(crate) fn of(document: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Keys {
            keys: RenderedKeys,
        }
        let bytes = |text: &[u8]| u64::try_from(text.len()).unwrap_or(u64::MAX);
        // The document of a deleted App has none.
        let keys = serde_json::from_slice::<Keys>(document).ok().and_then(|keys| serde_json::to_vec(&keys.keys).ok());
        Self { total: bytes(document), keys: keys.map_or(0, |keys| bytes(&keys)) }
    }

    fn without_keys(self) -> u64 {
        self.total.saturating_sub(self.keys)
    }

    /// How many bytes this document needs beyond the published one. 0 if nothing grew that its author wrote: the quota
    /// never delays a key.
    fn growth(self, published: Option<Self>) -> u64 {
        match published {
            Some(published) if self.without_keys() <= published.without_keys() => 0,
            Some(published) => self.total.saturating_sub(published.total),
            None => self.total,
        }
    }
}

// === impl Quotas ===

impl Quotas {
    pub(crate) fn new(limits: QuotaLimits) -> Self {
        Self { limits, namespaces: Mutex::default() }
    }

    // --- What the watches report

    /// Records the key Secret of an appID with the App that it names, or `None` if the Secret does not exist.
    pub(crate) fn record_keys(&self, id: &AppId, holder: Option<AppIdOwner>) {
        let mut namespaces = self.namespaces();
        namespaces.set_id(id, holder.map(|holder| CountedAppId { owner: holder, is_reported: true }));
    }

    /// Records the document in a rendered Secret, or `None` if the Secret does not exist.
    pub(crate) fn record_document(&self, secret: &str, document: Option<(&str, DocumentSize)>) {
        let held = document.map(|(namespace, size)| CountedDocument {
            namespace: namespace.to_owned(),
            counted: size.total,
            published: Some(size),
        });
        self.namespaces().set_document(secret, held);
    }

    // --- Decisions

    /// Reserves what the first keys and the first document of an App need, or returns the quota that prevents it.
    /// `ahead` older Apps have precedence.
    pub(crate) fn admit_app(
        &self,
        id: &AppId,
        holder: &AppIdOwner,
        secret: &str,
        size: DocumentSize,
        ahead: u32,
    ) -> Result<(), (QuotaExceeded, Amount)> {
        let mut namespaces = self.namespaces();
        let is_held = namespaces.app_ids.get(id).is_some_and(|held| held.owner.namespace == holder.namespace);
        let need = Amount { apps: u32::from(!is_held), bytes: namespaces.growth(secret, &holder.namespace, size) };
        let mut used = namespaces.used_without(secret, &holder.namespace);
        used.apps = used.apps.saturating_add(ahead);
        self.limits.check(used, need).map_err(|exceeded| (exceeded, need))?;
        if !is_held {
            namespaces.set_id(id, Some(CountedAppId { owner: holder.clone(), is_reported: false }));
        }
        namespaces.reserve(secret, &holder.namespace, size);
        Ok(())
    }

    /// The same for a document of an App that has its keys.
    pub(crate) fn admit_document(
        &self,
        secret: &str,
        namespace: &str,
        size: DocumentSize,
    ) -> Result<(), (QuotaExceeded, Amount)> {
        let mut namespaces = self.namespaces();
        let need = Amount { apps: 0, bytes: namespaces.growth(secret, namespace, size) };
        let used = namespaces.used_without(secret, namespace);
        self.limits.check(used, need).map_err(|exceeded| (exceeded, need))?;
        namespaces.reserve(secret, namespace, size);
        Ok(())
    }

    /// Releases unused reservations: from now on only what the watches report counts.
    pub(crate) fn release_reservations(&self, id: &AppId, secret: &str) {
        let mut namespaces = self.namespaces();
        if namespaces.app_ids.get(id).is_some_and(|held| !held.is_reported) {
            namespaces.set_id(id, None);
        }
        let published =
            namespaces.documents.get(secret).map(|held| held.published.map(|size| (held.namespace.clone(), size)));
        if let Some(published) = published {
            let held = published.map(|(namespace, size)| CountedDocument {
                namespace,
                counted: size.total,
                published: Some(size),
            });
            namespaces.set_document(secret, held);
        }
    }

    /// Whether there is room for this many more Apps.
    pub(crate) fn has_room(&self, namespace: &str, apps: usize) -> bool {
        let used = self.namespaces().used(namespace).apps;
        u32::try_from(apps).is_ok_and(|apps| used.saturating_add(apps) <= self.limits.apps)
    }

    /// Whether the documents of a namespace have reached the quota.
    pub(crate) fn is_byte_quota_reached(&self, namespace: &str) -> bool {
        self.namespaces().used(namespace).bytes >= self.limits.bytes
    }

    /// Whether an App of the namespace owns the appID.
    pub(crate) fn owns_app_id(&self, id: &AppId, namespace: &str) -> bool {
        self.namespaces().app_ids.get(id).is_some_and(|held| held.owner.namespace == namespace)
    }

    /// The App that a key Secret names.
    pub(crate) fn owner(&self, id: &AppId) -> Option<AppIdOwner> {
        self.namespaces().app_ids.get(id).map(|held| held.owner.clone())
    }

    /// Every appID with keys.
    pub(crate) fn app_ids(&self) -> Vec<AppId> {
        self.namespaces().app_ids.keys().cloned().collect()
    }

    // --- Apps that wait

    pub(crate) fn add_waiting(&self, namespace: &str, name: &str, created: Option<Timestamp>, need: Amount) {
        let waiting = WaitingApp { created, need };
        self.namespaces().waiting.entry(namespace.to_owned()).or_default().insert(name.to_owned(), waiting);
    }

    pub(crate) fn remove_waiting(&self, namespace: &str, name: &str) {
        let mut namespaces = self.namespaces();
        if let Some(waiting) = namespaces.waiting.get_mut(namespace) {
            waiting.remove(name);
            if waiting.is_empty() {
                namespaces.waiting.remove(namespace);
            }
        }
    }

    /// Whether the App waits for an appID.
    pub(crate) fn is_waiting_for_app_id(&self, namespace: &str, name: &str) -> bool {
        let namespaces = self.namespaces();
        namespaces.waiting.get(namespace).and_then(|waiting| waiting.get(name)).is_some_and(|one| one.need.apps > 0)
    }

    /// The waiting Apps that fit now, the oldest first.
    pub(crate) fn admissible(&self, namespace: &str) -> Vec<NamespacedName> {
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
        fits.map(|(name, _)| NamespacedName::new(namespace, name)).collect()
    }

    fn namespaces(&self) -> MutexGuard<'_, Namespaces> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Namespaces ===

impl Namespaces {
    fn used(&self, namespace: &str) -> Amount {
        self.usage.get(namespace).copied().unwrap_or_default()
    }

    /// The usage without what is reserved for this document.
    fn used_without(&self, secret: &str, namespace: &str) -> Amount {
        let mut used = self.used(namespace);
        if let Some(held) = self.documents.get(secret).filter(|held| held.namespace == namespace) {
            let published = held.published.map_or(0, |published| published.total);
            used.bytes = used.bytes.saturating_sub(held.counted.saturating_sub(published));
        }
        used
    }

    fn growth(&self, secret: &str, namespace: &str, size: DocumentSize) -> u64 {
        let held = self.documents.get(secret).filter(|held| held.namespace == namespace);
        size.growth(held.and_then(|held| held.published))
    }

    /// Counts a document that is about to be published.
    fn reserve(&mut self, secret: &str, namespace: &str, size: DocumentSize) {
        let held = self.documents.get(secret).filter(|held| held.namespace == namespace);
        let published = held.and_then(|held| held.published);
        let counted = size.total.max(published.map_or(0, |published| published.total));
        self.set_document(secret, Some(CountedDocument { namespace: namespace.to_owned(), counted, published }));
    }

    fn set_id(&mut self, id: &AppId, held: Option<CountedAppId>) {
        if let Some(held) = &held {
            self.add(&held.owner.namespace.clone(), Amount { apps: 1, bytes: 0 });
        }
        let before = match held {
            Some(held) => self.app_ids.insert(id.clone(), held),
            None => self.app_ids.remove(id),
        };
        if let Some(before) = before {
            self.subtract(&before.owner.namespace, Amount { apps: 1, bytes: 0 });
        }
    }

    fn set_document(&mut self, secret: &str, held: Option<CountedDocument>) {
        if let Some(held) = &held {
            self.add(&held.namespace.clone(), Amount { apps: 0, bytes: held.counted });
        }
        let before = match held {
            Some(held) => self.documents.insert(secret.to_owned(), held),
            None => self.documents.remove(secret),
        };
        if let Some(before) = before {
            self.subtract(&before.namespace, Amount { apps: 0, bytes: before.counted });
        }
    }

    fn add(&mut self, namespace: &str, need: Amount) {
        let used = self.usage.entry(namespace.to_owned()).or_default();
        used.apps = used.apps.saturating_add(need.apps);
        used.bytes = used.bytes.saturating_add(need.bytes);
    }

    fn subtract(&mut self, namespace: &str, need: Amount) {
        let Some(used) = self.usage.get_mut(namespace) else { return };
        used.apps = used.apps.saturating_sub(need.apps);
        used.bytes = used.bytes.saturating_sub(need.bytes);
        if *used == Amount::default() {
            self.usage.remove(namespace);
        }
    }
}

#[cfg(test)]
mod tests;
