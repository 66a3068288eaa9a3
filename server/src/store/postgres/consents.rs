//! The consents of users to Clients.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use time::OffsetDateTime;
use tokio::time::timeout_at;

use super::{PostgresStore, audit, users::lock_user};
use crate::{
    domain::{
        audit::Event,
        openid::scope::Scopes,
        ports::{Consents, MAX_CONSENTS, NewConsent, StoreError, StoredConsent},
        user::UserId,
    },
    store::Stores,
};

struct ConsentRow {
    client_uid: String,
    scopes: String,
    at: OffsetDateTime,
}

// === impl ConsentRow ===

impl From<ConsentRow> for StoredConsent {
    fn from(row: ConsentRow) -> Self {
        Self { client_uid: row.client_uid, scopes: Scopes::parse_known(&row.scopes), at: row.at }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    async fn consented_scopes(&self, app: &AppId, user: UserId, client_uid: &str) -> Result<Scopes, StoreError> {
        let mut call = self.begin_call("consented_scopes").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_scalar!(
            "SELECT scopes FROM consents WHERE app_id = $1 AND user_id = $2 AND client_uid = $3",
            app.as_str(),
            user.0,
            client_uid,
        );
        let scopes = timeout_at(deadline, query.fetch_optional(connection)).await;
        Ok(call.end_call(scopes)?.map_or(Scopes::NONE, |scopes| Scopes::parse_known(&scopes)))
    }

    async fn consents(&self, app: &AppId, user: UserId) -> Result<Vec<StoredConsent>, StoreError> {
        let mut call = self.begin_call("consents").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_as!(
            ConsentRow,
            "SELECT client_uid, scopes, at FROM consents
             WHERE app_id = $1 AND user_id = $2
             ORDER BY at DESC, client_uid
             LIMIT $3",
            app.as_str(),
            user.0,
            MAX_CONSENTS,
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        Ok(call.end_call(rows)?.into_iter().map(StoredConsent::from).collect())
    }

    async fn add_consent(&self, app: &AppId, consent: NewConsent) -> Result<bool, StoreError> {
        let mut call = self.begin_call("add_consent").await?;
        let (connection, deadline) = call.parts();
        let added = timeout_at(deadline, add(connection, app, &consent, self.should_notify())).await;
        call.end_call(added)
    }

    async fn remove_consent(
        &self,
        app: &AppId,
        user: UserId,
        client_uid: &str,
        event: Event,
    ) -> Result<bool, StoreError> {
        let mut call = self.begin_call("remove_consent").await?;
        let (connection, deadline) = call.parts();
        let removed =
            timeout_at(deadline, remove(connection, app, user, client_uid, &event, self.should_notify())).await;
        call.end_call(removed)
    }
}

async fn add(
    connection: &mut PgConnection,
    app: &AppId,
    consent: &NewConsent,
    notify: bool,
) -> Result<bool, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // The lock serializes concurrent calls for one user, so that the user cannot exceed the maximum number of consents.
    if lock_user(&mut transaction, app, consent.user).await?.is_none() {
        transaction.rollback().await?;
        return Ok(false);
    }
    let stored = sqlx::query_scalar!(
        "SELECT scopes FROM consents WHERE app_id = $1 AND user_id = $2 AND client_uid = $3",
        app.as_str(),
        consent.user.0,
        consent.client_uid,
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let stored = stored.map_or(Scopes::NONE, |scopes| Scopes::parse_known(&scopes));
    let scopes: Scopes = stored.iter().chain(consent.scopes.iter()).collect();
    sqlx::query!(
        "INSERT INTO consents (app_id, user_id, client_uid, scopes, at) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (app_id, user_id, client_uid) DO UPDATE SET scopes = EXCLUDED.scopes, at = EXCLUDED.at",
        app.as_str(),
        consent.user.0,
        consent.client_uid,
        scopes.to_string(),
        consent.at,
    )
    .execute(&mut *transaction)
    .await?;
    sqlx::query!(
        "DELETE FROM consents
         WHERE app_id = $1 AND user_id = $2 AND client_uid IN (
             SELECT client_uid FROM consents
             WHERE app_id = $1 AND user_id = $2
             ORDER BY client_uid = $4 DESC, at DESC, client_uid
             OFFSET $3
         )",
        app.as_str(),
        consent.user.0,
        MAX_CONSENTS,
        consent.client_uid,
    )
    .execute(&mut *transaction)
    .await?;
    audit::insert(&mut transaction, app, &consent.event, notify).await?;
    transaction.commit().await?;
    Ok(true)
}

async fn remove(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    client_uid: &str,
    event: &Event,
    notify: bool,
) -> Result<bool, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let removed = sqlx::query!(
        "DELETE FROM consents WHERE app_id = $1 AND user_id = $2 AND client_uid = $3",
        app.as_str(),
        user.0,
        client_uid,
    )
    .execute(&mut *transaction)
    .await?;
    if removed.rows_affected() == 0 {
        transaction.rollback().await?;
        return Ok(false);
    }
    audit::insert(&mut transaction, app, event, notify).await?;
    transaction.commit().await?;
    Ok(true)
}

impl Consents for Stores {
    async fn consented_scopes(&self, app: &AppId, user: UserId, client_uid: &str) -> Result<Scopes, StoreError> {
        self.postgres.consented_scopes(app, user, client_uid).await
    }

    async fn consents(&self, app: &AppId, user: UserId) -> Result<Vec<StoredConsent>, StoreError> {
        self.postgres.consents(app, user).await
    }

    async fn add_consent(&self, app: &AppId, consent: NewConsent) -> Result<bool, StoreError> {
        self.postgres.add_consent(app, consent).await
    }

    async fn remove_consent(
        &self,
        app: &AppId,
        user: UserId,
        client_uid: &str,
        event: Event,
    ) -> Result<bool, StoreError> {
        self.postgres.remove_consent(app, user, client_uid, event).await
    }
}
