//! Inserts events in the transaction of the change that they record.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    domain::{
        audit::{Detail, Event, EventKind},
        webhook::{self, Webhook},
    },
    store::postgres::webhooks,
};

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

/// Inserts an event, and queues it for the webhooks that report it. If `notify` is set, servers are notified of queued
/// events when the transaction commits.
pub(in crate::store::postgres) async fn insert(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
    notify: bool,
) -> Result<(), sqlx::Error> {
    insert_with_version(connection, app, event, None, notify).await
}

/// Like [`insert`], for the event of a deleted user. `version` must be greater than the last version that the user had.
pub(in crate::store::postgres) async fn insert_deletion(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
    version: i64,
    notify: bool,
) -> Result<(), sqlx::Error> {
    insert_with_version(connection, app, event, Some(version), notify).await
}

async fn insert_with_version(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
    version: Option<i64>,
    notify: bool,
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
    .execute(&mut *connection)
    .await?;
    webhooks::insert(connection, app, event, version, notify).await
}

/// An event that the service causes for several users, without a request of these users.
pub(in crate::store::postgres) struct BatchEvent<'a> {
    pub(in crate::store::postgres) kind: EventKind,
    pub(in crate::store::postgres) at: OffsetDateTime,
    pub(in crate::store::postgres) detail: Detail,
    /// The webhooks of the App.
    pub(in crate::store::postgres) webhooks: &'a [Webhook],
}

/// Inserts an event for each of these users, and queues it for the webhooks that report it. Each user comes with the
/// version after the event. For a deleted user, this version must be greater than the last version that the user had.
pub(in crate::store::postgres) async fn insert_for_users(
    connection: &mut PgConnection,
    app: &AppId,
    event: &BatchEvent<'_>,
    users: &[(Uuid, i64)],
    notify: bool,
) -> Result<(), sqlx::Error> {
    let (ids, versions): (Vec<_>, Vec<_>) = users.iter().copied().unzip();
    sqlx::query_scalar!(
        r#"
        WITH happened AS MATERIALIZED (
            SELECT gen_random_uuid() AS id, user_id, version FROM unnest($4::uuid[], $5::bigint[]) AS user_row (user_id, version)
        ), recorded AS (
            INSERT INTO audit_events (app_id, id, at, kind, user_id, detail)
            SELECT $1, id, $2, $3, user_id, $6::text::jsonb FROM happened
        ), queued AS (
            INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, version, detail)
            SELECT $1, webhook, id, $3, $2, user_id, version, $6::text::jsonb
            FROM happened CROSS JOIN unnest($7::text[]) AS webhook
            RETURNING app_id, webhook
        )
        SELECT count(pg_notify('latchkey_webhooks', app_id || '/' || webhook)) AS "notified!" FROM queued
        WHERE $8
        "#,
        app.as_str(),
        event.at,
        event.kind.as_str(),
        &ids,
        &versions,
        detail_text(&event.detail),
        &webhook::names_reporting(event.webhooks, event.kind),
        notify,
    )
    .fetch_one(connection)
    .await
    .map(drop)
}

/// Inserts an event of this kind for each of these memberships: a user, a group, and the Provider that reported the
/// group (empty: an administrator added the member). The events have the time, the session, the IP address and the
/// detail of `event`. `kind` must be a kind that no webhook reports.
pub(in crate::store::postgres) async fn insert_for_memberships(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
    kind: EventKind,
    users: &[Uuid],
    groups: &[String],
    providers: &[String],
) -> Result<(), sqlx::Error> {
    debug_assert!(kind.webhook_event().is_none());
    let columns = EventColumns::from_event(event);
    sqlx::query!(
        r#"
        INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
        SELECT $1, gen_random_uuid(), $2, $3, user_id, $4, $5::text::inet,
            coalesce($6::text::jsonb, '{}'::jsonb) || jsonb_build_object('group', group_name)
                || CASE WHEN provider = '' THEN '{}'::jsonb ELSE jsonb_build_object('provider', provider) END
        FROM unnest($7::uuid[], $8::text[], $9::text[]) AS membership (user_id, group_name, provider)
        "#,
        app.as_str(),
        columns.at,
        kind.as_str(),
        columns.session,
        columns.ip,
        columns.detail,
        users,
        groups,
        providers,
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Returns the details as JSON. `None` if there are no details.
fn detail_text(detail: &Detail) -> Option<String> {
    if detail.is_empty() { None } else { serde_json::to_string(detail).ok() }
}

// === impl EventColumns ===

impl EventColumns {
    pub(in crate::store::postgres) fn from_event(event: &Event) -> Self {
        Self {
            id: event.id,
            at: event.at,
            kind: event.kind.as_str(),
            session: event.session.map(|session| session.0),
            ip: event.ip.map(|ip| ip.to_string()),
            detail: detail_text(&event.detail),
        }
    }
}
