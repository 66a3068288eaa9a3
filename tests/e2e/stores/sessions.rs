//! Sessions and epochs: which sessions exist, what ends a session, and that a user's epoch never decreases. Raising the
//! epoch ends the user's sessions.

use std::collections::BTreeMap;

use latchkey_crds::rendered::{LimitName, Window};
use latchkey_server::{
    domain::{
        mail::EpochChange,
        ports::{AcquireError, RateLimits, Replication, Sessions},
        rate_limits::RateLimitCheck,
        session::{
            Amr, LiveSession, NewSession, OpenOutcome, Profile, RefreshKind, RefreshOutcome, RefreshRules, Session,
            SessionId,
        },
        token::RefreshToken,
        user::{Epoch, UserId},
    },
    store::Stores,
};
use latchkey_tests::{eventually, redis};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use time::Duration;
use uuid::Uuid;

use super::{Fixture, LIMIT, a_user_id, an_app, now, stores};

const IDLE_SECONDS: u32 = 3600;

fn a_profile(version: i64, name: &str) -> Profile {
    let email = Some("ada@example.com".to_owned());
    Profile { version, email, email_verified: true, name: name.to_owned() }
}

fn a_session(user: UserId, epoch: i64) -> NewSession {
    NewSession {
        kind: None,
        id: SessionId(Uuid::from_u128(rand::random())),
        user,
        epoch: Epoch(epoch),
        profile: a_profile(1, "Ada"),
        amr: Amr::Password,
        auth_time: now(),
        ip: "2001:db8::1".to_owned(),
        user_agent: Some("curl/8.0".to_owned()),
        ends_at: now() + Duration::hours(3),
        idle_seconds: IDLE_SECONDS,
    }
}

async fn open_session(fixture: &Fixture, user: UserId, epoch: i64) -> NewSession {
    let session = a_session(user, epoch);
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), OpenOutcome::Opened);
    session
}

async fn session_epoch(stores: &Stores, fixture: &Fixture, session: &NewSession) -> Option<i64> {
    let session = stores.session(&fixture.app, session.user, session.id).await.unwrap();
    session.map(|live| live.session.epoch.0)
}

async fn raise_epoch(fixture: &Fixture, user: UserId, epoch: i64, keep: Option<SessionId>) {
    let epoch_change = EpochChange { user, epoch: Epoch(epoch), kept_session: keep };
    assert_eq!(
        fixture.stores.raise_epoch(&fixture.app, &epoch_change, Some(&a_profile(1, "Ada"))).await.unwrap(),
        Replication::Complete,
        "there is no replica"
    );
}

#[tokio::test]
async fn an_opened_session_exists_only_for_its_user_and_app() {
    let fixture = Fixture::new().await;
    let new_session = open_session(&fixture, a_user_id(), 3).await;
    let stores = &fixture.stores;
    let LiveSession { session: found, profile } =
        stores.session(&fixture.app, new_session.user, new_session.id).await.unwrap().unwrap();
    assert_eq!(profile, new_session.profile);
    let opened = Session::opened(&new_session);
    assert_eq!((found.id, found.user, found.epoch), (opened.id, opened.user, opened.epoch));
    assert_eq!((found.generation, found.amr), (1, Amr::Password));
    assert_eq!(found.auth_time.unix_timestamp(), new_session.auth_time.unix_timestamp());
    assert!(stores.session(&an_app(), new_session.user, new_session.id).await.unwrap().is_none());
    assert!(stores.session(&fixture.app, a_user_id(), new_session.id).await.unwrap().is_none());
    assert!(stores.session(&fixture.app, new_session.user, SessionId(Uuid::from_u128(1))).await.unwrap().is_none());
}

#[tokio::test]
async fn a_session_ends_when_idle_and_at_the_end_of_its_lifetime() {
    let fixture = Fixture::new().await;
    let session = open_session(&fixture, a_user_id(), 1).await;
    let idle = Duration::seconds(IDLE_SECONDS.into());
    // A lookup counts as a use, after which the idle time starts again.
    let half_an_hour = fixture.with_later_clock(idle / 2).await;
    assert!(session_epoch(&half_an_hour, &fixture, &session).await.is_some());
    let much_later = fixture.with_later_clock(idle + Duration::minutes(20)).await;
    assert!(session_epoch(&much_later, &fixture, &session).await.is_some());
    let after_idle_time = fixture.with_later_clock(idle * 2 + Duration::minutes(21)).await;
    assert!(session_epoch(&after_idle_time, &fixture, &session).await.is_none());
    assert!(session_epoch(&fixture.stores, &fixture, &session).await.is_none(), "ended for good");

    let session = open_session(&fixture, a_user_id(), 1).await;
    for minutes in (30..180).step_by(30) {
        let later = fixture.with_later_clock(Duration::minutes(minutes)).await;
        assert!(session_epoch(&later, &fixture, &session).await.is_some(), "after {minutes} min");
    }
    let end = fixture.with_later_clock(Duration::minutes(181)).await;
    assert!(session_epoch(&end, &fixture, &session).await.is_none());
}

#[tokio::test]
async fn a_raised_epoch_ends_every_session_except_the_kept_session() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let (kept, ended) = (open_session(&fixture, user, 1).await, open_session(&fixture, user, 1).await);
    let stranger = open_session(&fixture, a_user_id(), 1).await;
    raise_epoch(&fixture, user, 2, Some(kept.id)).await;
    assert_eq!(session_epoch(&fixture.stores, &fixture, &kept).await, Some(2));
    assert_eq!(session_epoch(&fixture.stores, &fixture, &ended).await, None);
    assert_eq!(session_epoch(&fixture.stores, &fixture, &stranger).await, Some(1));
    raise_epoch(&fixture, user, 3, None).await;
    assert_eq!(session_epoch(&fixture.stores, &fixture, &kept).await, None);
}

#[tokio::test]
async fn an_epoch_never_decreases_and_late_epoch_changes_end_nothing() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    raise_epoch(&fixture, user, 5, None).await;
    let session = open_session(&fixture, user, 5).await;
    for (epoch, keep) in [(4, None), (5, None), (4, Some(session.id))] {
        raise_epoch(&fixture, user, epoch, keep).await;
        assert_eq!(
            session_epoch(&fixture.stores, &fixture, &session).await,
            Some(5),
            "after a change to epoch {epoch}"
        );
    }
    let stale = fixture.stores.open_session(&fixture.app, &a_session(user, 4)).await.unwrap();
    assert_eq!(stale, OpenOutcome::EpochRaised);
}

#[tokio::test]
async fn a_login_that_raced_a_reset_leaves_nothing_behind() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let session = a_session(user, 1);
    raise_epoch(&fixture, user, 2, None).await;
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), OpenOutcome::EpochRaised);
    assert_eq!(session_epoch(&fixture.stores, &fixture, &session).await, None);
}

#[tokio::test]
async fn a_login_at_a_newer_epoch_ends_older_sessions_until_the_epoch_change_restores_the_kept_session() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let (kept, ended) = (open_session(&fixture, user, 1).await, open_session(&fixture, user, 1).await);
    let newer_session = open_session(&fixture, user, 2).await;
    assert_eq!(session_epoch(&fixture.stores, &fixture, &ended).await, None);
    assert_eq!(session_epoch(&fixture.stores, &fixture, &kept).await, None);
    raise_epoch(&fixture, user, 2, Some(kept.id)).await;
    assert_eq!(session_epoch(&fixture.stores, &fixture, &kept).await, Some(2));
    assert_eq!(session_epoch(&fixture.stores, &fixture, &newer_session).await, Some(2));
    assert_eq!(session_epoch(&fixture.stores, &fixture, &ended).await, None);
}

#[tokio::test]
async fn the_hundred_and_first_session_ends_the_least_recently_used_session() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let mut sessions = Vec::new();
    for number in 0..100 {
        // By Redis's clock, each session is opened a second after the previous one.
        let stores = fixture.with_later_clock(Duration::seconds(number)).await;
        let session = a_session(user, 1);
        stores.open_session(&fixture.app, &session).await.unwrap();
        sessions.push(session);
    }
    // The first session is used again, so the second one is the least recently used.
    let later = fixture.with_later_clock(Duration::minutes(5)).await;
    assert!(session_epoch(&later, &fixture, &sessions[0]).await.is_some());
    let last = a_session(user, 1);
    later.open_session(&fixture.app, &last).await.unwrap();
    let mut live = Vec::new();
    for (number, session) in sessions.iter().enumerate() {
        if session_epoch(&later, &fixture, session).await.is_some() {
            live.push(number);
        }
    }
    assert_eq!(live, (0..100).filter(|number| *number != 1).collect::<Vec<_>>());
    assert!(session_epoch(&later, &fixture, &last).await.is_some());
}

#[tokio::test]
async fn all_session_keys_expire_in_redis() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    open_session(&fixture, user, 1).await;
    raise_epoch(&fixture, user, 2, None).await;
    open_session(&fixture, user, 2).await;
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let keys: Vec<String> =
        ::redis::cmd("KEYS").arg(format!("lk:{{{}:{user}}}:*", fixture.app)).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in keys {
        let ttl: i64 = ::redis::cmd("TTL").arg(&key).query_async(&mut redis).await.unwrap();
        assert!(ttl > 0, "{key} has a TTL of {ttl} s");
        if key.ends_with(":user") {
            assert!(ttl > 730 * 24 * 60 * 60, "an epoch outlives the longest session: {ttl} s");
        }
    }
}

#[tokio::test]
async fn an_epoch_change_is_complete_only_when_a_replica_has_it() {
    let primary = redis::Redis::start(redis::Options::for_tests()).await.unwrap();
    let options = redis::Options { replica_of: Some(primary.addr()), ..redis::Options::for_tests() };
    let replica = redis::Redis::start(options).await.unwrap();
    let connection = primary.connect().await.unwrap();
    eventually("the replica is online", LIMIT, async || {
        let mut connection = connection.clone();
        let info: String = ::redis::cmd("INFO").arg("replication").query_async(&mut connection).await.unwrap();
        info.contains("state=online").then_some(())
    })
    .await;
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &primary.url());
    let (app, user) = (an_app(), a_user_id());
    let epoch_change = |epoch| EpochChange { user, epoch: Epoch(epoch), kept_session: None };
    eventually("a replica acknowledges", LIMIT, async || {
        let replication = stores.raise_epoch(&app, &epoch_change(2), None).await.unwrap();
        (replication == Replication::Complete).then_some(())
    })
    .await;
    replica.process().signal(rustix::process::Signal::STOP);
    let started = std::time::Instant::now();
    assert_eq!(stores.raise_epoch(&app, &epoch_change(3), None).await.unwrap(), Replication::Unconfirmed);
    assert!(started.elapsed() < std::time::Duration::from_secs(1), "took {:?}", started.elapsed());
    // Only epoch changes wait for a replica. A session opens without an acknowledgement.
    assert_eq!(stores.open_session(&app, &a_session(user, 3)).await.unwrap(), OpenOutcome::Opened);
    replica.process().signal(rustix::process::Signal::CONT);
}

#[tokio::test]
async fn an_epoch_change_in_a_cluster_is_complete_only_when_a_replica_of_its_node_has_it() {
    let cluster = redis::RedisCluster::start_with(&redis::Options::for_tests(), true).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &cluster.url());
    let app = an_app();
    let stopped_replica = 1;
    cluster.replicas[stopped_replica].process().signal(rustix::process::Signal::STOP);
    for _ in 0..12 {
        let user = a_user_id();
        let slot = cluster.slot_of(&format!("lk:{{{app}:{user}}}:user")).await.unwrap();
        let expected = if cluster.owner(slot).await.unwrap() == stopped_replica {
            Replication::Unconfirmed
        } else {
            Replication::Complete
        };
        let epoch_change = EpochChange { user, epoch: Epoch(2), kept_session: None };
        // The call is repeated, because on a loaded machine even a running replica can respond later than the store
        // waits.
        eventually("the result matches the state of the replica", LIMIT, async || {
            let replication = stores.raise_epoch(&app, &epoch_change, None).await.unwrap();
            (replication == expected).then_some(())
        })
        .await;
    }
    cluster.replicas[stopped_replica].process().signal(rustix::process::Signal::CONT);
}

async fn profile_name(fixture: &Fixture, session: &NewSession) -> String {
    fixture.stores.session(&fixture.app, session.user, session.id).await.unwrap().unwrap().profile.name
}

#[tokio::test]
async fn an_older_profile_never_replaces_a_newer_profile() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let session = open_session(&fixture, user, 1).await;
    fixture.stores.store_profile(&fixture.app, user, &a_profile(3, "Third")).await.unwrap();
    assert_eq!(profile_name(&fixture, &session).await, "Third");
    fixture.stores.store_profile(&fixture.app, user, &a_profile(2, "Second")).await.unwrap();
    assert_eq!(profile_name(&fixture, &session).await, "Third");
    // A login and an epoch change that have read the user before the rename do not restore the old name either.
    open_session(&fixture, user, 1).await;
    assert_eq!(profile_name(&fixture, &session).await, "Third");
    raise_epoch(&fixture, user, 2, Some(session.id)).await;
    assert_eq!(profile_name(&fixture, &session).await, "Third");
    fixture.stores.store_profile(&fixture.app, a_user_id(), &a_profile(2, "Nobody")).await.unwrap();
}

#[tokio::test]
async fn only_the_epoch_of_a_deleted_user_is_kept() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    open_session(&fixture, user, 1).await;
    let epoch_change = EpochChange { user, epoch: Epoch(2), kept_session: None };
    fixture.stores.raise_epoch(&fixture.app, &epoch_change, None).await.unwrap();
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let key = format!("lk:{{{}:{user}}}:user", fixture.app);
    let fields: Vec<String> = ::redis::cmd("HGETALL").arg(&key).query_async(&mut redis).await.unwrap();
    assert_eq!(fields, ["epoch", "2"]);
}

#[tokio::test]
async fn a_user_lists_the_live_sessions_and_ends_them() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let (first, second, third) = (
        open_session(&fixture, user, 1).await,
        open_session(&fixture, user, 1).await,
        open_session(&fixture, user, 1).await,
    );
    open_session(&fixture, a_user_id(), 1).await;
    let list_ids = async || {
        let sessions = fixture.stores.sessions(&fixture.app, user).await.unwrap();
        assert!(sessions.iter().all(|info| info.ip == "2001:db8::1" && info.user_agent.as_deref() == Some("curl/8.0")));
        let mut ids: Vec<_> = sessions.into_iter().map(|info| info.id.0).collect();
        ids.sort();
        ids
    };
    let mut expected = vec![first.id.0, second.id.0, third.id.0];
    expected.sort();
    assert_eq!(list_ids().await, expected);
    assert!(fixture.stores.end_session(&fixture.app, user, second.id).await.unwrap());
    assert!(!fixture.stores.end_session(&fixture.app, user, second.id).await.unwrap(), "ended before");
    assert!(!fixture.stores.end_session(&fixture.app, a_user_id(), first.id).await.unwrap(), "not this user's session");
    assert_eq!(session_epoch(&fixture.stores, &fixture, &second).await, None);
    let ended = fixture.stores.end_other_sessions(&fixture.app, user, third.id).await.unwrap();
    assert_eq!(ended, [first.id]);
    assert_eq!(list_ids().await, [third.id.0]);
    let later = fixture.with_later_clock(Duration::seconds(i64::from(IDLE_SECONDS) + 1)).await;
    assert!(later.sessions(&fixture.app, user).await.unwrap().is_empty());
}

/// Refreshes the session at the time that the clock of `stores` shows. Returns the result and the generation of the
/// next token, or 0 if there is no next token.
async fn refresh_session(
    stores: &Stores,
    fixture: &Fixture,
    session: &NewSession,
    generation: u64,
) -> (RefreshOutcome, u64) {
    let token = RefreshToken { user: session.user, session: session.id, generation };
    let rules = RefreshRules { grace_seconds: 30, windows: Vec::new() };
    let outcome = stores.refresh(&fixture.app, &token, &rules).await.unwrap();
    let next = match &outcome {
        RefreshOutcome::Renewed(_, live) => live.session.generation,
        RefreshOutcome::Limited { .. } | RefreshOutcome::ReuseDetected | RefreshOutcome::NotFound => 0,
    };
    (outcome, next)
}

/// The session index and the TTL of the session's key are updated at most once per minute. But every new refresh token
/// counts as a use, for the idle time and for the order of sessions.
#[tokio::test]
async fn a_refresh_within_the_minute_counts_as_a_use() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let first = open_session(&fixture, user, 1).await;
    let stores_at = async |seconds: i64| fixture.with_later_clock(Duration::seconds(seconds)).await;
    let second = a_session(user, 1);
    stores_at(10).await.open_session(&fixture.app, &second).await.unwrap();
    assert_eq!(expect_renewal(&stores_at(50).await, &fixture, &first, 1).await, (RefreshKind::Rotated, 2));

    let listed = stores_at(51).await.sessions(&fixture.app, user).await.unwrap();
    assert_eq!(listed.iter().map(|session| session.id).collect::<Vec<_>>(), [first.id, second.id]);
    let key = format!("lk:{{{}:{user}}}:session:{}", fixture.app, first.id);
    let mut connection = redis::Redis::shared().await.connect().await.unwrap();
    let ttl: u32 = ::redis::cmd("TTL").arg(key).query_async(&mut connection).await.unwrap();
    // Redis counts the TTL by its own clock, by which the session was opened a moment ago. By the clock of `stores_at`,
    // which is ahead, the session was used 50 seconds later. So its key must live 50 seconds longer than the idle time.
    assert!(ttl >= IDLE_SECONDS + 50, "{ttl} s");
    for _ in 0..99 {
        stores_at(52).await.open_session(&fixture.app, &a_session(user, 1)).await.unwrap();
    }
    assert!(session_epoch(&stores_at(53).await, &fixture, &first).await.is_some(), "used more recently");
    assert!(session_epoch(&stores_at(53).await, &fixture, &second).await.is_none(), "the least recently used");
}

async fn expect_renewal(
    stores: &Stores,
    fixture: &Fixture,
    session: &NewSession,
    generation: u64,
) -> (RefreshKind, u64) {
    match refresh_session(stores, fixture, session, generation).await {
        (RefreshOutcome::Renewed(renewal, _), next) => (renewal, next),
        (other, _) => panic!("generation {generation}: {other:?}"),
    }
}

#[tokio::test]
async fn repeated_refreshes_within_the_grace_period_return_the_same_next_token() {
    let fixture = Fixture::new().await;
    let session = open_session(&fixture, a_user_id(), 1).await;
    let stores = &fixture.stores;
    assert_eq!(expect_renewal(stores, &fixture, &session, 1).await, (RefreshKind::Rotated, 2));
    for _ in 0..3 {
        assert_eq!(expect_renewal(stores, &fixture, &session, 1).await, (RefreshKind::Repeated, 2));
    }
    assert_eq!(expect_renewal(stores, &fixture, &session, 2).await, (RefreshKind::Rotated, 3));
    let within_grace = fixture.with_later_clock(Duration::seconds(29)).await;
    assert_eq!(expect_renewal(&within_grace, &fixture, &session, 2).await, (RefreshKind::Repeated, 3));
}

#[tokio::test]
async fn a_lost_response_is_repeated_at_most_five_times_a_day_even_for_racing_tabs() {
    let fixture = Fixture::new().await;
    let session = open_session(&fixture, a_user_id(), 1).await;
    assert_eq!(expect_renewal(&fixture.stores, &fixture, &session, 1).await, (RefreshKind::Rotated, 2));
    for time in 1..=5 {
        let later = fixture.with_later_clock(Duration::minutes(10 * time)).await;
        assert_eq!(expect_renewal(&later, &fixture, &session, 1).await, (RefreshKind::Late, 2), "time {time}");
        assert_eq!(expect_renewal(&later, &fixture, &session, 1).await, (RefreshKind::Repeated, 2), "time {time}");
    }
    let sixth = fixture.with_later_clock(Duration::minutes(70)).await;
    assert_eq!(refresh_session(&sixth, &fixture, &session, 1).await.0, RefreshOutcome::ReuseDetected);
    assert_eq!(
        refresh_session(&sixth, &fixture, &session, 2).await.0,
        RefreshOutcome::NotFound,
        "ended for the owner too"
    );
}

/// A session with a lifetime of a year.
async fn open_session_for_a_year(fixture: &Fixture) -> NewSession {
    let ends_at = now() + Duration::days(365);
    let session = NewSession { ends_at, idle_seconds: 30 * 24 * 3600, ..a_session(a_user_id(), 1) };
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), OpenOutcome::Opened);
    session
}

/// Each day, the owner refreshes at noon and a thief at midnight. Returns the night in which the session ends, or
/// `None` if it does not end.
async fn night_of_detection(fixture: &Fixture, session: &NewSession, nights: i64) -> Option<i64> {
    let (mut owner, mut thief) = (1, 1);
    for night in 1..=nights {
        let noon = fixture.with_later_clock(Duration::days(night)).await;
        (_, owner) = expect_renewal(&noon, fixture, session, owner).await;
        let midnight = fixture.with_later_clock(Duration::days(night) + Duration::hours(12)).await;
        match refresh_session(&midnight, fixture, session, thief).await {
            (RefreshOutcome::Renewed(renewal, _), next) => {
                assert_eq!((renewal, next), (RefreshKind::Late, owner), "night {night}");
                thief = next;
            }
            (RefreshOutcome::ReuseDetected, _) => return Some(night),
            (other, _) => panic!("night {night}: {other:?}"),
        }
    }
    None
}

#[tokio::test]
async fn a_thief_who_refreshes_nightly_is_detected_within_two_weeks() {
    let fixture = Fixture::new().await;
    let session = open_session_for_a_year(&fixture).await;
    assert_eq!(night_of_detection(&fixture, &session, 30).await, Some(14));
    let after = fixture.with_later_clock(Duration::days(15)).await;
    assert_eq!(session_epoch(&after, &fixture, &session).await, None, "the session has ended for both");
}

/// Every third day the response is lost, and the client retries a day later.
#[tokio::test]
async fn a_client_that_often_loses_responses_keeps_its_session() {
    let fixture = Fixture::new().await;
    let session = open_session_for_a_year(&fixture).await;
    let (mut token, mut late_count) = (1, 0);
    for day in 1..365 {
        let stores = fixture.with_later_clock(Duration::days(day)).await;
        let (renewal, next) = expect_renewal(&stores, &fixture, &session, token).await;
        late_count += u32::from(renewal == RefreshKind::Late);
        if day % 3 != 0 {
            token = next;
        }
    }
    assert_eq!(late_count, 121);
}

/// Each late response (a response to the previous refresh token after its grace period) adds 2 to the lateness of the
/// session, and each new generation subtracts 1 (specification: Sessions and tokens, Reuse detection). The script of an
/// older server does not know the field `lateness`: it neither writes nor removes the field, and counts generations as
/// before.
#[tokio::test]
async fn lateness_counts_even_if_older_servers_also_refresh_the_session() {
    let fixture = Fixture::new().await;
    let session = open_session_for_a_year(&fixture).await;
    let key = format!("lk:{{{}:{}}}:session:{}", fixture.app, session.user, session.id);
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let stores_at = async |day: i64| fixture.with_later_clock(Duration::days(day)).await;
    assert_eq!(expect_renewal(&stores_at(1).await, &fixture, &session, 1).await, (RefreshKind::Rotated, 2));
    // An older server has given a late response, and stored only its time.
    let _: i64 = ::redis::cmd("HSET").arg(&key).arg("late").arg("1").query_async(&mut redis).await.unwrap();
    for day in 2..=8 {
        assert_eq!(
            expect_renewal(&stores_at(day).await, &fixture, &session, 1).await,
            (RefreshKind::Late, 2),
            "day {day}"
        );
    }
    // Twelve new tokens from older servers lower the lateness so far that six late responses are possible.
    let _: i64 = ::redis::cmd("HINCRBY").arg(&key).arg("n").arg(12).query_async(&mut redis).await.unwrap();
    for day in 9..=14 {
        assert_eq!(
            expect_renewal(&stores_at(day).await, &fixture, &session, 13).await,
            (RefreshKind::Late, 14),
            "day {day}"
        );
    }
    assert_eq!(refresh_session(&stores_at(15).await, &fixture, &session, 13).await.0, RefreshOutcome::ReuseDetected);
}

#[tokio::test]
async fn an_older_token_ends_the_session_and_a_newer_token_is_adopted() {
    let fixture = Fixture::new().await;
    let session = open_session(&fixture, a_user_id(), 1).await;
    let stores = &fixture.stores;
    assert_eq!(expect_renewal(stores, &fixture, &session, 7).await, (RefreshKind::Adopted, 8));
    assert_eq!(expect_renewal(stores, &fixture, &session, 7).await, (RefreshKind::Repeated, 8));
    assert_eq!(refresh_session(stores, &fixture, &session, 6).await.0, RefreshOutcome::ReuseDetected);
    assert_eq!(session_epoch(stores, &fixture, &session).await, None);
}

#[tokio::test]
async fn only_new_generations_count_for_the_limit() {
    let fixture = Fixture::new().await;
    let session = open_session(&fixture, a_user_id(), 1).await;
    let window = Window { count: 2, window_seconds: 60 };
    let refresh = async |generation| {
        let token = RefreshToken { user: session.user, session: session.id, generation };
        let rules = RefreshRules { grace_seconds: 30, windows: vec![window] };
        fixture.stores.refresh(&fixture.app, &token, &rules).await.unwrap()
    };
    for generation in [1, 1, 1, 2, 2] {
        assert!(matches!(refresh(generation).await, RefreshOutcome::Renewed(..)), "generation {generation}");
    }
    let limited = refresh(3).await;
    assert!(matches!(limited, RefreshOutcome::Limited { window: reached, .. } if reached == window), "{limited:?}");
    assert!(matches!(refresh(2).await, RefreshOutcome::Renewed(RefreshKind::Repeated, _)), "nothing was consumed");
}

/// A session with a lifetime of two months and a limit on refreshes. Each refresh uses the newest token.
struct LimitedSession {
    fixture: Fixture,
    session: NewSession,
    windows: Vec<Window>,
    generation: u64,
}

impl LimitedSession {
    async fn with_windows(windows: &[(u32, u32)]) -> Self {
        let fixture = Fixture::new().await;
        let lifetime = Duration::days(60);
        let idle_seconds = u32::try_from(lifetime.whole_seconds()).unwrap();
        let session = NewSession { ends_at: now() + lifetime, idle_seconds, ..a_session(a_user_id(), 1) };
        fixture.stores.open_session(&fixture.app, &session).await.unwrap();
        let windows = windows.iter().map(|(count, seconds)| Window { count: *count, window_seconds: *seconds });
        Self { session, windows: windows.collect(), generation: 1, fixture }
    }

    /// Refreshes at this time. If the limit rejects the refresh, returns the window and the time until a retry.
    async fn refresh(&mut self, at: Duration) -> Result<(), (Window, std::time::Duration)> {
        let token = RefreshToken { user: self.session.user, session: self.session.id, generation: self.generation };
        let rules = RefreshRules { grace_seconds: 30, windows: self.windows.clone() };
        match self.fixture.with_later_clock(at).await.refresh(&self.fixture.app, &token, &rules).await.unwrap() {
            RefreshOutcome::Renewed(RefreshKind::Rotated, live) => {
                assert_eq!(live.session.generation, self.generation + 1);
                self.generation += 1;
                Ok(())
            }
            RefreshOutcome::Limited { window, retry_after } => Err((window, retry_after)),
            other => panic!("generation {}: {other:?}", self.generation),
        }
    }
}

/// Refreshes are counted in the key of the session. For all other limits, calls are counted in separate keys. Both
/// counts must follow the same rule.
#[tokio::test]
async fn new_generations_are_counted_like_any_other_limit() {
    // The windows are so long that two consecutive calls are nearly always (except once in a million times) in the same
    // fiftieth of a window.
    let mut limited = LimitedSession::with_windows(&[(4, 50_000), (6, 86_400)]).await;
    let check = [RateLimitCheck {
        limit: LimitName::LoginsPerClient.into(),
        subject: limited.session.id.to_string(),
        windows: limited.windows.clone(),
    }];
    for seed in 0..3 {
        let mut rng = StdRng::seed_from_u64(seed);
        // Each round starts after all windows of the previous round have ended.
        let mut at = Duration::days(15) * i32::try_from(seed).unwrap();
        let mut cases = BTreeMap::new();
        for step in 0..120 {
            at += Duration::seconds(match rng.random_range(0..10) {
                0..6 => rng.random_range(0..2_000),
                6..9 => rng.random_range(0..20_000),
                _ => rng.random_range(0..60_000),
            });
            let counted =
                limited.fixture.with_later_clock(at).await.acquire(&limited.fixture.app, check.to_vec()).await;
            let refresh_result = limited.refresh(at).await;
            match (counted, refresh_result) {
                (Ok(_), Ok(())) => *cases.entry(0).or_insert(0) += 1,
                (Err(AcquireError::RateLimited(counted)), Err((window, wait))) => {
                    assert_eq!(counted.window, window, "seed {seed}, step {step}");
                    let difference = counted.retry_after.abs_diff(wait);
                    assert!(
                        difference < std::time::Duration::from_secs(20),
                        "seed {seed}, step {step}: {difference:?} apart"
                    );
                    *cases.entry(window.window_seconds).or_insert(0) += 1;
                }
                (counted, refreshed) => panic!("seed {seed}, step {step}: {:?}, but {refreshed:?}", counted.map(drop)),
            }
        }
        let counts = [0, 50_000, 86_400].map(|window| cases.get(&window).copied().unwrap_or(0));
        assert!(counts.iter().all(|times| *times > 5), "seed {seed} covers too few cases: {cases:?}");
    }
}

#[tokio::test]
async fn a_session_is_limited_as_before_if_the_clock_goes_back() {
    let mut limited = LimitedSession::with_windows(&[(2, 600)]).await;
    for at in [Duration::days(30), Duration::days(30), Duration::ZERO, Duration::ZERO] {
        limited.refresh(at).await.unwrap();
    }
    let (_, wait) = limited.refresh(Duration::ZERO).await.unwrap_err();
    assert!(wait <= std::time::Duration::from_secs(612), "{wait:?}");
    limited.refresh(Duration::seconds(614)).await.unwrap();
}

#[tokio::test]
async fn the_stored_generations_of_a_session_are_bounded() {
    let mut limited = LimitedSession::with_windows(&[(10_000, 60)]).await;
    for step in 0..200 {
        limited.refresh(Duration::milliseconds(600) * step).await.unwrap();
    }
    let (app, session) = (&limited.fixture.app, &limited.session);
    let key = format!("lk:{{{app}:{}}}:session:{}", session.user, session.id);
    let mut connection = redis::Redis::shared().await.connect().await.unwrap();
    // The name of this field is the length of a bucket of the window: 60 s / 50 = 1200 ms. For each bucket, the field
    // stores 16 bytes: the number of the bucket and the generation at its start.
    let stored_bytes: usize = ::redis::cmd("HSTRLEN").arg(key).arg("w1200").query_async(&mut connection).await.unwrap();
    assert!((50 * 16..=52 * 16).contains(&stored_bytes), "{stored_bytes} bytes");
}

#[tokio::test]
async fn a_session_at_an_older_epoch_or_past_its_end_is_not_refreshed() {
    let fixture = Fixture::new().await;
    let session = open_session(&fixture, a_user_id(), 1).await;
    let idle = Duration::seconds(IDLE_SECONDS.into());
    let half_idle_time = fixture.with_later_clock(idle / 2).await;
    assert_eq!(expect_renewal(&half_idle_time, &fixture, &session, 1).await, (RefreshKind::Rotated, 2));
    let later = fixture.with_later_clock(idle + Duration::minutes(20)).await;
    assert_eq!(expect_renewal(&later, &fixture, &session, 2).await, (RefreshKind::Rotated, 3));
    let end = fixture.with_later_clock(Duration::minutes(181)).await;
    assert_eq!(refresh_session(&end, &fixture, &session, 3).await.0, RefreshOutcome::NotFound);
    let session = open_session(&fixture, a_user_id(), 1).await;
    raise_epoch(&fixture, session.user, 2, None).await;
    assert_eq!(refresh_session(&fixture.stores, &fixture, &session, 1).await.0, RefreshOutcome::NotFound);
}
