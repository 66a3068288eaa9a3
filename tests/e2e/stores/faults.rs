//! Stores that are down, slow, overloaded or restarted: calls fail fast, and servers use the stores again without being
//! restarted.

use std::{
    fs,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream::FuturesUnordered};
use latchkey_crds::rendered::{LimitName, Window};
use latchkey_server::{
    domain::{
        ports::{Outbox, RateLimits, Users},
        rate_limits::RateLimitCheck,
    },
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
        redis::RedisStore,
    },
};
use latchkey_tests::{
    eventually, eventually_ok,
    postgres::{Options as PostgresOptions, Postgres as PostgresServer, write_private},
    process,
    proxy::Proxy,
    redis::{self, Redis as RedisServer},
    tls::ServerTls,
};
use prometheus_client::{encoding::text::encode, registry::Registry};

use super::{Fixture, LIMIT, a_mail, a_user_id, an_app, assert_unavailable, stores};

/// Maximum time until a call returns that Postgres is unavailable, on a loaded machine.
const POSTGRES_LIMIT: Duration = Duration::from_secs(6);
/// Maximum time until a call returns that Redis is unavailable, on a loaded machine.
const REDIS_LIMIT: Duration = Duration::from_secs(4);
/// Maximum median time of the calls that fail in a known outage. Such a call waits for nothing, but the machine can be
/// loaded.
const MAX_MEDIAN_FAILURE_TIME: Duration = Duration::from_millis(100);
/// How long a call waits for a connection if the outage is not known yet.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(3);

pub(super) fn stores_via(fixture: &Fixture, proxy: &Proxy) -> Stores {
    let url = fixture.database.url.replace(&fixture.database.addr.to_string(), &proxy.addr().to_string());
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::from_value(url)) };
    Stores { postgres: PostgresStore::connect(options).unwrap(), ..fixture.stores.clone() }
}

fn rate_limit_checks() -> Vec<RateLimitCheck> {
    let windows = vec![Window { count: 1_000_000, window_seconds: 60 }];
    vec![RateLimitCheck { limit: LimitName::LoginsPerClient.into(), subject: "192.0.2.1".to_owned(), windows }]
}

async fn assert_redis_unavailable(stores: &Stores) {
    let started = Instant::now();
    match stores.acquire(&an_app(), rate_limit_checks()).await {
        Err(latchkey_server::domain::ports::AcquireError::Store(error)) => assert_unavailable::<()>(Err(error)),
        other => panic!("{other:?}"),
    }
    assert!(started.elapsed() < REDIS_LIMIT, "failed after {:?}", started.elapsed());
}

async fn wait_for_redis(stores: &Stores) {
    let app = an_app();
    eventually_ok("Redis is used again", LIMIT, async || stores.acquire(&app, rate_limit_checks()).await).await;
}

async fn assert_postgres_unavailable(stores: &Stores) {
    let started = Instant::now();
    assert_unavailable(stores.user(&an_app(), a_user_id()).await);
    assert!(started.elapsed() < POSTGRES_LIMIT, "failed after {:?}", started.elapsed());
}

async fn wait_for_postgres(stores: &Stores) {
    let app = an_app();
    eventually_ok("Postgres is used again", LIMIT, async || stores.user(&app, a_user_id()).await).await;
}

#[tokio::test]
async fn postgres_is_unavailable_while_connections_fail_and_is_then_used_again() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = stores_via(&fixture, &proxy);
    wait_for_postgres(&stores).await;

    proxy.refuse().await;
    assert_postgres_unavailable(&stores).await;
    proxy.restore().unwrap();
    wait_for_postgres(&stores).await;

    proxy.stall();
    assert_postgres_unavailable(&stores).await;
    assert_postgres_unavailable(&stores).await;
    proxy.restore().unwrap();
    wait_for_postgres(&stores).await;

    // Many concurrent calls fill the pool with connections, which are then cut.
    let results = futures::future::join_all((0..20).map(|_| stores.backlog())).await;
    assert!(results.iter().all(Result::is_ok));
    proxy.cut_and_wait().await;
    wait_for_postgres(&stores).await;
    let results = futures::future::join_all((0..20).map(|_| stores.backlog())).await;
    assert!(
        results.iter().all(Result::is_ok),
        "the pool checks its other connections before it uses them: {results:?}"
    );
}

/// The median time of calls that fail, one after the other.
async fn median_failure_time(stores: &Stores) -> Duration {
    let mut times = Vec::new();
    for _ in 0..21 {
        let started = Instant::now();
        assert_unavailable(stores.user(&an_app(), a_user_id()).await);
        times.push(started.elapsed());
    }
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test]
async fn calls_fail_immediately_while_postgres_is_known_to_be_unavailable() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = stores_via(&fixture, &proxy);
    for fault in ["refuses", "is silent"] {
        wait_for_postgres(&stores).await;
        if fault == "refuses" {
            proxy.refuse().await;
        } else {
            proxy.stall();
            // The first call notices the outage: neither the open connections nor a new connection respond.
            assert_postgres_unavailable(&stores).await;
        }
        let started = Instant::now();
        assert_postgres_unavailable(&stores).await;
        let (first, median) = (started.elapsed(), median_failure_time(&stores).await);
        println!("Postgres {fault}: the first call failed after {first:?}, the next after {median:?}");
        assert!(median < MAX_MEDIAN_FAILURE_TIME, "it {fault}: {median:?}");
        // Many concurrent calls do not wait either, and few of them try to connect.
        let before = proxy.connections();
        let started = Instant::now();
        let results = futures::future::join_all((0..2000).map(|_| stores.backlog())).await;
        assert!(results.iter().all(Result::is_err), "it {fault}");
        assert!(started.elapsed() < ACQUIRE_LIMIT, "2000 refusals took {:?}, it {fault}", started.elapsed());
        assert!(proxy.connections() - before < 100, "{} connections", proxy.connections() - before);
        proxy.restore().unwrap();
    }
    wait_for_postgres(&stores).await;
}

#[tokio::test]
async fn the_number_of_calls_that_wait_for_a_connection_is_bounded() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    proxy.stall();
    let stores = stores_via(&fixture, &proxy);
    let calls: FuturesUnordered<_> = (0..1500).map(|_| stores.backlog()).collect();
    // The outage is not known yet. At most 1024 calls wait for a connection; the others fail immediately.
    let started = Instant::now();
    let times: Vec<Duration> =
        calls.map(|result| result.map_or_else(|_| started.elapsed(), |_| panic!())).collect().await;
    let immediate = times.iter().filter(|time| **time < Duration::from_millis(1500)).count();
    assert_eq!(immediate, 1500 - 1024);
    assert!(times.iter().all(|time| *time < POSTGRES_LIMIT), "{times:?}");
    proxy.restore().unwrap();
    wait_for_postgres(&stores).await;
}

/// New connections fail while a password is rotated: the password changes in Postgres a moment before it changes in the
/// file.
#[tokio::test]
async fn open_connections_are_used_while_new_connections_fail() {
    let fixture = Fixture::new().await;
    let role = format!("r_{:016x}", rand::random::<u64>());
    let execute = async |sql: String| {
        PostgresServer::shared().await.execute(&fixture.database.name, &sql).await.expect("the SQL is right");
    };
    execute(format!("CREATE ROLE {role} LOGIN PASSWORD 'first' SUPERUSER")).await;
    let (_, server_and_database) = fixture.database.url.split_once('@').unwrap();
    let url = UrlSource::from_value(format!("postgres://{role}:first@{server_and_database}"));
    let options = postgres::Options { listen: false, ..postgres::Options::new(url) };
    let stores = Stores { postgres: PostgresStore::connect(options).unwrap(), ..fixture.stores.clone() };
    wait_for_postgres(&stores).await;

    execute(format!("ALTER ROLE {role} PASSWORD 'second'")).await;
    let results = futures::future::join_all((0..200).map(|_| stores.backlog())).await;
    assert!(results.iter().any(Result::is_err), "new connections are refused");
    let mut registry = Registry::default();
    stores.postgres.register_metrics(&mut registry);
    for _ in 0..50 {
        // The pool gets the connection back shortly after the call.
        eventually("a connection is idle", LIMIT, async || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text.lines().any(|line| line == "connections_idle 1").then_some(())
        })
        .await;
        stores.user(&an_app(), a_user_id()).await.expect("the open connection is used");
    }
}

#[tokio::test]
async fn a_stalled_postgres_does_not_exhaust_the_pool() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = stores_via(&fixture, &proxy);
    wait_for_postgres(&stores).await;
    proxy.stall();
    // Starts more calls than the pool has connections, and cancels each call before it ends.
    for _ in 0..40 {
        let call = stores.backlog();
        assert!(tokio::time::timeout(Duration::from_millis(20), call).await.is_err());
    }
    proxy.restore().unwrap();
    wait_for_postgres(&stores).await;
    let results = futures::future::join_all((0..20).map(|_| stores.backlog())).await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[tokio::test]
async fn postgres_with_a_wrong_password_is_unavailable_until_the_file_has_the_right_password() {
    let fixture = Fixture::new().await;
    let file = process::fresh_dir("url").join("url");
    let right_url = fixture.database.url.clone();
    let (start, end) = right_url.split_once("latchkey:").unwrap();
    let wrong_url = format!("{start}latchkey:wrong{end}");
    write_private(&file, &wrong_url).unwrap();
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::File(file.clone())) };
    let stores = Stores { postgres: PostgresStore::connect(options).unwrap(), ..fixture.stores.clone() };
    let error = stores.backlog().await.unwrap_err();
    let chain = format!("{error:?} {error} {:?}", std::error::Error::source(&error).map(ToString::to_string));
    assert!(!chain.contains("wrong") && chain.contains("28P01"), "{chain}");
    assert_unavailable::<()>(Err(error));

    fs::remove_file(&file).unwrap();
    write_private(&file, &right_url).unwrap();
    stores.backlog().await.unwrap();
}

#[tokio::test]
async fn postgres_tls_trusts_only_the_ca_in_the_url() {
    let options = PostgresOptions { tls: Some(ServerTls::new().unwrap()), ..PostgresOptions::for_tests() };
    let server = PostgresServer::start(options).await.unwrap();
    let database = server.empty_database().await.unwrap();
    let version = async |url: &str| {
        let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::from_value(url)) };
        PostgresStore::connect(options).unwrap().schema_version().await
    };
    assert!(database.url.contains("sslmode=verify-full"), "the fixture asks for TLS");
    assert_eq!(version(&database.url).await.unwrap(), None);
    let (base_url, _) = database.url.split_once('?').unwrap();
    assert_unavailable(version(&format!("{base_url}?sslmode=disable")).await);
    assert_unavailable(version(&format!("{base_url}?sslmode=verify-full")).await);
}

#[tokio::test]
async fn postgres_errors_contain_no_values() {
    let fixture = Fixture::new().await;
    fixture.execute("ALTER TABLE outbox ADD CONSTRAINT never CHECK (kind <> 'confirm')").await;
    let error = fixture.stores.enqueue(&fixture.app, a_mail(Some(a_user_id()))).await.unwrap_err();
    let chain = format!("{error:?} {error}");
    assert!(chain.contains("23514"), "{chain}");
    assert!(!chain.contains(fixture.app.as_str()) && !chain.contains("never"), "{chain}");
}

#[tokio::test]
async fn a_redis_that_is_stopped_is_unavailable_and_then_used_again() {
    let mut options = redis::Options::for_tests();
    let addr = options.addr;
    let server = RedisServer::start(options).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &server.url());
    wait_for_redis(&stores).await;
    assert!(server.stop(LIMIT));
    assert_redis_unavailable(&stores).await;
    assert_redis_unavailable(&stores).await;
    // Redis restarts empty, without the scripts.
    options = redis::Options { addr, ..redis::Options::for_tests() };
    let server = RedisServer::start(options).await.unwrap();
    wait_for_redis(&stores).await;
    drop(server);
}

#[tokio::test]
async fn a_redis_that_stalls_is_unavailable_and_then_used_again() {
    let proxy = Proxy::start(RedisServer::shared().await.addr()).unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &RedisServer::shared().await.url_at(proxy.addr()));
    wait_for_redis(&stores).await;
    proxy.stall();
    let started = Instant::now();
    // Concurrent calls fail as fast as a single call, because there is no queue.
    futures::future::join_all((0..20).map(|_| assert_redis_unavailable(&stores))).await;
    assert!(started.elapsed() < REDIS_LIMIT);
    proxy.restore().unwrap();
    wait_for_redis(&stores).await;
    proxy.cut();
    wait_for_redis(&stores).await;
}

#[tokio::test]
async fn a_redis_without_its_scripts_gets_them_again() {
    let server = RedisServer::start(redis::Options::for_tests()).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &server.url());
    wait_for_redis(&stores).await;
    let mut connection = server.connect().await.unwrap();
    let _: () = ::redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut connection).await.unwrap();
    stores.acquire(&an_app(), rate_limit_checks()).await.unwrap();
}

#[tokio::test]
async fn redis_with_a_wrong_password_is_unavailable_until_the_file_has_the_right_password() {
    let options = redis::Options { password: Some("right".to_owned()), ..redis::Options::for_tests() };
    let server = RedisServer::start(options).await.unwrap();
    let file = process::fresh_dir("url").join("url");
    write_private(&file, &server.url().replace(":right@", ":wrong@")).unwrap();
    let options = latchkey_server::store::redis::Options::new(UrlSource::File(file.clone()));
    let without_stores = stores("postgres://nobody@127.0.0.1:1/none", "redis://127.0.0.1:1/");
    let stores = Stores { redis: RedisStore::connect(options).unwrap(), ..without_stores };
    assert_redis_unavailable(&stores).await;
    fs::remove_file(&file).unwrap();
    write_private(&file, &server.url()).unwrap();
    wait_for_redis(&stores).await;
}

#[tokio::test]
async fn an_evicting_redis_is_reported_by_a_metric() {
    let settings = vec![("maxmemory-policy".to_owned(), "allkeys-lru".to_owned())];
    let server = RedisServer::start(redis::Options { settings, ..redis::Options::for_tests() }).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &server.url());
    let mut registry = Registry::default();
    stores.redis.register_metrics(registry.sub_registry_with_prefix("redis"));
    eventually("the policy is checked", LIMIT, async || {
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text.lines().any(|line| line == "redis_evicts 1").then_some(())
    })
    .await;
}
