//! Somebody with an account of their own, signed in: what the tests of `user`, passwords and addresses share.

use argon2::{Algorithm, Argon2, Params, Version};
use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::{Method, StatusCode};
use latchkey_tests::client::{Anonymous, Answer, SignedIn};
use serde_json::{Value, json};

use crate::support::{PASSWORD, Shop};

/// A session with all that its login answered.
pub(crate) struct Owner {
    pub(crate) client: Anonymous,
    pub(crate) signed_in: SignedIn,
    pub(crate) user: String,
    pub(crate) session: String,
    pub(crate) refresh_token: String,
    app: String,
}

// === impl Shop ===

impl Shop {
    /// Registers, confirms and logs in, with [`PASSWORD`].
    pub(crate) async fn owner(&self, email: &str) -> Owner {
        let client = self.confirmed(email).await;
        self.login(client, email, PASSWORD).await
    }

    /// A further login, from a client address of its own.
    pub(crate) async fn another_login(&self, email: &str) -> Owner {
        self.login(self.client(), email, PASSWORD).await
    }

    pub(crate) async fn login(&self, client: Anonymous, email: &str, password: &str) -> Owner {
        let login = client.login(self.id(), email, password).await.expect(StatusCode::OK);
        Owner {
            signed_in: client.signed_in(self.id(), login.string("token")),
            client,
            user: login.body["user"]["id"].as_str().expect("an id").to_owned(),
            session: login.string("session_id").to_owned(),
            refresh_token: login.string("refresh_token").to_owned(),
            app: self.id().to_owned(),
        }
    }

    /// The login of this session was so many seconds ago, by what Redis holds of it.
    pub(crate) async fn logged_in_before(&self, user: &str, session: &str, seconds: i64) {
        let key = format!("lk:{{{}:{user}}}:session:{session}", self.id());
        let mut redis = self.stack.redis().connect().await.expect("Redis is there");
        let at: Option<i64> = redis::cmd("HGET").arg(&key).arg("auth_time").query_async(&mut redis).await.unwrap();
        let earlier = at.expect("the session is there") - seconds * 1000;
        let set = redis::cmd("HSET").arg(&key).arg("auth_time").arg(earlier).query_async(&mut redis).await;
        assert_eq!(set, Ok(0), "nothing but the time was changed");
    }

    /// As above, but longer ago than counts.
    pub(crate) async fn stale(&self, owner: &Owner) {
        self.logged_in_before(&owner.user, &owner.session, 301).await;
    }

    /// A hash of a password, as an import has it.
    pub(crate) fn hash_of(password: &str) -> String {
        let mut hash = [0; 32];
        let params = Params::new(8192, 1, 1, None).expect("valid parameters");
        let argon2 = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        argon2.hash_password_into(password.as_bytes(), b"sixteen octets !", &mut hash).expect("valid parameters");
        let (salt, hash) = (STANDARD_NO_PAD.encode(b"sixteen octets !"), STANDARD_NO_PAD.encode(hash));
        format!("$argon2id$v=19$m=8192,t=1,p=1${salt}${hash}")
    }

    /// Everything that Postgres has of users and of what waits for them, in one number.
    pub(crate) async fn everything(&self) -> i64 {
        self.count(
            "SELECT (SELECT coalesce(sum(hashtext(users::text)), 0) FROM users) \
             + (SELECT coalesce(sum(hashtext(outbox::text)), 0) FROM outbox)",
        )
        .await
    }
}

// === impl Owner ===

impl Owner {
    pub(crate) async fn read(&self) -> Answer {
        self.signed_in.get("user").await
    }

    pub(crate) async fn rename(&self, name: &str) -> Answer {
        self.send(Method::PATCH, "user", &json!({ "name": name })).await
    }

    pub(crate) async fn delete(&self, body: &Value) -> Answer {
        self.send(Method::DELETE, "user", body).await
    }

    pub(crate) async fn change_password(&self, current: Option<&str>, password: &str) -> Answer {
        let mut body = json!({ "password": password });
        if let Some(current) = current {
            body["current_password"] = json!(current);
        }
        self.signed_in.post("user/password", &body).await
    }

    pub(crate) async fn change_address(&self, password: Option<&str>, email: &str) -> Answer {
        let mut body = json!({ "email": email });
        if let Some(password) = password {
            body["password"] = json!(password);
        }
        self.signed_in.post("user/email", &body).await
    }

    pub(crate) async fn refresh(&self) -> Answer {
        let path = format!("v1/{}/token", self.app);
        self.client.post(&path, &json!({ "refresh_token": self.refresh_token })).await
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: &Value) -> Answer {
        self.signed_in.send(self.signed_in.request(method, path).json(body)).await
    }

    /// The session is there, for a token in hand and for its refresh token.
    pub(crate) async fn goes_on(&self) {
        self.read().await.expect(StatusCode::OK);
        let refreshed = self.refresh().await.expect(StatusCode::OK);
        assert_eq!(refreshed.string("session_id"), self.session);
    }

    /// The session is not there, for either.
    pub(crate) async fn is_out(&self) {
        self.read().await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        self.refresh().await.expect_error(StatusCode::BAD_REQUEST, "invalid_grant");
    }
}
