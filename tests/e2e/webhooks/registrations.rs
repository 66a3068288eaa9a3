//! Registrations with an email address that already has a user. They write as many rows to the queue of events as other
//! registrations, so that both take the same time (specification: Accounts, Equal response times). But no receiver and
//! no consumer gets the events of these rows.

use std::time::Duration;

use http::StatusCode;
use latchkey_tests::{builders::Webhook, eventually, passwords::NEW_PASSWORD, webhook_receiver::WebhookReceiver};
use serde_json::Value;

use super::{CREATED, app};
use crate::{administration::AdministrationTest, support::NAME};

const VERIFIED: &str = "ada@example.com";
const UNVERIFIED: &str = "grace@example.com";
/// The number of pull webhooks. Together with the push webhook, the App has the maximum number of webhooks.
const PULL_WEBHOOKS: usize = 7;
const WEBHOOKS: i64 = 8;
/// Maximum time until the server has deleted the rows that are never due. It deletes them within a minute, but a loaded
/// machine takes longer.
const DELETION_LIMIT: Duration = Duration::from_secs(120);

/// Records each row that is written to the queue, because the server deletes rows at any time.
const RECORD_ROWS: &str = "
    CREATE TABLE written (due_at timestamptz NOT NULL);
    CREATE FUNCTION note_row() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO written VALUES (NEW.due_at);
        RETURN NULL;
    END
    $$;
    CREATE TRIGGER note_row AFTER INSERT ON webhook_events FOR EACH ROW EXECUTE FUNCTION note_row()";

/// Fetches a consumer's events, and returns the ids of their users in alphabetical order.
async fn fetched_users(test: &AdministrationTest, webhook: usize) -> Vec<String> {
    let path = format!("webhooks/sync{webhook}/events");
    let response = test.administrator("fetches").get(&path).await.expect(StatusCode::OK);
    let events = response.body["events"].as_array().unwrap();
    let user = |event: &Value| event["data"]["user_id"].as_str().unwrap().to_owned();
    let mut users: Vec<_> = events.iter().map(user).collect();
    users.sort();
    users
}

#[tokio::test]
async fn a_repeated_registration_writes_as_many_events_as_a_new_one_and_nobody_gets_them() {
    let receiver = WebhookReceiver::start().unwrap();
    let with_push = app().webhook(&Webhook::push("crm", &receiver.url(), CREATED));
    let app = (0..PULL_WEBHOOKS).fold(with_push, |app, number| {
        app.webhook(&Webhook::pull(&format!("sync{number}"), "shop", "fetches", CREATED))
    });
    let test = AdministrationTest::start_with(app, &[]).await;
    let test_app = &test.test_app;
    test_app.sql(RECORD_ROWS).await;
    let written = || test_app.query_number("SELECT count(*) FROM written");
    let never_due = || test_app.query_number("SELECT count(*) FROM written WHERE due_at = 'infinity'");

    test_app.register_and_confirm(VERIFIED).await;
    assert_eq!(written().await, WEBHOOKS);
    test_app.register(UNVERIFIED).await;
    assert_eq!((written().await, never_due().await), (2 * WEBHOOKS, 0));
    for (times, email) in [(3, VERIFIED), (4, UNVERIFIED), (5, UNVERIFIED)] {
        let again = test_app.client().register(test_app.id(), NAME, email, NEW_PASSWORD).await;
        again.expect(StatusCode::OK);
        assert_eq!((written().await, never_due().await), (times * WEBHOOKS, (times - 2) * WEBHOOKS), "{email}");
    }

    let first = fetched_users(&test, 0).await;
    assert_eq!(first.len(), 2, "only new users are reported");
    for webhook in 1..PULL_WEBHOOKS {
        assert_eq!(fetched_users(&test, webhook).await, first);
    }
    receiver.wait_for(2).await;
    eventually("the rows are deleted", DELETION_LIMIT, || async {
        let left = "SELECT count(*) FROM webhook_events WHERE due_at = 'infinity'";
        (test_app.query_number(left).await == 0).then_some(())
    })
    .await;
    // The events of new users stay until they are acknowledged.
    test_app.age_webhook_leases(61).await;
    for webhook in 0..PULL_WEBHOOKS {
        assert_eq!(fetched_users(&test, webhook).await, first);
    }
    assert_eq!(receiver.events().len(), 2);
    let dead = "SELECT count(*) FROM webhook_events WHERE dead_at IS NOT NULL";
    assert_eq!(test_app.query_number(dead).await, 0);
}
