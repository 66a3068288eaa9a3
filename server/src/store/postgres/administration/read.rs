//! Reads one user, with the identities and the time of the last login.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::time::timeout_at;

use super::row::{AdminUserRow, admin_user_query};
use crate::{
    domain::{
        administration::{AdminIdentity, AdminUser},
        audit::EventKind,
        ports::StoreError,
        user::UserId,
    },
    store::postgres::{CallError, PostgresStore},
};

/// The last login is searched only among this number of the user's newest events, because an attacker can cause very
/// many events.
const MAX_EVENTS: i64 = 10_000;

/// A user, and the data about the user in other tables.
pub(super) struct DetailedUser {
    row: AdminUserRow,
    identities: Vec<AdminIdentity>,
    last_signed_in_at: Option<OffsetDateTime>,
}

// === impl DetailedUser ===

impl TryFrom<DetailedUser> for AdminUser {
    type Error = CallError;

    fn try_from(user: DetailedUser) -> Result<Self, CallError> {
        user.row.into_user(user.identities, user.last_signed_in_at)
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    pub(super) async fn administered_user(&self, app: &AppId, user: UserId) -> Result<Option<AdminUser>, StoreError> {
        let mut call = self.begin_administration("administered_user").await?;
        let (connection, deadline) = call.parts();
        let user = timeout_at(deadline, read_user(connection, app, user)).await;
        let user = call.end_call(user)?.map(AdminUser::try_from).transpose();
        user.map_err(|error| self.record_error(error))
    }
}

pub(super) async fn read_user(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
) -> Result<Option<DetailedUser>, sqlx::Error> {
    let row = admin_user_query!(["FROM users WHERE app_id = $1 AND id = $2"], app.as_str(), user.0)
        .fetch_optional(&mut *connection)
        .await?;
    let Some(row) = row else { return Ok(None) };
    let identities = sqlx::query_as!(
        AdminIdentity,
        "SELECT provider, authority, subject, email, linked_at FROM identities
         WHERE app_id = $1 AND user_id = $2
         ORDER BY linked_at, authority, subject",
        app.as_str(),
        user.0,
    )
    .fetch_all(&mut *connection)
    .await?;
    let last_signed_in_at = sqlx::query_scalar!(
        r#"
        SELECT at AS "at!" FROM (
            SELECT at, kind FROM audit_events
            WHERE app_id = $1 AND user_id = $2
            ORDER BY at DESC LIMIT $4
        ) AS newest
        WHERE kind = $3
        ORDER BY at DESC LIMIT 1
        "#,
        app.as_str(),
        user.0,
        EventKind::LoggedIn.as_str(),
        MAX_EVENTS,
    )
    .fetch_optional(connection)
    .await?;
    Ok(Some(DetailedUser { row, identities, last_signed_in_at }))
}
