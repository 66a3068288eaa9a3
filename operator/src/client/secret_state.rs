//! The Secret that the operator creates for a Client: its contents, their repair, and the rotation of the client
//! secret. Pure: the Secret contains the whole state, so a step that was not stored is repeated.

use std::collections::BTreeMap;

use aws_lc_rs::{
    digest,
    rand::{SecureRandom, SystemRandom},
};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use latchkey_crds::{
    names::{
        CLIENT_SECRET_ID_KEY, CLIENT_SECRET_ISSUER_KEY, CLIENT_SECRET_VALUE_KEY, HANDLED_ROTATION_ANNOTATION,
        PREVIOUS_SECRET_ANNOTATION, PREVIOUS_SECRET_END_ANNOTATION,
    },
    rendered::{PreviousSecret, SecretString},
    types::ClientId,
};
use time::{Duration, OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    app::keys::{KeyGenerationError, policy::digest_if_long},
    facts::{SecretBytes, SecretValues},
};

/// The prefix of a generated client secret, by which secret scanners recognize it.
const SECRET_PREFIX: &str = "lks_";
/// The random part of a generated client secret, in bytes.
const SECRET_LENGTH: usize = 32;
/// The minimum length of a client secret, in characters.
const MIN_SECRET_LENGTH: usize = 16;
/// The maximum length of a client secret, in characters.
const MAX_SECRET_LENGTH: usize = 512;

/// The SHA-256 of a client secret.
pub(crate) type SecretHash = [u8; 32];

/// The contents of a Client's Secret.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SecretContents {
    pub(crate) values: SecretValues,
    /// The annotations of the Secret: all of them, or only those of Latchkey.
    pub(crate) annotations: BTreeMap<String, String>,
}

/// What a Client requires of its Secret.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DesiredSecret<'a> {
    pub(crate) issuer: &'a str,
    pub(crate) client_id: &'a ClientId,
    /// The value of the Client's annotation `latchkey.dev/rotate-secret`.
    pub(crate) rotate_request: Option<&'a str>,
    /// The number of seconds after a rotation in which the previous secret also works.
    pub(crate) overlap_seconds: u32,
}

/// The SHA-256 of each client secret that works now, in base64. When the previous secret expires, the document must be
/// rendered again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SecretHashes {
    pub(crate) current: String,
    pub(crate) previous: Option<PreviousSecret>,
}

/// The next state of a Client's Secret.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SecretState {
    /// The contents to store, or `None` if the stored contents are right. `hashes` is valid only after these contents
    /// are stored.
    pub(crate) write: Option<SecretContents>,
    pub(crate) hashes: SecretHashes,
}

/// Computes the next state of a Client's Secret. `stored` is `None` if the Secret does not exist. `new_secret` returns
/// a new client secret; it is called at most once. A missing or invalid client secret is replaced, and the previous
/// value no longer works. If the Client already has the rotation annotation when its Secret is created, the
/// annotation counts as handled.
pub(crate) fn advance(
    stored: Option<&SecretContents>,
    desired: &DesiredSecret<'_>,
    now: OffsetDateTime,
    new_secret: impl FnOnce() -> Result<SecretString, KeyGenerationError>,
) -> Result<SecretState, KeyGenerationError> {
    // Times are stored in whole seconds.
    let now = now.replace_nanosecond(0).unwrap_or(now);
    let request = desired.rotate_request.map(digest_if_long);
    let mut next = stored.cloned().unwrap_or_default();
    let before = next.values.get(CLIENT_SECRET_VALUE_KEY).and_then(|value| parse_secret(value).ok());
    let is_rotation_requested =
        request.is_some() && request.as_ref() != next.annotations.get(HANDLED_ROTATION_ANNOTATION);
    let current = match before {
        Some(before) if !is_rotation_requested => before,
        before => {
            let secret = new_secret()?;
            next.values.insert(CLIENT_SECRET_VALUE_KEY.to_owned(), SecretBytes(secret.expose().as_bytes().to_vec()));
            next.set_previous(before.as_ref(), now, desired.overlap_seconds);
            if let Some(request) = request {
                next.annotations.insert(HANDLED_ROTATION_ANNOTATION.to_owned(), request);
            }
            secret
        }
    };
    next.repair(CLIENT_SECRET_ISSUER_KEY, desired.issuer);
    next.repair(CLIENT_SECRET_ID_KEY, desired.client_id.as_str());
    Ok(SecretState {
        hashes: SecretHashes { current: sha256(&current), previous: next.previous(now) },
        write: (stored != Some(&next)).then_some(next),
    })
}

/// Generates a client secret with 256 random bits.
pub(crate) fn generate_secret() -> Result<SecretString, KeyGenerationError> {
    let mut random = [0; SECRET_LENGTH];
    SystemRandom::new().fill(&mut random)?;
    Ok(SecretString::new(format!("{SECRET_PREFIX}{}", URL_SAFE_NO_PAD.encode(random))))
}

/// Returns the client secret from a value of a Secret, without line breaks at its end, or what is wrong with the value.
pub(crate) fn parse_secret(value: &SecretBytes) -> Result<SecretString, &'static str> {
    let text = value.to_trimmed_utf8().ok_or("is not text")?;
    let length = text.expose().len();
    if !text.expose().bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return Err("has characters other than printable ASCII");
    }
    if !(MIN_SECRET_LENGTH..=MAX_SECRET_LENGTH).contains(&length) {
        return Err("must have 16 to 512 characters");
    }
    Ok(text)
}

/// Returns the SHA-256 of a client secret, in base64.
pub(crate) fn sha256(secret: &SecretString) -> String {
    STANDARD.encode(digest::digest(&digest::SHA256, secret.expose().as_bytes()))
}

/// Returns the hash of the previous client secret from the annotations of a Secret, and when this client secret
/// expires. Returns `None` if there is none, or if an annotation is invalid.
pub(crate) fn parse_previous(annotations: &BTreeMap<String, String>) -> Option<(SecretHash, OffsetDateTime)> {
    let sha256 = STANDARD.decode(annotations.get(PREVIOUS_SECRET_ANNOTATION)?).ok()?.try_into().ok()?;
    let end = OffsetDateTime::parse(annotations.get(PREVIOUS_SECRET_END_ANNOTATION)?, &Rfc3339).ok()?;
    Some((sha256, end))
}

// === impl SecretState ===

impl SecretState {
    /// Returns when the previous client secret expires, or `None` if no previous client secret works now.
    pub(crate) fn end_of_previous(&self) -> Option<OffsetDateTime> {
        OffsetDateTime::from_unix_timestamp(self.hashes.previous.as_ref()?.expires_at?).ok()
    }
}

// === impl SecretContents ===

impl SecretContents {
    /// Sets the value of a key, if the stored value is missing or different.
    fn repair(&mut self, key: &str, value: &str) {
        if self.values.get(key).is_none_or(|stored| stored.0 != value.as_bytes()) {
            self.values.insert(key.to_owned(), SecretBytes(value.as_bytes().to_vec()));
        }
    }

    /// Stores the hash of the previous client secret, and the time at which it expires. Only one previous client secret
    /// works at a time.
    fn set_previous(&mut self, previous: Option<&SecretString>, now: OffsetDateTime, overlap_seconds: u32) {
        self.annotations.remove(PREVIOUS_SECRET_ANNOTATION);
        self.annotations.remove(PREVIOUS_SECRET_END_ANNOTATION);
        let end = (now + Duration::seconds(overlap_seconds.into())).format(&Rfc3339);
        if let (Some(previous), Ok(end), 1..) = (previous, end, overlap_seconds) {
            self.annotations.insert(PREVIOUS_SECRET_ANNOTATION.to_owned(), sha256(previous));
            self.annotations.insert(PREVIOUS_SECRET_END_ANNOTATION.to_owned(), end);
        }
    }

    /// Returns the previous secret, if it still works.
    fn previous(&self, now: OffsetDateTime) -> Option<PreviousSecret> {
        let (sha256, end) = parse_previous(&self.annotations).filter(|(_, end)| *end > now)?;
        Some(PreviousSecret { sha256: STANDARD.encode(sha256), expires_at: Some(end.unix_timestamp()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: OffsetDateTime = time::macros::datetime!(2026-11-23 12:00 UTC);
    const DAY: u32 = 86_400;

    fn client_id() -> ClientId {
        "monitoring.grafana".parse().unwrap()
    }

    /// Computes the next state. If it needs a new client secret, this is `lks_` and 16 times the text `new`.
    fn next(
        stored: Option<&SecretContents>,
        rotate_request: Option<&str>,
        overlap_seconds: u32,
        now: OffsetDateTime,
        new: &str,
    ) -> SecretState {
        let client_id = client_id();
        let issuer = "https://auth.example.com/platform";
        let desired = DesiredSecret { issuer, client_id: &client_id, rotate_request, overlap_seconds };
        advance(stored, &desired, now, || Ok(secret(new))).unwrap()
    }

    fn secret(text: &str) -> SecretString {
        SecretString::new(format!("lks_{}", text.repeat(16)))
    }

    fn value<'a>(contents: &'a SecretContents, key: &str) -> &'a str {
        std::str::from_utf8(&contents.values[key].0).unwrap()
    }

    fn created() -> SecretContents {
        next(None, None, DAY, NOW, "a").write.unwrap()
    }

    /// A stored Secret with this client secret.
    fn edited(text: &str) -> SecretContents {
        let mut contents = created();
        contents.values.insert(CLIENT_SECRET_VALUE_KEY.to_owned(), SecretBytes(text.as_bytes().to_vec()));
        contents
    }

    #[test]
    fn a_new_secret_has_issuer_client_id_and_a_random_value() {
        let state = next(None, None, DAY, NOW, "a");
        let contents = state.write.unwrap();
        assert_eq!(value(&contents, "issuer"), "https://auth.example.com/platform");
        assert_eq!(value(&contents, "client-id"), "monitoring.grafana");
        assert_eq!(value(&contents, "client-secret"), secret("a").expose());
        assert_eq!(contents.annotations, BTreeMap::new());
        assert_eq!(state.hashes, SecretHashes { current: sha256(&secret("a")), previous: None });
        let (one, other) = (generate_secret().unwrap(), generate_secret().unwrap());
        assert!(one != other && one.expose().len() == 47 && one.expose().starts_with("lks_"));
        assert!(parse_secret(&SecretBytes(one.expose().as_bytes().to_vec())).is_ok());
    }

    #[test]
    fn a_stored_secret_that_is_right_is_not_written() {
        let state = next(Some(&created()), None, DAY, NOW + Duration::days(400), "b");
        assert_eq!((state.write, state.hashes.current), (None, sha256(&secret("a"))));
    }

    #[test]
    fn issuer_and_client_id_are_repaired() {
        let mut contents = created();
        contents.values.remove("issuer");
        contents.values.insert("client-id".to_owned(), SecretBytes(b"other".to_vec()));
        contents.values.insert("more".to_owned(), SecretBytes(b"kept".to_vec()));
        let repaired = next(Some(&contents), None, DAY, NOW, "b").write.unwrap();
        assert_eq!(value(&repaired, "issuer"), "https://auth.example.com/platform");
        assert_eq!(value(&repaired, "client-id"), "monitoring.grafana");
        assert_eq!(value(&repaired, "client-secret"), secret("a").expose());
        assert_eq!(value(&repaired, "more"), "kept");
    }

    #[test]
    fn a_client_secret_that_somebody_edits_is_used_if_it_is_valid_and_otherwise_replaced() {
        let state = next(Some(&edited("my own secret, 1\n")), None, DAY, NOW, "b");
        assert_eq!((state.write, state.hashes.current), (None, sha256(&SecretString::new("my own secret, 1"))));
        for invalid in ["", "short", "a\u{7f}aaaaaaaaaaaaaaa", "éééééééééééééééé", &"a".repeat(513)] {
            let state = next(Some(&edited(invalid)), None, DAY, NOW, "b");
            assert_eq!(value(&state.write.unwrap(), "client-secret"), secret("b").expose(), "{invalid}");
            assert_eq!(state.hashes, SecretHashes { current: sha256(&secret("b")), previous: None });
        }
        let mut without = created();
        without.values.remove("client-secret");
        assert_eq!(next(Some(&without), None, DAY, NOW, "b").hashes.current, sha256(&secret("b")));
    }

    #[test]
    fn each_value_of_the_annotation_rotates_once() {
        let rotated = next(Some(&created()), Some("1"), DAY, NOW, "b").write.unwrap();
        assert_eq!(value(&rotated, "client-secret"), secret("b").expose());
        assert_eq!(next(Some(&rotated), Some("1"), DAY, NOW, "c").write, None);
        assert_eq!(next(Some(&rotated), None, DAY, NOW, "c").write, None, "the annotation was removed");
        let again = next(Some(&rotated), Some("2"), DAY, NOW, "c");
        assert_eq!(again.hashes.current, sha256(&secret("c")));
        // If the result of a step was not stored, the repeated step has the same result.
        assert_eq!(next(Some(&rotated), Some("2"), DAY, NOW, "c"), again);
    }

    #[test]
    fn a_rotation_request_that_is_older_than_the_secret_counts_as_fulfilled() {
        let contents = next(None, Some("1"), DAY, NOW, "a").write.unwrap();
        assert_eq!(next(Some(&contents), Some("1"), DAY, NOW, "b").write, None);
        let long = "x".repeat(1000);
        let contents = next(None, Some(&long), DAY, NOW, "a").write.unwrap();
        assert!(contents.annotations[HANDLED_ROTATION_ANNOTATION].len() < 100);
        assert_eq!(next(Some(&contents), Some(&long), DAY, NOW, "b").write, None);
    }

    #[test]
    fn both_secrets_work_until_the_end_of_the_overlap() {
        let state = next(Some(&created()), Some("1"), 60, NOW, "b");
        let end = NOW + Duration::seconds(60);
        let previous = PreviousSecret { sha256: sha256(&secret("a")), expires_at: Some(end.unix_timestamp()) };
        assert_eq!(state.hashes, SecretHashes { current: sha256(&secret("b")), previous: Some(previous.clone()) });
        let stored = state.write.unwrap();
        let during = next(Some(&stored), Some("1"), 60, end - Duration::SECOND, "c");
        assert_eq!((during.write, during.hashes.previous), (None, Some(previous)));
        let after = next(Some(&stored), Some("1"), 60, end, "c");
        assert_eq!((after.write, after.hashes.previous), (None, None), "nothing is written");
    }

    #[test]
    fn the_previous_secret_ends_immediately_without_an_overlap() {
        let state = next(Some(&created()), Some("1"), 0, NOW, "b");
        assert_eq!(state.hashes.previous, None);
        assert!(!state.write.unwrap().annotations.contains_key(PREVIOUS_SECRET_ANNOTATION));
    }

    #[test]
    fn a_second_rotation_ends_the_first_secret() {
        let first = next(Some(&created()), Some("1"), DAY, NOW, "b").write.unwrap();
        let second = next(Some(&first), Some("2"), DAY, NOW, "c");
        assert_eq!(second.hashes.previous.unwrap().sha256, sha256(&secret("b")));
    }

    #[test]
    fn only_a_new_value_works_after_the_secret_is_deleted() {
        let state = next(None, Some("1"), DAY, NOW, "b");
        assert_eq!(state.hashes, SecretHashes { current: sha256(&secret("b")), previous: None });
    }

    #[test]
    fn broken_annotations_are_ignored() {
        for (sha256, end) in [("x", "2027-01-01T00:00:00Z"), (&*sha256(&secret("a")), "tomorrow")] {
            let mut contents = created();
            contents.annotations.insert(PREVIOUS_SECRET_ANNOTATION.to_owned(), sha256.to_owned());
            contents.annotations.insert(PREVIOUS_SECRET_END_ANNOTATION.to_owned(), end.to_owned());
            assert_eq!(next(Some(&contents), None, DAY, NOW, "b").hashes.previous, None);
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let state = next(None, None, DAY, NOW, "a");
        assert!(!format!("{state:?}").contains(secret("a").expose()));
    }
}
