//! What becomes of an App's keys with time: Published, Active, Retired, dropped. Pure but for the making of keys.
//!
//! Every step follows from the keys as they are kept, what the App asks for, the time, and whether every counting pod
//! serves those very keys. Nothing is remembered elsewhere, so a step that was lost is taken again.

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

use super::{
    KeptHmacKey, KeptSigningKey, KeyDocument, KeyNotMade, LastNumbers, Life, new_hmac_key, new_incarnation,
    new_signing_key, number,
};
use crate::app::validate::ValidatedApp;

#[cfg(test)]
mod tests;

/// What an App asks of its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyPolicy {
    pub(crate) algorithm: SigningAlgorithm,
    /// For how many seconds an access token is good.
    pub(crate) access_seconds: u32,
    /// For how many seconds the longest of sessions and mailed codes is good. A refresh token is good while its session
    /// lives: any call uses the session and so moves its idle end, but nothing moves its end.
    pub(crate) session_seconds: u32,
    pub(crate) rotation_days: u32,
    /// The value of the annotation that asks for a rotation.
    pub(crate) rotate: Option<String>,
    /// The id of a key that is to be dropped.
    pub(crate) revoke: Option<String>,
    /// The value of the annotation that asks for new keys.
    pub(crate) new_keys: Option<String>,
}

/// How long a new signing key is published before it signs: those who check tokens and ask for keys once a day know it
/// by then.
const PUBLISHED_FIRST: Duration = Duration::DAY;
/// The same where somebody asked for the rotation: the `max-age` of the keys' document (contract, 4; `PUBLIC` in the
/// server's `http/response.rs`), and a minute for the way.
const PUBLISHED_FIRST_IF_ASKED: Duration = Duration::seconds(300 + 60);
/// For what a retired key is kept beyond the last end of what was made under it: clocks that differ, and a pod that
/// counts no more but still answers.
const MARGIN: Duration = Duration::HOUR;
/// The most keys of one sort. A status lists 64, so that a revocation always has room; a rotation waits for an end.
const MOST: usize = 60;
/// How many revoked ids are remembered.
const MOST_REVOKED: usize = 64;
/// The longest access token that the schema allows.
const LONGEST_ACCESS: u32 = 86_400;
/// The longest session that the schema allows; no code lives as long.
const LONGEST_SESSION: u32 = 63_072_000;
/// How far the numbers go on from what a rendered document holds: ids that were dropped before are not in it.
const GAP: u32 = 100;

/// What differs between the two sorts of key.
struct Terms {
    /// How long a key is published before it is Active, where nobody asked for it, and where somebody did.
    wait: Duration,
    wait_if_asked: Duration,
    rotation: Duration,
    /// The longest that anything made under such a key lives from now on, in seconds.
    longest: u32,
    /// The same where nothing is known of a key.
    unknown: u32,
}

/// A key of either sort.
trait Kept: Sized {
    const LETTER: char;

    fn id(&self) -> &str;
    fn state(&self) -> KeyState;
    fn set_state(&mut self, state: KeyState);
    fn created_at(&self) -> OffsetDateTime;
    fn life(&self) -> &Life;
    fn life_mut(&mut self) -> &mut Life;
    /// Whether it may be the Active key: it is what the App asks for.
    fn fits(&self, policy: &KeyPolicy) -> bool;
    fn terms(policy: &KeyPolicy) -> Terms;
    /// A new key, Active at once.
    fn make(number: u32, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyNotMade>;
}

impl Kept for KeptSigningKey {
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

    fn life(&self) -> &Life {
        &self.life
    }

    fn life_mut(&mut self) -> &mut Life {
        &mut self.life
    }

    fn fits(&self, policy: &KeyPolicy) -> bool {
        self.key.algorithm == policy.algorithm
    }

    fn terms(policy: &KeyPolicy) -> Terms {
        Terms {
            wait: PUBLISHED_FIRST,
            wait_if_asked: PUBLISHED_FIRST_IF_ASKED,
            rotation: Duration::days(policy.rotation_days.into()),
            longest: policy.access_seconds,
            unknown: LONGEST_ACCESS,
        }
    }

    fn make(number: u32, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyNotMade> {
        new_signing_key(number, policy.algorithm, now)
    }
}

impl Kept for KeptHmacKey {
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

    fn life(&self) -> &Life {
        &self.life
    }

    fn life_mut(&mut self) -> &mut Life {
        &mut self.life
    }

    fn fits(&self, _: &KeyPolicy) -> bool {
        true
    }

    fn terms(policy: &KeyPolicy) -> Terms {
        Terms {
            // Servers alone read what is made under it, so that they know it is enough.
            wait: Duration::ZERO,
            wait_if_asked: Duration::ZERO,
            rotation: Duration::days(policy.rotation_days.into()),
            longest: policy.session_seconds,
            unknown: LONGEST_SESSION,
        }
    }

    fn make(number: u32, _: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyNotMade> {
        new_hmac_key(number, now)
    }
}

// === impl KeyPolicy ===

impl KeyPolicy {
    pub(crate) fn of(app: &ValidatedApp, annotations: &BTreeMap<String, String>) -> Self {
        let sessions = app.tokens.session_lifetime_seconds;
        let codes = app.mail.confirm_code_lifetime_seconds.max(app.mail.reset_code_lifetime_seconds);
        Self {
            algorithm: app.signing_algorithm(),
            access_seconds: app.tokens.access_lifetime_seconds,
            session_seconds: sessions.max(codes),
            rotation_days: app.key_rotation_days,
            rotate: annotations.get(ROTATE_KEYS_ANNOTATION).map(|value| short(value)),
            revoke: annotations.get(REVOKE_KEY_ANNOTATION).filter(|id| !id.is_empty()).cloned(),
            new_keys: annotations.get(NEW_KEYS_ANNOTATION).map(|value| short(value)),
        }
    }
}

/// An annotation's value as it is remembered: itself, or what stands for it where it is long.
fn short(value: &str) -> String {
    if value.len() <= 64 {
        return value.to_owned();
    }
    let mut text = String::from("sha256:");
    for octet in digest::digest(&digest::SHA256, value.as_bytes()).as_ref() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{octet:02x}");
    }
    text
}

// === impl Terms ===

impl Terms {
    /// How long this key is published before it is Active.
    fn wait(&self, life: &Life) -> Duration {
        if life.asked { self.wait_if_asked } else { self.wait }
    }

    /// For how long what is made under this key may live.
    fn longest(&self, life: &Life) -> Duration {
        Duration::seconds(life.longest_seconds.unwrap_or(self.unknown).into())
    }

    /// When the key after this Active one is to be published, so that it is replaced when its days are over.
    fn next_from(&self, active: &impl Kept) -> OffsetDateTime {
        later(since(active), self.rotation - self.wait)
    }
}

/// Since when a key is Active.
fn since(active: &impl Kept) -> OffsetDateTime {
    active.life().activated_at.unwrap_or(active.created_at())
}

/// A time so much later; the last one there is, where there is none.
fn later(time: OffsetDateTime, by: Duration) -> OffsetDateTime {
    time.checked_add(by).unwrap_or(time::PrimitiveDateTime::MAX.assume_utc())
}

/// Times are kept in whole seconds.
fn whole(now: OffsetDateTime) -> OffsetDateTime {
    now.replace_nanosecond(0).unwrap_or(now)
}

// === impl KeyDocument ===

impl KeyDocument {
    /// The first keys of an App in a cluster. What its annotations ask for was asked of keys before these.
    pub(crate) fn first_of(app_id: &AppId, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyNotMade> {
        Self::made(app_id, policy, LastNumbers::default(), whole(now))
    }

    /// One Active key of each sort, with numbers after these.
    fn made(app_id: &AppId, policy: &KeyPolicy, last: LastNumbers, now: OffsetDateTime) -> Result<Self, KeyNotMade> {
        let numbers = LastNumbers {
            signing: next_number::<KeptSigningKey>(last.signing, policy)?,
            hmac: next_number::<KeptHmacKey>(last.hmac, policy)?,
        };
        let mut keys = Self::with_keys(app_id, numbers, policy.algorithm, now)?;
        keys.incarnation = Some(new_incarnation()?);
        keys.rotation.clone_from(&policy.rotate);
        keys.new_keys.clone_from(&policy.new_keys);
        for key in &mut keys.signing {
            key.life.longest_seconds = Some(policy.access_seconds);
        }
        for key in &mut keys.hmac {
            key.life.longest_seconds = Some(policy.session_seconds);
        }
        Ok(keys)
    }

    /// These, which were read back from a rendered document, as the keys of an App with these annotations: what they ask
    /// for was asked of the keys that are lost. Numbers go on after a gap.
    pub(crate) fn rebuilt(mut self, policy: &KeyPolicy) -> Self {
        let last = self.last();
        self.last = LastNumbers { signing: last.signing.saturating_add(GAP), hmac: last.hmac.saturating_add(GAP) };
        self.rotation.clone_from(&policy.rotate);
        self.new_keys.clone_from(&policy.new_keys);
        self
    }

    /// The next state of the keys, if it differs: all that is due now. `acknowledged`: there are counting pods, and every
    /// one has told the revision that holds these keys as they are now.
    pub(crate) fn step(
        &self,
        policy: &KeyPolicy,
        now: OffsetDateTime,
        acknowledged: bool,
    ) -> Result<Option<Self>, KeyNotMade> {
        let now = whole(now);
        if policy.new_keys.is_some() && policy.new_keys != self.new_keys {
            return self.anew(policy, now).map(Some);
        }
        let mut next = self.clone();
        next.revoke(policy);
        let revoked = &next.revoked;
        let mut last = self.last();
        let signing = settle(&mut next.signing, &mut last.signing, policy, revoked, now, acknowledged)?;
        let hmac = settle(&mut next.hmac, &mut last.hmac, policy, revoked, now, acknowledged)?;

        // Both sorts or none, so that a value is handled once.
        let asked = next.rotation_is_asked(policy) && next.has_room();
        if asked {
            next.rotation.clone_from(&policy.rotate);
        }
        begin(&mut next.signing, &mut last.signing, policy, signing || asked, now)?;
        begin(&mut next.hmac, &mut last.hmac, policy, hmac || asked, now)?;
        if next == *self {
            return Ok(None);
        }
        next.last = last;
        Ok(Some(next))
    }

    /// When [`Self::step`] may differ with no change but time. None: never. Of keys that a step has left as they are.
    pub(crate) fn due(&self, policy: &KeyPolicy, now: OffsetDateTime) -> Option<OffsetDateTime> {
        times(&self.signing, policy).chain(times(&self.hmac, policy)).filter(|time| *time > now).min()
    }

    /// What a person may know of the keys: those that sign, and those of codes and refresh tokens.
    pub(crate) fn status(&self, policy: &KeyPolicy) -> (Vec<KeyStatus>, Vec<KeyStatus>) {
        (statuses(&self.signing, policy), statuses(&self.hmac, policy))
    }

    /// What an annotation asks for that cannot be done, for a message: what to do.
    pub(crate) fn problem(&self, policy: &KeyPolicy) -> Option<String> {
        if let Some(id) = &policy.revoke
            && !self.was_given(id)
        {
            return Some(format!(
                "the annotation {REVOKE_KEY_ANNOTATION} names no key of this App; \
                 set it to an id of status.signingKeys or status.hmacKeys"
            ));
        }
        (self.rotation_is_asked(policy) && !self.has_room()).then(|| {
            format!(
                "the rotation that the annotation {ROTATE_KEYS_ANNOTATION} asks for waits: {MOST} keys are kept for what \
                 was made under them; wait, or revoke keys"
            )
        })
    }

    /// Whether there is, or was, a key of this id.
    fn was_given(&self, id: &str) -> bool {
        let last = self.last();
        number(id, 's').is_some_and(|number| number <= last.signing)
            || number(id, 'h').is_some_and(|number| number <= last.hmac)
    }

    fn rotation_is_asked(&self, policy: &KeyPolicy) -> bool {
        policy.rotate.is_some() && policy.rotate != self.rotation
    }

    fn has_room(&self) -> bool {
        has_room(&self.signing) && has_room(&self.hmac)
    }

    /// Remembers what the App wants dropped.
    fn revoke(&mut self, policy: &KeyPolicy) {
        let Some(id) = &policy.revoke else { return };
        let is_there =
            self.signing.iter().any(|kept| kept.key.id == *id) || self.hmac.iter().any(|kept| kept.key.id == *id);
        if is_there && !self.revoked.contains(id) {
            self.revoked.push(id.clone());
            let over = self.revoked.len().saturating_sub(MOST_REVOKED);
            self.revoked.drain(..over);
        }
    }

    /// Other keys in the place of all of these. Nobody may know which ids were given before, so the numbers go on at the
    /// minutes since 1970, above those of keys made once a minute: a refresh token under an id newer than any known
    /// would be answered 503 for ever, where its holder has to sign in again. The number by which servers let go of the
    /// incarnation before does so too.
    fn anew(&self, policy: &KeyPolicy, now: OffsetDateTime) -> Result<Self, KeyNotMade> {
        let minutes = u32::try_from(now.unix_timestamp() / 60).unwrap_or_default();
        let last = self.last();
        let last = LastNumbers { signing: last.signing.max(minutes), hmac: last.hmac.max(minutes) };
        let mut keys = Self::made(&self.app_id, policy, last, now)?;
        keys.namespace.clone_from(&self.namespace);
        keys.handover = self.handover.saturating_add(1).max(minutes);
        keys.revoked.clone_from(&self.revoked);
        Ok(keys)
    }
}

/// The number after the last. One that the App names as revoked is passed over: what it names was another key.
fn next_number<K: Kept>(last: u32, policy: &KeyPolicy) -> Result<u32, KeyNotMade> {
    let next = last.checked_add(1).ok_or(KeyNotMade)?;
    match &policy.revoke {
        Some(id) if number(id, K::LETTER) == Some(next) => next.checked_add(1).ok_or(KeyNotMade),
        Some(_) | None => Ok(next),
    }
}

/// One more key, Active.
fn add<K: Kept>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    now: OffsetDateTime,
) -> Result<usize, KeyNotMade> {
    let number = next_number::<K>(*last, policy)?;
    let mut key = K::make(number, policy, now)?;
    key.life_mut().longest_seconds = Some(K::terms(policy).longest);
    keys.push(key);
    *last = number;
    Ok(keys.len() - 1)
}

fn position<K: Kept>(keys: &[K], state: KeyState) -> Option<usize> {
    keys.iter().rposition(|key| key.state() == state)
}

fn has_room<K: Kept>(keys: &[K]) -> bool {
    keys.len() < MOST || position(keys, KeyState::Published).is_some()
}

/// Drops, retires and activates what is due. Tells whether a key went that somebody had asked for and that was never
/// Active.
fn settle<K: Kept>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    revoked: &[String],
    now: OffsetDateTime,
    acknowledged: bool,
) -> Result<bool, KeyNotMade> {
    let terms = K::terms(policy);
    lengthen(keys, terms.longest);
    if acknowledged {
        acknowledge(keys, &terms, now);
    }

    // What was made under a revoked key is refused, but a session that was opened under it may go on, and have tokens
    // under the keys after it.
    let mut sessions_end = now;
    let mut asked = false;
    keys.retain(|key| {
        let life = key.life();
        if revoked.iter().any(|id| id == key.id()) {
            match key.state() {
                KeyState::Published => asked |= life.asked,
                KeyState::Active => sessions_end = sessions_end.max(later(now, terms.longest(life))),
                KeyState::Retired => {
                    let end = life.not_after.unwrap_or(later(now, terms.longest(life)));
                    sessions_end = sessions_end.max(end);
                }
            }
            return false;
        }
        match key.state() {
            // Nothing was ever made under it.
            KeyState::Published if !key.fits(policy) => {
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
            let life = keys[published].life();
            let ready = life.published_at.is_some_and(|since| later(since, terms.wait(life)) <= now);
            if acknowledged && ready {
                keys[active].set_state(KeyState::Retired);
                keys[active].life_mut().retired_at = Some(now);
                activate(&mut keys[published], &terms, now);
            }
        }
        (Some(_), None) => {}
        // Without an Active key there is no login, so nothing is waited for.
        (None, Some(published)) => {
            activate(&mut keys[published], &terms, now);
            asked = false;
        }
        (None, None) => {
            add(keys, last, policy, now)?;
            asked = false;
        }
    }
    let rest = u32::try_from((sessions_end - now).whole_seconds()).unwrap_or(terms.unknown);
    lengthen(keys, rest);
    Ok(asked)
}

/// What is made under the keys that no end is known of yet may live so many seconds from now.
fn lengthen<K: Kept>(keys: &mut [K], seconds: u32) {
    for key in keys {
        let makes = match key.state() {
            KeyState::Published => false,
            KeyState::Active => true,
            KeyState::Retired => key.life().not_after.is_none(),
        };
        if makes && let Some(longest) = &mut key.life_mut().longest_seconds {
            *longest = seconds.max(*longest);
        }
    }
}

/// Every counting pod knows these keys: from now on nothing is made under the retired ones.
fn acknowledge<K: Kept>(keys: &mut [K], terms: &Terms, now: OffsetDateTime) {
    // A session that was opened under a key may get a token under each key after it.
    let mut before = now;
    for key in keys {
        let longest = terms.longest(key.life());
        let state = key.state();
        let life = key.life_mut();
        match state {
            KeyState::Published => _ = life.published_at.get_or_insert(now),
            KeyState::Active => {}
            KeyState::Retired => {
                let end = later(now, longest + MARGIN).max(before);
                before = before.max(*life.not_after.get_or_insert(end));
            }
        }
    }
}

fn activate(key: &mut impl Kept, terms: &Terms, now: OffsetDateTime) {
    key.set_state(KeyState::Active);
    let life = key.life_mut();
    life.activated_at = Some(now);
    life.longest_seconds = Some(terms.longest);
}

/// Publishes the next key where one is due and none is on its way.
fn begin<K: Kept>(
    keys: &mut Vec<K>,
    last: &mut u32,
    policy: &KeyPolicy,
    asked: bool,
    now: OffsetDateTime,
) -> Result<(), KeyNotMade> {
    if let Some(published) = position(keys, KeyState::Published) {
        keys[published].life_mut().asked |= asked;
        return Ok(());
    }
    let Some(active) = position(keys, KeyState::Active) else { return Ok(()) };
    let active = &keys[active];
    let due = asked || !active.fits(policy) || K::terms(policy).next_from(active) <= now;
    if due && has_room(keys) {
        let new = add(keys, last, policy, now)?;
        keys[new].set_state(KeyState::Published);
        *keys[new].life_mut() = Life { asked, ..Life::default() };
    }
    Ok(())
}

/// The times at which something of these keys is due once all is acknowledged.
fn times<'a, K: Kept>(keys: &'a [K], policy: &'a KeyPolicy) -> impl Iterator<Item = OffsetDateTime> + 'a {
    let terms = K::terms(policy);
    let rotates = position(keys, KeyState::Published).is_none() && has_room(keys);
    keys.iter().filter_map(move |key| {
        let life = key.life();
        match key.state() {
            KeyState::Published => life.published_at.map(|since| later(since, terms.wait(life))),
            KeyState::Active => rotates.then(|| terms.next_from(key)),
            KeyState::Retired => life.not_after,
        }
    })
}

fn statuses<K: Kept>(keys: &[K], policy: &KeyPolicy) -> Vec<KeyStatus> {
    let terms = K::terms(policy);
    keys.iter()
        .map(|key| {
            let end = match key.state() {
                KeyState::Published => None,
                KeyState::Active => Some(later(since(key), terms.rotation)),
                KeyState::Retired => key.life().not_after,
            };
            let not_after = end.and_then(|end| Timestamp::from_second(end.unix_timestamp()).ok()).map(Time);
            KeyStatus { id: key.id().to_owned(), state: key.state(), not_after }
        })
        .collect()
}
