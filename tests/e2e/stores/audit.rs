//! Audit events: recorded events become rows, equal refusals become one row, and nothing changes a row.

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
        ports::{AuditLog, Users},
        session::{Amr, SessionId},
        user::UserId,
    },
    store::{
        Stores, UrlSource,
        postgres::{DeleteOutcome, OwnershipClaim},
        redis::{Options, RedisStore},
    },
};
use latchkey_tests::{eventually, proxy::Proxy, redis::Redis as RedisServer};
use prometheus_client::{encoding::text::encode, registry::Registry};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, LIMIT, a_new_user, a_user_id, an_app, an_email, an_event, faults::stores_via, now};

/// A quarter of an hour, and one minute for the time between two calls of a test.
const AFTER_QUARTER_HOUR: time::Duration = time::Duration::minutes(16);

/// The time until the next quarter of an hour begins. A test that adds this time to the clock runs at the start of a
/// quarter, so all its refusals are in the same quarter.
fn time_to_next_quarter_hour() -> time::Duration {
    time::Duration::seconds(900 - now().unix_timestamp() % 900)
}

/// Another server, which adds this duration to the time of Redis.
async fn server_with_clock(fixture: &Fixture, by: time::Duration) -> Stores {
    let url = UrlSource::from_value(RedisServer::shared().await.url());
    let redis = RedisStore::connect(Options { clock_offset: by, ..Options::new(url) }).unwrap();
    Stores { redis, ..fixture.stores.clone() }
}

fn client(text: &str) -> ClientAddress {
    ClientAddress::from_ip(text.parse().unwrap())
}

fn account(app: &AppId, email: &str) -> AccountKey {
    an_email(email).account_key(app)
}

/// The refusal of a wrong password: for this user, or for an unknown account if `user` is `None`.
fn wrong_password(user: Option<UserId>, ip: &str) -> Refusal {
    Refusal { kind: RefusalKind::Login, account: None, user, client: client(ip) }
}

/// The App's refusals that are not written to Postgres yet: the number of refusals for each row that will be written.
async fn pending_refusals(fixture: &Fixture) -> BTreeMap<String, i64> {
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg(format!("lk:{{{}:audit}}:refusals:*", fixture.app))
        .query_async(&mut redis)
        .await
        .unwrap();
    let mut totals = BTreeMap::new();
    for key in keys {
        let rows: BTreeMap<String, i64> = redis::cmd("HGETALL").arg(key).query_async(&mut redis).await.unwrap();
        for (row, count) in rows {
            if !row.starts_with('#') {
                *totals.entry(row).or_default() += count;
            }
        }
    }
    totals
}

/// Waits until Redis has counted this number of refusals.
async fn wait_until_counted(fixture: &Fixture, refusals: i64) {
    let all_counted = || async { (pending_refusals(fixture).await.values().sum::<i64>() == refusals).then_some(()) };
    eventually(&format!("{refusals} refusals"), LIMIT, all_counted).await;
}

/// Adds this duration to the time of Redis, and writes the refusals that are then due. Returns the number of quarters
/// of an hour that were written.
async fn write_refusals(fixture: &Fixture, by: time::Duration) -> usize {
    let app = fixture.app.clone();
    fixture.with_later_clock(by).await.write_refusals(move |id| *id == app).await.unwrap()
}

/// Kind, user, session, IP address, count and detail of an audit event.
type Row = (String, Option<Uuid>, Option<Uuid>, Option<String>, i64, Option<String>);

async fn event_rows(fixture: &Fixture) -> Vec<Row> {
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

async fn count_events(fixture: &Fixture) -> i64 {
    fixture.count("SELECT count(*) FROM audit_events").await
}

fn lost_events(stores: &Stores) -> u64 {
    let mut registry = Registry::default();
    stores.postgres.audit_metrics().register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("lost_total "));
    line.unwrap_or_else(|| panic!("{text}")).parse().unwrap()
}

#[tokio::test]
async fn a_recorded_event_is_stored() {
    let fixture = Fixture::new().await;
    let (user, session) = (a_user_id(), SessionId(Uuid::from_u128(7)));
    let event = an_event(EventKind::LoggedIn, user).in_session(session).with_detail(Detail::from_amr(Amr::Password));
    fixture.stores.record(&fixture.app, event).await;
    let detail = Some(r#"{"amr": "pwd"}"#.to_owned());
    let row = ("logged_in".to_owned(), Some(user.0), Some(session.0), Some("192.0.2.1".to_owned()), 1, detail);
    assert_eq!(event_rows(&fixture).await, [row]);

    let [seen] = &fixture.stores.activity(&fixture.app, user, now() - time::Duration::hours(1)).await.unwrap()[..]
    else {
        panic!("one event")
    };
    assert_eq!((seen.kind, seen.session, seen.count), (EventKind::LoggedIn, Some(session), 1));
    assert_eq!(seen.ip.as_deref(), Some("192.0.2.1"));
}

#[tokio::test]
async fn many_concurrent_events_cost_few_transactions() {
    let fixture = Fixture::new().await;
    let mut tasks = JoinSet::new();
    for _ in 0..500 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move { stores.record(&app, an_event(EventKind::LoggedIn, a_user_id())).await });
    }
    tasks.join_all().await;
    assert_eq!(count_events(&fixture).await, 500);
    let transactions = fixture.count("SELECT count(DISTINCT xmin::text) FROM audit_events").await;
    assert!(transactions < 100, "{transactions}");
}

#[tokio::test]
async fn an_event_without_a_user_is_not_stored() {
    let fixture = Fixture::new().await;
    let event = Event { user: None, ..an_event(EventKind::PasswordResetRequested, a_user_id()) };
    fixture.stores.record(&fixture.app, event).await;
    assert_eq!(count_events(&fixture).await, 0);
}

#[tokio::test]
async fn a_user_sees_their_newest_hundred_events() {
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
    assert_eq!(count_events(&fixture).await, 122);

    let a_day_ago = at - time::Duration::days(1);
    let seen = fixture.stores.activity(&fixture.app, user, a_day_ago).await.unwrap();
    assert_eq!(seen.len(), 100);
    assert!(seen.iter().all(|event| event.kind == EventKind::LoggedIn));
    assert!(seen.is_sorted_by(|one, next| one.at > next.at), "newest first");
    assert!(seen[99].at > at - time::Duration::minutes(100));
    let recent = fixture.stores.activity(&fixture.app, user, at - time::Duration::minutes(9)).await.unwrap();
    assert!(recent.len() < 12, "no event from before that time");
    assert_eq!(fixture.stores.activity(&fixture.app, other, a_day_ago).await.unwrap().len(), 1);

    // A newer server has written events of a kind that this server does not know.
    fixture
        .execute(
            "INSERT INTO audit_events (app_id, id, at, kind, user_id)
             SELECT app_id, gen_random_uuid(), now(), 'of_tomorrow', user_id FROM audit_events",
        )
        .await;
    assert_eq!(fixture.stores.activity(&fixture.app, user, a_day_ago).await.unwrap().len(), 100);
}

#[tokio::test]
async fn events_cannot_be_changed() {
    let fixture = Fixture::new().await;
    fixture.stores.record(&fixture.app, an_event(EventKind::LoggedIn, a_user_id())).await;
    let mut connection = fixture.database.connect().await.unwrap();
    let partition: String = sqlx::query_scalar("SELECT tableoid::regclass::text FROM audit_events")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(partition.starts_with("audit_events_2"), "the event is in the partition of its month: {partition}");
    for table in ["audit_events", &partition] {
        let change = format!("UPDATE {table} SET kind = 'logged_out'");
        let error = sqlx::raw_sql(sqlx::AssertSqlSafe(change)).execute(&mut connection).await.unwrap_err();
        let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
        assert_eq!(code.as_deref(), Some("42501"), "{table}");
    }
    assert_eq!(fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'logged_in'").await, 1);
}

#[tokio::test]
async fn events_are_lost_and_counted_without_postgres_and_calls_do_not_wait_long() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = stores_via(&fixture, &proxy);
    stores.record(&fixture.app, an_event(EventKind::LoggedIn, a_user_id())).await;
    assert_eq!((count_events(&fixture).await, lost_events(&stores)), (1, 0));

    proxy.stall();
    let started = Instant::now();
    stores.record(&fixture.app, an_event(EventKind::LoggedIn, a_user_id())).await;
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    proxy.refuse().await;
    for _ in 0..5 {
        stores.record_later(&fixture.app, an_event(EventKind::RefreshLate, a_user_id()));
    }
    eventually("the loss of all six", LIMIT, || async { (lost_events(&stores) == 6).then_some(()) }).await;

    proxy.restore().unwrap();
    let written = || async {
        stores.record(&fixture.app, an_event(EventKind::Renamed, a_user_id())).await;
        (fixture.count("SELECT count(*) FROM audit_events WHERE kind = 'renamed'").await > 0).then_some(())
    };
    eventually("events are written again", LIMIT, written).await;
}

#[tokio::test]
async fn an_event_survives_the_end_of_its_server() {
    let fixture = Fixture::new().await;
    let another = fixture.another_server().await;
    for _ in 0..300 {
        another.record_later(&fixture.app, an_event(EventKind::LoggedOut, a_user_id()));
    }
    another.postgres.close().await;
    assert_eq!(count_events(&fixture).await, 300);
}

#[tokio::test]
async fn refusals_of_a_quarter_of_an_hour_are_one_row_per_account_and_client_address() {
    let fixture = Fixture::new().await;
    let quarter_start = time_to_next_quarter_hour();
    let (one, another) =
        (server_with_clock(&fixture, quarter_start).await, server_with_clock(&fixture, quarter_start).await);
    let (ada, eva) = (a_user_id(), a_user_id());
    for number in 0..9 {
        let stores = if number % 2 == 0 { &one } else { &another };
        stores.count_refusal(&fixture.app, wrong_password(Some(ada), "192.0.2.1"));
    }
    one.count_refusal(&fixture.app, wrong_password(Some(ada), "192.0.2.2"));
    one.count_refusal(&fixture.app, wrong_password(Some(eva), "2001:db8:1:2::7"));
    let reset_refusal = Refusal { kind: RefusalKind::PasswordReset, ..wrong_password(Some(ada), "192.0.2.1") };
    another.count_refusal(&fixture.app, reset_refusal);
    for _ in 0..3 {
        another.count_refusal(&fixture.app, wrong_password(None, "192.0.2.9"));
    }
    wait_until_counted(&fixture, 15).await;
    assert_eq!(write_refusals(&fixture, quarter_start).await, 0);
    assert_eq!(count_events(&fixture).await, 0, "nothing is written before the quarter of an hour is over");

    assert_eq!(write_refusals(&fixture, quarter_start + AFTER_QUARTER_HOUR).await, 1);
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
    let mut found = event_rows(&fixture).await;
    found.sort();
    assert_eq!(found, expected);
    assert_eq!(write_refusals(&fixture, quarter_start + AFTER_QUARTER_HOUR).await, 0, "each row is written once");
    assert!(pending_refusals(&fixture).await.is_empty());
    let seen = fixture.stores.activity(&fixture.app, eva, now() - time::Duration::hours(1)).await.unwrap();
    assert_eq!(seen[0].ip.as_deref(), Some("2001:db8:1:2::/64"));
}

#[tokio::test]
async fn concurrent_or_repeated_writes_store_each_row_once() {
    let fixture = Fixture::new().await;
    let quarter_start = time_to_next_quarter_hour();
    let stores = server_with_clock(&fixture, quarter_start).await;
    for number in 0..150 {
        stores.count_refusal(&fixture.app, wrong_password(Some(a_user_id()), &format!("192.0.2.{number}")));
    }
    wait_until_counted(&fixture, 150).await;
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let key: Vec<String> = redis::cmd("KEYS")
        .arg(format!("lk:{{{}:audit}}:refusals:*", fixture.app))
        .query_async(&mut redis)
        .await
        .unwrap();
    let copy: Vec<u8> = redis::cmd("DUMP").arg(&key[0]).query_async(&mut redis).await.unwrap();

    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let (stores, app) = (fixture.with_later_clock(quarter_start + AFTER_QUARTER_HOUR).await, fixture.app.clone());
        tasks.spawn(async move { stores.write_refusals(|id| *id == app).await.unwrap() });
    }
    assert!(tasks.join_all().await.into_iter().sum::<usize>() >= 1);
    assert_eq!(fixture.count("SELECT sum(count)::bigint FROM audit_events").await, 150);

    // Restores the refusals in Redis: the state after a server crashed right after the write, or after a failover.
    let quarter = key[0].rsplit(':').next().unwrap();
    let () = redis::cmd("RESTORE").arg(&key[0]).arg(60_000).arg(copy).query_async(&mut redis).await.unwrap();
    let () = redis::cmd("ZADD")
        .arg("lk:{:audit}:due")
        .arg((quarter.parse::<i64>().unwrap() + 1) * 900_000)
        .arg(format!("{} {quarter}", fixture.app))
        .query_async(&mut redis)
        .await
        .unwrap();
    assert_eq!(write_refusals(&fixture, quarter_start + AFTER_QUARTER_HOUR).await, 1);
    assert_eq!(fixture.count("SELECT sum(count)::bigint FROM audit_events").await, 150);
    assert_eq!(count_events(&fixture).await, 150);
}

#[tokio::test]
async fn refusals_cannot_fill_the_table_of_audit_events() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let quarter_start = time_to_next_quarter_hour();
    let stores = server_with_clock(&fixture, quarter_start).await;
    for number in 1..=30 {
        stores.count_refusal(&fixture.app, wrong_password(Some(user), &format!("192.0.2.{number}")));
    }
    for number in 0..300 {
        let ip = format!("198.51.{}.{}", number / 200, number % 200);
        stores.count_refusal(&fixture.app, wrong_password(None, &ip));
    }
    wait_until_counted(&fixture, 330).await;
    write_refusals(&fixture, quarter_start + AFTER_QUARTER_HOUR).await;
    let rows_and_refusals = async |filter: &str| {
        let rows = fixture.count(&format!("SELECT count(*) FROM audit_events WHERE {filter}")).await;
        let sum = format!("SELECT coalesce(sum(count), 0)::bigint FROM audit_events WHERE {filter}");
        (rows, fixture.count(&sum).await)
    };
    assert_eq!(rows_and_refusals("user_id IS NOT NULL AND ip IS NOT NULL").await, (20, 20));
    assert_eq!(
        rows_and_refusals("user_id IS NOT NULL AND ip IS NULL").await,
        (1, 10),
        "refusals for a user are still counted"
    );
    assert_eq!(rows_and_refusals("user_id IS NULL AND ip IS NOT NULL").await, (200, 200));
    assert_eq!(rows_and_refusals("user_id IS NULL AND ip IS NULL").await, (1, 100));
}

#[tokio::test]
async fn a_refusal_before_the_account_lookup_counts_for_the_account() {
    let fixture = Fixture::new().await;
    let user = a_user_id();
    let refusal_of = |email: &str, user| {
        let account = Some(account(&fixture.app, email));
        Refusal { kind: RefusalKind::Login, account, user, client: client("192.0.2.1") }
    };
    fixture.stores.count_refusal(&fixture.app, refusal_of("ada@example.com", Some(user)));
    wait_until_counted(&fixture, 1).await;
    let limited = |email| Refusal { kind: RefusalKind::LoginLimit, ..refusal_of(email, None) };
    fixture.stores.count_refusal(&fixture.app, limited("ada@example.com"));
    fixture.stores.count_refusal(&fixture.app, limited("nobody@example.com"));
    wait_until_counted(&fixture, 3).await;
    let pending = pending_refusals(&fixture).await;
    assert!(pending.keys().all(|row| !row.contains('@') && !row.contains("example")), "{pending:?}");
    write_refusals(&fixture, AFTER_QUARTER_HOUR).await;
    let limited: Vec<_> = event_rows(&fixture).await.into_iter().filter(|row| row.0 == "login_limited").collect();
    let users: Vec<_> = limited.iter().map(|row| row.1).collect();
    assert_eq!(users, [Some(user.0), None]);
}

#[tokio::test]
async fn refusals_wait_while_postgres_is_unavailable() {
    let fixture = Fixture::new().await;
    fixture.stores.count_refusal(&fixture.app, wrong_password(Some(a_user_id()), "192.0.2.1"));
    wait_until_counted(&fixture, 1).await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = Stores {
        postgres: stores_via(&fixture, &proxy).postgres,
        ..fixture.with_later_clock(AFTER_QUARTER_HOUR).await
    };
    proxy.refuse().await;
    let app = fixture.app.clone();
    stores.write_refusals(|id| *id == app).await.unwrap_err();
    wait_until_counted(&fixture, 1).await;
    proxy.restore().unwrap();
    assert_eq!(write_refusals(&fixture, AFTER_QUARTER_HOUR).await, 1);
    assert_eq!(count_events(&fixture).await, 1);
}

#[tokio::test]
async fn a_deleted_app_leaves_no_events_and_gets_none() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let claim = OwnershipClaim {
        app: app.clone(),
        namespace: "shop".to_owned(),
        incarnation: Some("i1".to_owned()),
        handover: 0,
    };
    stores.postgres.claim_apps(std::slice::from_ref(&claim)).await.unwrap();
    let user = a_new_user("ada@example.com");
    let id = user.id;
    stores.create_user(app, user, None).await.unwrap();
    stores.record(app, an_event(EventKind::LoggedIn, id)).await;
    let old_event = Event { at: now() - time::Duration::days(800), ..an_event(EventKind::LoggedIn, id) };
    stores.record(app, old_event).await;
    stores.record(&an_app(), an_event(EventKind::LoggedIn, id)).await;
    stores.count_refusal(app, wrong_password(Some(id), "192.0.2.1"));
    wait_until_counted(&fixture, 1).await;
    assert_eq!(count_events(&fixture).await, 4);

    while stores.delete_users(&claim, 2, || true).await.unwrap() != DeleteOutcome::Done {}
    assert_eq!(event_rows(&fixture).await, []);
    stores.record(app, an_event(EventKind::Renamed, id)).await;
    write_refusals(&fixture, AFTER_QUARTER_HOUR).await;
    assert_eq!(event_rows(&fixture).await, []);
    assert_eq!(count_events(&fixture).await, 1, "the event of the other App");
    assert_eq!(lost_events(stores), 0);
}

#[tokio::test]
async fn monthly_partitions_are_created_once_in_advance() {
    let fixture = Arc::new(Fixture::new().await);
    let months = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'audit_events'::regclass";
    assert_eq!(fixture.count(months).await, 1 + 12 + 1, "this month, a year, and the default partition");
    let third_month = "audit_events_' || to_char(now() AT TIME ZONE 'UTC' + interval '2 months', 'YYYY_MM')";
    fixture.execute(&format!("DO $$ BEGIN EXECUTE 'DROP TABLE {third_month}; END $$")).await;
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let fixture = Arc::clone(&fixture);
        tasks.spawn(async move { fixture.count("SELECT latchkey_audit_make_months(3)::bigint").await });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<i64>(), 1, "only one call makes the missing month");
    assert_eq!(fixture.count(months).await, 14);

    // The events of a month without a partition are in the default partition, and stay there.
    fixture.execute(&format!("DO $$ BEGIN EXECUTE 'DROP TABLE {third_month}; END $$")).await;
    fixture
        .execute(
            "INSERT INTO audit_events (app_id, id, at, kind) SELECT 'shop', gen_random_uuid(),
             (date_trunc('month', now() AT TIME ZONE 'UTC') + interval '2 months 1 day') AT TIME ZONE 'UTC', 'renamed'",
        )
        .await;
    assert_eq!(count_events(&fixture).await, 1, "an event without a partition of its month is stored too");
    fixture.count("SELECT latchkey_audit_make_months(3)::bigint").await;
    assert_eq!(count_events(&fixture).await, 1);
}
