//! Audit: what was recorded is there, refusals are one row, nothing changes, and what is old goes.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        audit::{Detail, Event, EventKind, Refusal, RefusalKind},
        client::ClientAddress,
        email::AccountKey,
        ports::{Audit, Users},
        session::{Amr, SessionId},
        user::UserId,
    },
    store::{
        Stores,
        postgres::{Claim, Deleting},
    },
};
use latchkey_tests::{eventually, proxy::Proxy, redis::Redis as RedisServer};
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, LIMIT, a_new_user, a_user_id, an_app, an_email, an_event, faults::through, now};

/// A quarter of an hour, and a little more for what lies between two calls.
const LATER: time::Duration = time::Duration::minutes(16);

fn client(text: &str) -> ClientAddress {
    ClientAddress::of(text.parse().unwrap())
}

fn account(app: &AppId, email: &str) -> AccountKey {
    an_email(email).account(app)
}

/// A wrong password for that user, or for nobody.
fn wrong(user: Option<UserId>, from: &str) -> Refusal {
    Refusal { kind: RefusalKind::LogIn, account: None, user, client: client(from) }
}

/// Refusals of the App that are counted and not written yet, by row.
async fn counted(fixture: &Fixture) -> BTreeMap<String, i64> {
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg(format!("lk:{{{}:audit}}:refusals:*", fixture.app))
        .query_async(&mut redis)
        .await
        .unwrap();
    let mut all = BTreeMap::new();
    for key in keys {
        let rows: BTreeMap<String, i64> = redis::cmd("HGETALL").arg(key).query_async(&mut redis).await.unwrap();
        for (row, count) in rows {
            if !row.starts_with('#') {
                *all.entry(row).or_default() += count;
            }
        }
    }
    all
}

/// Waits until so many refusals are counted.
async fn await_counted(fixture: &Fixture, refusals: i64) {
    let all = || async { (counted(fixture).await.values().sum::<i64>() == refusals).then_some(()) };
    eventually(&format!("{refusals} refusals"), LIMIT, all).await;
}

/// Writes down what is due to a server whose clock is that much later.
async fn write(fixture: &Fixture, by: time::Duration) -> usize {
    let app = fixture.app.clone();
    fixture.later(by).await.write_refusals(move |of| *of == app).await.unwrap()
}

type Row = (String, Option<Uuid>, Option<Uuid>, Option<String>, i64, Option<String>);

async fn rows(fixture: &Fixture) -> Vec<Row> {
    let mut connection = fixture.database.connect().await.unwrap();
    sqlx::query_as(
        "SELECT kind, user_id, session_id, abbrev(ip), count, detail::text FROM audit_events
         WHERE app_id = $1 ORDER BY kind, user_id, ip",
    )
    .bind(fixture.app.as_str())
    .fetch_all(&mut connection)
    .await
    .unwrap()
}

async fn count(fixture: &Fixture) -> i64 {
    fixture.count("SELECT count(*) FROM audit_events").await
}

fn lost(stores: &Stores) -> u64 {
    let mut registry = Registry::default();
    stores.postgres.audit_metrics().register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("lost_total "));
    line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
}

#[tokio::test]
async fn an_event_is_there_when_it_was_recorded() {
    let fixture = Fixture::new().await;
    let (user, session) = (a_user_id(), SessionId(Uuid::from_u128(7)));
    let event = an_event(EventKind::LoggedIn, user).in_session(session).with(Detail::amr(Amr::Password));
    fixture.stores.record(&fixture.app, event).await;
    let detail = Some(r#"{"amr": "pwd"}"#.to_owned());
    let row = ("logged_in".to_owned(), Some(user.0), Some(session.0), Some("192.0.2.1".to_owned()), 1, detail);
    assert_eq!(rows(&fixture).await, [row]);

    let [seen] = &fixture.stores.activity(&fixture.app, user, now() - time::Duration::hours(1)).await.unwrap()[..]
    else {
        panic!("one event")
    };
    assert_eq!((seen.kind, seen.session, seen.count), (EventKind::LoggedIn, Some(session), 1));
    assert_eq!(seen.ip.as_deref(), Some("192.0.2.1"));
}

#[tokio::test]
async fn many_at_once_cost_few_transactions() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for _ in 0..500 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move { stores.record(&app, an_event(EventKind::LoggedIn, a_user_id())).await });
    }
    tasks.join_all().await;
    assert_eq!(count(&fixture).await, 500);
    let transactions = fixture.count("SELECT count(DISTINCT xmin::text) FROM audit_events").await;
    assert!(transactions < 100, "{transactions}");
}

#[tokio::test]
async fn an_event_of_nobody_leaves_no_row() {
    let fixture = Fixture::new().await;
    let nobody = Event { user: None, ..an_event(EventKind::PasswordResetRequested, a_user_id()) };
    fixture.stores.record(&fixture.app, nobody).await;
    assert_eq!(count(&fixture).await, 0);
}

#[tokio::test]
async fn a_user_sees_the_newest_hundred_of_their_own() {
    let fixture = Fixture::new().await;
    let (user, other) = (a_user_id(), a_user_id());
    let at = now();
    for number in 0..120_i64 {
        let event = an_event(EventKind::LoggedIn, user);
        let event = Event { at: at - time::Duration::minutes(number), ..event };
        fixture.stores.record_later(&fixture.app, event);
    }
    fixture.stores.record_later(&fixture.app, an_event(EventKind::Renamed, other));
    fixture.stores.record_later(&an_app(), an_event(EventKind::Renamed, user));
    fixture.stores.postgres.flush_audit().await;
    assert_eq!(count(&fixture).await, 122);

    let day = at - time::Duration::days(1);
    let seen = fixture.stores.activity(&fixture.app, user, day).await.unwrap();
    assert_eq!(seen.len(), 100);
    assert!(seen.iter().all(|event| event.kind == EventKind::LoggedIn));
    assert!(seen.is_sorted_by(|one, next| one.at > next.at), "the newest first");
    assert!(seen[99].at > at - time::Duration::minutes(100));
    let lately = fixture.stores.activity(&fixture.app, user, at - time::Duration::minutes(9)).await.unwrap();
    assert!(lately.len() < 12, "none from before that time");
    assert_eq!(fixture.stores.activity(&fixture.app, other, day).await.unwrap().len(), 1);

    // Of a newer server, which has kinds that this one does not know.
    fixture
        .execute(
            "INSERT INTO audit_events (app_id, id, at, kind, user_id)
             SELECT app_id, gen_random_uuid(), now(), 'of_tomorrow', user_id FROM audit_events",
        )
        .await;
    assert_eq!(fixture.stores.activity(&fixture.app, user, day).await.unwrap().len(), 100);
}

#[tokio::test]
async fn events_do_not_change() {
    let fixture = Fixture::new().await;
    fixture.stores.record(&fixture.app, an_event(EventKind::LoggedIn, a_user_id())).await;
    let mut connection = fixture.database.connect().await.unwrap();
    let month: String = sqlx::query_scalar("SELECT tableoid::regclass::text FROM audit_events")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(month.starts_with("audit_events_2"), "it lies in its month: {month}");
    for table in ["audit_events", &month] {
        let change = format!("UPDATE {table} SET kind = 'logged_out'");
        let error = sqlx::raw_sql(sqlx::AssertSqlSafe(change)).execute(&mut connection).await.unwrap_err();
        let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
        assert_eq!(code.as_deref(), Some("42501"), "{table}");
    }
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'logged_in'").await, 1);
}

#[tokio::test]
async fn without_postgres_events_are_lost_and_counted_and_nobody_waits_long() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = through(&fixture, &proxy);
    stores.record(&fixture.app, an_event(EventKind::LoggedIn, a_user_id())).await;
    assert_eq!((count(&fixture).await, lost(&stores)), (1, 0));

    proxy.stall();
    let started = Instant::now();
    stores.record(&fixture.app, an_event(EventKind::LoggedIn, a_user_id())).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    proxy.refuse().await;
    for _ in 0..5 {
        stores.record_later(&fixture.app, an_event(EventKind::RefreshLate, a_user_id()));
    }
    eventually("the loss of all six", LIMIT, || async { (lost(&stores) == 6).then_some(()) }).await;

    proxy.restore().unwrap();
    let written = || async {
        stores.record(&fixture.app, an_event(EventKind::Renamed, a_user_id())).await;
        (fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'renamed'").await > 0).then_some(())
    };
    eventually("events are written again", LIMIT, written).await;
}

#[tokio::test]
async fn an_event_outlives_the_end_of_its_server() {
    let fixture = Fixture::new().await;
    let another = fixture.another().await;
    for _ in 0..300 {
        another.record_later(&fixture.app, an_event(EventKind::LoggedOut, a_user_id()));
    }
    another.postgres.close().await;
    assert_eq!(count(&fixture).await, 300);
}

#[tokio::test]
async fn refusals_of_a_quarter_of_an_hour_are_one_row_an_account_and_client_address() {
    let fixture = Fixture::new().await;
    let another = fixture.another().await;
    let (ada, eva) = (a_user_id(), a_user_id());
    for number in 0..9 {
        let stores = if number % 2 == 0 { &fixture.stores } else { &another };
        stores.refuse(&fixture.app, wrong(Some(ada), "192.0.2.1"));
    }
    fixture.stores.refuse(&fixture.app, wrong(Some(ada), "192.0.2.2"));
    fixture.stores.refuse(&fixture.app, wrong(Some(eva), "2001:db8:1:2::7"));
    let code = Refusal { kind: RefusalKind::PasswordReset, ..wrong(Some(ada), "192.0.2.1") };
    another.refuse(&fixture.app, code);
    for _ in 0..3 {
        another.refuse(&fixture.app, wrong(None, "192.0.2.9"));
    }
    await_counted(&fixture, 15).await;
    // The quarter may have ended just now; it is not counted on.
    assert_eq!(write(&fixture, time::Duration::ZERO).await, 0);
    assert_eq!(count(&fixture).await, 0, "nothing before its quarter of an hour is over");

    assert_eq!(write(&fixture, LATER).await, 1);
    let row = |kind: &str, user: Option<UserId>, ip: &str, count| {
        (kind.to_owned(), user.map(|user| user.0), None, Some(ip.to_owned()), count, None)
    };
    let mut expected = [
        row("login_refused", Some(ada), "192.0.2.1", 9),
        row("login_refused", Some(ada), "192.0.2.2", 1),
        row("login_refused", Some(eva), "2001:db8:1:2::/64", 1),
        row("login_refused", None, "192.0.2.9", 3),
        row("password_reset_refused", Some(ada), "192.0.2.1", 1),
    ];
    expected.sort();
    let mut found = rows(&fixture).await;
    found.sort();
    assert_eq!(found, expected);
    assert_eq!(write(&fixture, LATER).await, 0, "it is written once");
    assert!(counted(&fixture).await.is_empty());
    let seen = fixture.stores.activity(&fixture.app, eva, now() - time::Duration::hours(1)).await.unwrap();
    assert_eq!(seen[0].ip.as_deref(), Some("2001:db8:1:2::/64"));
}

#[tokio::test]
async fn servers_that_write_at_once_or_again_write_each_row_once() {
    let fixture = Fixture::new().await;
    for number in 0..150 {
        fixture.stores.refuse(&fixture.app, wrong(Some(a_user_id()), &format!("192.0.2.{number}")));
    }
    await_counted(&fixture, 150).await;
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let key: Vec<String> = redis::cmd("KEYS")
        .arg(format!("lk:{{{}:audit}}:refusals:*", fixture.app))
        .query_async(&mut redis)
        .await
        .unwrap();
    let copy: Vec<u8> = redis::cmd("DUMP").arg(&key[0]).query_async(&mut redis).await.unwrap();

    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let (later, app) = (fixture.later(LATER).await, fixture.app.clone());
        tasks.spawn(async move { later.write_refusals(|of| *of == app).await.unwrap() });
    }
    assert!(tasks.join_all().await.into_iter().sum::<usize>() >= 1);
    assert_eq!(fixture.count("SELECT sum(count)::bigint FROM audit_events").await, 150);

    // A server that dies after writing, or a fail-over, leaves the refusals in Redis.
    let quarter = key[0].rsplit(':').next().unwrap();
    let () = redis::cmd("RESTORE").arg(&key[0]).arg(60_000).arg(copy).query_async(&mut redis).await.unwrap();
    let () = redis::cmd("ZADD")
        .arg("lk:{:audit}:due")
        .arg((quarter.parse::<i64>().unwrap() + 1) * 900_000)
        .arg(format!("{} {quarter}", fixture.app))
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(write(&fixture, LATER).await, 1);
    assert_eq!(fixture.count("SELECT sum(count)::bigint FROM audit_events").await, 150);
    assert_eq!(count(&fixture).await, 150);
}

#[tokio::test]
async fn nobody_fills_the_table_with_refusals() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    for number in 1..=30 {
        fixture.stores.refuse(&fixture.app, wrong(Some(user), &format!("192.0.2.{number}")));
    }
    for number in 0..300 {
        let from = format!("198.51.{}.{}", number / 200, number % 200);
        fixture.stores.refuse(&fixture.app, wrong(None, &from));
    }
    await_counted(&fixture, 330).await;
    write(&fixture, LATER).await;
    let of = async |filter: &str| {
        let rows = fixture.count(&format!("SELECT count(*) FROM audit_events WHERE {filter}")).await;
        let sum = format!("SELECT coalesce(sum(count), 0)::bigint FROM audit_events WHERE {filter}");
        (rows, fixture.count(&sum).await)
    };
    assert_eq!(of("user_id IS NOT NULL AND ip IS NOT NULL").await, (20, 20));
    assert_eq!(of("user_id IS NOT NULL AND ip IS NULL").await, (1, 10), "the user is told of all the same");
    assert_eq!(of("user_id IS NULL AND ip IS NOT NULL").await, (200, 200));
    assert_eq!(of("user_id IS NULL AND ip IS NULL").await, (1, 100));
}

#[tokio::test]
async fn what_is_refused_before_the_account_is_looked_at_is_the_accounts_all_the_same() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let named = |email: &str, user| {
        let account = Some(account(&fixture.app, email));
        Refusal { kind: RefusalKind::LogIn, account, user, client: client("192.0.2.1") }
    };
    fixture.stores.refuse(&fixture.app, named("ada@example.com", Some(user)));
    await_counted(&fixture, 1).await;
    let limited = |email| Refusal { kind: RefusalKind::LogInLimit, ..named(email, None) };
    fixture.stores.refuse(&fixture.app, limited("ada@example.com"));
    fixture.stores.refuse(&fixture.app, limited("nobody@example.com"));
    await_counted(&fixture, 3).await;
    let kept = counted(&fixture).await;
    assert!(kept.keys().all(|row| !row.contains('@') && !row.contains("example")), "{kept:?}");
    write(&fixture, LATER).await;
    let limited: Vec<_> = rows(&fixture).await.into_iter().filter(|row| row.0 == "login_limited").collect();
    let users: Vec<_> = limited.iter().map(|row| row.1).collect();
    assert_eq!(users, [Some(user.0), None]);
}

#[tokio::test]
async fn refusals_wait_for_a_postgres_that_is_away() {
    let fixture = Fixture::new().await;
    fixture.stores.refuse(&fixture.app, wrong(Some(a_user_id()), "192.0.2.1"));
    await_counted(&fixture, 1).await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = Stores { postgres: through(&fixture, &proxy).postgres, ..fixture.later(LATER).await };
    proxy.refuse().await;
    let app = fixture.app.clone();
    stores.write_refusals(|of| *of == app).await.unwrap_err();
    await_counted(&fixture, 1).await;
    proxy.restore().unwrap();
    assert_eq!(write(&fixture, LATER).await, 1);
    assert_eq!(count(&fixture).await, 1);
}

#[tokio::test]
async fn an_app_that_is_deleted_leaves_no_event_and_gets_none() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let claim =
        Claim { app: app.clone(), namespace: "shop".to_owned(), incarnation: Some("i1".to_owned()), handover: 0 };
    stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
    let user = a_new_user("ada@example.com");
    let id = user.id;
    stores.create_user(app, user, None).await.unwrap();
    stores.record(app, an_event(EventKind::LoggedIn, id)).await;
    let past = Event { at: now() - time::Duration::days(800), ..an_event(EventKind::LoggedIn, id) };
    stores.record(app, past).await;
    stores.record(&an_app(), an_event(EventKind::LoggedIn, id)).await;
    stores.refuse(app, wrong(Some(id), "192.0.2.1"));
    await_counted(&fixture, 1).await;
    assert_eq!(count(&fixture).await, 4);

    while stores.delete_users(&claim, 2, || true).await.unwrap() != Deleting::Done {}
    assert_eq!(rows(&fixture).await, []);
    stores.record(app, an_event(EventKind::Renamed, id)).await;
    write(&fixture, LATER).await;
    assert_eq!(rows(&fixture).await, []);
    assert_eq!(count(&fixture).await, 1, "that of the other App");
    assert_eq!(lost(stores), 0);
}

#[tokio::test]
async fn months_are_made_ahead_once_whoever_tries() {
    let fixture = Arc::new(Fixture::new().await);
    let months = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'audit_events'::regclass";
    assert_eq!(fixture.count(months).await, 1 + 12 + 1, "this one, a year, and the default");
    let third = "audit_events_' || to_char(now() AT TIME ZONE 'UTC' + interval '2 months', 'YYYY_MM')";
    fixture.execute(&format!("DO $$ BEGIN EXECUTE 'DROP TABLE {third}; END $$")).await;
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let fixture = Arc::clone(&fixture);
        tasks.spawn(async move { fixture.count("SELECT latchkey_audit_make_months(3)::bigint").await });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<i64>(), 1, "one makes the month that is missing");
    assert_eq!(fixture.count(months).await, 14);

    // A month of which there are events already stays where they are.
    fixture.execute(&format!("DO $$ BEGIN EXECUTE 'DROP TABLE {third}; END $$")).await;
    fixture
        .execute(
            "INSERT INTO audit_events (app_id, id, at, kind) SELECT 'shop', gen_random_uuid(),
             (date_trunc('month', now() AT TIME ZONE 'UTC') + interval '2 months 1 day') AT TIME ZONE 'UTC', 'renamed'",
        )
        .await;
    assert_eq!(count(&fixture).await, 1, "what has no month is kept all the same");
    fixture.count("SELECT latchkey_audit_make_months(3)::bigint").await;
    assert_eq!(count(&fixture).await, 1);
}
