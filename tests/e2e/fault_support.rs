//! Helpers for the fault tests: an App without limits, checks of error responses, and access to the service's stores.

use std::time::{Duration, Instant};

use http::StatusCode;
use latchkey_tests::{
    builders::App,
    client::{ApiClient, ApiResponse},
    passwords::PASSWORD,
    stack::Builder,
};
use redis::aio::MultiplexedConnection;
use sqlx::{AssertSqlSafe, PgConnection, postgres::PgRow};

use crate::support::{MAIL_LIMIT, NAME, TestApp};

/// A count that no test reaches.
const UNREACHED_COUNT: u32 = 100_000;

/// An App with limits that no test reaches.
pub(crate) fn unlimited_app(prefix: &str) -> App {
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
    .fold(App::new(prefix), |app, limit| app.limit(limit, &[(UNREACHED_COUNT, 60)]))
}

/// Asserts the 503 response of an outage, with a `Retry-After` of 1 to 60 seconds.
#[track_caller]
pub(crate) fn expect_unavailable(response: ApiResponse) -> ApiResponse {
    let response = response.expect_error(StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable");
    let after = response.header("retry-after").and_then(|after| after.parse().ok());
    assert!(after.is_some_and(|seconds: u32| (1..=60).contains(&seconds)), "Retry-After in {:?}", response.headers);
    response
}

/// Asserts the response to a wrong, used or expired code.
#[track_caller]
pub(crate) fn expect_invalid_code(response: ApiResponse) -> ApiResponse {
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_code")
}

#[track_caller]
pub(crate) fn expect_invalid_credentials(response: ApiResponse) -> ApiResponse {
    response.expect_error(StatusCode::UNAUTHORIZED, "invalid_credentials")
}

/// The Redis keys of an App at one moment, with their values.
pub(crate) struct Snapshot {
    redis: MultiplexedConnection,
    keys: Vec<(String, Vec<u8>)>,
}

// === impl Snapshot ===

impl Snapshot {
    pub(crate) async fn capture(test_app: &TestApp) -> Self {
        let mut redis = test_app.stack.redis().connect().await.expect("Redis is reachable");
        let pattern = format!("lk:{{{}:*", test_app.id());
        let names: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("Redis lists its keys");
        let mut keys = Vec::new();
        for name in names {
            let value: Option<Vec<u8>> =
                redis::cmd("DUMP").arg(&name).query_async(&mut redis).await.expect("Redis returns a key");
            keys.extend(value.map(|value| (name, value)));
        }
        assert!(!keys.is_empty(), "the App has keys in Redis");
        Self { redis, keys }
    }

    /// The names of the keys that no longer exist.
    pub(crate) async fn removed_keys(&self) -> Vec<String> {
        let mut redis = self.redis.clone();
        let mut removed = Vec::new();
        for (name, _) in &self.keys {
            let exists: bool =
                redis::cmd("EXISTS").arg(name).query_async(&mut redis).await.expect("Redis is reachable");
            if !exists {
                removed.push(name.clone());
            }
        }
        removed
    }

    /// Restores the keys that were removed since [`Self::capture`], as if Redis had lost the writes that removed them.
    pub(crate) async fn restore(&self) {
        let mut redis = self.redis.clone();
        let removed = self.removed_keys().await;
        assert!(!removed.is_empty(), "keys were removed from Redis");
        for (name, value) in self.keys.iter().filter(|(name, _)| removed.contains(name)) {
            // Restores keys without expiry, because the test ends before they would expire.
            redis::cmd("RESTORE")
                .arg(name)
                .arg(0)
                .arg(value.as_slice())
                .query_async::<()>(&mut redis)
                .await
                .expect("Redis restores a key");
        }
    }
}

// === impl TestApp ===

impl TestApp {
    /// Adds this App to the builder, and starts the service.
    pub(crate) async fn from_builder(app: App, builder: Builder) -> Self {
        Self { stack: builder.app(&app).start().await, app }
    }

    /// Registers, confirms and logs in a user. Returns the client and the access token.
    pub(crate) async fn register_and_log_in(&self, email: &str) -> (ApiClient, String) {
        let client = self.register_and_confirm(email).await;
        let token = client.login(self.id(), email, PASSWORD).await.expect(StatusCode::OK).string("token").to_owned();
        (client, token)
    }

    /// The number of sessions of this App's users in Redis.
    pub(crate) async fn session_count(&self) -> usize {
        let mut redis = self.stack.redis().connect().await.expect("Redis is reachable");
        let pattern = format!("lk:{{{}:*}}:session:*", self.id());
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("Redis lists its keys");
        keys.len()
    }

    /// The number of social login flows of this App in Redis.
    pub(crate) async fn flow_count(&self) -> usize {
        let mut redis = self.stack.redis().connect().await.expect("Redis is reachable");
        let pattern = format!("lk:{{{}:flows}}:flow:*", self.id());
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("Redis lists its keys");
        keys.len()
    }

    /// Calls *verify* with an access token. The status is 200 while the session is live.
    pub(crate) async fn verify(&self, token: &str) -> ApiResponse {
        self.client().with_token(self.id(), token).verify().await
    }

    /// Repeats a call until it succeeds. Until then, its responses must be those of an outage.
    pub(crate) async fn wait_until_ok(&self, what: &str, call: impl AsyncFn() -> ApiResponse) -> ApiResponse {
        let end = Instant::now() + MAIL_LIMIT;
        loop {
            let response = call().await;
            if response.status == StatusCode::OK {
                return response;
            }
            let response = expect_unavailable(response);
            assert!(Instant::now() < end, "{what}: not within {MAIL_LIMIT:?}: {}", response.text);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes all waiting rows of the outbox due now.
    pub(crate) async fn make_outbox_due(&self) {
        self.sql(
            "UPDATE outbox SET due_at = statement_timestamp() WHERE dead_at IS NULL AND lease_until IS NULL; \
             NOTIFY latchkey_outbox",
        )
        .await;
    }

    /// Ends all leases of outbox rows, because killed servers cannot release theirs. Then makes the rows due.
    pub(crate) async fn expire_leases(&self) {
        self.sql("UPDATE outbox SET lease_until = NULL").await;
        self.make_outbox_due().await;
    }

    /// Makes all waiting rows of the outbox due, then waits for the nth mail and returns its code.
    pub(crate) async fn expedited_code(&self, email: &str, nth: usize) -> String {
        self.make_outbox_due().await;
        self.code(email, nth).await
    }

    /// The number that a query returns.
    pub(crate) async fn query_number(&self, sql: &str) -> i64 {
        let mut connection = self.connection().await;
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.expect("the SQL is valid")
    }

    pub(crate) async fn query_row(&self, sql: &str) -> Option<PgRow> {
        let mut connection = self.connection().await;
        sqlx::query(AssertSqlSafe(sql.to_owned())).fetch_optional(&mut connection).await.expect("the SQL is valid")
    }

    async fn connection(&self) -> PgConnection {
        self.stack.database.connect().await.expect("the database is reachable")
    }

    /// Registers from a new client address. Returns the response, whatever its status is.
    pub(crate) async fn try_register(&self, email: &str) -> ApiResponse {
        self.client().register(self.id(), NAME, email, PASSWORD).await
    }
}
