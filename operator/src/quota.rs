//! Counts the appIDs and the bytes of rendered documents of each namespace against the platform's quotas.
//!
//! An appID is counted while its key Secret exists, also after its App was deleted and left users. So a namespace
//! cannot get more appIDs by creating and deleting Apps. All counts come from what the watches report, so they survive
//! a restart and a change of leader. Until the watches report a write, a reservation counts it.

use k8s_openapi::jiff::Timestamp;
use latchkey_crds::types::AppId;
use parking_lot::{Mutex, MutexGuard};

use self::usage::{CountedAppId, CountedDocument, Namespaces, WaitingApp};
pub(crate) use self::{size::DocumentSize, usage::Amount};
use crate::{app::keys::secret::AppIdOwner, watch::NamespacedName};

mod size;
#[cfg(test)]
mod tests;
mod usage;

/// The platform's quotas for each namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuotaLimits {
    pub(crate) apps: u32,
    pub(crate) bytes: u64,
}

/// The default quota of Apps is ten times what a large tenant is expected to have. An ordinary App needs about 8 KiB of
/// a server's memory, so 2,000 Apps need 16 MiB.
pub(crate) const DEFAULT_MAX_APPS: u32 = 2_000;
/// A server has each document in memory twice: parsed, and as a file in `--cache-dir`, which is in memory, too. With
/// the chart's defaults, the documents of a namespace can need 64 MiB of 256 MiB of memory, and half of
/// `cacheSizeLimit`. So a single namespace can neither exhaust a server's memory nor displace the documents of others
/// from the cache.
pub(crate) const DEFAULT_MAX_RENDERED_BYTES: u64 = 32 * 1024 * 1024;

/// Which quota an App would exceed.
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

/// The error if there is no room in the quotas for an App or a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom {
    pub(crate) exceeded: QuotaExceeded,
    /// What the App or the document needs.
    pub(crate) need: Amount,
}

/// Counts the usage of every namespace.
pub(crate) struct Quotas {
    limits: QuotaLimits,
    namespaces: Mutex<Namespaces>,
}

// === impl QuotaLimits ===

impl Default for QuotaLimits {
    fn default() -> Self {
        Self { apps: DEFAULT_MAX_APPS, bytes: DEFAULT_MAX_RENDERED_BYTES }
    }
}

impl QuotaLimits {
    /// Checks that `used` plus `need` is within the quotas.
    fn check(&self, used: Amount, need: Amount) -> Result<(), NoRoom> {
        if need.apps > 0 && used.apps.saturating_add(need.apps) > self.apps {
            Err(NoRoom { exceeded: QuotaExceeded::Apps(self.apps), need })
        } else if need.bytes > 0 && used.bytes.saturating_add(need.bytes) > self.bytes {
            Err(NoRoom { exceeded: QuotaExceeded::Bytes(self.bytes), need })
        } else {
            Ok(())
        }
    }
}

// === impl Quotas ===

impl Quotas {
    pub(crate) fn new(limits: QuotaLimits) -> Self {
        Self { limits, namespaces: Mutex::default() }
    }

    // --- What the watches report

    /// Records the owner that the key Secret of an appID names. `None`: no key Secret names an owner.
    pub(crate) fn record_keys(&self, app_id: &AppId, owner: Option<AppIdOwner>) {
        self.namespaces().set_app_id(app_id, owner.map(|owner| CountedAppId { owner, is_reported: true }));
    }

    /// Records the namespace and the size of the document in a rendered Secret. `None`: the Secret does not exist.
    pub(crate) fn record_document(&self, secret: &str, document: Option<(&str, DocumentSize)>) {
        let document = document.map(|(namespace, size)| CountedDocument::published(namespace, size));
        self.namespaces().set_document(secret, document);
    }

    // --- Decisions

    /// Reserves room for the first keys and the first document of an App, or returns the quota that would be exceeded.
    /// `older_apps` is the number of older Apps that have precedence over this App.
    pub(crate) fn admit_app(
        &self,
        app_id: &AppId,
        owner: &AppIdOwner,
        secret: &str,
        size: DocumentSize,
        older_apps: u32,
    ) -> Result<(), NoRoom> {
        let mut namespaces = self.namespaces();
        let is_counted =
            namespaces.app_ids.get(app_id).is_some_and(|counted| counted.owner.namespace == owner.namespace);
        let need = Amount { apps: u32::from(!is_counted), bytes: namespaces.growth(secret, &owner.namespace, size) };
        let mut used = namespaces.used_without(secret, &owner.namespace);
        used.apps = used.apps.saturating_add(older_apps);
        self.limits.check(used, need)?;
        if !is_counted {
            namespaces.set_app_id(app_id, Some(CountedAppId { owner: owner.clone(), is_reported: false }));
        }
        namespaces.reserve(secret, &owner.namespace, size);
        Ok(())
    }

    /// Reserves room for the document of an App that already has keys, or returns the quota that would be exceeded.
    pub(crate) fn admit_document(&self, secret: &str, namespace: &str, size: DocumentSize) -> Result<(), NoRoom> {
        let mut namespaces = self.namespaces();
        let need = Amount { apps: 0, bytes: namespaces.growth(secret, namespace, size) };
        let used = namespaces.used_without(secret, namespace);
        self.limits.check(used, need)?;
        namespaces.reserve(secret, namespace, size);
        Ok(())
    }

    /// Returns how many bytes the clients in this document can have according to the namespace's quota for clients.
    pub(crate) fn room_for_clients(&self, secret: &str, namespace: &str) -> u64 {
        self.limits.bytes.saturating_sub(self.namespaces().client_bytes_without(secret, namespace))
    }

    /// Releases the unused reservations of an App: from now on, only what the watches report is counted.
    pub(crate) fn release_reservations(&self, app_id: &AppId, secret: &str) {
        let mut namespaces = self.namespaces();
        if namespaces.app_ids.get(app_id).is_some_and(|counted| !counted.is_reported) {
            namespaces.set_app_id(app_id, None);
        }
        if let Some(document) = namespaces.documents.get(secret) {
            let published = document.published.map(|size| CountedDocument::published(&document.namespace, size));
            namespaces.set_document(secret, published);
        }
    }

    /// Whether the namespace has room for this many more Apps.
    pub(crate) fn has_room(&self, namespace: &str, apps: usize) -> bool {
        let used = self.namespaces().used(namespace).apps;
        u32::try_from(apps).is_ok_and(|apps| used.saturating_add(apps) <= self.limits.apps)
    }

    /// Whether the documents of a namespace have reached the quota of bytes.
    pub(crate) fn is_byte_quota_reached(&self, namespace: &str) -> bool {
        self.namespaces().used(namespace).bytes >= self.limits.bytes
    }

    /// Whether an App of the namespace owns the appID.
    pub(crate) fn owns_app_id(&self, app_id: &AppId, namespace: &str) -> bool {
        self.namespaces().app_ids.get(app_id).is_some_and(|counted| counted.owner.namespace == namespace)
    }

    /// Returns the App that the key Secret of this appID names, or for which the appID is reserved.
    pub(crate) fn owner(&self, app_id: &AppId) -> Option<AppIdOwner> {
        self.namespaces().app_ids.get(app_id).map(|counted| counted.owner.clone())
    }

    /// Returns every appID that has keys or is reserved for an App.
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

    /// Whether the App waits for room in a quota and still needs an appID.
    pub(crate) fn is_waiting_for_app_id(&self, namespace: &str, name: &str) -> bool {
        let namespaces = self.namespaces();
        namespaces.waiting.get(namespace).and_then(|waiting| waiting.get(name)).is_some_and(|app| app.need.apps > 0)
    }

    /// Returns the waiting Apps for which the quotas have room now, the oldest first.
    pub(crate) fn admissible(&self, namespace: &str) -> Vec<NamespacedName> {
        let namespaces = self.namespaces();
        let Some(waiting) = namespaces.waiting.get(namespace) else { return Vec::new() };
        let mut waiting: Vec<_> = waiting.iter().collect();
        waiting.sort_by_key(|(name, app)| (app.created.unwrap_or(Timestamp::MAX), (*name).clone()));
        let mut used = namespaces.used(namespace);
        let fits = waiting.into_iter().filter(|(_, app)| {
            let fits = self.limits.check(used, app.need).is_ok();
            if fits {
                used.apps = used.apps.saturating_add(app.need.apps);
                used.bytes = used.bytes.saturating_add(app.need.bytes);
            }
            fits
        });
        fits.map(|(name, _)| NamespacedName::new(namespace, name)).collect()
    }

    fn namespaces(&self) -> MutexGuard<'_, Namespaces> {
        self.namespaces.lock()
    }
}
