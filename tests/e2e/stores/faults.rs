//! Stores that are away, slow, refusing or restarted: told fast, and used again without a restart of ours.

use std::{
    fs,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream::FuturesUnordered};
use latchkey_crds::rendered::{LimitName, Window};
use latchkey_server::{
    domain::{
        limits::Check,
        ports::{Limits, Outbox, Users},
    },
    store::{
        Stores, UrlSource,
        postgres::{self, Postgres},
        redis::Redis,
    },
};
use latchkey_tests::{
    eventually, eventually_ok,
    postgres::{Options as PostgresOptions, Postgres as PostgresServer, write_private},
    process,
    proxy::Proxy,
    redis::{self, Redis as RedisServer},
    tls::Tls,
};
use prometheus_client::{encoding::text::encode, registry::Registry};

use super::{Fixture, LIMIT, a_mail, a_user_id, an_app, assert_unavailable, stores};

/// What a caller may wait for the news that Postgres, or Redis, is away; on a loaded machine.
const POSTGRES_LIMIT: Duration = Duration::from_secs(6);
const REDIS_LIMIT: Duration = Duration::from_secs(4);
/// The median of what a refusal takes once an outage is known. It waits for nothing; this machine may be loaded.
const AT_ONCE: Duration = Duration::from_millis(100);
/// What each call waited for a connection where nobody knew of the outage.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(3);

pub(super) fn through(fixture: &Fixture, proxy: &Proxy) -> Stores {
    let url = fixture.database.url.replace(&fixture.database.addr.to_string(), &proxy.addr().to_string());
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::given(url)) };
    Stores { postgres: Postgres::connect(options).unwrap(), ..fixture.stores.clone() }
}

fn checks() -> Vec<Check> {
    let windows = vec![Window { count: 1_000_000, window_seconds: 60 }];
    vec![Check { limit: LimitName::LoginsPerClient, subject: "192.0.2.1".to_owned(), windows }]
}

async fn assert_redis_away(stores: &Stores) {
    let started = Instant::now();
    match stores.take(&an_app(), checks()).await {
        Err(latchkey_server::domain::ports::TakeError::Store(error)) => assert_unavailable::<()>(Err(error)),
        other => panic!("{other:?}"),
    }
    assert!(started.elapsed() < REDIS_LIMIT, "told after {:?}", started.elapsed());
}

async fn redis_is_back(stores: &Stores) {
    let app = an_app();
    eventually_ok("Redis is used again", LIMIT, async || stores.take(&app, checks()).await).await;
}

async fn assert_postgres_away(stores: &Stores) {
    let started = Instant::now();
    assert_unavailable(stores.user(&an_app(), a_user_id()).await);
    assert!(started.elapsed() < POSTGRES_LIMIT, "told after {:?}", started.elapsed());
}

async fn postgres_is_back(stores: &Stores) {
    let app = an_app();
    eventually_ok("Postgres is used again", LIMIT, async || stores.user(&app, a_user_id()).await).await;
}

#[tokio::test]
async fn a_postgres_that_refuses_stalls_or_cuts_is_unavailable_and_then_used_again() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = through(&fixture, &proxy);
    postgres_is_back(&stores).await;

    proxy.refuse().await;
    assert_postgres_away(&stores).await;
    proxy.restore().unwrap();
    postgres_is_back(&stores).await;

    proxy.stall();
    assert_postgres_away(&stores).await;
    assert_postgres_away(&stores).await;
    proxy.restore().unwrap();
    postgres_is_back(&stores).await;

    // Many at once, so that the pool is full of connections that are then cut.
    let many = futures::future::join_all((0..20).map(|_| stores.backlog())).await;
    assert!(many.iter().all(Result::is_ok));
    proxy.cut_off().await;
    postgres_is_back(&stores).await;
    let many = futures::future::join_all((0..20).map(|_| stores.backlog())).await;
    assert!(many.iter().all(Result::is_ok), "the other connections of the pool are looked at first: {many:?}");
}

/// The median time of refusals, one after the other.
async fn median_refusal(stores: &Stores) -> Duration {
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
async fn while_postgres_is_known_to_be_away_calls_fail_at_once() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = through(&fixture, &proxy);
    for fault in ["refuses", "is silent"] {
        postgres_is_back(&stores).await;
        if fault == "refuses" {
            proxy.refuse().await;
        } else {
            proxy.stall();
            // A new connection is as silent as those that are there.
            assert_postgres_away(&stores).await;
        }
        let started = Instant::now();
        assert_postgres_away(&stores).await;
        let (first, then) = (started.elapsed(), median_refusal(&stores).await);
        println!("Postgres {fault}: a refusal took {first:?}, the next {then:?}");
        assert!(then < AT_ONCE, "it {fault}: {then:?}");
        // Many at the same time are not held either, nor do they knock each for itself.
        let before = proxy.connections();
        let started = Instant::now();
        let many = futures::future::join_all((0..2000).map(|_| stores.backlog())).await;
        assert!(many.iter().all(Result::is_err), "it {fault}");
        assert!(started.elapsed() < ACQUIRE_LIMIT, "2000 refusals took {:?}, it {fault}", started.elapsed());
        assert!(proxy.connections() - before < 100, "{} connections", proxy.connections() - before);
        proxy.restore().unwrap();
    }
    postgres_is_back(&stores).await;
}

#[tokio::test]
async fn calls_that_wait_for_a_connection_are_bounded() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    proxy.stall();
    let stores = through(&fixture, &proxy);
    let calls: FuturesUnordered<_> = (0..1500).map(|_| stores.backlog()).collect();
    // The outage is not known yet. Those beyond the bound are refused before the others have waited.
    let started = Instant::now();
    let times: Vec<Duration> =
        calls.map(|answer| answer.map_or_else(|_| started.elapsed(), |_| panic!())).collect().await;
    let at_once = times.iter().filter(|time| **time < Duration::from_millis(1500)).count();
    assert_eq!(at_once, 1500 - 1024);
    assert!(times.iter().all(|time| *time < POSTGRES_LIMIT), "{times:?}");
    proxy.restore().unwrap();
    postgres_is_back(&stores).await;
}

/// As in the moments between the rotation of a password and that of the file.
#[tokio::test]
async fn connections_that_work_are_used_while_no_new_ones_can_be_made() {
    let fixture = Fixture::new().await;
    let role = format!("r_{:016x}", rand::random::<u64>());
    let execute = async |sql: String| {
        PostgresServer::shared().await.execute(&fixture.database.name, &sql).await.expect("the SQL is right");
    };
    execute(format!("CREATE ROLE {role} LOGIN PASSWORD 'first' SUPERUSER")).await;
    let (_, rest) = fixture.database.url.split_once('@').unwrap();
    let url = UrlSource::given(format!("postgres://{role}:first@{rest}"));
    let options = postgres::Options { listen: false, ..postgres::Options::new(url) };
    let stores = Stores { postgres: Postgres::connect(options).unwrap(), ..fixture.stores.clone() };
    postgres_is_back(&stores).await;

    execute(format!("ALTER ROLE {role} PASSWORD 'second'")).await;
    let many = futures::future::join_all((0..200).map(|_| stores.backlog())).await;
    assert!(many.iter().any(Result::is_err), "new connections are refused");
    let mut registry = Registry::default();
    stores.postgres.register(&mut registry);
    for _ in 0..50 {
        // A connection comes back to the pool a moment after its call.
        eventually("a connection rests", LIMIT, async || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            text.lines().any(|line| line == "connections_idle 1").then_some(())
        })
        .await;
        stores.user(&an_app(), a_user_id()).await.expect("the connection that is there is used");
    }
}

#[tokio::test]
async fn a_stalled_postgres_does_not_use_the_pool_up() {
    let fixture = Fixture::new().await;
    let proxy = Proxy::start(fixture.database.addr).unwrap();
    let stores = through(&fixture, &proxy);
    postgres_is_back(&stores).await;
    proxy.stall();
    // Callers who go away in the middle, as many as the pool has places and more.
    for _ in 0..40 {
        let call = stores.backlog();
        assert!(tokio::time::timeout(Duration::from_millis(20), call).await.is_err());
    }
    proxy.restore().unwrap();
    postgres_is_back(&stores).await;
    let many = futures::future::join_all((0..20).map(|_| stores.backlog())).await;
    assert!(many.iter().all(Result::is_ok), "{many:?}");
}

#[tokio::test]
async fn a_wrong_password_of_postgres_is_unavailable_until_the_file_has_the_right_one() {
    let fixture = Fixture::new().await;
    let file = process::fresh_dir("url").join("url");
    let right = fixture.database.url.clone();
    let (start, rest) = right.split_once("latchkey:").unwrap();
    let wrong = format!("{start}latchkey:wrong{rest}");
    write_private(&file, &wrong).unwrap();
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::File(file.clone())) };
    let stores = Stores { postgres: Postgres::connect(options).unwrap(), ..fixture.stores.clone() };
    let error = stores.backlog().await.unwrap_err();
    let chain = format!("{error:?} {error} {:?}", std::error::Error::source(&error).map(ToString::to_string));
    assert!(!chain.contains("wrong") && chain.contains("28P01"), "{chain}");
    assert_unavailable::<()>(Err(error));

    fs::remove_file(&file).unwrap();
    write_private(&file, &right).unwrap();
    stores.backlog().await.unwrap();
}

#[tokio::test]
async fn postgres_is_reached_over_tls_by_the_authority_of_its_url_only() {
    let options = PostgresOptions { tls: Some(Tls::new().unwrap()), ..PostgresOptions::for_tests() };
    let server = PostgresServer::start(options).await.unwrap();
    let database = server.empty_database().await.unwrap();
    let version = async |url: &str| {
        let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::given(url)) };
        Postgres::connect(options).unwrap().schema_version().await
    };
    assert!(database.url.contains("sslmode=verify-full"), "the fixture asks for TLS");
    assert_eq!(version(&database.url).await.unwrap(), None);
    let (plain, _) = database.url.split_once('?').unwrap();
    assert_unavailable(version(&format!("{plain}?sslmode=disable")).await);
    assert_unavailable(version(&format!("{plain}?sslmode=verify-full")).await);
}

#[tokio::test]
async fn errors_of_postgres_hold_no_values() {
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
    redis_is_back(&stores).await;
    assert!(server.stop(LIMIT));
    assert_redis_away(&stores).await;
    assert_redis_away(&stores).await;
    // It comes back empty, also of scripts.
    options = redis::Options { addr, ..redis::Options::for_tests() };
    let server = RedisServer::start(options).await.unwrap();
    redis_is_back(&stores).await;
    drop(server);
}

#[tokio::test]
async fn a_redis_that_stalls_is_unavailable_and_then_used_again() {
    let proxy = Proxy::start(RedisServer::shared().await.addr()).unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &RedisServer::shared().await.url_at(proxy.addr()));
    redis_is_back(&stores).await;
    proxy.stall();
    let started = Instant::now();
    // Not one after the other: there is no queue.
    futures::future::join_all((0..20).map(|_| assert_redis_away(&stores))).await;
    assert!(started.elapsed() < REDIS_LIMIT);
    proxy.restore().unwrap();
    redis_is_back(&stores).await;
    proxy.cut();
    redis_is_back(&stores).await;
}

#[tokio::test]
async fn a_redis_without_its_scripts_gets_them_again() {
    let server = RedisServer::start(redis::Options::for_tests()).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &server.url());
    redis_is_back(&stores).await;
    let mut connection = server.connect().await.unwrap();
    let _: () = ::redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut connection).await.unwrap();
    stores.take(&an_app(), checks()).await.unwrap();
}

#[tokio::test]
async fn a_wrong_password_of_redis_is_unavailable_until_the_file_has_the_right_one() {
    let options = redis::Options { password: Some("right".to_owned()), ..redis::Options::for_tests() };
    let server = RedisServer::start(options).await.unwrap();
    let file = process::fresh_dir("url").join("url");
    write_private(&file, &server.url().replace(":right@", ":wrong@")).unwrap();
    let options = latchkey_server::store::redis::Options::new(UrlSource::File(file.clone()));
    let all = stores("postgres://nobody@127.0.0.1:1/none", "redis://127.0.0.1:1/");
    let stores = Stores { redis: Redis::connect(options).unwrap(), ..all };
    assert_redis_away(&stores).await;
    fs::remove_file(&file).unwrap();
    write_private(&file, &server.url()).unwrap();
    redis_is_back(&stores).await;
}

#[tokio::test]
async fn a_redis_that_evicts_is_told_in_a_metric() {
    let settings = vec![("maxmemory-policy".to_owned(), "allkeys-lru".to_owned())];
    let server = RedisServer::start(redis::Options { settings, ..redis::Options::for_tests() }).await.unwrap();
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &server.url());
    let mut registry = Registry::default();
    stores.redis.register(registry.sub_registry_with_prefix("redis"));
    eventually("the policy is looked at", LIMIT, async || {
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text.lines().any(|line| line == "redis_evicts 1").then_some(())
    })
    .await;
}
