//! Confirms a user's current email address, not a pending address.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{UserRow, lock_user, user_query};
use crate::{
    domain::{
        ports::{ChangedUser, Confirmation, StoreError},
        user::User,
    },
    store::postgres::{PostgresStore, audit, identities, outbox},
};

impl PostgresStore {
    pub(super) async fn confirm_address(
        &self,
        app: &AppId,
        change: Confirmation,
    ) -> Result<Option<ChangedUser>, StoreError> {
        let mut call = self.begin_call("confirm_address").await?;
        let (connection, deadline) = call.parts();
        let changed = timeout_at(deadline, confirm(connection, app, &change, self.should_notify())).await;
        let Some((row, was_contested)) = call.end_call(changed)? else { return Ok(None) };
        Ok(Some(ChangedUser { user: User::try_from(row)?, was_contested }))
    }
}

/// Returns the user after the change, and whether the account was contested.
async fn confirm(
    connection: &mut PgConnection,
    app: &AppId,
    change: &Confirmation,
    notify: bool,
) -> Result<Option<(UserRow, bool)>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let before = lock_user(&mut transaction, app, change.user).await?;
    let before = before.filter(|user| user.is_active_at(change.epoch) && user.has_address(&change.address));
    let Some(before) = before else {
        transaction.rollback().await?;
        return Ok(None);
    };
    let changed = update_user(&mut transaction, app, change).await?;
    if !change.keeps_session {
        identities::delete_of_user(&mut transaction, app, change.user, &change.event, notify).await?;
    }
    let epoch_change = changed.epoch_change(change.keeps_session.then_some(change.session));
    outbox::insert_epoch_change(&mut transaction, app, &epoch_change).await?;
    audit::insert(&mut transaction, app, &change.event, notify).await?;
    transaction.commit().await?;
    Ok(Some((changed, before.contested)))
}

async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    change: &Confirmation,
) -> Result<UserRow, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET email_verified_at = coalesce(email_verified_at, $5),
            epoch = epoch + 1,
            version = version + 1,
            password_hash = CASE WHEN contested THEN NULL ELSE password_hash END,
            foreign_hash = CASE WHEN contested THEN NULL ELSE foreign_hash END,
            foreign_hash_at = CASE WHEN contested THEN NULL ELSE foreign_hash_at END,
            password_session = CASE WHEN contested THEN $6 ELSE password_session END,
            contested = false,
            updated_at = $5
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4",
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.address,
        change.at,
        change.session.0,
    )
    .fetch_one(connection)
    .await
}
