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

/// A webhook in the document of an App that a server serves.
#[derive(Clone, Debug)]
pub struct KnownWebhook {
    pub key: WebhookKey,
    /// The fingerprint of its settings and keys.
    pub fingerprint: String,
}

/// A webhook for which a server can send events.
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
    /// The fingerprint that the webhook had when its receiver responded with 410. The webhook is stopped while its
    /// fingerprint is the same.
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
    /// Tries again later, without counting an attempt: the App is not served, or has no push webhook of this name with
    /// a usable key now.
    Wait { after: Duration },
}

/// What is known about the delivery of a webhook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryState {
    /// The number of failed deliveries since the last successful one or since the last change to the webhook, whichever
    /// was later.
    pub failures: u32,
    pub stopped_for: Option<String>,
    /// The time of the oldest event that is not delivered.
    pub oldest: Option<OffsetDateTime>,
}

/// The size of the queue, for metrics. Each count stops at 100,000.
#[derive(Clone, Copy, Debug, Default)]
pub struct EventBacklog {
    pub due: u64,
    pub oldest_due_seconds: f64,
    pub dead: u64,
}

/// The events that webhooks report, in Postgres. Calls of the workers use two connections of the pool. Calls for
/// consumers use the same part of the pool as the calls of administrators.
pub trait WebhookEvents: Sync {
    /// Returns the webhooks, of any App, for which an event is due. Leaves out webhooks that pause after a failure.
    fn webhooks_with_due_events(&self) -> impl Future<Output = StoreResult<Vec<WebhookKey>>> + Send;

    /// Claims up to `limit` due events of these webhooks for the time `lease`, but for each namespace at most as many
    /// as the [`ClaimableWebhook::room`] of its webhooks. The webhooks take turns, and the oldest due event of a
    /// webhook is claimed first. All servers together claim at most 16 events of a webhook at a time. After 10
    /// consecutive failures of a webhook, they claim one of its events at a time, with pauses.
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
    /// within the time `lease` can be fetched again.
    fn fetch_events(
        &self,
        webhook: &WebhookKey,
        limit: u16,
        lease: Duration,
    ) -> impl Future<Output = StoreResult<Vec<QueuedEvent>>> + Send;

    /// Removes acknowledged events, and returns how many were removed.
    fn acknowledge_events(&self, webhook: &WebhookKey, ids: &[Uuid]) -> impl Future<Output = StoreResult<u64>> + Send;

    /// Returns a receiver of messages about possible new events. A message is the appID, a slash and the name of the
    /// webhook. Messages can be lost, so callers must also poll.
    fn subscribe_to_new_events(&self) -> broadcast::Receiver<String>;

    /// Returns the delivery states of these webhooks. Also records that a server has these webhooks, because the events
    /// of a webhook that no server has are deleted. Also resets the failures of a webhook that has changed.
    fn delivery_states(
        &self,
        webhooks: &[KnownWebhook],
    ) -> impl Future<Output = StoreResult<BTreeMap<WebhookKey, DeliveryState>>> + Send;

    /// Deletes dummy events. They are never due: they were written only so that a registration with a known address
    /// takes as long as one with a new address.
    fn delete_dummy_events(&self) -> impl Future<Output = StoreResult<u64>> + Send;

    fn event_backlog(&self) -> impl Future<Output = StoreResult<EventBacklog>> + Send;
}
