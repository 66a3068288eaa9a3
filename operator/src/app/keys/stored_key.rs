//! The trait that signing keys and HMAC keys implement, and the timing of each kind.

use latchkey_crds::rendered::KeyState;
use time::{Duration, OffsetDateTime};

use super::{
    document::{KeyLifecycle, StoredHmacKey, StoredSigningKey, generate_hmac_key, generate_signing_key},
    material::KeyGenerationError,
    policy::KeyPolicy,
};

/// How long a new signing key is published before servers sign with it: long enough for a verifier that fetches the
/// keys once a day.
pub(super) const PUBLICATION_DELAY: Duration = Duration::DAY;
/// How long a new signing key is published before servers sign with it, if the rotation was requested: the `max-age` of
/// the JWKS (`PUBLIC_CACHE_CONTROL` in the server's `http/response.rs`), plus a minute for delivery.
pub(super) const REQUESTED_PUBLICATION_DELAY: Duration = Duration::seconds(300 + 60);
/// The longest lifetime of an access token that the schema allows, in seconds.
const MAX_ACCESS_LIFETIME_SECONDS: u32 = 86_400;
/// The longest lifetime of a session that the schema allows, in seconds. The lifetime of an emailed code is always
/// shorter.
pub(super) const MAX_SESSION_LIFETIME_SECONDS: u32 = 63_072_000;

/// The durations in the life cycle of the keys of one kind: signing keys or HMAC keys.
pub(super) struct KeyTiming {
    /// How long a key of a scheduled rotation is published before it is Active.
    publication_delay: Duration,
    /// How long a key of a requested rotation is published before it is Active.
    requested_publication_delay: Duration,
    pub(super) rotation_period: Duration,
    /// The longest lifetime that the App's current spec gives to anything created with a key of this kind, in seconds.
    pub(super) max_lifetime_seconds: u32,
    /// The assumed lifetime of anything created with a key, in seconds, if `KeyLifecycle::longest_seconds` of the key
    /// is `None`.
    pub(super) max_lifetime_if_unknown_seconds: u32,
}

/// A stored key of either kind.
pub(super) trait StoredKey: Sized {
    /// The first character of the ids of all keys of this kind.
    const LETTER: char;

    fn id(&self) -> &str;
    fn state(&self) -> KeyState;
    fn set_state(&mut self, state: KeyState);
    fn created_at(&self) -> OffsetDateTime;
    fn lifecycle(&self) -> &KeyLifecycle;
    fn lifecycle_mut(&mut self) -> &mut KeyLifecycle;
    /// Whether the key has the algorithm that the App asks for. True for every HMAC key.
    fn matches_policy(&self, policy: &KeyPolicy) -> bool;
    fn timing(policy: &KeyPolicy) -> KeyTiming;
    /// Generates an Active key.
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
            // Only servers read what is created with an HMAC key, such as refresh tokens, emailed codes and sessions of
            // browsers. So the key can be Active as soon as every serving pod knows it.
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

// === impl KeyTiming ===

impl KeyTiming {
    /// Returns how long this key is published before it is Active.
    pub(super) fn publication_delay(&self, lifecycle: &KeyLifecycle) -> Duration {
        if lifecycle.is_requested { self.requested_publication_delay } else { self.publication_delay }
    }

    /// Returns the longest lifetime of anything created with this key.
    pub(super) fn max_lifetime(&self, lifecycle: &KeyLifecycle) -> Duration {
        Duration::seconds(lifecycle.longest_seconds.unwrap_or(self.max_lifetime_if_unknown_seconds).into())
    }

    /// Returns when the next key must be published, so that it becomes Active at the end of the rotation period of this
    /// Active key.
    pub(super) fn next_key_due(&self, active: &impl StoredKey) -> OffsetDateTime {
        saturating_add(active_since(active), self.rotation_period - self.publication_delay)
    }
}

/// Returns the time at which the key became Active.
pub(super) fn active_since(active: &impl StoredKey) -> OffsetDateTime {
    active.lifecycle().activated_at.unwrap_or(active.created_at())
}

/// Returns `time` plus `by`, or the last representable time.
pub(super) fn saturating_add(time: OffsetDateTime, by: Duration) -> OffsetDateTime {
    time.checked_add(by).unwrap_or(time::PrimitiveDateTime::MAX.assume_utc())
}
