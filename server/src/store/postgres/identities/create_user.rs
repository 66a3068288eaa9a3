//! Creates a user from a provider's identity.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::insert;
use crate::{
    domain::{
        administration::CreatedBy,
        mail::Mail,
        ports::{NewFederatedUser, NewIdentity, StoreError},
    },
    store::postgres::{PostgresStore, apps, audit, outbox, users::app_being_deleted},
};

enum CreateOutcome {
    Created,
    /// Another user has the email address or the identity.
    Taken,
    /// The App's users are being deleted.
    AppBeingDeleted,
}

impl PostgresStore {
    pub(super) async fn create_federated_user(
        &self,
        app: &AppId,
        user: NewFederatedUser,
        identity: NewIdentity,
        mail: Option<Mail>,
    ) -> Result<bool, StoreError> {
        let mut call = self.begin_call("create_federated").await?;
        let (connection, deadline) = call.parts();
        let creating = create(connection, app, &user, &identity, mail.as_ref(), self.should_notify());
        let outcome = timeout_at(deadline, creating).await;
        match call.end_call(outcome)? {
            CreateOutcome::Created => {
                if mail.is_some() {
                    self.notify_deliverer();
                }
                Ok(true)
            }
            CreateOutcome::Taken => Ok(false),
            CreateOutcome::AppBeingDeleted => Err(app_being_deleted()),
        }
    }
}

async fn create(
    connection: &mut PgConnection,
    app: &AppId,
    user: &NewFederatedUser,
    identity: &NewIdentity,
    mail: Option<&Mail>,
    notify: bool,
) -> Result<CreateOutcome, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    if !apps::is_active(&mut transaction, app).await? {
        transaction.rollback().await?;
        return Ok(CreateOutcome::AppBeingDeleted);
    }
    if !insert_user(&mut transaction, app, user).await? || !insert(&mut transaction, app, user.id, identity).await? {
        transaction.rollback().await?;
        return Ok(CreateOutcome::Taken);
    }
    if let Some(mail) = mail {
        outbox::insert_mail(&mut transaction, app, mail, notify).await?;
    }
    audit::insert(&mut transaction, app, &user.event, notify).await?;
    transaction.commit().await?;
    Ok(CreateOutcome::Created)
}

/// Inserts the user. Returns `false` if another user has the email address.
async fn insert_user(connection: &mut PgConnection, app: &AppId, user: &NewFederatedUser) -> Result<bool, sqlx::Error> {
    let inserted = sqlx::query!(
        "INSERT INTO users
            (app_id, id, email, email_canonical, email_verified_at, pending_email, pending_email_canonical, name,
                created_by, created_at, updated_at)
         VALUES ($1, $2, $3, $4, CASE WHEN $3::text IS NULL THEN NULL ELSE $8::timestamptz END, $5, $6, $7, $9, $8, $8)
         ON CONFLICT DO NOTHING",
        app.as_str(),
        user.id.0,
        user.email.as_ref().map(|email| email.as_str()),
        user.email.as_ref().map(|email| email.canonical()),
        user.pending_email.as_ref().map(|email| email.as_str()),
        user.pending_email.as_ref().map(|email| email.canonical()),
        user.name,
        user.created_at,
        CreatedBy::Provider.as_str(),
    )
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() > 0)
}
