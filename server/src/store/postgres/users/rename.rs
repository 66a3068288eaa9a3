//! Sets a user's name.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::UserRow;
use crate::{
    domain::{
        ports::{Rename, Renamed, StoreError},
        user::User,
    },
    store::postgres::{PostgresStore, audit::EventColumns, outbox::PROPAGATION_DELAY_SECONDS},
};

impl PostgresStore {
    pub(super) async fn rename(&self, app: &AppId, change: Rename) -> Result<Option<Renamed>, StoreError> {
        let mut call = self.begin_call("rename").await?;
        let (connection, deadline) = call.parts();
        let renamed = timeout_at(deadline, rename(connection, app, &change, self.should_notify())).await;
        let Some((row, outbox_row)) = call.end_call(renamed)? else { return Ok(None) };
        Ok(Some(Renamed { user: User::try_from(row)?, outbox_row }))
    }

    pub(super) async fn remove_profile_row(&self, app: &AppId, row: Uuid) -> Result<(), StoreError> {
        let mut call = self.begin_call("profile_carried").await?;
        let (connection, deadline) = call.parts();
        let query =
            sqlx::query!("DELETE FROM outbox WHERE app_id = $1 AND id = $2 AND kind = 'profile'", app.as_str(), row);
        let removed = timeout_at(deadline, query.execute(connection)).await;
        call.end_call(removed).map(drop)
    }
}

/// Returns the user after the change, and the outbox row that propagates the profile.
///
/// This is one statement, because a transaction would lock the user's row for several round trips. Meanwhile, each
/// concurrent rename of the user would occupy a connection.
async fn rename(
    connection: &mut PgConnection,
    app: &AppId,
    change: &Rename,
    notify: bool,
) -> Result<Option<(UserRow, Uuid)>, sqlx::Error> {
    let event = EventColumns::from_event(&change.event);
    let row = sqlx::query!(
        r#"
            WITH renamed AS (
                UPDATE users
                SET name = $4, version = version + 1, updated_at = $5
                WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
                RETURNING *
            ), carried AS (
                INSERT INTO outbox (app_id, kind, user_id, due_at)
                SELECT $1, 'profile', id, statement_timestamp() + make_interval(secs => $6) FROM renamed
                RETURNING id
            ), recorded AS (
                INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
                SELECT $1, $7, $8, $9, id, $10, $11::text::inet, $12::text::jsonb FROM renamed
            ), reported AS (
                INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, session_id, version, detail)
                SELECT $1, webhook, $7, $9, $8, renamed.id, $10, renamed.version, $12::text::jsonb
                FROM renamed CROSS JOIN unnest($13::text[]) AS webhook
                RETURNING app_id, webhook
            ), notified AS (
                SELECT count(pg_notify('latchkey_webhooks', app_id || '/' || webhook)) FROM reported WHERE $14
            )
            SELECT renamed.id, email, email_verified_at, pending_email, name, password_hash, password_session,
                contested, epoch, version, disabled_at, created_at, updated_at, carried.id AS row
            FROM renamed, carried, notified
            "#,
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.name.as_str(),
        change.at,
        PROPAGATION_DELAY_SECONDS,
        event.id,
        event.at,
        event.kind,
        event.session,
        event.ip,
        event.detail,
        &change.event.reporting_webhooks(),
        notify,
    )
    .fetch_optional(connection)
    .await?;
    Ok(row.map(|row| {
        let user = UserRow {
            id: row.id,
            email: row.email,
            email_verified_at: row.email_verified_at,
            pending_email: row.pending_email,
            name: row.name,
            password_hash: row.password_hash,
            password_session: row.password_session,
            contested: row.contested,
            epoch: row.epoch,
            version: row.version,
            disabled_at: row.disabled_at,
            created_at: row.created_at,
            updated_at: row.updated_at,
        };
        (user, row.row)
    }))
}
