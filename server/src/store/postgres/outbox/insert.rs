//! Outbox rows that are part of the transaction of a change.

use latchkey_crds::types::AppId;
use serde_json::json;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::domain::mail::Mail;

/// How long the request has to propagate an epoch or a profile to Redis before a deliverer claims the outbox row.
pub(in crate::store::postgres) const PROPAGATION_DELAY_SECONDS: f64 = 5.0;

/// Queues a mail. If `notify` is set, other servers are notified when the transaction commits.
pub(in crate::store::postgres) async fn insert_mail(
    connection: &mut PgConnection,
    app: &AppId,
    mail: &Mail,
    notify: bool,
) -> Result<(), sqlx::Error> {
    let (kind, user, requested_at) = mail_columns(Some(mail));
    sqlx::query_scalar!(
        r#"
        WITH queued AS (
            INSERT INTO outbox (app_id, kind, user_id, requested_at, payload)
            VALUES ($1, $2, $3, $4, $6::text::jsonb)
            RETURNING id
        )
        SELECT count(pg_notify('latchkey_outbox', '')) AS "notified!" FROM queued WHERE $5
        "#,
        app.as_str(),
        kind,
        user,
        requested_at,
        notify,
        mail_payload(),
    )
    .fetch_one(connection)
    .await
    .map(drop)
}

/// A mail's columns: kind, user and time of the request. All `None` without a mail.
pub(in crate::store::postgres) fn mail_columns(
    mail: Option<&Mail>,
) -> (Option<&'static str>, Option<Uuid>, Option<OffsetDateTime>) {
    match mail {
        None => (None, None, None),
        Some(mail) => (Some(mail.kind.as_str()), mail.recipient.map(|user| user.0), Some(mail.requested_at)),
    }
}

/// A mail's payload as JSON: the trace of the request that queued it. `None` if spans are not exported.
pub(in crate::store::postgres) fn mail_payload() -> Option<String> {
    latchkey_telemetry::current_traceparent().map(|trace| json!({ "trace": trace }).to_string())
}
