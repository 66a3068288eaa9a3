//! Audit, as it comes from requests: what is written down of an account, by whom and from where; and how long it stays.

use std::{collections::HashMap, fs, time::Duration};

use http::StatusCode;
use latchkey_server::{
    audit,
    config::Apps,
    domain::clock::{Clock, SystemClock},
    hashing::{Hashing, HashingOptions},
    providers::SocialProviders,
    store::{
        Stores, UrlSource,
        postgres::{self, Postgres},
        redis::{self, Redis},
    },
};
use latchkey_tests::{
    client::{Anonymous, Answer},
    eventually,
    stack::Stack,
};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    support::{NAME, NEW_PASSWORD, PASSWORD, Shop, WRONG_CODE, WRONG_PASSWORD, app},
    trouble::loose,
};

const EMAIL: &str = "Ada.Lovelace@example.com";
const UNKNOWN: &str = "nobody.at.all@example.com";
const LIMIT: Duration = Duration::from_secs(20);

const PAST_MONTHS: &str = "SELECT count(*) FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = 'audit_events'::regclass
        AND relname < 'audit_events_' || to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM')";

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
struct Row {
    kind: String,
    user_id: Option<Uuid>,
    session_id: Option<Uuid>,
    ip: Option<String>,
    count: i64,
    detail: Option<Value>,
}

/// The rows of an App, in the order in which things happened.
async fn rows(shop: &Shop) -> Vec<Row> {
    let mut connection = shop.stack.database.connect().await.expect("the database is there");
    sqlx::query_as(
        "SELECT kind, user_id, session_id, abbrev(ip) AS ip, count, detail FROM audit_events
         WHERE app_id = $1 ORDER BY at, id",
    )
    .bind(shop.id())
    .fetch_all(&mut connection)
    .await
    .expect("the rows")
}

/// The first row of a kind, which may come after the answer.
async fn row(shop: &Shop, kind: &str) -> Row {
    let found = || async { rows(shop).await.into_iter().find(|row| row.kind == kind) };
    eventually(kind, LIMIT, found).await
}

fn session_of(answer: &Answer) -> Uuid {
    answer.string("session_id").parse().expect("a session's id")
}

impl Row {
    /// Asserts where it came from and by which session.
    #[track_caller]
    fn is_by(&self, client: &Anonymous, session: Option<Uuid>) -> &Self {
        assert_eq!(self.ip, Some(client.address().to_string()), "{self:?}");
        assert_eq!((self.session_id, self.count), (session, 1), "{self:?}");
        self
    }
}

/// The stores of a service, as one more server has them, by a clock that is so much later.
fn stores(shop: &Shop, later: time::Duration) -> Stores {
    stores_at(shop, &shop.stack.database.url, later)
}

fn stores_at(shop: &Shop, postgres: &str, later: time::Duration) -> Stores {
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::given(postgres)) };
    let redis = redis::Options::new(UrlSource::given(shop.stack.redis().url()));
    Stores {
        postgres: Postgres::connect(options).expect("the URL is one of Postgres"),
        redis: Redis::connect(redis::Options { clock_offset: later, ..redis }).expect("the URL is one of Redis"),
        hashing: Hashing::start(HashingOptions::default(), &mut Registry::default()),
        providers: SocialProviders::default(),
    }
}

/// Writes the refusals of this quarter of an hour, as a server does when it is over.
async fn quarter_ends(shop: &Shop) {
    let stores = stores(shop, time::Duration::minutes(16));
    let id = shop.id().to_owned();
    stores.write_refusals(|app| app.as_str() == id).await.expect("the stores are there");
}

/// Waits until Redis has counted so many refusals.
async fn refused(shop: &Shop, refusals: i64) {
    let all = || async {
        let mut redis = shop.stack.redis().connect().await.expect("Redis is there");
        let pattern = format!("lk:{{{}:audit}}:refusals:*", shop.id());
        let keys: Vec<String> = ::redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("the keys");
        let mut sum = 0;
        for key in keys {
            let rows: HashMap<String, i64> =
                ::redis::cmd("HGETALL").arg(key).query_async(&mut redis).await.expect("the rows");
            sum += rows.iter().filter(|(row, _)| !row.starts_with('#')).map(|(_, count)| count).sum::<i64>();
        }
        (sum == refusals).then_some(())
    };
    eventually(&format!("{refusals} refusals"), LIMIT, all).await;
}

#[tokio::test]
async fn each_step_of_an_account_is_a_row_of_its_client_and_session() {
    let shop = Shop::open().await;
    let id = shop.id();
    let clients: Vec<Anonymous> = (0..7).map(|_| shop.client()).collect();
    let answer = clients[0].register(id, NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let user: Uuid = answer.string("local_id").parse().unwrap();
    row(&shop, "registered").await.is_by(&clients[0], None);
    clients[1].register(id, NAME, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::OK);
    row(&shop, "registered_again").await.is_by(&clients[1], None);

    let login = clients[2].login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    // With the answer it is there.
    let logged_in = rows(&shop).await.pop().unwrap();
    assert_eq!((logged_in.kind.as_str(), &logged_in.detail), ("logged_in", &Some(json!({ "amr": "pwd" }))));
    logged_in.is_by(&clients[2], Some(session_of(&login)));
    let signed_in = clients[3].signed_in(id, login.string("token"));
    signed_in.verify().await.expect(StatusCode::OK);
    row(&shop, "confirmation_requested").await.is_by(&clients[3], Some(session_of(&login)));

    let code = shop.code(EMAIL, 3).await;
    let confirmed = clients[4].confirm(id, &code).await.expect(StatusCode::OK);
    row(&shop, "confirmed").await.is_by(&clients[4], None);
    let logged_in = rows(&shop).await.pop().unwrap();
    assert_eq!((logged_in.kind.as_str(), &logged_in.detail), ("logged_in", &Some(json!({ "amr": "otp" }))));
    logged_in.is_by(&clients[4], Some(session_of(&confirmed)));

    clients[5].forgot_password(id, EMAIL).await.expect(StatusCode::OK);
    row(&shop, "password_reset_requested").await.is_by(&clients[5], None);
    let code = shop.code(EMAIL, 4).await;
    clients[6].confirm_password(id, EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    row(&shop, "password_reset").await.is_by(&clients[6], None);

    let rows = rows(&shop).await;
    let kinds: Vec<&str> = rows.iter().map(|row| row.kind.as_str()).collect();
    let expected = [
        "registered",
        "registered_again",
        "logged_in",
        "confirmation_requested",
        "confirmed",
        "logged_in",
        "password_reset_requested",
        "password_reset",
    ];
    assert_eq!(kinds, expected, "one row each");
    assert!(rows.iter().all(|row| row.user_id == Some(user)));
}

#[tokio::test]
async fn confirming_in_a_session_names_that_session() {
    let shop = Shop::open().await;
    shop.register(EMAIL).await;
    let client = shop.client();
    let login = client.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let code = shop.code(EMAIL, 1).await;
    client.signed_in(shop.id(), login.string("token")).confirm(&code).await.expect(StatusCode::OK);
    row(&shop, "confirmed").await.is_by(&client, Some(session_of(&login)));
    let logged_in = rows(&shop).await.into_iter().filter(|row| row.kind == "logged_in").count();
    assert_eq!(logged_in, 1, "no session was opened");
}

#[tokio::test]
async fn what_is_refused_to_all_leaves_no_row() {
    let shop = Shop::open().await;
    let (id, client) = (shop.id(), shop.client());
    client.register(id, NAME, EMAIL, "short").await.expect(StatusCode::BAD_REQUEST);
    client.forgot_password(id, UNKNOWN).await.expect(StatusCode::OK);
    client.confirm(id, WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    // Behind it in the queue.
    shop.register(EMAIL).await;
    client.forgot_password(id, EMAIL).await.expect(StatusCode::OK);
    row(&shop, "password_reset_requested").await;
    let kinds: Vec<String> = rows(&shop).await.into_iter().map(|row| row.kind).collect();
    assert_eq!(kinds, ["registered", "password_reset_requested"]);
}

#[tokio::test]
async fn ends_of_sessions_and_bad_refresh_tokens_are_events() {
    let shop = Shop::with(app().set("/tokens/refreshGraceSeconds", 0)).await;
    let (id, client) = (shop.id(), shop.confirmed(EMAIL).await);
    let log_in = async || client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let as_of = |login: &Answer| client.signed_in(id, login.string("token"));

    let (one, two, three) = (log_in().await, log_in().await, log_in().await);
    as_of(&one).delete(&format!("sessions/{}", session_of(&two))).await.expect(StatusCode::OK);
    let ended = row(&shop, "session_ended").await;
    assert_eq!(ended.is_by(&client, Some(session_of(&one))).detail, Some(json!({ "ended": session_of(&two) })));
    as_of(&one).delete("sessions").await.expect(StatusCode::OK);
    let ended = row(&shop, "sessions_ended").await;
    // That of *confirm* too.
    assert_eq!(ended.is_by(&client, Some(session_of(&one))).detail, Some(json!({ "sessions": 2 })));
    as_of(&three).get("sessions").await.expect(StatusCode::UNAUTHORIZED);
    as_of(&one).send(as_of(&one).request(http::Method::POST, "logout")).await.expect(StatusCode::OK);
    row(&shop, "logged_out").await.is_by(&client, Some(session_of(&one)));

    let revoked = log_in().await;
    for _ in 0..2 {
        let token = json!({ "token": revoked.string("refresh_token") });
        client.post(&format!("v1/{id}/revoke"), &token).await.expect(StatusCode::OK);
    }
    let is_its = |row: &Row| row.kind == "session_ended" && row.session_id == Some(session_of(&revoked));
    let ended = || async { rows(&shop).await.into_iter().find(is_its) };
    eventually("the revocation", LIMIT, ended).await;

    let stolen = log_in().await;
    let first = stolen.string("refresh_token");
    let second = client.refresh(id, first).await.expect(StatusCode::OK);
    let thief = shop.client();
    thief.refresh(id, first).await.expect(StatusCode::OK);
    row(&shop, "refresh_late").await.is_by(&thief, Some(session_of(&stolen)));
    client.refresh(id, second.string("refresh_token")).await.expect(StatusCode::OK);
    thief.refresh(id, first).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    row(&shop, "refresh_stolen").await.is_by(&thief, Some(session_of(&stolen)));
    let ended = rows(&shop).await.into_iter().filter(|row| row.kind == "session_ended").count();
    assert_eq!(ended, 2, "what ended nothing is no event");
}

#[tokio::test]
async fn refusals_are_one_row_when_their_quarter_of_an_hour_is_over() {
    let shop = Shop::with(app().limit("loginFailuresPerClient", &[(3, 900)])).await;
    let id = shop.id();
    let answer = shop.register(EMAIL).await;
    let user: Uuid = answer.string("local_id").parse().unwrap();
    let (guesser, other) = (shop.client(), shop.client());
    for _ in 0..3 {
        guesser.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    }
    refused(&shop, 3).await;
    for _ in 0..2 {
        guesser.login(id, EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
    }
    other.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    guesser.login(id, UNKNOWN, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    guesser.confirm_password(id, EMAIL, WRONG_CODE, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    guesser.confirm_password(id, UNKNOWN, WRONG_CODE, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    refused(&shop, 9).await;
    assert_eq!(rows(&shop).await.len(), 1, "the registration alone");
    quarter_ends(&shop).await;

    let mut found: Vec<_> =
        rows(&shop).await.into_iter().map(|row| (row.kind, row.user_id, row.ip, row.count)).collect();
    let row = |kind: &str, user, client: &Anonymous, count| {
        (kind.to_owned(), user, Some(client.address().to_string()), count)
    };
    let mut expected = vec![
        row("login_refused", Some(user), &guesser, 3),
        row("login_limited", Some(user), &guesser, 2),
        row("login_refused", Some(user), &other, 1),
        row("login_refused", None, &guesser, 1),
        row("password_reset_refused", Some(user), &guesser, 1),
        row("password_reset_refused", None, &guesser, 1),
    ];
    found.retain(|(kind, ..)| kind != "registered");
    found.sort();
    expected.sort();
    assert_eq!(found, expected);

    let owner = other.sign_in(id, EMAIL, PASSWORD).await;
    let activity = owner.get("user/activity").await.expect(StatusCode::OK);
    let seen = activity.body["events"].as_array().unwrap();
    let shown = seen.iter().find(|event| event["kind"] == "login_refused" && event["count"] == 3).unwrap();
    assert_eq!(shown["ip"], guesser.address().to_string());
    assert_eq!(shown["at"].as_i64().unwrap() % 900, 0);
    assert_eq!(seen.len(), 6, "its own alone: {seen:?}");
}

#[tokio::test]
async fn activity_is_ones_own_and_the_newest_hundred() {
    let shop = Shop::with(loose("shop")).await;
    let id = shop.id();
    let client = shop.confirmed(EMAIL).await;
    let stranger = shop.confirmed("grace@example.com").await.sign_in(id, "grace@example.com", PASSWORD).await;
    shop.sql(&format!(
        "INSERT INTO audit_events (app_id, id, at, kind, user_id)
         SELECT app_id, gen_random_uuid(), now() - make_interval(mins => number), 'renamed', user_id
         FROM audit_events, generate_series(1, 150) AS number WHERE kind = 'registered' AND ip = '{}'",
        // Both registered from an address of their own; the owner's is not that of the session.
        rows(&shop).await[0].ip.as_deref().unwrap()
    ))
    .await;
    let login = client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let owner = client.signed_in(id, login.string("token"));
    let answer = owner.get("user/activity").await.expect(StatusCode::OK);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let events = answer.body["events"].as_array().unwrap();
    assert_eq!(events.len(), 100);
    let newest = &events[0];
    assert_eq!(newest["kind"], "logged_in");
    assert_eq!(newest["ip"], client.address().to_string());
    assert_eq!(newest["session_id"], login.body["session_id"]);
    assert_eq!(newest["count"], 1);
    assert!((newest["at"].as_i64().unwrap() - login.integer("expires_at")).abs() < 3600, "Unix seconds");
    assert!(events.is_sorted_by_key(|event| -event["at"].as_i64().unwrap()), "the newest first");

    let events = stranger.get("user/activity").await.expect(StatusCode::OK).body["events"].as_array().unwrap().clone();
    let kinds: Vec<&str> = events.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["logged_in", "logged_in", "confirmed", "registered"]);
    let path = format!("v1/{id}/user/activity");
    client.get(&path).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
}

#[tokio::test]
async fn rows_hold_no_address_name_password_code_or_token() {
    let shop = Shop::with(loose("shop")).await;
    let (id, client) = (shop.id(), shop.client());
    client.register(id, NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let login = client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    client.login(id, UNKNOWN, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let code = shop.code(EMAIL, 1).await;
    client.confirm(id, &code).await.expect(StatusCode::OK);
    let reset = shop.reset_code(EMAIL, 2).await;
    client.confirm_password(id, UNKNOWN, &reset, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    client.confirm_password(id, EMAIL, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
    refused(&shop, 3).await;
    quarter_ends(&shop).await;
    row(&shop, "password_reset_requested").await;

    let mut connection = shop.stack.database.connect().await.unwrap();
    let kept: String = sqlx::query_scalar("SELECT string_agg(audit_events::text, ' ') FROM audit_events")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(kept.contains("login_refused") && kept.contains(&client.address().to_string()), "{kept}");
    let kept = kept.to_lowercase();
    let mut secrets = vec![EMAIL, UNKNOWN, "example.com", NAME, PASSWORD, NEW_PASSWORD, WRONG_PASSWORD, &code, &reset];
    secrets.extend([login.string("token"), login.string("refresh_token")]);
    for secret in secrets {
        assert!(!kept.contains(&secret.to_lowercase()), "{secret} is kept in {kept}");
    }
}

#[tokio::test]
async fn without_postgres_sessions_go_on_and_the_loss_is_counted() {
    let app = app().set("/tokens/refreshGraceSeconds", 0);
    let shop = Shop::of(app, Stack::builder().proxied()).await;
    let (client, token) = shop.session(EMAIL).await;
    let login = client.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let before = rows(&shop).await.len();
    let proxy = shop.stack.postgres_proxy.as_ref().unwrap();
    proxy.refuse().await;

    let first = login.string("refresh_token");
    client.refresh(shop.id(), first).await.expect(StatusCode::OK);
    client.refresh(shop.id(), first).await.expect(StatusCode::OK);
    let signed_in = client.signed_in(shop.id(), &token);
    signed_in.send(signed_in.request(http::Method::POST, "logout")).await.expect(StatusCode::OK);
    let counted = || async {
        let metrics = shop.stack.server().ops("metrics").await.expect(StatusCode::OK).text;
        metrics.lines().any(|line| line == "latchkey_audit_lost_total 2").then_some(())
    };
    eventually("the loss of two events", LIMIT, counted).await;
    proxy.restore().unwrap();
    assert_eq!(rows(&shop).await.len(), before);
    let again = || async {
        let login = client.login(shop.id(), EMAIL, PASSWORD).await;
        (login.status == StatusCode::OK).then_some(login)
    };
    let login = eventually("log-ins again", LIMIT, again).await;
    let written = |row: &Row| row.session_id == Some(session_of(&login));
    let found = || async { rows(&shop).await.into_iter().find(written) };
    eventually("events again", LIMIT, found).await;
}

/// Apps that keep their events for so many days.
fn kept_for(shop: &Shop, apps: &[(&str, u32)]) -> Apps {
    let document = fs::read(shop.stack.rendered().join(format!("{}.json", shop.id()))).expect("the document is there");
    let mut document: Value = serde_json::from_slice(&document).expect("the document is JSON");
    let all = Apps::default();
    for (app, days) in apps {
        document["appID"] = json!(app);
        document["auditRetentionDays"] = json!(days);
        all.put(&app.parse().expect("an appID"), document.to_string().as_bytes());
    }
    assert_eq!(all.len(), apps.len());
    all
}

/// A month in the past, as a partition, with so many events of these Apps. In one transaction: the server's own upkeep
/// drops a month that is empty.
async fn past_month(shop: &Shop, months: u32, events: &[(&str, u32)]) {
    let events: String = events.iter().map(|(app, count)| insert(app, &months_ago(months), *count)).collect();
    shop.sql(&format!(
        "DO $$
         DECLARE
            month timestamp := date_trunc('month', now() AT TIME ZONE 'UTC') - interval '{months} months';
         BEGIN
            EXECUTE format('CREATE TABLE %I PARTITION OF audit_events FOR VALUES FROM (%L) TO (%L)',
                'audit_events_' || to_char(month, 'YYYY_MM'), month AT TIME ZONE 'UTC',
                (month + interval '1 month') AT TIME ZONE 'UTC');
         END $$;
         {events}"
    ))
    .await;
}

fn insert(app: &str, when: &str, count: u32) -> String {
    format!(
        "INSERT INTO audit_events (app_id, id, at, kind)
         SELECT '{app}', gen_random_uuid(), {when}, 'renamed' FROM generate_series(1, {count});"
    )
}

async fn events_at(shop: &Shop, app: &str, when: &str, count: u32) {
    shop.sql(&insert(app, when, count)).await;
}

async fn count(shop: &Shop, sql: &str) -> i64 {
    let mut connection = shop.stack.database.connect().await.unwrap();
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.unwrap()
}

async fn left(shop: &Shop, app: &str) -> i64 {
    count(shop, &format!("SELECT count(*) FROM audit_events WHERE app_id = '{app}'")).await
}

fn months_ago(months: u32) -> String {
    let month = format!("date_trunc('month', now() AT TIME ZONE 'UTC') - interval '{months} months'");
    format!("({month} + interval '5 days') AT TIME ZONE 'UTC'")
}

#[tokio::test]
async fn old_months_go_as_a_whole_and_shorter_times_by_their_rows() {
    let shop = Shop::open().await;
    let apps = kept_for(&shop, &[("long", 365), ("short", 30)]);
    past_month(&shop, 15, &[("long", 3), ("short", 3)]).await;
    // With an App that is not served: nobody says for how long its events are kept.
    past_month(&shop, 14, &[("long", 3), ("short", 3), ("elsewhere", 2)]).await;
    // A month that nobody made.
    events_at(&shop, "long", &months_ago(20), 250).await;
    for (days, events) in [(40, 300), (20, 5)] {
        for app in ["long", "short", "elsewhere"] {
            events_at(&shop, app, &format!("now() - interval '{days} days'"), events).await;
        }
    }
    let stores = stores(&shop, time::Duration::ZERO);
    assert!(audit::keep(&stores, &apps, SystemClock.now(), true).await.unwrap());

    assert_eq!(left(&shop, "long").await, 305, "nothing of the last year is gone");
    assert_eq!(left(&shop, "short").await, 5);
    assert_eq!(left(&shop, "elsewhere").await, 307, "all of it");
    assert_eq!(count(&shop, PAST_MONTHS).await, 1, "the month that only served Apps had is dropped");

    let nothing = kept_for(&shop, &[]);
    audit::keep(&stores, &nothing, SystemClock.now(), true).await.unwrap();
    assert_eq!(left(&shop, "elsewhere").await, 307, "without any App nothing is known of their times");
}

#[tokio::test]
async fn a_role_that_may_only_use_the_tables_is_enough_and_leave_to_call_makes_months() {
    let shop = Shop::open().await;
    let apps = kept_for(&shop, &[("long", 365), ("short", 30)]);
    let (role, database) = (format!("server_{:016x}", rand::random::<u64>()), &shop.stack.database);
    shop.sql(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'secret';
         GRANT USAGE ON SCHEMA public TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role};
         REVOKE UPDATE ON audit_events FROM {role};"
    ))
    .await;
    let (_, address) = database.url.split_once('@').unwrap();
    let stores = stores_at(&shop, &format!("postgres://{role}:secret@{address}"), time::Duration::ZERO);
    past_month(&shop, 15, &[("long", 3)]).await;
    events_at(&shop, "short", "now() - interval '40 days'", 3).await;
    let month = "to_regclass('audit_events_' || to_char(now() AT TIME ZONE 'UTC' + interval '1 month', 'YYYY_MM'))";
    shop.sql(&format!("DO $$ BEGIN EXECUTE 'DROP TABLE ' || {month}; END $$")).await;
    let there = format!("SELECT count({month}::oid)");
    assert_eq!(count(&shop, &there).await, 0);

    assert!(!audit::keep(&stores, &apps, SystemClock.now(), true).await.unwrap());
    assert_eq!((left(&shop, "long").await, left(&shop, "short").await), (0, 0), "rows go by themselves");
    assert_eq!(count(&shop, &there).await, 0);

    shop.sql(&format!("GRANT EXECUTE ON FUNCTION latchkey_audit_make_months, latchkey_audit_drop_months TO {role}"))
        .await;
    assert!(audit::keep(&stores, &apps, SystemClock.now(), true).await.unwrap());
    assert_eq!(count(&shop, &there).await, 1);
    assert_eq!(count(&shop, PAST_MONTHS).await, 0, "the empty month is dropped");
    shop.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}
