//! Removes a user's identities at a Provider, if an email address or another identity remains.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use crate::{
    domain::{
        audit::Event,
        ports::{IdentityRemoval, StoreError},
        user::UserId,
    },
    store::postgres::{PostgresStore, audit, groups, users::lock_user},
};

impl PostgresStore {
    pub(super) async fn remove_identities(
        &self,
        app: &AppId,
        user: UserId,
        provider: &str,
        event: &Event,
    ) -> Result<IdentityRemoval, StoreError> {
        let mut call = self.begin_administration("remove_identities").await?;
        let (connection, deadline) = call.parts();
        let removing = remove(connection, app, user, provider, event, self.should_notify());
        let outcome = timeout_at(deadline, removing).await;
        let outcome = call.end_call(outcome)?;
        if outcome == IdentityRemoval::Removed {
            self.notify_deliverer();
        }
        Ok(outcome)
    }
}

async fn remove(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    provider: &str,
    event: &Event,
    notify: bool,
) -> Result<IdentityRemoval, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // A separate statement takes the lock, so that the next statement sees what concurrent calls have removed.
    let Some(locked) = lock_user(&mut transaction, app, user).await? else {
        transaction.rollback().await?;
        return Ok(IdentityRemoval::NotFound);
    };
    let counts = sqlx::query!(
        r#"
        SELECT count(*) FILTER (WHERE provider = $3) AS "of_provider!",
            count(*) FILTER (WHERE provider <> $3) AS "others!"
        FROM identities WHERE app_id = $1 AND user_id = $2
        "#,
        app.as_str(),
        user.0,
        provider,
    )
    .fetch_one(&mut *transaction)
    .await?;
    if counts.of_provider == 0 {
        transaction.rollback().await?;
        return Ok(IdentityRemoval::NotFound);
    }
    if locked.email.is_none() && counts.others == 0 {
        transaction.rollback().await?;
        return Ok(IdentityRemoval::LastIdentity);
    }
    sqlx::query!(
        "DELETE FROM identities WHERE app_id = $1 AND user_id = $2 AND provider = $3",
        app.as_str(),
        user.0,
        provider,
    )
    .execute(&mut *transaction)
    .await?;
    groups::remove_reported(&mut transaction, app, user, Some(provider), event, notify).await?;
    audit::insert(&mut transaction, app, event, notify).await?;
    transaction.commit().await?;
    Ok(IdentityRemoval::Removed)
}
