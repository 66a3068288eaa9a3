//! Dead letters of an App: lists them, and makes them due again.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{
    domain::{
        administration::DeadLetterRow,
        ports::{RetrySelection, RowPage, RowPosition, StoreError},
        user::UserId,
    },
    store::postgres::PostgresStore,
};

struct OutboxRow {
    id: Uuid,
    kind: String,
    user_id: Option<Uuid>,
    attempts: i32,
    created_at: OffsetDateTime,
    dead_at: OffsetDateTime,
    error: Option<String>,
}

/// A query of a page, with a condition.
macro_rules! page_query {
    ($condition:tt, $($arguments:tt)*) => {
        sqlx::query_as!(
            OutboxRow,
            r#"
            SELECT id, kind, user_id, attempts, created_at, dead_at AS "dead_at!", error FROM outbox
            WHERE app_id = $1 AND dead_at IS NOT NULL
                AND (dead_at, id) < (coalesce($2, 'infinity'::timestamptz), $3::uuid)
            "# + $condition + " ORDER BY dead_at DESC, id DESC LIMIT $4",
            $($arguments)*
        )
    };
}

impl PostgresStore {
    pub(super) async fn app_dead_letters(
        &self,
        app: &AppId,
        kind: Option<&'static str>,
        after: Option<RowPosition>,
        limit: u16,
    ) -> Result<RowPage<DeadLetterRow>, StoreError> {
        let mut call = self.begin_administration("app_dead_letters").await?;
        let (connection, deadline) = call.parts();
        // One more row than the page has, to know whether more follow.
        let rows = timeout_at(deadline, read_page(connection, app, kind, after, i64::from(limit) + 1)).await;
        let mut rows: Vec<_> = call.end_call(rows)?.into_iter().map(DeadLetterRow::from).collect();
        let has_more = rows.len() > usize::from(limit);
        rows.truncate(usize::from(limit));
        let next = rows.last().filter(|_| has_more).map(|row| RowPosition { at: row.dead_at, id: row.id });
        Ok(RowPage { rows, next })
    }

    pub(super) async fn retry_dead_letters(&self, app: &AppId, selection: RetrySelection) -> Result<u64, StoreError> {
        let RetrySelection::Ids(ids) = selection;
        let mut call = self.begin_administration("retry_dead_letters").await?;
        let (connection, deadline) = call.parts();
        let retried = timeout_at(deadline, retry(connection, app, &ids)).await;
        let retried = call.end_call(retried)?;
        if retried > 0 {
            self.notify_deliverer();
        }
        Ok(retried)
    }
}

async fn read_page(
    connection: &mut PgConnection,
    app: &AppId,
    kind: Option<&'static str>,
    after: Option<RowPosition>,
    limit: i64,
) -> Result<Vec<OutboxRow>, sqlx::Error> {
    let after_at = after.map(|after| after.at);
    let after_id = after.map_or(Uuid::max(), |after| after.id);
    match kind {
        None => page_query!("", app.as_str(), after_at, after_id, limit).fetch_all(connection).await,
        Some(kind) => {
            page_query!("AND kind = $5", app.as_str(), after_at, after_id, limit, kind).fetch_all(connection).await
        }
    }
}

/// Locks the rows in a fixed order, so that two calls with the same ids do not deadlock.
async fn retry(connection: &mut PgConnection, app: &AppId, ids: &[Uuid]) -> Result<u64, sqlx::Error> {
    let updated = sqlx::query!(
        "WITH dead AS (
            SELECT id FROM outbox
            WHERE app_id = $1 AND id = ANY ($2) AND dead_at IS NOT NULL
            ORDER BY id FOR UPDATE
         )
         UPDATE outbox
         SET dead_at = NULL, error = NULL, attempts = 0, due_at = statement_timestamp(), lease_until = NULL
         FROM dead
         WHERE outbox.app_id = $1 AND outbox.id = dead.id",
        app.as_str(),
        ids,
    )
    .execute(connection)
    .await?;
    Ok(updated.rows_affected())
}

// === impl DeadLetterRow ===

impl From<OutboxRow> for DeadLetterRow {
    fn from(row: OutboxRow) -> Self {
        Self {
            id: row.id,
            kind: row.kind,
            user: row.user_id.map(UserId),
            attempts: row.attempts,
            created_at: row.created_at,
            dead_at: row.dead_at,
            error: row.error,
        }
    }
}
