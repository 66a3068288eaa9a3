//! The identities of an account, listed, linked and removed by their user.

use http::{Method, StatusCode};
use latchkey_tests::client::{Answer, SignedIn};
use serde_json::json;

use super::{Landed, Person, Social};
use crate::support::PASSWORD;

const EMAIL: &str = "ada@example.com";

impl Social {
    /// Somebody with a confirmed address and a password, signed in.
    async fn ada(&self) -> SignedIn {
        let (client, token) = self.shop.session(EMAIL).await;
        client.signed_in(self.shop.id(), &token)
    }

    async fn link(&self, signed_in: &SignedIn, provider: &str, person: &Person) -> Answer {
        let body = json!({ "token": self.upstream.token(person) });
        signed_in.post(&format!("user/identities/{provider}"), &body).await
    }

    /// Makes every session's login older than five minutes.
    async fn age_sessions(&self) {
        let mut redis = self.shop.stack.redis().connect().await.expect("Redis is there");
        let pattern = format!("lk:{{{}:*}}:session:*", self.shop.id());
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

async fn unlink(signed_in: &SignedIn, provider: &str) -> Answer {
    signed_in.send(signed_in.request(Method::DELETE, &format!("user/identities/{provider}"))).await
}

#[tokio::test]
async fn a_user_links_lists_and_removes_a_provider() {
    let social = Social::open().await;
    let ada = social.ada().await;
    let list = ada.get("user/identities").await.expect(StatusCode::OK);
    assert_eq!(list.body, json!({ "identities": [] }));
    assert_eq!(list.header("cache-control"), Some("no-store"));

    // Of another address than the account's.
    let person = Person::verified("her-id", "ada@work.example");
    social.link(&ada, "local", &person).await.expect(StatusCode::OK);
    // Again changes nothing.
    social.link(&ada, "local", &person).await.expect(StatusCode::OK);
    let list = ada.get("user/identities").await.expect(StatusCode::OK);
    let identities = list.body["identities"].as_array().expect("a list").clone();
    assert_eq!(identities.len(), 1, "{}", list.text);
    assert_eq!(identities[0]["provider"], "local");
    assert_eq!(identities[0]["subject"], "her-id");
    assert_eq!(identities[0]["email"], "ada@work.example");
    assert!(identities[0]["linked_at"].is_i64(), "{}", list.text);
    // The code of the registration, and one notice to the account's own address.
    assert_eq!(social.shop.mails_in_the_end(EMAIL).await, 2);
    assert_eq!(social.shop.mails_in_the_end("ada@work.example").await, 0);

    let landed = Landed::session(&social.sign_in(&person).await);
    assert_eq!(social.made().await.0, 1);
    assert_eq!(landed.get("email_verified"), "true");

    unlink(&ada, "local").await.expect(StatusCode::OK);
    assert_eq!(ada.get("user/identities").await.body, json!({ "identities": [] }));
    unlink(&ada, "local").await.expect_error(StatusCode::NOT_FOUND, "not_found");
    let landed = Landed::session(&social.sign_in(&person).await);
    assert_eq!(social.made().await.0, 2, "it is somebody else's now: {}", landed.location);
}

#[tokio::test]
async fn linking_needs_a_recent_login_and_an_identity_of_nobody_else() {
    let social = Social::open().await;
    let ada = social.ada().await;
    let taken = Person::verified("1", "grace@example.com");
    Landed::session(&social.sign_in(&taken).await);
    let before = social.made().await;
    social.link(&ada, "local", &taken).await.expect_error(StatusCode::FORBIDDEN, "access_denied");
    let answer = ada.post("user/identities/nobody", &json!({ "token": "x" })).await;
    answer.expect_error(StatusCode::NOT_FOUND, "provider_not_found");
    let answer = ada.post("user/identities/local", &json!({ "token": "wrong" })).await;
    answer.expect_error(StatusCode::UNAUTHORIZED, "invalid_provider_token");
    let answer = ada.post("user/identities/local", &json!({})).await;
    answer.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    let nobody = social.shop.client().signed_in(social.shop.id(), "nothing");
    for answer in [nobody.get("user/identities").await, unlink(&nobody, "local").await] {
        answer.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    }
    let own = Person::verified("2", "ada@work.example");
    social.link(&nobody, "local", &own).await.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
    social.age_sessions().await;
    social.link(&ada, "local", &own).await.expect_error(StatusCode::UNAUTHORIZED, "reauthentication_required");
    assert_eq!(social.made().await, before);
    ada.get("user/identities").await.expect(StatusCode::OK);
    let again = social.shop.client().sign_in(social.shop.id(), EMAIL, PASSWORD).await;
    social.link(&again, "local", &own).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_last_way_in_is_never_removed() {
    let social = Social::open().await;
    let person = Person::verified("1", EMAIL);
    let landed = Landed::session(&social.sign_in(&person).await);
    let ada = social.shop.client().signed_in(social.shop.id(), landed.get("access_token"));
    unlink(&ada, "local").await.expect_error(StatusCode::CONFLICT, "last_identity");
    assert_eq!(social.made().await, (1, 1, 1));

    let second = Person::verified("2", "ada@work.example");
    social.link(&ada, "other", &second).await.expect(StatusCode::OK);
    // Two at once: one stays.
    let (first, other) = tokio::join!(unlink(&ada, "local"), unlink(&ada, "other"));
    let mut statuses = [first.status, other.status];
    statuses.sort();
    assert_eq!(statuses, [StatusCode::OK, StatusCode::CONFLICT], "{} {}", first.text, other.text);
    assert_eq!(social.made().await.1, 1);

    // An identity of a Provider that the App does not have any more is no way in.
    social.shop.sql("UPDATE identities SET provider = 'local'").await;
    social
        .shop
        .sql("INSERT INTO identities SELECT app_id, 'gone', 'x', user_id, 'gone', NULL, now() FROM identities")
        .await;
    unlink(&ada, "local").await.expect_error(StatusCode::CONFLICT, "last_identity");
    unlink(&ada, "gone").await.expect(StatusCode::OK);
    assert_eq!(social.made().await.1, 1);
}

#[tokio::test]
async fn what_is_made_linked_taken_over_and_removed_is_written_down_in_the_same_transaction() {
    let social = Social::open().await;
    let landed = Landed::session(&social.sign_in(&Person::verified("1", EMAIL)).await);
    let ada = social.shop.client().signed_in(social.shop.id(), landed.get("access_token"));
    social.link(&ada, "other", &Person::verified("2", "ada@work.example")).await.expect(StatusCode::OK);
    // Somebody registered this address, and its owner comes by the provider.
    social.shop.register("grace@example.com").await;
    Landed::session(&social.sign_in(&Person::verified("3", "grace@example.com")).await);
    for (kind, subject) in [("registered", "1"), ("identity_linked", "2"), ("identity_linked", "3")] {
        let together = format!(
            "SELECT count(*) FROM identities JOIN audit_events AS event USING (app_id, user_id)
             WHERE identities.xmin = event.xmin AND event.kind = '{kind}' AND subject = '{subject}'
                AND event.detail ->> 'provider' = identities.provider AND event.ip IS NOT NULL"
        );
        assert_eq!(social.shop.count(&together).await, 1, "{kind} {subject}");
    }
    unlink(&ada, "local").await.expect(StatusCode::OK);
    // Refused: nothing is left to sign in with but this one.
    unlink(&ada, "other").await.expect_error(StatusCode::CONFLICT, "last_identity");
    let activity = ada.get("user/activity").await.expect(StatusCode::OK);
    let kinds: Vec<_> =
        activity.body["events"].as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["identity_unlinked", "identity_linked", "logged_in", "registered"]);
    let by_the_user = "SELECT count(*) FROM audit_events WHERE kind LIKE 'identity_%' AND session_id IS NOT NULL";
    assert_eq!(social.shop.count(by_the_user).await, 2);
}
