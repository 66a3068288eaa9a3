//! The identities of an account: a user lists, links and removes them.

use http::{Method, StatusCode};
use latchkey_tests::{
    client::{ApiResponse, AuthenticatedClient},
    passwords::PASSWORD,
};
use serde_json::json;

use super::{AppRedirect, Person, SocialTest, app};

const EMAIL: &str = "ada@example.com";

impl SocialTest {
    /// Registers a user, confirms the email address and logs in.
    async fn log_in_ada(&self) -> AuthenticatedClient {
        let (client, token) = self.test_app.register_and_log_in(EMAIL).await;
        client.with_token(self.test_app.id(), &token)
    }

    async fn link(&self, signed_in: &AuthenticatedClient, provider: &str, person: &Person) -> ApiResponse {
        let body = json!({ "token": self.upstream.access_token(person) });
        signed_in.post(&format!("user/identities/{provider}"), &body).await
    }

    /// Moves the login time of every session six minutes into the past, so that no login is recent.
    async fn backdate_logins(&self) {
        let mut redis = self.test_app.stack.redis().connect().await.expect("Redis is there");
        let pattern = format!("lk:{{{}:*}}:session:*", self.test_app.id());
        let keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query_async(&mut redis).await.expect("keys");
        for key in keys {
            let six_minutes = -6 * 60 * 1000;
            redis::cmd("HINCRBY")
                .arg(key)
                .arg("auth_time")
                .arg(six_minutes)
                .query_async::<()>(&mut redis)
                .await
                .expect("a number");
        }
    }
}

async fn unlink(signed_in: &AuthenticatedClient, provider: &str) -> ApiResponse {
    signed_in.send(signed_in.request(Method::DELETE, &format!("user/identities/{provider}"))).await
}

#[tokio::test]
async fn a_user_links_lists_and_removes_a_provider() {
    let social = SocialTest::start().await;
    let ada = social.log_in_ada().await;
    let list = ada.get("user/identities").await.expect(StatusCode::OK);
    assert_eq!(list.body, json!({ "identities": [] }));
    assert_eq!(list.header("cache-control"), Some("no-store"));

    // The email address of the identity differs from that of the account.
    let person = Person::verified("her-id", "ada@work.example");
    social.link(&ada, "local", &person).await.expect(StatusCode::OK);
    // Linking the same identity again changes nothing.
    social.link(&ada, "local", &person).await.expect(StatusCode::OK);
    let list = ada.get("user/identities").await.expect(StatusCode::OK);
    let identities = list.body["identities"].as_array().expect("a list").clone();
    assert_eq!(identities.len(), 1, "{}", list.text);
    assert_eq!(identities[0]["provider"], "local");
    assert_eq!(identities[0]["subject"], "her-id");
    assert_eq!(identities[0]["email"], "ada@work.example");
    assert!(identities[0]["linked_at"].is_i64(), "{}", list.text);
    // Two mails to the account's email address: the code of the registration, and one notice.
    assert_eq!(social.test_app.settled_mail_count(EMAIL).await, 2);
    assert_eq!(social.test_app.settled_mail_count("ada@work.example").await, 0);

    let redirect = AppRedirect::expect_session(&social.log_in(&person).await);
    assert_eq!(social.counts().await.0, 1);
    assert_eq!(redirect.parameter("email_verified"), "true");

    unlink(&ada, "local").await.expect(StatusCode::OK);
    assert_eq!(ada.get("user/identities").await.body, json!({ "identities": [] }));
    unlink(&ada, "local").await.expect_error(StatusCode::NOT_FOUND, "not_found");
    let redirect = AppRedirect::expect_session(&social.log_in(&person).await);
    assert_eq!(social.counts().await.0, 2, "the identity has a new account now: {}", redirect.location);
}

#[tokio::test]
async fn linking_needs_a_recent_login_and_an_identity_that_no_other_user_has() {
    let social = SocialTest::start().await;
    let ada = social.log_in_ada().await;
    let graces_identity = Person::verified("1", "grace@example.com");
    AppRedirect::expect_session(&social.log_in(&graces_identity).await);
    let before = social.counts().await;
    social.link(&ada, "local", &graces_identity).await.expect_error(StatusCode::FORBIDDEN, "access_denied");
    let response = ada.post("user/identities/nobody", &json!({ "token": "x" })).await;
    response.expect_error(StatusCode::NOT_FOUND, "provider_not_found");
    let response = ada.post("user/identities/local", &json!({ "token": "wrong" })).await;
    response.expect_error(StatusCode::UNAUTHORIZED, "invalid_provider_token");
    let response = ada.post("user/identities/local", &json!({})).await;
    response.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let invalid_session = social.test_app.client().with_token(social.test_app.id(), "nothing");
    for response in [invalid_session.get("user/identities").await, unlink(&invalid_session, "local").await] {
        response.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    let own_identity = Person::verified("2", "ada@work.example");
    social.link(&invalid_session, "local", &own_identity).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    social.backdate_logins().await;
    social.link(&ada, "local", &own_identity).await.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(social.counts().await, before);
    ada.get("user/identities").await.expect(StatusCode::OK);
    let recent_session = social.test_app.client().authenticate(social.test_app.id(), EMAIL, PASSWORD).await;
    social.link(&recent_session, "local", &own_identity).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_last_way_to_log_in_is_never_removed() {
    let social = SocialTest::start().await;
    let person = Person::verified("1", EMAIL);
    let redirect = AppRedirect::expect_session(&social.log_in(&person).await);
    let ada = social.test_app.client().with_token(social.test_app.id(), redirect.parameter("access_token"));
    unlink(&ada, "local").await.expect_error(StatusCode::CONFLICT, "last_identity");
    assert_eq!(social.counts().await, (1, 1, 1));

    let second = Person::verified("2", "ada@work.example");
    social.link(&ada, "other", &second).await.expect(StatusCode::OK);
    // One of two concurrent removals fails.
    let (first, other) = tokio::join!(unlink(&ada, "local"), unlink(&ada, "other"));
    let mut statuses = [first.status, other.status];
    statuses.sort();
    assert_eq!(statuses, [StatusCode::OK, StatusCode::CONFLICT], "{} {}", first.text, other.text);
    assert_eq!(social.counts().await.1, 1);

    // An identity of a Provider that the App no longer has does not count as a way to log in.
    social.test_app.sql("UPDATE identities SET provider = 'local'").await;
    social
        .test_app
        .sql("INSERT INTO identities SELECT app_id, 'gone', 'x', user_id, 'gone', NULL, now() FROM identities")
        .await;
    unlink(&ada, "local").await.expect_error(StatusCode::CONFLICT, "last_identity");
    unlink(&ada, "gone").await.expect(StatusCode::OK);
    assert_eq!(social.counts().await.1, 1);
}

#[tokio::test]
async fn unlinking_is_counted_in_logins_per_client() {
    // The first of the three allowed logins is the login in `log_in_ada`.
    let social = SocialTest::with_app(app().limit("loginsPerClient", &[(3, 600)])).await;
    let ada = social.log_in_ada().await;
    for _ in 0..2 {
        unlink(&ada, "local").await.expect_error(StatusCode::NOT_FOUND, "not_found");
    }
    unlink(&ada, "local").await.expect_error(StatusCode::TOO_MANY_REQUESTS, "rate_limited");
}

#[tokio::test]
async fn an_identity_change_and_its_event_are_written_in_one_transaction() {
    let social = SocialTest::start().await;
    let redirect = AppRedirect::expect_session(&social.log_in(&Person::verified("1", EMAIL)).await);
    let ada = social.test_app.client().with_token(social.test_app.id(), redirect.parameter("access_token"));
    social.link(&ada, "other", &Person::verified("2", "ada@work.example")).await.expect(StatusCode::OK);
    // The owner of an unverified account logs in through the provider.
    social.test_app.register("grace@example.com").await;
    AppRedirect::expect_session(&social.log_in(&Person::verified("3", "grace@example.com")).await);
    for (kind, subject) in [("registered", "1"), ("identity_linked", "2"), ("identity_linked", "3")] {
        let in_one_transaction = format!(
            "SELECT count(*) FROM identities JOIN audit_events AS event USING (app_id, user_id)
             WHERE identities.xmin = event.xmin AND event.kind = '{kind}' AND subject = '{subject}'
                AND event.detail ->> 'provider' = identities.provider AND event.ip IS NOT NULL"
        );
        assert_eq!(social.test_app.query_number(&in_one_transaction).await, 1, "{kind} {subject}");
    }
    unlink(&ada, "local").await.expect(StatusCode::OK);
    // The removal of the last way to log in is rejected, so it is not recorded.
    unlink(&ada, "other").await.expect_error(StatusCode::CONFLICT, "last_identity");
    let activity = ada.get("user/activity").await.expect(StatusCode::OK);
    let kinds: Vec<_> =
        activity.body["events"].as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["identity_unlinked", "identity_linked", "logged_in", "registered"]);
    let by_the_user = "SELECT count(*) FROM audit_events WHERE kind LIKE 'identity_%' AND session_id IS NOT NULL";
    assert_eq!(social.test_app.query_number(by_the_user).await, 2);
}
