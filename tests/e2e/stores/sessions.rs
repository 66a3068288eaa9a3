//! Sessions and epochs: what is there, what ends, and that an epoch never falls.

use std::collections::BTreeMap;

use latchkey_crds::rendered::{LimitName, Window};
use latchkey_server::{
    domain::{
        limits::Check,
        mail::EpochNews,
        ports::{Carried, Limits, Sessions, TakeError},
        session::{
            Amr, LiveSession, NewSession, Opening, Profile, RefreshRules, Refreshed, Renewal, Session, SessionId,
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

async fn opened(fixture: &Fixture, user: UserId, epoch: i64) -> NewSession {
    let session = a_session(user, epoch);
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), Opening::Opened);
    session
}

async fn epoch_of(stores: &Stores, fixture: &Fixture, session: &NewSession) -> Option<i64> {
    let session = stores.session(&fixture.app, session.user, session.id).await.unwrap();
    session.map(|live| live.session.epoch.0)
}

async fn raise(fixture: &Fixture, user: UserId, epoch: i64, keep: Option<SessionId>) {
    let news = EpochNews { user, epoch: Epoch(epoch), keep };
    assert_eq!(
        fixture.stores.raise_epoch(&fixture.app, &news, Some(&a_profile(1, "Ada"))).await.unwrap(),
        Carried::Safely,
        "there is no replica"
    );
}

#[tokio::test]
async fn an_opened_session_is_there_for_its_user_and_app_only() {
    let fixture = Fixture::new().await;
    let new = opened(&fixture, a_user_id(), 3).await;
    let stores = &fixture.stores;
    let LiveSession { session: seen, profile } = stores.session(&fixture.app, new.user, new.id).await.unwrap().unwrap();
    assert_eq!(profile, new.profile);
    let opened = Session::opened(&new);
    assert_eq!((seen.id, seen.user, seen.epoch), (opened.id, opened.user, opened.epoch));
    assert_eq!((seen.generation, seen.amr), (1, Amr::Password));
    assert_eq!(seen.auth_time.unix_timestamp(), new.auth_time.unix_timestamp());
    assert!(stores.session(&an_app(), new.user, new.id).await.unwrap().is_none());
    assert!(stores.session(&fixture.app, a_user_id(), new.id).await.unwrap().is_none());
    assert!(stores.session(&fixture.app, new.user, SessionId(Uuid::from_u128(1))).await.unwrap().is_none());
}

#[tokio::test]
async fn a_session_ends_when_it_is_not_used_and_in_any_case_at_its_end() {
    let fixture = Fixture::new().await;
    let session = opened(&fixture, a_user_id(), 1).await;
    let idle = Duration::seconds(IDLE_SECONDS.into());
    // Each look is a use: the time without one starts anew.
    let half_an_hour = fixture.later(idle / 2).await;
    assert!(epoch_of(&half_an_hour, &fixture, &session).await.is_some());
    let then = fixture.later(idle + Duration::minutes(20)).await;
    assert!(epoch_of(&then, &fixture, &session).await.is_some());
    let unused = fixture.later(idle * 2 + Duration::minutes(21)).await;
    assert!(epoch_of(&unused, &fixture, &session).await.is_none());
    assert!(epoch_of(&fixture.stores, &fixture, &session).await.is_none(), "ended for good");

    let session = opened(&fixture, a_user_id(), 1).await;
    for minutes in (30..180).step_by(30) {
        let later = fixture.later(Duration::minutes(minutes)).await;
        assert!(epoch_of(&later, &fixture, &session).await.is_some(), "after {minutes} min");
    }
    let end = fixture.later(Duration::minutes(181)).await;
    assert!(epoch_of(&end, &fixture, &session).await.is_none());
}

#[tokio::test]
async fn a_raised_epoch_ends_every_session_but_the_kept_one() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let (kept, ended) = (opened(&fixture, user, 1).await, opened(&fixture, user, 1).await);
    let stranger = opened(&fixture, a_user_id(), 1).await;
    raise(&fixture, user, 2, Some(kept.id)).await;
    assert_eq!(epoch_of(&fixture.stores, &fixture, &kept).await, Some(2));
    assert_eq!(epoch_of(&fixture.stores, &fixture, &ended).await, None);
    assert_eq!(epoch_of(&fixture.stores, &fixture, &stranger).await, Some(1));
    raise(&fixture, user, 3, None).await;
    assert_eq!(epoch_of(&fixture.stores, &fixture, &kept).await, None);
}

#[tokio::test]
async fn an_epoch_never_falls_and_late_news_end_nothing() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    raise(&fixture, user, 5, None).await;
    let session = opened(&fixture, user, 5).await;
    for (epoch, keep) in [(4, None), (5, None), (4, Some(session.id))] {
        raise(&fixture, user, epoch, keep).await;
        assert_eq!(epoch_of(&fixture.stores, &fixture, &session).await, Some(5), "after news of epoch {epoch}");
    }
    let stale = fixture.stores.open_session(&fixture.app, &a_session(user, 4)).await.unwrap();
    assert_eq!(stale, Opening::Stale);
}

#[tokio::test]
async fn a_login_that_raced_a_reset_leaves_nothing_behind() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let session = a_session(user, 1);
    raise(&fixture, user, 2, None).await;
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), Opening::Stale);
    assert_eq!(epoch_of(&fixture.stores, &fixture, &session).await, None);
}

#[tokio::test]
async fn a_login_at_a_newer_epoch_ends_the_older_sessions_and_the_kept_one_comes_back_with_the_news() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let (kept, ended) = (opened(&fixture, user, 1).await, opened(&fixture, user, 1).await);
    let newer = opened(&fixture, user, 2).await;
    assert_eq!(epoch_of(&fixture.stores, &fixture, &ended).await, None);
    assert_eq!(epoch_of(&fixture.stores, &fixture, &kept).await, None);
    raise(&fixture, user, 2, Some(kept.id)).await;
    assert_eq!(epoch_of(&fixture.stores, &fixture, &kept).await, Some(2));
    assert_eq!(epoch_of(&fixture.stores, &fixture, &newer).await, Some(2));
    assert_eq!(epoch_of(&fixture.stores, &fixture, &ended).await, None);
}

#[tokio::test]
async fn the_hundred_and_first_session_ends_the_least_recently_used() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let mut sessions = Vec::new();
    for number in 0..100 {
        // Each a minute after the one before, by Redis's clock.
        let stores = fixture.later(Duration::seconds(number)).await;
        let session = a_session(user, 1);
        stores.open_session(&fixture.app, &session).await.unwrap();
        sessions.push(session);
    }
    // The first is used again, so the second is the least recently used.
    let later = fixture.later(Duration::minutes(5)).await;
    assert!(epoch_of(&later, &fixture, &sessions[0]).await.is_some());
    let last = a_session(user, 1);
    later.open_session(&fixture.app, &last).await.unwrap();
    let mut live = Vec::new();
    for (number, session) in sessions.iter().enumerate() {
        if epoch_of(&later, &fixture, session).await.is_some() {
            live.push(number);
        }
    }
    assert_eq!(live, (0..100).filter(|number| *number != 1).collect::<Vec<_>>());
    assert!(epoch_of(&later, &fixture, &last).await.is_some());
}

#[tokio::test]
async fn everything_about_sessions_has_an_end_in_redis() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    opened(&fixture, user, 1).await;
    raise(&fixture, user, 2, None).await;
    opened(&fixture, user, 2).await;
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let keys: Vec<String> =
        ::redis::cmd("KEYS").arg(format!("lk:{{{}:{user}}}:*", fixture.app)).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 3, "{keys:?}");
    for key in keys {
        let lives: i64 = ::redis::cmd("TTL").arg(&key).query_async(&mut redis).await.unwrap();
        assert!(lives > 0, "{key} lives {lives} s");
        if key.ends_with(":user") {
            assert!(lives > 730 * 24 * 60 * 60, "an epoch outlives the longest session: {lives} s");
        }
    }
}

#[tokio::test]
async fn an_epoch_is_carried_safely_only_when_a_replica_has_it() {
    let primary = redis::Redis::start(redis::Options::for_tests()).await.unwrap();
    let options = redis::Options { replica_of: Some(primary.addr()), ..redis::Options::for_tests() };
    let replica = redis::Redis::start(options).await.unwrap();
    let connection = primary.connect().await.unwrap();
    eventually("the replica is there", LIMIT, async || {
        let mut connection = connection.clone();
        let info: String = ::redis::cmd("INFO").arg("replication").query_async(&mut connection).await.unwrap();
        info.contains("state=online").then_some(())
    })
    .await;
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &primary.url());
    let (app, user) = (an_app(), a_user_id());
    let news = |epoch| EpochNews { user, epoch: Epoch(epoch), keep: None };
    eventually("a replica acknowledges", LIMIT, async || {
        let carried = stores.raise_epoch(&app, &news(2), None).await.unwrap();
        (carried == Carried::Safely).then_some(())
    })
    .await;
    replica.process().signal(rustix::process::Signal::STOP);
    let started = std::time::Instant::now();
    assert_eq!(stores.raise_epoch(&app, &news(3), None).await.unwrap(), Carried::Unconfirmed);
    assert!(started.elapsed() < std::time::Duration::from_secs(1), "took {:?}", started.elapsed());
    // Opening goes on without, and calls that wait for nobody are not held up.
    assert_eq!(stores.open_session(&app, &a_session(user, 3)).await.unwrap(), Opening::Opened);
    replica.process().signal(rustix::process::Signal::CONT);
}

#[tokio::test]
async fn an_epoch_is_carried_safely_only_when_a_replica_of_its_node_has_it() {
    let cluster = redis::RedisCluster::start_with(&redis::Options::for_tests(), true).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &cluster.url());
    let app = an_app();
    let stopped = 1;
    cluster.replicas[stopped].process().signal(rustix::process::Signal::STOP);
    for _ in 0..12 {
        let user = a_user_id();
        let slot = cluster.slot_of(&format!("lk:{{{app}:{user}}}:user")).await.unwrap();
        let expected =
            if cluster.owner(slot).await.unwrap() == stopped { Carried::Unconfirmed } else { Carried::Safely };
        let news = EpochNews { user, epoch: Epoch(2), keep: None };
        // A replica that runs may take longer than we wait for it, on a loaded machine.
        eventually("as the replica is", LIMIT, async || {
            let carried = stores.raise_epoch(&app, &news, None).await.unwrap();
            (carried == expected).then_some(())
        })
        .await;
    }
    cluster.replicas[stopped].process().signal(rustix::process::Signal::CONT);
}

async fn name_of(fixture: &Fixture, session: &NewSession) -> String {
    fixture.stores.session(&fixture.app, session.user, session.id).await.unwrap().unwrap().profile.name
}

#[tokio::test]
async fn an_older_profile_never_replaces_a_newer_one() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let session = opened(&fixture, user, 1).await;
    fixture.stores.put_profile(&fixture.app, user, &a_profile(3, "Third")).await.unwrap();
    assert_eq!(name_of(&fixture, &session).await, "Third");
    fixture.stores.put_profile(&fixture.app, user, &a_profile(2, "Second")).await.unwrap();
    assert_eq!(name_of(&fixture, &session).await, "Third");
    // A login that read the user before the change, and a raised epoch that did.
    opened(&fixture, user, 1).await;
    assert_eq!(name_of(&fixture, &session).await, "Third");
    raise(&fixture, user, 2, Some(session.id)).await;
    assert_eq!(name_of(&fixture, &session).await, "Third");
    fixture.stores.put_profile(&fixture.app, a_user_id(), &a_profile(2, "Nobody")).await.unwrap();
}

#[tokio::test]
async fn nothing_is_kept_of_a_user_who_is_gone_but_the_epoch() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    opened(&fixture, user, 1).await;
    let news = EpochNews { user, epoch: Epoch(2), keep: None };
    fixture.stores.raise_epoch(&fixture.app, &news, None).await.unwrap();
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let key = format!("lk:{{{}:{user}}}:user", fixture.app);
    let fields: Vec<String> = ::redis::cmd("HGETALL").arg(&key).query_async(&mut redis).await.unwrap();
    assert_eq!(fields, ["epoch", "2"]);
}

#[tokio::test]
async fn a_user_lists_the_live_sessions_and_ends_them() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let (first, second, third) =
        (opened(&fixture, user, 1).await, opened(&fixture, user, 1).await, opened(&fixture, user, 1).await);
    opened(&fixture, a_user_id(), 1).await;
    let listed = async || {
        let sessions = fixture.stores.sessions(&fixture.app, user).await.unwrap();
        assert!(sessions.iter().all(|info| info.ip == "2001:db8::1" && info.user_agent.as_deref() == Some("curl/8.0")));
        let mut ids: Vec<_> = sessions.into_iter().map(|info| info.id.0).collect();
        ids.sort();
        ids
    };
    let mut all = vec![first.id.0, second.id.0, third.id.0];
    all.sort();
    assert_eq!(listed().await, all);
    assert!(fixture.stores.end_session(&fixture.app, user, second.id).await.unwrap());
    assert!(!fixture.stores.end_session(&fixture.app, user, second.id).await.unwrap(), "ended before");
    assert!(!fixture.stores.end_session(&fixture.app, a_user_id(), first.id).await.unwrap(), "another's");
    assert_eq!(epoch_of(&fixture.stores, &fixture, &second).await, None);
    let ended = fixture.stores.end_other_sessions(&fixture.app, user, third.id).await.unwrap();
    assert_eq!(ended, [first.id]);
    assert_eq!(listed().await, [third.id.0]);
    let later = fixture.later(Duration::seconds(i64::from(IDLE_SECONDS) + 1)).await;
    assert!(later.sessions(&fixture.app, user).await.unwrap().is_empty());
}

/// Refreshes as `stores` see the time; what became of it, and the generation of the next token.
async fn refreshed(stores: &Stores, fixture: &Fixture, session: &NewSession, generation: u64) -> (Refreshed, u64) {
    let token = RefreshToken { user: session.user, session: session.id, generation };
    let rules = RefreshRules { grace_seconds: 30, windows: Vec::new() };
    let outcome = stores.refresh(&fixture.app, &token, &rules).await.unwrap();
    let next = match &outcome {
        Refreshed::Live(_, live) => live.session.generation,
        Refreshed::Limited { .. } | Refreshed::Stolen | Refreshed::Gone => 0,
    };
    (outcome, next)
}

/// The index and the life of a session's key are renewed once a minute; order and idle time know of every refresh.
#[tokio::test]
async fn a_refresh_within_the_minute_counts_as_a_use() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let first = opened(&fixture, user, 1).await;
    let at = async |seconds: i64| fixture.later(Duration::seconds(seconds)).await;
    let second = a_session(user, 1);
    at(10).await.open_session(&fixture.app, &second).await.unwrap();
    assert_eq!(renewal(&at(50).await, &fixture, &first, 1).await, (Renewal::Next, 2));

    let listed = at(51).await.sessions(&fixture.app, user).await.unwrap();
    assert_eq!(listed.iter().map(|session| session.id).collect::<Vec<_>>(), [first.id, second.id]);
    let key = format!("lk:{{{}:{user}}}:session:{}", fixture.app, first.id);
    let mut connection = redis::Redis::shared().await.connect().await.unwrap();
    let life: u32 = ::redis::cmd("TTL").arg(key).query_async(&mut connection).await.unwrap();
    // By Redis's own clock the session was opened a moment ago; by the store's it was used 50 seconds later.
    assert!(life >= IDLE_SECONDS + 50, "{life} s");
    for _ in 0..99 {
        at(52).await.open_session(&fixture.app, &a_session(user, 1)).await.unwrap();
    }
    assert!(epoch_of(&at(53).await, &fixture, &first).await.is_some(), "used more recently");
    assert!(epoch_of(&at(53).await, &fixture, &second).await.is_none(), "the least recently used");
}

async fn renewal(stores: &Stores, fixture: &Fixture, session: &NewSession, generation: u64) -> (Renewal, u64) {
    match refreshed(stores, fixture, session, generation).await {
        (Refreshed::Live(renewal, _), next) => (renewal, next),
        (other, _) => panic!("generation {generation}: {other:?}"),
    }
}

#[tokio::test]
async fn a_token_and_the_one_before_it_give_one_result_within_the_grace_time() {
    let fixture = Fixture::new().await;
    let session = opened(&fixture, a_user_id(), 1).await;
    let stores = &fixture.stores;
    assert_eq!(renewal(stores, &fixture, &session, 1).await, (Renewal::Next, 2));
    for _ in 0..3 {
        assert_eq!(renewal(stores, &fixture, &session, 1).await, (Renewal::Again, 2));
    }
    assert_eq!(renewal(stores, &fixture, &session, 2).await, (Renewal::Next, 3));
    let soon = fixture.later(Duration::seconds(29)).await;
    assert_eq!(renewal(&soon, &fixture, &session, 2).await, (Renewal::Again, 3));
}

#[tokio::test]
async fn a_lost_answer_is_given_late_five_times_in_a_day_and_tabs_may_race_for_it() {
    let fixture = Fixture::new().await;
    let session = opened(&fixture, a_user_id(), 1).await;
    assert_eq!(renewal(&fixture.stores, &fixture, &session, 1).await, (Renewal::Next, 2));
    for time in 1..=5 {
        let later = fixture.later(Duration::minutes(10 * time)).await;
        assert_eq!(renewal(&later, &fixture, &session, 1).await, (Renewal::Late, 2), "time {time}");
        assert_eq!(renewal(&later, &fixture, &session, 1).await, (Renewal::Again, 2), "time {time}");
    }
    let sixth = fixture.later(Duration::minutes(70)).await;
    assert_eq!(refreshed(&sixth, &fixture, &session, 1).await.0, Refreshed::Stolen);
    assert_eq!(refreshed(&sixth, &fixture, &session, 2).await.0, Refreshed::Gone, "for the honest one too");
}

/// A session that lives for a year.
async fn opened_for_a_year(fixture: &Fixture) -> NewSession {
    let ends_at = now() + Duration::days(365);
    let session = NewSession { ends_at, idle_seconds: 30 * 24 * 3600, ..a_session(a_user_id(), 1) };
    assert_eq!(fixture.stores.open_session(&fixture.app, &session).await.unwrap(), Opening::Opened);
    session
}

/// Its owner refreshes every noon, a thief every midnight; on which night the session ends.
async fn found_on_night(fixture: &Fixture, session: &NewSession, nights: i64) -> Option<i64> {
    let (mut owner, mut thief) = (1, 1);
    for night in 1..=nights {
        let noon = fixture.later(Duration::days(night)).await;
        (_, owner) = renewal(&noon, fixture, session, owner).await;
        let midnight = fixture.later(Duration::days(night) + Duration::hours(12)).await;
        match refreshed(&midnight, fixture, session, thief).await {
            (Refreshed::Live(renewal, _), next) => {
                assert_eq!((renewal, next), (Renewal::Late, owner), "night {night}");
                thief = next;
            }
            (Refreshed::Stolen, _) => return Some(night),
            (other, _) => panic!("night {night}: {other:?}"),
        }
    }
    None
}

#[tokio::test]
async fn a_thief_who_refreshes_nightly_beside_a_daily_user_is_found_within_two_weeks() {
    let fixture = Fixture::new().await;
    let session = opened_for_a_year(&fixture).await;
    assert_eq!(found_on_night(&fixture, &session, 30).await, Some(14));
    let after = fixture.later(Duration::days(15)).await;
    assert_eq!(epoch_of(&after, &fixture, &session).await, None, "it has ended for both");
}

/// The answer of every third day is lost, and asked for again on the next.
#[tokio::test]
async fn a_client_that_often_loses_answers_keeps_its_session() {
    let fixture = Fixture::new().await;
    let session = opened_for_a_year(&fixture).await;
    let (mut token, mut late) = (1, 0);
    for day in 1..365 {
        let then = fixture.later(Duration::days(day)).await;
        let (renewal, next) = renewal(&then, &fixture, &session, token).await;
        late += u32::from(renewal == Renewal::Late);
        if day % 3 != 0 {
            token = next;
        }
    }
    assert_eq!(late, 121);
}

/// An old server's script knows nothing of `lateness`: it neither writes nor removes it, and counts generations as always.
#[tokio::test]
async fn a_session_that_old_servers_refresh_too_is_counted_all_the_same() {
    let fixture = Fixture::new().await;
    let session = opened_for_a_year(&fixture).await;
    let key = format!("lk:{{{}:{}}}:session:{}", fixture.app, session.user, session.id);
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let at = async |day: i64| fixture.later(Duration::days(day)).await;
    assert_eq!(renewal(&at(1).await, &fixture, &session, 1).await, (Renewal::Next, 2));
    // An old server gave a late answer: it kept the time alone.
    let _: i64 = ::redis::cmd("HSET").arg(&key).arg("late").arg("1").query_async(&mut redis).await.unwrap();
    for day in 2..=8 {
        assert_eq!(renewal(&at(day).await, &fixture, &session, 1).await, (Renewal::Late, 2), "day {day}");
    }
    // Old servers gave twelve new tokens: what they took away leaves room for six late answers.
    let _: i64 = ::redis::cmd("HINCRBY").arg(&key).arg("n").arg(12).query_async(&mut redis).await.unwrap();
    for day in 9..=14 {
        assert_eq!(renewal(&at(day).await, &fixture, &session, 13).await, (Renewal::Late, 14), "day {day}");
    }
    assert_eq!(refreshed(&at(15).await, &fixture, &session, 13).await.0, Refreshed::Stolen);
}

#[tokio::test]
async fn an_older_token_ends_the_session_and_a_newer_one_is_adopted() {
    let fixture = Fixture::new().await;
    let session = opened(&fixture, a_user_id(), 1).await;
    let stores = &fixture.stores;
    assert_eq!(renewal(stores, &fixture, &session, 7).await, (Renewal::Adopted, 8));
    assert_eq!(renewal(stores, &fixture, &session, 7).await, (Renewal::Again, 8));
    assert_eq!(refreshed(stores, &fixture, &session, 6).await.0, Refreshed::Stolen);
    assert_eq!(epoch_of(stores, &fixture, &session).await, None);
}

#[tokio::test]
async fn only_new_generations_count_for_the_limit() {
    let fixture = Fixture::new().await;
    let session = opened(&fixture, a_user_id(), 1).await;
    let window = Window { count: 2, window_seconds: 60 };
    let refresh = async |generation| {
        let token = RefreshToken { user: session.user, session: session.id, generation };
        let rules = RefreshRules { grace_seconds: 30, windows: vec![window] };
        fixture.stores.refresh(&fixture.app, &token, &rules).await.unwrap()
    };
    for generation in [1, 1, 1, 2, 2] {
        assert!(matches!(refresh(generation).await, Refreshed::Live(..)), "generation {generation}");
    }
    let limited = refresh(3).await;
    assert!(matches!(limited, Refreshed::Limited { window: reached, .. } if reached == window), "{limited:?}");
    assert!(matches!(refresh(2).await, Refreshed::Live(Renewal::Again, _)), "nothing was consumed");
}

/// A session that lives for two months, and refreshes of it under a limit; each is of the newest generation.
struct Limited {
    fixture: Fixture,
    session: NewSession,
    windows: Vec<Window>,
    generation: u64,
}

impl Limited {
    async fn by(windows: &[(u32, u32)]) -> Self {
        let fixture = Fixture::new().await;
        let life = Duration::days(60);
        let idle_seconds = u32::try_from(life.whole_seconds()).unwrap();
        let session = NewSession { ends_at: now() + life, idle_seconds, ..a_session(a_user_id(), 1) };
        fixture.stores.open_session(&fixture.app, &session).await.unwrap();
        let windows = windows.iter().map(|(count, seconds)| Window { count: *count, window_seconds: *seconds });
        Self { session, windows: windows.collect(), generation: 1, fixture }
    }

    /// So much later: which window refuses, and for how long, where one does.
    async fn refresh(&mut self, at: Duration) -> Result<(), (Window, std::time::Duration)> {
        let token = RefreshToken { user: self.session.user, session: self.session.id, generation: self.generation };
        let rules = RefreshRules { grace_seconds: 30, windows: self.windows.clone() };
        match self.fixture.later(at).await.refresh(&self.fixture.app, &token, &rules).await.unwrap() {
            Refreshed::Live(Renewal::Next, live) => {
                assert_eq!(live.session.generation, self.generation + 1);
                self.generation += 1;
                Ok(())
            }
            Refreshed::Limited { window, retry_after } => Err((window, retry_after)),
            other => panic!("generation {}: {other:?}", self.generation),
        }
    }
}

/// The counters of any other limit and the marks of a session are two ways to one rule.
#[tokio::test]
async fn new_generations_are_counted_as_what_any_other_limit_counts() {
    // So long that the moment between two calls falls into another fiftieth once in a million times.
    let mut limited = Limited::by(&[(4, 50_000), (6, 86_400)]).await;
    let check = [Check {
        limit: LimitName::LoginsPerClient,
        subject: limited.session.id.to_string(),
        windows: limited.windows.clone(),
    }];
    for seed in 0..3 {
        let mut rng = StdRng::seed_from_u64(seed);
        // Each round begins when nothing of the one before counts any more.
        let mut at = Duration::days(15) * i32::try_from(seed).unwrap();
        let mut refused = BTreeMap::new();
        for step in 0..120 {
            at += Duration::seconds(match rng.random_range(0..10) {
                0..6 => rng.random_range(0..2_000),
                6..9 => rng.random_range(0..20_000),
                _ => rng.random_range(0..60_000),
            });
            let counted = limited.fixture.later(at).await.take(&limited.fixture.app, check.to_vec()).await;
            let told = limited.refresh(at).await;
            match (counted, told) {
                (Ok(_), Ok(())) => *refused.entry(0).or_insert(0) += 1,
                (Err(TakeError::Limited(counted)), Err((window, wait))) => {
                    assert_eq!(counted.window, window, "seed {seed}, step {step}");
                    let apart = counted.retry_after.abs_diff(wait);
                    assert!(apart < std::time::Duration::from_secs(20), "seed {seed}, step {step}: {apart:?} apart");
                    *refused.entry(window.window_seconds).or_insert(0) += 1;
                }
                (counted, told) => panic!("seed {seed}, step {step}: {:?}, but {told:?}", counted.map(drop)),
            }
        }
        let each = [0, 50_000, 86_400].map(|window| refused.get(&window).copied().unwrap_or(0));
        assert!(each.iter().all(|times| *times > 5), "seed {seed} tried little: {refused:?}");
    }
}

#[tokio::test]
async fn a_session_is_limited_as_before_where_the_clock_goes_back() {
    let mut limited = Limited::by(&[(2, 600)]).await;
    for at in [Duration::days(30), Duration::days(30), Duration::ZERO, Duration::ZERO] {
        limited.refresh(at).await.unwrap();
    }
    let (_, wait) = limited.refresh(Duration::ZERO).await.unwrap_err();
    assert!(wait <= std::time::Duration::from_secs(612), "{wait:?}");
    limited.refresh(Duration::seconds(614)).await.unwrap();
}

#[tokio::test]
async fn what_a_session_keeps_of_its_generations_is_bounded() {
    let mut limited = Limited::by(&[(10_000, 60)]).await;
    for step in 0..200 {
        limited.refresh(Duration::milliseconds(600) * step).await.unwrap();
    }
    let (app, session) = (&limited.fixture.app, &limited.session);
    let key = format!("lk:{{{app}:{}}}:session:{}", session.user, session.id);
    let mut connection = redis::Redis::shared().await.connect().await.unwrap();
    let kept: usize = ::redis::cmd("HSTRLEN").arg(key).arg("w1200").query_async(&mut connection).await.unwrap();
    assert!((50 * 16..=52 * 16).contains(&kept), "{kept} octets");
}

#[tokio::test]
async fn a_session_at_an_older_epoch_or_past_its_time_is_not_refreshed() {
    let fixture = Fixture::new().await;
    let session = opened(&fixture, a_user_id(), 1).await;
    let idle = Duration::seconds(IDLE_SECONDS.into());
    let half = fixture.later(idle / 2).await;
    assert_eq!(renewal(&half, &fixture, &session, 1).await, (Renewal::Next, 2));
    let then = fixture.later(idle + Duration::minutes(20)).await;
    assert_eq!(renewal(&then, &fixture, &session, 2).await, (Renewal::Next, 3));
    let end = fixture.later(Duration::minutes(181)).await;
    assert_eq!(refreshed(&end, &fixture, &session, 3).await.0, Refreshed::Gone);
    let session = opened(&fixture, a_user_id(), 1).await;
    raise(&fixture, session.user, 2, None).await;
    assert_eq!(refreshed(&fixture.stores, &fixture, &session, 1).await.0, Refreshed::Gone);
}
