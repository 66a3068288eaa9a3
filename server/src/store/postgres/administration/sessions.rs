//! Ends all sessions of a user by raising the epoch.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use crate::{
    domain::{
        audit::Event,
        mail::EpochChange,
        ports::StoreError,
        user::{Epoch, UserId},
    },
    store::postgres::{PostgresStore, audit, outbox},
};

impl PostgresStore {
    pub(super) async fn end_all_sessions(
        &self,
        app: &AppId,
        user: UserId,
        event: &Event,
    ) -> Result<Option<EpochChange>, StoreError> {
        let mut call = self.begin_administration("end_all_sessions").await?;
        let (connection, deadline) = call.parts();
        let raised = timeout_at(deadline, raise_epoch(connection, app, user, event, self.should_notify())).await;
        call.end_call(raised)
    }
}

async fn raise_epoch(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    event: &Event,
    notify: bool,
) -> Result<Option<EpochChange>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let epoch = sqlx::query_scalar!(
        "UPDATE users SET epoch = epoch + 1, version = version + 1, updated_at = $3
         WHERE app_id = $1 AND id = $2
         RETURNING epoch",
        app.as_str(),
        user.0,
        event.at,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(epoch) = epoch.map(Epoch) else {
        transaction.rollback().await?;
        return Ok(None);
    };
    let epoch_change = EpochChange { user, epoch, kept_session: None };
    outbox::insert_epoch_change(&mut transaction, app, &epoch_change).await?;
    audit::insert(&mut transaction, app, event, notify).await?;
    transaction.commit().await?;
    Ok(Some(epoch_change))
}
