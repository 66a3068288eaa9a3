//! Receivers that fail, redirect or hang.

use std::time::Duration;

use http::StatusCode;
use latchkey_tests::{
    builders::Webhook,
    eventually,
    webhook_receiver::{Reply, WebhookReceiver},
};
use serde_json::json;

use super::{CREATED, EMAIL, LIMIT, app, create_user, start_push, wait_for_dead_letters, wait_for_state};
use crate::administration::AdministrationTest;

/// The first retry comes 5 s ±20 % after the failure.
const SHORTEST_FIRST_RETRY: Duration = Duration::from_secs(4);
/// Maximum time until the first retry: far less than the delay of the second retry, which is a minute.
const LONGEST_FIRST_RETRY: Duration = Duration::from_secs(30);
/// Minimum time from the arrival of a request that hangs to its repetition. The server gives up on the request after
/// ten seconds, but on a loaded machine the request arrives late.
const SHORTEST_HANG: Duration = Duration::from_secs(8);

#[tokio::test]
async fn a_failed_delivery_is_repeated_with_the_same_id_and_a_new_signature() {
    let (test, receiver, webhook) = start_push(CREATED).await;
    receiver.script([Reply::status(500)]);
    create_user(&test.admin(), EMAIL).await;
    let events = receiver.wait_for(2).await;
    let (first, second) = (&events[0], &events[1]);
    assert_eq!((first.id(), &first.text), (second.id(), &second.text));
    assert!(second.timestamp() > first.timestamp(), "the time of the attempt");
    assert!(first.is_signed_with(webhook.key()) && second.is_signed_with(webhook.key()));
    assert_ne!(first.headers["webhook-signature"], second.headers["webhook-signature"]);
    let pause = second.at - first.at;
    assert!((SHORTEST_FIRST_RETRY..LONGEST_FIRST_RETRY).contains(&pause), "{pause:?}");
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!(receiver.events().len(), 2, "a delivered event is not sent again");
}

#[tokio::test]
async fn a_status_other_than_2xx_or_a_closed_connection_is_a_failure() {
    let (test, receiver, _) = start_push(CREATED).await;
    let replies = [Reply::status(404), Reply::status(304), Reply::Disconnect];
    receiver.script(replies);
    for name in ["ada", "grace", "alan"] {
        create_user(&test.admin(), &format!("{name}@example.com")).await;
    }
    receiver.wait_for(6).await;
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!((receiver.events().len(), receiver.distinct_count()), (6, 3), "each event was repeated once");
}

#[tokio::test]
async fn a_2xx_response_is_a_success_even_if_its_body_does_not_end() {
    let (test, receiver, _) = start_push(CREATED).await;
    receiver.script([Reply::Stall(StatusCode::OK), Reply::Flood(StatusCode::OK), Reply::Stall(StatusCode::ACCEPTED)]);
    for name in ["ada", "grace", "alan"] {
        create_user(&test.admin(), &format!("{name}@example.com")).await;
    }
    receiver.wait_for(3).await;
    // A failed delivery would be repeated before the queue is empty.
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!((receiver.events().len(), receiver.distinct_count()), (3, 3), "each event arrived once");
    wait_for_dead_letters(&test.admin(), 0).await;
}

#[tokio::test]
async fn the_delay_between_retries_grows() {
    let (test, receiver, _) = start_push(CREATED).await;
    receiver.set_reply(Reply::status(500));
    create_user(&test.admin(), EMAIL).await;
    for (failures, delay) in [(1, 5), (2, 60), (3, 300), (4, 1800), (5, 7200), (6, 21_600), (7, 21_600)] {
        receiver.wait_for(failures).await;
        let failed = format!("SELECT count(*) FROM webhook_events WHERE attempts = {failures} AND lease_until IS NULL");
        eventually(&format!("failure {failures} is stored"), LIMIT, || async {
            (test.test_app.query_number(&failed).await == 1).then_some(())
        })
        .await;
        let seconds = "SELECT extract(epoch FROM due_at - statement_timestamp())::bigint FROM webhook_events";
        let seconds = test.test_app.query_number(seconds).await;
        // Some seconds have passed since the failure.
        let earliest = delay * 4 / 5 - 30;
        assert!((earliest..=delay * 6 / 5).contains(&seconds), "{seconds} s after failure {failures}, not {delay} s");
        test.test_app.make_webhook_events_due().await;
    }
    receiver.set_reply(Reply::status(200));
    eventually("the event is delivered", LIMIT, || async {
        test.test_app.make_webhook_events_due().await;
        (test.test_app.waiting_webhook_events().await == 0).then_some(())
    })
    .await;
    assert_eq!(receiver.distinct_count(), 1);
}

#[tokio::test]
async fn retry_after_is_the_minimum_delay_of_a_retry() {
    let (test, receiver, _) = start_push(CREATED).await;
    receiver.script([Reply::status(429).with_header("retry-after", "8")]);
    create_user(&test.admin(), EMAIL).await;
    let events = receiver.wait_for(2).await;
    let pause = events[1].at - events[0].at;
    assert!((Duration::from_secs(8)..LONGEST_FIRST_RETRY).contains(&pause), "{pause:?}");

    // A receiver cannot delay its events for a day.
    receiver.script([Reply::status(503).with_header("retry-after", "86400")]);
    create_user(&test.admin(), "grace@example.com").await;
    receiver.wait_for(3).await;
    let failed = "SELECT count(*) FROM webhook_events WHERE attempts = 1 AND lease_until IS NULL";
    eventually("the failure is stored", LIMIT, || async {
        (test.test_app.query_number(failed).await == 1).then_some(())
    })
    .await;
    let late = "SELECT count(*) FROM webhook_events WHERE due_at > statement_timestamp() + interval '75 minutes'";
    assert_eq!(test.test_app.query_number(late).await, 0);
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_is_not_followed() {
    let (test, receiver, _) = start_push(CREATED).await;
    let target = WebhookReceiver::start().unwrap();
    receiver.script([
        Reply::status(307).with_header("location", &target.url()),
        Reply::status(301).with_header("location", &target.url()),
    ]);
    for name in ["ada", "grace"] {
        create_user(&test.admin(), &format!("{name}@example.com")).await;
    }
    receiver.wait_for(4).await;
    test.test_app.wait_until_webhooks_settle().await;
    assert_eq!((receiver.events().len(), receiver.distinct_count()), (4, 2));
    assert!(target.events().is_empty());
}

#[tokio::test]
async fn a_receiver_that_hangs_delays_neither_other_webhooks_nor_mails() {
    let (slow, fast) = (WebhookReceiver::start().unwrap(), WebhookReceiver::start().unwrap());
    slow.set_reply(Reply::Hang);
    let app = app().webhook(&Webhook::push("slow", &slow.url(), CREATED)).webhook(&Webhook::push(
        "fast",
        &fast.url(),
        CREATED,
    ));
    let test = AdministrationTest::start_with(app, &[]).await;
    let admin = test.admin();
    for number in 0..20 {
        create_user(&admin, &format!("user{number}@example.com")).await;
    }
    admin.create(&json!({ "email": EMAIL, "mail": "confirm" })).await;
    fast.wait_for_distinct(21).await;
    test.test_app.mail(EMAIL, 1).await;
    // At most 16 requests are in flight. A 17th request would begin only after the server has given up on one of them.
    assert!(slow.events().len() <= 16, "{} requests: none has been given up yet", slow.events().len());
    assert!(slow.events().len() > 1, "several are in flight");

    slow.set_reply(Reply::status(204));
    slow.wait_for_distinct(21).await;
    eventually("all events are delivered", LIMIT, || async {
        test.test_app.make_webhook_events_due().await;
        (test.test_app.waiting_webhook_events().await == 0).then_some(())
    })
    .await;
    assert!(slow.max_in_flight() <= 17, "a request can begin before the receiver sees the end of another");
    let events = slow.events();
    let attempts: Vec<_> = events.iter().filter(|event| event.id() == events[0].id()).collect();
    assert!(attempts.len() >= 2, "the event that hung is sent again");
    assert!(attempts[1].at - attempts[0].at >= SHORTEST_HANG);
    assert_eq!(fast.events().len(), 21, "each event once");
}

#[tokio::test]
async fn events_are_sent_one_at_a_time_after_ten_failures_in_a_row() {
    let (test, receiver, _) = start_push(CREATED).await;
    receiver.set_reply(Reply::status(503));
    let admin = test.admin();
    for number in 0..12 {
        create_user(&admin, &format!("user{number}@example.com")).await;
    }
    let failed = "SELECT count(*) FROM webhook_events WHERE attempts >= 1 AND lease_until IS NULL";
    eventually("all deliveries fail", LIMIT, || async {
        (test.test_app.query_number(failed).await == 12).then_some(())
    })
    .await;
    wait_for_state(&test.test_app, "crm", "ReceiverFails").await;

    receiver.set_reply(Reply::Hang);
    receiver.reset_max_in_flight();
    let before = receiver.events().len();
    test.test_app.make_webhook_events_due().await;
    // The second request begins when the server has given up on the first.
    receiver.wait_for(before + 2).await;
    assert!(receiver.max_in_flight() <= 2, "a request can begin before the receiver sees the end of another");

    receiver.set_reply(Reply::status(204));
    eventually("all events are delivered", LIMIT, || async {
        test.test_app.make_webhook_events_due().await;
        (test.test_app.waiting_webhook_events().await == 0).then_some(())
    })
    .await;
    assert_eq!(receiver.distinct_count(), 12);
    wait_for_state(&test.test_app, "crm", "Delivering").await;
    assert_eq!(admin.get("dead-letters").await.expect(StatusCode::OK).body, json!({ "dead_letters": [] }));
}

#[tokio::test]
async fn a_url_change_ends_the_restriction_that_earlier_failures_caused() {
    let (mut test, _receiver, webhook) = start_push(CREATED).await;
    wait_for_state(&test.test_app, "crm", "Delivering").await;
    test.test_app.sql("UPDATE webhooks SET failures = 10").await;
    wait_for_state(&test.test_app, "crm", "ReceiverFails").await;
    let next = WebhookReceiver::start().unwrap();
    test.test_app.apply(test.test_app.app.clone().webhook(&webhook.url(&next.url()))).await;
    // The new URL alone ends `ReceiverFails`: no event has been delivered since the change.
    wait_for_state(&test.test_app, "crm", "Delivering").await;
    next.set_reply(Reply::Hang);
    for number in 0..3 {
        create_user(&test.admin(), &format!("user{number}@example.com")).await;
    }
    eventually("several are in flight", LIMIT, || async { (next.max_in_flight() > 2).then_some(()) }).await;
}
