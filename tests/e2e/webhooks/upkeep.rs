//! Old events: when their delivery is given up, when they are deleted, and which state of their webhook the server
//! reports to the operator.

use std::{fs, time::Duration};

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    eventually, process,
    webhook_receiver::{Reply, WebhookReceiver},
};
use serde_json::{Value, json};

use super::{CREATED, EMAIL, LIMIT, app, create_user, start_push, wait_for_dead_letters, wait_for_state};
use crate::{administration::AdministrationTest, support::TestApp};

/// Maximum time until the hourly sweep has ended. Each server checks every 15 to 45 s whether the sweep is due; a
/// loaded machine takes longer.
const SWEEP_LIMIT: Duration = Duration::from_secs(180);

/// Makes the hourly sweep due, and waits until it has ended.
async fn sweep(test_app: &TestApp) {
    // The hourly sweep handles webhook events first. Then it deletes this audit event, which is past its retention.
    test_app
        .sql(&format!(
            "INSERT INTO audit_events (app_id, id, at, kind)
             VALUES ('{}', gen_random_uuid(), '2000-01-01', 'logged_in');
             UPDATE audit_upkeep SET next_at = '-infinity'",
            test_app.id()
        ))
        .await;
    eventually("the sweep ends", SWEEP_LIMIT, || async {
        let left = "SELECT count(*) FROM audit_events WHERE at < '2001-01-01'";
        (test_app.query_number(left).await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_delivery_is_given_up_72_hours_after_the_event() {
    let (test, receiver, _) = start_push(CREATED).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    receiver.set_reply(Reply::status(500));
    let user = create_user(&admin, EMAIL).await;
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
    // After 72 hours, a retry by the administrator is one more attempt.
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
    let (old, young) = (create_user(&admin, "old@example.com").await, create_user(&admin, "young@example.com").await);
    wait_for_dead_letters(&admin, 2).await;
    assert_eq!(test.test_app.query_number("SELECT count(*) FROM webhook_events").await, 6);

    let mut webhooks = test.test_app.app.spec_value("/webhooks").unwrap();
    webhooks.as_array_mut().unwrap().retain(|webhook| webhook["name"] != "removed");
    test.test_app.apply(test.test_app.app.clone().set("/webhooks", webhooks)).await;
    // Dead letters stay for 30 days, and events of a consumer for seven days. The events of a removed webhook are
    // deleted ten minutes after a server last had the webhook.
    test.test_app
        .sql(&format!(
            "UPDATE webhooks SET seen_at = now() - interval '11 minutes' WHERE name = 'removed';
             UPDATE webhook_events SET at = now() - interval '10 minutes';
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
async fn a_server_with_an_older_document_deletes_no_events_of_a_webhook_that_another_server_has() {
    let mut test = AdministrationTest::start_with(app(), &[]).await;
    let document = format!("{}.json", test.test_app.id());
    let older = process::fresh_dir("older-documents");
    fs::copy(test.test_app.stack.rendered().join(&document), older.join(&document)).unwrap();
    let webhook = Webhook::pull("sync", "shop", "fetches", CREATED);
    test.test_app.apply(test.test_app.app.clone().webhook(&webhook)).await;
    let test_app = &test.test_app;
    let admin = test.admin();
    let (old, young) = (create_user(&admin, "old@example.com").await, create_user(&admin, "young@example.com").await);
    let reported = "SELECT count(*) FROM webhooks
         WHERE name = 'sync' AND seen_at > statement_timestamp() - interval '5 minutes'";
    let is_reported = || async { (test_app.query_number(reported).await == 1).then_some(()) };
    eventually("the server reports that it has the webhook", LIMIT, is_reported).await;
    test_app.sql("UPDATE webhooks SET seen_at = seen_at - interval '1 hour'").await;
    eventually("the server reports it again", LIMIT, is_reported).await;

    // Only the server with the older document sweeps.
    test_app.stack.server().kill();
    let _server = test_app.stack.start_server_with_documents(&older).await.unwrap();
    let age = format!("UPDATE webhook_events SET at = at - interval '10 minutes' WHERE user_id = '{old}'");
    test_app.sql(&age).await;
    sweep(test_app).await;
    assert_eq!(test_app.waiting_webhook_events().await, 2, "a server had the webhook in the last ten minutes");
    test_app
        .sql(&format!(
            "UPDATE webhooks SET seen_at = statement_timestamp() - interval '11 minutes';
             UPDATE webhook_events SET at = statement_timestamp() WHERE user_id = '{young}'"
        ))
        .await;
    sweep(test_app).await;
    let of_young = format!("SELECT count(*) FROM webhook_events WHERE user_id = '{young}'");
    let left = (test_app.waiting_webhook_events().await, test_app.query_number(&of_young).await);
    assert_eq!(left, (1, 1), "an event of the last five minutes stays");
}

#[tokio::test]
async fn the_hourly_sweep_deletes_events_of_deleted_apps_and_none_of_apps_with_a_missing_document() {
    let test = AdministrationTest::start_with(app(), &[]).await;
    let test_app = &test.test_app;
    // The rows show the state after a server of an older version, which has no webhooks, has deleted the users of the
    // App `deleted`. The running server has no document of the three Apps.
    test_app
        .sql(
            "INSERT INTO apps (app_id, namespace, state)
             VALUES
                ('deleted', 'elsewhere', 'deleted'), ('deleting', 'elsewhere', 'deleting'),
                ('missing', 'elsewhere', 'active');
             INSERT INTO webhooks (app_id, name) SELECT app_id, 'crm' FROM apps WHERE namespace = 'elsewhere';
             INSERT INTO webhook_events (app_id, webhook, id, kind, at, dead_at)
             SELECT app_id, 'crm', gen_random_uuid(), 'registered', now(), CASE WHEN number = 1 THEN now() END
             FROM webhooks, generate_series(1, 6000) AS number WHERE name = 'crm'",
        )
        .await;
    sweep(test_app).await;
    let count = async |table: &str, app: &str| {
        test_app.query_number(&format!("SELECT count(*) FROM {table} WHERE app_id = '{app}'")).await
    };
    for (app, webhooks, events) in [("deleted", 0, 0), ("deleting", 1, 6000), ("missing", 1, 6000)] {
        assert_eq!((count("webhooks", app).await, count("webhook_events", app).await), (webhooks, events), "{app}");
    }
}

#[tokio::test]
async fn the_hourly_sweep_gives_up_events_that_could_not_be_sent_within_72_hours() {
    let (test, receiver, _) = start_push(CREATED).await;
    let (admin, test_app) = (test.admin(), &test.test_app);
    // Without keys, the server attempts nothing.
    let keys = "/webhooks/0/delivery/push/keys";
    test_app.edit_rendered(|document| *document.pointer_mut(keys).expect("a push webhook") = Value::Null).await;
    let late = create_user(&admin, "late@example.com").await;
    let young = create_user(&admin, "young@example.com").await;
    let retried = create_user(&admin, "retried@example.com").await;
    let leased = create_user(&admin, "leased@example.com").await;
    test_app
        .sql(&format!(
            "UPDATE webhook_events SET at = now() - interval '74 hours', due_at = now() - interval '2 hours';
             UPDATE webhook_events SET at = now() - interval '72 hours' WHERE user_id = '{young}';
             UPDATE webhook_events SET due_at = now() - interval '30 minutes' WHERE user_id = '{retried}';
             UPDATE webhook_events SET lease_until = now() + interval '1 hour' WHERE user_id = '{leased}';
             UPDATE audit_upkeep SET next_at = '-infinity'"
        ))
        .await;
    eventually("an event is given up", SWEEP_LIMIT, || async {
        (test_app.query_number("SELECT count(*) FROM webhook_events WHERE dead_at IS NOT NULL").await > 0).then_some(())
    })
    .await;
    let letter = wait_for_dead_letters(&admin, 1).await.remove(0);
    assert_eq!((&letter["webhook"], &letter["user_id"]), (&json!("crm"), &json!(late)));
    assert!(letter["error"].as_str().is_some_and(|error| !error.is_empty()), "{letter}");
    assert_eq!(test_app.waiting_webhook_events().await, 3);
    assert!(receiver.events().is_empty());
}

#[tokio::test]
async fn a_push_webhook_that_becomes_a_pull_webhook_loses_its_dead_letters() {
    let (mut test, receiver, _) = start_push(CREATED).await;
    let admin = test.admin();
    receiver.set_reply(Reply::status(410));
    create_user(&admin, EMAIL).await;
    wait_for_dead_letters(&admin, 1).await;
    let pull = Webhook::pull("crm", "shop", "fetches", CREATED);
    test.test_app.apply(test.test_app.app.clone().webhook(&pull)).await;
    let waiting = create_user(&admin, "grace@example.com").await;
    test.test_app.sql("UPDATE audit_upkeep SET next_at = '-infinity'").await;
    eventually("the dead letter is deleted", SWEEP_LIMIT, || async {
        let dead = "SELECT count(*) FROM webhook_events WHERE dead_at IS NOT NULL";
        (test.test_app.query_number(dead).await == 0).then_some(())
    })
    .await;
    wait_for_dead_letters(&admin, 0).await;
    let pulled = test.administrator("fetches").get("webhooks/crm/events").await.expect(StatusCode::OK);
    let users: Vec<&Value> =
        pulled.body["events"].as_array().unwrap().iter().map(|event| &event["data"]["user_id"]).collect();
    assert_eq!(users, [waiting.as_str()]);
}

#[tokio::test]
async fn a_consumer_that_leaves_events_for_a_day_is_reported_as_behind() {
    let webhook = Webhook::pull("sync", "shop", "fetches", CREATED);
    let test = AdministrationTest::start_with(app().webhook(&webhook), &[]).await;
    wait_for_state(&test.test_app, "sync", "Delivering").await;
    create_user(&test.admin(), EMAIL).await;
    test.test_app.sql("UPDATE webhook_events SET at = now() - interval '25 hours'").await;
    wait_for_state(&test.test_app, "sync", "ConsumerBehind").await;
    let consumer = test.administrator("fetches");
    let fetched = consumer.get("webhooks/sync/events").await.expect(StatusCode::OK);
    let ids = json!({ "ids": [fetched.body["events"][0]["id"]] });
    consumer.post("webhooks/sync/acknowledge", &ids).await.expect(StatusCode::OK);
    wait_for_state(&test.test_app, "sync", "Delivering").await;
}
