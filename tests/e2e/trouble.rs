//! What the tests of faults share: an App without limits, a service behind proxies, and looks into its stores.

use std::time::{Duration, Instant};

use http::StatusCode;
use latchkey_tests::{
    builders::App,
    client::{Anonymous, Answer},
    stack::Builder,
};
use redis::aio::MultiplexedConnection;
use sqlx::{AssertSqlSafe, PgConnection, postgres::PgRow};

use crate::support::{MAIL_LIMIT, NAME, PASSWORD, Shop};

/// A count that no test reaches.
const MANY: u32 = 100_000;

/// An App in which no limit is reached.
pub(crate) fn loose(prefix: &str) -> App {
    [
        "loginFailuresPerClient",
        "loginFailuresPerAccount",
        "loginFailuresPerClientOverall",
        "loginsPerClient",
        "registrationsPerClient",
        "mailsPerRecipient",
        "mailsPerClient",
        "codesPerClient",
    ]
    .into_iter()
    .fold(App::new(prefix), |app, limit| app.limit(limit, &[(MANY, 60)]))
}

/// The refusal while a part is away: it says when to come again.
#[track_caller]
pub(crate) fn unavailable(answer: Answer) -> Answer {
    let answer = answer.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    let after = answer.header("retry-after").and_then(|after| after.parse().ok());
    assert!(after.is_some_and(|seconds: u32| (1..=60).contains(&seconds)), "Retry-After in {:?}", answer.headers);
    answer
}

/// The refusal of a code that is wrong, used or expired.
#[track_caller]
pub(crate) fn invalid_code(answer: Answer) -> Answer {
    answer.expect_error(StatusCode::BAD_REQUEST, "invalid_code")
}

#[track_caller]
pub(crate) fn invalid_credentials(answer: Answer) -> Answer {
    answer.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials")
}

/// The keys of an App that were in Redis at one moment, with what they held.
pub(crate) struct Snapshot {
    redis: MultiplexedConnection,
    keys: Vec<(String, Vec<u8>)>,
}

// === impl Snapshot ===

impl Snapshot {
    pub(crate) async fn take(shop: &Shop) -> Self {
        let mut redis = shop.stack.redis().connect().await.expect("Redis is there");
        let pattern = format!("lk:{{{}:*", shop.id());
        let names: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("Redis lists its keys");
        let mut keys = Vec::new();
        for name in names {
            let held: Option<Vec<u8>> =
                redis::cmd("DUMP").arg(&name).query_async(&mut redis).await.expect("Redis gives a key");
            keys.extend(held.map(|held| (name, held)));
        }
        assert!(!keys.is_empty(), "the App has keys in Redis");
        Self { redis, keys }
    }

    /// The keys that are not there any more.
    pub(crate) async fn gone(&self) -> Vec<String> {
        let mut redis = self.redis.clone();
        let mut gone = Vec::new();
        for (name, _) in &self.keys {
            let there: bool = redis::cmd("EXISTS").arg(name).query_async(&mut redis).await.expect("Redis is there");
            if !there {
                gone.push(name.clone());
            }
        }
        gone
    }

    /// Brings back what has gone since, as a store does that has lost its last writes.
    pub(crate) async fn bring_back(&self) {
        let mut redis = self.redis.clone();
        let gone = self.gone().await;
        assert!(!gone.is_empty(), "something was taken from Redis");
        for (name, held) in self.keys.iter().filter(|(name, _)| gone.contains(name)) {
            // No end: whatever lives for a day outlives the test.
            redis::cmd("RESTORE")
                .arg(name)
                .arg(0)
                .arg(held.as_slice())
                .query_async::<()>(&mut redis)
                .await
                .expect("Redis takes a key");
        }
    }
}

// === impl Shop ===

impl Shop {
    /// With a service of the test's own making, which must serve this App.
    pub(crate) async fn of(app: App, builder: Builder) -> Self {
        Self { stack: builder.app(&app).start().await, app }
    }

    /// Registers and confirms somebody who then has a session: their token, and the client.
    pub(crate) async fn session(&self, email: &str) -> (Anonymous, String) {
        let client = self.confirmed(email).await;
        let token = client.login(self.id(), email, PASSWORD).await.expect(StatusCode::OK).string("token").to_owned();
        (client, token)
    }

    /// How many sessions Redis holds of this App's users.
    pub(crate) async fn sessions(&self) -> usize {
        let mut redis = self.stack.redis().connect().await.expect("Redis is there");
        let pattern = format!("lk:{{{}:*}}:session:*", self.id());
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("Redis lists its keys");
        keys.len()
    }

    /// How many social flows of this App Redis keeps.
    pub(crate) async fn flows(&self) -> usize {
        let mut redis = self.stack.redis().connect().await.expect("Redis is there");
        let pattern = format!("lk:{{{}:flows}}:flow:*", self.id());
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("Redis lists its keys");
        keys.len()
    }

    /// What *verify* says to a token: 200 while its session is there.
    pub(crate) async fn look(&self, token: &str) -> Answer {
        self.client().signed_in(self.id(), token).verify().await
    }

    /// Waits until a call succeeds that was refused while a part was away.
    pub(crate) async fn recovers(&self, what: &str, call: impl AsyncFn() -> Answer) -> Answer {
        let end = Instant::now() + MAIL_LIMIT;
        loop {
            let answer = call().await;
            if answer.status == StatusCode::OK {
                return answer;
            }
            let answer = unavailable(answer);
            assert!(Instant::now() < end, "{what}: not within {MAIL_LIMIT:?}: {}", answer.text);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Lets the waiting time of every row of the outbox pass.
    pub(crate) async fn hurry(&self) {
        self.sql(
            "UPDATE outbox SET due_at = statement_timestamp() WHERE dead_at IS NULL AND lease_until IS NULL; \
             NOTIFY latchkey_outbox",
        )
        .await;
    }

    /// Lets the hold of a server that is gone pass too.
    pub(crate) async fn outlast_leases(&self) {
        self.sql("UPDATE outbox SET lease_until = NULL").await;
        self.hurry().await;
    }

    /// Waits for a mail to an address, while the outbox's waits pass quickly.
    pub(crate) async fn hurried_code(&self, email: &str, nth: usize) -> String {
        self.hurry().await;
        self.code(email, nth).await
    }

    /// One number of the test's own SQL.
    pub(crate) async fn count(&self, sql: &str) -> i64 {
        let mut connection = self.connection().await;
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.expect("the SQL is right")
    }

    pub(crate) async fn row(&self, sql: &str) -> Option<PgRow> {
        let mut connection = self.connection().await;
        sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_optional(&mut connection).await.expect("the SQL is right")
    }

    async fn connection(&self) -> PgConnection {
        self.stack.database.connect().await.expect("the database is there")
    }

    /// Registers from a client address of its own, whatever the answer.
    pub(crate) async fn try_register(&self, email: &str) -> Answer {
        self.client().register(self.id(), NAME, email, PASSWORD).await
    }
}
