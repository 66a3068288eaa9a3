//! The audit log, in Postgres and Redis.

use std::future::Future;

use latchkey_crds::types::AppId;
use time::OffsetDateTime;

use super::error::StoreResult;
use crate::domain::{
    audit::{ActivityEntry, Event, Refusal},
    user::UserId,
};

/// The audit log: events in Postgres, and refusals that are counted in Redis until they become a row in Postgres. No
/// request fails because an event or a refusal cannot be recorded. A metric counts the lost events and refusals.
pub trait AuditLog: Sync {
    /// Writes an event. Waits for at most one second; a longer write continues in the background.
    fn record(&self, app: &AppId, event: Event) -> impl Future<Output = ()> + Send;

    /// Like [`Self::record`], but does not wait. Meant for requests that also work without Postgres, and for requests
    /// that must take the same time with and without an event.
    fn record_later(&self, app: &AppId, event: Event);

    /// Counts a refusal in the background, without delaying the response.
    fn count_refusal(&self, app: &AppId, refusal: Refusal);

    /// Returns the newest 100 events of a user, including refusals, the newest first. Leaves out events before `since`.
    fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> impl Future<Output = StoreResult<Vec<ActivityEntry>>> + Send;
}
