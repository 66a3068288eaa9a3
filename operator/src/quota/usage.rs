//! Counts what each namespace uses.

use std::collections::HashMap;

use k8s_openapi::jiff::Timestamp;
use latchkey_crds::types::AppId;

use super::size::DocumentSize;
use crate::app::keys::secret::AppIdOwner;

/// A number of appIDs and a number of bytes: what a namespace uses, or what an App needs in addition to what is already
/// counted for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) apps: u32,
    pub(crate) bytes: u64,
}

/// The usage of every namespace.
#[derive(Default)]
pub(super) struct Namespaces {
    pub(super) app_ids: HashMap<AppId, CountedAppId>,
    /// The documents, by the name of the rendered Secret.
    pub(super) documents: HashMap<String, CountedDocument>,
    pub(super) usage: HashMap<String, Amount>,
    /// The bytes of the clients in the documents of a namespace.
    pub(super) client_bytes: HashMap<String, u64>,
    /// The Apps that wait for room in a quota, by namespace and name.
    pub(super) waiting: HashMap<String, HashMap<String, WaitingApp>>,
}

pub(super) struct CountedAppId {
    pub(super) owner: AppIdOwner,
    /// Whether the key Secret exists: the watch has reported it, or the operator has written it. If not, the appID is
    /// reserved for an App whose keys may be created soon.
    pub(super) is_reported: bool,
}

pub(super) struct CountedDocument {
    pub(super) namespace: String,
    /// The bytes that count towards the quota: the published size or the size that is about to be published, whichever
    /// is larger.
    pub(super) counted: u64,
    /// The bytes of the clients that count towards the quota of clients: the published size or the size that is about
    /// to be published, whichever is larger.
    pub(super) clients: u64,
    pub(super) published: Option<DocumentSize>,
}

#[derive(Clone, Copy)]
pub(super) struct WaitingApp {
    pub(super) created: Option<Timestamp>,
    pub(super) need: Amount,
}

// === impl CountedDocument ===

impl CountedDocument {
    /// Returns the entry of a published document, without a reservation.
    pub(super) fn published(namespace: &str, size: DocumentSize) -> Self {
        Self {
            namespace: namespace.to_owned(),
            counted: size.without_clients,
            clients: size.clients,
            published: Some(size),
        }
    }
}

// === impl Namespaces ===

impl Namespaces {
    pub(super) fn used(&self, namespace: &str) -> Amount {
        self.usage.get(namespace).copied().unwrap_or_default()
    }

    /// Returns the usage of the namespace. Of the document in this Secret, only the published bytes count, without a
    /// reservation.
    pub(super) fn used_without(&self, secret: &str, namespace: &str) -> Amount {
        let mut used = self.used(namespace);
        if let Some(document) = self.document(secret, namespace) {
            let published = document.published.map_or(0, |published| published.without_clients);
            used.bytes = used.bytes.saturating_sub(document.counted.saturating_sub(published));
        }
        used
    }

    /// Returns how many more bytes a document needs than the published document in this Secret.
    pub(super) fn growth(&self, secret: &str, namespace: &str, size: DocumentSize) -> u64 {
        size.growth(self.document(secret, namespace).and_then(|document| document.published))
    }

    /// Counts a document that is about to be published.
    pub(super) fn reserve(&mut self, secret: &str, namespace: &str, size: DocumentSize) {
        let published = self.document(secret, namespace).and_then(|document| document.published);
        let counted = size.without_clients.max(published.map_or(0, |published| published.without_clients));
        let clients = size.clients.max(published.map_or(0, |published| published.clients));
        self.set_document(
            secret,
            Some(CountedDocument { namespace: namespace.to_owned(), counted, clients, published }),
        );
    }

    /// Returns the bytes of the clients in all documents of the namespace except this one.
    pub(super) fn client_bytes_without(&self, secret: &str, namespace: &str) -> u64 {
        let all = self.client_bytes.get(namespace).copied().unwrap_or(0);
        all.saturating_sub(self.document(secret, namespace).map_or(0, |document| document.clients))
    }

    pub(super) fn set_app_id(&mut self, app_id: &AppId, new: Option<CountedAppId>) {
        if let Some(new) = &new {
            self.add(&new.owner.namespace, Amount { apps: 1, bytes: 0 });
        }
        let before = match new {
            Some(new) => self.app_ids.insert(app_id.clone(), new),
            None => self.app_ids.remove(app_id),
        };
        if let Some(before) = before {
            self.subtract(&before.owner.namespace, Amount { apps: 1, bytes: 0 });
        }
    }

    pub(super) fn set_document(&mut self, secret: &str, new: Option<CountedDocument>) {
        if let Some(new) = &new {
            self.add(&new.namespace, Amount { apps: 0, bytes: new.counted });
            if new.clients > 0 {
                let used = self.client_bytes.entry(new.namespace.clone()).or_default();
                *used = used.saturating_add(new.clients);
            }
        }
        let before = match new {
            Some(new) => self.documents.insert(secret.to_owned(), new),
            None => self.documents.remove(secret),
        };
        if let Some(before) = before {
            self.subtract(&before.namespace, Amount { apps: 0, bytes: before.counted });
            self.subtract_clients(&before.namespace, before.clients);
        }
    }

    /// Returns the document in this Secret, if it belongs to the namespace.
    fn document(&self, secret: &str, namespace: &str) -> Option<&CountedDocument> {
        self.documents.get(secret).filter(|document| document.namespace == namespace)
    }

    fn add(&mut self, namespace: &str, amount: Amount) {
        let used = self.usage.entry(namespace.to_owned()).or_default();
        used.apps = used.apps.saturating_add(amount.apps);
        used.bytes = used.bytes.saturating_add(amount.bytes);
    }

    fn subtract_clients(&mut self, namespace: &str, bytes: u64) {
        let Some(used) = self.client_bytes.get_mut(namespace) else { return };
        *used = used.saturating_sub(bytes);
        if *used == 0 {
            self.client_bytes.remove(namespace);
        }
    }

    fn subtract(&mut self, namespace: &str, amount: Amount) {
        let Some(used) = self.usage.get_mut(namespace) else { return };
        used.apps = used.apps.saturating_sub(amount.apps);
        used.bytes = used.bytes.saturating_sub(amount.bytes);
        if *used == Amount::default() {
            self.usage.remove(namespace);
        }
    }
}
