//! Links an identity to an existing user.

use latchkey_crds::types::AppId;
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::insert;
use crate::{
    domain::{
        mail::{Mail, MailKind},
        ports::{LinkOutcome, LinkRequest, NewIdentity, StoreError},
        user::UserId,
    },
    store::postgres::{
        PostgresStore, audit, outbox,
        users::{LockedUser, lock_user},
    },
};

impl PostgresStore {
    pub(super) async fn link_identity(&self, app: &AppId, request: LinkRequest) -> Result<LinkOutcome, StoreError> {
        let mut call = self.begin_call("link_identity").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, link(connection, app, &request, self.should_notify())).await;
        let outcome = call.end_call(outcome)?;
        if outcome == LinkOutcome::Done {
            self.notify_deliverer();
        }
        Ok(outcome)
    }
}

async fn link(
    connection: &mut PgConnection,
    app: &AppId,
    request: &LinkRequest,
    notify: bool,
) -> Result<LinkOutcome, sqlx::Error> {
    let identity = &request.identity;
    let mut transaction = connection.begin().await?;
    let user = lock_user(&mut transaction, app, request.user).await?;
    let Some(user) = user.filter(|user| can_link(user, request)) else {
        transaction.rollback().await?;
        return Ok(LinkOutcome::UserChanged);
    };
    if !insert(&mut transaction, app, request.user, identity).await? {
        let owner = find_owner(&mut transaction, app, identity).await?;
        transaction.rollback().await?;
        return Ok(owner.map_or(LinkOutcome::UserChanged, LinkOutcome::AlreadyLinked));
    }
    if user.is_verified {
        let notice = Mail { kind: MailKind::NewSignIn, recipient: Some(request.user), requested_at: identity.at };
        outbox::insert_mail(&mut transaction, app, &notice, notify).await?;
    }
    audit::insert(&mut transaction, app, &request.event, notify).await?;
    transaction.commit().await?;
    Ok(LinkOutcome::Done)
}

/// Whether the user is unchanged since the request read the user. The epoch must be the same. A user who was found by a
/// verified email address must still have this address. Any other user must have a verified email address or none.
fn can_link(user: &LockedUser, request: &LinkRequest) -> bool {
    let is_same_address = match &request.address {
        None => user.email.is_none() || user.is_verified,
        Some(address) => user.has_address(address) && user.is_verified,
    };
    user.is_active_at(request.epoch) && is_same_address
}

/// Finds the user that the identity is linked to.
async fn find_owner(
    connection: &mut PgConnection,
    app: &AppId,
    identity: &NewIdentity,
) -> Result<Option<UserId>, sqlx::Error> {
    let owner = sqlx::query_scalar!(
        "SELECT user_id FROM identities WHERE app_id = $1 AND authority = $2 AND subject = $3",
        app.as_str(),
        identity.authority,
        identity.subject,
    )
    .fetch_optional(connection)
    .await?;
    Ok(owner.map(UserId))
}
