//! The outbox, in Postgres.

use std::future::Future;

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use uuid::Uuid;

use super::error::StoreResult;
use crate::domain::{
    email::Email,
    mail::{EpochChange, Mail},
    user::UserId,
};

/// An outbox row that a worker has claimed until `lease_until`.
#[derive(Clone, Debug)]
pub struct ClaimedRow {
    pub id: Uuid,
    pub app: AppId,
    /// The number of failed attempts before this claim.
    pub attempts: u32,
    pub task: OutboxTask,
    pub lease_until: OffsetDateTime,
    /// The span of the request that caused the row, as a `traceparent`, if spans are exported.
    pub trace: Option<String>,
}

#[derive(Clone, Debug)]
pub enum OutboxTask {
    Mail(Mail),
    /// A mail about a change of the email address, and the previous email address, which gets the mail.
    MailToFormerAddress(Mail, Email),
    PropagateEpoch(EpochChange),
    /// The user's name has changed, and Redis may not have the new name.
    PropagateProfile(UserId),
    /// The user's groups have changed, and Redis may not have them.
    PropagateGroups(UserId),
}

/// What a worker does with a claimed row after an attempt.
#[derive(Clone, Debug)]
pub enum DeliveryOutcome {
    /// Removes the row.
    Done,
    /// Tries again later. `error` never contains text of the relay.
    Retry { at: OffsetDateTime, error: String },
    /// Waits without counting an attempt: a store is unavailable, the App is not served, or it has no relay now.
    Wait { at: OffsetDateTime },
    /// Keeps the row as a dead letter, which an administrator can inspect.
    Dead { error: String },
}

/// The outbox, in Postgres.
pub trait Outbox: Sync {
    /// Queues one mail in a separate transaction.
    fn enqueue(&self, app: &AppId, mail: Mail) -> impl Future<Output = StoreResult<()>> + Send;

    /// Claims up to `most` due rows for the time `lease`. The Apps take turns, and the oldest row of an App is claimed
    /// first. All servers together claim at most `per_app` rows of one App at a time.
    fn claim(
        &self,
        most: usize,
        per_app: usize,
        lease: std::time::Duration,
    ) -> impl Future<Output = StoreResult<Vec<ClaimedRow>>> + Send;

    /// Ends the claim. Does nothing if the lease has expired and another worker has claimed the row.
    fn finish(&self, claimed: &ClaimedRow, outcome: DeliveryOutcome) -> impl Future<Output = StoreResult<()>> + Send;

    /// Removes the row of this epoch. Must not be called before Redis has the epoch and, if there are replicas, one of
    /// the replicas has it too.
    fn remove_epoch_row(&self, app: &AppId, change: &EpochChange) -> impl Future<Output = StoreResult<()>> + Send;

    /// Waits until there may be new rows. An implementation can wait forever, because the workers also poll.
    fn wait_for_notification(&self) -> impl Future<Output = ()> + Send;

    /// Returns the numbers for the metrics: how many rows are due, how long the oldest of them has waited, and how many
    /// rows are dead letters.
    fn backlog(&self) -> impl Future<Output = StoreResult<OutboxBacklog>> + Send;
}

#[derive(Clone, Copy, Debug, Default)]
pub struct OutboxBacklog {
    pub due: u64,
    pub oldest_due_seconds: f64,
    pub dead: u64,
}
