//! Rows that count the refusals of a quarter of an hour.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{domain::ports::StoreError, store::postgres::PostgresStore};

/// Rows that count an App's refusals in a quarter of an hour: one array for each column.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RefusalColumns {
    pub(crate) ids: Vec<Uuid>,
    pub(crate) kinds: Vec<String>,
    pub(crate) users: Vec<Option<Uuid>>,
    pub(crate) clients: Vec<Option<String>>,
    pub(crate) counts: Vec<i64>,
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Writes an App's refusals of the quarter of an hour that began at `began`. Idempotent.
    pub(crate) async fn insert_refusals(
        &self,
        app: &AppId,
        began: OffsetDateTime,
        rows: &RefusalColumns,
    ) -> Result<(), StoreError> {
        let mut call = self.begin_call("insert_refusals").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            r#"
            WITH gate AS (
                SELECT state FROM apps WHERE app_id = $1 FOR KEY SHARE
            )
            INSERT INTO audit_events (app_id, at, id, kind, user_id, ip, count)
            SELECT $1, $2, id, kind, user_id, ip::inet, count
            FROM unnest($3::uuid[], $4::text[], $5::uuid[], $6::text[], $7::bigint[])
                AS refusal (id, kind, user_id, ip, count)
            WHERE NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
            ON CONFLICT DO NOTHING
            "#,
            app.as_str(),
            began,
            &rows.ids,
            &rows.kinds,
            &rows.users as &[Option<Uuid>],
            &rows.clients as &[Option<String>],
            &rows.counts,
        );
        let written = timeout_at(deadline, query.execute(connection)).await;
        let written = call.end_call(written)?;
        self.shared.audit.metrics.events.inc_by(written.rows_affected());
        Ok(())
    }
}
