//! The life cycle of an App's keys: Published, Active, Retired, dropped. Pure except for the generation of keys.
//!
//! Every step depends only on the stored keys, the App's key policy, the time, and whether every serving pod serves
//! exactly the stored keys. The operator stores no other state. So if the result of a step was not stored, the step is
//! repeated.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use latchkey_crds::{
    app::KeyStatus,
    names::{REVOKE_KEY_ANNOTATION, ROTATE_KEYS_ANNOTATION},
    rendered::KeyState,
    types::AppId,
};
use time::{Duration, OffsetDateTime};

use self::id_tokens::IdTokenChains;
use super::{
    document::{KeyDocument, KeyLifecycle, LastNumbers, StoredHmacKey, StoredSigningKey, key_number},
    material::{KeyGenerationError, new_incarnation},
    policy::KeyPolicy,
    stored_key::{KeyTiming, StoredKey, active_since, saturating_add},
};

mod id_tokens;
#[cfg(test)]
mod tests;

/// How long a retired key is stored after everything created with it has expired. Covers clock differences, and a pod
/// that still creates tokens although it is not a serving pod any more.
const RETIREMENT_MARGIN: Duration = Duration::HOUR;
/// The maximum number of keys of one kind, or of keys for ID tokens with one algorithm. A status can list 64 HMAC keys
/// and 192 signing keys (64 for access tokens, and 64 for ID tokens with each of two algorithms), so it always has room
/// for the new key that a revocation needs. While 60 keys of a kind are stored, a rotation waits until one of them
/// expires.
const MAX_KEYS: usize = 60;
/// How many ids of revoked keys are stored.
const MAX_REVOKED_IDS: usize = 64;
/// How many key numbers are skipped when keys are restored from a rendered document, because the document does not list
/// dropped keys.
const NUMBER_GAP: u32 = 100;

/// The statuses of the keys of an App.
pub(crate) struct KeyStatuses {
    pub(crate) signing: Vec<KeyStatus>,
    pub(crate) hmac: Vec<KeyStatus>,
}

/// Drops the fraction of a second, because times are stored in whole seconds.
fn truncate_to_seconds(now: OffsetDateTime) -> OffsetDateTime {
    now.replace_nanosecond(0).unwrap_or(now)
}

// === impl KeyDocument ===

impl KeyDocument {
    /// Generates the first keys of an App in a cluster. Annotations that the App already has count as handled requests.
    pub(crate) fn first_with_policy(
        app_id: &AppId,
        policy: &KeyPolicy,
        now: OffsetDateTime,
    ) -> Result<Self, KeyGenerationError> {
        Self::generate_with_policy(app_id, policy, LastNumbers::default(), truncate_to_seconds(now))
    }

    /// Generates one Active key of each kind, with numbers after `last`.
    fn generate_with_policy(
        app_id: &AppId,
        policy: &KeyPolicy,
        last: LastNumbers,
        now: OffsetDateTime,
    ) -> Result<Self, KeyGenerationError> {
        let numbers = LastNumbers {
            signing: next_number::<StoredSigningKey>(last.signing, policy)?,
            hmac: next_number::<StoredHmacKey>(last.hmac, policy)?,
        };
        let mut keys = Self::generate(app_id, numbers, policy.algorithm, now)?;
        keys.incarnation = Some(new_incarnation()?);
        keys.rotation.clone_from(&policy.rotate_request);
        keys.new_keys.clone_from(&policy.new_keys_request);
        for key in &mut keys.signing {
            key.lifecycle.longest_seconds = Some(policy.access_lifetime_seconds);
        }
        for key in &mut keys.hmac {
            key.lifecycle.longest_seconds = Some(policy.session_lifetime_seconds);
        }
        Ok(keys)
    }

    /// Completes keys that were read from a rendered document. Annotations that the App already has count as handled
    /// requests, because they were about the lost keys. The numbers of new keys continue after a gap ([`NUMBER_GAP`]).
    pub(crate) fn restored(mut self, policy: &KeyPolicy) -> Self {
        let last = self.last_numbers();
        self.last = LastNumbers {
            signing: last.signing.saturating_add(NUMBER_GAP),
            hmac: last.hmac.saturating_add(NUMBER_GAP),
        };
        self.rotation.clone_from(&policy.rotate_request);
        self.new_keys.clone_from(&policy.new_keys_request);
        self
    }

    /// Makes every transition that is due now, and returns the changed keys, or `None` if nothing changes.
    /// `acknowledged` means that there are serving pods, and that all of them report the revision that contains exactly
    /// these keys.
    pub(crate) fn advance(
        &self,
        policy: &KeyPolicy,
        now: OffsetDateTime,
        acknowledged: bool,
    ) -> Result<Option<Self>, KeyGenerationError> {
        let now = truncate_to_seconds(now);
        if policy.new_keys_request.is_some() && policy.new_keys_request != self.new_keys {
            return self.replace_all(policy, now).map(Some);
        }
        let mut next = self.clone();
        next.record_revocation(policy);
        let revoked = &next.revoked;
        let mut last = self.last_numbers();
        let signing_requested =
            advance_states(&mut next.signing, &mut last.signing, policy, revoked, now, acknowledged)?;
        let hmac_requested = advance_states(&mut next.hmac, &mut last.hmac, policy, revoked, now, acknowledged)?;
        let mut chains = IdTokenChains::of(&next.id_tokens, &next.signing, policy);
        chains.advance_states(&mut last.signing, policy, revoked, now, acknowledged)?;
        next.id_tokens = chains.keys();

        // A requested rotation starts for signing keys and HMAC keys together, or for neither, so that each value of
        // the annotation is handled once.
        let requested = next.is_rotation_requested(policy) && next.has_room();
        if requested {
            next.rotation.clone_from(&policy.rotate_request);
        }
        publish_next_key(&mut next.signing, &mut last.signing, policy, signing_requested || requested, now)?;
        publish_next_key(&mut next.hmac, &mut last.hmac, policy, hmac_requested || requested, now)?;
        chains.publish_next_keys(&mut last.signing, policy, requested, now)?;
        next.id_tokens = chains.keys();
        if next == *self {
            return Ok(None);
        }
        next.last = last;
        Ok(Some(next))
    }

    /// Returns the time at which the next step becomes due if nothing else changes, or `None` if no step becomes due.
    /// Call this only if nothing is due now.
    pub(crate) fn next_due(&self, policy: &KeyPolicy, now: OffsetDateTime) -> Option<OffsetDateTime> {
        let id_tokens = IdTokenChains::of(&self.id_tokens, &self.signing, policy).due_times(policy);
        let others = due_times(&self.signing, policy).chain(due_times(&self.hmac, policy));
        others.chain(id_tokens).filter(|time| *time > now).min()
    }

    pub(crate) fn status(&self, policy: &KeyPolicy) -> KeyStatuses {
        let mut signing = key_statuses(&self.signing, policy);
        signing.extend(IdTokenChains::of(&self.id_tokens, &self.signing, policy).statuses(policy));
        KeyStatuses { signing, hmac: key_statuses(&self.hmac, policy) }
    }

    /// Returns why a request by annotation cannot be fulfilled, and what to do.
    pub(crate) fn request_error(&self, policy: &KeyPolicy) -> Option<String> {
        if let Some(id) = &policy.revoke_id
            && !self.was_assigned(id)
        {
            return Some(format!(
                "the annotation {REVOKE_KEY_ANNOTATION} names no key of this App; \
                 set it to an id of status.signingKeys or status.hmacKeys"
            ));
        }
        (self.is_rotation_requested(policy) && !self.has_room()).then(|| {
            format!(
                "the rotation requested by the annotation {ROTATE_KEYS_ANNOTATION} waits: {MAX_KEYS} keys are still needed \
                 by unexpired tokens; wait, or revoke keys"
            )
        })
    }

    /// Whether there is or was a key with this id.
    fn was_assigned(&self, id: &str) -> bool {
        let last = self.last_numbers();
        key_number(id, 's').is_some_and(|number| number <= last.signing)
            || key_number(id, 'h').is_some_and(|number| number <= last.hmac)
    }

    fn is_rotation_requested(&self, policy: &KeyPolicy) -> bool {
        policy.rotate_request.is_some() && policy.rotate_request != self.rotation
    }

    /// Whether there is room to rotate the signing keys and HMAC keys. The keys for ID tokens do not count: Clients
    /// determine how many there are, and must not block a rotation of the App.
    fn has_room(&self) -> bool {
        has_room(&self.signing) && has_room(&self.hmac)
    }

    /// Records the revocation of the key named in the annotation `revoke-key`, if this key exists.
    fn record_revocation(&mut self, policy: &KeyPolicy) {
        let Some(id) = &policy.revoke_id else { return };
        let is_there = self.signing.iter().chain(&self.id_tokens).any(|stored| stored.key.id == *id)
            || self.hmac.iter().any(|stored| stored.key.id == *id);
        if is_there && !self.revoked.contains(id) {
            self.revoked.push(id.clone());
            let over = self.revoked.len().saturating_sub(MAX_REVOKED_IDS);
            self.revoked.drain(..over);
        }
    }

    /// Replaces all keys. The numbers of lost keys may be unknown. So the numbers of the new keys begin at the number
    /// of minutes since 1970. These numbers are greater than all assigned numbers, even if a key was generated every
    /// minute. If a lost key had a greater number than the new keys, servers would assume that it is a key that they do
    /// not have yet. They would respond with 503 to its refresh tokens forever, instead of making the users log in
    /// again. `handover` is also at least the number of minutes since 1970, because servers replace the previous
    /// incarnation only if `handover` is greater.
    fn replace_all(&self, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyGenerationError> {
        let minutes = u32::try_from(now.unix_timestamp() / 60).unwrap_or_default();
        let last = self.last_numbers();
        let last = LastNumbers { signing: last.signing.max(minutes), hmac: last.hmac.max(minutes) };
        let mut keys = Self::generate_with_policy(&self.app_id, policy, last, now)?;
        keys.namespace.clone_from(&self.namespace);
        keys.handover = self.handover.saturating_add(1).max(minutes);
        keys.revoked.clone_from(&self.revoked);
        Ok(keys)
    }
}

/// Returns the number of the next key. Skips the number of the key that the annotation `revoke-key` names, because a
/// new key with this number would be revoked immediately.
fn next_number<K: StoredKey>(last: u32, policy: &KeyPolicy) -> Result<u32, KeyGenerationError> {
    let next = last.checked_add(1).ok_or(KeyGenerationError)?;
    match &policy.revoke_id {
        Some(id) if key_number(id, K::LETTER) == Some(next) => next.checked_add(1).ok_or(KeyGenerationError),
        Some(_) | None => Ok(next),
    }
}

/// Adds an Active key and returns its position.
fn add_key<K: StoredKey>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    now: OffsetDateTime,
) -> Result<usize, KeyGenerationError> {
    let number = next_number::<K>(*last, policy)?;
    let mut key = K::generate(number, policy, now)?;
    key.lifecycle_mut().longest_seconds = Some(K::timing(policy).max_lifetime_seconds);
    keys.push(key);
    *last = number;
    Ok(keys.len() - 1)
}

/// Returns the position of the newest key with this state.
fn position_of_newest<K: StoredKey>(keys: &[K], state: KeyState) -> Option<usize> {
    keys.iter().rposition(|key| key.state() == state)
}

/// Whether a rotation can go on without exceeding [`MAX_KEYS`]. If a key is Published already, a rotation adds no key.
fn has_room<K: StoredKey>(keys: &[K]) -> bool {
    keys.len() < MAX_KEYS || position_of_newest(keys, KeyState::Published).is_some()
}

/// Drops, retires or activates each key for which one of these transitions is due. Returns whether the key of a
/// requested rotation was dropped before it became Active. In this case, another key must still be published.
fn advance_states<K: StoredKey>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    revoked: &[String],
    now: OffsetDateTime,
    acknowledged: bool,
) -> Result<bool, KeyGenerationError> {
    let timing = K::timing(policy);
    extend_lifetimes(keys, timing.max_lifetime_seconds);
    if acknowledged {
        record_acknowledgement(keys, &timing, now);
    }

    // Tokens of a revoked key are rejected, but a session that was opened with the key can continue and get tokens of
    // later keys. `sessions_end` is the latest end of such sessions.
    let mut sessions_end = now;
    let mut dropped_requested_key = false;
    keys.retain(|key| {
        let lifecycle = key.lifecycle();
        if revoked.iter().any(|id| id == key.id()) {
            match key.state() {
                KeyState::Published => dropped_requested_key |= lifecycle.is_requested,
                KeyState::Active => {
                    sessions_end = sessions_end.max(saturating_add(now, timing.max_lifetime(lifecycle)))
                }
                KeyState::Retired => {
                    let end = lifecycle.not_after.unwrap_or(saturating_add(now, timing.max_lifetime(lifecycle)));
                    sessions_end = sessions_end.max(end);
                }
            }
            return false;
        }
        match key.state() {
            // Nothing was ever created with a Published key, so it can be dropped.
            KeyState::Published if !key.matches_policy(policy) => {
                dropped_requested_key |= lifecycle.is_requested;
                false
            }
            KeyState::Published | KeyState::Active => true,
            KeyState::Retired => !(acknowledged && lifecycle.not_after.is_some_and(|end| end <= now)),
        }
    });

    let published = position_of_newest(keys, KeyState::Published);
    match (position_of_newest(keys, KeyState::Active), published) {
        (Some(active), Some(published)) => {
            let lifecycle = keys[published].lifecycle();
            let delay_has_passed = lifecycle
                .published_at
                .is_some_and(|since| saturating_add(since, timing.publication_delay(lifecycle)) <= now);
            if acknowledged && delay_has_passed {
                keys[active].set_state(KeyState::Retired);
                keys[active].lifecycle_mut().retired_at = Some(now);
                activate(&mut keys[published], &timing, now);
            }
        }
        (Some(_), None) => {}
        // Without an Active key nobody can log in, so the published key becomes Active immediately.
        (None, Some(published)) => {
            activate(&mut keys[published], &timing, now);
            dropped_requested_key = false;
        }
        (None, None) => {
            add_key(keys, last, policy, now)?;
            dropped_requested_key = false;
        }
    }
    let remaining_seconds =
        u32::try_from((sessions_end - now).whole_seconds()).unwrap_or(timing.max_lifetime_if_unknown_seconds);
    extend_lifetimes(keys, remaining_seconds);
    Ok(dropped_requested_key)
}

/// Raises the recorded longest lifetime (`longest_seconds`) to at least `seconds`, for each key with which a pod may
/// still create tokens, sessions or codes.
fn extend_lifetimes<K: StoredKey>(keys: &mut [K], seconds: u32) {
    for key in keys {
        let can_create = match key.state() {
            KeyState::Published => false,
            KeyState::Active => true,
            KeyState::Retired => key.lifecycle().not_after.is_none(),
        };
        if can_create && let Some(longest) = &mut key.lifecycle_mut().longest_seconds {
            *longest = seconds.max(*longest);
        }
    }
}

/// Records that every serving pod knows these keys and their states: from now on, no pod creates anything with retired
/// keys.
fn record_acknowledgement<K: StoredKey>(keys: &mut [K], timing: &KeyTiming, now: OffsetDateTime) {
    // A session that was opened with one key can get tokens of each later key. So a key never ends before an earlier
    // key.
    let mut earlier_keys_end = now;
    for key in keys {
        let longest = timing.max_lifetime(key.lifecycle());
        let state = key.state();
        let lifecycle = key.lifecycle_mut();
        match state {
            KeyState::Published => _ = lifecycle.published_at.get_or_insert(now),
            KeyState::Active => {}
            KeyState::Retired => {
                let end = saturating_add(now, longest + RETIREMENT_MARGIN).max(earlier_keys_end);
                earlier_keys_end = earlier_keys_end.max(*lifecycle.not_after.get_or_insert(end));
            }
        }
    }
}

fn activate(key: &mut impl StoredKey, timing: &KeyTiming, now: OffsetDateTime) {
    key.set_state(KeyState::Active);
    let lifecycle = key.lifecycle_mut();
    lifecycle.activated_at = Some(now);
    lifecycle.longest_seconds = Some(timing.max_lifetime_seconds);
}

/// Publishes the next key if it is due. If a key is Published already, adds no key, but marks the Published key as
/// requested if a rotation is requested.
fn publish_next_key<K: StoredKey>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    requested: bool,
    now: OffsetDateTime,
) -> Result<(), KeyGenerationError> {
    if let Some(published) = position_of_newest(keys, KeyState::Published) {
        keys[published].lifecycle_mut().is_requested |= requested;
        return Ok(());
    }
    let Some(active) = position_of_newest(keys, KeyState::Active) else { return Ok(()) };
    let active = &keys[active];
    let due = requested || !active.matches_policy(policy) || K::timing(policy).next_key_due(active) <= now;
    if due && has_room(keys) {
        let new = add_key(keys, last, policy, now)?;
        keys[new].set_state(KeyState::Published);
        *keys[new].lifecycle_mut() = KeyLifecycle { is_requested: requested, ..KeyLifecycle::default() };
    }
    Ok(())
}

/// Returns the times at which steps become due for these keys, assuming that every serving pod has acknowledged the
/// keys.
fn due_times<'a, K: StoredKey>(keys: &'a [K], policy: &'a KeyPolicy) -> impl Iterator<Item = OffsetDateTime> + 'a {
    let timing = K::timing(policy);
    let can_rotate = position_of_newest(keys, KeyState::Published).is_none() && has_room(keys);
    keys.iter().filter_map(move |key| {
        let lifecycle = key.lifecycle();
        match key.state() {
            KeyState::Published => {
                lifecycle.published_at.map(|since| saturating_add(since, timing.publication_delay(lifecycle)))
            }
            KeyState::Active => can_rotate.then(|| timing.next_key_due(key)),
            KeyState::Retired => lifecycle.not_after,
        }
    })
}

fn key_statuses<K: StoredKey>(keys: &[K], policy: &KeyPolicy) -> Vec<KeyStatus> {
    let timing = K::timing(policy);
    keys.iter()
        .map(|key| {
            let end = match key.state() {
                KeyState::Published => None,
                KeyState::Active => Some(saturating_add(active_since(key), timing.rotation_period)),
                KeyState::Retired => key.lifecycle().not_after,
            };
            let not_after = end.and_then(|end| Timestamp::from_second(end.unix_timestamp()).ok()).map(Time);
            KeyStatus { id: key.id().to_owned(), state: key.state(), not_after }
        })
        .collect()
}
