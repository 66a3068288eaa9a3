//! Webhooks while servers are killed, with several servers and with several Apps; the delay of events, and metrics.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    eventually,
    proxy::Trap,
    stack::Stack,
    webhook_receiver::{Reply, WebhookReceiver},
};
use serde_json::json;

use super::{CREATED, EMAIL, LIMIT, app, create_user, metric, start_push};
use crate::administration::AdministrationTest;

/// Maximum time until the metrics show waiting events and dead letters, on a loaded machine. The specification sets no
/// limit.
const METRICS_LIMIT: Duration = Duration::from_secs(90);
/// The metric that counts delivered events.
const SENT: &str = r#"latchkey_webhook_deliveries_total{outcome="sent"}"#;

/// Ends the leases of killed servers, which cannot release them, and makes all events due.
async fn expire_leases(test: &AdministrationTest) {
    test.test_app.sql("UPDATE webhook_events SET lease_until = NULL WHERE dead_at IS NULL").await;
    test.test_app.make_webhook_events_due().await;
}

#[tokio::test]
async fn an_event_survives_the_death_of_the_server() {
    let (test, receiver, webhook) = start_push(CREATED).await;
    let server = test.test_app.stack.server();
    // The server is killed while the receiver has the request.
    receiver.set_reply(Reply::Hang);
    let ada = create_user(&test.admin(), EMAIL).await;
    let first = receiver.wait_for(1).await.remove(0);
    server.kill();
    receiver.set_reply(Reply::status(204));
    server.start_ready().await.unwrap();
    expire_leases(&test).await;
    let second = receiver.wait_for(2).await.remove(1);
    assert_eq!(second.id(), first.id());
    assert_eq!(second.body["data"]["user_id"], ada.as_str());
    test.test_app.wait_until_webhooks_settle().await;

    // The server is killed right after the response, before or after the delivery.
    let grace = create_user(&test.admin(), "grace@example.com").await;
    server.kill();
    server.start_ready().await.unwrap();
    expire_leases(&test).await;
    test.test_app.wait_until_webhooks_settle().await;
    let events = receiver.events();
    let of_grace: Vec<_> = events.iter().filter(|event| event.body["data"]["user_id"] == grace.as_str()).collect();
    assert!(!of_grace.is_empty(), "at least once");
    assert!(of_grace.iter().all(|event| event.id() == of_grace[0].id()));
    assert!(events.iter().all(|event| event.is_signed_with(webhook.key())));
}

#[tokio::test]
async fn an_event_exists_exactly_if_the_transaction_of_its_action_was_committed() {
    let receiver = WebhookReceiver::start().unwrap();
    let webhook = Webhook::push("crm", &receiver.url(), CREATED);
    let test = AdministrationTest::start_on(Stack::builder().proxied(), app().webhook(&webhook), &[]).await;
    let admin = test.admin();
    let proxy = test.test_app.stack.postgres_proxy.as_ref().unwrap();
    let number_of_users = "SELECT count(*) FROM users";
    // Only statements that write this user contain the email address.
    for (trap, users) in [(Trap::Before(b"Ada@cut.example".to_vec()), 0), (Trap::After(b"Ada@cut.example".to_vec()), 1)]
    {
        proxy.set_trap(trap);
        drop(admin.post("users", &json!({ "email": "Ada@cut.example" })).await);
        proxy.trap_triggered().await;
        proxy.restore().unwrap();
        // Even if the cut is between two statements of the transaction, the user exists only if the event exists.
        eventually("the service recovers", LIMIT, || async {
            (admin.get("users").await.status == StatusCode::OK).then_some(())
        })
        .await;
        let created = test.test_app.query_number(number_of_users).await;
        assert!(created <= users, "{created} users");
        receiver.wait_for_distinct(usize::try_from(created).unwrap()).await;
    }
    test.test_app.wait_until_webhooks_settle().await;
    let created = test.test_app.query_number(number_of_users).await;
    assert_eq!(receiver.distinct_count(), usize::try_from(created).unwrap(), "an event for each user, and no other");
}

#[tokio::test]
async fn several_servers_deliver_each_event_once() {
    let receiver = WebhookReceiver::start().unwrap();
    let webhook = Webhook::push("crm", &receiver.url(), CREATED);
    let test = AdministrationTest::start_on(Stack::builder().servers(2), app().webhook(&webhook), &[]).await;
    let admin = test.admin();
    for number in 0..30 {
        create_user(&admin, &format!("user{number}@example.com")).await;
    }
    receiver.wait_for_distinct(30).await;
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!(receiver.events().len(), 30, "each once");
    eventually("all deliveries are counted", LIMIT, || async {
        let mut sent = 0.0;
        for server in test.test_app.stack.servers() {
            sent += metric(server, SENT).await;
        }
        (sent as u64 == 30).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_app_does_not_see_the_events_of_another_app() {
    let pull = Webhook::pull("sync", "shop", "fetches", CREATED);
    let (receiver, other_receiver) = (WebhookReceiver::start().unwrap(), WebhookReceiver::start().unwrap());
    let shop = app().webhook(&pull).webhook(&Webhook::push("crm", &receiver.url(), CREATED));
    let blog = app().webhook(&pull).webhook(&Webhook::push("crm", &other_receiver.url(), CREATED));
    let test = AdministrationTest::start_on(Stack::builder().app(&blog), shop, &[]).await;
    let user = create_user(&test.admin(), EMAIL).await;
    receiver.wait_for(1).await;
    let (of_shop, of_blog) = (test.administrator("fetches"), test.administrator_of(&blog, "fetches"));
    let path = "webhooks/sync/events";
    assert_eq!(of_blog.get(path).await.expect(StatusCode::OK).body, json!({ "events": [] }));
    let fetched = of_shop.get(path).await.expect(StatusCode::OK);
    assert_eq!(fetched.body["events"][0]["data"]["user_id"], user.as_str());
    let ids = json!({ "ids": [fetched.body["events"][0]["id"]] });
    let acknowledged = of_blog.post("webhooks/sync/acknowledge", &ids).await.expect(StatusCode::OK);
    assert_eq!(acknowledged.integer("acknowledged"), 0);
    let acknowledged = of_shop.post("webhooks/sync/acknowledge", &ids).await.expect(StatusCode::OK);
    assert_eq!(acknowledged.integer("acknowledged"), 1, "the other App has not acknowledged it");
    // An event of the other App goes to the receiver of that App.
    test.test_app
        .client()
        .register(blog.id(), "Ada", EMAIL, latchkey_tests::passwords::PASSWORD)
        .await
        .expect(StatusCode::OK);
    let event = other_receiver.wait_for(1).await.remove(0);
    assert_eq!(event.body["data"]["app"], blog.id());
    assert_eq!(of_shop.get(path).await.expect(StatusCode::OK).body, json!({ "events": [] }));
    assert_eq!((receiver.events().len(), other_receiver.events().len()), (1, 1));
}

/// `make bench` requires a median below 250 ms and a 99th percentile below 1 s. The limits here are higher, because
/// other tests slow the machine down.
#[tokio::test]
async fn events_arrive_soon_after_the_response() {
    let (test, receiver, _) = start_push(CREATED).await;
    let mut responses = BTreeMap::new();
    for number in 0..40 {
        let registered = test.test_app.register(&format!("user{number}@example.com")).await;
        responses.insert(registered.string("local_id").to_owned(), Instant::now());
    }
    let events = receiver.wait_for(40).await;
    let mut delays: Vec<Duration> = events
        .iter()
        .map(|event| {
            let user = event.body["data"]["user_id"].as_str().unwrap();
            event.at.saturating_duration_since(responses[user])
        })
        .collect();
    delays.sort();
    println!("delays: {delays:?}");
    assert!(delays[20] < Duration::from_secs(2), "the median is {:?}", delays[20]);
    assert!(delays[39] < Duration::from_secs(10), "the longest is {:?}", delays[39]);
}

#[tokio::test]
async fn metrics_count_deliveries_and_dead_letters() {
    let receiver = WebhookReceiver::start().unwrap();
    let push = Webhook::push("crm", &receiver.url(), CREATED);
    let test = AdministrationTest::start_with(app().webhook(&push), &[]).await;
    let (admin, server) = (test.admin(), test.test_app.stack.server());
    assert_eq!(metric(server, SENT).await as u64, 0, "the series exists from the start");
    create_user(&admin, EMAIL).await;
    receiver.wait_for(1).await;
    eventually("the delivery is counted", LIMIT, || async { (metric(server, SENT).await as u64 == 1).then_some(()) })
        .await;
    assert_eq!(metric(server, "latchkey_webhook_dead").await as u64, 0);

    receiver.set_reply(Reply::status(410));
    create_user(&admin, "grace@example.com").await;
    eventually("a dead letter is shown", METRICS_LIMIT, || async {
        (metric(server, "latchkey_webhook_dead").await as u64 == 1).then_some(())
    })
    .await;
    assert_eq!(metric(server, SENT).await as u64, 1);
}

#[tokio::test]
async fn metrics_show_how_long_events_wait() {
    let receiver = WebhookReceiver::start().unwrap();
    receiver.set_reply(Reply::Hang);
    let push = Webhook::push("crm", &receiver.url(), CREATED);
    let test = AdministrationTest::start_with(app().webhook(&push), &[]).await;
    let (admin, server) = (test.admin(), test.test_app.stack.server());
    for number in 0..40 {
        create_user(&admin, &format!("user{number}@example.com")).await;
    }
    // At most 16 events are in flight; the others are counted as due.
    eventually("events are due", METRICS_LIMIT, || async {
        (metric(server, "latchkey_webhook_due").await >= 1.0).then_some(())
    })
    .await;
    eventually("the oldest has waited", METRICS_LIMIT, || async {
        (metric(server, "latchkey_webhook_oldest_due_seconds").await > 0.0).then_some(())
    })
    .await;
    receiver.set_reply(Reply::status(204));
    eventually("nothing is due any more", METRICS_LIMIT, || async {
        test.test_app.make_webhook_events_due().await;
        let nothing_waits = test.test_app.waiting_webhook_events().await == 0;
        (nothing_waits && metric(server, "latchkey_webhook_due").await as u64 == 0).then_some(())
    })
    .await;
    let letters = admin.get("dead-letters").await.expect(StatusCode::OK);
    assert_eq!(letters.body, json!({ "dead_letters": [] }));
}
