//! Old events: when their delivery is given up, when they are deleted, and what the operator learns about them.

use std::time::Duration;

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    eventually,
    webhook_receiver::{Reply, WebhookReceiver},
};
use serde_json::{Value, json};

use super::{CREATED, EMAIL, LIMIT, app, create, start_push, wait_for_dead_letters, wait_for_state};
use crate::administration::AdministrationTest;

/// Each server checks every 15 to 45 s whether the hourly sweep is due; a loaded machine takes longer.
const SWEEP_LIMIT: Duration = Duration::from_secs(180);

#[tokio::test]
async fn a_delivery_is_given_up_72_hours_after_the_event() {
    let (test, receiver, _) = start_push(CREATED).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    receiver.set_reply(Reply::status(500));
    let user = create(&admin, EMAIL).await;
    let failed = async |times: usize| {
        receiver.wait_for(times).await;
        let failed = format!("SELECT count(*) FROM webhook_events WHERE attempts >= {times} AND lease_until IS NULL");
        eventually(&format!("failure {times} is stored"), LIMIT, || async {
            (test_app.query_number(&failed).await == 1).then_some(())
        })
        .await;
    };
    failed(1).await;
    test_app.sql("UPDATE webhook_events SET at = at - interval '71 hours', attempts = 6").await;
    test_app.make_webhook_events_due().await;
    failed(2).await;
    // The delay after so many failures is six hours, but the last attempt is not later than 72 hours after the event.
    let late = "SELECT count(*) FROM webhook_events WHERE due_at > at + interval '72 hours 1 second'";
    assert_eq!(test_app.query_number(late).await, 0);
    wait_for_dead_letters(&admin, 0).await;

    test_app.sql("UPDATE webhook_events SET at = at - interval '2 hours'").await;
    test_app.make_webhook_events_due().await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    assert_eq!(letter["user_id"], user.as_str());
    assert!(letter["error"].as_str().is_some_and(|error| error.contains("500")), "{letter}");
    let requests = receiver.events().len();
    // A retry is one more attempt.
    receiver.set_reply(Reply::status(200));
    let retried = admin.post("dead-letters/retry", &json!({ "webhook": "crm" })).await.expect(StatusCode::OK);
    assert_eq!(retried.integer("retried"), 1);
    receiver.wait_for(requests + 1).await;
    wait_for_dead_letters(&admin, 0).await;
}

#[tokio::test]
async fn the_hourly_sweep_deletes_old_events_and_those_of_removed_webhooks() {
    let receiver = WebhookReceiver::start().unwrap();
    receiver.set_reply(Reply::status(410));
    let app = app()
        .webhook(&Webhook::push("crm", &receiver.url(), CREATED))
        .webhook(&Webhook::pull("sync", "shop", "fetches", CREATED))
        .webhook(&Webhook::pull("removed", "shop", "fetches", CREATED));
    let mut test = AdministrationTest::start_with(app, &[]).await;
    let admin = test.admin();
    let (old, young) = (create(&admin, "old@example.com").await, create(&admin, "young@example.com").await);
    wait_for_dead_letters(&admin, 2).await;
    assert_eq!(test.test_app.query_number("SELECT count(*) FROM webhook_events").await, 6);

    let mut webhooks = test.test_app.app.spec_value("/webhooks").unwrap();
    webhooks.as_array_mut().unwrap().retain(|webhook| webhook["name"] != "removed");
    test.test_app.apply(test.test_app.app.clone().set("/webhooks", webhooks)).await;
    // Dead letters stay for 30 days, and events of a consumer for seven.
    test.test_app
        .sql(&format!(
            "UPDATE webhook_events SET at = now() - interval '10 minutes';
             UPDATE webhook_events SET at = now() - interval '8 days' WHERE user_id = '{old}';
             UPDATE webhook_events SET dead_at = now() - interval '31 days'
             WHERE user_id = '{old}' AND dead_at IS NOT NULL;
             UPDATE audit_upkeep SET next_at = '-infinity'"
        ))
        .await;
    eventually("old events are deleted", SWEEP_LIMIT, || async {
        (test.test_app.query_number("SELECT count(*) FROM webhook_events").await == 2).then_some(())
    })
    .await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    assert_eq!((&letter["webhook"], &letter["user_id"]), (&json!("crm"), &json!(young)));
    let pulled = test.administrator("fetches").get("webhooks/sync/events").await.expect(StatusCode::OK);
    let pulled = pulled.body["events"].as_array().unwrap().clone();
    let users: Vec<&Value> = pulled.iter().map(|event| &event["data"]["user_id"]).collect();
    assert_eq!(users, [young.as_str()]);
}

#[tokio::test]
async fn a_consumer_that_leaves_events_for_a_day_is_behind() {
    let webhook = Webhook::pull("sync", "shop", "fetches", CREATED);
    let test = AdministrationTest::start_with(app().webhook(&webhook), &[]).await;
    wait_for_state(&test.test_app, "sync", "Delivering").await;
    create(&test.admin(), EMAIL).await;
    test.test_app.sql("UPDATE webhook_events SET at = now() - interval '25 hours'").await;
    wait_for_state(&test.test_app, "sync", "ConsumerBehind").await;
    let consumer = test.administrator("fetches");
    let fetched = consumer.get("webhooks/sync/events").await.expect(StatusCode::OK);
    let ids = json!({ "ids": [fetched.body["events"][0]["id"]] });
    consumer.post("webhooks/sync/acknowledge", &ids).await.expect(StatusCode::OK);
    wait_for_state(&test.test_app, "sync", "Delivering").await;
}
