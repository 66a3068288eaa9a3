//! The size of a rendered document.

use latchkey_crds::rendered::{RenderedClient, RenderedKeys};
use serde::Deserialize;

/// The size of a rendered document, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DocumentSize {
    /// The bytes of everything except the clients.
    pub(super) without_clients: u64,
    /// The bytes of the keys. Rotations make the keys grow, even if nobody edits the App.
    pub(super) keys: u64,
    /// The bytes of the clients. Clients have a quota of their own, which is as large as the quota of the other bytes.
    /// So clients never prevent the publication of an App.
    pub(super) clients: u64,
}

// === impl DocumentSize ===

impl DocumentSize {
    pub(crate) fn of(document: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Parts {
            keys: RenderedKeys,
            #[serde(default)]
            clients: Vec<RenderedClient>,
        }
        let length = |bytes: &[u8]| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        // The document of a deleted App has no keys.
        let parts = serde_json::from_slice::<Parts>(document).ok();
        let keys = parts.as_ref().and_then(|parts| serde_json::to_vec(&parts.keys).ok());
        let clients = parts.map(|parts| parts.clients).filter(|clients| !clients.is_empty());
        let clients = clients.and_then(|clients| serde_json::to_vec(&clients).ok());
        let clients = clients.map_or(0, |clients| length(&clients));
        Self {
            without_clients: length(document).saturating_sub(clients),
            keys: keys.map_or(0, |keys| length(&keys)),
            clients,
        }
    }

    /// Whether the document has clients.
    pub(crate) const fn has_clients(self) -> bool {
        self.clients > 0
    }

    fn without_keys(self) -> u64 {
        self.without_clients.saturating_sub(self.keys)
    }

    /// Returns how many bytes this document needs beyond the published one. Returns 0 if only the keys grew, because
    /// the quota never delays the publication of keys. It only delays a requested rotation before new keys exist.
    pub(super) fn growth(self, published: Option<Self>) -> u64 {
        match published {
            Some(published) if self.without_keys() <= published.without_keys() => 0,
            Some(published) => self.without_clients.saturating_sub(published.without_clients),
            None => self.without_clients,
        }
    }
}
