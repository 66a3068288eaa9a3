//! Stores that are away, slow, refusing or restarted: told fast, and used again without a restart of ours.

use std::{
    fs,
    time::{Duration, Instant},
};

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
