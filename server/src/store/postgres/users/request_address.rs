//! Makes a new email address pending until it is confirmed with a code.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{UserRow, user_query};
use crate::{
    domain::{
        mail::{Mail, MailKind},
        ports::{AddressChangeRequest, StoreError},
        user::User,
    },
    store::postgres::{PostgresStore, audit, outbox},
};

impl PostgresStore {
    pub(super) async fn request_address_change(
        &self,
        app: &AppId,
        request: AddressChangeRequest,
    ) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("ask_for_address").await?;
        let (connection, deadline) = call.parts();
        let changed = timeout_at(deadline, set_pending(connection, app, &request, self.should_notify())).await;
        let Some(row) = call.end_call(changed)? else { return Ok(None) };
        self.notify_deliverer();
        User::try_from(row).map(Some)
    }
}

async fn set_pending(
    connection: &mut PgConnection,
    app: &AppId,
    request: &AddressChangeRequest,
    notify: bool,
) -> Result<Option<UserRow>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let Some(changed) = update_user(&mut transaction, app, request).await? else {
        transaction.rollback().await?;
        return Ok(None);
    };
    let code = request.is_mailed.then_some(MailKind::Confirm);
    let notice = changed.email.is_some().then_some(MailKind::AddressChanging);
    for kind in code.into_iter().chain(notice) {
        let mail = Mail { kind, recipient: Some(request.user), requested_at: request.at };
        outbox::insert_mail(&mut transaction, app, &mail, notify).await?;
    }
    audit::insert(&mut transaction, app, &request.event, notify).await?;
    transaction.commit().await?;
    Ok(Some(changed))
}

async fn update_user(
    connection: &mut PgConnection,
    app: &AppId,
    request: &AddressChangeRequest,
) -> Result<Option<UserRow>, sqlx::Error> {
    user_query!(
        RETURNING
        "UPDATE users
         SET pending_email = $4, pending_email_canonical = $5, version = version + 1, updated_at = $6
         WHERE app_id = $1 AND id = $2 AND epoch = $3 AND disabled_at IS NULL
            AND (email IS NULL OR email_verified_at IS NOT NULL)",
        app.as_str(),
        request.user.0,
        request.epoch.0,
        request.address.as_str(),
        request.address.canonical(),
        request.at,
    )
    .fetch_optional(connection)
    .await
}
