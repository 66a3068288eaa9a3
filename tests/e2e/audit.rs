//! Audit events: which rows requests write, with which client address and session, and how long the rows are kept
//! (specification: Accounts, Audit events).

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    time::Duration,
};

use http::StatusCode;
use latchkey_server::{
    audit,
    config::Apps,
    domain::clock::{Clock, SystemClock},
    hashing::{HashingOptions, HashingPool},
    providers::SocialProviders,
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
        redis::{self, RedisStore},
    },
};
use latchkey_tests::{
    client::{ApiClient, ApiResponse},
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    stack::Stack,
};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{
    fault_support::unlimited_app,
    support::{NAME, TestApp, WRONG_CODE, app},
};

const EMAIL: &str = "Ada.Lovelace@example.com";
const UNKNOWN_EMAIL: &str = "nobody.at.all@example.com";
/// Maximum time that a test waits for a condition.
const LIMIT: Duration = Duration::from_secs(20);

const COUNT_PAST_MONTHS: &str = "SELECT count(*) FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
    WHERE inhparent = 'audit_events'::regclass
        AND relname < 'audit_events_' || to_char(now() AT TIME ZONE 'UTC', 'YYYY_MM')";

/// A row of `audit_events`.
#[derive(Clone, Debug, PartialEq, Eq, sqlx::FromRow)]
struct AuditRow {
    kind: String,
    user_id: Option<Uuid>,
    session_id: Option<Uuid>,
    ip: Option<String>,
    count: i64,
    detail: Option<Value>,
}

/// The rows of an App, in chronological order.
async fn audit_rows(test_app: &TestApp) -> Vec<AuditRow> {
    let mut connection = test_app.stack.database.connect().await.expect("the database is reachable");
    sqlx::query_as(
        "SELECT kind, user_id, session_id, abbrev(ip) AS ip, count, detail FROM audit_events
         WHERE app_id = $1 ORDER BY at, id",
    )
    .bind(test_app.id())
    .fetch_all(&mut connection)
    .await
    .expect("the rows")
}

/// Waits for the first row of a kind. The server writes some rows only after the response.
async fn wait_for_row(test_app: &TestApp, kind: &str) -> AuditRow {
    let found = || async { audit_rows(test_app).await.into_iter().find(|row| row.kind == kind) };
    eventually(kind, LIMIT, found).await
}

fn session_id(response: &ApiResponse) -> Uuid {
    response.string("session_id").parse().expect("a session's id")
}

impl AuditRow {
    /// Asserts the client address and the session of the row, and that the row counts one event.
    #[track_caller]
    fn assert_origin(&self, client: &ApiClient, session: Option<Uuid>) -> &Self {
        assert_eq!(self.ip, Some(client.address().to_string()), "{self:?}");
        assert_eq!((self.session_id, self.count), (session, 1), "{self:?}");
        self
    }
}

/// Connects to the stores of the service, as a second server would. Calls through these stores use the time of Redis
/// plus `clock_offset`.
fn stores(test_app: &TestApp, clock_offset: time::Duration) -> Stores {
    stores_at(test_app, &test_app.stack.database.url, clock_offset)
}

fn stores_at(test_app: &TestApp, postgres: &str, clock_offset: time::Duration) -> Stores {
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::from_value(postgres)) };
    let redis = redis::Options::new(UrlSource::from_value(test_app.stack.redis().url()));
    Stores {
        postgres: PostgresStore::connect(options).expect("it is a URL of Postgres"),
        redis: RedisStore::connect(redis::Options { clock_offset, ..redis }).expect("it is a URL of Redis"),
        hashing: HashingPool::start(HashingOptions::default(), &mut Registry::default()),
        providers: SocialProviders::default(),
    }
}

/// Writes the refusals of the current quarter of an hour to Postgres, as a server does after the quarter has ended.
async fn write_refusals(test_app: &TestApp) {
    let stores = stores(test_app, time::Duration::minutes(16));
    let id = test_app.id().to_owned();
    stores.write_refusals(|app| app.as_str() == id).await.expect("the stores are reachable");
}

/// Waits until Redis has counted this number of refusals.
async fn wait_for_refusals(test_app: &TestApp, refusals: i64) {
    let all_counted = || async {
        let mut redis = test_app.stack.redis().connect().await.expect("Redis is reachable");
        let pattern = format!("lk:{{{}:audit}}:refusals:*", test_app.id());
        let keys: Vec<String> = ::redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("the keys");
        let mut sum = 0;
        for key in keys {
            let rows: HashMap<String, i64> =
                ::redis::cmd("HGETALL").arg(key).query_async(&mut redis).await.expect("the rows");
            sum += rows.iter().filter(|(row, _)| !row.starts_with('#')).map(|(_, count)| count).sum::<i64>();
        }
        (sum == refusals).then_some(())
    };
    eventually(&format!("{refusals} refusals"), LIMIT, all_counted).await;
}

#[tokio::test]
async fn each_event_from_registration_to_reset_is_a_row_with_client_address_and_session() {
    let test_app = TestApp::start().await;
    let id = test_app.id();
    let clients: Vec<ApiClient> = (0..7).map(|_| test_app.client()).collect();
    let response = clients[0].register(id, NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let user: Uuid = response.string("local_id").parse().unwrap();
    wait_for_row(&test_app, "registered").await.assert_origin(&clients[0], None);
    clients[1].register(id, NAME, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "registered_again").await.assert_origin(&clients[1], None);

    let login = clients[2].login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    // The row of a login is written before the response.
    let logged_in = audit_rows(&test_app).await.pop().unwrap();
    assert_eq!((logged_in.kind.as_str(), &logged_in.detail), ("logged_in", &Some(json!({ "amr": "pwd" }))));
    logged_in.assert_origin(&clients[2], Some(session_id(&login)));
    let signed_in = clients[3].with_token(id, login.string("token"));
    signed_in.verify().await.expect(StatusCode::OK);
    wait_for_row(&test_app, "confirmation_requested").await.assert_origin(&clients[3], Some(session_id(&login)));

    let code = test_app.code(EMAIL, 3).await;
    let confirmed = clients[4].confirm(id, &code).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "confirmed").await.assert_origin(&clients[4], None);
    let logged_in = audit_rows(&test_app).await.pop().unwrap();
    assert_eq!((logged_in.kind.as_str(), &logged_in.detail), ("logged_in", &Some(json!({ "amr": "otp" }))));
    logged_in.assert_origin(&clients[4], Some(session_id(&confirmed)));

    clients[5].forgot_password(id, EMAIL).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "password_reset_requested").await.assert_origin(&clients[5], None);
    let code = test_app.code(EMAIL, 4).await;
    clients[6].confirm_password(id, EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "password_reset").await.assert_origin(&clients[6], None);

    let rows = audit_rows(&test_app).await;
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
async fn a_confirm_in_a_session_writes_a_row_with_that_session() {
    let test_app = TestApp::start().await;
    test_app.register(EMAIL).await;
    let client = test_app.client();
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let code = test_app.code(EMAIL, 1).await;
    client.with_token(test_app.id(), login.string("token")).confirm(&code).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "confirmed").await.assert_origin(&client, Some(session_id(&login)));
    let logged_in = audit_rows(&test_app).await.into_iter().filter(|row| row.kind == "logged_in").count();
    assert_eq!(logged_in, 1, "no session was opened");
}

#[tokio::test]
async fn no_row_is_written_for_an_invalid_registration_an_unknown_address_or_a_wrong_code() {
    let test_app = TestApp::start().await;
    let (id, client) = (test_app.id(), test_app.client());
    client.register(id, NAME, EMAIL, "short").await.expect(StatusCode::BAD_REQUEST);
    client.forgot_password(id, UNKNOWN_EMAIL).await.expect(StatusCode::OK);
    client.confirm(id, WRONG_CODE).await.expect(StatusCode::BAD_REQUEST);
    // Rows are written in order. A row for a call above would be written before the row for this registration.
    test_app.register(EMAIL).await;
    client.forgot_password(id, EMAIL).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "password_reset_requested").await;
    let kinds: Vec<String> = audit_rows(&test_app).await.into_iter().map(|row| row.kind).collect();
    assert_eq!(kinds, ["registered", "password_reset_requested"]);
}

#[tokio::test]
async fn ended_sessions_and_late_or_stolen_refresh_tokens_are_recorded() {
    let test_app = TestApp::start_with(app().set("/tokens/refreshGraceSeconds", 0)).await;
    let (id, client) = (test_app.id(), test_app.register_and_confirm(EMAIL).await);
    let log_in = async || client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let with_token_of = |login: &ApiResponse| client.with_token(id, login.string("token"));

    let (one, two, three) = (log_in().await, log_in().await, log_in().await);
    with_token_of(&one).delete(&format!("sessions/{}", session_id(&two))).await.expect(StatusCode::OK);
    let ended = wait_for_row(&test_app, "session_ended").await;
    assert_eq!(ended.assert_origin(&client, Some(session_id(&one))).detail, Some(json!({ "ended": session_id(&two) })));
    with_token_of(&one).delete("sessions").await.expect(StatusCode::OK);
    let ended = wait_for_row(&test_app, "sessions_ended").await;
    // The DELETE of `sessions` ended two sessions: that of the third login, and the one that *confirm* opened.
    assert_eq!(ended.assert_origin(&client, Some(session_id(&one))).detail, Some(json!({ "sessions": 2 })));
    with_token_of(&three).get("sessions").await.expect(StatusCode::UNAUTHORIZED);
    with_token_of(&one).send(with_token_of(&one).request(http::Method::POST, "logout")).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "logged_out").await.assert_origin(&client, Some(session_id(&one)));

    let revoked = log_in().await;
    for _ in 0..2 {
        let token = json!({ "token": revoked.string("refresh_token") });
        client.post(&format!("v1/{id}/revoke"), &token).await.expect(StatusCode::OK);
    }
    let is_revocation = |row: &AuditRow| row.kind == "session_ended" && row.session_id == Some(session_id(&revoked));
    let ended = || async { audit_rows(&test_app).await.into_iter().find(is_revocation) };
    eventually("the revocation", LIMIT, ended).await;

    let stolen = log_in().await;
    let first_token = stolen.string("refresh_token");
    let second = client.refresh(id, first_token).await.expect(StatusCode::OK);
    let thief = test_app.client();
    thief.refresh(id, first_token).await.expect(StatusCode::OK);
    wait_for_row(&test_app, "refresh_late").await.assert_origin(&thief, Some(session_id(&stolen)));
    client.refresh(id, second.string("refresh_token")).await.expect(StatusCode::OK);
    thief.refresh(id, first_token).await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    wait_for_row(&test_app, "refresh_stolen").await.assert_origin(&thief, Some(session_id(&stolen)));
    let ended = audit_rows(&test_app).await.into_iter().filter(|row| row.kind == "session_ended").count();
    assert_eq!(ended, 2, "a call that ended nothing is no event");
}

#[tokio::test]
async fn equal_refusals_in_a_quarter_of_an_hour_become_one_row() {
    let test_app = TestApp::start_with(app().limit("loginFailuresPerClient", &[(3, 900)])).await;
    let id = test_app.id();
    let response = test_app.register(EMAIL).await;
    let user: Uuid = response.string("local_id").parse().unwrap();
    let (guesser, other_client) = (test_app.client(), test_app.client());
    for _ in 0..3 {
        guesser.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    }
    wait_for_refusals(&test_app, 3).await;
    for _ in 0..2 {
        guesser.login(id, EMAIL, PASSWORD).await.expect(StatusCode::TOO_MANY_REQUESTS);
    }
    other_client.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    guesser.login(id, UNKNOWN_EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    guesser.confirm_password(id, EMAIL, WRONG_CODE, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    guesser.confirm_password(id, UNKNOWN_EMAIL, WRONG_CODE, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    wait_for_refusals(&test_app, 9).await;
    assert_eq!(audit_rows(&test_app).await.len(), 1, "only the registration");
    write_refusals(&test_app).await;

    // The counts are added up, because there are two rows if a quarter of an hour ended during the test.
    let mut counts: BTreeMap<_, i64> = BTreeMap::new();
    for row in audit_rows(&test_app).await {
        *counts.entry((row.kind, row.user_id, row.ip)).or_default() += row.count;
    }
    let mut found: Vec<_> = counts.into_iter().map(|((kind, user, ip), count)| (kind, user, ip, count)).collect();
    let row = |kind: &str, user, client: &ApiClient, count| {
        (kind.to_owned(), user, Some(client.address().to_string()), count)
    };
    let mut expected = vec![
        row("login_refused", Some(user), &guesser, 3),
        row("login_limited", Some(user), &guesser, 2),
        row("login_refused", Some(user), &other_client, 1),
        row("login_refused", None, &guesser, 1),
        row("password_reset_refused", Some(user), &guesser, 1),
        row("password_reset_refused", None, &guesser, 1),
    ];
    found.retain(|(kind, ..)| kind != "registered");
    found.sort();
    expected.sort();
    assert_eq!(found, expected);

    let owner = other_client.authenticate(id, EMAIL, PASSWORD).await;
    let activity = owner.get("user/activity").await.expect(StatusCode::OK);
    let seen = activity.body["events"].as_array().unwrap();
    let guesser_address = guesser.address().to_string();
    let guesses =
        seen.iter().filter(|event| event["kind"] == "login_refused" && event["ip"] == guesser_address.as_str());
    let shown: i64 = guesses.clone().map(|event| event["count"].as_i64().unwrap()).sum();
    assert_eq!(shown, 3, "only refusals of this account: {seen:?}");
    assert!(guesses.clone().all(|event| event["at"].as_i64().unwrap() % 900 == 0));
}

#[tokio::test]
async fn activity_shows_the_newest_hundred_events_of_the_user() {
    let test_app = TestApp::start_with(unlimited_app("shop")).await;
    let id = test_app.id();
    let client = test_app.register_and_confirm(EMAIL).await;
    let stranger =
        test_app.register_and_confirm("grace@example.com").await.authenticate(id, "grace@example.com", PASSWORD).await;
    test_app
        .sql(&format!(
            "INSERT INTO audit_events (app_id, id, at, kind, user_id)
         SELECT app_id, gen_random_uuid(), now() - make_interval(mins => number), 'renamed', user_id
         FROM audit_events, generate_series(1, 150) AS number WHERE kind = 'registered' AND ip = '{}'",
            // Only the row of the first registration has this client address.
            audit_rows(&test_app).await[0].ip.as_deref().unwrap()
        ))
        .await;
    let login = client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let owner = client.with_token(id, login.string("token"));
    let response = owner.get("user/activity").await.expect(StatusCode::OK);
    assert_eq!(response.header("cache-control"), Some("no-store"));
    let events = response.body["events"].as_array().unwrap();
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
async fn rows_contain_no_email_address_name_password_code_or_token() {
    let test_app = TestApp::start_with(unlimited_app("shop")).await;
    let (id, client) = (test_app.id(), test_app.client());
    client.register(id, NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let login = client.login(id, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    client.login(id, EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    client.login(id, UNKNOWN_EMAIL, WRONG_PASSWORD).await.expect(StatusCode::UNAUTHORIZED);
    let code = test_app.code(EMAIL, 1).await;
    client.confirm(id, &code).await.expect(StatusCode::OK);
    let reset = test_app.request_reset_code(EMAIL, 2).await;
    client.confirm_password(id, UNKNOWN_EMAIL, &reset, NEW_PASSWORD).await.expect(StatusCode::BAD_REQUEST);
    client.confirm_password(id, EMAIL, &reset, NEW_PASSWORD).await.expect(StatusCode::OK);
    wait_for_refusals(&test_app, 3).await;
    write_refusals(&test_app).await;
    wait_for_row(&test_app, "password_reset_requested").await;

    let mut connection = test_app.stack.database.connect().await.unwrap();
    let stored: String = sqlx::query_scalar("SELECT string_agg(audit_events::text, ' ') FROM audit_events")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert!(stored.contains("login_refused") && stored.contains(&client.address().to_string()), "{stored}");
    let stored = stored.to_lowercase();
    let mut secrets =
        vec![EMAIL, UNKNOWN_EMAIL, "example.com", NAME, PASSWORD, NEW_PASSWORD, WRONG_PASSWORD, &code, &reset];
    secrets.extend([login.string("token"), login.string("refresh_token")]);
    for secret in secrets {
        assert!(!stored.contains(&secret.to_lowercase()), "{secret} is stored in {stored}");
    }
}

#[tokio::test]
async fn sessions_continue_without_postgres_and_lost_events_are_counted() {
    let app = app().set("/tokens/refreshGraceSeconds", 0);
    let test_app = TestApp::from_builder(app, Stack::builder().proxied()).await;
    let (client, token) = test_app.register_and_log_in(EMAIL).await;
    let login = client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    let before = audit_rows(&test_app).await.len();
    let proxy = test_app.stack.postgres_proxy.as_ref().unwrap();
    proxy.refuse().await;

    let first_token = login.string("refresh_token");
    client.refresh(test_app.id(), first_token).await.expect(StatusCode::OK);
    client.refresh(test_app.id(), first_token).await.expect(StatusCode::OK);
    let signed_in = client.with_token(test_app.id(), &token);
    signed_in.send(signed_in.request(http::Method::POST, "logout")).await.expect(StatusCode::OK);
    let both_counted = || async {
        let metrics = test_app.stack.server().get_ops("metrics").await.expect(StatusCode::OK).text;
        metrics.lines().any(|line| line == "latchkey_audit_lost_total 2").then_some(())
    };
    eventually("the loss of two events", LIMIT, both_counted).await;
    proxy.restore().unwrap();
    assert_eq!(audit_rows(&test_app).await.len(), before);
    let log_in_again = || async {
        let login = client.login(test_app.id(), EMAIL, PASSWORD).await;
        (login.status == StatusCode::OK).then_some(login)
    };
    let login = eventually("logins work again", LIMIT, log_in_again).await;
    let is_of_login = |row: &AuditRow| row.session_id == Some(session_id(&login));
    let found = || async { audit_rows(&test_app).await.into_iter().find(is_of_login) };
    eventually("events are written again", LIMIT, found).await;
}

/// Returns Apps with these appIDs. Each App keeps its audit events for the given number of days.
fn apps_with_retention(test_app: &TestApp, apps: &[(&str, u32)]) -> Apps {
    let document =
        fs::read(test_app.stack.rendered().join(format!("{}.json", test_app.id()))).expect("the document exists");
    let mut document: Value = serde_json::from_slice(&document).expect("the document is JSON");
    let served_apps = Apps::default();
    for (app, days) in apps {
        document["appID"] = json!(app);
        document["auditRetentionDays"] = json!(days);
        served_apps.put(&app.parse().expect("an appID"), document.to_string().as_bytes());
    }
    assert_eq!(served_apps.len(), apps.len());
    served_apps
}

/// Adds a partition for a past month, with the given number of events of each App. One transaction adds the partition
/// and the events, because the running server drops an empty partition.
async fn add_past_month(test_app: &TestApp, months_ago: u32, events: &[(&str, u32)]) {
    let events: String =
        events.iter().map(|(app, count)| insert_statement(app, &months_ago_expression(months_ago), *count)).collect();
    test_app
        .sql(&format!(
            "DO $$
         DECLARE
            month timestamp := date_trunc('month', now() AT TIME ZONE 'UTC') - interval '{months_ago} months';
         BEGIN
            EXECUTE format('CREATE TABLE %I PARTITION OF audit_events FOR VALUES FROM (%L) TO (%L)',
                'audit_events_' || to_char(month, 'YYYY_MM'), month AT TIME ZONE 'UTC',
                (month + interval '1 month') AT TIME ZONE 'UTC');
         END $$;
         {events}"
        ))
        .await;
}

fn insert_statement(app: &str, when: &str, count: u32) -> String {
    format!(
        "INSERT INTO audit_events (app_id, id, at, kind)
         SELECT '{app}', gen_random_uuid(), {when}, 'renamed' FROM generate_series(1, {count});"
    )
}

async fn add_events(test_app: &TestApp, app: &str, when: &str, count: u32) {
    test_app.sql(&insert_statement(app, when, count)).await;
}

async fn query_number(test_app: &TestApp, sql: &str) -> i64 {
    let mut connection = test_app.stack.database.connect().await.unwrap();
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.unwrap()
}

async fn event_count(test_app: &TestApp, app: &str) -> i64 {
    query_number(test_app, &format!("SELECT count(*) FROM audit_events WHERE app_id = '{app}'")).await
}

fn months_ago_expression(months_ago: u32) -> String {
    let month = format!("date_trunc('month', now() AT TIME ZONE 'UTC') - interval '{months_ago} months'");
    format!("({month} + interval '5 days') AT TIME ZONE 'UTC'")
}

#[tokio::test]
async fn old_months_are_dropped_and_rows_past_a_shorter_retention_are_deleted() {
    let test_app = TestApp::start().await;
    let apps = apps_with_retention(&test_app, &[("long", 365), ("short", 30)]);
    add_past_month(&test_app, 15, &[("long", 3), ("short", 3)]).await;
    // `elsewhere` is an App that this server does not serve, so the server does not know its retention.
    add_past_month(&test_app, 14, &[("long", 3), ("short", 3), ("elsewhere", 2)]).await;
    // The month of these events has no partition.
    add_events(&test_app, "long", &months_ago_expression(20), 250).await;
    for (days, events) in [(40, 300), (20, 5)] {
        for app in ["long", "short", "elsewhere"] {
            add_events(&test_app, app, &format!("now() - interval '{days} days'"), events).await;
        }
    }
    let stores = stores(&test_app, time::Duration::ZERO);
    assert!(audit::apply_retention(&stores, &apps, SystemClock.now(), true).await.unwrap());

    assert_eq!(event_count(&test_app, "long").await, 305, "no event of the last year is deleted");
    assert_eq!(event_count(&test_app, "short").await, 5);
    assert_eq!(event_count(&test_app, "elsewhere").await, 307, "all events are kept");
    assert_eq!(
        query_number(&test_app, COUNT_PAST_MONTHS).await,
        1,
        "the month with only events of served Apps is dropped"
    );

    let no_apps = apps_with_retention(&test_app, &[]);
    audit::apply_retention(&stores, &no_apps, SystemClock.now(), true).await.unwrap();
    assert_eq!(event_count(&test_app, "elsewhere").await, 307, "without any App no retention is known");
}

#[tokio::test]
async fn execute_permission_is_needed_to_manage_partitions_but_not_to_delete_rows() {
    let test_app = TestApp::start().await;
    let apps = apps_with_retention(&test_app, &[("long", 365), ("short", 30)]);
    let (role, database) = (format!("server_{:016x}", rand::random::<u64>()), &test_app.stack.database);
    test_app
        .sql(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'secret';
         GRANT USAGE ON SCHEMA public TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role};
         REVOKE UPDATE ON audit_events FROM {role};"
        ))
        .await;
    let (_, address) = database.url.split_once('@').unwrap();
    let stores = stores_at(&test_app, &format!("postgres://{role}:secret@{address}"), time::Duration::ZERO);
    add_past_month(&test_app, 15, &[("long", 3)]).await;
    add_events(&test_app, "short", "now() - interval '40 days'", 3).await;
    let month = "to_regclass('audit_events_' || to_char(now() AT TIME ZONE 'UTC' + interval '1 month', 'YYYY_MM'))";
    test_app.sql(&format!("DO $$ BEGIN EXECUTE 'DROP TABLE ' || {month}; END $$")).await;
    let month_exists = format!("SELECT count({month}::oid)");
    assert_eq!(query_number(&test_app, &month_exists).await, 0);

    assert!(!audit::apply_retention(&stores, &apps, SystemClock.now(), true).await.unwrap());
    assert_eq!(
        (event_count(&test_app, "long").await, event_count(&test_app, "short").await),
        (0, 0),
        "rows are deleted"
    );
    assert_eq!(query_number(&test_app, &month_exists).await, 0);

    test_app
        .sql(&format!("GRANT EXECUTE ON FUNCTION latchkey_audit_make_months, latchkey_audit_drop_months TO {role}"))
        .await;
    assert!(audit::apply_retention(&stores, &apps, SystemClock.now(), true).await.unwrap());
    assert_eq!(query_number(&test_app, &month_exists).await, 1);
    assert_eq!(query_number(&test_app, COUNT_PAST_MONTHS).await, 0, "the empty month is dropped");
    test_app.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}
