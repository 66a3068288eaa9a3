//! What the spec and the annotations of an App require of its keys.

use std::{collections::BTreeMap, fmt::Write as _};

use aws_lc_rs::digest;
use latchkey_crds::{
    client::IdTokenAlgorithm,
    names::{NEW_KEYS_ANNOTATION, REVOKE_KEY_ANNOTATION, ROTATE_KEYS_ANNOTATION},
    rendered::SigningAlgorithm,
};

use crate::app::validate::ValidatedApp;

/// What an App requires of its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyPolicy {
    pub(crate) algorithm: SigningAlgorithm,
    /// The longest lifetime of a token that a signing key can sign, in seconds: an access token or an ID token.
    pub(crate) access_lifetime_seconds: u32,
    /// The longest lifetime of an ID token, in seconds, for each algorithm that a Client uses.
    pub(crate) id_token_lifetimes: BTreeMap<IdTokenAlgorithm, u32>,
    /// Whether every serving pod reads the keys for ID tokens. A report of a pod that does not read them proves nothing
    /// about these keys.
    pub(crate) id_token_keys_are_read: bool,
    /// The longest lifetime of a session, of a browser's session at the hosted pages, and of an emailed code, in
    /// seconds. A refresh token is valid until the absolute end of its session at the latest. Nothing moves this
    /// absolute end.
    pub(crate) session_lifetime_seconds: u32,
    pub(crate) rotation_days: u32,
    /// The value of the annotation `rotate-keys`.
    pub(crate) rotate_request: Option<String>,
    /// The id of the key to revoke: the value of the annotation `revoke-key`.
    pub(crate) revoke_id: Option<String>,
    /// The value of the annotation `new-keys`.
    pub(crate) new_keys_request: Option<String>,
}

// === impl KeyPolicy ===

impl KeyPolicy {
    pub(crate) fn for_app(app: &ValidatedApp, annotations: &BTreeMap<String, String>) -> Self {
        let sessions = app.tokens.session_lifetime_seconds;
        let codes = app.mail.longest_code_lifetime_seconds();
        let browser_sessions = app.pages.as_ref().map_or(0, |pages| pages.session.lifetime_seconds);
        let mut id_token_lifetimes = BTreeMap::new();
        for client in &app.clients {
            let longest = id_token_lifetimes.entry(client.tokens.id_token_algorithm).or_insert(0);
            *longest = client.tokens.id_token_lifetime_seconds.max(*longest);
        }
        // The maximum covers all algorithms, because signing keys of two algorithms can sign ID tokens while the App's
        // signing algorithm is being changed.
        let id_tokens = id_token_lifetimes.values().max().copied().unwrap_or(0);
        Self {
            algorithm: app.signing_algorithm(),
            access_lifetime_seconds: app.tokens.access_lifetime_seconds.max(id_tokens),
            id_token_lifetimes,
            id_token_keys_are_read: false,
            session_lifetime_seconds: sessions.max(codes).max(browser_sessions),
            rotation_days: app.key_rotation_days,
            rotate_request: annotations.get(ROTATE_KEYS_ANNOTATION).map(|value| digest_if_long(value)),
            revoke_id: annotations.get(REVOKE_KEY_ANNOTATION).filter(|id| !id.is_empty()).cloned(),
            new_keys_request: annotations.get(NEW_KEYS_ANNOTATION).map(|value| digest_if_long(value)),
        }
    }

    /// Returns the policy of the keys that sign only ID tokens with this algorithm.
    pub(super) fn for_id_tokens(&self, algorithm: IdTokenAlgorithm) -> Self {
        Self {
            algorithm: algorithm.signing_algorithm(),
            access_lifetime_seconds: self.id_token_lifetimes.get(&algorithm).copied().unwrap_or(0),
            ..self.clone()
        }
    }
}

/// The prefix of the digest of a long value.
const DIGEST_PREFIX: &str = "sha256:";

/// Returns the form in which an annotation's value is stored: unchanged or, if the value is long, its SHA-256. A value
/// that is already in the stored form stays unchanged.
pub(crate) fn digest_if_long(value: &str) -> String {
    let is_digest = |hex: &str| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if value.len() <= 64 || value.strip_prefix(DIGEST_PREFIX).is_some_and(is_digest) {
        return value.to_owned();
    }
    let mut text = String::from(DIGEST_PREFIX);
    for byte in digest::digest(&digest::SHA256, value.as_bytes()).as_ref() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_stored_as_its_digest() {
        let value = "a".repeat(65);
        assert_eq!((digest_if_long(&value).len(), digest_if_long("1")), (71, "1".to_owned()));
        assert_ne!(digest_if_long(&value), digest_if_long(&"a".repeat(66)));
        assert_eq!(digest_if_long(&digest_if_long(&value)), digest_if_long(&value));
    }
}
