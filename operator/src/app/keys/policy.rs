//! What the spec and the annotations of an App require of its keys.

use std::{collections::BTreeMap, fmt::Write as _};

use aws_lc_rs::digest;
use latchkey_crds::{
    names::{NEW_KEYS_ANNOTATION, REVOKE_KEY_ANNOTATION, ROTATE_KEYS_ANNOTATION},
    rendered::SigningAlgorithm,
};

use crate::app::validate::ValidatedApp;

/// What an App requires of its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyPolicy {
    pub(crate) algorithm: SigningAlgorithm,
    /// Lifetime of an access token, in seconds.
    pub(crate) access_lifetime_seconds: u32,
    /// The longest lifetime of sessions, also of browsers, and of emailed codes, in seconds. A refresh token is valid
    /// until the absolute end of its session at the latest. Nothing moves this absolute end.
    pub(crate) session_lifetime_seconds: u32,
    pub(crate) rotation_days: u32,
    /// The value of the rotation annotation.
    pub(crate) rotate_request: Option<String>,
    /// The id of the key to revoke: the value of the revocation annotation.
    pub(crate) revoke_id: Option<String>,
    /// The value of the new-keys annotation.
    pub(crate) new_keys_request: Option<String>,
}

// === impl KeyPolicy ===

impl KeyPolicy {
    pub(crate) fn for_app(app: &ValidatedApp, annotations: &BTreeMap<String, String>) -> Self {
        let sessions = app.tokens.session_lifetime_seconds;
        let codes = app.mail.longest_code_lifetime_seconds();
        let browser_sessions = app.pages.as_ref().map_or(0, |pages| pages.session.lifetime_seconds);
        Self {
            algorithm: app.signing_algorithm(),
            access_lifetime_seconds: app.tokens.access_lifetime_seconds,
            session_lifetime_seconds: sessions.max(codes).max(browser_sessions),
            rotation_days: app.key_rotation_days,
            rotate_request: annotations.get(ROTATE_KEYS_ANNOTATION).map(|value| digest_if_long(value)),
            revoke_id: annotations.get(REVOKE_KEY_ANNOTATION).filter(|id| !id.is_empty()).cloned(),
            new_keys_request: annotations.get(NEW_KEYS_ANNOTATION).map(|value| digest_if_long(value)),
        }
    }
}

/// Returns the form in which an annotation's value is stored: unchanged or, if the value is long, its SHA-256.
fn digest_if_long(value: &str) -> String {
    if value.len() <= 64 {
        return value.to_owned();
    }
    let mut text = String::from("sha256:");
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
    }
}
