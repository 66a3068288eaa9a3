//! Reads users in the order of their ids for an export, and writes the audit events of calls that change nothing.

use std::collections::HashMap;

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;
use uuid::Uuid;

use super::row::{AdminUserRow, admin_user_query};
use crate::{
    domain::{
        administration::{AdminIdentity, AdminUser},
        audit::Event,
        ports::StoreError,
        user::UserId,
    },
    store::postgres::{PostgresStore, apps, audit, users::app_being_deleted},
};

struct IdentityRow {
    user_id: Uuid,
    provider: String,
    authority: String,
    subject: String,
    email: Option<String>,
    linked_at: OffsetDateTime,
}

impl PostgresStore {
    pub(super) async fn export_users(
        &self,
        app: &AppId,
        after: Option<UserId>,
        limit: u16,
    ) -> Result<Vec<AdminUser>, StoreError> {
        let mut call = self.begin_administration("export_users").await?;
        let (connection, deadline) = call.parts();
        let page = timeout_at(deadline, read_page(connection, app, after, limit)).await;
        let (rows, identities) = call.end_call(page)?;
        let mut by_user: HashMap<Uuid, Vec<AdminIdentity>> = HashMap::new();
        for row in identities {
            let IdentityRow { user_id, provider, authority, subject, email, linked_at } = row;
            let identity = AdminIdentity { provider, authority, subject, email, linked_at };
            by_user.entry(user_id).or_default().push(identity);
        }
        let users: Result<Vec<_>, _> = rows
            .into_iter()
            .map(|row| {
                let identities = by_user.remove(&row.id).unwrap_or_default();
                row.into_user(identities, None)
            })
            .collect();
        users.map_err(|error| self.record_error(error))
    }

    /// Writes the audit event of a call that changes no user.
    pub(super) async fn record_administration(&self, app: &AppId, event: &Event) -> Result<(), StoreError> {
        let mut call = self.begin_administration("record_administration").await?;
        let (connection, deadline) = call.parts();
        let recorded = timeout_at(deadline, record(connection, app, event, self.should_notify())).await;
        if call.end_call(recorded)? { Ok(()) } else { Err(app_being_deleted()) }
    }
}

async fn read_page(
    connection: &mut PgConnection,
    app: &AppId,
    after: Option<UserId>,
    limit: u16,
) -> Result<(Vec<AdminUserRow>, Vec<IdentityRow>), sqlx::Error> {
    let rows = admin_user_query!(
        ["FROM users WHERE app_id = $1 AND id > $2 ORDER BY id LIMIT $3"],
        app.as_str(),
        after.map_or(Uuid::nil(), |after| after.0),
        i64::from(limit),
    )
    .fetch_all(&mut *connection)
    .await?;
    let ids: Vec<Uuid> = rows.iter().map(|row| row.id).collect();
    let identities = sqlx::query_as!(
        IdentityRow,
        "SELECT user_id, provider, authority, subject, email, linked_at FROM identities
         WHERE app_id = $1 AND user_id = ANY ($2)
         ORDER BY linked_at, authority, subject",
        app.as_str(),
        &ids,
    )
    .fetch_all(connection)
    .await?;
    Ok((rows, identities))
}

/// Inserts the event. If the App's users are being deleted, returns `false` and inserts nothing, because the row would
/// remain after the deletion.
async fn record(connection: &mut PgConnection, app: &AppId, event: &Event, notify: bool) -> Result<bool, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    if !apps::is_active(&mut transaction, app).await? {
        transaction.rollback().await?;
        return Ok(false);
    }
    audit::insert(&mut transaction, app, event, notify).await?;
    transaction.commit().await?;
    Ok(true)
}
