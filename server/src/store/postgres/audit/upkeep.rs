//! Maintenance of the table of audit events: partitions by month, and deletion of old events.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::timeout_at;

use crate::{domain::ports::StoreError, store::postgres::PostgresStore};

// === impl PostgresStore ===

impl PostgresStore {
    /// Returns whether this server must do the maintenance now. If so, no other server does the maintenance until
    /// `interval` has passed.
    pub(crate) async fn try_start_audit_upkeep(&self, interval: Duration) -> Result<bool, StoreError> {
        let mut call = self.begin_call("audit_turn").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "UPDATE audit_upkeep SET next_at = statement_timestamp() + make_interval(secs => $1)
             WHERE next_at <= statement_timestamp()",
            interval.as_secs_f64()
        );
        let updated = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(updated)?.rows_affected() > 0)
    }

    /// Creates the missing partitions of this month and of the next `months_ahead` months. Returns how many partitions
    /// it created, or `None` if this server's role is not permitted to create partitions.
    pub(crate) async fn create_audit_partitions(&self, months_ahead: i32) -> Result<Option<i32>, StoreError> {
        let mut call = self.begin_call("make_audit_months").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_scalar!(r#"SELECT latchkey_audit_make_months($1) AS "made!""#, months_ahead);
        let result = timeout_at(deadline, query.fetch_one(connection)).await;
        call.end_call(result.map(if_permitted))
    }

    /// Drops the partitions of months that ended by `before`, if they contain only rows of these Apps. Returns how many
    /// partitions it dropped, or `None` if this server's role is not permitted to drop partitions.
    pub(crate) async fn drop_audit_partitions(
        &self,
        before: OffsetDateTime,
        apps: &[String],
    ) -> Result<Option<i32>, StoreError> {
        let mut call = self.begin_call("drop_audit_months").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_scalar!(r#"SELECT latchkey_audit_drop_months($1, $2) AS "dropped!""#, before, apps);
        let result = timeout_at(deadline, query.fetch_one(connection)).await;
        call.end_call(result.map(if_permitted))
    }

    /// For each App, deletes up to `max_per_app` events that are older than the App's time in `before`. Returns how
    /// many events it deleted.
    pub(crate) async fn delete_audit_events(
        &self,
        apps: &[String],
        before: &[OffsetDateTime],
        max_per_app: i64,
    ) -> Result<u64, StoreError> {
        let Some(latest) = before.iter().max() else { return Ok(0) };
        let mut call = self.begin_call("delete_audit_events").await?;
        let (connection, deadline) = call.parts();
        // The conditions with `latest` (`$3`) exclude newer partitions from the scan.
        let query = sqlx::query!(
            r#"
            DELETE FROM audit_events
            USING unnest($1::text[], $2::timestamptz[]) AS app (id, before), LATERAL (
                SELECT event.at, event.id FROM audit_events AS event
                WHERE event.app_id = app.id AND event.at < app.before AND event.at < $3
                ORDER BY event.at LIMIT $4
            ) AS old
            WHERE audit_events.app_id = app.id AND audit_events.at = old.at AND audit_events.id = old.id
                AND audit_events.at < $3
            "#,
            apps,
            before,
            *latest,
            max_per_app,
        );
        let deleted = timeout_at(deadline, query.execute(connection)).await;
        Ok(call.end_call(deleted)?.rows_affected())
    }
}

/// Returns the result of a database function, or `None` if this server's role is not permitted to call the function.
fn if_permitted(result: Result<i32, sqlx::Error>) -> Result<Option<i32>, sqlx::Error> {
    /// SQLSTATE `insufficient_privilege`.
    const INSUFFICIENT_PRIVILEGE: &str = "42501";
    match result {
        Ok(count) => Ok(Some(count)),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(INSUFFICIENT_PRIVILEGE) => Ok(None),
        Err(error) => Err(error),
    }
}
