//! A logged-in user, for tests about the user's own account, passwords and email addresses.

use argon2::{Algorithm, Argon2, Params, Version};
use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::{Method, StatusCode};
use latchkey_tests::{
    client::{ApiClient, ApiResponse, AuthenticatedClient},
    eventually,
    passwords::PASSWORD,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};

use crate::support::{MAIL_LIMIT, TestApp};

/// A session of a user, with the values of the login response.
pub(crate) struct UserSession {
    pub(crate) client: ApiClient,
    pub(crate) signed_in: AuthenticatedClient,
    pub(crate) user: String,
    pub(crate) session: String,
    pub(crate) refresh_token: String,
    app: String,
}

// === impl TestApp ===

impl TestApp {
    /// Registers a user, confirms the email address, and logs in with [`PASSWORD`].
    pub(crate) async fn log_in_new_user(&self, email: &str) -> UserSession {
        let client = self.register_and_confirm(email).await;
        self.log_in(client, email, PASSWORD).await
    }

    /// Logs in again, from a new client address.
    pub(crate) async fn log_in_again(&self, email: &str) -> UserSession {
        self.log_in(self.client(), email, PASSWORD).await
    }

    pub(crate) async fn log_in(&self, client: ApiClient, email: &str, password: &str) -> UserSession {
        let login = client.login(self.id(), email, password).await.expect(StatusCode::OK);
        UserSession {
            signed_in: client.with_token(self.id(), login.string("token")),
            client,
            user: login.body["user"]["id"].as_str().expect("an id").to_owned(),
            session: login.string("session_id").to_owned(),
            refresh_token: login.string("refresh_token").to_owned(),
            app: self.id().to_owned(),
        }
    }

    /// Makes the login time of a session in Redis earlier by this number of seconds (later if the number is negative).
    pub(crate) async fn backdate_login(&self, user: &str, session: &str, seconds: i64) {
        let key = format!("lk:{{{}:{user}}}:session:{session}", self.id());
        let mut redis = self.stack.redis().connect().await.expect("Redis is reachable");
        let login_time: Option<i64> =
            redis::cmd("HGET").arg(&key).arg("auth_time").query_async(&mut redis).await.unwrap();
        let earlier = login_time.expect("the session exists") - seconds * 1000;
        let set = redis::cmd("HSET").arg(&key).arg("auth_time").arg(earlier).query_async(&mut redis).await;
        assert_eq!(set, Ok(0), "nothing but the time was changed");
    }

    /// Makes the session's login so old (301 s) that calls that need a recent login are refused.
    pub(crate) async fn make_login_stale(&self, owner: &UserSession) {
        self.backdate_login(&owner.user, &owner.session, 301).await;
    }

    /// Returns a hash of this password. Its parameters differ from the server's, as those of imported hashes can.
    pub(crate) fn imported_hash(password: &str) -> String {
        let mut hash = [0; 32];
        let params = Params::new(8192, 1, 1, None).expect("valid parameters");
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        argon2.hash_password_into(password.as_bytes(), b"sixteen bytes !!", &mut hash).expect("valid parameters");
        let (salt, hash) = (STANDARD_NO_PAD.encode(b"sixteen bytes !!"), STANDARD_NO_PAD.encode(hash));
        format!("$argon2id$v=19$m=8192,t=1,p=1${salt}${hash}")
    }

    /// Raises the epoch of `owner` during a call: after the server has read the user, and before it changes the user.
    /// The session of `owner` continues.
    pub(crate) async fn raise_epoch_during(
        &self,
        owner: &UserSession,
        call: impl Future<Output = ApiResponse>,
    ) -> ApiResponse {
        let mut connection = self.stack.database.connect().await.expect("the database is reachable");
        let mut transaction = connection.begin().await.expect("a transaction");
        let (user, session) = (&owner.user, &owner.session);
        let raise = format!(
            "UPDATE users SET epoch = epoch + 1, version = version + 1 WHERE id = '{user}';
             INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session, due_at)
             SELECT app_id, 'epoch', id, epoch, '{session}', now() + interval '1 h' FROM users WHERE id = '{user}'"
        );
        sqlx::raw_sql(AssertSqlSafe(raise)).execute(&mut *transaction).await.expect("the SQL is valid");
        // Until the transaction ends, the server reads the old epoch, and its change of the user waits.
        let commit = async {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event = 'transactionid'";
            let is_waiting = || async { (self.query_number(waiting).await > 0).then_some(()) };
            eventually("the server's change waits", MAIL_LIMIT, is_waiting).await;
            transaction.commit().await.expect("the epoch is raised");
        };
        let (response, ()) = tokio::join!(call, commit);
        response
    }

    /// A checksum of all users and outbox rows in Postgres.
    pub(crate) async fn database_checksum(&self) -> i64 {
        self.query_number(
            "SELECT (SELECT coalesce(sum(hashtext(users::text)), 0) FROM users) \
             + (SELECT coalesce(sum(hashtext(outbox::text)), 0) FROM outbox)",
        )
        .await
    }
}

// === impl UserSession ===

impl UserSession {
    pub(crate) async fn get_user(&self) -> ApiResponse {
        self.signed_in.get("user").await
    }

    pub(crate) async fn rename_user(&self, name: &str) -> ApiResponse {
        self.send(Method::PATCH, "user", &json!({ "name": name })).await
    }

    pub(crate) async fn delete_user(&self, body: &Value) -> ApiResponse {
        self.send(Method::DELETE, "user", body).await
    }

    pub(crate) async fn change_password(&self, current: Option<&str>, password: &str) -> ApiResponse {
        let mut body = json!({ "password": password });
        if let Some(current) = current {
            body["current_password"] = json!(current);
        }
        self.signed_in.post("user/password", &body).await
    }

    pub(crate) async fn change_address(&self, password: Option<&str>, email: &str) -> ApiResponse {
        let mut body = json!({ "email": email });
        if let Some(password) = password {
            body["password"] = json!(password);
        }
        self.signed_in.post("user/email", &body).await
    }

    pub(crate) async fn refresh(&self) -> ApiResponse {
        let path = format!("v1/{}/token", self.app);
        self.client.post(&path, &json!({ "refresh_token": self.refresh_token })).await
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: &Value) -> ApiResponse {
        self.signed_in.send(self.signed_in.request(method, path).json(body)).await
    }

    /// Asserts that the access token and the refresh token of the session still work.
    pub(crate) async fn assert_live(&self) {
        self.get_user().await.expect(StatusCode::OK);
        let refreshed = self.refresh().await.expect(StatusCode::OK);
        assert_eq!(refreshed.string("session_id"), self.session);
    }

    /// Asserts that the access token and the refresh token of the session no longer work.
    pub(crate) async fn assert_ended(&self) {
        self.get_user().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        self.refresh().await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    }
}
