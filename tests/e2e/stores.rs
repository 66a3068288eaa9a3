//! The store layer of the server, called directly, with real Postgres and Redis: the contract of each trait in
//! `domain::ports`, concurrency, and outages.

use std::sync::Arc;

use std::{sync::LazyLock, time::Duration};

use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        audit::{Detail, Event, EventKind},
        clock::{Clock, SystemClock},
        email::Email,
        mail::{Mail, MailKind},
        password::PasswordHash,
        ports::{NewUser, Outbox, StoreError},
        user::{Name, UserId},
    },
    hashing::{HashingOptions, HashingPool},
    providers::SocialProviders,
    store::{
        Stores, UrlSource,
        postgres::{self, PostgresStore},
        redis::{self, RedisStore},
    },
};
use latchkey_tests::{
    postgres::{Database, Postgres as PostgresServer},
    redis::Redis as RedisServer,
};
use prometheus_client::registry::Registry;
use time::{OffsetDateTime, macros::datetime};
use uuid::Uuid;

mod accounts;
mod administration;
mod apps;
mod audit;
mod browser_sessions;
mod client_codes;
mod client_sessions;
mod codes;
mod consents;
mod faults;
mod flows;
mod foreign_hashes;
mod groups;
mod limits;
mod migrate;
mod outbox;
mod retention;
mod session_model;
mod sessions;
mod users;
mod webhooks;

/// Maximum time that a test waits for a condition.
const LIMIT: Duration = Duration::from_secs(20);
/// A time in whole seconds, so that Postgres does not round it.
const REQUESTED_AT: OffsetDateTime = datetime!(2026-03-04 05:06:07 UTC);

/// The hashing pool. All tests share it, because they hash little.
static HASHING: LazyLock<HashingPool> =
    LazyLock::new(|| HashingPool::start(HashingOptions::default(), &mut Registry::default()));

/// Stores for one test, with the test's own database, and with its own App in the shared Redis.
struct Fixture {
    stores: Stores,
    app: AppId,
    database: Database,
}

impl Fixture {
    async fn new() -> Self {
        let database = PostgresServer::shared().await.database().await.unwrap();
        Self { stores: stores(&database.url, &RedisServer::shared().await.url()), app: an_app(), database }
    }

    /// The stores of another server with the same database and Redis.
    async fn another_server(&self) -> Stores {
        stores(&self.database.url, &RedisServer::shared().await.url())
    }

    /// Stores that add this duration to the time of Redis.
    async fn with_later_clock(&self, by: time::Duration) -> Stores {
        Stores { redis: self.stores.redis.with_clock_ahead(by), ..self.stores.clone() }
    }

    async fn execute(&self, sql: &str) {
        let mut connection = self.database.connect().await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
    }

    async fn count(&self, sql: &str) -> i64 {
        let mut connection = self.database.connect().await.unwrap();
        sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.unwrap()
    }

    async fn enqueue_mails(&self, app: &AppId, times: usize) {
        for _ in 0..times {
            self.stores.enqueue(app, a_mail(None)).await.unwrap();
        }
    }
}

fn stores(postgres: &str, redis: &str) -> Stores {
    let options = postgres::Options { listen: false, ..postgres::Options::new(UrlSource::from_value(postgres)) };
    Stores {
        postgres: PostgresStore::connect(options).unwrap(),
        redis: RedisStore::connect(redis::Options::new(UrlSource::from_value(redis))).unwrap(),
        hashing: HASHING.clone(),
        providers: SocialProviders::default(),
    }
}

fn an_app() -> AppId {
    format!("t{:016x}", rand::random::<u64>()).parse().unwrap()
}

fn a_user_id() -> UserId {
    UserId(Uuid::from_u128(rand::random()))
}

fn now() -> OffsetDateTime {
    SystemClock.now()
}

fn an_email(text: &str) -> Email {
    Email::parse(text).unwrap()
}

fn a_new_user(email: &str) -> NewUser {
    let id = a_user_id();
    NewUser {
        id,
        email: an_email(email),
        name: Name::parse("Ada Lovelace").unwrap(),
        password_hash: PasswordHash::new("$argon2id$first"),
        created_at: REQUESTED_AT,
        event: an_event(EventKind::Registered, id),
    }
}

fn an_event(kind: EventKind, user: UserId) -> Event {
    Event {
        id: Uuid::from_u128(rand::random()),
        kind,
        user: Some(user),
        session: None,
        ip: Some("192.0.2.1".parse().unwrap()),
        at: now(),
        detail: Detail::default(),
        webhooks: Arc::default(),
    }
}

fn a_mail(user: Option<UserId>) -> Mail {
    Mail { kind: MailKind::Confirm, recipient: user, requested_at: REQUESTED_AT }
}

#[track_caller]
fn assert_unavailable<T>(result: Result<T, StoreError>) {
    match result {
        Err(StoreError::Unavailable { .. }) => {}
        Err(StoreError::Unexpected { source, .. }) => panic!("unexpected: {source}"),
        Ok(_) => panic!("a result from an unavailable store"),
    }
}
