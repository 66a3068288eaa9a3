//! Deletes a user. Postgres also deletes the user's identities, consents and memberships (foreign keys with ON DELETE
//! CASCADE).

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use crate::{
    domain::{
        mail::EpochChange,
        ports::{StoreError, UserDeletion},
        user::Epoch,
    },
    store::postgres::{PostgresStore, audit, outbox},
};

impl PostgresStore {
    pub(super) async fn delete_user(&self, app: &AppId, removal: UserDeletion) -> Result<Option<Epoch>, StoreError> {
        let mut call = self.begin_call("delete_user").await?;
        let (connection, deadline) = call.parts();
        let epoch = timeout_at(deadline, delete(connection, app, &removal, self.should_notify())).await;
        call.end_call(epoch)
    }
}

/// Deletes the user. Returns the epoch that ends the user's sessions.
async fn delete(
    connection: &mut PgConnection,
    app: &AppId,
    removal: &UserDeletion,
    notify: bool,
) -> Result<Option<Epoch>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let deleted = sqlx::query!(
        r#"
        DELETE FROM users
        WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
            AND (email IS NULL OR email_verified_at IS NOT NULL)
        RETURNING epoch + 1 AS "epoch!", version + 1 AS "version!"
        "#,
        app.as_str(),
        removal.user.0,
        removal.epoch.0,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(deleted) = deleted else {
        transaction.rollback().await?;
        return Ok(None);
    };
    let epoch = Epoch(deleted.epoch);
    outbox::delete_rows_of(&mut transaction, app, &[removal.user.0]).await?;
    let epoch_change = EpochChange { user: removal.user, epoch, kept_session: None };
    outbox::insert_epoch_change(&mut transaction, app, &epoch_change).await?;
    audit::insert_deletion(&mut transaction, app, &removal.event, deleted.version, notify).await?;
    transaction.commit().await?;
    Ok(Some(epoch))
}
