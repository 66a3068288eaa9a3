//! The users of an App, as its administrators see and change them, in Postgres.

use std::future::Future;

use latchkey_crds::types::{AppId, ProviderName, WebhookName};
use time::OffsetDateTime;
use uuid::Uuid;

use super::error::StoreResult;
use crate::domain::{
    administration::{AdminUser, AuditRow, CreatedBy, DeadLetterRow, ExternalId, Metadata, UserState, Version},
    audit::Event,
    email::Email,
    foreign_hash::HashClass,
    mail::{EpochChange, MailKind},
    password::PasswordHash,
    user::{Name, UserId},
};

/// Which users a page lists. At most one filter applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserFilter {
    /// All users, in the order of their ids.
    All {
        order: Order,
    },
    Email(Email),
    ExternalId(ExternalId),
    /// The users with an identity that has this subject, at the authority or the Provider in `of`.
    Subject {
        subject: String,
        of: SubjectOf,
    },
    /// The users in this state, in the order of their ids. The state is never [`UserState::Active`].
    State {
        state: UserState,
        order: Order,
    },
    /// The users with a canonical email address that begins with this text, sorted by the bytes of this address.
    EmailPrefix(String),
    /// The users with a lower-cased name that begins with this lower-cased text, sorted by the bytes of this name.
    NamePrefix(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubjectOf {
    Authority(String),
    Provider(ProviderName),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Ascending,
    Descending,
}

/// The last user of the previous page. `key` is the canonical email address or the lower-cased name if the filter is a
/// prefix, and empty otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserPosition {
    pub key: String,
    pub id: UserId,
}

/// A page of users. The users have neither identities nor `last_signed_in_at`.
#[derive(Clone, Debug)]
pub struct UserPage {
    pub users: Vec<AdminUser>,
    /// The position of the last user. `None` on the last page.
    pub next: Option<UserPosition>,
}

/// A user that an administrator or an import creates.
#[derive(Clone, Debug)]
pub struct NewAdministeredUser {
    pub id: UserId,
    pub external_id: Option<ExternalId>,
    /// `None` only if the App allows users without an email address. The user then has an identity.
    pub email: Option<Email>,
    pub email_verified: bool,
    pub name: Option<Name>,
    pub disabled: bool,
    /// A hash that the servers made, or one that was imported from another service (foreign).
    pub password_hash: Option<PasswordHash>,
    /// The class of the hash, if the hash is foreign. It is added to the foreign classes of the App.
    pub foreign_class: Option<HashClass>,
    pub metadata: Option<Metadata>,
    pub identities: Vec<NewAdministeredIdentity>,
    pub created_by: CreatedBy,
    pub created_at: OffsetDateTime,
}

#[derive(Clone, Debug)]
pub struct NewAdministeredIdentity {
    pub provider: ProviderName,
    pub authority: String,
    pub subject: String,
}

/// Why a user cannot be created or changed: another user has one of its unique values, or the App has too many classes
/// of foreign hashes. If several apply, the first one in this list is reported. Exception: the creation of a single
/// user reports `TooManyHashKinds` first, because it is an error of the request body, and errors of the body are
/// reported before conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserConflict {
    ExternalIdTaken(UserId),
    EmailTaken(UserId),
    IdentityTaken(UserId),
    /// The class of the password hash is new, and would exceed the maximum number or the maximum weight of the classes
    /// of the App.
    TooManyHashKinds,
}

/// A change to a user. A field that is `None` stays as it is.
#[derive(Clone, Debug)]
pub struct UserChange {
    pub user: UserId,
    /// If it is set, the change applies only to this version of the user.
    pub if_version: Option<Version>,
    pub name: Option<Option<Name>>,
    pub email: Option<Email>,
    pub email_verified: Option<bool>,
    pub disabled: Option<bool>,
    /// `Some(None)` removes the value.
    pub metadata: Option<Option<Metadata>>,
    /// `Some(None)` removes the value.
    pub external_id: Option<Option<ExternalId>>,
    pub at: OffsetDateTime,
    /// The event. The store sets its kind and the names of the changed fields: it derives both from the difference
    /// between the old and the new user.
    pub event: Event,
}

/// The result of a change. Nothing was written unless it is `Changed`.
#[derive(Clone, Debug)]
pub enum ChangeOutcome {
    Changed(Box<ChangedByAdministrator>),
    /// The user already has all these values.
    Unchanged(Box<AdminUser>),
    NotFound,
    /// The version of the user is not `if_version`.
    VersionConflict,
    /// The change sets `email_verified: true`, but the user has no email address.
    NoAddress,
    Conflict(UserConflict),
}

#[derive(Clone, Debug)]
pub struct ChangedByAdministrator {
    pub user: AdminUser,
    /// Set if the epoch was raised by a new email address, a change to `email_verified`, or `disabled: true`.
    pub epoch_change: Option<EpochChange>,
    /// The outbox row that propagates the profile, if the profile changed and the epoch did not.
    pub profile_row: Option<Uuid>,
}

/// The result of a deletion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovalOutcome {
    /// The epoch that ends the user's sessions.
    Removed(EpochChange),
    NotFound,
    VersionConflict,
}

/// The outcome for one user of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImportOutcome {
    Created(UserId),
    /// A user with this `external_id` exists.
    Unchanged(UserId),
    Conflict(UserConflict),
}

/// The outcome of a request for a mail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailOutcome {
    Queued,
    /// A mail of this kind to this user already waits in the outbox.
    Waiting,
    /// The user is disabled, has no address for the mail, or has a password and needs no invitation.
    NotPossible,
    NotFound,
}

/// The outcome of removing the identities of a Provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityRemoval {
    Removed,
    /// There is no such user, or the user has no identity at this Provider.
    NotFound,
    /// The user has no email address, and this is the last identity.
    LastIdentity,
}

/// Which events a page lists, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFilter {
    pub user: Option<UserId>,
    /// The name of an event kind.
    pub kind: Option<&'static str>,
    /// Only events at or after this time.
    pub after: Option<OffsetDateTime>,
    /// Only events before this time.
    pub before: Option<OffsetDateTime>,
}

/// The time and the id of the last row that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPosition {
    pub at: OffsetDateTime,
    pub id: Uuid,
}

/// A page of rows that are sorted by time.
#[derive(Clone, Debug)]
pub struct RowPage<T> {
    pub rows: Vec<T>,
    /// `None` on the last page.
    pub next: Option<RowPosition>,
}

/// Which dead letters are delivered again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetrySelection {
    Ids(Vec<Uuid>),
    /// The oldest 10,000 dead letters of the webhook.
    Webhook(WebhookName),
}

/// The users of an App, in Postgres. A change to a user is written in one transaction with its mails, its outbox rows
/// and its event. All calls of this trait together use only a part of the connection pool.
pub trait UserAdministration: Sync {
    /// Returns the next page: at most `limit` users that follow `after`.
    fn users(
        &self,
        app: &AppId,
        filter: &UserFilter,
        after: Option<&UserPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<UserPage>> + Send;

    /// Returns the user with the identities (the oldest first) and the time of the last login.
    fn administered_user(
        &self,
        app: &AppId,
        user: UserId,
    ) -> impl Future<Output = StoreResult<Option<AdminUser>>> + Send;

    /// Creates the user and queues the mail. Writes nothing on a conflict.
    fn create_administered_user(
        &self,
        app: &AppId,
        user: NewAdministeredUser,
        mail: Option<MailKind>,
        event: Event,
    ) -> impl Future<Output = StoreResult<Result<AdminUser, UserConflict>>> + Send;

    /// Changes the user. A new email address takes effect immediately: a pending address is removed, and the previous
    /// address gets the notice `address-changed` if it was verified. An email address with the same canonical form
    /// changes neither the verification nor the epoch. Verifying a contested account removes its password. A new email
    /// address, a change to `email_verified`, or `disabled: true` raises the epoch.
    fn change_user(&self, app: &AppId, change: UserChange) -> impl Future<Output = StoreResult<ChangeOutcome>> + Send;

    /// Deletes the user with the user's identities, memberships, consents and outbox rows.
    fn remove_user(
        &self,
        app: &AppId,
        user: UserId,
        if_version: Option<Version>,
        event: Event,
    ) -> impl Future<Output = StoreResult<RemovalOutcome>> + Send;

    /// Raises the epoch, which ends all sessions. Returns `None` if there is no such user.
    fn end_all_sessions(
        &self,
        app: &AppId,
        user: UserId,
        event: Event,
    ) -> impl Future<Output = StoreResult<Option<EpochChange>>> + Send;

    /// Queues a mail with a code to the user, unless a mail of this kind already waits or the user can no longer get
    /// the mail. The event is written only if the mail is queued.
    fn queue_mail(
        &self,
        app: &AppId,
        user: UserId,
        kind: MailKind,
        event: Event,
    ) -> impl Future<Output = StoreResult<MailOutcome>> + Send;

    /// Removes the user's identities at the Provider, and the memberships that it reported. Writes nothing if neither
    /// an email address nor another identity would remain.
    fn remove_identities(
        &self,
        app: &AppId,
        user: UserId,
        provider: &str,
        event: Event,
    ) -> impl Future<Output = StoreResult<IdentityRemoval>> + Send;

    /// Creates users in one transaction, in the order of the list. A user who conflicts with an existing user, or with
    /// a user that this call has already created, is not created. The event is written only if a user was created; its
    /// detail then also counts the outcomes. `dry_run` writes nothing. The outcomes of a dry run can contain the ids of
    /// users that it would create.
    fn import_users(
        &self,
        app: &AppId,
        users: Vec<NewAdministeredUser>,
        dry_run: bool,
        event: Event,
    ) -> impl Future<Output = StoreResult<Vec<ImportOutcome>>> + Send;

    /// Returns the next users in the order of their ids, with their identities, for an export.
    fn export_users(
        &self,
        app: &AppId,
        after: Option<UserId>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<Vec<AdminUser>>> + Send;

    /// Returns a page of events, newest first. Reads at most 5,000 rows, so a page can be empty although more rows
    /// follow.
    fn events(
        &self,
        app: &AppId,
        filter: &EventFilter,
        after: Option<RowPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<RowPage<AuditRow>>> + Send;

    /// Returns a page of dead letters of the App, newest first. `kind`: the name of a kind of mail, or `webhook`.
    fn app_dead_letters(
        &self,
        app: &AppId,
        kind: Option<&'static str>,
        after: Option<RowPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<RowPage<DeadLetterRow>>> + Send;

    /// Makes dead letters of the App due again, so that workers deliver them. Returns the number of these dead letters.
    fn retry_dead_letters(
        &self,
        app: &AppId,
        selection: RetrySelection,
    ) -> impl Future<Output = StoreResult<u64>> + Send;

    /// Writes the event of a call that only reads, before the response begins.
    fn record_administration(&self, app: &AppId, event: Event) -> impl Future<Output = StoreResult<()>> + Send;
}
