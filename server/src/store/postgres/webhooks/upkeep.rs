//! The hourly sweep: removes events of removed webhooks, old events, and the oldest events of a queue that is too long.

use tokio::time::timeout_at;

use super::{key_columns, key_of};
use crate::{
    domain::ports::{StoreError, WebhookKey},
    store::postgres::PostgresStore,
};

/// The maximum number of rows that one statement deletes. It takes some tens of milliseconds.
const BATCH: i64 = 5_000;
/// The maximum number of events of a webhook, with its dead letters.
const MAX_EVENTS: i64 = 1_000_000;

impl PostgresStore {
    /// The webhooks with events or with a state, of all Apps.
    pub(crate) async fn stored_webhooks(&self) -> Result<Vec<WebhookKey>, StoreError> {
        let mut call = self.begin_webhook_call("stored_webhooks").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            r#"
            WITH RECURSIVE stored AS (
                (SELECT app_id, webhook FROM webhook_events ORDER BY app_id, webhook LIMIT 1)
                UNION ALL
                SELECT later.app_id, later.webhook
                FROM stored CROSS JOIN LATERAL (
                    SELECT event.app_id, event.webhook FROM webhook_events AS event
                    WHERE (event.app_id, event.webhook) > (stored.app_id, stored.webhook)
                    ORDER BY event.app_id, event.webhook LIMIT 1
                ) AS later
            )
            SELECT app_id AS "app_id!", webhook AS "webhook!" FROM stored
            UNION SELECT app_id, name FROM webhooks
            "#
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        let keys: Result<_, _> = call.end_call(rows)?.iter().map(|row| key_of(&row.app_id, &row.webhook)).collect();
        keys.map_err(|error| self.record_error(error))
    }

    /// Deletes events of a webhook that the App does not have any more, and returns how many. 0 means that none is left.
    /// Events of the last five minutes stay: another server may have a newer document of the App.
    pub(crate) async fn delete_events_of_removed_webhook(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_removed_webhook").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH old AS MATERIALIZED (
                SELECT id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND at < statement_timestamp() - interval '5 minutes'
                LIMIT $3
             ), forgotten AS (
                DELETE FROM webhooks WHERE app_id = $1 AND name = $2 AND NOT EXISTS (SELECT FROM old)
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = $1 AND webhook_events.webhook = $2 AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Deletes dead letters of these webhooks that are older than 30 days, and returns how many.
    pub(crate) async fn delete_old_dead_events(&self, webhooks: &[WebhookKey]) -> Result<u64, StoreError> {
        let (apps, names) = key_columns(webhooks);
        let mut call = self.begin_webhook_call("delete_dead_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH old AS MATERIALIZED (
                SELECT event.app_id, event.webhook, event.id
                FROM unnest($1::text[], $2::text[]) AS wanted (app_id, name)
                CROSS JOIN LATERAL (
                    SELECT event.app_id, event.webhook, event.id FROM webhook_events AS event
                    WHERE event.app_id = wanted.app_id AND event.webhook = wanted.name
                        AND event.dead_at < statement_timestamp() - interval '30 days'
                    LIMIT $3
                ) AS event
                LIMIT $3
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            &apps,
            &names,
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Deletes events of a pull webhook that are older than seven days, and returns how many.
    pub(crate) async fn delete_old_pulled_events(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_old_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH old AS MATERIALIZED (
                SELECT id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND dead_at IS NULL
                    AND at < statement_timestamp() - interval '7 days'
                ORDER BY at LIMIT $3
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = $1 AND webhook_events.webhook = $2 AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// How many events of the webhook are too many.
    pub(crate) async fn excess_events(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("excess_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_scalar!(
            r#"
            SELECT count(*) AS "count!" FROM (
                SELECT FROM webhook_events WHERE app_id = $1 AND webhook = $2 LIMIT 2 * $3::bigint
            ) AS stored
            "#,
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            MAX_EVENTS,
        );
        let count = timeout_at(deadline, query.fetch_one(connection)).await;
        Ok(u64::try_from(call.end_call(count)? - MAX_EVENTS).unwrap_or(0))
    }

    /// Deletes up to `excess` events of the webhook: dead letters first, then the oldest events. Returns how many were
    /// deleted.
    pub(crate) async fn drop_events(&self, webhook: &WebhookKey, excess: u64) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("drop_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH dropped AS MATERIALIZED (
                (
                    SELECT id FROM webhook_events WHERE app_id = $1 AND webhook = $2 AND dead_at IS NOT NULL
                    ORDER BY dead_at LIMIT $3
                )
                UNION ALL
                (
                    SELECT id FROM webhook_events WHERE app_id = $1 AND webhook = $2 AND dead_at IS NULL
                    ORDER BY at LIMIT $3
                )
                LIMIT $3
             )
             DELETE FROM webhook_events USING dropped
             WHERE webhook_events.app_id = $1 AND webhook_events.webhook = $2 AND webhook_events.id = dropped.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            i64::try_from(excess).unwrap_or(i64::MAX).min(BATCH),
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }
}
