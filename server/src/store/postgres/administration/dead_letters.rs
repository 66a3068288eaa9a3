//! Dead letters of an App: lists them, and queues them for delivery again.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
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

struct DeadRow {
    id: Uuid,
    kind: String,
    webhook: Option<String>,
    user_id: Option<Uuid>,
    attempts: i32,
    created_at: OffsetDateTime,
    dead_at: OffsetDateTime,
    error: Option<String>,
}

/// The maximum number of dead letters of a webhook that one call queues for delivery again.
const MAX_RETRIED: i64 = 10_000;

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
        // Reads one row more than the page has, to know whether more rows follow.
        let rows = timeout_at(deadline, read_page(connection, app, kind, after, usize::from(limit) + 1)).await;
        let mut rows: Vec<_> = call.end_call(rows)?.into_iter().map(DeadLetterRow::from).collect();
        let has_more = rows.len() > usize::from(limit);
        rows.truncate(usize::from(limit));
        let next = rows.last().filter(|_| has_more).map(|row| RowPosition { at: row.dead_at, id: row.id });
        Ok(RowPage { rows, next })
    }

    pub(super) async fn retry_dead_letters(&self, app: &AppId, selection: RetrySelection) -> Result<u64, StoreError> {
        let mut call = self.begin_administration("retry_dead_letters").await?;
        let (connection, deadline) = call.parts();
        let retried = timeout_at(deadline, retry(connection, app, &selection, self.should_notify())).await;
        let retried = call.end_call(retried)?;
        if retried > 0 {
            self.notify_deliverer();
        }
        Ok(retried)
    }
}

/// Where a page begins, and the maximum number of its rows.
struct PageBounds {
    after_at: Option<OffsetDateTime>,
    after_id: Uuid,
    limit: i64,
}

async fn read_page(
    connection: &mut PgConnection,
    app: &AppId,
    kind: Option<&'static str>,
    after: Option<RowPosition>,
    limit: usize,
) -> Result<Vec<DeadRow>, sqlx::Error> {
    let page = PageBounds {
        after_at: after.map(|after| after.at),
        after_id: after.map_or(Uuid::max(), |after| after.id),
        limit: i64::try_from(limit).unwrap_or(i64::MAX),
    };
    let mut rows = Vec::new();
    if kind != Some(DeadLetterRow::WEBHOOK) {
        rows.append(&mut read_mails(connection, app, kind, &page).await?);
    }
    if kind.is_none_or(|kind| kind == DeadLetterRow::WEBHOOK) {
        rows.append(&mut read_events(connection, app, &page).await?);
    }
    rows.sort_by_key(|row| std::cmp::Reverse((row.dead_at, row.id)));
    rows.truncate(limit);
    Ok(rows)
}

/// Queries the mails that are dead letters and match a condition.
macro_rules! mails_query {
    ($condition:tt, $($arguments:tt)*) => {
        sqlx::query_as!(
            DeadRow,
            r#"
            SELECT id, kind, NULL AS webhook, user_id, attempts, created_at, dead_at AS "dead_at!", error FROM outbox
            WHERE app_id = $1 AND dead_at IS NOT NULL
                AND (dead_at, id) < (coalesce($2, 'infinity'::timestamptz), $3::uuid)
            "# + $condition + " ORDER BY dead_at DESC, id DESC LIMIT $4",
            $($arguments)*
        )
    };
}

async fn read_mails(
    connection: &mut PgConnection,
    app: &AppId,
    kind: Option<&'static str>,
    page: &PageBounds,
) -> Result<Vec<DeadRow>, sqlx::Error> {
    let (app, PageBounds { after_at, after_id, limit }) = (app.as_str(), page);
    match kind {
        None => mails_query!("", app, *after_at, after_id, limit).fetch_all(connection).await,
        Some(kind) => mails_query!("AND kind = $5", app, *after_at, after_id, limit, kind).fetch_all(connection).await,
    }
}

async fn read_events(
    connection: &mut PgConnection,
    app: &AppId,
    page: &PageBounds,
) -> Result<Vec<DeadRow>, sqlx::Error> {
    sqlx::query_as!(
        DeadRow,
        r#"
        SELECT id, $5::text AS "kind!", webhook AS "webhook?", user_id, attempts, at AS created_at,
            dead_at AS "dead_at!", error
        FROM webhook_events
        WHERE app_id = $1 AND dead_at IS NOT NULL
            AND (dead_at, id) < (coalesce($2, 'infinity'::timestamptz), $3::uuid)
        ORDER BY dead_at DESC, id DESC LIMIT $4
        "#,
        app.as_str(),
        page.after_at,
        page.after_id,
        page.limit,
        DeadLetterRow::WEBHOOK,
    )
    .fetch_all(connection)
    .await
}

/// Queues the selected dead letters for delivery again. If `notify` is set, servers are notified of retried events when
/// the transaction commits.
async fn retry(
    connection: &mut PgConnection,
    app: &AppId,
    selection: &RetrySelection,
    notify: bool,
) -> Result<u64, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let retried = match selection {
        RetrySelection::Ids(ids) => {
            let mails = retry_mails(&mut transaction, app, ids).await?;
            mails + retry_events(&mut transaction, app, ids, notify).await?
        }
        RetrySelection::Webhook(webhook) => retry_webhook(&mut transaction, app, webhook.as_str(), notify).await?,
    };
    transaction.commit().await?;
    Ok(retried)
}

/// Queues mails for delivery again. Locks the rows in a fixed order, so that two calls with the same ids do not
/// deadlock.
async fn retry_mails(connection: &mut PgConnection, app: &AppId, ids: &[Uuid]) -> Result<u64, sqlx::Error> {
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

/// Queues events for delivery again. Skips rows that another call has locked, because that call retries them. The names
/// of the webhooks are looked up first, because they precede the id in the primary key.
async fn retry_events(
    connection: &mut PgConnection,
    app: &AppId,
    ids: &[Uuid],
    notify: bool,
) -> Result<u64, sqlx::Error> {
    let updated = sqlx::query!(
        "WITH dead AS MATERIALIZED (
            SELECT app_id, webhook, id FROM webhook_events
            WHERE app_id = $1 AND webhook IN (SELECT name FROM webhooks WHERE app_id = $1) AND id = ANY ($2)
                AND dead_at IS NOT NULL
            FOR UPDATE SKIP LOCKED
         ), notified AS (
            SELECT pg_notify('latchkey_webhooks', $1 || '/' || webhook) FROM dead WHERE $3
         )
         UPDATE webhook_events
         SET dead_at = NULL, error = NULL, attempts = 0, due_at = statement_timestamp(), lease_until = NULL
         FROM dead
         WHERE webhook_events.app_id = dead.app_id AND webhook_events.webhook = dead.webhook
                AND webhook_events.id = dead.id
            AND (SELECT count(*) FROM notified) >= 0",
        app.as_str(),
        ids,
        notify,
    )
    .execute(connection)
    .await?;
    Ok(updated.rows_affected())
}

async fn retry_webhook(
    connection: &mut PgConnection,
    app: &AppId,
    webhook: &str,
    notify: bool,
) -> Result<u64, sqlx::Error> {
    let updated = sqlx::query!(
        "WITH dead AS MATERIALIZED (
            SELECT app_id, webhook, id FROM webhook_events
            WHERE app_id = $1 AND webhook = $2 AND dead_at IS NOT NULL
            ORDER BY dead_at LIMIT $3
            FOR UPDATE SKIP LOCKED
         ), notified AS (
            SELECT pg_notify('latchkey_webhooks', $1 || '/' || webhook) FROM dead WHERE $4
         )
         UPDATE webhook_events
         SET dead_at = NULL, error = NULL, attempts = 0, due_at = statement_timestamp(), lease_until = NULL
         FROM dead
         WHERE webhook_events.app_id = dead.app_id AND webhook_events.webhook = dead.webhook
                AND webhook_events.id = dead.id
            AND (SELECT count(*) FROM notified) >= 0",
        app.as_str(),
        webhook,
        MAX_RETRIED,
        notify,
    )
    .execute(connection)
    .await?;
    Ok(updated.rows_affected())
}

// === impl DeadLetterRow ===

impl From<DeadRow> for DeadLetterRow {
    fn from(row: DeadRow) -> Self {
        Self {
            id: row.id,
            kind: row.kind,
            webhook: row.webhook,
            user: row.user_id.map(UserId),
            attempts: row.attempts,
            created_at: row.created_at,
            dead_at: row.dead_at,
            error: row.error,
        }
    }
}
