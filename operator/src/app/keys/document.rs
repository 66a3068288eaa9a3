//! The signing and HMAC keys of an App, as they are stored.

use std::collections::BTreeSet;

use latchkey_crds::{
    client::IdTokenAlgorithm,
    rendered::{HmacKey, KeyState, RenderedApp, RenderedKeys, SigningAlgorithm, SigningKey},
    types::AppId,
};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::material::{KeyGenerationError, generate_hmac_secret, generate_private_key, is_hmac_secret, is_private_key};

/// All keys of an App, as they are stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeyDocument {
    #[serde(rename = "appID")]
    pub(crate) app_id: AppId,
    /// A random value that distinguishes the App from an earlier App with the same appID. It is generated together with
    /// the first keys of an App in a cluster, and again when the annotation `new-keys` replaces all keys.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) incarnation: Option<String>,
    /// The namespace for which the keys were written last. If the Secret's annotation names another namespace, the keys
    /// were handed over to that other namespace.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) namespace: Option<String>,
    /// Increases when the appID and its users are handed over to another namespace, when new keys replace all keys, and
    /// when the operator tries to release the appID. If two owners claim the appID, the owner with the greater number
    /// wins.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub(crate) handover: u32,
    pub(crate) signing: Vec<StoredSigningKey>,
    pub(crate) hmac: Vec<StoredHmacKey>,
    /// The keys that sign only ID tokens, see [`RenderedKeys::id_tokens`]. They are numbered together with the keys in
    /// `signing`.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) id_tokens: Vec<StoredSigningKey>,
    /// The highest key numbers that were assigned. Zero in documents that were stored without this field, so only
    /// [`KeyDocument::last_numbers`] is reliable.
    #[serde(default)]
    pub(crate) last: LastNumbers,
    /// The value of the annotation `rotate-keys` that was handled last. The same value requests no second rotation.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) rotation: Option<String>,
    /// The value of the annotation `new-keys` that was handled last. The same value requests no second replacement.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) new_keys: Option<String>,
    /// The ids of the keys that were revoked most recently. If a key with such an id appears again, the key is dropped.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) revoked: Vec<String>,
}

/// The highest number that was assigned to a key of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LastNumbers {
    pub(crate) signing: u32,
    pub(crate) hmac: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoredSigningKey {
    #[serde(flatten)]
    pub(crate) key: SigningKey,
    #[serde(with = "time::serde::rfc3339")]
    pub(crate) created_at: OffsetDateTime,
    #[serde(flatten)]
    pub(crate) lifecycle: KeyLifecycle,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoredHmacKey {
    #[serde(flatten)]
    pub(crate) key: HmacKey,
    #[serde(with = "time::serde::rfc3339")]
    pub(crate) created_at: OffsetDateTime,
    #[serde(flatten)]
    pub(crate) lifecycle: KeyLifecycle,
}

/// The life cycle of a key. `latchkey-operator render` sets only `activated_at` and `retired_at`: no server
/// acknowledges the keys that this command creates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct KeyLifecycle {
    /// Since when every serving pod knows the key. `None`: some pod may not know the key yet, or the key was Active
    /// from the start.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) published_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) activated_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) retired_at: Option<OffsetDateTime>,
    /// Only for an Active key for ID tokens that no Client needs: since when no Client needs it.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) unused_since: Option<OffsetDateTime>,
    /// The time by which every token and session that was created with the key has ended. `None`: some pod may still
    /// create tokens or sessions with the key.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) not_after: Option<OffsetDateTime>,
    /// The longest lifetime of anything created with the key. `None`: unknown, so the longest lifetime that the schema
    /// allows is assumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) longest_seconds: Option<u32>,
    /// An annotation requested the rotation to this key, so the key becomes Active earlier than in a scheduled
    /// rotation.
    #[serde(rename = "asked", skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_requested: bool,
}

/// Why stored keys cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidKeys {
    #[error("they belong to another App")]
    OtherApp,
    #[error("an id occurs twice or is not a letter and a number")]
    InvalidId,
    #[error("there is not exactly one Active key of each kind, or more than one for ID tokens of an algorithm")]
    NotOneActive,
    #[error("a signing key is not a private key of its algorithm in PEM")]
    InvalidSigningKey,
    #[error("an HMAC key is not 32 bytes in base64")]
    InvalidHmacKey,
}

// === impl KeyDocument ===

impl KeyDocument {
    /// Generates the first keys of an App. They are Active from the start, because nothing was created with other keys.
    pub(crate) fn first(
        app_id: &AppId,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<Self, KeyGenerationError> {
        Self::generate(app_id, LastNumbers { signing: 1, hmac: 1 }, algorithm, now)
    }

    /// Generates one Active signing key and one Active HMAC key, with these numbers.
    pub(super) fn generate(
        app_id: &AppId,
        numbers: LastNumbers,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<Self, KeyGenerationError> {
        Ok(Self {
            app_id: app_id.clone(),
            incarnation: None,
            namespace: None,
            handover: 0,
            signing: vec![generate_signing_key(numbers.signing, algorithm, now)?],
            hmac: vec![generate_hmac_key(numbers.hmac, now)?],
            id_tokens: Vec::new(),
            last: numbers,
            rotation: None,
            new_keys: None,
            revoked: Vec::new(),
        })
    }

    /// Returns the keys after the signing algorithm has changed to `algorithm`, or `None` if the Active key already has
    /// this algorithm. The new key is Active immediately, because this function is for `latchkey-operator render`: no
    /// server acknowledges the documents of this command.
    pub(crate) fn changed_to_algorithm(
        &self,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<Option<Self>, KeyGenerationError> {
        let active = self.signing.iter().find(|stored| stored.key.state == KeyState::Active);
        if active.is_some_and(|stored| stored.key.algorithm == algorithm) {
            return Ok(None);
        }
        let mut changed = self.clone();
        for stored in &mut changed.signing {
            if stored.key.state != KeyState::Retired {
                stored.key.state = KeyState::Retired;
                stored.lifecycle.retired_at = Some(now);
            }
        }
        changed.last.signing = self.last_numbers().signing + 1;
        changed.signing.push(generate_signing_key(changed.last.signing, algorithm, now)?);
        Ok(Some(changed))
    }

    /// Returns the keys after the algorithms of ID tokens have changed to `algorithms`, or `None` if no key changes.
    /// Like [`KeyDocument::changed_to_algorithm`], this function is for `latchkey-operator render`.
    pub(crate) fn changed_to_id_token_algorithms(
        &self,
        algorithms: &BTreeSet<IdTokenAlgorithm>,
        now: OffsetDateTime,
    ) -> Result<Option<Self>, KeyGenerationError> {
        let mut changed = self.clone();
        let is_active = |stored: &StoredSigningKey| stored.key.state == KeyState::Active;
        let signing = self.signing.iter().find(|stored| is_active(stored)).map(|stored| stored.key.algorithm);
        // The key that signs access tokens also signs the ID tokens that use the same algorithm, so this algorithm
        // needs no other key.
        let needs_key = |algorithm: IdTokenAlgorithm| {
            algorithms.contains(&algorithm) && signing != Some(algorithm.signing_algorithm())
        };
        for stored in &mut changed.id_tokens {
            let is_needed = IdTokenAlgorithm::of_key(stored.key.algorithm).is_some_and(needs_key);
            if !is_needed && stored.key.state != KeyState::Retired {
                stored.key.state = KeyState::Retired;
                stored.lifecycle.retired_at = Some(now);
            }
        }
        for algorithm in IdTokenAlgorithm::ALL.into_iter().filter(|algorithm| needs_key(*algorithm)) {
            let algorithm = algorithm.signing_algorithm();
            if !changed.id_tokens.iter().any(|stored| is_active(stored) && stored.key.algorithm == algorithm) {
                changed.last.signing = changed.last_numbers().signing + 1;
                changed.id_tokens.push(generate_signing_key(changed.last.signing, algorithm, now)?);
            }
        }
        Ok((changed != *self).then_some(changed))
    }

    /// Returns the keys as the servers read them.
    pub(crate) fn rendered(&self) -> RenderedKeys {
        RenderedKeys {
            signing: self.signing.iter().map(StoredSigningKey::rendered).collect(),
            hmac: self.hmac.iter().map(StoredHmacKey::rendered).collect(),
            id_tokens: self.id_tokens.iter().map(StoredSigningKey::rendered).collect(),
        }
    }

    /// Recovers lost keys from a rendered document.
    pub(crate) fn from_rendered(document: RenderedApp, now: OffsetDateTime) -> Self {
        let empty_lifecycle = KeyLifecycle::default;
        let keys = document.keys;
        let stored_signing_keys = |keys: Vec<SigningKey>| {
            let stored =
                keys.into_iter().map(|key| StoredSigningKey { key, created_at: now, lifecycle: empty_lifecycle() });
            stored.collect::<Vec<_>>()
        };
        let mut recovered = Self {
            app_id: document.app_id,
            incarnation: document.incarnation,
            namespace: Some(document.namespace),
            handover: document.handover.unwrap_or(0),
            signing: stored_signing_keys(keys.signing),
            id_tokens: stored_signing_keys(keys.id_tokens),
            hmac: keys
                .hmac
                .into_iter()
                .map(|key| StoredHmacKey { key, created_at: now, lifecycle: empty_lifecycle() })
                .collect(),
            last: LastNumbers::default(),
            rotation: None,
            new_keys: None,
            revoked: Vec::new(),
        };
        recovered.last = recovered.last_numbers();
        recovered
    }

    /// Returns a copy of these keys for an owner in this namespace, with a greater `handover` if the namespace changes.
    pub(super) fn written_for(&self, namespace: &str) -> Self {
        let mut keys = self.clone();
        let before = keys.namespace.replace(namespace.to_owned());
        if before.is_some_and(|before| before != namespace) {
            keys.handover = keys.handover.saturating_add(1);
        }
        keys
    }

    /// Returns the highest signing key number and the highest HMAC key number that are known to have been assigned.
    pub(crate) fn last_numbers(&self) -> LastNumbers {
        let signing = self.signing.iter().chain(&self.id_tokens);
        let signing = signing.filter_map(|stored| key_number(&stored.key.id, 's')).max().unwrap_or(0);
        let hmac = self.hmac.iter().filter_map(|stored| key_number(&stored.key.id, 'h')).max().unwrap_or(0);
        LastNumbers { signing: self.last.signing.max(signing), hmac: self.last.hmac.max(hmac) }
    }

    /// Checks that these keys are usable and belong to the App with this appID. The operator never overwrites stored
    /// keys that fail the check.
    pub(crate) fn validate(&self, app_id: &AppId) -> Result<(), InvalidKeys> {
        if self.app_id != *app_id {
            return Err(InvalidKeys::OtherApp);
        }
        let signing = self.signing.iter().map(|stored| (&stored.key.id, stored.key.state, 's'));
        let hmac = self.hmac.iter().map(|stored| (&stored.key.id, stored.key.state, 'h'));
        for keys in [signing.collect::<Vec<_>>(), hmac.collect()] {
            let mut numbers = Vec::new();
            for (id, _, letter) in &keys {
                let number = key_number(id, *letter).ok_or(InvalidKeys::InvalidId)?;
                if numbers.contains(&number) {
                    return Err(InvalidKeys::InvalidId);
                }
                numbers.push(number);
            }
            if keys.iter().filter(|(_, state, _)| *state == KeyState::Active).count() != 1 {
                return Err(InvalidKeys::NotOneActive);
            }
        }
        self.validate_id_tokens()?;
        let mut signing = self.signing.iter().chain(&self.id_tokens);
        if !signing.all(|stored| is_private_key(stored.key.private_key.expose(), stored.key.algorithm)) {
            return Err(InvalidKeys::InvalidSigningKey);
        }
        if !self.hmac.iter().all(|stored| is_hmac_secret(stored.key.secret.expose())) {
            return Err(InvalidKeys::InvalidHmacKey);
        }
        Ok(())
    }

    /// Checks the ids, algorithms and states of the keys for ID tokens.
    fn validate_id_tokens(&self) -> Result<(), InvalidKeys> {
        let mut ids: BTreeSet<_> = self.signing.iter().map(|stored| stored.key.id.as_str()).collect();
        let mut active = BTreeSet::new();
        for StoredSigningKey { key, .. } in &self.id_tokens {
            if key_number(&key.id, 's').is_none() || !ids.insert(&key.id) {
                return Err(InvalidKeys::InvalidId);
            }
            let algorithm = IdTokenAlgorithm::of_key(key.algorithm).ok_or(InvalidKeys::InvalidSigningKey)?;
            if key.state == KeyState::Active && !active.insert(algorithm) {
                return Err(InvalidKeys::NotOneActive);
            }
        }
        Ok(())
    }
}

impl StoredSigningKey {
    pub(crate) fn rendered(&self) -> SigningKey {
        self.key.clone()
    }
}

impl StoredHmacKey {
    pub(crate) fn rendered(&self) -> HmacKey {
        self.key.clone()
    }
}

// === impl KeyLifecycle ===

impl KeyLifecycle {
    fn active(now: OffsetDateTime) -> Self {
        Self { activated_at: Some(now), ..Self::default() }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Returns the number in an id such as `s1`, or `None` if the id does not have this form.
pub(super) fn key_number(id: &str, letter: char) -> Option<u32> {
    let digits = id.strip_prefix(letter)?;
    let number = digits.parse().ok()?;
    // Rejects "s01" and "s+1", which would be other names of the key "s1".
    (number > 0 && digits == u32::to_string(&number)).then_some(number)
}

pub(super) fn generate_signing_key(
    number: u32,
    algorithm: SigningAlgorithm,
    now: OffsetDateTime,
) -> Result<StoredSigningKey, KeyGenerationError> {
    let private_key = generate_private_key(algorithm)?;
    let key = SigningKey { id: format!("s{number}"), state: KeyState::Active, algorithm, private_key };
    Ok(StoredSigningKey { key, created_at: now, lifecycle: KeyLifecycle::active(now) })
}

pub(super) fn generate_hmac_key(number: u32, now: OffsetDateTime) -> Result<StoredHmacKey, KeyGenerationError> {
    let key = HmacKey { id: format!("h{number}"), state: KeyState::Active, secret: generate_hmac_secret()? };
    Ok(StoredHmacKey { key, created_at: now, lifecycle: KeyLifecycle::active(now) })
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::SecretString;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn shop() -> AppId {
        "shop".parse().unwrap()
    }

    fn first(algorithm: SigningAlgorithm) -> KeyDocument {
        KeyDocument::first(&shop(), algorithm, NOW).unwrap()
    }

    #[test]
    fn first_keys_are_active_and_usable_with_every_algorithm() {
        for algorithm in [SigningAlgorithm::ES256, SigningAlgorithm::EdDSA, SigningAlgorithm::RS256] {
            let keys = first(algorithm);
            assert_eq!(keys.validate(&shop()), Ok(()));
            let key = &keys.signing[0].key;
            assert_eq!((key.id.as_str(), key.state, key.algorithm), ("s1", KeyState::Active, algorithm));
            assert!(key.private_key.expose().lines().all(|line| line.len() <= 64));
            assert_eq!((keys.hmac[0].key.id.as_str(), keys.hmac[0].key.state), ("h1", KeyState::Active));
        }
    }

    #[test]
    fn generated_keys_always_differ() {
        let (one, other) = (first(SigningAlgorithm::ES256), first(SigningAlgorithm::ES256));
        assert_ne!(one.signing[0].key.private_key, other.signing[0].key.private_key);
        assert_ne!(one.hmac[0].key.secret, other.hmac[0].key.secret);
    }

    #[test]
    fn another_algorithm_adds_a_key_and_retires_the_old_one() {
        let keys = first(SigningAlgorithm::ES256);
        assert_eq!(keys.changed_to_algorithm(SigningAlgorithm::ES256, NOW), Ok(None));
        let changed = keys.changed_to_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
        assert_eq!(changed.validate(&shop()), Ok(()));
        let states =
            changed.signing.iter().map(|stored| (stored.key.id.as_str(), stored.key.state)).collect::<Vec<_>>();
        assert_eq!(states, [("s1", KeyState::Retired), ("s2", KeyState::Active)]);
        assert_eq!(changed.hmac, keys.hmac);
        // Ids are never reused, even when the algorithm changes back.
        let back = changed.changed_to_algorithm(SigningAlgorithm::ES256, NOW).unwrap().unwrap();
        assert_eq!(back.signing.last().unwrap().key.id, "s3");
        assert_eq!(back.validate(&shop()), Ok(()));
    }

    #[test]
    fn id_tokens_get_keys_only_for_algorithms_that_access_tokens_do_not_use() {
        let keys = first(SigningAlgorithm::ES256);
        let changed = |keys: &KeyDocument, algorithms: &[IdTokenAlgorithm]| {
            keys.changed_to_id_token_algorithms(&algorithms.iter().copied().collect(), NOW).unwrap()
        };
        let (rs256, es256) = (IdTokenAlgorithm::RS256, IdTokenAlgorithm::ES256);
        assert_eq!((changed(&keys, &[]), changed(&keys, &[es256])), (None, None));
        let with_rs256 = changed(&keys, &[rs256, es256]).unwrap();
        assert_eq!(with_rs256.validate(&shop()), Ok(()));
        let show = |keys: &KeyDocument| {
            let text = |stored: &StoredSigningKey| {
                format!("{} {:?} {:?}", stored.key.id, stored.key.algorithm, stored.key.state)
            };
            keys.id_tokens.iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(show(&with_rs256), ["s2 RS256 Active"]);
        assert_eq!((&with_rs256.signing, changed(&with_rs256, &[rs256])), (&keys.signing, None));
        let without = changed(&with_rs256, &[]).unwrap();
        assert_eq!(show(&without), ["s2 RS256 Retired"]);
        assert_eq!(show(&changed(&without, &[rs256]).unwrap()), ["s2 RS256 Retired", "s3 RS256 Active"]);
        // The new key gets the next number after those of all signing keys, including the keys for ID tokens.
        let eddsa = with_rs256.changed_to_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
        assert_eq!(eddsa.signing.last().unwrap().key.id, "s3");
        assert_eq!(show(&changed(&eddsa, &[rs256, es256]).unwrap()), ["s2 RS256 Active", "s4 ES256 Active"]);
        assert_eq!(eddsa.validate(&shop()), Ok(()));
    }

    #[test]
    fn keys_for_id_tokens_are_checked_like_signing_keys() {
        let keys = first(SigningAlgorithm::EdDSA);
        let algorithms = BTreeSet::from(IdTokenAlgorithm::ALL);
        let keys = keys.changed_to_id_token_algorithms(&algorithms, NOW).unwrap().unwrap();
        assert_eq!(keys.validate(&shop()), Ok(()));
        let error_after = |change: fn(&mut KeyDocument)| {
            let mut keys = keys.clone();
            change(&mut keys);
            keys.validate(&shop()).unwrap_err()
        };
        assert_eq!(error_after(|keys| keys.id_tokens[0].key.id = "s1".into()), InvalidKeys::InvalidId);
        assert_eq!(error_after(|keys| keys.id_tokens[0].key.id = "x".into()), InvalidKeys::InvalidId);
        assert_eq!(
            error_after(|keys| keys.id_tokens[0].key.private_key = SecretString::new("x")),
            InvalidKeys::InvalidSigningKey
        );
        assert_eq!(
            error_after(|keys| keys.id_tokens[0].key.algorithm = SigningAlgorithm::EdDSA),
            InvalidKeys::InvalidSigningKey
        );
        assert_eq!(
            error_after(|keys| {
                let other = StoredSigningKey {
                    key: SigningKey { id: "s9".into(), ..keys.id_tokens[0].key.clone() },
                    ..keys.id_tokens[0].clone()
                };
                keys.id_tokens.push(other);
            }),
            InvalidKeys::NotOneActive
        );
        let text = serde_json::to_string(&keys).unwrap();
        assert_eq!(serde_json::from_str::<KeyDocument>(&text).unwrap(), keys);
        assert!(!serde_json::to_string(&first(SigningAlgorithm::ES256)).unwrap().contains("idTokens"));
    }

    #[test]
    fn the_check_says_why_keys_cannot_be_used() {
        let error_after = |change: fn(&mut KeyDocument)| {
            let mut keys = first(SigningAlgorithm::ES256);
            change(&mut keys);
            keys.validate(&shop()).unwrap_err()
        };
        assert_eq!(error_after(|keys| keys.app_id = "other".parse().unwrap()), InvalidKeys::OtherApp);
        for id in ["s0", "s01", "s+1", "h1", "s", "1"] {
            let mut keys = first(SigningAlgorithm::ES256);
            keys.signing[0].key.id = id.into();
            assert_eq!(keys.validate(&shop()), Err(InvalidKeys::InvalidId), "{id}");
        }
        assert_eq!(error_after(|keys| keys.hmac.push(keys.hmac[0].clone())), InvalidKeys::InvalidId);
        assert_eq!(error_after(|keys| keys.hmac[0].key.state = KeyState::Retired), InvalidKeys::NotOneActive);
        assert_eq!(error_after(|keys| keys.signing.clear()), InvalidKeys::NotOneActive);
        assert_eq!(
            error_after(|keys| keys.signing[0].key.algorithm = SigningAlgorithm::RS256),
            InvalidKeys::InvalidSigningKey
        );
        assert_eq!(
            error_after(|keys| keys.signing[0].key.private_key = SecretString::new("x")),
            InvalidKeys::InvalidSigningKey
        );
        assert_eq!(
            error_after(|keys| keys.hmac[0].key.secret = SecretString::new("aaaa")),
            InvalidKeys::InvalidHmacKey
        );
    }

    #[test]
    fn keys_survive_serialization_and_are_not_printed() {
        let keys = first(SigningAlgorithm::ES256);
        let text = serde_json::to_string(&keys).unwrap();
        assert_eq!(serde_json::from_str::<KeyDocument>(&text).unwrap(), keys);
        let printed = format!("{keys:?}");
        assert!(!printed.contains("PRIVATE KEY") && !printed.contains(keys.hmac[0].key.secret.expose()));
    }
}
