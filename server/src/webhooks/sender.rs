//! Sends one event to its receiver, as Standard Webhooks specifies
//! (<https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md>).

use std::{collections::HashMap, sync::Arc, time::Duration};

use http::{
    HeaderMap, Request, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use tokio::time::timeout;

use super::worker::Sender;
use crate::{
    config::Apps,
    domain::{
        clock::Env,
        identity::UnavailableReason,
        ports::{ClaimedEvent, EventOutcome},
        webhook::{Delivery, PushTarget, SigningKeys, Webhook, retry_delay},
    },
    outbound::{
        OutboundPolicy,
        client::{OutboundClient, PoolLimits},
        proxy::OutboundProxy,
    },
};

/// Timeout of a delivery.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of bytes of a response body that are read, so that the connection can be used again. Nothing of
/// the body is kept.
const MAX_DISCARDED_BYTES: usize = 64 * 1024;
/// The maximum time in which the body of a response is read.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);
/// The limits of idle connections. Few connections are kept, and only briefly, because an installation can have many
/// receivers.
const POOL: PoolLimits = PoolLimits { max_idle_per_host: 1, idle_timeout: Duration::from_secs(5) };
/// The delay until the next attempt for an event if this server does not know the webhook now, or has no key for its
/// events.
const UNKNOWN_WEBHOOK_DELAY: Duration = Duration::from_secs(30);

/// Sends events to the receivers of all Apps.
pub struct EventSender {
    apps: Arc<Apps>,
    env: Arc<Env>,
    client: OutboundClient,
}

/// Why a delivery failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum DeliveryError {
    #[error("the URL of the receiver does not begin with https://")]
    NotHttps,
    #[error("the receiver cannot be called: {0}")]
    Unavailable(UnavailableReason),
    #[error("the receiver responded with status {}", status.as_u16())]
    Status { status: StatusCode, retry_after: Option<Duration> },
}

// === impl EventSender ===

impl EventSender {
    pub fn new(apps: Arc<Apps>, env: Arc<Env>, reach: OutboundPolicy, proxy: OutboundProxy) -> Self {
        Self { apps, env, client: OutboundClient::new(reach, proxy, HashMap::new(), Vec::new(), POOL) }
    }

    async fn post(
        &self,
        push: &PushTarget,
        keys: &SigningKeys,
        claimed: &ClaimedEvent,
        webhook: &Webhook,
    ) -> Result<(), DeliveryError> {
        if !self.client.allows_url(push.url.as_str()) {
            return Err(DeliveryError::NotHttps);
        }
        let body = claimed.event.body(claimed.key.app.as_str(), webhook);
        let body = serde_json::to_string(&body).expect("the body has only text keys");
        let (id, timestamp) = (claimed.event.id.to_string(), self.env.now().unix_timestamp());
        let request = Request::post(push.url.as_str())
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", &id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", keys.sign(&id, timestamp, &body))
            .body(Full::from(body))
            .map_err(|_| DeliveryError::Unavailable(UnavailableReason::NameUnknown))?;
        let response = timeout(DELIVERY_TIMEOUT, self.client.request(request)).await;
        let response = response.unwrap_or(Err(UnavailableReason::Timeout)).map_err(DeliveryError::Unavailable)?;
        let (head, body) = response.into_parts();
        // Only the status matters. The body is read so that the connection can be used again.
        let _ = timeout(DISCARD_TIMEOUT, discard(body)).await;
        if head.status.is_success() {
            return Ok(());
        }
        Err(DeliveryError::Status { status: head.status, retry_after: retry_after(&head.headers) })
    }

    fn failure(&self, claimed: &ClaimedEvent, webhook: &Webhook, error: DeliveryError) -> EventOutcome {
        let retry_after = match error {
            DeliveryError::Status { status: StatusCode::GONE, .. } => {
                return EventOutcome::Gone { fingerprint: webhook.fingerprint.clone(), error: error.to_string() };
            }
            DeliveryError::Status { retry_after, .. } => retry_after,
            DeliveryError::NotHttps | DeliveryError::Unavailable(_) => None,
        };
        let (event, random_unit) = (&claimed.event, self.env.random_unit());
        match retry_delay(event.at, event.attempts, retry_after, self.env.now(), random_unit) {
            Some(after) => EventOutcome::Failed { after, error: error.to_string() },
            None => EventOutcome::GivenUp { error: error.to_string() },
        }
    }
}

impl Sender for EventSender {
    fn namespace_if_sendable(&self, app: &str, webhook: &str) -> Option<String> {
        let app = self.apps.get(app)?;
        let webhook = app.webhook(webhook)?;
        let has_keys = matches!(&webhook.delivery, Delivery::Push(PushTarget { keys: Some(_), .. }));
        has_keys.then(|| app.doc.namespace.clone())
    }

    async fn send(&self, claimed: &ClaimedEvent) -> EventOutcome {
        let app = self.apps.get(claimed.key.app.as_str());
        let webhook = app.as_deref().and_then(|app| app.webhook(claimed.key.webhook.as_str()));
        let Some((webhook, Delivery::Push(push))) = webhook.map(|webhook| (webhook, &webhook.delivery)) else {
            return EventOutcome::Wait { after: UNKNOWN_WEBHOOK_DELAY };
        };
        let Some(keys) = &push.keys else { return EventOutcome::Wait { after: UNKNOWN_WEBHOOK_DELAY } };
        if claimed.stopped_for.as_ref() == Some(&webhook.fingerprint) {
            return EventOutcome::Stopped {
                error: "the receiver responded with status 410 earlier; change the webhook or its Secret, and retry"
                    .to_owned(),
            };
        }
        match self.post(push, keys, claimed, webhook).await {
            Ok(()) => EventOutcome::Sent,
            Err(error) => self.failure(claimed, webhook, error),
        }
    }
}

/// Reads and discards the body. Errors are ignored, because the status has been received.
async fn discard(mut body: Incoming) {
    let mut discarded = 0;
    while let Some(Ok(frame)) = body.frame().await {
        discarded += frame.data_ref().map_or(0, bytes::Bytes::len);
        if discarded > MAX_DISCARDED_BYTES {
            return;
        }
    }
}

/// Returns `Retry-After` if it is a number of seconds. Any other form is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}
