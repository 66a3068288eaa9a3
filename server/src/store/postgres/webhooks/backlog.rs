//! The size of the queue of events, for metrics.

use tokio::time::timeout_at;

use crate::{
    domain::ports::{EventBacklog, StoreError},
    store::postgres::PostgresStore,
};

/// Each count stops at this number, because the exact number does not matter above it.
const MAX_COUNTED: i64 = 100_000;

impl PostgresStore {
    pub(super) async fn webhook_backlog(&self) -> Result<EventBacklog, StoreError> {
        let mut call = self.begin_webhook_call("webhook_backlog").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            r#"
            SELECT
                (SELECT count(*) FROM (
                    SELECT FROM webhook_events WHERE dead_at IS NULL AND due_at <= statement_timestamp() LIMIT $1
                ) AS due) AS "due!",
                coalesce(extract(epoch FROM statement_timestamp() - (
                    SELECT min(due_at) FROM webhook_events WHERE dead_at IS NULL AND due_at <= statement_timestamp()
                ))::float8, 0) AS "oldest!",
                (SELECT count(*) FROM (
                    SELECT FROM webhook_events WHERE dead_at IS NOT NULL LIMIT $1
                ) AS dead) AS "dead!"
            "#,
            MAX_COUNTED
        );
        let row = timeout_at(deadline, query.fetch_one(connection)).await;
        let row = call.end_call(row)?;
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        Ok(EventBacklog { due: count(row.due), oldest_due_seconds: row.oldest, dead: count(row.dead) })
    }
}
