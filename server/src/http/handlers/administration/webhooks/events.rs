//! `GET /v1/{APPID}/webhooks/{WEBHOOK}/events`.

use std::{sync::Arc, time::Duration};

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::{Instant, sleep, timeout_at},
};

use super::webhook_key;
use crate::{
    domain::{app::App, rights::Right, webhook::EventBody},
    http::{
        Ports,
        administration::{NumberParameter, Query},
        authentication::Caller,
        error::{ErrorCode, Problem},
        handlers::administration::webhooks::webhook_not_found,
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

pub const RIGHT: Right = Right::FetchEvents;

/// How long a fetched event is not returned again, so that its consumer has time to process it.
const LEASE: Duration = Duration::from_secs(60);
/// How often a waiting call looks for events if it gets no notification.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How long a call waits after a notification, so that events of the same moment come in one response.
const COALESCING_DELAY: Duration = Duration::from_millis(50);

const LIMIT: NumberParameter = NumberParameter { name: "limit", min: 1, max: 100, default: 100 };
/// The parameter `wait`, in seconds.
const WAIT: NumberParameter = NumberParameter { name: "wait", min: 0, max: 20, default: 0 };

/// Events that the caller should process and then acknowledge.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "FetchedEventsResponse")]
pub struct FetchedEventsResponse {
    /// The oldest first. Empty if no event is due.
    pub events: Vec<FetchedEvent>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "FetchedEvent")]
pub struct FetchedEvent {
    /// The same for each delivery of the event.
    pub id: String,
    /// 1 if the event is fetched for the first time.
    pub attempt: u32,
    #[serde(flatten)]
    pub body: EventBody,
}

pub fn operation() -> Operation {
    Operation::new(
        "Fetch the events of a pull webhook",
        "An event comes again after 60 seconds, unless it is acknowledged. Events are kept for seven days.",
    )
    .requires_right(RIGHT)
    .query([
        LIMIT.describe("The maximum number of events."),
        WAIT.describe("The maximum time in seconds that the call waits for an event."),
    ])
    .response(Content::json::<FetchedEventsResponse>(json!({
        "events": [{
            "id": "0197a3c4-8f1e-7b3a-9c55-0d5f0a6c2b11",
            "attempt": 1,
            "type": "user.deleted",
            "timestamp": "2026-11-05T10:46:40Z",
            "data": {
                "app": "shop",
                "user_id": examples::USER_ID,
                "session_id": null,
                "version": 4,
                "detail": null,
            },
        }],
    })))
    .errors(&[ErrorCode::NotFound])
}

pub async fn handle<S: Ports>(
    state: &Arc<State<S>>,
    app: &App,
    caller: &Caller,
    request: InboundRequest,
) -> Result<Response, Problem> {
    let query = Query::parse(&request.uri, &["limit", "wait"])?;
    let limit = query.number(&LIMIT)?;
    let wait = query.number(&WAIT)?;
    let key = webhook_key(app, &request)?;
    let deadline = Instant::now() + Duration::from_secs(wait.into());
    let payload = format!("{}/{}", key.app, key.webhook);
    // Subscribes before the first query, so that no event is missed between the query and the wait.
    let mut notifications = state.stores.subscribe_to_new_events();
    loop {
        // During the wait, the App can be removed, and the webhook can get another consumer.
        let current = state.apps.get(app.id().as_str());
        let webhook = current.as_deref().and_then(|app| app.webhook(key.webhook.as_str()));
        let (namespace, name) = (caller.account.namespace(), caller.account.name());
        let webhook = webhook.filter(|webhook| webhook.is_pulled_by(namespace, name)).ok_or_else(webhook_not_found)?;
        let events = state.stores.fetch_events(&key, limit, LEASE).await?;
        if !events.is_empty() || Instant::now() >= deadline {
            let events = events.iter().map(|event| FetchedEvent {
                id: event.id.to_string(),
                attempt: event.attempts,
                body: event.body(app.id().as_str(), webhook),
            });
            return response::json(&FetchedEventsResponse { events: events.collect() });
        }
        let next_look = deadline.min(Instant::now() + POLL_INTERVAL);
        if timeout_at(next_look, wait_for_event(&mut notifications, &payload)).await.is_ok() {
            sleep(COALESCING_DELAY).await;
        }
    }
}

/// Waits until there may be new events of the webhook.
async fn wait_for_event(notifications: &mut Receiver<String>, webhook: &str) {
    loop {
        match notifications.recv().await {
            Ok(notified) if notified == webhook => return,
            // If notifications were missed, the call waits for the next poll. Otherwise all waiting calls would look
            // for events at the same time.
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            // No more notifications come, so the call only polls.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}
