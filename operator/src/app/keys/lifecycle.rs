//! The life cycle of an App's keys: Published, Active, Retired, dropped. Pure except for the generation of keys.
//!
//! Every step depends only on the stored keys, what the App asks for, the time, and whether every serving pod serves
//! exactly those keys. Nothing else is remembered, so a step that was lost is repeated.

use std::{collections::BTreeMap, fmt::Write as _};

use aws_lc_rs::digest;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use latchkey_crds::{
    app::KeyStatus,
    names::{NEW_KEYS_ANNOTATION, REVOKE_KEY_ANNOTATION, ROTATE_KEYS_ANNOTATION},
    rendered::{KeyState, SigningAlgorithm},
    types::AppId,
};
use time::{Duration, OffsetDateTime};

use super::document::{
    KeyDocument, KeyGenerationError, KeyLifecycle, LastNumbers, StoredHmacKey, StoredSigningKey, generate_hmac_key,
    generate_signing_key, key_number, new_incarnation,
};
use crate::app::validate::ValidatedApp;

#[cfg(test)]
mod tests;

/// What an App asks for its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyPolicy {
    pub(crate) algorithm: SigningAlgorithm,
    /// Lifetime of an access token, in seconds.
    pub(crate) access_lifetime_seconds: u32,
    /// The longest lifetime of sessions and mailed codes, in seconds. A refresh token is valid while its session lives:
    /// any call uses the session and moves its idle end, but nothing moves its absolute end.
    pub(crate) session_lifetime_seconds: u32,
    pub(crate) rotation_days: u32,
    /// The value of the rotation annotation.
    pub(crate) rotate_request: Option<String>,
    /// The id of the key to revoke.
    pub(crate) revoke_id: Option<String>,
    /// The value of the new-keys annotation.
    pub(crate) new_keys_request: Option<String>,
}

/// How long a new signing key is published before it signs. Verifiers that fetch the keys once a day know it by then.
const PUBLICATION_DELAY: Duration = Duration::DAY;
/// The same if somebody asked for the rotation: the `max-age` of the JWKS (`PUBLIC` in the server's
/// `http/response.rs`), plus a minute for delivery.
const REQUESTED_PUBLICATION_DELAY: Duration = Duration::seconds(300 + 60);
/// How long a retired key is kept beyond the last expiry of anything created under it. Covers clock differences and a
/// pod that still answers although it no longer counts as serving.
const RETIREMENT_MARGIN: Duration = Duration::HOUR;
/// The maximum number of keys of one kind. A status lists 64, so a revocation always has room. A rotation waits until a
/// key expires.
const MAX_KEYS: usize = 60;
/// How many revoked ids are remembered.
const MAX_REVOKED_IDS: usize = 64;
/// The longest access token that the schema allows, in seconds.
const MAX_ACCESS_LIFETIME_SECONDS: u32 = 86_400;
/// The longest session that the schema allows, in seconds. No code lives as long.
const MAX_SESSION_LIFETIME_SECONDS: u32 = 63_072_000;
/// How far numbering skips ahead of the ids in a rendered document, which does not list keys that were dropped before.
const NUMBER_GAP: u32 = 100;

/// What differs between the two kinds of key.
struct KeyTiming {
    /// How long a key is published before it is Active, by schedule and on request.
    publication_delay: Duration,
    requested_publication_delay: Duration,
    rotation_period: Duration,
    /// The longest lifetime of anything created under such a key from now on, in seconds.
    max_lifetime_seconds: u32,
    /// The same for a key of which nothing is known.
    max_lifetime_if_unknown_seconds: u32,
}

/// A stored key of either kind.
trait StoredKey: Sized {
    const LETTER: char;

    fn id(&self) -> &str;
    fn state(&self) -> KeyState;
    fn set_state(&mut self, state: KeyState);
    fn created_at(&self) -> OffsetDateTime;
    fn lifecycle(&self) -> &KeyLifecycle;
    fn lifecycle_mut(&mut self) -> &mut KeyLifecycle;
    /// Whether it can be the Active key: it has the algorithm that the App asks for.
    fn matches_policy(&self, policy: &KeyPolicy) -> bool;
    fn timing(policy: &KeyPolicy) -> KeyTiming;
    /// A new key, Active at once.
    fn generate(number: u32, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyGenerationError>;
}

impl StoredKey for StoredSigningKey {
    const LETTER: char = 's';

    fn id(&self) -> &str {
        &self.key.id
    }

    fn state(&self) -> KeyState {
        self.key.state
    }

    fn set_state(&mut self, state: KeyState) {
        self.key.state = state;
    }

    fn created_at(&self) -> OffsetDateTime {
        self.created_at
    }

    fn lifecycle(&self) -> &KeyLifecycle {
        &self.lifecycle
    }

    fn lifecycle_mut(&mut self) -> &mut KeyLifecycle {
        &mut self.lifecycle
    }

    fn matches_policy(&self, policy: &KeyPolicy) -> bool {
        self.key.algorithm == policy.algorithm
    }

    fn timing(policy: &KeyPolicy) -> KeyTiming {
        KeyTiming {
            publication_delay: PUBLICATION_DELAY,
            requested_publication_delay: REQUESTED_PUBLICATION_DELAY,
            rotation_period: Duration::days(policy.rotation_days.into()),
            max_lifetime_seconds: policy.access_lifetime_seconds,
            max_lifetime_if_unknown_seconds: MAX_ACCESS_LIFETIME_SECONDS,
        }
    }

    fn generate(number: u32, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyGenerationError> {
        generate_signing_key(number, policy.algorithm, now)
    }
}

impl StoredKey for StoredHmacKey {
    const LETTER: char = 'h';

    fn id(&self) -> &str {
        &self.key.id
    }

    fn state(&self) -> KeyState {
        self.key.state
    }

    fn set_state(&mut self, state: KeyState) {
        self.key.state = state;
    }

    fn created_at(&self) -> OffsetDateTime {
        self.created_at
    }

    fn lifecycle(&self) -> &KeyLifecycle {
        &self.lifecycle
    }

    fn lifecycle_mut(&mut self) -> &mut KeyLifecycle {
        &mut self.lifecycle
    }

    fn matches_policy(&self, _: &KeyPolicy) -> bool {
        true
    }

    fn timing(policy: &KeyPolicy) -> KeyTiming {
        KeyTiming {
            // Only servers read what is created under it, so it is enough that they know the key.
            publication_delay: Duration::ZERO,
            requested_publication_delay: Duration::ZERO,
            rotation_period: Duration::days(policy.rotation_days.into()),
            max_lifetime_seconds: policy.session_lifetime_seconds,
            max_lifetime_if_unknown_seconds: MAX_SESSION_LIFETIME_SECONDS,
        }
    }

    fn generate(number: u32, _: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyGenerationError> {
        generate_hmac_key(number, now)
    }
}

// === impl KeyPolicy ===

impl KeyPolicy {
    pub(crate) fn for_app(app: &ValidatedApp, annotations: &BTreeMap<String, String>) -> Self {
        let sessions = app.tokens.session_lifetime_seconds;
        let codes = app.mail.confirm_code_lifetime_seconds.max(app.mail.reset_code_lifetime_seconds);
        Self {
            algorithm: app.signing_algorithm(),
            access_lifetime_seconds: app.tokens.access_lifetime_seconds,
            session_lifetime_seconds: sessions.max(codes),
            rotation_days: app.key_rotation_days,
            rotate_request: annotations.get(ROTATE_KEYS_ANNOTATION).map(|value| digest_if_long(value)),
            revoke_id: annotations.get(REVOKE_KEY_ANNOTATION).filter(|id| !id.is_empty()).cloned(),
            new_keys_request: annotations.get(NEW_KEYS_ANNOTATION).map(|value| digest_if_long(value)),
        }
    }
}

/// An annotation's value as it is stored: itself, or its SHA-256 if it is long.
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

// === impl KeyTiming ===

impl KeyTiming {
    /// How long this key is published before it is Active.
    fn publication_delay(&self, life: &KeyLifecycle) -> Duration {
        if life.asked { self.requested_publication_delay } else { self.publication_delay }
    }

    /// The longest lifetime of anything created under this key.
    fn max_lifetime(&self, life: &KeyLifecycle) -> Duration {
        Duration::seconds(life.longest_seconds.unwrap_or(self.max_lifetime_if_unknown_seconds).into())
    }

    /// When the key after this Active one must be published, so that it takes over when its rotation period ends.
    fn next_key_due(&self, active: &impl StoredKey) -> OffsetDateTime {
        saturating_add(active_since(active), self.rotation_period - self.publication_delay)
    }
}

/// Since when a key is Active.
fn active_since(active: &impl StoredKey) -> OffsetDateTime {
    active.lifecycle().activated_at.unwrap_or(active.created_at())
}

/// `time` plus `by`, or the last representable time.
fn saturating_add(time: OffsetDateTime, by: Duration) -> OffsetDateTime {
    time.checked_add(by).unwrap_or(time::PrimitiveDateTime::MAX.assume_utc())
}

/// Times are stored in whole seconds.
fn truncate_to_seconds(now: OffsetDateTime) -> OffsetDateTime {
    now.replace_nanosecond(0).unwrap_or(now)
}

// === impl KeyDocument ===

impl KeyDocument {
    /// The first keys of an App in a cluster. They count what the annotations ask for as done.
    pub(crate) fn first_with_policy(
        app_id: &AppId,
        policy: &KeyPolicy,
        now: OffsetDateTime,
    ) -> Result<Self, KeyGenerationError> {
        Self::generate_with_policy(app_id, policy, LastNumbers::default(), truncate_to_seconds(now))
    }

    /// One Active key of each kind, with numbers after `last`.
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

    /// Completes keys that were read from a rendered document. What the annotations ask for was asked of the lost keys,
    /// so it counts as done. Numbers continue after a gap.
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

    /// The next state of the keys, with everything that is due now, or `None` if nothing changes. `acknowledged`: there
    /// are serving pods, and all of them report the revision that contains exactly these keys.
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
        let signing = advance_states(&mut next.signing, &mut last.signing, policy, revoked, now, acknowledged)?;
        let hmac = advance_states(&mut next.hmac, &mut last.hmac, policy, revoked, now, acknowledged)?;

        // Both kinds or none, so that each value is handled once.
        let asked = next.is_rotation_requested(policy) && next.has_room();
        if asked {
            next.rotation.clone_from(&policy.rotate_request);
        }
        publish_next_key(&mut next.signing, &mut last.signing, policy, signing || asked, now)?;
        publish_next_key(&mut next.hmac, &mut last.hmac, policy, hmac || asked, now)?;
        if next == *self {
            return Ok(None);
        }
        next.last = last;
        Ok(Some(next))
    }

    /// When the next step can be due only because time passes. `None`: never. Call it on keys for which nothing is due
    /// now.
    pub(crate) fn next_due(&self, policy: &KeyPolicy, now: OffsetDateTime) -> Option<OffsetDateTime> {
        due_times(&self.signing, policy).chain(due_times(&self.hmac, policy)).filter(|time| *time > now).min()
    }

    /// The status of the signing keys and of the HMAC keys, which secure codes and refresh tokens.
    pub(crate) fn status(&self, policy: &KeyPolicy) -> (Vec<KeyStatus>, Vec<KeyStatus>) {
        (key_statuses(&self.signing, policy), key_statuses(&self.hmac, policy))
    }

    /// Why a request by annotation cannot be fulfilled, as a message that says what to do.
    pub(crate) fn request_problem(&self, policy: &KeyPolicy) -> Option<String> {
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

    fn has_room(&self) -> bool {
        has_room(&self.signing) && has_room(&self.hmac)
    }

    /// Records the key that the App wants revoked.
    fn record_revocation(&mut self, policy: &KeyPolicy) {
        let Some(id) = &policy.revoke_id else { return };
        let is_there =
            self.signing.iter().any(|kept| kept.key.id == *id) || self.hmac.iter().any(|kept| kept.key.id == *id);
        if is_there && !self.revoked.contains(id) {
            self.revoked.push(id.clone());
            let over = self.revoked.len().saturating_sub(MAX_REVOKED_IDS);
            self.revoked.drain(..over);
        }
    }

    /// Replaces all keys. Nobody may know which ids were assigned before, so the numbers continue at the minutes since
    /// 1970, above those of keys generated once a minute: otherwise a refresh token with an id newer than any known
    /// would be answered 503 forever, although its user must log in again. `handover`, by which servers replace the
    /// previous incarnation, continues in the same way.
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

/// The number after the last. It skips one that the App names as revoked: that name meant another key.
fn next_number<K: StoredKey>(last: u32, policy: &KeyPolicy) -> Result<u32, KeyGenerationError> {
    let next = last.checked_add(1).ok_or(KeyGenerationError)?;
    match &policy.revoke_id {
        Some(id) if key_number(id, K::LETTER) == Some(next) => next.checked_add(1).ok_or(KeyGenerationError),
        Some(_) | None => Ok(next),
    }
}

/// Adds one key, Active.
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

fn position<K: StoredKey>(keys: &[K], state: KeyState) -> Option<usize> {
    keys.iter().rposition(|key| key.state() == state)
}

fn has_room<K: StoredKey>(keys: &[K]) -> bool {
    keys.len() < MAX_KEYS || position(keys, KeyState::Published).is_some()
}

/// Drops, retires and activates keys as due. Returns whether a requested key was dropped before it became Active.
fn advance_states<K: StoredKey>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    revoked: &[String],
    now: OffsetDateTime,
    acknowledged: bool,
) -> Result<bool, KeyGenerationError> {
    let terms = K::timing(policy);
    extend_lifetimes(keys, terms.max_lifetime_seconds);
    if acknowledged {
        record_acknowledgement(keys, &terms, now);
    }

    // Tokens under a revoked key are rejected, but a session that was opened under it can continue and have tokens
    // under later keys.
    let mut sessions_end = now;
    let mut asked = false;
    keys.retain(|key| {
        let life = key.lifecycle();
        if revoked.iter().any(|id| id == key.id()) {
            match key.state() {
                KeyState::Published => asked |= life.asked,
                KeyState::Active => sessions_end = sessions_end.max(saturating_add(now, terms.max_lifetime(life))),
                KeyState::Retired => {
                    let end = life.not_after.unwrap_or(saturating_add(now, terms.max_lifetime(life)));
                    sessions_end = sessions_end.max(end);
                }
            }
            return false;
        }
        match key.state() {
            // Nothing was ever created under it.
            KeyState::Published if !key.matches_policy(policy) => {
                asked |= life.asked;
                false
            }
            KeyState::Published | KeyState::Active => true,
            KeyState::Retired => !(acknowledged && life.not_after.is_some_and(|end| end <= now)),
        }
    });

    let published = position(keys, KeyState::Published);
    match (position(keys, KeyState::Active), published) {
        (Some(active), Some(published)) => {
            let life = keys[published].lifecycle();
            let ready =
                life.published_at.is_some_and(|since| saturating_add(since, terms.publication_delay(life)) <= now);
            if acknowledged && ready {
                keys[active].set_state(KeyState::Retired);
                keys[active].lifecycle_mut().retired_at = Some(now);
                activate(&mut keys[published], &terms, now);
            }
        }
        (Some(_), None) => {}
        // Without an Active key nobody can log in, so nothing is waited for.
        (None, Some(published)) => {
            activate(&mut keys[published], &terms, now);
            asked = false;
        }
        (None, None) => {
            add_key(keys, last, policy, now)?;
            asked = false;
        }
    }
    let rest = u32::try_from((sessions_end - now).whole_seconds()).unwrap_or(terms.max_lifetime_if_unknown_seconds);
    extend_lifetimes(keys, rest);
    Ok(asked)
}

/// Raises the longest lifetime of keys whose end is not known yet to `seconds`.
fn extend_lifetimes<K: StoredKey>(keys: &mut [K], seconds: u32) {
    for key in keys {
        let makes = match key.state() {
            KeyState::Published => false,
            KeyState::Active => true,
            KeyState::Retired => key.lifecycle().not_after.is_none(),
        };
        if makes && let Some(longest) = &mut key.lifecycle_mut().longest_seconds {
            *longest = seconds.max(*longest);
        }
    }
}

/// Every serving pod knows these keys: from now on nothing is created under the retired ones.
fn record_acknowledgement<K: StoredKey>(keys: &mut [K], terms: &KeyTiming, now: OffsetDateTime) {
    // A session that was opened under a key can get a token under each later key.
    let mut before = now;
    for key in keys {
        let longest = terms.max_lifetime(key.lifecycle());
        let state = key.state();
        let life = key.lifecycle_mut();
        match state {
            KeyState::Published => _ = life.published_at.get_or_insert(now),
            KeyState::Active => {}
            KeyState::Retired => {
                let end = saturating_add(now, longest + RETIREMENT_MARGIN).max(before);
                before = before.max(*life.not_after.get_or_insert(end));
            }
        }
    }
}

fn activate(key: &mut impl StoredKey, terms: &KeyTiming, now: OffsetDateTime) {
    key.set_state(KeyState::Active);
    let life = key.lifecycle_mut();
    life.activated_at = Some(now);
    life.longest_seconds = Some(terms.max_lifetime_seconds);
}

/// Publishes the next key if one is due and none is published yet.
fn publish_next_key<K: StoredKey>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    asked: bool,
    now: OffsetDateTime,
) -> Result<(), KeyGenerationError> {
    if let Some(published) = position(keys, KeyState::Published) {
        keys[published].lifecycle_mut().asked |= asked;
        return Ok(());
    }
    let Some(active) = position(keys, KeyState::Active) else { return Ok(()) };
    let active = &keys[active];
    let due = asked || !active.matches_policy(policy) || K::timing(policy).next_key_due(active) <= now;
    if due && has_room(keys) {
        let new = add_key(keys, last, policy, now)?;
        keys[new].set_state(KeyState::Published);
        *keys[new].lifecycle_mut() = KeyLifecycle { asked, ..KeyLifecycle::default() };
    }
    Ok(())
}

/// The times at which these keys have something due, if everything is acknowledged.
fn due_times<'a, K: StoredKey>(keys: &'a [K], policy: &'a KeyPolicy) -> impl Iterator<Item = OffsetDateTime> + 'a {
    let terms = K::timing(policy);
    let rotates = position(keys, KeyState::Published).is_none() && has_room(keys);
    keys.iter().filter_map(move |key| {
        let life = key.lifecycle();
        match key.state() {
            KeyState::Published => life.published_at.map(|since| saturating_add(since, terms.publication_delay(life))),
            KeyState::Active => rotates.then(|| terms.next_key_due(key)),
            KeyState::Retired => life.not_after,
        }
    })
}

fn key_statuses<K: StoredKey>(keys: &[K], policy: &KeyPolicy) -> Vec<KeyStatus> {
    let terms = K::timing(policy);
    keys.iter()
        .map(|key| {
            let end = match key.state() {
                KeyState::Published => None,
                KeyState::Active => Some(saturating_add(active_since(key), terms.rotation_period)),
                KeyState::Retired => key.lifecycle().not_after,
            };
            let not_after = end.and_then(|end| Timestamp::from_second(end.unix_timestamp()).ok()).map(Time);
            KeyStatus { id: key.id().to_owned(), state: key.state(), not_after }
        })
        .collect()
}
