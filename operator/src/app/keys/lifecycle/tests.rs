use std::collections::BTreeMap;

use latchkey_crds::{
    client::IdTokenAlgorithm::{self, RS256},
    rendered::SigningAlgorithm::{self, ES256, EdDSA},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{
    super::stored_key::{MAX_SESSION_LIFETIME_SECONDS, PUBLICATION_DELAY, REQUESTED_PUBLICATION_DELAY},
    id_tokens::REUSE_PERIOD,
    *,
};

const NOW: OffsetDateTime = time::macros::datetime!(2026-11-21 12:00 UTC);

fn shop() -> AppId {
    "shop".parse().unwrap()
}

fn policy() -> KeyPolicy {
    KeyPolicy {
        algorithm: ES256,
        access_lifetime_seconds: 900,
        id_token_lifetimes: BTreeMap::new(),
        id_token_keys_are_read: true,
        session_lifetime_seconds: 7_776_000,
        rotation_days: 90,
        rotate_request: None,
        revoke_id: None,
        new_keys_request: None,
    }
}

/// Makes steps until nothing is due, as if every pod acknowledged each step immediately.
#[track_caller]
fn advanced(keys: &KeyDocument, policy: &KeyPolicy, now: OffsetDateTime) -> KeyDocument {
    let mut keys = keys.clone();
    for _ in 0..8 {
        match keys.advance(policy, now, true).unwrap() {
            Some(next) => keys = next,
            None => return keys,
        }
    }
    panic!("the steps do not end: {keys:?}");
}

/// Returns the ids and states of the signing keys and of the HMAC keys, such as `s1 Active`.
fn states(keys: &KeyDocument) -> (Vec<String>, Vec<String>) {
    let show = |id: &str, state: KeyState| format!("{id} {state:?}");
    (
        keys.signing.iter().map(|stored| show(&stored.key.id, stored.key.state)).collect(),
        keys.hmac.iter().map(|stored| show(&stored.key.id, stored.key.state)).collect(),
    )
}

#[track_caller]
fn assert_states(keys: &KeyDocument, signing: &[&str], hmac: &[&str]) {
    let (found_signing, found_hmac) = states(keys);
    assert_eq!((found_signing, found_hmac), (to_strings(signing), to_strings(hmac)));
    assert_eq!(keys.validate(&shop()), Ok(()));
}

fn to_strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn first() -> KeyDocument {
    KeyDocument::first_with_policy(&shop(), &policy(), NOW).unwrap()
}

fn rotation_requested(value: &str) -> KeyPolicy {
    KeyPolicy { rotate_request: Some(value.to_owned()), ..policy() }
}

fn revoking(id: &str) -> KeyPolicy {
    KeyPolicy { revoke_id: Some(id.to_owned()), ..policy() }
}

#[test]
fn first_keys_are_active_immediately_and_have_a_new_incarnation() {
    let keys = first();
    assert_states(&keys, &["s1 Active"], &["h1 Active"]);
    assert!(keys.incarnation.is_some() && keys.incarnation != first().incarnation && keys.handover == 0);
    assert_eq!(keys.advance(&policy(), NOW, true), Ok(None));
    assert_eq!(keys.advance(&policy(), NOW, false), Ok(None));
}

#[test]
fn keys_are_rotated_on_schedule_and_dropped_when_nothing_depends_on_them() {
    let (keys, policy) = (first(), policy());
    let published = NOW + Duration::days(89);
    assert_eq!(keys.next_due(&policy, NOW), Some(published));
    let keys = advanced(&keys, &policy, published);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Active"]);

    let replaced = NOW + Duration::days(90);
    assert_eq!(keys.next_due(&policy, published), Some(replaced));
    let keys = advanced(&keys, &policy, replaced);
    assert_states(&keys, &["s1 Retired", "s2 Active"], &["h1 Retired", "h2 Active"]);

    let signing_end = replaced + Duration::seconds(900) + RETIREMENT_MARGIN;
    assert_eq!(keys.next_due(&policy, replaced), Some(signing_end));
    let keys = advanced(&keys, &policy, signing_end);
    assert_states(&keys, &["s2 Active"], &["h1 Retired", "h2 Active"]);

    let keys = advanced(&keys, &policy, replaced + Duration::days(90) + RETIREMENT_MARGIN);
    assert!(keys.hmac.iter().all(|stored| stored.key.id != "h1"), "{keys:?}");
}

#[test]
fn a_key_is_not_used_before_every_pod_knows_it() {
    let policy = rotation_requested("leak");
    let keys = first().advance(&policy, NOW, true).unwrap().unwrap();
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Active", "h2 Published"]);
    // One pod serves the previous revision for three days.
    let later = NOW + Duration::days(3);
    assert_eq!(keys.advance(&policy, later, false), Ok(None));
    // After three days, all pods serve the new revision. The HMAC key becomes Active immediately, because only servers
    // read what is created with an HMAC key. The signing key waits, because applications fetch the signing keys only at
    // intervals.
    let keys = keys.advance(&policy, later, true).unwrap().unwrap();
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]);
    assert_eq!(keys.hmac[0].lifecycle.not_after, None, "a pod with the previous revision still creates tokens with h1");
    let keys = keys.advance(&policy, later, true).unwrap().unwrap();
    assert!(keys.hmac[0].lifecycle.not_after.is_some());

    let ready = later + REQUESTED_PUBLICATION_DELAY;
    assert_eq!(keys.next_due(&policy, later), Some(ready));
    assert_eq!(keys.advance(&policy, ready, false), Ok(None), "a new pod does not know s2 yet");
    assert_states(&advanced(&keys, &policy, ready), &["s1 Retired", "s2 Active"], &["h1 Retired", "h2 Active"]);
}

#[test]
fn each_value_of_the_annotation_causes_one_rotation() {
    let keys = advanced(&first(), &rotation_requested("1"), NOW);
    assert_eq!(keys.rotation.as_deref(), Some("1"));
    // No second rotation is requested while the annotation stays, or when it is removed.
    let later = NOW + Duration::days(1);
    let keys = advanced(&keys, &rotation_requested("1"), later);
    assert_states(&keys, &["s1 Retired", "s2 Active"], &["h1 Retired", "h2 Active"]);
    assert_eq!(keys.advance(&policy(), later, true), Ok(None));
    assert_eq!(keys.advance(&rotation_requested("1"), later, true), Ok(None));
    let keys = advanced(&keys, &rotation_requested("2"), later);
    assert_states(&keys, &["s1 Retired", "s2 Active", "s3 Published"], &["h1 Retired", "h2 Retired", "h3 Active"]);
}

#[test]
fn requests_that_are_older_than_the_first_keys_count_as_handled() {
    let policy = KeyPolicy {
        rotate_request: Some("1".to_owned()),
        revoke_id: Some("s1".to_owned()),
        new_keys_request: Some("1".to_owned()),
        ..policy()
    };
    let keys = KeyDocument::first_with_policy(&shop(), &policy, NOW).unwrap();
    assert_states(&keys, &["s2 Active"], &["h1 Active"]);
    assert_eq!(keys.advance(&policy, NOW, true), Ok(None));
    assert_eq!(keys.request_error(&policy), None);
}

#[test]
fn a_request_accelerates_a_scheduled_rotation() {
    let published = NOW + Duration::days(89);
    let keys = advanced(&first(), &policy(), published);
    let keys = advanced(&keys, &rotation_requested("now"), published);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]);
    let ready = published + REQUESTED_PUBLICATION_DELAY;
    assert_eq!(keys.next_due(&rotation_requested("now"), published), Some(ready));
    assert_eq!(advanced(&keys, &rotation_requested("now"), ready).signing[1].key.state, KeyState::Active);
}

#[test]
fn a_change_of_algorithm_is_a_rotation_and_can_be_reverted() {
    let eddsa = KeyPolicy { algorithm: EdDSA, ..policy() };
    let keys = advanced(&first(), &eddsa, NOW);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Active"]);
    assert_eq!(keys.next_due(&eddsa, NOW), Some(NOW + PUBLICATION_DELAY));
    let reverted = advanced(&keys, &policy(), NOW);
    assert_states(&reverted, &["s1 Active"], &["h1 Active"]);
    // The new key is `s3`, because the id `s2` of the dropped key is not reused.
    assert_states(&advanced(&reverted, &eddsa, NOW), &["s1 Active", "s3 Published"], &["h1 Active"]);
    let changed = advanced(&keys, &eddsa, NOW + PUBLICATION_DELAY);
    assert_states(&changed, &["s1 Retired", "s2 Active"], &["h1 Active"]);
    assert_eq!(changed.signing[1].key.algorithm, EdDSA);
}

#[test]
fn a_revoked_key_is_dropped_immediately_and_replaced() {
    // A revocation does not wait for the pods, because the key may have leaked.
    let keys = first().advance(&revoking("s1"), NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s2 Active"], &["h1 Active"]);
    assert_eq!(keys.advance(&revoking("s1"), NOW, true), Ok(None));
    let keys = keys.advance(&revoking("h1"), NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s2 Active"], &["h2 Active"]);
    assert_eq!(keys.revoked, ["s1", "h1"]);

    // If the Active key is revoked, the Published key becomes Active.
    let rotating = first().advance(&rotation_requested("1"), NOW, false).unwrap().unwrap();
    let policy = KeyPolicy { revoke_id: Some("s1".to_owned()), ..rotation_requested("1") };
    let keys = rotating.advance(&policy, NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s2 Active"], &["h1 Active", "h2 Published"]);

    // If the Published key is revoked and the rotation was requested, a new key is published.
    let policy = KeyPolicy { revoke_id: Some("s2".to_owned()), ..rotation_requested("1") };
    let keys = rotating.advance(&policy, NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s1 Active", "s3 Published"], &["h1 Active", "h2 Published"]);
    assert!(keys.signing[1].lifecycle.is_requested);
}

#[test]
fn a_revoked_key_that_appears_again_is_dropped() {
    let copy = first();
    let mut keys = advanced(&copy, &revoking("h1"), NOW);
    keys.hmac.insert(0, copy.hmac[0].clone());
    keys.hmac[0].key.state = KeyState::Retired;
    let keys = advanced(&keys, &policy(), NOW);
    assert_states(&keys, &["s1 Active"], &["h2 Active"]);
}

#[test]
fn an_unknown_id_in_the_revocation_annotation_is_reported_and_never_assigned() {
    let keys = first();
    for bad in ["s2", "h7", "x", "s", "s01"] {
        assert_eq!(keys.advance(&revoking(bad), NOW, true), Ok(None), "{bad}");
        let error = keys.request_error(&revoking(bad)).unwrap();
        assert!(error.contains("names no key of this App; set it to an id of status"), "{error}");
    }
    assert_eq!(keys.request_error(&revoking("s1")), None);
    let policy = KeyPolicy { revoke_id: Some("s2".to_owned()), ..rotation_requested("1") };
    let keys = advanced(&keys, &policy, NOW);
    assert_states(&keys, &["s1 Active", "s3 Published"], &["h1 Retired", "h2 Active"]);
}

#[test]
fn later_keys_are_kept_for_a_session_that_outlives_its_own_key() {
    // A session with a lifetime of two years begins. Then the session lifetime of the App is shortened, and the HMAC
    // key of the session is rotated twice or, in a second case, revoked.
    let long_sessions = KeyPolicy { session_lifetime_seconds: MAX_SESSION_LIFETIME_SECONDS, ..policy() };
    let short_sessions = KeyPolicy { session_lifetime_seconds: 300, ..policy() };
    let keys = KeyDocument::first_with_policy(&shop(), &long_sessions, NOW).unwrap();
    let end = NOW + Duration::seconds(MAX_SESSION_LIFETIME_SECONDS.into());
    let rotated = advanced(&keys, &KeyPolicy { rotate_request: Some("1".to_owned()), ..short_sessions.clone() }, NOW);
    let rotated =
        advanced(&rotated, &KeyPolicy { rotate_request: Some("2".to_owned()), ..short_sessions.clone() }, NOW);
    let ends = rotated.hmac.iter().map(|stored| stored.lifecycle.not_after).collect::<Vec<_>>();
    assert_eq!(ends, [Some(end + RETIREMENT_MARGIN), Some(end + RETIREMENT_MARGIN), None]);

    let revoked = advanced(&keys, &KeyPolicy { revoke_id: Some("h1".to_owned()), ..short_sessions }, NOW);
    assert_eq!(revoked.hmac[0].lifecycle.longest_seconds, Some(MAX_SESSION_LIFETIME_SECONDS));
}

#[test]
fn a_retired_key_is_kept_until_the_end_of_a_session_that_began_with_a_revoked_key() {
    let short = |value: &str| KeyPolicy { session_lifetime_seconds: 300, ..rotation_requested(value) };
    let long = KeyPolicy { session_lifetime_seconds: MAX_SESSION_LIFETIME_SECONDS, ..policy() };
    let keys = advanced(&KeyDocument::first_with_policy(&shop(), &long, NOW).unwrap(), &short("1"), NOW);
    let end = keys.hmac[0].lifecycle.not_after.unwrap();
    // Advances until h3 has replaced h2. After the loop, the pods have acknowledged every step except this replacement.
    let mut keys = keys;
    while keys.hmac.len() < 3 || keys.hmac[2].key.state != KeyState::Active {
        keys = keys.advance(&short("2"), NOW, true).unwrap().unwrap();
    }
    assert_eq!((keys.hmac[1].key.state, keys.hmac[1].lifecycle.not_after), (KeyState::Retired, None));
    let policy = KeyPolicy { revoke_id: Some("h1".to_owned()), ..short("2") };
    let keys = keys.advance(&policy, NOW, false).unwrap().unwrap();
    let keys = advanced(&keys, &policy, NOW);
    assert_eq!(keys.hmac[0].key.id, "h2");
    assert!(keys.hmac[0].lifecycle.not_after.unwrap() >= end);
}

#[test]
fn new_keys_are_generated_once_with_greater_numbers_than_all_earlier_keys() {
    let policy = KeyPolicy { new_keys_request: Some("lost".to_owned()), ..policy() };
    let old = first();
    let keys = old.advance(&policy, NOW, false).unwrap().unwrap();
    assert!(keys.handover > 29_000_000 && keys.incarnation.is_some() && keys.incarnation != old.incarnation);
    assert_eq!((keys.signing.len(), keys.hmac.len()), (1, 1));
    assert!(keys.last_numbers().hmac > 29_000_000, "{keys:?}");
    assert!(keys.hmac[0].key.id.len() <= 16);
    assert_eq!(keys.validate(&shop()), Ok(()));
    assert_eq!(keys.advance(&policy, NOW, true), Ok(None));
    let again =
        keys.advance(&KeyPolicy { new_keys_request: Some("again".to_owned()), ..policy }, NOW, true).unwrap().unwrap();
    assert_eq!(again.last_numbers().hmac, keys.last_numbers().hmac + 1);
}

#[test]
fn keys_restored_from_a_rendered_document_are_kept_for_the_longest_possible_lifetime() {
    let mut keys = advanced(&first(), &rotation_requested("1"), NOW);
    // Removes what a rendered document does not contain.
    keys.last = LastNumbers::default();
    for stored in &mut keys.signing {
        stored.lifecycle = KeyLifecycle::default();
    }
    for stored in &mut keys.hmac {
        stored.lifecycle = KeyLifecycle::default();
    }
    let keys = advanced(&keys.restored(&rotation_requested("1")), &rotation_requested("1"), NOW);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]);
    assert_eq!(
        keys.hmac[0].lifecycle.not_after,
        Some(NOW + Duration::seconds(MAX_SESSION_LIFETIME_SECONDS.into()) + RETIREMENT_MARGIN)
    );
    let keys = advanced(&keys, &rotation_requested("2"), NOW);
    assert_eq!(
        keys.hmac.last().unwrap().key.id,
        "h103",
        "the ids of dropped keys are not known, so 100 numbers are skipped"
    );
}

#[test]
fn a_rotation_waits_if_too_many_keys_are_stored() {
    let mut keys = first();
    for turn in 0..MAX_KEYS {
        keys =
            advanced(&keys, &rotation_requested(&turn.to_string()), NOW + Duration::minutes(turn.try_into().unwrap()));
    }
    let next_request = rotation_requested("more");
    let now = NOW + Duration::hours(12);
    let keys = advanced(&keys, &next_request, now);
    assert_eq!(keys.hmac.len(), MAX_KEYS);
    assert!(keys.request_error(&next_request).unwrap().contains("waits"));
    // A revocation needs no room, because the new key replaces the revoked one. The first key that expires makes room
    // for the rotation.
    assert_eq!(advanced(&keys, &revoking("h60"), now).hmac.len(), MAX_KEYS);
    let end = keys.hmac[0].lifecycle.not_after.unwrap();
    let later = advanced(&keys, &next_request, end);
    assert_eq!((later.rotation.as_deref(), later.request_error(&next_request)), (Some("more"), None));
}

#[test]
fn the_status_reports_ids_states_and_ends() {
    let keys = advanced(&first(), &rotation_requested("1"), NOW);
    let KeyStatuses { signing, hmac } = keys.status(&policy());
    let at = |time: OffsetDateTime| Some(Time(Timestamp::from_second(time.unix_timestamp()).unwrap()));
    let status = |id: &str, state, not_after| KeyStatus { id: id.to_owned(), state, not_after };
    let replaced = at(NOW + Duration::days(90));
    assert_eq!(signing, [status("s1", KeyState::Active, replaced.clone()), status("s2", KeyState::Published, None)]);
    let end = at(NOW + Duration::days(90) + RETIREMENT_MARGIN);
    assert_eq!(hmac, [status("h1", KeyState::Retired, end), status("h2", KeyState::Active, replaced)]);
}

#[test]
fn keys_written_by_earlier_versions_are_read() {
    let keys = KeyDocument::first(&shop(), ES256, NOW).unwrap();
    let mut old = serde_json::to_value(&keys).unwrap();
    for name in ["last", "rotation", "newKeys", "revoked", "incarnation"] {
        old.as_object_mut().unwrap().remove(name);
    }
    for kind in ["signing", "hmac"] {
        old[kind][0].as_object_mut().unwrap().remove("activatedAt");
    }
    let read: KeyDocument = serde_json::from_value(old).unwrap();
    assert_eq!(read.validate(&shop()), Ok(()));
    assert_eq!(read.next_due(&policy(), NOW), Some(NOW + Duration::days(89)));
    let rotated = advanced(&read, &rotation_requested("1"), NOW);
    let text = serde_json::to_string(&rotated).unwrap();
    assert_eq!(serde_json::from_str::<KeyDocument>(&text).unwrap(), rotated);
}

/// A document that pods serve: its keys, and the App's policy when the document was rendered.
#[derive(Clone)]
struct ServedDocument {
    keys: KeyDocument,
    policy: KeyPolicy,
}

struct Session {
    ends: OffsetDateTime,
    /// The ids of the HMAC keys that the refresh tokens of the session use.
    keys: Vec<String>,
}

/// A random history of an App. Some pods can serve earlier revisions of the document.
struct RandomHistory {
    random: StdRng,
    now: OffsetDateTime,
    policy: KeyPolicy,
    /// Every document that some pod may still serve, the newest last.
    served: Vec<ServedDocument>,
    /// For each access token, the id of its signing key and the time at which the token expires.
    access_tokens: Vec<(String, OffsetDateTime)>,
    sessions: Vec<Session>,
    /// The secret of every key that was published, by id.
    secrets_by_id: std::collections::BTreeMap<String, String>,
    revoked: Vec<String>,
}

impl RandomHistory {
    fn new(seed: u64) -> Self {
        let mut history = Self {
            random: StdRng::seed_from_u64(seed),
            now: NOW,
            policy: KeyPolicy { rotation_days: 7, session_lifetime_seconds: 20 * 86_400, ..policy() },
            served: Vec::new(),
            access_tokens: Vec::new(),
            sessions: Vec::new(),
            secrets_by_id: std::collections::BTreeMap::new(),
            revoked: Vec::new(),
        };
        let keys = KeyDocument::first_with_policy(&shop(), &history.policy, NOW).unwrap();
        history.publish(keys, false);
        history
    }

    fn newest(&self) -> &ServedDocument {
        self.served.last().unwrap()
    }

    fn publish(&mut self, keys: KeyDocument, after_revocation: bool) {
        assert_eq!(keys.validate(&shop()), Ok(()), "exactly one is Active, no id occurs twice");
        for (id, secret) in secrets(&keys) {
            let known = self.secrets_by_id.entry(id.clone()).or_insert_with(|| secret.clone());
            assert_eq!(*known, secret, "{id} is another key");
            assert!(!self.revoked.contains(&id), "{id} came back");
        }
        if let (false, Some(before)) = (after_revocation, self.served.last()) {
            for (id, id_before) in
                [(active(&keys.signing), active(&before.keys.signing)), (active(&keys.hmac), active(&before.keys.hmac))]
            {
                if id != id_before {
                    let knows = |served: &ServedDocument| secrets(&served.keys).any(|(known, _)| known == id);
                    assert!(self.served.iter().all(knows), "a pod does not know {id}");
                }
            }
        }
        self.served.push(ServedDocument { keys, policy: self.policy.clone() });
    }

    /// Makes a random pod create an access token, and open or continue a session. The pod may serve any of the
    /// documents.
    fn create_tokens(&mut self) {
        let at = self.random.random_range(0..self.served.len());
        let ServedDocument { keys, policy } = self.served[at].clone();
        let access_end = self.now + Duration::seconds(policy.access_lifetime_seconds.into());
        let (signing, hmac) = (active(&keys.signing), active(&keys.hmac));
        // A pod with an earlier revision can still use a revoked key. Other pods must reject the tokens of this key, so
        // this test does not record these tokens.
        if !self.revoked.contains(&signing) {
            self.access_tokens.push((signing, access_end));
        }
        if self.revoked.contains(&hmac) {
            return;
        }
        if self.random.random_bool(0.5) {
            let ends = self.now + Duration::seconds(policy.session_lifetime_seconds.into());
            self.sessions.push(Session { ends, keys: vec![hmac] });
        } else if !self.sessions.is_empty() {
            // A refresh does not change the absolute end of the session.
            let at = self.random.random_range(0..self.sessions.len());
            if self.sessions[at].ends > self.now {
                self.sessions[at].keys.push(hmac);
            }
        }
    }

    fn change_policy(&mut self) {
        match self.random.random_range(0..8) {
            0 => self.policy.algorithm = if self.random.random_bool(0.5) { ES256 } else { EdDSA },
            1 => self.policy.access_lifetime_seconds = self.random.random_range(60..=86_400),
            2 => self.policy.session_lifetime_seconds = self.random.random_range(300..=40 * 86_400),
            3 => self.policy.rotation_days = self.random.random_range(7..=30),
            4 | 5 => self.policy.rotate_request = Some(self.random.random_range(0..1000).to_string()),
            _ => {
                let ids = secrets(&self.newest().keys).map(|(id, _)| id).collect::<Vec<_>>();
                let id = ids[self.random.random_range(0..ids.len())].clone();
                self.policy.revoke_id = Some(id);
            }
        }
    }

    fn reconcile(&mut self) {
        let acknowledged = self.served.len() == 1;
        let before = self.newest().clone();
        let next = before.keys.advance(&self.policy, self.now, acknowledged).unwrap();
        let keys = next.clone().unwrap_or_else(|| before.keys.clone());
        if let Some(id) = &self.policy.revoke_id
            && secrets(&before.keys).any(|(known, _)| known == *id)
        {
            self.revoked.push(id.clone());
            self.access_tokens.retain(|(key, _)| key != id);
            for session in &mut self.sessions {
                session.keys.retain(|key| key != id);
            }
        }
        assert_eq!(keys.advance(&self.policy, self.now, false), Ok(None), "nothing is due after a step");
        if next.is_some() || before.policy != self.policy {
            let revokes = self.policy.revoke_id != before.policy.revoke_id;
            // If only the times of the keys changed, the served document is the same, so pods need not load it again.
            if before.policy == self.policy && is_same_for_servers(&keys, &before.keys) {
                self.served.last_mut().unwrap().keys = keys;
            } else {
                self.publish(keys, revokes);
            }
        }
    }

    fn check_tokens_and_sessions(&mut self) {
        let now = self.now;
        self.access_tokens.retain(|(_, ends)| *ends > now);
        self.sessions.retain(|session| session.ends > now);
        for served in &self.served[self.served.len() - 1..] {
            let known = secrets(&served.keys).map(|(id, _)| id).collect::<Vec<_>>();
            for (key, ends) in &self.access_tokens {
                assert!(known.contains(key), "an access token of {key} until {ends} finds no key at {now}");
            }
            for session in &self.sessions {
                for key in &session.keys {
                    assert!(known.contains(key), "a session until {} finds no {key} at {now}", session.ends);
                }
            }
        }
    }

    /// Checks that no transition is due before the time that `next_due` returns, and that one is due at that time.
    fn check_due(&mut self) {
        let keys = advanced(&self.newest().keys, &self.policy, self.now);
        let Some(due) = keys.next_due(&self.policy, self.now) else {
            panic!("an Active key is always due for replacement")
        };
        let between = self.random.random_range(0..(due - self.now).whole_seconds());
        let before = self.now + Duration::seconds(between);
        assert_eq!(keys.advance(&self.policy, before, true), Ok(None), "before {due}");
        assert!(keys.advance(&self.policy, due, true).unwrap().is_some(), "at {due}");
    }

    fn step(&mut self) {
        let max_seconds = if self.random.random_bool(0.5) { 600 } else { 2 * 86_400 };
        self.now += Duration::seconds(self.random.random_range(0..max_seconds));
        if self.random.random_bool(0.1) {
            self.change_policy();
        }
        // Either all pods serve the newest document now, or some pods still serve earlier documents.
        let still_served =
            if self.random.random_bool(0.6) { 1 } else { self.random.random_range(1..=self.served.len()) };
        self.served.drain(..self.served.len() - still_served);
        self.create_tokens();
        self.reconcile();
        self.create_tokens();
        self.check_tokens_and_sessions();
        self.check_due();
    }
}

fn active<K: StoredKey>(keys: &[K]) -> String {
    keys[position_of_newest(keys, KeyState::Active).unwrap()].id().to_owned()
}

fn secrets(keys: &KeyDocument) -> impl Iterator<Item = (String, String)> {
    let signing = keys.signing.iter().map(|stored| (stored.key.id.clone(), stored.key.private_key.expose().to_owned()));
    let hmac = keys.hmac.iter().map(|stored| (stored.key.id.clone(), stored.key.secret.expose().to_owned()));
    signing.chain(hmac)
}

/// Whether servers get the same keys from these two documents.
fn is_same_for_servers(one: &KeyDocument, other: &KeyDocument) -> bool {
    states(one) == states(other) && secrets(one).eq(secrets(other))
}

#[test]
fn every_token_finds_its_key_until_the_token_expires() {
    for seed in 0..100 {
        let mut history = RandomHistory::new(seed);
        for _ in 0..400 {
            history.step();
        }
        assert!(history.secrets_by_id.len() > 10, "keys were generated");
    }
}

/// The policy of an App with Clients that use these algorithms.
fn with_id_tokens(algorithms: &[IdTokenAlgorithm]) -> KeyPolicy {
    let id_token_lifetimes = algorithms.iter().map(|algorithm| (*algorithm, 3600)).collect();
    KeyPolicy { id_token_lifetimes, access_lifetime_seconds: 3600, ..policy() }
}

/// Returns ids, algorithms and states of the keys for ID tokens, such as `s2 RS256 Active`.
fn id_token_keys(keys: &KeyDocument) -> Vec<String> {
    assert_eq!(keys.validate(&shop()), Ok(()));
    let show =
        |stored: &StoredSigningKey| format!("{} {:?} {:?}", stored.key.id, stored.key.algorithm, stored.key.state);
    keys.id_tokens.iter().map(show).collect()
}

#[test]
fn the_first_key_for_id_tokens_is_active_when_every_pod_knows_it() {
    let policy = with_id_tokens(&[RS256]);
    let keys = first().advance(&policy, NOW, false).unwrap().unwrap();
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Published"]);
    assert_eq!(keys.advance(&policy, NOW + Duration::days(3), false), Ok(None), "a pod does not know it");
    // A pod with an older version of the server acknowledges the document, but does not read the key for ID tokens.
    let older = KeyPolicy { id_token_keys_are_read: false, ..policy.clone() };
    assert_eq!(keys.advance(&older, NOW, true), Ok(None));
    let keys = keys.advance(&policy, NOW, true).unwrap().unwrap();
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Active"]);
    assert_states(&keys, &["s1 Active"], &["h1 Active"]);
    assert_eq!(keys.advance(&policy, NOW, true), Ok(None));
}

#[test]
fn id_tokens_with_the_algorithm_of_access_tokens_need_no_key() {
    assert_eq!(id_token_keys(&advanced(&first(), &with_id_tokens(&[IdTokenAlgorithm::ES256]), NOW)), [""; 0]);
    let eddsa = KeyPolicy { algorithm: EdDSA, ..with_id_tokens(&[RS256, IdTokenAlgorithm::ES256]) };
    let keys = KeyDocument::first_with_policy(&shop(), &eddsa, NOW).unwrap();
    assert_eq!(id_token_keys(&advanced(&keys, &eddsa, NOW)), ["s2 RS256 Active", "s3 ES256 Active"]);
}

#[test]
fn keys_for_id_tokens_are_rotated_and_dropped_like_signing_keys() {
    let policy = with_id_tokens(&[RS256]);
    let keys = advanced(&first(), &policy, NOW);
    let published = NOW + Duration::days(89);
    assert_eq!(keys.next_due(&policy, NOW), Some(published));
    let keys = advanced(&keys, &policy, published);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Active", "s4 RS256 Published"]);
    let replaced = NOW + Duration::days(90);
    let keys = advanced(&keys, &policy, replaced);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Retired", "s4 RS256 Active"]);
    let end = replaced + Duration::HOUR + RETIREMENT_MARGIN;
    assert_eq!(id_token_keys(&advanced(&keys, &policy, end - Duration::SECOND)).len(), 2);
    assert_eq!(id_token_keys(&advanced(&keys, &policy, end)), ["s4 RS256 Active"]);
    assert_eq!(keys.status(&policy).signing.len(), 4, "the status lists all of them");
}

#[test]
fn a_requested_rotation_includes_the_keys_for_id_tokens() {
    let keys = advanced(&first(), &with_id_tokens(&[RS256]), NOW);
    let requested = KeyPolicy { rotate_request: Some("1".to_owned()), ..with_id_tokens(&[RS256]) };
    let keys = advanced(&keys, &requested, NOW);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Active", "s4 RS256 Published"]);
    let keys = advanced(&keys, &requested, NOW + REQUESTED_PUBLICATION_DELAY);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Retired", "s4 RS256 Active"]);
}

#[test]
fn keys_for_id_tokens_that_nobody_needs_are_retired_and_dropped() {
    let keys = advanced(&first(), &with_id_tokens(&[RS256]), NOW);
    let keys = advanced(&keys, &policy(), NOW);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Active"], "a Client can use it again");
    let unused = NOW + REUSE_PERIOD;
    assert_eq!(keys.next_due(&policy(), NOW), Some(unused));
    let keys = advanced(&keys, &policy(), unused);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Retired"]);
    let end = unused + Duration::HOUR + RETIREMENT_MARGIN;
    assert_eq!(keys.next_due(&policy(), unused), Some(end));
    assert_eq!(id_token_keys(&advanced(&keys, &policy(), end)), [""; 0]);
    // A key that was never used is dropped immediately.
    let published = first().advance(&with_id_tokens(&[RS256]), NOW, false).unwrap().unwrap();
    assert_eq!(id_token_keys(&advanced(&published, &policy(), NOW)), [""; 0]);
    // A Client that uses the algorithm again gets a new key.
    assert_eq!(
        id_token_keys(&advanced(&keys, &with_id_tokens(&[RS256]), unused)),
        ["s2 RS256 Retired", "s3 RS256 Active"]
    );
}

#[test]
fn frequent_changes_of_a_clients_algorithm_create_no_further_keys() {
    let mut keys = first();
    for hour in 0..200 {
        let policy = if hour % 2 == 0 { with_id_tokens(&[RS256]) } else { policy() };
        keys = advanced(&keys, &policy, NOW + Duration::hours(hour));
    }
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Active"]);
}

#[test]
fn a_requested_rotation_retires_the_keys_for_id_tokens_that_nobody_needs() {
    let keys = advanced(&first(), &with_id_tokens(&[RS256]), NOW);
    let keys = advanced(&keys, &policy(), NOW);
    let keys = advanced(&keys, &rotation_requested("1"), NOW);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Retired"]);
}

#[test]
fn id_tokens_have_an_active_key_while_the_signing_algorithm_changes() {
    let keys = advanced(&first(), &with_id_tokens(&[RS256]), NOW);
    let changed = KeyPolicy { algorithm: SigningAlgorithm::RS256, ..with_id_tokens(&[RS256]) };
    let keys = advanced(&keys, &changed, NOW);
    assert_states(&keys, &["s1 Active", "s3 Published"], &["h1 Active"]);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Active"], "the key for access tokens is not Active yet");
    let keys = advanced(&keys, &changed, NOW + PUBLICATION_DELAY);
    assert_states(&keys, &["s1 Retired", "s3 Active"], &["h1 Active"]);
    let keys = advanced(&keys, &changed, NOW + PUBLICATION_DELAY + REUSE_PERIOD);
    assert_eq!(id_token_keys(&keys), ["s2 RS256 Retired"]);
}

#[test]
fn a_revoked_key_for_id_tokens_is_replaced_immediately() {
    let policy = with_id_tokens(&[RS256]);
    let keys = advanced(&first(), &policy, NOW);
    let revoking = KeyPolicy { revoke_id: Some("s2".to_owned()), ..policy.clone() };
    let keys = keys.advance(&revoking, NOW, false).unwrap().unwrap();
    assert_eq!(id_token_keys(&keys), ["s3 RS256 Active"]);
    assert_eq!(keys.request_error(&revoking), None);
    // A first key that is not Active yet is also replaced.
    let published = first().advance(&policy, NOW, false).unwrap().unwrap();
    let keys = published.advance(&revoking, NOW, false).unwrap().unwrap();
    assert_eq!(id_token_keys(&keys), ["s3 RS256 Published"]);
}

#[test]
fn a_chain_for_id_tokens_has_at_most_60_keys_and_never_blocks_the_app() {
    let policy = |value: usize| KeyPolicy {
        rotate_request: Some(value.to_string()),
        algorithm: ES256,
        ..with_id_tokens(&[RS256])
    };
    let mut keys = advanced(&first(), &with_id_tokens(&[RS256]), NOW);
    let key = keys.id_tokens[0].clone();
    for number in 100..100 + MAX_KEYS - 1 {
        let mut retired = key.clone();
        retired.key.id = format!("s{number}");
        retired.key.state = KeyState::Retired;
        keys.id_tokens.insert(0, retired);
    }
    assert_eq!(keys.validate(&shop()), Ok(()));
    let rotating = advanced(&keys, &policy(1), NOW);
    assert_eq!((rotating.id_tokens.len(), rotating.rotation.as_deref()), (MAX_KEYS, Some("1")));
    assert_eq!(rotating.request_error(&policy(1)), None, "the rotation of the App goes on");
    assert!(rotating.signing.iter().any(|stored| stored.key.state == KeyState::Published));
}
