//! Inserts and deletes outbox rows in the transaction of a change.

use latchkey_crds::types::AppId;
use serde_json::{Map, Value};
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{EPOCH_KIND, GROUPS_KIND, PROFILE_KIND};
use crate::domain::{
    mail::{EpochChange, Mail},
    user::UserId,
};

/// The time in which the request can propagate an epoch, a profile or groups to Redis. After this time, a deliverer
/// claims the outbox row.
pub(in crate::store::postgres) const PROPAGATION_DELAY_SECONDS: f64 = 5.0;

/// Queues a mail. If `notify` is set, other servers are notified when the transaction commits.
pub(in crate::store::postgres) async fn insert_mail(
    connection: &mut PgConnection,
    app: &AppId,
    mail: &Mail,
    notify: bool,
) -> Result<(), sqlx::Error> {
    insert_mail_row(connection, app, mail, trace_payload_json(), notify).await
}

/// Queues a mail to the email address that the user had before the change.
pub(in crate::store::postgres) async fn insert_mail_to_former_address(
    connection: &mut PgConnection,
    app: &AppId,
    mail: &Mail,
    former_email: &str,
    notify: bool,
) -> Result<(), sqlx::Error> {
    let mut payload = trace_payload();
    payload.insert("former".to_owned(), former_email.into());
    insert_mail_row(connection, app, mail, Some(Value::Object(payload).to_string()), notify).await
}

async fn insert_mail_row(
    connection: &mut PgConnection,
    app: &AppId,
    mail: &Mail,
    payload: Option<String>,
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
        payload,
    )
    .fetch_one(connection)
    .await
    .map(drop)
}

/// Adds the row that propagates a raised epoch to Redis if the request itself does not propagate it.
pub(in crate::store::postgres) async fn insert_epoch_change(
    connection: &mut PgConnection,
    app: &AppId,
    change: &EpochChange,
) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "INSERT INTO outbox (app_id, kind, user_id, epoch, keep_session, due_at)
         VALUES ($1, $2, $3, $4, $5, statement_timestamp() + make_interval(secs => $6))",
        app.as_str(),
        EPOCH_KIND,
        change.user.0,
        change.epoch.0,
        change.kept_session.map(|session| session.0),
        PROPAGATION_DELAY_SECONDS,
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Adds a row for a changed profile. The row propagates the profile to Redis if the request itself does not. Returns
/// the id of the row.
pub(in crate::store::postgres) async fn insert_profile_change(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
) -> Result<Uuid, sqlx::Error> {
    sqlx::query_scalar!(
        "INSERT INTO outbox (app_id, kind, user_id, due_at)
         VALUES ($1, $2, $3, statement_timestamp() + make_interval(secs => $4))
         RETURNING id",
        app.as_str(),
        PROFILE_KIND,
        user.0,
        PROPAGATION_DELAY_SECONDS,
    )
    .fetch_one(connection)
    .await
}

/// Adds one row for each user. The row propagates the user's changed groups to Redis if the request itself does not
/// propagate them. Returns the users with the ids of their rows.
pub(in crate::store::postgres) async fn insert_groups_changes(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
) -> Result<Vec<(Uuid, Uuid)>, sqlx::Error> {
    let rows = sqlx::query!(
        r#"INSERT INTO outbox (app_id, kind, user_id, due_at)
         SELECT $1, $2, user_id, statement_timestamp() + make_interval(secs => $4)
         FROM unnest($3::uuid[]) AS changed (user_id)
         RETURNING user_id AS "user_id!", id"#,
        app.as_str(),
        GROUPS_KIND,
        users,
        PROPAGATION_DELAY_SECONDS,
    )
    .fetch_all(connection)
    .await?;
    Ok(rows.into_iter().map(|row| (row.user_id, row.id)).collect())
}

/// Adds the row that propagates the changed groups of a user to Redis, for a request that does not propagate them
/// itself. If `notify` is set, servers are notified when the transaction commits.
pub(in crate::store::postgres) async fn insert_due_groups_change(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    notify: bool,
) -> Result<(), sqlx::Error> {
    sqlx::query_scalar!(
        r#"
        WITH queued AS (
            INSERT INTO outbox (app_id, kind, user_id) VALUES ($1, $2, $3) RETURNING id
        )
        SELECT count(pg_notify('latchkey_outbox', '')) AS "notified!" FROM queued WHERE $4
        "#,
        app.as_str(),
        GROUPS_KIND,
        user.0,
        notify,
    )
    .fetch_one(connection)
    .await
    .map(drop)
}

/// Deletes the rows of deleted users. The deletion includes epoch rows, so `insert_epoch_change` must be called after
/// this function.
pub(in crate::store::postgres) async fn delete_rows_of(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
) -> Result<(), sqlx::Error> {
    sqlx::query!("DELETE FROM outbox WHERE app_id = $1 AND user_id = ANY ($2)", app.as_str(), users)
        .execute(connection)
        .await
        .map(drop)
}

/// Returns a mail's columns: kind, user and time of the request. All `None` without a mail.
pub(in crate::store::postgres) fn mail_columns(
    mail: Option<&Mail>,
) -> (Option<&'static str>, Option<Uuid>, Option<OffsetDateTime>) {
    match mail {
        None => (None, None, None),
        Some(mail) => (Some(mail.kind.as_str()), mail.recipient.map(|user| user.0), Some(mail.requested_at)),
    }
}

/// Returns the payload of an ordinary mail as JSON: the trace of the request that queues it. `None` if spans are not
/// exported.
pub(in crate::store::postgres) fn trace_payload_json() -> Option<String> {
    let payload = trace_payload();
    if payload.is_empty() { None } else { Some(Value::Object(payload).to_string()) }
}

fn trace_payload() -> Map<String, Value> {
    latchkey_telemetry::current_traceparent().map(|trace| ("trace".to_owned(), trace.into())).into_iter().collect()
}
