//! Sets the password of a user who is logged in.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{UserRow, user_query};
use crate::{
    domain::{
        mail::{Mail, MailKind},
        ports::{PasswordChange, StoreError},
        user::User,
    },
    store::postgres::{PostgresStore, audit, outbox},
};

impl PostgresStore {
    pub(super) async fn set_password(&self, app: &AppId, change: PasswordChange) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("set_password").await?;
        let (connection, deadline) = call.parts();
        let changed = timeout_at(deadline, set_password(connection, app, &change, self.should_notify())).await;
        let Some(row) = call.end_call(changed)? else { return Ok(None) };
        self.notify_deliverer();
        User::try_from(row).map(Some)
    }
}

async fn set_password(
    connection: &mut PgConnection,
    app: &AppId,
    change: &PasswordChange,
    notify: bool,
) -> Result<Option<UserRow>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let Some(changed) = update_user(&mut transaction, app, change).await? else {
        transaction.rollback().await?;
        return Ok(None);
    };
    let epoch_change = changed.epoch_change(Some(change.kept_session));
    outbox::insert_epoch_change(&mut transaction, app, &epoch_change).await?;
    if changed.email_verified_at.is_some() {
        let notice = Mail { kind: MailKind::PasswordChanged, recipient: Some(change.user), requested_at: change.at };
        outbox::insert_mail(&mut transaction, app, &notice, notify).await?;
    }
    audit::insert(&mut transaction, app, &change.event, notify).await?;
    transaction.commit().await?;
    Ok(Some(changed))
}

/// Sets the password, and cancels a pending change of email address: the user gets a notice of the pending change and,
/// if somebody else requested it, can stop it with a new password. If the pending address is the account's only
/// address, it stays pending.
async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    change: &PasswordChange,
) -> Result<Option<UserRow>, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET password_hash = $4,
            foreign_hash = NULL,
            foreign_hash_at = NULL,
            password_session = NULL,
            pending_email = CASE WHEN email IS NULL THEN pending_email END,
            pending_email_canonical = CASE WHEN email IS NULL THEN pending_email_canonical END,
            epoch = epoch + 1,
            version = version + 1,
            updated_at = $5
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
            AND (email IS NULL OR email_verified_at IS NOT NULL)",
        app.as_str(),
        change.user.0,
        change.epoch.0,
        change.password_hash.expose(),
        change.at,
    )
    .fetch_optional(connection)
    .await
}
