//! Gives an account with an unverified email address to a provider's user. The provider has verified the address.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{delete_of_user, insert};
use crate::{
    domain::{
        ports::{AccountTransfer, StoreError},
        user::User,
    },
    store::postgres::{
        PostgresStore, audit, outbox,
        users::{UserRow, user_query},
    },
};

impl PostgresStore {
    pub(super) async fn transfer_account(
        &self,
        app: &AppId,
        transfer: AccountTransfer,
    ) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("take_over").await?;
        let (connection, deadline) = call.parts();
        let transferring = transfer_in_transaction(connection, app, &transfer, self.should_notify());
        let changed = timeout_at(deadline, transferring).await;
        call.end_call(changed)?.map(User::try_from).transpose()
    }
}

async fn transfer_in_transaction(
    connection: &mut PgConnection,
    app: &AppId,
    transfer: &AccountTransfer,
    notify: bool,
) -> Result<Option<UserRow>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let Some(changed) = update_user(&mut transaction, app, transfer).await? else {
        transaction.rollback().await?;
        return Ok(None);
    };
    delete_of_user(&mut transaction, app, transfer.user, &transfer.event, notify).await?;
    if !insert(&mut transaction, app, transfer.user, &transfer.identity).await? {
        transaction.rollback().await?;
        return Ok(None);
    }
    outbox::insert_epoch_change(&mut transaction, app, &changed.epoch_change(None)).await?;
    audit::insert(&mut transaction, app, &transfer.event, notify).await?;
    transaction.commit().await?;
    Ok(Some(changed))
}

async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    transfer: &AccountTransfer,
) -> Result<Option<UserRow>, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET email_verified_at = $5,
            epoch = epoch + 1,
            version = version + 1,
            password_hash = NULL,
            foreign_hash = NULL,
            foreign_hash_at = NULL,
            contested = false,
            pending_email = NULL,
            pending_email_canonical = NULL,
            name = $6,
            updated_at = $5
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND email_canonical = $4 AND email_verified_at IS NULL
            AND disabled_at IS NULL",
        app.as_str(),
        transfer.user.0,
        transfer.epoch.0,
        transfer.address,
        transfer.identity.at,
        transfer.name,
    )
    .fetch_optional(connection)
    .await
}
