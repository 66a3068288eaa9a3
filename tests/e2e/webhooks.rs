//! Webhooks (specification: Administration, Webhooks): which events reach a receiver or a consumer, and what happens if
//! deliveries fail.

use std::time::Duration;

use http::StatusCode;
use latchkey_tests::{
    builders::{App, Webhook},
    eventually,
    stack::ServerProcess,
    webhook_receiver::WebhookReceiver,
};
use serde_json::{Value, json};

use crate::{
    administration::{AdministrationTest, Administrator},
    fault_support::unlimited_app,
    support::{RevisionStream, TestApp},
};

mod events;
mod gone;
mod outages;
mod pull;
mod rebinding;
mod registrations;
mod retries;
mod shares;
mod upkeep;

const EMAIL: &str = "ada@example.com";
const CREATED: &[&str] = &["user.created"];
/// Maximum time that a test waits for a condition. It includes the time after which the server gives up on a receiver
/// that hangs (10 s), and the first retry (5 s).
const LIMIT: Duration = Duration::from_secs(60);

/// An App with limits that no test reaches.
fn app() -> App {
    unlimited_app("hooks")
}

/// Starts a receiver, and a service with the push webhook `crm`, which sends these events to the receiver.
async fn start_push(events: &[&str]) -> (AdministrationTest, WebhookReceiver, Webhook) {
    let receiver = WebhookReceiver::start().unwrap();
    let webhook = Webhook::push("crm", &receiver.url(), events);
    (AdministrationTest::start_with(app().webhook(&webhook), &[]).await, receiver, webhook)
}

/// Creates a user without a password, and returns its id.
async fn create_user(admin: &Administrator, email: &str) -> String {
    admin.create(&json!({ "email": email })).await
}

/// Waits until the App has exactly this number of dead letters of webhooks, and returns them.
async fn wait_for_dead_letters(admin: &Administrator, count: usize) -> Vec<Value> {
    let listed = || async {
        let response = admin.get("dead-letters?kind=webhook").await.expect(StatusCode::OK);
        let letters = response.body["dead_letters"].as_array().unwrap().clone();
        (letters.len() == count).then_some(letters)
    };
    eventually(&format!("{count} dead letters"), LIMIT, listed).await
}

/// Waits until the server reports this state of a webhook to the operator.
async fn wait_for_state(test_app: &TestApp, webhook: &str, state: &str) {
    eventually(&format!("the state {state} of {webhook}"), LIMIT, || async {
        let (_, hello) = RevisionStream::open(test_app.stack.server()).await;
        let reported = hello.webhooks.get(test_app.id()).and_then(|webhooks| webhooks.get(webhook));
        (reported.map(String::as_str) == Some(state)).then_some(())
    })
    .await;
}

/// The value of a metric. `series` is the name with its labels.
async fn metric(server: &ServerProcess, series: &str) -> f64 {
    let text = server.get_ops("metrics").await.expect(StatusCode::OK).text;
    let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {series} in {text}"))
}

// === impl TestApp ===

impl TestApp {
    /// The number of events that wait for a delivery, or for a consumer.
    async fn waiting_webhook_events(&self) -> i64 {
        self.query_number("SELECT count(*) FROM webhook_events WHERE dead_at IS NULL").await
    }

    /// Waits until all events are delivered (to a receiver, or fetched and acknowledged) or given up.
    async fn wait_until_webhooks_settle(&self) {
        let settled = || async { (self.waiting_webhook_events().await == 0).then_some(()) };
        eventually("all events are delivered or given up", LIMIT, settled).await;
    }

    /// Sets the due time of all waiting events without a lease to now. The server polls for due events, so it needs no
    /// notification.
    async fn make_webhook_events_due(&self) {
        self.sql(
            "UPDATE webhook_events SET due_at = statement_timestamp() WHERE dead_at IS NULL AND lease_until IS NULL",
        )
        .await;
    }

    /// Makes all leases and due times of events earlier by this number of seconds, as if this time had passed.
    async fn age_webhook_leases(&self, seconds: u32) {
        self.sql(&format!(
            "UPDATE webhook_events
             SET due_at = due_at - interval '{seconds} seconds', lease_until = lease_until - interval '{seconds} seconds'"
        ))
        .await;
    }
}
