//! Identities, in Postgres.

use std::future::Future;

use latchkey_crds::types::{AppId, ProviderName};
use time::OffsetDateTime;

use super::error::StoreResult;
use crate::domain::{
    audit::Event,
    email::Email,
    identity::Identity,
    mail::Mail,
    user::{Epoch, User, UserId},
};

/// An identity to store.
#[derive(Clone, Debug)]
pub struct NewIdentity {
    pub authority: String,
    pub subject: String,
    /// The Provider's name. It is not part of the identity.
    pub provider: ProviderName,
    pub email: Option<Email>,
    pub at: OffsetDateTime,
}

/// A user to create from a provider's identity.
#[derive(Clone, Debug)]
pub struct NewFederatedUser {
    pub id: UserId,
    /// The email address, if the provider has verified it and the App lets this Provider link by email address.
    pub email: Option<Email>,
    /// The email address, if it does not count as verified. It is then pending until the user confirms it.
    pub pending_email: Option<Email>,
    /// Empty if the provider sends no name.
    pub name: String,
    pub created_at: OffsetDateTime,
    pub event: Event,
}

/// A request to link an identity to a user. The link applies only if the user is enabled and still has this epoch.
#[derive(Clone, Debug)]
pub struct LinkRequest {
    pub user: UserId,
    pub epoch: Epoch,
    /// The canonical email address by which the user was found. The link applies only if the user has verified this
    /// address. `None` for a logged-in user.
    pub address: Option<String>,
    pub identity: NewIdentity,
    pub event: Event,
}

/// A request to give an account with an unverified email address to the user of a provider that has verified this
/// address. The transfer applies only if the account is enabled, still has this epoch, and has not verified the email
/// address.
#[derive(Clone, Debug)]
pub struct AccountTransfer {
    pub user: UserId,
    pub epoch: Epoch,
    pub address: String,
    /// Replaces the name that was registered.
    pub name: String,
    pub identity: NewIdentity,
    pub event: Event,
}

/// A request to remove a Provider's identities from a user.
#[derive(Clone, Debug)]
pub struct UnlinkRequest {
    pub user: UserId,
    pub provider: ProviderName,
    /// The Providers of the App. An identity of any other Provider cannot be used to log in.
    pub usable: Vec<ProviderName>,
    pub event: Event,
}

/// The outcome of linking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkOutcome {
    Done,
    /// The identity already belongs to the user with this id; nothing was written.
    AlreadyLinked(UserId),
    /// The user has changed since it was read; nothing was written.
    UserChanged,
}

/// The outcome of unlinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnlinkOutcome {
    Done,
    /// The user has no identity of that Provider.
    NotLinked,
    /// Without these identities the user could no longer log in; nothing was written.
    LastLoginMethod,
}

/// Identities, in Postgres. Each change is written in one transaction with its audit event and its mails.
pub trait Identities: Sync {
    fn user_by_identity(
        &self,
        app: &AppId,
        authority: &str,
        subject: &str,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Creates the user, the identity and the mail. Returns false and writes nothing if the identity or the email
    /// address already belongs to a user. Of concurrent calls for one identity, only one creates the user.
    fn create_federated_user(
        &self,
        app: &AppId,
        user: NewFederatedUser,
        identity: NewIdentity,
        mail: Option<Mail>,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Links the identity and queues the notice to the email address of the user, if it is verified.
    fn link_identity(&self, app: &AppId, linking: LinkRequest)
    -> impl Future<Output = StoreResult<LinkOutcome>> + Send;

    /// Transfers the account. Returns `None` and writes nothing if the user has changed or the identity already belongs
    /// to a user. Otherwise removes the password, the pending email address, all other identities, the memberships from
    /// providers and the consents, replaces the name, makes a contested account uncontested, marks the email address
    /// verified, links the identity, raises the epoch, and adds an outbox row that propagates the epoch.
    fn transfer_account(
        &self,
        app: &AppId,
        change: AccountTransfer,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Returns the user's identities, the oldest first.
    fn identities(&self, app: &AppId, user: UserId) -> impl Future<Output = StoreResult<Vec<Identity>>> + Send;

    /// Removes the user's identities at the Provider, and the memberships that it reported. Writes nothing if the user
    /// would then have neither a password nor an identity of a Provider in `usable`. Concurrent calls cannot together
    /// remove the last way to log in.
    fn unlink_identity(
        &self,
        app: &AppId,
        unlinking: UnlinkRequest,
    ) -> impl Future<Output = StoreResult<UnlinkOutcome>> + Send;
}
