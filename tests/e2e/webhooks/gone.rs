//! A receiver that responds 410, and dead letters of webhooks.

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    passwords::PASSWORD,
    webhook_receiver::{Reply, WebhookReceiver},
};
use serde_json::{Value, json};

use super::{CREATED, EMAIL, app, create_user, start_push, wait_for_dead_letters, wait_for_state};
use crate::administration::AdministrationTest;

/// The number of events that wait when the receiver responds 410.
const WAITING_EVENTS: i64 = 50_000;

#[tokio::test]
async fn a_receiver_that_is_gone_gets_nothing_until_its_webhook_changes() {
    let (mut test, receiver, webhook) = start_push(CREATED).await;
    let admin = test.admin();
    receiver.set_reply(Reply::status(410));
    let ada = create_user(&admin, EMAIL).await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    assert_eq!((&letter["kind"], &letter["webhook"]), (&json!("webhook"), &json!("crm")));
    assert_eq!((&letter["user_id"], &letter["attempts"]), (&json!(ada), &json!(1)));
    assert_eq!(letter["id"], receiver.events()[0].id(), "the id of the event");
    assert!(letter["dead_at"].as_i64().unwrap() >= letter["created_at"].as_i64().unwrap());
    assert!(letter["error"].as_str().is_some_and(|error| error.contains("410")), "{letter}");
    wait_for_state(&test.test_app, "crm", "ReceiverGone").await;
    create_user(&admin, "grace@example.com").await;
    wait_for_dead_letters(&admin, 2).await;
    assert_eq!(receiver.events().len(), 1, "nothing is sent to a receiver that is gone");

    let retry = async || {
        let retried = admin.post("dead-letters/retry", &json!({ "webhook": "crm" })).await.expect(StatusCode::OK);
        retried.integer("retried")
    };
    // The webhook has not changed, so the retried events become dead letters again.
    assert_eq!(retry().await, 2);
    wait_for_dead_letters(&admin, 2).await;
    assert_eq!(receiver.events().len(), 1);

    let next = WebhookReceiver::start().unwrap();
    test.test_app.apply(test.test_app.app.clone().webhook(&webhook.clone().url(&next.url()))).await;
    assert_eq!(retry().await, 2);
    next.wait_for_distinct(2).await;
    create_user(&admin, "alan@example.com").await;
    next.wait_for_distinct(3).await;
    assert!(next.events().iter().all(|event| event.is_signed_with(webhook.key())));
    test.test_app.wait_until_webhooks_settle().await;
    wait_for_dead_letters(&admin, 0).await;
    assert_eq!((receiver.events().len(), next.events().len()), (1, 3));
    assert_eq!(retry().await, 0);
    wait_for_state(&test.test_app, "crm", "Delivering").await;
}

#[tokio::test]
async fn a_receiver_that_responds_410_is_gone_even_if_the_body_does_not_end() {
    let (test, receiver, _) = start_push(CREATED).await;
    let admin = test.admin();
    receiver.set_reply(Reply::Stall(StatusCode::GONE));
    create_user(&admin, EMAIL).await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    assert_eq!(letter["attempts"], 1);
    assert!(letter["error"].as_str().is_some_and(|error| error.contains("410")), "{letter}");
    wait_for_state(&test.test_app, "crm", "ReceiverGone").await;
    create_user(&admin, "grace@example.com").await;
    wait_for_dead_letters(&admin, 2).await;
    assert_eq!(receiver.events().len(), 1, "nothing is sent to a receiver that is gone");
}

#[tokio::test]
async fn all_due_events_of_a_webhook_that_is_stopped_become_dead_letters_together() {
    let (test, receiver, _) = start_push(CREATED).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    receiver.set_reply(Reply::status(410));
    create_user(&admin, EMAIL).await;
    wait_for_dead_letters(&admin, 1).await;
    // After ten failures, the server claims one event at a time. If it also gave up the events one by one, this would
    // take minutes, and the wait below would time out.
    test_app
        .sql(&format!(
            "UPDATE webhooks SET failures = 10;
             INSERT INTO webhook_events (app_id, webhook, id, kind, at)
             SELECT '{}', 'crm', gen_random_uuid(), 'registered', now() FROM generate_series(1, {WAITING_EVENTS})",
            test_app.id()
        ))
        .await;
    test_app.wait_until_webhooks_settle().await;
    let dead = "SELECT count(*) FROM webhook_events WHERE dead_at IS NOT NULL AND error <> ''";
    assert_eq!(test_app.query_number(dead).await, WAITING_EVENTS + 1);
    assert_eq!(receiver.events().len(), 1, "nothing is sent to a receiver that is gone");
}

#[tokio::test]
async fn a_new_key_restarts_a_stopped_webhook() {
    let (mut test, receiver, webhook) = start_push(CREATED).await;
    let admin = test.admin();
    receiver.script([Reply::status(410)]);
    create_user(&admin, EMAIL).await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    let rotated = webhook.rotate_key();
    test.test_app.apply(test.test_app.app.clone().webhook(&rotated)).await;
    create_user(&admin, "grace@example.com").await;
    let event = receiver.wait_for(2).await.remove(1);
    assert!(event.is_signed_with(rotated.key()));
    assert_ne!(letter["id"], event.id());
    // The dead letter is sent again only if the administrator asks for it.
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!(receiver.events().len(), 2);
    let retried = admin.post("dead-letters/retry", &json!({ "ids": [letter["id"]] })).await.expect(StatusCode::OK);
    assert_eq!(retried.integer("retried"), 1);
    let again = receiver.wait_for(3).await.remove(2);
    assert_eq!(letter["id"], again.id());
    wait_for_dead_letters(&admin, 0).await;
}

#[tokio::test]
async fn only_the_webhook_of_a_receiver_that_is_gone_stops() {
    let (gone, other) = (WebhookReceiver::start().unwrap(), WebhookReceiver::start().unwrap());
    gone.set_reply(Reply::status(410));
    let app = app().webhook(&Webhook::push("gone", &gone.url(), CREATED)).webhook(&Webhook::push(
        "other",
        &other.url(),
        CREATED,
    ));
    let test = AdministrationTest::start_with(app, &[]).await;
    let admin = test.admin();
    for number in 1..=3 {
        create_user(&admin, &format!("user{number}@example.com")).await;
        let letters = wait_for_dead_letters(&admin, number).await;
        assert!(letters.iter().all(|letter| letter["webhook"] == "gone"), "{letters:?}");
    }
    other.wait_for_distinct(3).await;
    assert_eq!(gone.events().len(), 1);
}

#[tokio::test]
async fn dead_letters_of_webhooks_and_mails_are_listed_together() {
    let (test, receiver, _) = start_push(CREATED).await;
    let admin = test.admin();
    receiver.set_reply(Reply::status(410));
    let user = admin.create(&json!({ "email": EMAIL, "email_verified": true, "password": PASSWORD })).await;
    wait_for_dead_letters(&admin, 1).await;
    let mail = format!(
        "INSERT INTO outbox (app_id, kind, user_id, requested_at, attempts, dead_at, error)
         VALUES ('{}', 'reset', '{user}', now(), 54, now() - interval '1 hour', 'the relay refused the recipient')",
        test.test_app.id()
    );
    test.test_app.sql(&mail).await;
    let first = admin.get("dead-letters?limit=1").await.expect(StatusCode::OK);
    assert_eq!(first.body["dead_letters"][0]["kind"], "webhook", "the newest first");
    let next = admin.get(&format!("dead-letters?limit=1&cursor={}", first.string("next"))).await;
    let next = next.expect(StatusCode::OK);
    let letter = &next.body["dead_letters"][0];
    assert_eq!((&letter["kind"], letter.get("webhook")), (&json!("reset"), Some(&Value::Null)));
    assert_eq!(next.body.get("next"), None);
    let mails = admin.get("dead-letters?kind=reset").await.expect(StatusCode::OK);
    assert_eq!(mails.body["dead_letters"].as_array().unwrap().len(), 1);
    assert_eq!(wait_for_dead_letters(&admin, 1).await.len(), 1);
}

#[tokio::test]
async fn a_retry_names_either_ids_or_a_webhook_of_the_app() {
    let (test, receiver, _) = start_push(CREATED).await;
    let admin = test.admin();
    receiver.set_reply(Reply::status(410));
    create_user(&admin, EMAIL).await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    let retry = async |body: Value| admin.post("dead-letters/retry", &body).await;
    retry(json!({ "webhook": "unknown" })).await.expect_error(StatusCode::NOT_FOUND, "not_found");
    for invalid in [
        json!({}),
        json!({ "webhook": 7 }),
        json!({ "webhook": "crm", "ids": [letter["id"]] }),
        json!({ "webhook": "crm", "kind": "webhook" }),
    ] {
        retry(invalid).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
    }
    let reader = test.administrator("reads").post("dead-letters/retry", &json!({ "webhook": "crm" })).await;
    reader.expect_error(StatusCode::FORBIDDEN, "access_denied");
    assert_eq!(wait_for_dead_letters(&admin, 1).await[0], letter, "no refused call has retried it");
    assert_eq!(receiver.events().len(), 1);
}
