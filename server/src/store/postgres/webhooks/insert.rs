//! Queues an event for the webhooks that report it, in the transaction of the audit event.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;

use crate::{domain::audit::Event, store::postgres::audit::EventColumns};

/// Queues the event for each webhook that reports it. `version`: the version of the user after the event; `None` means
/// the stored version. If `notify` is set, servers are notified when the transaction commits.
pub(in crate::store::postgres) async fn insert(
    connection: &mut PgConnection,
    app: &AppId,
    event: &Event,
    version: Option<i64>,
    notify: bool,
) -> Result<(), sqlx::Error> {
    let webhooks = event.reporting_webhooks();
    if webhooks.is_empty() {
        return Ok(());
    }
    let columns = EventColumns::from_event(event);
    let has_version = event.kind.webhook_event().is_some_and(|event| event.is_about_one_user());
    sqlx::query_scalar!(
        r#"
        WITH queued AS (
            INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, session_id, version, detail)
            SELECT $1, webhook, $3, $4, $5, $6, $7,
                CASE WHEN $8 THEN coalesce($9, (SELECT version FROM users WHERE app_id = $1 AND id = $6)) END,
                $10::text::jsonb
            FROM unnest($2::text[]) AS webhook
            RETURNING app_id, webhook
        )
        SELECT count(pg_notify('latchkey_webhooks', app_id || '/' || webhook)) AS "notified!" FROM queued
        WHERE $11
        "#,
        app.as_str(),
        &webhooks,
        columns.id,
        columns.kind,
        columns.at,
        event.user.map(|user| user.0),
        columns.session,
        has_version,
        version,
        columns.detail,
        notify,
    )
    .fetch_one(connection)
    .await
    .map(drop)
}
