//! The known states of the Secrets of Clients. Only hashes of their values are stored.

use std::collections::HashMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use latchkey_crds::{
    names::{
        CLIENT_SECRET_ID_KEY, CLIENT_SECRET_ISSUER_KEY, CLIENT_SECRET_TYPE, CLIENT_SECRET_VALUE_KEY,
        HANDLED_ROTATION_ANNOTATION,
    },
    rendered::PreviousSecret,
};
use parking_lot::Mutex;
use time::OffsetDateTime;

use super::{changes::parse_version, index::NamespacedName};
use crate::{
    app::keys::policy::digest_if_long,
    client::{
        digest::digest,
        secret_state::{SecretHash, SecretHashes, parse_previous, parse_secret, sha256},
    },
    facts::SecretBytes,
};

/// The known states of the Secrets of Clients, by namespace and name.
#[derive(Default)]
pub(crate) struct ClientSecrets(Mutex<Known>);

#[derive(Default)]
struct Known {
    secrets: HashMap<NamespacedName, KnownSecret>,
    /// The newest version that the watch has reported for any Secret.
    newest_version: u64,
}

/// A Secret with the name of a Client's Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KnownSecret {
    /// The Secret has the type of a Client's Secret. It may belong to another Client.
    OfType(Box<ClientSecretState>),
    /// The Secret has another type, according to the reconcile of a Client. The watch of Secrets of Clients does not
    /// report such Secrets. The watch of other Secrets reports their deletion, except for the types that it excludes.
    Foreign,
}

/// A Secret of the type `latchkey.dev/client`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClientSecretState {
    version: u64,
    /// A hash of the uid of the Client that is the controller of the Secret.
    owner: Option<u64>,
    /// The hash of the value of the key `client-secret`, or `None` if the value is missing or cannot be a client
    /// secret.
    value: Option<SecretHash>,
    /// The hash of the previous client secret. Most Secrets have none.
    previous: Option<Box<PreviousHash>>,
    /// A hash of the values of the keys `issuer` and `client-id`.
    identity: u64,
    /// A hash of the rotation request that the operator has fulfilled.
    rotated: Option<u64>,
}

/// The hash of the previous client secret, which was replaced by a rotation but still works until `ends`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PreviousHash {
    sha256: SecretHash,
    ends: OffsetDateTime,
}

// === impl ClientSecrets ===

impl ClientSecrets {
    pub(crate) fn get(&self, name: &NamespacedName) -> Option<KnownSecret> {
        self.0.lock().secrets.get(name).cloned()
    }

    /// Records what the watch reports, unless the operator has already read or written something newer. Returns whether
    /// the record changed.
    pub(super) fn record_watched(&self, name: &NamespacedName, state: ClientSecretState) -> bool {
        let mut known = self.0.lock();
        known.newest_version = known.newest_version.max(state.version);
        // The record is inserted again under the name of the event. So it shares one copy of the name in memory with
        // the watch, even if the operator wrote the Secret before the watch reported it.
        let (recorded, has_changed) = match known.secrets.remove(name) {
            Some(KnownSecret::OfType(old)) if old.version > state.version || old.is_same(&state) => (old, false),
            Some(_) | None => (Box::new(state), true),
        };
        known.secrets.insert(name.clone(), KnownSecret::OfType(recorded));
        has_changed
    }

    /// Records what the operator read or wrote, unless the watch has already reported something newer. Returns whether
    /// the record changed.
    pub(crate) fn record_read(&self, name: &NamespacedName, state: ClientSecretState) -> bool {
        let mut known = self.0.lock();
        let is_known_as_newer = match known.secrets.get(name) {
            Some(KnownSecret::OfType(before)) => before.version >= state.version,
            Some(KnownSecret::Foreign) => false,
            // If the watch has reported a newer version of some Secret, it may already have reported the deletion of
            // this Secret.
            None => known.newest_version > state.version,
        };
        if is_known_as_newer {
            return false;
        }
        known.secrets.insert(name.clone(), KnownSecret::OfType(Box::new(state)));
        true
    }

    /// Records that the Secret of this name does not have the type of a Client's Secret. Returns whether the record
    /// changed.
    pub(crate) fn record_foreign(&self, name: &NamespacedName) -> bool {
        self.0.lock().secrets.insert(name.clone(), KnownSecret::Foreign) != Some(KnownSecret::Foreign)
    }

    /// Drops the record of a Secret of another type, because the Secret was deleted.
    pub(super) fn forget_foreign(&self, name: &NamespacedName) {
        let mut known = self.0.lock();
        if known.secrets.get(name) == Some(&KnownSecret::Foreign) {
            known.secrets.remove(name);
        }
    }

    /// Records a deletion that the watch reports, unless the recorded Secret is newer than the deletion or has another
    /// type. `version` is the version of the deletion, if known.
    pub(super) fn record_deletion(&self, name: &NamespacedName, version: Option<u64>) {
        let mut known = self.0.lock();
        known.newest_version = known.newest_version.max(version.unwrap_or(0));
        let is_newer = match known.secrets.get(name) {
            Some(KnownSecret::OfType(stored)) => version.is_some_and(|deleted| stored.version > deleted),
            Some(KnownSecret::Foreign) => true,
            None => false,
        };
        if !is_newer {
            known.secrets.remove(name);
        }
    }
}

// === impl ClientSecretState ===

impl ClientSecretState {
    pub(crate) fn of(secret: &Secret) -> Self {
        let value = |key: &str| secret.data.as_ref().and_then(|data| data.get(key)).map(|value| value.0.as_slice());
        let annotation = |name: &str| secret.annotations().get(name).map(String::as_str);
        let owner = secret.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
        Self {
            version: secret.resource_version().as_deref().map_or(0, parse_version),
            owner: owner.filter(|owner| owner.kind == "Client").map(|owner| digest(&owner.uid)),
            value: value(CLIENT_SECRET_VALUE_KEY).and_then(hash_of_value),
            previous: parse_previous(secret.annotations())
                .map(|(sha256, ends)| Box::new(PreviousHash { sha256, ends })),
            identity: digest((value(CLIENT_SECRET_ISSUER_KEY), value(CLIENT_SECRET_ID_KEY))),
            rotated: annotation(HANDLED_ROTATION_ANNOTATION).map(digest),
        }
    }

    /// Whether a Secret belongs to the Client with this uid: it has the type, and the Client is its controller.
    pub(crate) fn belongs_to(secret: &Secret, client_uid: &str) -> bool {
        secret.type_.as_deref() == Some(CLIENT_SECRET_TYPE) && Self::of(secret).is_owned_by(client_uid)
    }

    pub(crate) fn is_owned_by(&self, client_uid: &str) -> bool {
        self.owner == Some(digest(client_uid))
    }

    /// Whether the keys `issuer` and `client-id` have these values.
    pub(crate) fn identifies(&self, issuer: &str, client_id: &str) -> bool {
        self.identity == digest((Some(issuer.as_bytes()), Some(client_id.as_bytes())))
    }

    /// Whether the operator has fulfilled this rotation request. Without a request, there is nothing to fulfil.
    pub(crate) fn has_fulfilled(&self, request: Option<&str>) -> bool {
        request.is_none_or(|request| self.rotated == Some(digest(digest_if_long(request).as_str())))
    }

    /// Returns the hashes of the client secrets that work at the time `now`, or `None` if there is no valid client
    /// secret.
    pub(crate) fn hashes_at(&self, now: OffsetDateTime) -> Option<SecretHashes> {
        let previous = self.previous.as_deref().filter(|previous| previous.ends > now).map(|previous| PreviousSecret {
            sha256: STANDARD.encode(previous.sha256),
            expires_at: Some(previous.ends.unix_timestamp()),
        });
        Some(SecretHashes { current: STANDARD.encode(self.value?), previous })
    }

    /// Returns when the previous client secret expires, or `None` if no previous client secret works at the time `now`.
    pub(crate) fn next_due(&self, now: OffsetDateTime) -> Option<OffsetDateTime> {
        self.previous.as_ref().map(|previous| previous.ends).filter(|ends| *ends > now)
    }

    /// Whether two states differ at most in their version.
    fn is_same(&self, other: &Self) -> bool {
        Self { version: other.version, ..self.clone() } == *other
    }
}

/// Returns the SHA-256 of a client secret, or `None` if the value cannot be a client secret.
fn hash_of_value(value: &[u8]) -> Option<SecretHash> {
    let secret = parse_secret(&SecretBytes(value.to_vec())).ok()?;
    STANDARD.decode(sha256(&secret)).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use latchkey_crds::{
        names::{PREVIOUS_SECRET_ANNOTATION, PREVIOUS_SECRET_END_ANNOTATION},
        rendered::SecretString,
    };
    use serde_json::json;
    use time::Duration;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn name() -> NamespacedName {
        NamespacedName::new("monitoring", "grafana-oidc")
    }

    fn secret(version: &str, value: &str) -> Secret {
        let encode = |value: &str| STANDARD.encode(value);
        serde_json::from_value(json!({
            "metadata": {
                "namespace": "monitoring", "name": "grafana-oidc", "resourceVersion": version,
                "ownerReferences": [{
                    "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client", "name": "grafana", "uid": "u-1",
                    "controller": true,
                }],
                "annotations": {
                    PREVIOUS_SECRET_ANNOTATION: encode("0123456789abcdef0123456789abcdef"),
                    PREVIOUS_SECRET_END_ANNOTATION: "1970-01-01T00:00:10Z",
                    HANDLED_ROTATION_ANNOTATION: "first",
                },
            },
            "type": CLIENT_SECRET_TYPE,
            "data": {
                "issuer": encode("https://auth.example.com/platform"),
                "client-id": encode("monitoring.grafana"),
                "client-secret": encode(value),
            },
        }))
        .unwrap()
    }

    fn state(version: &str) -> ClientSecretState {
        ClientSecretState::of(&secret(version, "a client secret of somebody"))
    }

    #[test]
    fn a_secret_is_described_without_its_values() {
        let state = state("7");
        let hashes = state.hashes_at(NOW).unwrap();
        assert_eq!(hashes.current, sha256(&SecretString::new("a client secret of somebody")));
        assert!(state.is_owned_by("u-1") && !state.is_owned_by("u-2"));
        assert!(state.identifies("https://auth.example.com/platform", "monitoring.grafana"));
        assert!(!state.identifies("https://auth.example.com/platform", "grafana"));
        assert!(
            state.has_fulfilled(None) && state.has_fulfilled(Some("first")) && !state.has_fulfilled(Some("second"))
        );
        let previous = hashes.previous.unwrap();
        assert_eq!(previous.sha256, STANDARD.encode("0123456789abcdef0123456789abcdef"));
        assert_eq!(previous.expires_at, Some(10));
        let end = NOW + Duration::seconds(10);
        assert_eq!(state.next_due(NOW), Some(end));
        assert!(state.hashes_at(end - Duration::SECOND).is_some_and(|hashes| hashes.previous.is_some()));
        let after = state.hashes_at(end).unwrap();
        assert_eq!((after.current, after.previous, state.next_due(end)), (hashes.current, None, None), "it has ended");
        assert!(!format!("{state:?}").contains("of somebody"));
    }

    #[test]
    fn only_a_secret_of_the_type_with_the_client_as_controller_belongs_to_the_client() {
        let own = secret("7", "0123456789abcdef");
        assert!(ClientSecretState::belongs_to(&own, "u-1") && !ClientSecretState::belongs_to(&own, "u-2"));
        assert!(!ClientSecretState::belongs_to(&Secret { type_: Some("Opaque".into()), ..own.clone() }, "u-1"));
        let changed = |change: fn(&mut k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference)| {
            let mut secret = own.clone();
            change(&mut secret.metadata.owner_references.as_mut().unwrap()[0]);
            secret
        };
        assert!(!ClientSecretState::belongs_to(&changed(|owner| owner.controller = None), "u-1"));
        assert!(!ClientSecretState::belongs_to(&changed(|owner| owner.kind = "App".into()), "u-1"));
        let mut without_owner = own;
        without_owner.metadata.owner_references = None;
        assert!(!ClientSecretState::belongs_to(&without_owner, "u-1"));
    }

    #[test]
    fn without_a_valid_value_no_client_secret_works() {
        for invalid in ["", "0123456789abcde", "0123456789abcdeé"] {
            assert_eq!(ClientSecretState::of(&secret("7", invalid)).hashes_at(NOW), None, "{invalid}");
        }
        let mut without_data = secret("7", "0123456789abcdef");
        without_data.data = None;
        let without_data = ClientSecretState::of(&without_data);
        assert_eq!(without_data.hashes_at(NOW), None);
        assert!(!without_data.identifies("", ""));
    }

    #[test]
    fn a_long_rotation_request_is_recognized_by_its_digest() {
        let long = "x".repeat(1000);
        let mut rotated = secret("7", "0123456789abcdef");
        rotated.annotations_mut().insert(HANDLED_ROTATION_ANNOTATION.to_owned(), digest_if_long(&long));
        assert!(ClientSecretState::of(&rotated).has_fulfilled(Some(&long)));
        assert!(!ClientSecretState::of(&rotated).has_fulfilled(Some(&format!("{long}x"))));
    }

    #[test]
    fn damaged_annotations_name_no_previous_client_secret() {
        let sha256 = STANDARD.encode([7; 32]);
        let parse = |sha256: Option<&str>, ends: Option<&str>| {
            let annotations = [(PREVIOUS_SECRET_ANNOTATION, sha256), (PREVIOUS_SECRET_END_ANNOTATION, ends)];
            let present =
                annotations.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
            parse_previous(&present.collect())
        };
        assert!(parse(Some(&sha256), Some("1970-01-01T00:00:10Z")).is_some());
        for (sha256, ends) in [
            (None, Some("1970-01-01T00:00:10Z")),
            (Some(sha256.as_str()), None),
            (Some(sha256.as_str()), Some("tomorrow")),
            (Some("AAAA"), Some("1970-01-01T00:00:10Z")),
            (Some("no base64"), Some("1970-01-01T00:00:10Z")),
        ] {
            assert_eq!(parse(sha256, ends), None, "{sha256:?} {ends:?}");
        }
    }

    #[test]
    fn of_a_written_and_a_watched_secret_the_newer_one_is_used() {
        let secrets = ClientSecrets::default();
        let version = || match secrets.get(&name()) {
            Some(KnownSecret::OfType(state)) => state.version,
            _ => 0,
        };
        assert!(secrets.record_read(&name(), state("10")));
        assert!(!secrets.record_watched(&name(), state("10")), "the operator's own write");
        assert!(!secrets.record_watched(&name(), state("9")), "the watch is late");
        let edited = ClientSecretState::of(&secret("12", "another client secret"));
        assert!(secrets.record_watched(&name(), edited));
        assert!(!secrets.record_read(&name(), state("11")), "the response of an earlier write");
        assert_eq!(version(), 12);
        secrets.record_deletion(&name(), Some(11));
        assert_eq!(version(), 12, "it was created again after the deletion");
        secrets.record_deletion(&name(), Some(13));
        assert!(!secrets.record_read(&name(), state("12")), "the response of a write before the deletion");
        assert_eq!(secrets.get(&name()), None);
        assert!(secrets.record_read(&name(), state("14")));
        secrets.record_deletion(&name(), None);
        assert_eq!(secrets.get(&name()), None, "a new list reveals the deletion");
    }

    #[test]
    fn a_record_shares_its_name_with_the_watch() {
        let (secrets, watched) = (ClientSecrets::default(), name());
        secrets.record_read(&name(), state("7"));
        assert!(!secrets.record_watched(&watched, state("7")));
        assert!(secrets.0.lock().secrets.keys().all(|stored| stored.shares_memory_with(&watched)));
    }

    #[test]
    fn a_secret_of_another_type_is_known_until_it_is_deleted() {
        let secrets = ClientSecrets::default();
        assert!(secrets.record_foreign(&name()) && !secrets.record_foreign(&name()));
        assert_eq!(secrets.get(&name()), Some(KnownSecret::Foreign));
        secrets.forget_foreign(&name());
        assert_eq!(secrets.get(&name()), None);
        secrets.record_read(&name(), state("7"));
        secrets.forget_foreign(&name());
        assert!(secrets.get(&name()).is_some());
    }
}
