//! The published documents, as this operator wrote them or as the watch reports them.

use std::{collections::HashMap, sync::Arc};

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use latchkey_crds::{
    names::{NAME_ANNOTATION, NAMESPACE_ANNOTATION, PAGES_HOST_ANNOTATION, RENDERED_APP_KEY},
    rendered::Revision,
    types::{AppId, HostName},
};
use parking_lot::{Mutex, MutexGuard};

use super::{
    changes::parse_version,
    index::{NamespacedName, ReferenceIndex},
};
use crate::quota::{DocumentSize, Quotas};

/// The prefix of the names of rendered Secrets, before the appID (`latchkey_crds::names`).
const RENDERED_PREFIX: &str = "latchkey-app-";

/// What is known of the published documents, by the name of their Secret. Their contents are not stored.
pub(crate) struct PublishedDocuments {
    index: Mutex<PublishedIndex>,
    quotas: Arc<Quotas>,
}

#[derive(Default)]
struct PublishedIndex {
    apps: HashMap<String, PublishedApp>,
    /// The names of the Secrets, by their App.
    secrets: ReferenceIndex<NamespacedName, String>,
    /// The names of the Secrets, by the App's own host for its pages.
    pages_hosts: ReferenceIndex<HostName, String>,
    /// The free hosts that running reconciles have reserved for their Apps. Each value is the name of the Secret with
    /// the App's document.
    reserved_hosts: HashMap<HostName, String>,
    /// The newest version that the watch has reported for any Secret.
    newest_version: u64,
}

/// What is known of one published document: the App that it belongs to (`namespace`, `name`), and the version and uid
/// of the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PublishedApp {
    /// The revision of the bytes in the Secret, whoever wrote them. `None` if the Secret contains no document.
    pub(crate) revision: Option<Revision>,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The App's own host for its pages, if the document contains it.
    pub(crate) pages_host: Option<HostName>,
    pub(crate) resource_version: String,
    pub(crate) uid: String,
    pub(crate) size: DocumentSize,
}

/// Returns the appID of the document in a Secret with this name.
pub(crate) fn app_id_of_secret(secret: &str) -> Option<AppId> {
    secret.strip_prefix(RENDERED_PREFIX)?.parse().ok()
}

// === impl PublishedDocuments, PublishedIndex ===

impl PublishedDocuments {
    pub(super) fn new(quotas: Arc<Quotas>) -> Self {
        Self { index: Mutex::default(), quotas }
    }

    fn lock(&self) -> MutexGuard<'_, PublishedIndex> {
        self.index.lock()
    }

    pub(crate) fn get(&self, secret: &str) -> Option<PublishedApp> {
        self.lock().apps.get(secret).cloned()
    }

    /// Records what this operator wrote, unless the watch has already reported something newer.
    pub(crate) fn record_write(&self, secret: &str, app: PublishedApp) {
        let mut index = self.lock();
        if parse_version(&app.resource_version) > index.newest_version {
            self.put(&mut index, secret, Some(app));
        }
    }

    /// Records what the watch reports, unless this operator wrote something newer. Returns whether the record changed.
    pub(super) fn record_watched(&self, secret: &str, app: PublishedApp) -> bool {
        let version = parse_version(&app.resource_version);
        let mut index = self.lock();
        index.newest_version = index.newest_version.max(version);
        if index.apps.get(secret).is_some_and(|stored| parse_version(&stored.resource_version) > version) {
            return false;
        }
        self.put(&mut index, secret, Some(app.clone())) != Some(app)
    }

    /// Records a deletion that the watch reports, unless this operator wrote the Secret after the deletion. `version`
    /// is the version of the deletion, if known.
    pub(super) fn record_deletion(&self, secret: &str, version: Option<u64>) {
        let mut index = self.lock();
        index.newest_version = index.newest_version.max(version.unwrap_or(0));
        let is_newer =
            |stored: &PublishedApp| version.is_some_and(|deleted| parse_version(&stored.resource_version) > deleted);
        if !index.apps.get(secret).is_some_and(is_newer) {
            self.put(&mut index, secret, None);
        }
    }

    fn put(&self, index: &mut PublishedIndex, secret: &str, app: Option<PublishedApp>) -> Option<PublishedApp> {
        self.quotas.record_document(secret, app.as_ref().map(|app| (app.namespace.as_str(), app.size)));
        index.put(secret, app)
    }

    /// Returns whether the document in this Secret can have the host. If the host is free and `can_take_free_host` is
    /// set, reserves the host for this document. If several documents have the host, it belongs to the first of them in
    /// the order of the Secrets' names. The servers decide in the same way.
    pub(crate) fn claim_pages_host(&self, host: &HostName, secret: &str, can_take_free_host: bool) -> bool {
        let mut index = self.lock();
        if let Some(holder) = index.pages_hosts.get(host).first() {
            return holder == secret;
        }
        match index.reserved_hosts.get(host) {
            Some(reserved_for) => reserved_for == secret,
            None => {
                if can_take_free_host {
                    index.reserved_hosts.insert(host.clone(), secret.to_owned());
                }
                can_take_free_host
            }
        }
    }

    /// Ends the reservations for the document in this Secret.
    pub(crate) fn release_pages_host(&self, secret: &str) {
        self.lock().reserved_hosts.retain(|_, reserved_for| reserved_for.as_str() != secret);
    }

    /// Returns the names of all known Secrets.
    pub(super) fn secrets(&self) -> Vec<String> {
        self.lock().apps.keys().cloned().collect()
    }

    /// Returns the names of the Secrets that are published for an App.
    pub(crate) fn of_app(&self, namespace: &str, name: &str) -> Vec<String> {
        self.lock().secrets.get(&NamespacedName::new(namespace, name))
    }
}

impl PublishedIndex {
    /// Replaces the entry of a Secret and returns the previous entry.
    fn put(&mut self, secret: &str, app: Option<PublishedApp>) -> Option<PublishedApp> {
        let reference = |app: &PublishedApp| (NamespacedName::new(&app.namespace, &app.name), secret.to_owned());
        let host = |app: &PublishedApp| Some((app.pages_host.clone()?, secret.to_owned()));
        let (now, host_now) = (app.iter().map(reference).collect(), app.iter().filter_map(host).collect());
        let before = match app {
            Some(app) => self.apps.insert(secret.to_owned(), app),
            None => self.apps.remove(secret),
        };
        self.secrets.reindex(&before.iter().map(reference).collect(), &now);
        self.pages_hosts.reindex(&before.iter().filter_map(host).collect(), &host_now);
        before
    }
}

// === impl PublishedApp ===

impl PublishedApp {
    /// Returns a description of the document in a rendered Secret. Returns `None` if the Secret has no resourceVersion
    /// or no uid, because such a Secret does not come from the API server.
    pub(crate) fn from_secret(secret: &Secret) -> Option<Self> {
        let annotation = |name: &str| secret.annotations().get(name).cloned().unwrap_or_default();
        let document = secret.data.as_ref().and_then(|data| data.get(RENDERED_APP_KEY));
        Some(Self {
            revision: document.map(|document| Revision::of(&document.0)),
            size: document.map(|document| DocumentSize::of(&document.0)).unwrap_or_default(),
            namespace: annotation(NAMESPACE_ANNOTATION),
            name: annotation(NAME_ANNOTATION),
            pages_host: annotation(PAGES_HOST_ANNOTATION).parse().ok(),
            resource_version: secret.resource_version()?,
            uid: secret.uid()?,
        })
    }
}
