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
    Failed { at: OffsetDateTime, error: String },
    /// Gives up the delivery: the event becomes a dead letter.
    GivenUp { error: String },
    /// The receiver responded with 410: the event becomes a dead letter, and the webhook with this fingerprint is
    /// stopped.
    Gone { fingerprint: String, error: String },
    /// The webhook is stopped: the event becomes a dead letter without an attempt.
    Stopped { error: String },
    /// Tries again later, without counting an attempt: the App is not served, or has no such webhook now.
    Wait { at: OffsetDateTime },
}

/// What is known about the delivery of a webhook.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryState {
    /// The number of failed deliveries since the last successful one.
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

/// The events that webhooks report, in Postgres. All calls together use two connections of the pool.
pub trait WebhookEvents: Sync {
    /// The webhooks with a due event, of all Apps.
    fn webhooks_with_due_events(&self) -> impl Future<Output = StoreResult<Vec<WebhookKey>>> + Send;

    /// Claims up to `limit` due events of these webhooks for the time `lease`. The webhooks take turns; the oldest due
    /// event of a webhook is claimed first. All servers together claim at most 16 events of a webhook at a time, and
    /// one at a time after 10 failures in a row.
    fn claim_events(
        &self,
        webhooks: &[WebhookKey],
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

    /// Receives the appID for which there may be new events. A receiver can miss messages, so it also polls.
    fn subscribe_to_new_events(&self) -> broadcast::Receiver<String>;

    /// The states of these webhooks. A webhook without events and deliveries is not in the result.
    fn delivery_states(
        &self,
        webhooks: &[WebhookKey],
    ) -> impl Future<Output = StoreResult<BTreeMap<WebhookKey, DeliveryState>>> + Send;

    fn event_backlog(&self) -> impl Future<Output = StoreResult<EventBacklog>> + Send;
}
