//! Audit over both stores: events go to Postgres, refusals are counted in Redis first.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;

use super::Stores;
use crate::domain::{
    audit::{Activity, Event, Refusal},
    ports::{Audit, StoreError},
    user::UserId,
};

impl Audit for Stores {
    async fn record(&self, app: &AppId, event: Event) {
        self.postgres.record_event(app, event).await;
    }

    fn record_later(&self, app: &AppId, event: Event) {
        self.postgres.record_event_later(app, event);
    }

    fn refuse(&self, _app: &AppId, _refusal: Refusal) {}

    async fn activity(&self, app: &AppId, user: UserId, since: OffsetDateTime) -> Result<Vec<Activity>, StoreError> {
        self.postgres.activity(app, user, since).await
    }
}
