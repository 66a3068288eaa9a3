use latchkey_crds::rendered::SigningAlgorithm::{ES256, EdDSA};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;

const NOW: OffsetDateTime = time::macros::datetime!(2026-11-21 12:00 UTC);

fn shop() -> AppId {
    "shop".parse().unwrap()
}

fn policy() -> KeyPolicy {
    KeyPolicy {
        algorithm: ES256,
        access_seconds: 900,
        session_seconds: 7_776_000,
        rotation_days: 90,
        rotate: None,
        revoke: None,
        new_keys: None,
    }
}

/// All that is due now, with every pod answering at once.
#[track_caller]
fn settled(keys: &KeyDocument, policy: &KeyPolicy, now: OffsetDateTime) -> KeyDocument {
    let mut keys = keys.clone();
    for _ in 0..8 {
        match keys.step(policy, now, true).unwrap() {
            Some(next) => keys = next,
            None => return keys,
        }
    }
    panic!("the keys never come to rest: {keys:?}");
}

/// What is there, such as `s1 Active`.
fn states(keys: &KeyDocument) -> (Vec<String>, Vec<String>) {
    let show = |id: &str, state: KeyState| format!("{id} {state:?}");
    (
        keys.signing.iter().map(|kept| show(&kept.key.id, kept.key.state)).collect(),
        keys.hmac.iter().map(|kept| show(&kept.key.id, kept.key.state)).collect(),
    )
}

#[track_caller]
fn assert_states(keys: &KeyDocument, signing: &[&str], hmac: &[&str]) {
    let (found_signing, found_hmac) = states(keys);
    assert_eq!((found_signing, found_hmac), (owned(signing), owned(hmac)));
    assert_eq!(keys.check(&shop()), Ok(()));
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn first() -> KeyDocument {
    KeyDocument::first_of(&shop(), &policy(), NOW).unwrap()
}

fn asked(value: &str) -> KeyPolicy {
    KeyPolicy { rotate: Some(value.to_owned()), ..policy() }
}

fn revoking(id: &str) -> KeyPolicy {
    KeyPolicy { revoke: Some(id.to_owned()), ..policy() }
}

#[test]
fn first_keys_are_active_at_once_and_of_an_incarnation_of_their_own() {
    let keys = first();
    assert_states(&keys, &["s1 Active"], &["h1 Active"]);
    assert!(keys.incarnation.is_some() && keys.incarnation != first().incarnation && keys.handover == 0);
    assert_eq!(keys.step(&policy(), NOW, true), Ok(None));
    assert_eq!(keys.step(&policy(), NOW, false), Ok(None));
}

#[test]
fn keys_are_replaced_when_their_days_are_over_and_dropped_when_nothing_under_them_is_left() {
    let (keys, policy) = (first(), policy());
    let published = NOW + Duration::days(89);
    assert_eq!(keys.due(&policy, NOW), Some(published));
    let keys = settled(&keys, &policy, published);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Active"]);

    let replaced = NOW + Duration::days(90);
    assert_eq!(keys.due(&policy, published), Some(replaced));
    let keys = settled(&keys, &policy, replaced);
    assert_states(&keys, &["s1 Retired", "s2 Active"], &["h1 Retired", "h2 Active"]);

    let signing_end = replaced + Duration::seconds(900) + MARGIN;
    assert_eq!(keys.due(&policy, replaced), Some(signing_end));
    let keys = settled(&keys, &policy, signing_end);
    assert_states(&keys, &["s2 Active"], &["h1 Retired", "h2 Active"]);

    let keys = settled(&keys, &policy, replaced + Duration::days(90) + MARGIN);
    assert!(keys.hmac.iter().all(|kept| kept.key.id != "h1"), "{keys:?}");
}

#[test]
fn a_key_makes_nothing_before_every_pod_knows_it() {
    let policy = asked("leak");
    let keys = first().step(&policy, NOW, true).unwrap().unwrap();
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Active", "h2 Published"]);
    // A pod is a revision behind, for days.
    let later = NOW + Duration::days(3);
    assert_eq!(keys.step(&policy, later, false), Ok(None));
    // Then all have it: servers alone read what an HMAC key makes, others ask for signing keys now and then.
    let keys = keys.step(&policy, later, true).unwrap().unwrap();
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]);
    assert_eq!(keys.hmac[0].life.not_after, None, "a pod that is behind still makes tokens under it");
    let keys = keys.step(&policy, later, true).unwrap().unwrap();
    assert!(keys.hmac[0].life.not_after.is_some());

    let ready = later + PUBLISHED_FIRST_IF_ASKED;
    assert_eq!(keys.due(&policy, later), Some(ready));
    assert_eq!(keys.step(&policy, ready, false), Ok(None), "a pod that is new does not know it yet");
    assert_states(&settled(&keys, &policy, ready), &["s1 Retired", "s2 Active"], &["h1 Retired", "h2 Active"]);
}

#[test]
fn a_value_of_the_annotation_rotates_once() {
    let keys = settled(&first(), &asked("1"), NOW);
    assert_eq!(keys.rotation.as_deref(), Some("1"));
    // It is never taken away, and taking it away asks for nothing.
    let later = NOW + Duration::days(1);
    let keys = settled(&keys, &asked("1"), later);
    assert_states(&keys, &["s1 Retired", "s2 Active"], &["h1 Retired", "h2 Active"]);
    assert_eq!(keys.step(&policy(), later, true), Ok(None));
    assert_eq!(keys.step(&asked("1"), later, true), Ok(None));
    let keys = settled(&keys, &asked("2"), later);
    assert_states(&keys, &["s1 Retired", "s2 Active", "s3 Published"], &["h1 Retired", "h2 Retired", "h3 Active"]);
}

#[test]
fn what_is_asked_of_first_keys_was_asked_of_keys_before_them() {
    let policy = KeyPolicy {
        rotate: Some("1".to_owned()),
        revoke: Some("s1".to_owned()),
        new_keys: Some("1".to_owned()),
        ..policy()
    };
    let keys = KeyDocument::first_of(&shop(), &policy, NOW).unwrap();
    assert_states(&keys, &["s2 Active"], &["h1 Active"]);
    assert_eq!(keys.step(&policy, NOW, true), Ok(None));
    assert_eq!(keys.problem(&policy), None);
}

#[test]
fn a_rotation_that_is_asked_for_hurries_the_one_on_its_way() {
    let published = NOW + Duration::days(89);
    let keys = settled(&first(), &policy(), published);
    let keys = settled(&keys, &asked("now"), published);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]);
    let ready = published + PUBLISHED_FIRST_IF_ASKED;
    assert_eq!(keys.due(&asked("now"), published), Some(ready));
    assert_eq!(settled(&keys, &asked("now"), ready).signing[1].key.state, KeyState::Active);
}

#[test]
fn another_algorithm_is_a_rotation_and_can_be_taken_back() {
    let other = KeyPolicy { algorithm: EdDSA, ..policy() };
    let keys = settled(&first(), &other, NOW);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Active"]);
    assert_eq!(keys.due(&other, NOW), Some(NOW + PUBLISHED_FIRST));
    let back = settled(&keys, &policy(), NOW);
    assert_states(&back, &["s1 Active"], &["h1 Active"]);
    // The id is not given again.
    assert_states(&settled(&back, &other, NOW), &["s1 Active", "s3 Published"], &["h1 Active"]);
    let changed = settled(&keys, &other, NOW + PUBLISHED_FIRST);
    assert_states(&changed, &["s1 Retired", "s2 Active"], &["h1 Active"]);
    assert_eq!(changed.signing[1].key.algorithm, EdDSA);
}

#[test]
fn a_revoked_key_goes_at_once_and_another_takes_its_place() {
    // No pod has to know: nothing may be made under the leaked one any more.
    let keys = first().step(&revoking("s1"), NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s2 Active"], &["h1 Active"]);
    assert_eq!(keys.step(&revoking("s1"), NOW, true), Ok(None));
    let keys = keys.step(&revoking("h1"), NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s2 Active"], &["h2 Active"]);
    assert_eq!(keys.revoked, ["s1", "h1"]);

    // One that is published is there to be taken.
    let rotating = first().step(&asked("1"), NOW, false).unwrap().unwrap();
    let policy = KeyPolicy { revoke: Some("s1".to_owned()), ..asked("1") };
    let keys = rotating.step(&policy, NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s2 Active"], &["h1 Active", "h2 Published"]);

    // And one that was asked for is made again where it is the one that goes.
    let policy = KeyPolicy { revoke: Some("s2".to_owned()), ..asked("1") };
    let keys = rotating.step(&policy, NOW, false).unwrap().unwrap();
    assert_states(&keys, &["s1 Active", "s3 Published"], &["h1 Active", "h2 Published"]);
    assert!(keys.signing[1].life.asked);
}

#[test]
fn a_revoked_key_does_not_come_back_from_a_copy() {
    let copy = first();
    let mut keys = settled(&copy, &revoking("h1"), NOW);
    keys.hmac.insert(0, copy.hmac[0].clone());
    keys.hmac[0].key.state = KeyState::Retired;
    let keys = settled(&keys, &policy(), NOW);
    assert_states(&keys, &["s1 Active"], &["h2 Active"]);
}

#[test]
fn an_id_that_was_never_given_is_told_and_is_not_given_later() {
    let keys = first();
    for bad in ["s2", "h7", "x", "s", "s01"] {
        assert_eq!(keys.step(&revoking(bad), NOW, true), Ok(None), "{bad}");
        let problem = keys.problem(&revoking(bad)).unwrap();
        assert!(problem.contains("names no key of this App; set it to an id of status"), "{problem}");
    }
    assert_eq!(keys.problem(&revoking("s1")), None);
    let policy = KeyPolicy { revoke: Some("s2".to_owned()), ..asked("1") };
    let keys = settled(&keys, &policy, NOW);
    assert_states(&keys, &["s1 Active", "s3 Published"], &["h1 Retired", "h2 Active"]);
}

#[test]
fn a_session_that_outlives_its_key_finds_the_keys_after_it() {
    // A session of two years is opened, then sessions become short, then its key leaks.
    let long = KeyPolicy { session_seconds: LONGEST_SESSION, ..policy() };
    let short = KeyPolicy { session_seconds: 300, ..policy() };
    let keys = KeyDocument::first_of(&shop(), &long, NOW).unwrap();
    let end = NOW + Duration::seconds(LONGEST_SESSION.into());
    let rotated = settled(&keys, &KeyPolicy { rotate: Some("1".to_owned()), ..short.clone() }, NOW);
    let rotated = settled(&rotated, &KeyPolicy { rotate: Some("2".to_owned()), ..short.clone() }, NOW);
    let ends = rotated.hmac.iter().map(|kept| kept.life.not_after).collect::<Vec<_>>();
    assert_eq!(ends, [Some(end + MARGIN), Some(end + MARGIN), None]);

    let revoked = settled(&keys, &KeyPolicy { revoke: Some("h1".to_owned()), ..short }, NOW);
    assert_eq!(revoked.hmac[0].life.longest_seconds, Some(LONGEST_SESSION));
}

#[test]
fn a_session_goes_on_under_a_key_whose_end_is_not_known_yet_when_its_own_is_revoked() {
    let short = |value: &str| KeyPolicy { session_seconds: 300, ..asked(value) };
    let long = KeyPolicy { session_seconds: LONGEST_SESSION, ..policy() };
    let keys = settled(&KeyDocument::first_of(&shop(), &long, NOW).unwrap(), &short("1"), NOW);
    let end = keys.hmac[0].life.not_after.unwrap();
    // h3 follows h2, and no pod has told that it knows so.
    let mut keys = keys;
    while keys.hmac.len() < 3 || keys.hmac[2].key.state != KeyState::Active {
        keys = keys.step(&short("2"), NOW, true).unwrap().unwrap();
    }
    assert_eq!((keys.hmac[1].key.state, keys.hmac[1].life.not_after), (KeyState::Retired, None));
    let policy = KeyPolicy { revoke: Some("h1".to_owned()), ..short("2") };
    let keys = keys.step(&policy, NOW, false).unwrap().unwrap();
    let keys = settled(&keys, &policy, NOW);
    assert_eq!(keys.hmac[0].key.id, "h2");
    assert!(keys.hmac[0].life.not_after.unwrap() >= end);
}

#[test]
fn new_keys_start_anew_once_with_ids_above_all_before() {
    let policy = KeyPolicy { new_keys: Some("lost".to_owned()), ..policy() };
    let old = first();
    let keys = old.step(&policy, NOW, false).unwrap().unwrap();
    assert!(keys.handover > 29_000_000 && keys.incarnation.is_some() && keys.incarnation != old.incarnation);
    assert_eq!((keys.signing.len(), keys.hmac.len()), (1, 1));
    assert!(keys.last().hmac > 29_000_000, "{keys:?}");
    assert!(keys.hmac[0].key.id.len() <= 16);
    assert_eq!(keys.check(&shop()), Ok(()));
    assert_eq!(keys.step(&policy, NOW, true), Ok(None));
    let again = keys.step(&KeyPolicy { new_keys: Some("again".to_owned()), ..policy }, NOW, true).unwrap().unwrap();
    assert_eq!(again.last().hmac, keys.last().hmac + 1);
}

#[test]
fn keys_of_a_document_are_kept_for_as_long_as_anything_may_live() {
    let mut keys = settled(&first(), &asked("1"), NOW);
    // What a rendered document tells of them.
    keys.last = LastNumbers::default();
    for kept in &mut keys.signing {
        kept.life = Life::default();
    }
    for kept in &mut keys.hmac {
        kept.life = Life::default();
    }
    let keys = settled(&keys.rebuilt(&asked("1")), &asked("1"), NOW);
    assert_states(&keys, &["s1 Active", "s2 Published"], &["h1 Retired", "h2 Active"]);
    assert_eq!(keys.hmac[0].life.not_after, Some(NOW + Duration::seconds(LONGEST_SESSION.into()) + MARGIN));
    let keys = settled(&keys, &asked("2"), NOW);
    assert_eq!(keys.hmac.last().unwrap().key.id, "h103", "what was dropped before is not known");
}

#[test]
fn a_rotation_waits_where_too_many_keys_are_kept() {
    let mut keys = first();
    for turn in 0..MOST {
        keys = settled(&keys, &asked(&turn.to_string()), NOW + Duration::minutes(turn.try_into().unwrap()));
    }
    let full = asked("more");
    let now = NOW + Duration::hours(12);
    let keys = settled(&keys, &full, now);
    assert_eq!(keys.hmac.len(), MOST);
    assert!(keys.problem(&full).unwrap().contains("waits"));
    // A revocation needs no more room; the first that ends makes some.
    assert_eq!(settled(&keys, &revoking("h60"), now).hmac.len(), MOST);
    let end = keys.hmac[0].life.not_after.unwrap();
    let later = settled(&keys, &full, end);
    assert_eq!((later.rotation.as_deref(), later.problem(&full)), (Some("more"), None));
}

#[test]
fn the_status_tells_ids_states_and_ends() {
    let keys = settled(&first(), &asked("1"), NOW);
    let (signing, hmac) = keys.status(&policy());
    let at = |time: OffsetDateTime| Some(Time(Timestamp::from_second(time.unix_timestamp()).unwrap()));
    let status = |id: &str, state, not_after| KeyStatus { id: id.to_owned(), state, not_after };
    let replaced = at(NOW + Duration::days(90));
    assert_eq!(signing, [status("s1", KeyState::Active, replaced.clone()), status("s2", KeyState::Published, None)]);
    let end = at(NOW + Duration::days(90) + MARGIN);
    assert_eq!(hmac, [status("h1", KeyState::Retired, end), status("h2", KeyState::Active, replaced)]);
}

#[test]
fn a_long_value_is_remembered_by_its_digest() {
    let value = "a".repeat(65);
    assert_eq!((short(&value).len(), short("1")), (71, "1".to_owned()));
    assert_ne!(short(&value), short(&"a".repeat(66)));
}

#[test]
fn keys_written_before_there_were_dates_are_read() {
    let keys = KeyDocument::first(&shop(), ES256, NOW).unwrap();
    let mut old = serde_json::to_value(&keys).unwrap();
    for name in ["last", "rotation", "newKeys", "revoked", "incarnation"] {
        old.as_object_mut().unwrap().remove(name);
    }
    for sort in ["signing", "hmac"] {
        old[sort][0].as_object_mut().unwrap().remove("activatedAt");
    }
    let read: KeyDocument = serde_json::from_value(old).unwrap();
    assert_eq!(read.check(&shop()), Ok(()));
    assert_eq!(read.due(&policy(), NOW), Some(NOW + Duration::days(89)));
    let rotated = settled(&read, &asked("1"), NOW);
    let text = serde_json::to_string(&rotated).unwrap();
    assert_eq!(serde_json::from_str::<KeyDocument>(&text).unwrap(), rotated);
}

/// A server pod's documents: the keys and what the App said when they were rendered.
#[derive(Clone)]
struct Served {
    keys: KeyDocument,
    policy: KeyPolicy,
}

struct Session {
    ends: OffsetDateTime,
    /// The HMAC keys under which it has a refresh token.
    keys: Vec<String>,
}

/// An App with pods of which some are behind, over months that pass at random.
struct Walk {
    random: StdRng,
    now: OffsetDateTime,
    policy: KeyPolicy,
    /// Every document that some pod may still serve, the newest last.
    served: Vec<Served>,
    access: Vec<(String, OffsetDateTime)>,
    sessions: Vec<Session>,
    ids: std::collections::BTreeMap<String, String>,
    revoked: Vec<String>,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut walk = Self {
            random: StdRng::seed_from_u64(seed),
            now: NOW,
            policy: KeyPolicy { rotation_days: 7, session_seconds: 20 * 86_400, ..policy() },
            served: Vec::new(),
            access: Vec::new(),
            sessions: Vec::new(),
            ids: std::collections::BTreeMap::new(),
            revoked: Vec::new(),
        };
        let keys = KeyDocument::first_of(&shop(), &walk.policy, NOW).unwrap();
        walk.publish(keys, false);
        walk
    }

    fn newest(&self) -> &Served {
        self.served.last().unwrap()
    }

    fn publish(&mut self, keys: KeyDocument, knows_no_wait: bool) {
        assert_eq!(keys.check(&shop()), Ok(()), "exactly one is Active, no id is there twice");
        for (id, secret) in secrets(&keys) {
            let known = self.ids.entry(id.clone()).or_insert_with(|| secret.clone());
            assert_eq!(*known, secret, "{id} is another key");
            assert!(!self.revoked.contains(&id), "{id} came back");
        }
        if let (false, Some(before)) = (knows_no_wait, self.served.last()) {
            for (id, was) in
                [(active(&keys.signing), active(&before.keys.signing)), (active(&keys.hmac), active(&before.keys.hmac))]
            {
                if id != was {
                    let knows = |served: &Served| secrets(&served.keys).any(|(known, _)| known == id);
                    assert!(self.served.iter().all(knows), "a pod does not know {id}");
                }
            }
        }
        self.served.push(Served { keys, policy: self.policy.clone() });
    }

    /// What pods make now: each may serve any of the documents.
    fn mint(&mut self) {
        let at = self.random.random_range(0..self.served.len());
        let Served { keys, policy } = self.served[at].clone();
        let access = self.now + Duration::seconds(policy.access_seconds.into());
        let (signing, hmac) = (active(&keys.signing), active(&keys.hmac));
        // What a pod that is behind makes under a revoked key is refused by the others, as it should be.
        if !self.revoked.contains(&signing) {
            self.access.push((signing, access));
        }
        if self.revoked.contains(&hmac) {
            return;
        }
        if self.random.random_bool(0.5) {
            let ends = self.now + Duration::seconds(policy.session_seconds.into());
            self.sessions.push(Session { ends, keys: vec![hmac] });
        } else if !self.sessions.is_empty() {
            // A refresh, or a call that goes on with the session: neither moves its end.
            let at = self.random.random_range(0..self.sessions.len());
            if self.sessions[at].ends > self.now {
                self.sessions[at].keys.push(hmac);
            }
        }
    }

    fn change_policy(&mut self) {
        match self.random.random_range(0..8) {
            0 => self.policy.algorithm = if self.random.random_bool(0.5) { ES256 } else { EdDSA },
            1 => self.policy.access_seconds = self.random.random_range(60..=86_400),
            2 => self.policy.session_seconds = self.random.random_range(300..=40 * 86_400),
            3 => self.policy.rotation_days = self.random.random_range(7..=30),
            4 | 5 => self.policy.rotate = Some(self.random.random_range(0..1000).to_string()),
            _ => {
                let ids = secrets(&self.newest().keys).map(|(id, _)| id).collect::<Vec<_>>();
                let id = ids[self.random.random_range(0..ids.len())].clone();
                self.policy.revoke = Some(id);
            }
        }
    }

    fn reconcile(&mut self) {
        let acknowledged = self.served.len() == 1;
        let before = self.newest().clone();
        let next = before.keys.step(&self.policy, self.now, acknowledged).unwrap();
        let keys = next.clone().unwrap_or_else(|| before.keys.clone());
        if let Some(id) = &self.policy.revoke
            && secrets(&before.keys).any(|(known, _)| known == *id)
        {
            self.revoked.push(id.clone());
            self.access.retain(|(key, _)| key != id);
            for session in &mut self.sessions {
                session.keys.retain(|key| key != id);
            }
        }
        assert_eq!(keys.step(&self.policy, self.now, false), Ok(None), "a step leaves nothing that is due now");
        if next.is_some() || before.policy != self.policy {
            let revokes = self.policy.revoke != before.policy.revoke;
            // What is kept of the keys' lives is not part of what is served.
            if before.policy == self.policy && say_the_same(&keys, &before.keys) {
                self.served.last_mut().unwrap().keys = keys;
            } else {
                self.publish(keys, revokes);
            }
        }
    }

    fn check(&mut self) {
        let now = self.now;
        self.access.retain(|(_, ends)| *ends > now);
        self.sessions.retain(|session| session.ends > now);
        for served in &self.served[self.served.len() - 1..] {
            let known = secrets(&served.keys).map(|(id, _)| id).collect::<Vec<_>>();
            for (key, ends) in &self.access {
                assert!(known.contains(key), "an access token under {key} until {ends} finds no key at {now}");
            }
            for session in &self.sessions {
                for key in &session.keys {
                    assert!(known.contains(key), "a session until {} finds no {key} at {now}", session.ends);
                }
            }
        }
    }

    /// Nothing is due before `due`, and something is then.
    fn check_due(&mut self) {
        let keys = settled(&self.newest().keys, &self.policy, self.now);
        let Some(due) = keys.due(&self.policy, self.now) else { panic!("an Active key is always replaced once") };
        let between = self.random.random_range(0..(due - self.now).whole_seconds());
        let before = self.now + Duration::seconds(between);
        assert_eq!(keys.step(&self.policy, before, true), Ok(None), "before {due}");
        assert!(keys.step(&self.policy, due, true).unwrap().is_some(), "at {due}");
    }

    fn step(&mut self) {
        let longest = if self.random.random_bool(0.5) { 600 } else { 2 * 86_400 };
        self.now += Duration::seconds(self.random.random_range(0..longest));
        if self.random.random_bool(0.1) {
            self.change_policy();
        }
        // Pods catch up: all of them, or some.
        let behind = if self.random.random_bool(0.6) { 1 } else { self.random.random_range(1..=self.served.len()) };
        self.served.drain(..self.served.len() - behind);
        self.mint();
        self.reconcile();
        self.mint();
        self.check();
        self.check_due();
    }
}

fn active<K: Kept>(keys: &[K]) -> String {
    keys[position(keys, KeyState::Active).unwrap()].id().to_owned()
}

fn secrets(keys: &KeyDocument) -> impl Iterator<Item = (String, String)> {
    let signing = keys.signing.iter().map(|kept| (kept.key.id.clone(), kept.key.private_key.expose().to_owned()));
    let hmac = keys.hmac.iter().map(|kept| (kept.key.id.clone(), kept.key.secret.expose().to_owned()));
    signing.chain(hmac)
}

/// Whether servers are told the same.
fn say_the_same(one: &KeyDocument, other: &KeyDocument) -> bool {
    states(one) == states(other) && secrets(one).eq(secrets(other))
}

#[test]
fn whatever_happens_every_token_finds_its_key_until_it_ends() {
    for seed in 0..100 {
        let mut walk = Walk::new(seed);
        for _ in 0..400 {
            walk.step();
        }
        assert!(walk.ids.len() > 10, "keys were made");
    }
}
