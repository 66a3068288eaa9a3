//! Leases events to the consumer of a webhook, and removes acknowledged events.

use std::time::Duration;

use tokio::time::timeout_at;
use uuid::Uuid;

use super::{EventRow, event_query, known_kinds};
use crate::{
    domain::{
        ports::{StoreError, WebhookKey},
        webhook::QueuedEvent,
    },
    store::postgres::PostgresStore,
};

impl PostgresStore {
    pub(super) async fn fetch_webhook_events(
        &self,
        webhook: &WebhookKey,
        limit: u16,
        lease: Duration,
    ) -> Result<Vec<QueuedEvent>, StoreError> {
        let mut call = self.begin_administration("fetch_events").await?;
        let (connection, deadline) = call.parts();
        // `taken` is materialized: a subquery with LIMIT that is evaluated for each row would take other rows each
        // time. An event is due again when its lease ends. Each fetch counts as an attempt.
        let query = event_query!(
            "
                WITH taken AS MATERIALIZED (
                    SELECT event.app_id, event.webhook, event.id FROM webhook_events AS event
                    WHERE event.app_id = $1 AND event.webhook = $2 AND event.dead_at IS NULL
                        AND event.due_at <= statement_timestamp() AND event.kind = ANY ($5)
                    ORDER BY event.due_at, event.id
                    LIMIT $3
                    FOR UPDATE SKIP LOCKED
                )
                UPDATE webhook_events
                SET attempts = attempts + 1,
                    lease_until = statement_timestamp() + make_interval(secs => $4),
                    due_at = statement_timestamp() + make_interval(secs => $4)
                FROM taken
                WHERE webhook_events.app_id = taken.app_id AND webhook_events.webhook = taken.webhook
                AND webhook_events.id = taken.id
                RETURNING webhook_events.*
            ",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            i64::from(limit),
            lease.as_secs_f64(),
            &known_kinds(),
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        let events: Result<_, _> = call.end_call(rows)?.into_iter().map(QueuedEvent::try_from).collect();
        events.map_err(|error| self.record_error(error))
    }

    pub(super) async fn acknowledge_webhook_events(
        &self,
        webhook: &WebhookKey,
        ids: &[Uuid],
    ) -> Result<u64, StoreError> {
        let mut call = self.begin_administration("acknowledge_events").await?;
        let (connection, deadline) = call.parts();
        // Locks the rows in a fixed order, so that two calls with the same ids do not deadlock.
        let query = sqlx::query!(
            "WITH acknowledged AS (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND id = ANY ($3) AND dead_at IS NULL
                ORDER BY id FOR UPDATE
             )
             DELETE FROM webhook_events USING acknowledged
             WHERE webhook_events.app_id = acknowledged.app_id AND webhook_events.webhook = acknowledged.webhook
                AND webhook_events.id = acknowledged.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            ids,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }
}
