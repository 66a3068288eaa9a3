//! Deletes a user. Postgres also deletes the user's identities, consents and memberships (foreign keys with ON DELETE
//! CASCADE).

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use crate::{
    domain::{
        administration::Version,
        audit::Event,
        mail::EpochChange,
        ports::{RemovalOutcome, StoreError},
        user::{Epoch, UserId},
    },
    store::postgres::{PostgresStore, audit, outbox},
};

impl PostgresStore {
    pub(super) async fn remove_user(
        &self,
        app: &AppId,
        user: UserId,
        if_version: Option<Version>,
        event: &Event,
    ) -> Result<RemovalOutcome, StoreError> {
        let mut call = self.begin_administration("remove_user").await?;
        let (connection, deadline) = call.parts();
        let removing = remove(connection, app, user, if_version, event, self.should_notify());
        let outcome = timeout_at(deadline, removing).await;
        call.end_call(outcome)
    }
}

async fn remove(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    if_version: Option<Version>,
    event: &Event,
    notify: bool,
) -> Result<RemovalOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let deleted = sqlx::query!(
        r#"
        DELETE FROM users
        WHERE app_id = $1 AND id = $2 AND ($3::bigint IS NULL OR version = $3)
        RETURNING epoch + 1 AS "epoch!", version + 1 AS "version!"
        "#,
        app.as_str(),
        user.0,
        if_version.map(|version| version.0),
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let Some(deleted) = deleted else {
        let exists = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT FROM users WHERE app_id = $1 AND id = $2) AS "exists!""#,
            app.as_str(),
            user.0,
        )
        .fetch_one(&mut *transaction)
        .await?;
        transaction.rollback().await?;
        return Ok(if exists { RemovalOutcome::VersionConflict } else { RemovalOutcome::NotFound });
    };
    let epoch = Epoch(deleted.epoch);
    outbox::delete_rows_of(&mut transaction, app, &[user.0]).await?;
    let epoch_change = EpochChange { user, epoch, kept_session: None };
    outbox::insert_epoch_change(&mut transaction, app, &epoch_change).await?;
    audit::insert_deletion(&mut transaction, app, event, deleted.version, notify).await?;
    transaction.commit().await?;
    Ok(RemovalOutcome::Removed(epoch_change))
}
