//! Inserts events in the transaction of the change that they record.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::audit::{Event, EventKind};

/// The columns of one event.
pub(in crate::store::postgres) struct EventColumns {
    pub(in crate::store::postgres) id: Uuid,
    pub(in crate::store::postgres) at: OffsetDateTime,
    pub(in crate::store::postgres) kind: &'static str,
    pub(in crate::store::postgres) session: Option<Uuid>,
    pub(in crate::store::postgres) ip: Option<String>,
    /// The details as JSON. `None` if there are no details.
    pub(in crate::store::postgres) detail: Option<String>,
}

/// Inserts an event.
pub(in crate::store::postgres) async fn insert(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
) -> Result<(), sqlx::Error> {
    let columns = EventColumns::from_event(event);
    sqlx::query!(
        "INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
         VALUES ($1, $2, $3, $4, $5, $6, $7::text::inet, $8::text::jsonb)",
        app.as_str(),
        columns.id,
        columns.at,
        columns.kind,
        event.user.map(|user| user.0),
        columns.session,
        columns.ip,
        columns.detail,
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Inserts an event for each of these users. The users were removed without their own request.
pub(in crate::store::postgres) async fn insert_for_removed_users(
    connection: &mut PgConnection,
    app: &AppId,
    kind: EventKind,
    at: OffsetDateTime,
    users: &[Uuid],
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "INSERT INTO audit_events (app_id, id, at, kind, user_id)
         SELECT $1, gen_random_uuid(), $2, $3, user_id FROM unnest($4::uuid[]) AS user_id",
        app.as_str(),
        at,
        kind.as_str(),
        users,
    )
    .execute(connection)
    .await
    .map(drop)
}

// === impl EventColumns ===

impl EventColumns {
    pub(in crate::store::postgres) fn from_event(event: &Event) -> Self {
        let detail = if event.detail.is_empty() { None } else { serde_json::to_string(&event.detail).ok() };
        Self {
            id: event.id,
            at: event.at,
            kind: event.kind.as_str(),
            session: event.session.map(|session| session.0),
            ip: event.ip.map(|ip| ip.to_string()),
            detail,
        }
    }
}
