//! How a server divides its concurrent deliveries among namespaces.

use std::time::{Duration, Instant};

use latchkey_tests::{
    builders::{App, Webhook},
    stack::Stack,
    webhook_receiver::{Reply, WebhookReceiver},
};

use super::{CREATED, EMAIL, app, create_user};
use crate::administration::AdministrationTest;

/// Maximum number of concurrent deliveries for one namespace: half of the maximum of a server.
const NAMESPACE_SHARE: usize = 32;
/// Maximum delay of an event in the other namespace: less than the time after which the server gives up on a receiver
/// that hangs (10 s).
const DELAY_LIMIT: Duration = Duration::from_secs(5);

#[tokio::test]
async fn one_namespace_uses_at_most_half_of_the_deliveries_of_a_server() {
    let (slow, fast) = (WebhookReceiver::start().unwrap(), WebhookReceiver::start().unwrap());
    slow.set_reply(Reply::Hang);
    // Each webhook can have 16 requests in flight, so the four webhooks of this namespace could use all 64 deliveries.
    let loud = || -> App {
        let app = app().namespace("loud");
        let webhook = |name: &str| Webhook::push(name, &slow.url(), CREATED);
        app.webhook(&webhook("one")).webhook(&webhook("two"))
    };
    let apps = [loud(), loud()];
    let builder = apps.iter().fold(Stack::builder(), |builder, app| builder.app(app));
    let quiet = app().webhook(&Webhook::push("crm", &fast.url(), CREATED));
    let test = AdministrationTest::start_on(builder, quiet, &[]).await;
    // Inserts 100 events that are due at the same moment.
    test.test_app
        .sql(&format!(
            "INSERT INTO webhook_events (app_id, webhook, id, kind, at)
             SELECT app_id, webhook, gen_random_uuid(), 'registered', now()
             FROM unnest(ARRAY['{}', '{}']) AS app_id, unnest(ARRAY['one', 'two']) AS webhook, generate_series(1, 25)",
            apps[0].id(),
            apps[1].id()
        ))
        .await;
    slow.wait_for(NAMESPACE_SHARE).await;

    let created = Instant::now();
    let user = create_user(&test.admin(), EMAIL).await;
    let event = fast.wait_for(1).await.remove(0);
    assert_eq!(event.body["data"]["user_id"], user.as_str());
    let delay = event.at.saturating_duration_since(created);
    assert!(delay < DELAY_LIMIT, "the event of the other namespace arrived after {delay:?}");
    // No further request has begun, so none has been given up yet.
    assert_eq!((slow.events().len(), slow.max_in_flight()), (NAMESPACE_SHARE, NAMESPACE_SHARE));
}
