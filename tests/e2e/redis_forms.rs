//! Redis in all its forms: one server with users and databases, a primary that sentinels name, a cluster; each by TLS
//! too, each while its primaries go and its slots move.

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
    client::{Anonymous, Answer},
    eventually, postgres, process,
    redis::{self, Redis, RedisCluster, RedisSentinel, SentinelOptions, User},
    stack::Stack,
    tls::Tls,
};
use tokio::task::JoinHandle;

use crate::{
    support::{NEW_PASSWORD, PASSWORD, Shop, WRONG_PASSWORD},
    trouble::{invalid_credentials, loose, unavailable},
};

const EMAIL: &str = "ada@example.com";
/// A fail-over takes some seconds, on a loaded machine more.
const SOON: Duration = Duration::from_secs(60);
/// So many calls in a row without a refusal are a service that is well.
const WELL: usize = 50;
/// A user has at most a hundred sessions.
const LOGINS: usize = 80;

/// The user of docs/redis.md, by the very rules that it gives.
fn documented_user() -> User {
    let docs = fs::read_to_string(process::root().join("docs/redis.md")).expect("docs/redis.md is there");
    let line = docs.lines().find_map(|line| line.strip_prefix("ACL SETUSER latchkey on >password "));
    let rules = line.expect("docs/redis.md says what the user may do").to_owned();
    User { name: "latchkey".to_owned(), password: "s3cret".to_owned(), rules }
}

fn guarded() -> redis::Options {
    redis::Options {
        password: Some("the-administrators".to_owned()),
        user: Some(documented_user()),
        ..redis::Options::for_tests()
    }
}

fn by_tls(options: redis::Options) -> redis::Options {
    redis::Options { tls: Some(Tls::new().expect("an authority")), ..options }
}

/// A service over that Redis, once it has reached it: connecting by TLS takes a loaded machine some time.
async fn over(url: &str, ca: Option<&Path>) -> Shop {
    let app = loose("forms").limit("refreshesPerSession", &[(100_000, 60)]);
    let shop = Shop::of(app, Stack::builder().redis_at(url, ca)).await;
    shop.recovers("the first call", async || shop.client().forgot_password(shop.id(), "nobody@example.com").await)
        .await;
    shop
}

/// What users do, with each kind of key: codes, sessions, epochs, limits, known addresses and refusals.
async fn the_main_flow_works(shop: &Shop) {
    let (client, token) = shop.session(EMAIL).await;
    shop.look(&token).await.expect(StatusCode::OK);
    invalid_credentials(client.login(shop.id(), EMAIL, WRONG_PASSWORD).await);

    // A reset ends what was there before it.
    let code = shop.reset_code(EMAIL, 2).await;
    client.confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await.expect(StatusCode::OK);
    shop.look(&token).await.expect(StatusCode::UNAUTHORIZED);
    let again = client.confirm_password(shop.id(), EMAIL, &code, NEW_PASSWORD).await;
    again.expect_error(StatusCode::BAD_REQUEST, "invalid_code");
    let token = client.login(shop.id(), EMAIL, NEW_PASSWORD).await.expect(StatusCode::OK);
    shop.look(token.string("token")).await.expect(StatusCode::OK);

    let counted = || async {
        let metrics = shop.stack.server().ops("metrics").await.expect(StatusCode::OK).text;
        assert!(metrics.contains("\nlatchkey_audit_refusals_lost_total 0\n"), "{metrics}");
        let took = |operation| format!("latchkey_redis_seconds_count{{operation=\"{operation}\"}}");
        ["count_refusals", "write_refusals"].iter().all(|of| metrics.contains(&took(of))).then_some(())
    };
    eventually("the refusals to be counted", SOON, counted).await;
}

/// Keys in a database, of one server.
async fn keys(redis: &Redis, database: u8) -> Vec<String> {
    let mut connection = redis.connect().await.expect("Redis is there");
    let mut commands = ::redis::pipe();
    commands.cmd("SELECT").arg(database).ignore().cmd("KEYS").arg("*").cmd("SELECT").arg(0).ignore();
    let (keys,): (Vec<String>,) = commands.query_async(&mut connection).await.expect("Redis lists its keys");
    keys
}

#[tokio::test]
async fn a_user_of_an_access_control_list_uses_a_database_of_its_own() {
    let redis = Redis::start(guarded()).await.expect("Redis starts");
    let shop = over(&redis.url().replace("/0", "/3"), None).await;
    the_main_flow_works(&shop).await;
    assert_eq!(keys(&redis, 0).await, [""; 0]);
    let all = keys(&redis, 3).await;
    assert!(!all.is_empty() && all.iter().all(|key| key.starts_with("lk:")), "{all:?}");
}

#[tokio::test]
async fn sentinels_name_the_primary() {
    let server = redis::Options { password: Some("the-servers".to_owned()), ..redis::Options::for_tests() };
    let password = Some("sentinels".to_owned());
    let options = SentinelOptions { server, password, ..SentinelOptions::for_tests() };
    let redis = RedisSentinel::start(options).await.expect("Redis starts");
    the_main_flow_works(&over(redis.url(), None).await).await;
}

#[tokio::test]
async fn sentinels_and_their_servers_are_reached_by_tls_as_a_user() {
    let options = SentinelOptions { server: by_tls(guarded()), ..SentinelOptions::for_tests() };
    let redis = RedisSentinel::start(options).await.expect("Redis starts");
    the_main_flow_works(&over(redis.url(), redis.ca()).await).await;
}

#[tokio::test]
async fn a_cluster_serves_each_key_from_its_node() {
    let redis = RedisCluster::start().await.expect("Redis starts");
    let shop = over(&redis.url(), None).await;
    the_main_flow_works(&shop).await;
    for email in ["a@example.com", "b@example.com", "c@example.com", "d@example.com"] {
        shop.session(email).await;
    }
    for master in &redis.masters {
        assert!(!keys(master, 0).await.is_empty(), "each has some of so many keys");
    }
}

#[tokio::test]
async fn one_node_of_a_cluster_that_evicts_keys_is_told_in_a_metric() {
    let redis = RedisCluster::start().await.expect("Redis starts");
    let set = ::redis::cmd("CONFIG").arg(&["SET", "maxmemory-policy", "allkeys-lru"]).clone();
    let mut connection = redis.masters[2].connect().await.expect("Redis is there");
    set.query_async::<()>(&mut connection).await.expect("Redis takes a setting");
    let shop = over(&redis.url(), None).await;
    eventually("the policies are looked at", SOON, || async {
        let metrics = shop.stack.server().ops("metrics").await.text;
        metrics.lines().any(|line| line == "latchkey_redis_evicts 1").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_cluster_with_replicas_is_reached_by_tls_as_a_user() {
    let redis = RedisCluster::start_with(&by_tls(guarded()), true).await.expect("Redis starts");
    the_main_flow_works(&over(&redis.url(), redis.ca()).await).await;
}

#[tokio::test]
async fn a_wrong_password_is_told_without_it_and_mended_by_editing_the_url() {
    let redis = Redis::start(guarded()).await.expect("Redis starts");
    let wrong = redis.url().replace("s3cret", "not-the-s3cret");
    let shop = Shop::of(loose("forms"), Stack::builder().redis_at(&wrong, None)).await;
    let login = async || shop.client().login(shop.id(), EMAIL, PASSWORD).await;
    unavailable(login().await);
    let told = || async {
        let log = shop.stack.server().logged();
        log.lines().find(|line| line.contains("Redis is not reached")).map(str::to_owned)
    };
    let told = eventually("the log tells of it", SOON, told).await;
    assert!(told.contains("refused") && told.contains(&redis.addr().to_string()), "{told}");
    assert!(!shop.stack.server().logged().contains("s3cret"));

    let file = shop.stack.dir().join("redis-url");
    postgres::write_private(&file, "redis-sentinel://:s3cret@127.0.0.1").expect("the file can be written");
    unavailable(login().await);
    let told = || async {
        let log = shop.stack.server().logged();
        log.lines().find(|line| line.contains("the URL of Redis cannot be used")).map(str::to_owned)
    };
    eventually("a URL of no form is told of", SOON, || async {
        unavailable(login().await);
        told().await
    })
    .await;
    assert!(!shop.stack.server().logged().contains("s3cret"));

    postgres::write_private(&file, &redis.url()).expect("the file can be written");
    let answer = eventually("the right password is used", SOON, || async {
        let answer = login().await;
        (answer.status != StatusCode::SERVICE_UNAVAILABLE).then_some(answer)
    })
    .await;
    invalid_credentials(answer);
    shop.session(EMAIL).await;
}

#[tokio::test]
async fn a_url_of_another_form_is_followed_without_a_restart() {
    let single = Redis::start(redis::Options::for_tests()).await.expect("Redis starts");
    let cluster = RedisCluster::start().await.expect("Redis starts");
    let shop = over(&single.url(), None).await;
    let (client, token) = shop.session(EMAIL).await;
    let file = shop.stack.dir().join("redis-url");
    postgres::write_private(&file, &cluster.url()).expect("the file can be written");
    // As long as nothing fails, nothing is looked for.
    shop.look(&token).await.expect(StatusCode::OK);
    assert!(single.stop(SOON));
    let token = shop.recovers("a log-in", async || client.login(shop.id(), EMAIL, PASSWORD).await).await;
    shop.look(token.string("token")).await.expect(StatusCode::OK);
}

// === Under load ===

/// A user who logs in, looks at sessions and refreshes them, without pause, until told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    /// Calls that were served since the last refusal.
    in_a_row: Arc<AtomicUsize>,
    workers: Vec<JoinHandle<Tally>>,
}

/// What one of them does all the time.
enum Caller {
    LogsIn { times: usize },
    Looks { token: String },
    Refreshes { token: String },
}

/// What the load got.
#[derive(Debug, Default)]
struct Tally {
    served: usize,
    unavailable: usize,
    /// What no call may ever get.
    wrong: BTreeSet<String>,
}

impl Caller {
    async fn call(&mut self, client: &Anonymous, app: &str) -> Option<Answer> {
        Some(match self {
            Self::LogsIn { times } => {
                *times = times.checked_sub(1)?;
                client.login(app, EMAIL, PASSWORD).await
            }
            Self::Looks { token } => client.signed_in(app, token).verify().await,
            Self::Refreshes { token } => {
                let answer = client.refresh(app, token).await;
                // Whoever gets no answer asks with the same token again.
                if answer.status == StatusCode::OK {
                    answer.string("refresh_token").clone_into(token);
                }
                answer
            }
        })
    }
}

impl Load {
    /// Of [`EMAIL`], who has these sessions, all of which must stay.
    fn start(shop: &Shop, sessions: &[Answer]) -> Self {
        let mut load = Self { stop: Arc::default(), in_a_row: Arc::default(), workers: Vec::new() };
        // Hashing passwords is slow, and what is wanted is many calls of Redis; so one logs in.
        load.add(shop, Caller::LogsIn { times: LOGINS });
        for session in sessions {
            load.add(shop, Caller::Looks { token: session.string("token").to_owned() });
            load.add(shop, Caller::Refreshes { token: session.string("refresh_token").to_owned() });
        }
        load
    }

    fn add(&mut self, shop: &Shop, mut caller: Caller) {
        let (client, app) = (shop.client(), shop.id().to_owned());
        let (stop, in_a_row) = (Arc::clone(&self.stop), Arc::clone(&self.in_a_row));
        self.workers.push(tokio::spawn(async move {
            let mut tally = Tally::default();
            while !stop.load(Ordering::Relaxed) {
                let Some(answer) = caller.call(&client, &app).await else { break };
                match answer.status {
                    StatusCode::OK => {
                        tally.served += 1;
                        in_a_row.fetch_add(1, Ordering::Relaxed);
                    }
                    StatusCode::SERVICE_UNAVAILABLE => {
                        tally.unavailable += 1;
                        in_a_row.store(0, Ordering::Relaxed);
                        unavailable(answer);
                    }
                    _ => drop(tally.wrong.insert(answer.text)),
                }
            }
            tally
        }));
    }

    /// Waits until so many calls in a row are served.
    async fn is_well(&self, what: &str) {
        self.in_a_row.store(0, Ordering::Relaxed);
        eventually(what, SOON, || async { (self.in_a_row.load(Ordering::Relaxed) >= WELL).then_some(()) }).await;
    }

    async fn end(self) -> Tally {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Tally::default();
        for worker in self.workers {
            let tally = worker.await.expect("a worker does not panic");
            all.served += tally.served;
            all.unavailable += tally.unavailable;
            all.wrong.extend(tally.wrong);
        }
        all
    }
}

/// [`EMAIL`] with some sessions.
async fn with_sessions(shop: &Shop) -> Vec<Answer> {
    let client = shop.confirmed(EMAIL).await;
    let mut sessions = Vec::new();
    for _ in 0..4 {
        sessions.push(client.login(shop.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK));
    }
    sessions
}

/// Asserts that no session was lost, and nothing else went wrong.
async fn are_there(shop: &Shop, sessions: &[Answer], tally: &Tally) {
    assert_eq!(tally.wrong, BTreeSet::new(), "{tally:?}");
    for session in sessions {
        shop.look(session.string("token")).await.expect(StatusCode::OK);
    }
    assert_eq!(shop.stack.server().ended(), None);
}

/// Waits until a replica has all that was written so far.
async fn acknowledged(connection: &mut ::redis::aio::MultiplexedConnection, key: &str) {
    let mut commands = ::redis::pipe();
    commands.cmd("SET").arg(key).arg(1).ignore().cmd("WAIT").arg(1).arg(5000);
    let (replicas,): (usize,) = commands.query_async(connection).await.expect("the primary is there");
    assert!(replicas > 0, "a replica follows");
}

#[tokio::test]
async fn a_primary_killed_under_load_is_left_for_the_one_that_sentinels_make() {
    let redis = RedisSentinel::start(SentinelOptions::for_tests()).await.expect("Redis starts");
    let shop = over(redis.url(), None).await;
    let sessions = with_sessions(&shop).await;
    let load = Load::start(&shop, &sessions);
    for round in 0..2 {
        load.is_well("before the primary is killed").await;
        acknowledged(&mut redis.connect().await.expect("the primary is there"), "round").await;
        let killed = redis.kill_primary().await.expect("there is a primary");
        redis.failed_over(killed).await.expect("the sentinels make another primary");
        load.is_well("after the fail-over").await;
        if round == 0 {
            // The one that was killed comes back as a replica, and is the next primary.
            redis.restart(killed).await.expect("it starts again");
        }
    }
    let tally = load.end().await;
    assert!(tally.unavailable > 0, "a fail-over is not silent: {tally:?}");
    are_there(&shop, &sessions, &tally).await;
}

/// The key of a session of an App's user who has one, wherever it is.
async fn a_session_key(redis: &RedisCluster, app: &str) -> String {
    for master in &redis.masters {
        let key = keys(master, 0).await.into_iter().find(|key| key.contains(app) && key.contains(":session:"));
        if let Some(key) = key {
            return key;
        }
    }
    panic!("the App has a session")
}

#[tokio::test]
async fn a_slot_that_moves_under_load_fails_no_call() {
    let redis = RedisCluster::start().await.expect("Redis starts");
    let shop = over(&redis.url(), None).await;
    let sessions = with_sessions(&shop).await;
    let slot = redis.slot_of(&a_session_key(&redis, shop.id()).await).await.expect("a slot");
    let load = Load::start(&shop, &sessions);
    let mut moved = 0;
    for _ in 0..12 {
        load.is_well("between two moves").await;
        let owner = redis.owner(slot).await.expect("the slot has an owner");
        moved += redis.move_slot(slot, (owner + 1) % redis.masters.len()).await.expect("the slot moves");
    }
    load.is_well("after the moves").await;
    let tally = load.end().await;
    assert_eq!(tally.unavailable, 0, "{tally:?}");
    assert!(moved >= 12 * sessions.len(), "the sessions moved along: {moved}");
    are_there(&shop, &sessions, &tally).await;
}

#[tokio::test]
async fn a_primary_of_a_cluster_killed_under_load_is_left_for_its_replica() {
    let redis = RedisCluster::start_with(&redis::Options::for_tests(), true).await.expect("Redis starts");
    let shop = over(&redis.url_of_all(), None).await;
    let sessions = with_sessions(&shop).await;
    let key = a_session_key(&redis, shop.id()).await;
    let slot = redis.slot_of(&key).await.expect("a slot");
    let owner = &redis.masters[redis.owner(slot).await.expect("the slot has an owner")];
    let load = Load::start(&shop, &sessions);
    load.is_well("before the primary is killed").await;
    // In the slot of the session.
    let tag = &key[..=key.find('}').expect("a key has a hash tag")];
    acknowledged(&mut owner.connect().await.expect("the primary is there"), &format!("{tag}:acknowledged")).await;
    owner.process().kill();
    load.is_well("after the fail-over").await;
    let tally = load.end().await;
    assert!(tally.unavailable > 0, "a fail-over is not silent: {tally:?}");
    are_there(&shop, &sessions, &tally).await;
}
