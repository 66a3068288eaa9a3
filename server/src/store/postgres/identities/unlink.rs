//! Removes a provider's identities from a user, if the user has another login method.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use crate::{
    domain::ports::{StoreError, UnlinkOutcome, UnlinkRequest},
    store::postgres::{PostgresStore, audit, groups, users::lock_user},
};

/// How many identities a user has.
struct IdentityCounts {
    /// Identities at the Provider of the request.
    of_provider: i64,
    /// Identities at other Providers of the App, with which the user can still log in.
    others: i64,
}

impl PostgresStore {
    pub(super) async fn unlink_identity(
        &self,
        app: &AppId,
        request: UnlinkRequest,
    ) -> Result<UnlinkOutcome, StoreError> {
        let mut call = self.begin_call("unlink_identity").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, unlink(connection, app, &request, self.should_notify())).await;
        let outcome = call.end_call(outcome)?;
        if outcome == UnlinkOutcome::Done {
            self.notify_deliverer();
        }
        Ok(outcome)
    }
}

async fn unlink(
    connection: &mut PgConnection,
    app: &AppId,
    request: &UnlinkRequest,
    notify: bool,
) -> Result<UnlinkOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // A separate statement takes the lock, so that the next statement sees what concurrent calls have removed.
    let Some(user) = lock_user(&mut transaction, app, request.user).await? else {
        transaction.rollback().await?;
        return Ok(UnlinkOutcome::NotLinked);
    };
    let counts = count(&mut transaction, app, request).await?;
    if counts.of_provider == 0 {
        transaction.rollback().await?;
        return Ok(UnlinkOutcome::NotLinked);
    }
    if !user.can_use_password() && counts.others == 0 {
        transaction.rollback().await?;
        return Ok(UnlinkOutcome::LastLoginMethod);
    }
    sqlx::query!(
        "DELETE FROM identities WHERE app_id = $1 AND user_id = $2 AND provider = $3",
        app.as_str(),
        request.user.0,
        request.provider.as_str(),
    )
    .execute(&mut *transaction)
    .await?;
    let provider = Some(request.provider.as_str());
    groups::remove_reported(&mut transaction, app, request.user, provider, &request.event, notify).await?;
    audit::insert(&mut transaction, app, &request.event, notify).await?;
    transaction.commit().await?;
    Ok(UnlinkOutcome::Done)
}

async fn count(
    connection: &mut PgConnection,
    app: &AppId,
    request: &UnlinkRequest,
) -> Result<IdentityCounts, sqlx::Error> {
    let usable: Vec<String> = request.usable.iter().map(|name| name.as_str().to_owned()).collect();
    sqlx::query_as!(
        IdentityCounts,
        r#"
        SELECT count(*) FILTER (WHERE provider = $3) AS "of_provider!",
            count(*) FILTER (WHERE provider <> $3 AND provider = ANY ($4)) AS "others!"
        FROM identities WHERE app_id = $1 AND user_id = $2
        "#,
        app.as_str(),
        request.user.0,
        request.provider.as_str(),
        &usable,
    )
    .fetch_one(connection)
    .await
}
