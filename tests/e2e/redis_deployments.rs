//! All supported kinds of Redis: a single server (with an ACL user and its own database), a primary with sentinels, and
//! a cluster. Sentinels and the cluster are also tested over TLS and during failovers. The cluster is also tested while
//! slots move.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use latchkey_tests::{
    client::{ApiClient, ApiResponse},
    eventually,
    passwords::{NEW_PASSWORD, PASSWORD, WRONG_PASSWORD},
    postgres, process,
    redis::{self, Redis, RedisCluster, SentinelOptions, SentinelSetup, User},
    stack::Stack,
    tls::ServerTls,
};
use tokio::task::JoinHandle;

use crate::{
    fault_support::{expect_invalid_credentials, expect_unavailable, unlimited_app},
    support::TestApp,
};

const EMAIL: &str = "ada@example.com";
/// Time limit for a recovery. A failover takes a few seconds; a loaded machine takes longer.
const RECOVERY_LIMIT: Duration = Duration::from_secs(60);
/// The service counts as recovered after this number of successful calls in a row.
const HEALTHY_CALLS: usize = 50;
/// Maximum number of logins under load. A user has at most a hundred sessions, so more logins would end the first
/// sessions.
const MAX_LOGINS: usize = 80;

/// The ACL user that docs/redis.md describes, with the rules of that page.
fn documented_user() -> User {
    let docs = fs::read_to_string(process::root().join("docs/redis.md")).expect("docs/redis.md exists");
    let line = docs.lines().find_map(|line| line.strip_prefix("ACL SETUSER latchkey on >password "));
    let rules = line.expect("docs/redis.md says what the user may do").to_owned();
    User { name: "latchkey".to_owned(), password: "s3cret".to_owned(), rules }
}

fn acl_options() -> redis::Options {
    redis::Options {
        password: Some("the-administrators".to_owned()),
        user: Some(documented_user()),
        ..redis::Options::for_tests()
    }
}

fn with_tls(options: redis::Options) -> redis::Options {
    redis::Options { tls: Some(ServerTls::new().expect("an authority")), ..options }
}

/// Starts a service with this Redis. Waits for the first successful call, because the first connection over TLS takes
/// time on a loaded machine.
async fn start_app(url: &str, ca: Option<&Path>) -> TestApp {
    let app = unlimited_app("forms").limit("refreshesPerSession", &[(100_000, 60)]);
    let test_app = TestApp::from_builder(app, Stack::builder().external_redis(url, ca)).await;
    test_app
        .wait_until_ok("the first call", async || {
            test_app.client().forgot_password(test_app.id(), "nobody@example.com").await
        })
        .await;
    test_app
}

/// Calls endpoints that together use these kinds of Redis keys: codes, sessions, epochs, limits, known client addresses
/// and refusals.
async fn assert_main_flow_works(test_app: &TestApp) {
    let (client, token) = test_app.register_and_log_in(EMAIL).await;
    test_app.verify(&token).await.expect(StatusCode::OK);
    expect_invalid_credentials(client.login(test_app.id(), EMAIL, WRONG_PASSWORD).await);

    // A reset ends the earlier sessions.
    let code = test_app.request_reset_code(EMAIL, 2).await;
    client.confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    test_app.verify(&token).await.expect(StatusCode::UNAUTHORIZED);
    let refused = client.confirm_password(test_app.id(), EMAIL, &code, NEW_PASSWORD).await;
    refused.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let token = client.login(test_app.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    test_app.verify(token.string("token")).await.expect(StatusCode::OK);

    let counted = || async {
        let metrics = test_app.stack.server().get_ops("metrics").await.expect(StatusCode::OK).text;
        assert!(metrics.contains("\nlatchkey_audit_refusals_lost_total 0\n"), "{metrics}");
        let metric_name = |operation| format!("latchkey_redis_seconds_count{{operation=\"{operation}\"}}");
        ["count_refusals", "write_refusals"]
            .iter()
            .all(|operation| metrics.contains(&metric_name(operation)))
            .then_some(())
    };
    eventually("the refusals to be counted", RECOVERY_LIMIT, counted).await;
}

/// The keys in one database of a Redis server.
async fn keys(redis: &Redis, database: u8) -> Vec<String> {
    let mut connection = redis.connect().await.expect("Redis is reachable");
    let mut commands = ::redis::pipe();
    commands.cmd("SELECT").arg(database).ignore().cmd("KEYS").arg("*").cmd("SELECT").arg(0).ignore();
    let (keys,): (Vec<String>,) = commands.query_async(&mut connection).await.expect("Redis lists its keys");
    keys
}

#[tokio::test]
async fn an_acl_user_uses_its_own_database() {
    let redis = Redis::start(acl_options()).await.expect("Redis starts");
    let test_app = start_app(&redis.url().replace("/0", "/3"), None).await;
    assert_main_flow_works(&test_app).await;
    assert_eq!(keys(&redis, 0).await, [""; 0]);
    let used_keys = keys(&redis, 3).await;
    assert!(!used_keys.is_empty() && used_keys.iter().all(|key| key.starts_with("lk:")), "{used_keys:?}");
}

#[tokio::test]
async fn the_primary_is_found_through_sentinels() {
    let server = redis::Options { password: Some("the-servers".to_owned()), ..redis::Options::for_tests() };
    let password = Some("sentinels".to_owned());
    let options = SentinelOptions { server, password, ..SentinelOptions::for_tests() };
    let redis = SentinelSetup::start(options).await.expect("Redis starts");
    assert_main_flow_works(&start_app(redis.url(), None).await).await;
}

#[tokio::test]
async fn sentinels_and_their_servers_are_used_over_tls_with_an_acl_user() {
    let options = SentinelOptions { server: with_tls(acl_options()), ..SentinelOptions::for_tests() };
    let redis = SentinelSetup::start(options).await.expect("Redis starts");
    assert_main_flow_works(&start_app(redis.url(), redis.ca()).await).await;
}

#[tokio::test]
async fn a_cluster_serves_each_key_from_its_node() {
    let redis = RedisCluster::start().await.expect("Redis starts");
    let test_app = start_app(&redis.url(), None).await;
    assert_main_flow_works(&test_app).await;
    for email in ["a@example.com", "b@example.com", "c@example.com", "d@example.com"] {
        test_app.register_and_log_in(email).await;
    }
    for master in &redis.masters {
        assert!(!keys(master, 0).await.is_empty(), "each has some of so many keys");
    }
}

#[tokio::test]
async fn a_cluster_node_that_evicts_keys_is_shown_by_a_metric() {
    let redis = RedisCluster::start().await.expect("Redis starts");
    let set = ::redis::cmd("CONFIG").arg(&["SET", "maxmemory-policy", "allkeys-lru"]).clone();
    let mut connection = redis.masters[2].connect().await.expect("Redis is reachable");
    set.query_async::<()>(&mut connection).await.expect("Redis accepts the setting");
    let test_app = start_app(&redis.url(), None).await;
    eventually("the eviction policies are checked", RECOVERY_LIMIT, || async {
        let metrics = test_app.stack.server().get_ops("metrics").await.text;
        metrics.lines().any(|line| line == "latchkey_redis_evicts 1").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_cluster_with_replicas_is_used_over_tls_with_an_acl_user() {
    let redis = RedisCluster::start_with(&with_tls(acl_options()), true).await.expect("Redis starts");
    assert_main_flow_works(&start_app(&redis.url(), redis.ca()).await).await;
}

#[tokio::test]
async fn a_wrong_password_is_logged_without_the_password_and_fixed_by_editing_the_url() {
    let redis = Redis::start(acl_options()).await.expect("Redis starts");
    let wrong_url = redis.url().replace("s3cret", "not-the-s3cret");
    let test_app =
        TestApp::from_builder(unlimited_app("forms"), Stack::builder().external_redis(&wrong_url, None)).await;
    let login = async || test_app.client().login(test_app.id(), EMAIL, PASSWORD).await;
    expect_unavailable(login().await);
    let find_line = || async {
        let log = test_app.stack.server().read_log();
        log.lines().find(|line| line.contains("cannot reach Redis")).map(str::to_owned)
    };
    let logged = eventually("the log reports it", RECOVERY_LIMIT, find_line).await;
    assert!(logged.contains("refused") && logged.contains(&redis.addr().to_string()), "{logged}");
    assert!(!test_app.stack.server().read_log().contains("s3cret"));

    let file = test_app.stack.dir().join("redis-url");
    postgres::write_private(&file, "redis-sentinel://:s3cret@127.0.0.1").expect("the file can be written");
    expect_unavailable(login().await);
    let find_line = || async {
        let log = test_app.stack.server().read_log();
        log.lines().find(|line| line.contains("the URL of Redis cannot be used")).map(str::to_owned)
    };
    eventually("an invalid URL is reported", RECOVERY_LIMIT, || async {
        expect_unavailable(login().await);
        find_line().await
    })
    .await;
    assert!(!test_app.stack.server().read_log().contains("s3cret"));

    postgres::write_private(&file, &redis.url()).expect("the file can be written");
    let response = eventually("the right password is used", RECOVERY_LIMIT, || async {
        let response = login().await;
        (response.status != StatusCode::SERVICE_UNAVAILABLE).then_some(response)
    })
    .await;
    expect_invalid_credentials(response);
    test_app.register_and_log_in(EMAIL).await;
}

#[tokio::test]
async fn a_changed_redis_url_takes_effect_without_a_restart() {
    let single = Redis::start(redis::Options::for_tests()).await.expect("Redis starts");
    let cluster = RedisCluster::start().await.expect("Redis starts");
    let test_app = start_app(&single.url(), None).await;
    let (client, token) = test_app.register_and_log_in(EMAIL).await;
    let file = test_app.stack.dir().join("redis-url");
    postgres::write_private(&file, &cluster.url()).expect("the file can be written");
    // While the old connection works, the server does not use the new URL.
    test_app.verify(&token).await.expect(StatusCode::OK);
    assert!(single.stop(RECOVERY_LIMIT));
    let token = test_app.wait_until_ok("a login", async || client.login(test_app.id(), EMAIL, PASSWORD).await).await;
    test_app.verify(token.string("token")).await.expect(StatusCode::OK);
}

// === Under load ===

/// Workers that log in, verify and refresh without a pause until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    /// Number of successful calls since the last 503 response.
    successes_in_a_row: Arc<AtomicUsize>,
    workers: Vec<JoinHandle<LoadResults>>,
}

/// The calls that one worker repeats.
enum Worker {
    LogIn { times: usize },
    Verify { token: String },
    Refresh { token: String },
}

/// Counts the responses to the workers' calls.
#[derive(Debug, Default)]
struct LoadResults {
    served: usize,
    unavailable: usize,
    /// Responses other than 200 and 503.
    wrong: BTreeSet<String>,
}

impl Worker {
    async fn call(&mut self, client: &ApiClient, app: &str) -> Option<ApiResponse> {
        Some(match self {
            Self::LogIn { times } => {
                *times = times.checked_sub(1)?;
                client.login(app, EMAIL, PASSWORD).await
            }
            Self::Verify { token } => client.with_token(app, token).verify().await,
            Self::Refresh { token } => {
                let response = client.refresh(app, token).await;
                // After any other response, the client sends the same token again.
                if response.status == StatusCode::OK {
                    response.string("refresh_token").clone_into(token);
                }
                response
            }
        })
    }
}

impl Load {
    /// Starts workers for these sessions of [`EMAIL`], which must all stay live.
    fn start(test_app: &TestApp, sessions: &[ApiResponse]) -> Self {
        let mut load = Self { stop: Arc::default(), successes_in_a_row: Arc::default(), workers: Vec::new() };
        // Only one worker logs in, because password hashes are slow and the test needs many calls to Redis.
        load.add(test_app, Worker::LogIn { times: MAX_LOGINS });
        for session in sessions {
            load.add(test_app, Worker::Verify { token: session.string("token").to_owned() });
            load.add(test_app, Worker::Refresh { token: session.string("refresh_token").to_owned() });
        }
        load
    }

    fn add(&mut self, test_app: &TestApp, mut worker: Worker) {
        let (client, app) = (test_app.client(), test_app.id().to_owned());
        let (stop, in_a_row) = (Arc::clone(&self.stop), Arc::clone(&self.successes_in_a_row));
        self.workers.push(tokio::spawn(async move {
            let mut results = LoadResults::default();
            while !stop.load(Ordering::Relaxed) {
                let Some(response) = worker.call(&client, &app).await else { break };
                match response.status {
                    StatusCode::OK => {
                        results.served += 1;
                        in_a_row.fetch_add(1, Ordering::Relaxed);
                    }
                    StatusCode::SERVICE_UNAVAILABLE => {
                        results.unavailable += 1;
                        in_a_row.store(0, Ordering::Relaxed);
                        expect_unavailable(response);
                    }
                    _ => drop(results.wrong.insert(response.text)),
                }
            }
            results
        }));
    }

    /// Waits until [`HEALTHY_CALLS`] calls in a row have succeeded.
    async fn wait_until_healthy(&self, what: &str) {
        self.successes_in_a_row.store(0, Ordering::Relaxed);
        eventually(what, RECOVERY_LIMIT, || async {
            (self.successes_in_a_row.load(Ordering::Relaxed) >= HEALTHY_CALLS).then_some(())
        })
        .await;
    }

    async fn stop(self) -> LoadResults {
        self.stop.store(true, Ordering::Relaxed);
        let mut total = LoadResults::default();
        for worker in self.workers {
            let results = worker.await.expect("a worker does not panic");
            total.served += results.served;
            total.unavailable += results.unavailable;
            total.wrong.extend(results.wrong);
        }
        total
    }
}

/// Opens several sessions of [`EMAIL`].
async fn open_sessions(test_app: &TestApp) -> Vec<ApiResponse> {
    let client = test_app.register_and_confirm(EMAIL).await;
    let mut sessions = Vec::new();
    for _ in 0..4 {
        sessions.push(client.login(test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK));
    }
    sessions
}

/// Asserts that all sessions are live, and that no call got an unexpected response.
async fn assert_sessions_live(test_app: &TestApp, sessions: &[ApiResponse], results: &LoadResults) {
    assert_eq!(results.wrong, BTreeSet::new(), "{results:?}");
    for session in sessions {
        test_app.verify(session.string("token")).await.expect(StatusCode::OK);
    }
    assert_eq!(test_app.stack.server().exit_status(), None);
}

/// Waits until a replica has replicated all writes so far.
async fn wait_for_replica(connection: &mut ::redis::aio::MultiplexedConnection, key: &str) {
    let mut commands = ::redis::pipe();
    commands.cmd("SET").arg(key).arg(1).ignore().cmd("WAIT").arg(1).arg(5000);
    let (replicas,): (usize,) = commands.query_async(connection).await.expect("the primary is reachable");
    assert!(replicas > 0, "a replica follows");
}

#[tokio::test]
async fn the_new_primary_of_the_sentinels_is_used_after_the_old_one_is_killed_under_load() {
    let redis = SentinelSetup::start(SentinelOptions::for_tests()).await.expect("Redis starts");
    let test_app = start_app(redis.url(), None).await;
    let sessions = open_sessions(&test_app).await;
    let load = Load::start(&test_app, &sessions);
    for round in 0..2 {
        load.wait_until_healthy("before the primary is killed").await;
        wait_for_replica(&mut redis.connect().await.expect("the primary is reachable"), "round").await;
        let killed = redis.kill_primary().await.expect("there is a primary");
        redis.wait_for_failover(killed).await.expect("the sentinels make another primary");
        load.wait_until_healthy("after the failover").await;
        if round == 0 {
            // The killed server comes back as a replica, and the next failover makes it the primary.
            redis.restart(killed).await.expect("it starts again");
        }
    }
    let results = load.stop().await;
    assert!(results.unavailable > 0, "a failover causes refusals: {results:?}");
    assert_sessions_live(&test_app, &sessions, &results).await;
}

/// The key of a session of the App. Searches all nodes.
async fn find_session_key(redis: &RedisCluster, app: &str) -> String {
    for master in &redis.masters {
        let key = keys(master, 0).await.into_iter().find(|key| key.contains(app) && key.contains(":session:"));
        if let Some(key) = key {
            return key;
        }
    }
    panic!("the App has a session")
}

#[tokio::test]
async fn no_call_fails_while_a_slot_moves_under_load() {
    let redis = RedisCluster::start().await.expect("Redis starts");
    let test_app = start_app(&redis.url(), None).await;
    let sessions = open_sessions(&test_app).await;
    let slot = redis.slot_of(&find_session_key(&redis, test_app.id()).await).await.expect("a slot");
    let load = Load::start(&test_app, &sessions);
    let mut moved = 0;
    for _ in 0..12 {
        load.wait_until_healthy("between two moves").await;
        let owner = redis.owner(slot).await.expect("the slot has an owner");
        moved += redis.move_slot(slot, (owner + 1) % redis.masters.len()).await.expect("the slot moves");
    }
    load.wait_until_healthy("after the moves").await;
    let results = load.stop().await;
    assert_eq!(results.unavailable, 0, "{results:?}");
    assert!(moved >= 12 * sessions.len(), "the sessions moved along: {moved}");
    assert_sessions_live(&test_app, &sessions, &results).await;
}

#[tokio::test]
async fn the_replica_of_a_cluster_primary_is_used_after_the_primary_is_killed_under_load() {
    let redis = RedisCluster::start_with(&redis::Options::for_tests(), true).await.expect("Redis starts");
    let test_app = start_app(&redis.url_of_all(), None).await;
    let sessions = open_sessions(&test_app).await;
    let key = find_session_key(&redis, test_app.id()).await;
    let slot = redis.slot_of(&key).await.expect("a slot");
    let owner = &redis.masters[redis.owner(slot).await.expect("the slot has an owner")];
    let load = Load::start(&test_app, &sessions);
    load.wait_until_healthy("before the primary is killed").await;
    // A key with this tag is in the same slot as the session.
    let tag = &key[..=key.find('}').expect("a key has a hash tag")];
    wait_for_replica(&mut owner.connect().await.expect("the primary is reachable"), &format!("{tag}:acknowledged"))
        .await;
    owner.process().kill();
    load.wait_until_healthy("after the failover").await;
    let results = load.stop().await;
    assert!(results.unavailable > 0, "a failover causes refusals: {results:?}");
    assert_sessions_live(&test_app, &sessions, &results).await;
}
