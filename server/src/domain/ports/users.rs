//! Users, in Postgres.

use std::future::Future;

use latchkey_crds::types::AppId;
use time::OffsetDateTime;

use super::error::StoreResult;
use crate::domain::{
    audit::Event,
    email::Email,
    foreign_hash::HashClass,
    mail::Mail,
    password::PasswordHash,
    session::SessionId,
    user::{Epoch, Name, User, UserId},
};

/// The data that a login needs about an email address.
#[derive(Clone, Debug)]
pub struct LoginCandidate {
    pub user: Option<User>,
    /// The classes of the hashes of the App: of its foreign hashes, and of the hashes that servers made with the
    /// current or earlier parameters.
    pub hash_classes: Vec<HashClass>,
}

/// A user to create.
#[derive(Clone, Debug)]
pub struct NewUser {
    pub id: UserId,
    pub email: Email,
    pub name: Name,
    pub password_hash: PasswordHash,
    pub created_at: OffsetDateTime,
    pub event: Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateUserOutcome {
    Created,
    /// Another account has the email address; nothing was written.
    AddressTaken,
}

/// A change that marks the email address of a user as verified.
#[derive(Clone, Debug)]
pub struct Confirmation {
    pub user: UserId,
    /// The user's epoch when the code was made. The change applies only if the user still has this epoch.
    pub epoch: Epoch,
    /// The canonical email address to which the code was sent. The change applies only if the user has this email
    /// address.
    pub address: String,
    /// The session that the client gets. If the account was contested, this session can set a password without the old
    /// one.
    pub session: SessionId,
    /// Whether the session exists already, because the user is logged in. If so, the session continues, and the
    /// identities, memberships and consents remain.
    pub keeps_session: bool,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// The result of a confirmation or a reset.
#[derive(Clone, Debug)]
pub struct ChangedUser {
    /// The user after the change, with the raised epoch.
    pub user: User,
    /// Whether the account was contested. If so, its earlier password was removed.
    pub was_contested: bool,
}

/// A change that sets a password with a code that was sent by email.
#[derive(Clone, Debug)]
pub struct PasswordReset {
    pub user: UserId,
    /// The user's epoch when the code was made. The change applies only if the user still has this epoch.
    pub epoch: Epoch,
    /// The canonical email address to which the code was sent. The change applies only if the user has this email
    /// address.
    pub address: String,
    pub password_hash: PasswordHash,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// Users, in Postgres. A change to a user is written in one transaction with its mails and its event.
pub trait Users: Sync {
    fn user(&self, app: &AppId, id: UserId) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Finds the user by the canonical email address. A pending email address matches no user.
    fn user_by_email(&self, app: &AppId, email: &Email) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Like `user_by_email`, but also returns the classes of the hashes in the App, in one round trip.
    fn login_candidate(&self, app: &AppId, email: &Email) -> impl Future<Output = StoreResult<LoginCandidate>> + Send;

    /// Creates the user and queues the mail. Writes nothing if another account has the email address. Of concurrent
    /// calls for one email address, only one creates the user.
    fn create_user(
        &self,
        app: &AppId,
        user: NewUser,
        mail: Option<Mail>,
    ) -> impl Future<Output = StoreResult<CreateUserOutcome>> + Send;

    /// Records that somebody registered a known email address again. `contest` is set if the password of the request is
    /// not known to be that of the account. If `contest` is set and the user is still unverified and at `epoch`, the
    /// account becomes contested: its password is removed when the email address is confirmed. The mail, if there is
    /// one, is queued in any case. Takes as long as `create_user`, so that the time does not reveal whether the email
    /// address has an account.
    fn record_repeated_registration(
        &self,
        app: &AppId,
        user: UserId,
        epoch: Epoch,
        contest: bool,
        mail: Option<Mail>,
        event: Event,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Replaces a hash with a new hash of the same password, which has the class of new hashes. Does nothing if the
    /// stored hash has changed.
    fn replace_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Confirms the email address. Returns `None` and writes nothing if the epoch or the email address has changed, or
    /// the user is deleted or disabled. Otherwise, in one transaction: marks the email address verified, raises the
    /// epoch, makes a contested account uncontested and removes its password, removes the identities, the memberships
    /// from providers and the consents unless the session of `change` exists already, and adds an outbox row that
    /// propagates the epoch.
    fn confirm_address(
        &self,
        app: &AppId,
        change: Confirmation,
    ) -> impl Future<Output = StoreResult<Option<ChangedUser>>> + Send;

    /// Resets the password. Returns `None` in the same cases as `confirm_address`. Otherwise, in one transaction: sets
    /// the password, marks the email address verified, removes a pending email address, makes a contested account
    /// uncontested, removes the identities, the memberships from providers and the consents if the email address was
    /// unverified, raises the epoch, queues the notice, and adds an outbox row that propagates the epoch.
    fn reset_password(
        &self,
        app: &AppId,
        change: PasswordReset,
    ) -> impl Future<Output = StoreResult<Option<ChangedUser>>> + Send;
}
