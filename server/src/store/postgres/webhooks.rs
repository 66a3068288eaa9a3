//! The events that webhooks report: queued in the transaction of their audit event, claimed by servers that push them,
//! fetched by consumers that pull them.

use std::{collections::BTreeMap, time::Duration};

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::sync::broadcast;
use uuid::Uuid;

use super::CallError;
use crate::{
    domain::{
        administration::UserState,
        audit::EventKind,
        ports::{
            ClaimableWebhook, ClaimedEvent, DeliveryState, EventBacklog, EventOutcome, KnownWebhook, StoreError,
            WebhookEvents, WebhookKey,
        },
        webhook::{QueuedEvent, UserProfile},
    },
    store::Stores,
};

mod backlog;
mod claim;
mod fetch;
mod finish;
mod insert;
mod states;
mod upkeep;

pub(super) use insert::insert;

/// The NOTIFY channel. The payload is the appID, a slash and the name of the webhook.
pub(super) const CHANNEL: &str = "latchkey_webhooks";
/// Maximum number of unread messages of one subscriber (`subscribe_to_new_events`). A slower subscriber misses
/// messages.
pub(super) const SUBSCRIBER_CAPACITY: usize = 64;
/// After this number of failures in a row, the events of a webhook are sent one at a time, with a pause after each
/// failure.
const MANY_FAILURES: i32 = 10;
/// How many calls to Postgres the webhook workers of a server can run at the same time (specification: Administration,
/// Webhooks).
pub(super) const CONNECTIONS: usize = 2;

/// A claimed or fetched row of `webhook_events`, with the columns of its user that a profile contains.
struct EventRow {
    app_id: String,
    webhook: String,
    id: Uuid,
    kind: String,
    at: OffsetDateTime,
    user_id: Option<Uuid>,
    session_id: Option<Uuid>,
    version: Option<i64>,
    detail: Option<serde_json::Value>,
    attempts: i32,
    lease_until: OffsetDateTime,
    stopped_for: Option<String>,
    is_user_present: bool,
    email: Option<String>,
    is_verified: bool,
    name: Option<String>,
    is_disabled: bool,
    is_contested: bool,
    external_id: Option<String>,
    user_version: Option<i64>,
}

/// A query that leases events and returns them with their users. `$claimed` is an UPDATE of `webhook_events` that
/// returns all columns.
macro_rules! event_query {
    ($claimed:tt, $($arguments:tt)*) => {
        sqlx::query_as!(
            EventRow,
            "WITH claimed AS (" + $claimed + r#")
            SELECT claimed.app_id AS "app_id!", claimed.webhook AS "webhook!", claimed.id AS "id!",
                claimed.kind AS "kind!", claimed.at AS "at!", claimed.user_id, claimed.session_id, claimed.version,
                claimed.detail, claimed.attempts AS "attempts!", claimed.lease_until AS "lease_until!",
                webhooks.stopped_for AS "stopped_for?", users.id IS NOT NULL AS "is_user_present!",
                users.email AS "email?", users.email_verified_at IS NOT NULL AS "is_verified!", users.name AS "name?",
                users.disabled_at IS NOT NULL AS "is_disabled!", coalesce(users.contested, false) AS "is_contested!",
                users.external_id AS "external_id?", users.version AS "user_version?"
            FROM claimed
                LEFT JOIN users ON users.app_id = claimed.app_id AND users.id = claimed.user_id
                LEFT JOIN webhooks ON webhooks.app_id = claimed.app_id AND webhooks.name = claimed.webhook
            ORDER BY claimed.at, claimed.id
            "#,
            $($arguments)*
        )
    };
}
use event_query;

/// Returns the names of the event kinds that this server can deliver. A newer server may have queued other kinds.
fn known_kinds() -> Vec<String> {
    let kinds = EventKind::ALL.into_iter().filter(|kind| kind.webhook_event().is_some());
    kinds.map(|kind| kind.as_str().to_owned()).collect()
}

/// Returns the columns app_id and name of webhooks, for UNNEST.
fn key_columns<'a>(webhooks: impl IntoIterator<Item = &'a WebhookKey>) -> (Vec<String>, Vec<String>) {
    webhooks.into_iter().map(|key| (key.app.to_string(), key.webhook.to_string())).unzip()
}

/// Returns the keys of the webhooks in these columns. Leaves out keys with a name that only a newer server accepts.
fn known_keys<'a>(columns: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<WebhookKey> {
    columns.filter_map(|(app, webhook)| key_of(app, webhook).ok()).collect()
}

/// Parses the key of a webhook from its columns app_id and name.
fn key_of(app: &str, webhook: &str) -> Result<WebhookKey, CallError> {
    let (app, webhook) = (app.parse().ok(), webhook.parse().ok());
    app.zip(webhook).map(|(app, webhook)| WebhookKey { app, webhook }).ok_or(CallError::unexpected_row())
}

/// Deletes up to `max_rows` events of an App, and the states of its webhooks. Returns how many events were deleted.
pub(super) async fn delete_of_app(
    connection: &mut PgConnection,
    app: &AppId,
    max_rows: i64,
) -> Result<u64, sqlx::Error> {
    // No limit is needed: an App has at most a few rows in this table.
    sqlx::query!("DELETE FROM webhooks WHERE app_id = $1", app.as_str()).execute(&mut *connection).await?;
    let deleted = sqlx::query!(
        "DELETE FROM webhook_events
         USING (SELECT webhook, id FROM webhook_events WHERE app_id = $1 LIMIT $2) AS batch
         WHERE webhook_events.app_id = $1 AND webhook_events.webhook = batch.webhook AND webhook_events.id = batch.id",
        app.as_str(),
        max_rows
    )
    .execute(connection)
    .await?;
    Ok(deleted.rows_affected())
}

// === impl EventRow ===

impl TryFrom<EventRow> for ClaimedEvent {
    type Error = CallError;

    fn try_from(mut row: EventRow) -> Result<Self, CallError> {
        let key = key_of(&row.app_id, &row.webhook)?;
        let (lease_until, stopped_for) = (row.lease_until, row.stopped_for.take());
        Ok(Self { key, event: QueuedEvent::try_from(row)?, lease_until, stopped_for })
    }
}

impl TryFrom<EventRow> for QueuedEvent {
    type Error = CallError;

    fn try_from(mut row: EventRow) -> Result<Self, CallError> {
        let profile = row.take_profile();
        Ok(Self {
            id: row.id,
            attempts: u32::try_from(row.attempts).map_err(|_| CallError::unexpected_row())?,
            kind: EventKind::from_name(&row.kind).ok_or(CallError::unexpected_row())?,
            at: row.at,
            user: row.user_id,
            session: row.session_id,
            version: row.version,
            detail: row.detail,
            profile,
        })
    }
}

impl EventRow {
    /// Returns the profile of the user. `None` if there is no such user.
    fn take_profile(&mut self) -> Option<UserProfile> {
        if !self.is_user_present {
            return None;
        }
        let state = UserState::of(self.is_disabled, self.is_contested, self.email.is_some() && !self.is_verified);
        Some(UserProfile {
            email: self.email.take(),
            email_verified: self.is_verified,
            name: self.name.take().unwrap_or_default(),
            state: state.as_str(),
            external_id: self.external_id.take(),
            version: self.user_version.unwrap_or_default(),
        })
    }
}

impl WebhookEvents for Stores {
    async fn webhooks_with_due_events(&self) -> Result<Vec<WebhookKey>, StoreError> {
        self.postgres.webhooks_with_due_events().await
    }

    async fn claim_events(
        &self,
        webhooks: &[ClaimableWebhook],
        limit: usize,
        lease: Duration,
    ) -> Result<Vec<ClaimedEvent>, StoreError> {
        self.postgres.claim_webhook_events(webhooks, limit, lease).await
    }

    async fn finish_event(&self, claimed: &ClaimedEvent, outcome: EventOutcome) -> Result<(), StoreError> {
        self.postgres.finish_webhook_event(claimed, outcome).await
    }

    async fn fetch_events(
        &self,
        webhook: &WebhookKey,
        limit: u16,
        lease: Duration,
    ) -> Result<Vec<QueuedEvent>, StoreError> {
        self.postgres.fetch_webhook_events(webhook, limit, lease).await
    }

    async fn acknowledge_events(&self, webhook: &WebhookKey, ids: &[Uuid]) -> Result<u64, StoreError> {
        self.postgres.acknowledge_webhook_events(webhook, ids).await
    }

    fn subscribe_to_new_events(&self) -> broadcast::Receiver<String> {
        self.postgres.shared.new_events.subscribe()
    }

    async fn delivery_states(
        &self,
        webhooks: &[KnownWebhook],
    ) -> Result<BTreeMap<WebhookKey, DeliveryState>, StoreError> {
        self.postgres.webhook_delivery_states(webhooks).await
    }

    async fn delete_dummy_events(&self) -> Result<u64, StoreError> {
        self.postgres.delete_dummy_webhook_events().await
    }

    async fn event_backlog(&self) -> Result<EventBacklog, StoreError> {
        self.postgres.webhook_backlog().await
    }
}
