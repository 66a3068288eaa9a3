//! Sets the name.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{UserRow, user_query};
use crate::{
    domain::{
        ports::{Rename, Renamed, StoreError},
        user::User,
    },
    store::postgres::{PostgresStore, audit, outbox},
};

impl PostgresStore {
    pub(super) async fn rename(&self, app: &AppId, change: Rename) -> Result<Option<Renamed>, StoreError> {
        let mut call = self.begin_call("rename").await?;
        let (connection, deadline) = call.parts();
        let renamed = timeout_at(deadline, rename(connection, app, &change)).await;
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
async fn rename(
    connection: &mut PgConnection,
    app: &AppId,
    change: &Rename,
) -> Result<Option<(UserRow, Uuid)>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let Some(renamed) = update_user(&mut transaction, app, change).await? else {
        transaction.rollback().await?;
        return Ok(None);
    };
    let outbox_row = outbox::insert_profile_change(&mut transaction, app, change.user).await?;
    audit::insert(&mut transaction, app, &change.event).await?;
    transaction.commit().await?;
    Ok(Some((renamed, outbox_row)))
}

async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    change: &Rename,
) -> Result<Option<UserRow>, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET name = $4, version = version + 1, updated_at = $5
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL",
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.name.as_str(),
        change.at,
    )
    .fetch_optional(connection)
    .await
}
