//! The keys that sign only ID tokens. There is a chain of keys (keys that replace one another) for each algorithm that
//! a Client uses for its ID tokens, unless access tokens have the same algorithm (specification: Keys, Keys for ID
//! tokens).

use std::collections::BTreeMap;

use latchkey_crds::{
    app::KeyStatus,
    client::IdTokenAlgorithm,
    rendered::{KeyState, SigningAlgorithm},
};
use time::{Duration, OffsetDateTime};

use super::{
    super::{
        document::{KeyLifecycle, StoredSigningKey},
        material::KeyGenerationError,
        policy::KeyPolicy,
        stored_key::{StoredKey, saturating_add},
    },
    activate, add_key, advance_states, due_times, extend_lifetimes, has_room, key_statuses, position_of_newest,
    publish_next_key, record_acknowledgement,
};

/// How long a key that no Client needs stays Active, so that a Client can use it again. Without this period, a Client
/// could cause a new key each time its algorithm changes. With this period, a chain has at most a few keys that were
/// Retired because no Client needed them: ID tokens expire within a day.
pub(super) const REUSE_PERIOD: Duration = Duration::DAY;

/// The keys for ID tokens, by algorithm.
pub(super) struct IdTokenChains(BTreeMap<IdTokenAlgorithm, Chain>);

/// The keys for ID tokens of one algorithm.
struct Chain {
    keys: Vec<StoredSigningKey>,
    /// Whether a Client uses the algorithm, and the keys for access tokens do not suffice ([`signing_keys_suffice`]).
    is_needed: bool,
    /// Whether the key of a requested rotation was dropped before it became Active, so that another key must still be
    /// published.
    is_requested: bool,
}

fn keys_with_algorithm(keys: &[StoredSigningKey], algorithm: IdTokenAlgorithm) -> Vec<StoredSigningKey> {
    keys.iter().filter(|stored| stored.key.algorithm == algorithm.signing_algorithm()).cloned().collect()
}

/// Whether the keys for access tokens sign ID tokens with this algorithm, both now and in the future. While the
/// algorithm of access tokens is being changed, the result is `false`: ID tokens have a key of their own.
fn signing_keys_suffice(signing: &[StoredSigningKey], algorithm: SigningAlgorithm, policy: &KeyPolicy) -> bool {
    let active = position_of_newest(signing, KeyState::Active).map(|active| signing[active].key.algorithm);
    policy.algorithm == algorithm && active == Some(algorithm)
}

// === impl IdTokenChains ===

impl IdTokenChains {
    /// Sorts the keys for ID tokens by algorithm. `signing` are the keys for access tokens.
    pub(super) fn of(keys: &[StoredSigningKey], signing: &[StoredSigningKey], policy: &KeyPolicy) -> Self {
        let chain = |algorithm: IdTokenAlgorithm| {
            let is_needed = policy.id_token_lifetimes.contains_key(&algorithm)
                && !signing_keys_suffice(signing, algorithm.signing_algorithm(), policy);
            (algorithm, Chain { keys: keys_with_algorithm(keys, algorithm), is_needed, is_requested: false })
        };
        Self(IdTokenAlgorithm::ALL.into_iter().map(chain).collect())
    }

    /// Returns all keys, in a fixed order.
    pub(super) fn keys(&self) -> Vec<StoredSigningKey> {
        self.0.values().flat_map(|chain| chain.keys.iter().cloned()).collect()
    }

    /// Makes the transitions that are due now for existing keys, and publishes the first key of a chain.
    pub(super) fn advance_states(
        &mut self,
        last: &mut u32,
        policy: &KeyPolicy,
        revoked: &[String],
        now: OffsetDateTime,
        acknowledged: bool,
    ) -> Result<(), KeyGenerationError> {
        let acknowledged = acknowledged && policy.id_token_keys_are_read;
        for (algorithm, chain) in &mut self.0 {
            let policy = &policy.for_id_tokens(*algorithm);
            if chain.is_needed {
                chain.keys.iter_mut().for_each(|key| key.lifecycle.unused_since = None);
            }
            if chain.is_needed && position_of_newest(&chain.keys, KeyState::Active).is_some() {
                chain.is_requested = advance_states(&mut chain.keys, last, policy, revoked, now, acknowledged)?;
            } else {
                chain.advance_without_active(last, policy, revoked, now, acknowledged)?;
            }
        }
        Ok(())
    }

    /// Publishes the next key of each chain if it is due. A requested rotation (`requested`) replaces the keys of all
    /// chains: it publishes new keys for the chains that Clients need, and retires the Active keys of the other chains.
    pub(super) fn publish_next_keys(
        &mut self,
        last: &mut u32,
        policy: &KeyPolicy,
        requested: bool,
        now: OffsetDateTime,
    ) -> Result<(), KeyGenerationError> {
        for (algorithm, chain) in &mut self.0 {
            if chain.is_needed {
                let requested = requested || chain.is_requested;
                publish_next_key(&mut chain.keys, last, &policy.for_id_tokens(*algorithm), requested, now)?;
            } else if requested {
                chain.active_keys().for_each(|key| retire(key, now));
            }
        }
        Ok(())
    }

    pub(super) fn due_times(&self, policy: &KeyPolicy) -> Vec<OffsetDateTime> {
        let due = |(algorithm, chain): (&IdTokenAlgorithm, &Chain)| -> Vec<_> {
            if chain.is_needed {
                due_times(&chain.keys, &policy.for_id_tokens(*algorithm)).collect()
            } else {
                chain.keys.iter().filter_map(due_time_of_unneeded_key).collect()
            }
        };
        self.0.iter().flat_map(due).collect()
    }

    pub(super) fn statuses(&self, policy: &KeyPolicy) -> Vec<KeyStatus> {
        let status = |(algorithm, chain): (&IdTokenAlgorithm, &Chain)| {
            key_statuses(&chain.keys, &policy.for_id_tokens(*algorithm))
        };
        self.0.iter().flat_map(status).collect()
    }
}

fn due_time_of_unneeded_key(key: &StoredSigningKey) -> Option<OffsetDateTime> {
    match key.state() {
        KeyState::Published => None,
        KeyState::Active => key.lifecycle.unused_since.map(|since| saturating_add(since, REUSE_PERIOD)),
        KeyState::Retired => key.lifecycle.not_after,
    }
}

fn retire(key: &mut StoredSigningKey, now: OffsetDateTime) {
    key.set_state(KeyState::Retired);
    key.lifecycle.retired_at = Some(now);
    key.lifecycle.unused_since = None;
}

// === impl Chain ===

impl Chain {
    fn active_keys(&mut self) -> impl Iterator<Item = &mut StoredSigningKey> {
        self.keys.iter_mut().filter(|key| key.state() == KeyState::Active)
    }

    /// Makes the transitions of a chain that no Client needs, or that has no Active key yet. The first key becomes
    /// Active as soon as every serving pod has reported it. It does not wait for the publication delay, because without
    /// an Active key no pod can sign.
    fn advance_without_active(
        &mut self,
        last: &mut u32,
        policy: &KeyPolicy,
        revoked: &[String],
        now: OffsetDateTime,
        acknowledged: bool,
    ) -> Result<(), KeyGenerationError> {
        let timing = StoredSigningKey::timing(policy);
        let keys = &mut self.keys;
        if acknowledged {
            record_acknowledgement(keys, &timing, now);
        }
        keys.retain(|key| {
            let is_over = match key.state() {
                // A Published key has never signed anything, so it can be dropped.
                KeyState::Published => !self.is_needed,
                KeyState::Active => false,
                KeyState::Retired => acknowledged && key.lifecycle().not_after.is_some_and(|end| end <= now),
            };
            !is_over && !revoked.iter().any(|id| id == key.id())
        });
        if !self.is_needed {
            // A server that does not have the newest document yet may still sign with these keys.
            extend_lifetimes(keys, policy.access_lifetime_seconds);
            for key in self.active_keys() {
                let unused_since = *key.lifecycle.unused_since.get_or_insert(now);
                if saturating_add(unused_since, REUSE_PERIOD) <= now {
                    retire(key, now);
                }
            }
            return Ok(());
        }
        match position_of_newest(keys, KeyState::Published) {
            Some(published) if acknowledged => activate(&mut keys[published], &timing, now),
            Some(_) => {}
            None if has_room(keys) => {
                let first = add_key(keys, last, policy, now)?;
                keys[first].set_state(KeyState::Published);
                *keys[first].lifecycle_mut() = KeyLifecycle::default();
            }
            None => {}
        }
        Ok(())
    }
}
