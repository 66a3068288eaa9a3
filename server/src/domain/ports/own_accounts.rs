//! The account of a logged-in user, in Postgres.

use std::future::Future;

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use uuid::Uuid;

use super::error::StoreResult;
use crate::domain::{
    audit::Event,
    email::Email,
    mail::EpochChange,
    password::PasswordHash,
    session::{Session, SessionId},
    user::{Epoch, Name, User, UserId},
};

/// A new name for a user.
#[derive(Clone, Debug)]
pub struct Rename {
    pub user: UserId,
    /// The epoch that the user had when the request read the user. The change applies only if the user still has this
    /// epoch. Unless stated otherwise, `epoch` means the same in the types below.
    pub epoch: Epoch,
    pub name: Name,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// The result of a rename.
#[derive(Clone, Debug)]
pub struct Renamed {
    pub user: User,
    /// The outbox row that propagates the profile if the request does not.
    pub outbox_row: Uuid,
}

/// A logged-in user's change of the password. Also used to set the first password.
#[derive(Clone, Debug)]
pub struct PasswordChange {
    pub user: UserId,
    pub epoch: Epoch,
    pub password_hash: PasswordHash,
    /// The session that made the change and that continues; all other sessions end.
    pub kept_session: SessionId,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// A new email address that is pending until the user confirms it.
#[derive(Clone, Debug)]
pub struct AddressChangeRequest {
    pub user: UserId,
    pub epoch: Epoch,
    pub address: Email,
    /// Whether the rate limits allow the mail with the code.
    pub is_mailed: bool,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// A change that makes the pending email address the address of the user.
#[derive(Clone, Debug)]
pub struct AddressChange {
    pub user: UserId,
    /// The user's epoch when the code was made. The change applies only if the user still has this epoch.
    pub epoch: Epoch,
    /// The canonical email address to which the code was sent. The change applies only if this address is the pending
    /// one.
    pub address: String,
    /// The session that made the change and that continues; all other sessions end.
    pub kept_session: SessionId,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// A user to delete.
#[derive(Clone, Debug)]
pub struct UserDeletion {
    pub user: UserId,
    pub epoch: Epoch,
    pub event: Event,
}

/// The result of a change of the email address.
#[derive(Clone, Debug)]
pub struct AddressChanged {
    pub user: User,
    /// Set if an unverified account had the email address: the change has deleted that account, and this is the last
    /// epoch of that account.
    pub removed: Option<EpochChange>,
}

/// The account of a logged-in user, in Postgres. Each change is written in one transaction with its event. A change
/// returns `None` and writes nothing if the user is deleted or disabled, or the epoch has risen. `set_password`,
/// `request_address_change` and `delete_user` also return `None` and write nothing if the email address of the account
/// is unverified.
pub trait OwnAccounts: Sync {
    /// Returns the user of the session, or `None` if the user is deleted or disabled, or the session has ended. The
    /// session is live if the user has the epoch of the session. It is also live at a later epoch, if an outbox row
    /// still has to propagate this epoch to Redis and names the session as the one that continues.
    fn user_of_session(&self, app: &AppId, session: &Session)
    -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Sets the name and adds an outbox row that propagates the profile.
    fn rename(&self, app: &AppId, change: Rename) -> impl Future<Output = StoreResult<Option<Renamed>>> + Send;

    /// Removes the outbox row of a rename after its profile was written to Redis.
    fn remove_profile_row(&self, app: &AppId, row: Uuid) -> impl Future<Output = StoreResult<()>> + Send;

    /// Sets the password, raises the epoch, removes a pending email address unless the user has no other address,
    /// queues the notice to a verified email address, and adds an outbox row that propagates the epoch.
    fn set_password(
        &self,
        app: &AppId,
        change: PasswordChange,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Makes the email address the pending one; it replaces an earlier pending address. Queues the mail with the code
    /// to the pending address, if `is_mailed` is set, and the notice to the current address, if there is one.
    fn request_address_change(
        &self,
        app: &AppId,
        request: AddressChangeRequest,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Makes the pending email address the user's verified address, deletes an unverified account that had this
    /// address, raises the epoch, queues the notice to the previous email address, if there was one, and adds outbox
    /// rows that propagate the epochs of both accounts. Also returns `None` if another account has verified the email
    /// address.
    fn change_address(
        &self,
        app: &AppId,
        change: AddressChange,
    ) -> impl Future<Output = StoreResult<Option<AddressChanged>>> + Send;

    /// Deletes the user with the user's identities, memberships, consents and outbox rows, and adds an outbox row that
    /// propagates the last epoch. Returns this epoch.
    fn delete_user(
        &self,
        app: &AppId,
        deletion: UserDeletion,
    ) -> impl Future<Output = StoreResult<Option<Epoch>>> + Send;
}
