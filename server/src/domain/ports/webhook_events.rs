//! The events that webhooks report, in Postgres.

use std::{collections::BTreeMap, future::Future, time::Duration};

use latchkey_crds::types::{AppId, WebhookName};
use time::OffsetDateTime;
use tokio::sync::broadcast;
use uuid::Uuid;

use super::error::StoreResult;
use crate::domain::webhook::QueuedEvent;

/// A webhook of an App.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WebhookKey {
    pub app: AppId,
    pub webhook: WebhookName,
}

/// A webhook that a server has in its document of the App.
#[derive(Clone, Debug)]
pub struct KnownWebhook {
    pub key: WebhookKey,
    /// The fingerprint of its settings and keys.
    pub fingerprint: String,
}

/// A webhook whose events a server can send.
#[derive(Clone, Debug)]
pub struct ClaimableWebhook {
    pub key: WebhookKey,
    /// The namespace of the App.
    pub namespace: String,
    /// How many more events of Apps in this namespace the server can send now.
    pub room: usize,
}

/// An event that a server has claimed until `lease_until`, to send it to the receiver of the webhook.
#[derive(Clone, Debug)]
pub struct ClaimedEvent {
    pub key: WebhookKey,
    pub event: QueuedEvent,
    pub lease_until: OffsetDateTime,
    /// The fingerprint of the webhook for which the receiver responded with 410.
    pub stopped_for: Option<String>,
}

/// What a server does with a claimed event after an attempt.
#[derive(Clone, Debug)]
pub enum EventOutcome {
    /// Removes the event.
    Sent,
    /// Tries again later. `error` never contains text of the receiver.
    Failed { after: Duration, error: String },
    /// Gives up the delivery: the event becomes a dead letter.
    GivenUp { error: String },
    /// The receiver responded with 410: the event becomes a dead letter, and the webhook with this fingerprint is
    /// stopped.
    Gone { fingerprint: String, error: String },
    /// The webhook is stopped: the event and the other due events of the webhook, up to 5,000, become dead letters
    /// without an attempt.
    Stopped { error: String },
    /// Tries again later, without counting an attempt: the App is not served, or has no such webhook now.
    Wait { after: Duration },
}

/// What is known about the delivery of a webhook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryState {
    /// The number of failed deliveries since the last successful one, and since the last change of the webhook.
    pub failures: u32,
    pub stopped_for: Option<String>,
    /// When the oldest event happened that is not delivered.
    pub oldest: Option<OffsetDateTime>,
}

/// The size of the queue, for metrics. Each count stops at 100,000.
#[derive(Clone, Copy, Debug, Default)]
pub struct EventBacklog {
    pub due: u64,
    pub oldest_due_seconds: f64,
    pub dead: u64,
}

/// The events that webhooks report, in Postgres. The calls of the workers use two connections of the pool; those for
/// consumers use the part of the administrators.
pub trait WebhookEvents: Sync {
    /// The webhooks with a due event, of all Apps.
    fn webhooks_with_due_events(&self) -> impl Future<Output = StoreResult<Vec<WebhookKey>>> + Send;

    /// Claims up to `limit` due events of these webhooks for the time `lease`, for each namespace at most as many as it
    /// has room. The webhooks take turns; the oldest due event of a webhook is claimed first. All servers together claim
    /// at most 16 events of a webhook at a time, and one at a time, with pauses, after 10 failures in a row.
    fn claim_events(
        &self,
        webhooks: &[ClaimableWebhook],
        limit: usize,
        lease: Duration,
    ) -> impl Future<Output = StoreResult<Vec<ClaimedEvent>>> + Send;

    /// Ends the claim. Does nothing if the lease has expired and another server has claimed the event.
    fn finish_event(
        &self,
        claimed: &ClaimedEvent,
        outcome: EventOutcome,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Leases up to `limit` events to the consumer of a webhook, the oldest first. An event that is not acknowledged
    /// within the time `lease` is fetched again.
    fn fetch_events(
        &self,
        webhook: &WebhookKey,
        limit: u16,
        lease: Duration,
    ) -> impl Future<Output = StoreResult<Vec<QueuedEvent>>> + Send;

    /// Removes events, and returns how many.
    fn acknowledge_events(&self, webhook: &WebhookKey, ids: &[Uuid]) -> impl Future<Output = StoreResult<u64>> + Send;

    /// Receives the appID, a slash and the name of a webhook for which there may be new events. A receiver can miss messages, so it also polls.
    fn subscribe_to_new_events(&self) -> broadcast::Receiver<String>;

    /// The states of these webhooks. Also records that a server has them, so that their events are not swept. If a
    /// webhook has changed, its failures do not count any more.
    fn delivery_states(
        &self,
        webhooks: &[KnownWebhook],
    ) -> impl Future<Output = StoreResult<BTreeMap<WebhookKey, DeliveryState>>> + Send;

    /// Deletes events that are never due, which were written only so that two requests take the same time.
    fn delete_undeliverable_events(&self) -> impl Future<Output = StoreResult<u64>> + Send;

    fn event_backlog(&self) -> impl Future<Output = StoreResult<EventBacklog>> + Send;
}
