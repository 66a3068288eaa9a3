//! The hourly sweep: removes events of removed webhooks, old events, and the oldest events of a queue that is too long.

use tokio::time::timeout_at;

use super::known_keys;
use crate::{
    domain::ports::{StoreError, WebhookKey},
    store::postgres::PostgresStore,
};

/// The maximum number of rows that one statement deletes. Such a statement takes some tens of milliseconds.
const BATCH: i64 = 5_000;
/// The maximum number of events of a webhook, including its dead letters.
const MAX_EVENTS: i64 = 1_000_000;

impl PostgresStore {
    /// Returns every webhook, of any App, that has events or a row in `webhooks`.
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
        let rows = call.end_call(rows)?;
        Ok(known_keys(rows.iter().map(|row| (row.app_id.as_str(), row.webhook.as_str()))))
    }

    /// Deletes up to 5,000 events of a webhook that the App does not have any more, and returns how many. Events of the
    /// last five minutes stay. All events stay while another server still has the webhook, because its document of the
    /// App may be newer.
    pub(crate) async fn delete_events_of_removed_webhook(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_removed_webhook").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH seen AS (
                SELECT FROM webhooks
                WHERE app_id = $1 AND name = $2 AND seen_at > statement_timestamp() - interval '10 minutes'
             ), old AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND at < statement_timestamp() - interval '5 minutes'
                    AND NOT EXISTS (SELECT FROM seen)
                LIMIT $3
                FOR UPDATE SKIP LOCKED
             ), forgotten AS (
                DELETE FROM webhooks
                WHERE app_id = $1 AND name = $2 AND NOT EXISTS (SELECT FROM old) AND NOT EXISTS (SELECT FROM seen)
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Deletes up to 5,000 events of a webhook if all users of its App have been deleted, and returns how many.
    pub(crate) async fn delete_events_of_deleted_app(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_events_of_app").await?;
        let (connection, deadline) = call.parts();
        // The lock on the App's row prevents a new App from claiming the appID and queuing events meanwhile.
        let query = sqlx::query!(
            "WITH deleted AS MATERIALIZED (
                SELECT app_id FROM apps WHERE app_id = $1 AND state = 'deleted' FOR SHARE
             ), old AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND EXISTS (SELECT FROM deleted)
                LIMIT $3
                FOR UPDATE SKIP LOCKED
             ), forgotten AS (
                DELETE FROM webhooks
                WHERE app_id = $1 AND name = $2 AND NOT EXISTS (SELECT FROM old) AND EXISTS (SELECT FROM deleted)
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Deletes up to 5,000 dead letters of a webhook, and returns how many. For a push webhook, deletes dead letters
    /// older than 30 days. For a pull webhook, deletes all dead letters, which are from the time when it was a push
    /// webhook.
    pub(crate) async fn delete_old_dead_events(&self, webhook: &WebhookKey, is_pull: bool) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_dead_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH old AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND dead_at IS NOT NULL
                    AND ($4 OR dead_at < statement_timestamp() - interval '30 days')
                ORDER BY dead_at LIMIT $3
                FOR UPDATE SKIP LOCKED
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
            is_pull,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Deletes up to 5,000 events of a pull webhook that are older than seven days, and returns how many.
    pub(crate) async fn delete_old_pulled_events(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_old_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH old AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND dead_at IS NULL
                    AND at < statement_timestamp() - interval '7 days'
                ORDER BY at LIMIT $3
                FOR UPDATE SKIP LOCKED
             )
             DELETE FROM webhook_events USING old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Turns up to 5,000 events of a push webhook into dead letters, and returns how many. These events are older than
    /// 73 hours, so they could not be delivered within 72 hours. Without this function, a webhook with many failures
    /// would first try each of these events, one at a time. An event that has been due for less than an hour stays, so
    /// that a retried dead letter gets its attempt.
    pub(crate) async fn give_up_old_events(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("give_up_old_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH old AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE app_id = $1 AND webhook = $2 AND dead_at IS NULL
                    AND at < statement_timestamp() - interval '73 hours'
                    AND due_at < statement_timestamp() - interval '1 hour'
                    AND (lease_until IS NULL OR lease_until <= statement_timestamp())
                ORDER BY at LIMIT $3
                FOR UPDATE SKIP LOCKED
             )
             UPDATE webhook_events
             SET dead_at = statement_timestamp(), lease_until = NULL,
                error = 'the delivery was not possible within 72 hours'
             FROM old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            BATCH,
        );
        let given_up = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(given_up)?.rows_affected())
    }

    /// Deletes up to 5,000 dummy events, and returns how many. A dummy event is never due: a registration with a known
    /// address writes it only to take as long as one with a new address.
    pub(super) async fn delete_dummy_webhook_events(&self) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("delete_undeliverable").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH undeliverable AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events
                WHERE dead_at IS NULL AND due_at = 'infinity'
                LIMIT $1
                FOR UPDATE SKIP LOCKED
             )
             DELETE FROM webhook_events USING undeliverable AS old
             WHERE webhook_events.app_id = old.app_id AND webhook_events.webhook = old.webhook
                AND webhook_events.id = old.id",
            BATCH,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }

    /// Returns by how many events the queue of the webhook exceeds [`MAX_EVENTS`]. Counts only up to 100,000 excess
    /// events.
    pub(crate) async fn excess_events(&self, webhook: &WebhookKey) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("excess_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_scalar!(
            r#"
            SELECT count(*) AS "count!" FROM (
                SELECT FROM webhook_events WHERE app_id = $1 AND webhook = $2 LIMIT $3::bigint + 100000
            ) AS stored
            "#,
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            MAX_EVENTS,
        );
        let count = timeout_at(deadline, query.fetch_one(connection)).await;
        Ok(u64::try_from(call.end_call(count)? - MAX_EVENTS).unwrap_or(0))
    }

    /// Deletes up to `excess` events of the webhook, but at most 5,000: dead letters first, then the oldest events.
    /// Returns how many were deleted.
    pub(crate) async fn drop_events(&self, webhook: &WebhookKey, excess: u64) -> Result<u64, StoreError> {
        let mut call = self.begin_webhook_call("drop_events").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "WITH dead AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events WHERE app_id = $1 AND webhook = $2 AND dead_at IS NOT NULL
                ORDER BY dead_at LIMIT $3
                FOR UPDATE SKIP LOCKED
             ), oldest AS MATERIALIZED (
                SELECT app_id, webhook, id FROM webhook_events WHERE app_id = $1 AND webhook = $2 AND dead_at IS NULL
                ORDER BY at LIMIT $3 - (SELECT count(*) FROM dead)
                FOR UPDATE SKIP LOCKED
             )
             DELETE FROM webhook_events USING (SELECT * FROM dead UNION ALL SELECT * FROM oldest) AS dropped
             WHERE webhook_events.app_id = dropped.app_id AND webhook_events.webhook = dropped.webhook
                AND webhook_events.id = dropped.id",
            webhook.app.as_str(),
            webhook.webhook.as_str(),
            i64::try_from(excess).unwrap_or(i64::MAX).min(BATCH),
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }
}
