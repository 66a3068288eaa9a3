//! Sets a password with a code that was sent by email.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{UserRow, lock_user, user_query};
use crate::{
    domain::{
        mail::{Mail, MailKind},
        ports::{ChangedUser, PasswordReset, StoreError},
        user::User,
    },
    store::postgres::{PostgresStore, audit, identities, outbox},
};

impl PostgresStore {
    pub(super) async fn reset_password(
        &self,
        app: &AppId,
        change: PasswordReset,
    ) -> Result<Option<ChangedUser>, StoreError> {
        let mut call = self.begin_call("reset_password").await?;
        let (connection, deadline) = call.parts();
        let changed = timeout_at(deadline, reset(connection, app, &change, self.should_notify())).await;
        let Some((row, was_contested)) = call.end_call(changed)? else { return Ok(None) };
        self.notify_deliverer();
        Ok(Some(ChangedUser { user: User::try_from(row)?, was_contested }))
    }
}

/// Returns the user after the change, and whether the account was contested.
async fn reset(
    connection: &mut PgConnection,
    app: &AppId,
    change: &PasswordReset,
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
    if !before.is_verified {
        identities::delete_of_user(&mut transaction, app, change.user, &change.event, notify).await?;
    }
    outbox::insert_epoch_change(&mut transaction, app, &changed.epoch_change(None)).await?;
    let notice = Mail { kind: MailKind::PasswordChanged, recipient: Some(change.user), requested_at: change.at };
    outbox::insert_mail(&mut transaction, app, &notice, notify).await?;
    audit::insert(&mut transaction, app, &change.event, notify).await?;
    transaction.commit().await?;
    Ok(Some((changed, before.contested)))
}

async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    change: &PasswordReset,
) -> Result<UserRow, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET email_verified_at = coalesce(email_verified_at, $5),
            epoch = epoch + 1,
            version = version + 1,
            password_hash = $6,
            foreign_hash = NULL,
            foreign_hash_at = NULL,
            password_session = NULL,
            contested = false,
            pending_email = NULL,
            pending_email_canonical = NULL,
            updated_at = $5
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4",
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.address,
        change.at,
        change.password_hash.expose(),
    )
    .fetch_one(connection)
    .await
}
