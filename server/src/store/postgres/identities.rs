//! Identities: links between users and subjects of providers.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;

use crate::{
    domain::{
        audit::Event,
        identity::Identity,
        mail::Mail,
        ports::{
            AccountTransfer, Identities, LinkOutcome, LinkRequest, NewFederatedUser, NewIdentity, StoreError,
            UnlinkOutcome, UnlinkRequest,
        },
        user::{User, UserId},
    },
    store::{Stores, postgres::groups},
};

mod create_user;
mod link;
mod read;
mod transfer;
mod unlink;

/// Links an identity to a user. Returns `false` if the identity is already linked to a user. Of concurrent calls, only
/// one succeeds.
async fn insert(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    identity: &NewIdentity,
) -> Result<bool, sqlx::Error> {
    let inserted = sqlx::query!(
        "INSERT INTO identities (app_id, authority, subject, user_id, provider, email, linked_at)
         VALUES ($1, $2, $3, $4, $5, $6, $7)
         ON CONFLICT DO NOTHING",
        app.as_str(),
        identity.authority,
        identity.subject,
        user.0,
        identity.provider.as_str(),
        identity.email.as_ref().map(|email| email.as_str()),
        identity.at,
    )
    .execute(connection)
    .await?;
    Ok(inserted.rows_affected() > 0)
}

/// Removes what the former owner has added to an account: all identities, the memberships in groups that Providers
/// reported, and the consents. Called after another person has proved to be the owner of the account's email address.
/// `event` is the event of the whole change: the events of the memberships get its time, session, IP address and
/// detail. The transaction must have locked the user.
pub(super) async fn delete_of_user(
    connection: &mut PgConnection,
    app: &AppId,
    user: UserId,
    event: &Event,
    notify: bool,
) -> Result<(), sqlx::Error> {
    sqlx::query!("DELETE FROM identities WHERE app_id = $1 AND user_id = $2", app.as_str(), user.0)
        .execute(&mut *connection)
        .await?;
    groups::remove_reported(connection, app, user, None, event, notify).await?;
    sqlx::query!("DELETE FROM consents WHERE app_id = $1 AND user_id = $2", app.as_str(), user.0)
        .execute(connection)
        .await
        .map(drop)
}

impl Identities for Stores {
    async fn user_by_identity(&self, app: &AppId, authority: &str, subject: &str) -> Result<Option<User>, StoreError> {
        self.postgres.user_by_identity(app, authority, subject).await
    }

    async fn create_federated_user(
        &self,
        app: &AppId,
        user: NewFederatedUser,
        identity: NewIdentity,
        mail: Option<Mail>,
    ) -> Result<bool, StoreError> {
        self.postgres.create_federated_user(app, user, identity, mail).await
    }

    async fn link_identity(&self, app: &AppId, request: LinkRequest) -> Result<LinkOutcome, StoreError> {
        self.postgres.link_identity(app, request).await
    }

    async fn transfer_account(&self, app: &AppId, transfer: AccountTransfer) -> Result<Option<User>, StoreError> {
        self.postgres.transfer_account(app, transfer).await
    }

    async fn identities(&self, app: &AppId, user: UserId) -> Result<Vec<Identity>, StoreError> {
        self.postgres.identities(app, user).await
    }

    async fn unlink_identity(&self, app: &AppId, request: UnlinkRequest) -> Result<UnlinkOutcome, StoreError> {
        self.postgres.unlink_identity(app, request).await
    }
}
