//! Pages of audit events, newest first.

use latchkey_crds::types::AppId;
use serde_json::Value;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{
    domain::{
        administration::AuditRow,
        ports::{EventFilter, RowPage, RowPosition, StoreError},
        session::SessionId,
        user::UserId,
    },
    store::postgres::PostgresStore,
};

/// Maximum number of events that are read for a page with a filter by kind. Without this maximum, such a page could
/// read all events of the App, because no index contains the kind.
const MAX_READ: i64 = 5000;

/// A row of a page. A page without events has one row, with `None` in the columns of the event.
struct EventRow {
    /// The number of events that were read for the page. `last_at` and `last_id` identify the last of them.
    read: i64,
    last_at: OffsetDateTime,
    last_id: Uuid,
    id: Option<Uuid>,
    at: Option<OffsetDateTime>,
    kind: Option<String>,
    user_id: Option<Uuid>,
    session_id: Option<Uuid>,
    ip: Option<String>,
    count: Option<i64>,
    detail: Option<Value>,
}

/// Queries a page. `$condition` selects the events to read; the page contains those of the requested kind.
macro_rules! page_query {
    ($condition:tt, $($arguments:tt)*) => {
        sqlx::query_as!(
            EventRow,
            r#"
            WITH read AS MATERIALIZED (
                SELECT id, at, kind, user_id, session_id, ip, count, detail FROM audit_events
                WHERE app_id = $1 AND at >= coalesce($2, '-infinity'::timestamptz)
                    AND at < coalesce($3, 'infinity'::timestamptz)
                    AND (at, id) < (coalesce($4, 'infinity'::timestamptz), $5::uuid)
            "# + $condition + r#"
                ORDER BY at DESC, id DESC LIMIT $7
            ), page AS (
                SELECT * FROM read WHERE $6::text IS NULL OR kind = $6 ORDER BY at DESC, id DESC LIMIT $8
            ), last AS (
                SELECT at, id FROM read ORDER BY at, id LIMIT 1
            )
            SELECT (SELECT count(*) FROM read) AS "read!", last.at AS "last_at!", last.id AS "last_id!",
                page.id AS "id?", page.at AS "at?", page.kind AS "kind?", page.user_id AS "user_id?",
                page.session_id AS "session_id?", abbrev(page.ip) AS "ip?", page.count AS "count?",
                page.detail AS "detail?"
            FROM last LEFT JOIN page ON true
            ORDER BY page.at DESC, page.id DESC
            "#,
            $($arguments)*
        )
    };
}

impl PostgresStore {
    pub(super) async fn events(
        &self,
        app: &AppId,
        filter: &EventFilter,
        after: Option<RowPosition>,
        limit: u16,
    ) -> Result<RowPage<AuditRow>, StoreError> {
        // Reads one event more than the page has, to know whether more events follow.
        let limit_and_one = i64::from(limit) + 1;
        let max_read = if filter.kind.is_some() { MAX_READ } else { limit_and_one };
        let mut call = self.begin_administration("events").await?;
        let (connection, deadline) = call.parts();
        let reading = async {
            let mut transaction = connection.begin().await?;
            // A generic plan does not know the values of the parameters: Postgres would underestimate the number of
            // events of a large App, and sort all of them instead of following an index.
            sqlx::raw_sql("SET LOCAL plan_cache_mode = force_custom_plan").execute(&mut *transaction).await?;
            let rows = read_page(&mut transaction, app, filter, after, max_read, limit_and_one).await?;
            transaction.commit().await?;
            Ok(rows)
        };
        let rows = timeout_at(deadline, reading).await;
        let rows = call.end_call(rows)?;
        let last_read =
            rows.first().filter(|row| row.read >= max_read).map(|row| RowPosition { at: row.last_at, id: row.last_id });
        let mut events: Vec<AuditRow> = rows.into_iter().filter_map(EventRow::into_event).collect();
        let next = if events.len() > usize::from(limit) {
            events.truncate(usize::from(limit));
            events.last().map(|event| RowPosition { at: event.at, id: event.id })
        } else {
            last_read
        };
        Ok(RowPage { rows: events, next })
    }
}

async fn read_page(
    connection: &mut PgConnection,
    app: &AppId,
    filter: &EventFilter,
    after: Option<RowPosition>,
    max_read: i64,
    limit: i64,
) -> Result<Vec<EventRow>, sqlx::Error> {
    let after_at = after.map(|after| after.at);
    let after_id = after.map_or(Uuid::max(), |after| after.id);
    match filter.user {
        None => page_query!(
            "",
            app.as_str(),
            filter.after,
            filter.before,
            after_at,
            after_id,
            filter.kind,
            max_read,
            limit,
        )
        .fetch_all(connection)
        .await,
        Some(user) => {
            page_query!(
                "AND user_id = $9",
                app.as_str(),
                filter.after,
                filter.before,
                after_at,
                after_id,
                filter.kind,
                max_read,
                limit,
                user.0,
            )
            .fetch_all(connection)
            .await
        }
    }
}

// === impl EventRow ===

impl EventRow {
    fn into_event(self) -> Option<AuditRow> {
        Some(AuditRow {
            id: self.id?,
            at: self.at?,
            kind: self.kind?,
            user: self.user_id.map(UserId),
            session: self.session_id.map(SessionId),
            ip: self.ip,
            count: self.count?,
            detail: self.detail,
        })
    }
}
