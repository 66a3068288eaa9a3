//! Query plans in an App with many users: the number of rows that a call reads is bounded, however many users the App
//! has. Postgres logs the plan of each statement with the numbers of rows that it read (auto_explain).

use std::{fs, path::Path};

use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        administration::UserState,
        audit::EventKind,
        groups::ManagedGroupName,
        mail::MailKind,
        ports::{
            EventFilter, GroupAdministration, GroupChanges, GroupRemoval, MailOutcome, MemberOutcome, Order,
            RemovalOutcome, RetrySelection, SubjectOf, UserAdministration, UserFilter, UserPage,
        },
        user::UserId,
    },
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
    },
};
use latchkey_tests::postgres::{Database, Options, Postgres};
use serde_json::Value;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::{AUTHORITY, an_event, an_external_id};
use crate::stores::{an_email, stores};

const LIMIT: u16 = 100;
/// After this many executions, Postgres has decided whether it uses one plan for all parameters.
const EXECUTIONS: usize = 8;
/// Maximum number of rows that a node of a plan can read or return for a page.
const MAX_ROWS: f64 = 2.0 * LIMIT as f64;
/// The number of dead letters that one call retries.
const LETTERS_PER_RETRY: u32 = 100;
/// Maximum number of rows that a node of the plan of a retry can read or return. An App has at most eight webhooks, and
/// a retry looks for each id in each of them.
const MAX_RETRY_ROWS: f64 = 20.0 * LETTERS_PER_RETRY as f64;
/// The members of a deleted group are removed in batches of 200 users. This is the maximum number of rows that a node
/// of the plan of one batch can read or return.
const MAX_REMOVAL_ROWS: f64 = 2.0 * 200.0;

/// Inserts two Apps. `big` has 100,000 users, of which the last ones are unverified, contested or disabled. In
/// `skewed`, all 20,000 users are disabled, which misleads the estimates of the planner. The eight webhooks of `big`
/// have 100,000 dead letters.
const INSERT_ROWS: &str = "
    INSERT INTO users
        (app_id, id, email, email_canonical, email_verified_at, name, disabled_at, contested, external_id, created_at,
            updated_at)
    SELECT 'big', ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'u' || n || '@example.com',
        'u' || n || '@example.com', CASE WHEN n <= 99600 THEN now() END, 'Name ' || n % 5000,
        CASE WHEN n > 99800 THEN now() END, n BETWEEN 99601 AND 99700, 'crm:' || n, now(), now()
    FROM generate_series(1, 100000) AS n;
    INSERT INTO users
        (app_id, id, email, email_canonical, email_verified_at, name, disabled_at, created_at, updated_at)
    SELECT 'skewed', gen_random_uuid(), 's' || n || '@example.com', 's' || n || '@example.com', now(), 'Name', now(),
        now(), now()
    FROM generate_series(1, 20000) AS n;
    INSERT INTO identities (app_id, authority, subject, user_id, provider, linked_at)
    SELECT app_id, 'https://idp.example', external_id, id, 'idp', now() FROM users WHERE app_id = 'big';
    INSERT INTO outbox (app_id, kind, user_id, attempts, dead_at)
    SELECT 'big', CASE WHEN n % 100 = 0 THEN 'reset' ELSE 'confirm' END, gen_random_uuid(), 1, now() - n * interval '1 s'
    FROM generate_series(1, 20000) AS n;
    INSERT INTO outbox (app_id, kind, user_id, due_at)
    SELECT 'big', 'confirm', gen_random_uuid(), now() + interval '1 day' FROM generate_series(1, 20000) AS n;
    INSERT INTO audit_events (app_id, id, at, kind, user_id)
    SELECT 'big', gen_random_uuid(), now() - n * interval '1 s', 'logged_in',
        ('00000000-0000-7000-8000-' || lpad(to_hex(n % 20 + 1), 12, '0'))::uuid
    FROM generate_series(1, 30000) AS n;
    INSERT INTO webhooks (app_id, name) SELECT 'big', 'hook' || n FROM generate_series(0, 7) AS n;
    INSERT INTO webhook_events (app_id, webhook, id, kind, at, attempts, dead_at)
    SELECT 'big', 'hook' || n % 8, ('00000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, 'registered',
        now() - n * interval '1 s', 10, now() - n * interval '1 s'
    FROM generate_series(1, 100000) AS n;
    INSERT INTO groups (app_id, name, created_at) SELECT 'big', 'g' || n, now() FROM generate_series(1, 9000) AS n;
    INSERT INTO groups (app_id, name, created_at) VALUES ('big', 'team', now());
    INSERT INTO group_members (app_id, user_id, name, source, created_at)
    SELECT 'big', id, 'team', '', now() FROM users WHERE app_id = 'big';
    ANALYZE";

fn user(number: u128) -> UserId {
    UserId(Uuid::from_u128(0x0000_0000_0000_7000_8000_0000_0000_0000 + number))
}

/// Returns the id of a dead letter of a webhook.
fn letter(number: u32) -> Uuid {
    Uuid::from_u128(0x0000_0000_0000_7000_9000_0000_0000_0000 + u128::from(number))
}

/// Returns the plans that the log contains after its first `from` bytes.
fn plans(log: &Path, from: usize) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap();
    let mut plans = Vec::new();
    for entry in text[from..].split("  plan:\n").skip(1) {
        let json: String = entry.lines().take_while(|line| line.starts_with('\t')).collect();
        plans.push(serde_json::from_str(&json).unwrap());
    }
    plans
}

/// Calls `check` with each node of a plan.
fn for_each_node(node: &Value, check: &mut impl FnMut(&Value)) {
    check(node);
    for child in node["Plans"].as_array().into_iter().flatten() {
        for_each_node(child, check);
    }
}

/// Returns the greatest number of rows that a node of the plan reads or returns. Returns infinity if the plan reads a
/// whole table.
fn most_rows(plan: &Value) -> f64 {
    let mut most = 0.0_f64;
    for_each_node(&plan["Plan"], &mut |node| {
        let number = |name: &str| node[name].as_f64().unwrap_or(0.0);
        let removed = number("Rows Removed by Filter") + number("Rows Removed by Index Recheck");
        let reads_table = node["Node Type"] == "Seq Scan" && node["Relation Name"].as_str().is_some_and(is_large);
        let rows = if reads_table { f64::INFINITY } else { number("Actual Rows") + removed };
        most = most.max(number("Actual Loops") * rows);
    });
    most
}

/// Whether this is one of the tables that a plan must not read as a whole. The partitions of `audit_events` are not
/// among them, because those of future months are empty.
fn is_large(table: &str) -> bool {
    ["users", "identities", "group_members", "outbox", "webhook_events"].contains(&table)
}

struct BigApp {
    server: Postgres,
    database: Database,
    stores: Stores,
    app: AppId,
}

impl BigApp {
    async fn new() -> Self {
        let settings = [
            "session_preload_libraries=auto_explain",
            "auto_explain.log_min_duration=0",
            "auto_explain.log_analyze=on",
            "auto_explain.log_timing=off",
            "auto_explain.log_format=json",
        ];
        let settings = settings.map(str::to_owned).to_vec();
        let server = Postgres::start(Options { settings, ..Options::for_tests() }).await.unwrap();
        let database = server.database().await.unwrap();
        let mut connection = database.connect().await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(INSERT_ROWS.to_owned())).execute(&mut connection).await.unwrap();
        // VACUUM cannot run in the transaction that several statements in one call share.
        sqlx::raw_sql("VACUUM").execute(&mut connection).await.unwrap();
        let options = postgres::Options {
            listen: false,
            // Each statement is prepared once, and then executed many times.
            max_connections: 1,
            ..postgres::Options::new(UrlSource::from_value(&database.url))
        };
        let redis = latchkey_tests::redis::Redis::shared().await.url();
        let stores = Stores { postgres: PostgresStore::connect(options).unwrap(), ..stores(&database.url, &redis) };
        Self { server, database, stores, app: "big".parse().unwrap() }
    }

    /// Makes a call many times, and returns the most rows that a node of its plans reads.
    async fn most_rows_of(&self, call: impl AsyncFn()) -> f64 {
        let log = self.server.process().log_path().to_owned();
        let from = fs::read_to_string(&log).unwrap().len();
        for _ in 0..EXECUTIONS {
            call().await;
        }
        let plans = plans(&log, from);
        assert!(plans.len() >= EXECUTIONS, "{} plans", plans.len());
        plans.iter().map(most_rows).fold(0.0, f64::max)
    }
}

#[tokio::test]
async fn the_number_of_rows_that_a_call_reads_is_bounded() {
    let big = BigApp::new().await;
    check_pages_of_users(&big).await;
    check_other_calls(&big).await;
    check_retries(&big).await;
    check_groups(&big).await;

    // Checks the test itself: without the index, a page reads all users, and the test must notice that.
    let filter = UserFilter::NamePrefix("name 77".to_owned());
    let mut connection = big.database.connect().await.unwrap();
    sqlx::raw_sql("DROP INDEX users_name_prefix").execute(&mut connection).await.unwrap();
    let read = async || drop(big.stores.users(&big.app, &filter, None, LIMIT).await.unwrap());
    assert!(big.most_rows_of(read).await > MAX_ROWS);
}

async fn check_pages_of_users(big: &BigApp) {
    let (stores, app) = (&big.stores, &big.app);
    let (ascending, descending) = (Order::Ascending, Order::Descending);
    let subject = |of| UserFilter::Subject { subject: "crm:77777".to_owned(), of };
    let state = |state, order| UserFilter::State { state, order };
    for (filter, expected) in [
        (UserFilter::All { order: ascending }, 100),
        (UserFilter::All { order: descending }, 100),
        (UserFilter::Email(an_email("u77777@example.com")), 1),
        (UserFilter::ExternalId(an_external_id("crm:77777")), 1),
        (subject(SubjectOf::Authority(AUTHORITY.to_owned())), 1),
        (subject(SubjectOf::Provider("idp".parse().unwrap())), 1),
        (state(UserState::Disabled, ascending), 100),
        (state(UserState::Disabled, descending), 100),
        (state(UserState::Contested, ascending), 100),
        (state(UserState::Contested, descending), 100),
        (state(UserState::Unverified, ascending), 100),
        (state(UserState::Unverified, descending), 100),
        (UserFilter::EmailPrefix("u777".to_owned()), 100),
        (UserFilter::EmailPrefix("u".to_owned()), 100),
        (UserFilter::EmailPrefix("v".to_owned()), 0),
        (UserFilter::NamePrefix("name 77".to_owned()), 100),
        (UserFilter::NamePrefix("n".to_owned()), 100),
        (UserFilter::NamePrefix("x".to_owned()), 0),
    ] {
        // Reads the first page and the next page.
        let most = big
            .most_rows_of(async || {
                let UserPage { users, next } = stores.users(app, &filter, None, LIMIT).await.unwrap();
                assert_eq!(users.len(), expected, "{filter:?}");
                stores.users(app, &filter, next.as_ref(), LIMIT).await.unwrap();
            })
            .await;
        assert!(most <= MAX_ROWS, "{filter:?} reads {most} rows");
    }
}

async fn check_other_calls(big: &BigApp) {
    let (stores, app) = (&big.stores, &big.app);
    let most = big.most_rows_of(async || drop(stores.administered_user(app, user(7)).await.unwrap().unwrap())).await;
    assert!(most <= MAX_ROWS, "one user: {most}");
    let most = big
        .most_rows_of(async || {
            let users = stores.export_users(app, Some(user(50_000)), LIMIT).await.unwrap();
            assert!(users.len() == 100 && users.iter().all(|user| user.identities.len() == 1));
        })
        .await;
    assert!(most <= MAX_ROWS, "an export: {most}");

    let all = EventFilter::default();
    let of_user = EventFilter { user: Some(user(7)), ..EventFilter::default() };
    for filter in [all.clone(), of_user.clone()] {
        let most = big
            .most_rows_of(async || {
                let page = stores.events(app, &filter, None, LIMIT).await.unwrap();
                assert_eq!(page.rows.len(), 100);
                stores.events(app, &filter, page.next, LIMIT).await.unwrap();
            })
            .await;
        assert!(most <= MAX_ROWS, "{filter:?}: {most}");
    }
    for filter in [all, of_user] {
        let filter = EventFilter { kind: Some(EventKind::Exported.as_str()), ..filter };
        let most = big.most_rows_of(async || drop(stores.events(app, &filter, None, LIMIT).await.unwrap())).await;
        assert!(most <= 5000.0 + MAX_ROWS, "{filter:?}: {most}");
    }
    for kind in [None, Some("reset"), Some("new-sign-in"), Some("webhook")] {
        let most = big
            .most_rows_of(async || {
                let page = stores.app_dead_letters(app, kind, None, LIMIT).await.unwrap();
                stores.app_dead_letters(app, kind, page.next, LIMIT).await.unwrap();
            })
            .await;
        assert!(most <= MAX_ROWS, "dead letters of {kind:?}: {most}");
    }

    let most = big
        .most_rows_of(async || {
            let event = an_event(EventKind::MailRequested, user(9));
            let outcome = stores.queue_mail(app, user(9), MailKind::Reset, event).await.unwrap();
            assert!(matches!(outcome, MailOutcome::Queued | MailOutcome::Waiting));
        })
        .await;
    assert!(most <= MAX_ROWS, "a mail: {most}");
    let number = std::sync::atomic::AtomicU32::new(1000);
    let most = big
        .most_rows_of(async || {
            let user = user(number.fetch_add(1, std::sync::atomic::Ordering::Relaxed).into());
            let event = an_event(EventKind::UserDeleted, user);
            let outcome = stores.remove_user(app, user, None, event).await.unwrap();
            assert!(matches!(outcome, RemovalOutcome::Removed(_)));
        })
        .await;
    assert!(most <= MAX_ROWS, "a deletion: {most}");
}

async fn check_retries(big: &BigApp) {
    let number = std::sync::atomic::AtomicU32::new(1);
    let most = big
        .most_rows_of(async || {
            let first = number.fetch_add(LETTERS_PER_RETRY, std::sync::atomic::Ordering::Relaxed);
            let ids = (first..first + LETTERS_PER_RETRY).map(letter).collect();
            let retried = big.stores.retry_dead_letters(&big.app, RetrySelection::Ids(ids)).await.unwrap();
            assert_eq!(retried, u64::from(LETTERS_PER_RETRY));
        })
        .await;
    assert!(most <= MAX_RETRY_ROWS, "a retry by ids: {most}");
}

async fn check_groups(big: &BigApp) {
    let (stores, app) = (&big.stores, &big.app);
    let group = |name: &str| ManagedGroupName::parse(name).unwrap();
    let most = big
        .most_rows_of(async || {
            let page = stores.groups(app, None, LIMIT).await.unwrap();
            assert_eq!(page.groups.len(), 100);
            stores.groups(app, page.next.as_ref(), LIMIT).await.unwrap();
        })
        .await;
    assert!(most <= MAX_ROWS, "groups: {most}");
    let most = big
        .most_rows_of(async || {
            let page = stores.group_members(app, &group("team"), None, LIMIT).await.unwrap().unwrap();
            assert_eq!(page.members.len(), 100);
            stores.group_members(app, &group("team"), page.next.as_ref(), LIMIT).await.unwrap().unwrap();
        })
        .await;
    assert!(most <= MAX_ROWS, "members: {most}");
    let most = big
        .most_rows_of(async || {
            assert_eq!(stores.memberships(app, user(50_000)).await.unwrap().unwrap().len(), 1);
            assert_eq!(stores.current_groups(app, user(50_000)).await.unwrap().unwrap().memberships.len(), 1);
        })
        .await;
    assert!(most <= MAX_ROWS, "the groups of a user: {most}");
    let number = std::sync::atomic::AtomicU32::new(60_000);
    let most = big
        .most_rows_of(async || {
            let user = user(number.fetch_add(1, std::sync::atomic::Ordering::Relaxed).into());
            let event = an_event(EventKind::GroupMemberAdded, user);
            let added = stores.add_member(app, &group("g1"), user, event.clone()).await.unwrap();
            assert!(matches!(added, MemberOutcome::Changed(_)), "{added:?}");
            let removed = stores.remove_member(app, &group("team"), user, event).await.unwrap();
            assert!(matches!(removed, MemberOutcome::Changed(_)), "{removed:?}");
        })
        .await;
    assert!(most <= MAX_ROWS, "a member: {most}");
    let most = big
        .most_rows_of(async || {
            let event = an_event(EventKind::GroupMemberRemoved, None);
            let removal = stores.remove_group(app, &group("team"), event).await.unwrap();
            assert!(matches!(removal, GroupRemoval::Partial(changes) if changes.len() == 200));
        })
        .await;
    assert!(most <= MAX_REMOVAL_ROWS, "a deletion of a group: {most}");
}
