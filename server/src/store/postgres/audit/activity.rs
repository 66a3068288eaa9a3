//! The events of one user, newest first.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{
    domain::{
        audit::{ActivityEntry, EventKind},
        ports::StoreError,
        session::SessionId,
        user::UserId,
    },
    store::postgres::{CallError, PostgresStore},
};

/// Maximum number of events that a user sees (specification: Accounts, Audit events).
const MAX_ACTIVITY: i64 = 100;

struct ActivityRow {
    at: OffsetDateTime,
    kind: String,
    ip: Option<String>,
    session_id: Option<Uuid>,
    count: i64,
}

// === impl ActivityEntry ===

impl TryFrom<ActivityRow> for ActivityEntry {
    type Error = CallError;

    fn try_from(row: ActivityRow) -> Result<Self, CallError> {
        Ok(Self {
            at: row.at,
            kind: EventKind::from_name(&row.kind).ok_or(CallError::unexpected_row())?,
            ip: row.ip,
            session: row.session_id.map(SessionId),
            count: u64::try_from(row.count).map_err(|_| CallError::unexpected_row())?,
        })
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    pub(crate) async fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> Result<Vec<ActivityEntry>, StoreError> {
        let known_kinds: Vec<String> = EventKind::ALL.iter().map(|kind| kind.as_str().to_owned()).collect();
        let mut call = self.begin_call("activity").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_as!(
            ActivityRow,
            "SELECT at, kind, abbrev(ip) AS ip, session_id, count FROM audit_events
             WHERE app_id = $1 AND user_id = $2 AND at >= $3 AND kind = ANY ($4)
             ORDER BY at DESC, id DESC LIMIT $5",
            app.as_str(),
            user.0,
            since,
            &known_kinds,
            MAX_ACTIVITY,
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        let rows = call.end_call(rows)?;
        let activity: Result<Vec<_>, _> = rows.into_iter().map(ActivityEntry::try_from).collect();
        activity.map_err(|error| self.record_error(error))
    }
}
