//! The size of a rendered document.

use latchkey_crds::rendered::RenderedKeys;
use serde::Deserialize;

/// The size of a rendered document, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DocumentSize {
    pub(super) total: u64,
    /// The bytes of the keys, which grow by rotation although the author of the App changes nothing.
    pub(super) keys: u64,
}

// === impl DocumentSize ===

impl DocumentSize {
    pub(crate) fn of(document: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Keys {
            keys: RenderedKeys,
        }
        let length = |bytes: &[u8]| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        // The document of a deleted App has no keys.
        let keys = serde_json::from_slice::<Keys>(document).ok().and_then(|keys| serde_json::to_vec(&keys.keys).ok());
        Self { total: length(document), keys: keys.map_or(0, |keys| length(&keys)) }
    }

    fn without_keys(self) -> u64 {
        self.total.saturating_sub(self.keys)
    }

    /// Returns how many bytes this document needs beyond the published one. Returns 0 if only the keys grew, because
    /// the quota never delays a key.
    pub(super) fn growth(self, published: Option<Self>) -> u64 {
        match published {
            Some(published) if self.without_keys() <= published.without_keys() => 0,
            Some(published) => self.total.saturating_sub(published.total),
            None => self.total,
        }
    }
}
