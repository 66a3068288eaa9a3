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
    /// The users with an identity of this subject, at an authority or linked as a Provider.
    Subject {
        subject: String,
        of: SubjectOf,
    },
    /// The users in this state, in the order of their ids. Not [`UserState::Active`].
    State {
        state: UserState,
        order: Order,
    },
    /// The canonical email address begins with this text. Sorted by the bytes of the canonical email address.
    EmailPrefix(String),
    /// The lower-cased name begins with this lower-cased text. Sorted by the bytes of the lower-cased name.
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
    /// Native or foreign. The class of a foreign hash is added to those of the App.
    pub password_hash: Option<PasswordHash>,
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
/// of foreign hashes. If several apply, the first of this list is reported. The creation of a single user reports
/// `TooManyHashKinds` first: it is an error of the body, which comes before conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserConflict {
    ExternalIdTaken(UserId),
    EmailTaken(UserId),
    IdentityTaken(UserId),
    /// The hash of the password is of a class for which the App has no room.
    TooManyHashKinds,
}

/// A change of a user. A field that is `None` stays as it is.
#[derive(Clone, Debug)]
pub struct UserChange {
    pub user: UserId,
    /// Applies only to this version, if it is set.
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
    /// The event without its kind and its fields, which follow from the difference.
    pub event: Event,
}

/// The result of a change. Nothing was written unless it is `Changed`.
#[derive(Clone, Debug)]
pub enum ChangeOutcome {
    Changed(Box<ChangedByAdministrator>),
    /// The user has all these values already.
    Unchanged(Box<AdminUser>),
    NotFound,
    /// The user has another version.
    VersionConflict,
    /// `email_verified: true`, but the user has no email address.
    NoAddress,
    Conflict(UserConflict),
}

#[derive(Clone, Debug)]
pub struct ChangedByAdministrator {
    pub user: AdminUser,
    /// Set if the epoch was raised: a new email address, another verification, or `disabled: true`.
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

/// The outcome of a user of an import.
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
    /// A mail of this kind to this user waits already.
    Waiting,
    /// The user is disabled, has no address for the mail, or has a password and needs no invitation.
    NotPossible,
    NotFound,
}

/// The outcome of removing the identities of a Provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityRemoval {
    Removed,
    /// No such user, or no identity of this Provider.
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
    /// At or after this time.
    pub after: Option<OffsetDateTime>,
    /// Before this time.
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

/// Which dead letters become due again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetrySelection {
    Ids(Vec<Uuid>),
    /// The oldest 10,000 of the webhook.
    Webhook(WebhookName),
}

/// The users of an App, in Postgres. A change of a user, its mails, its outbox rows and its event are one transaction.
/// All calls together use a part of the connection pool.
pub trait UserAdministration: Sync {
    /// The next page after `after`, at most `limit` users.
    fn users(
        &self,
        app: &AppId,
        filter: &UserFilter,
        after: Option<&UserPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<UserPage>> + Send;

    /// The user with the identities (the oldest first) and the time of the last login.
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

    /// Changes the user. A new email address counts at once; the pending one is removed; a former verified address
    /// gets the notice `address-changed`. An email address with the same canonical form keeps its verification and the
    /// epoch. Verifying a contested account removes its password. A new email address, another verification and
    /// `disabled: true` raise the epoch.
    fn change_user(&self, app: &AppId, change: UserChange) -> impl Future<Output = StoreResult<ChangeOutcome>> + Send;

    /// Deletes the user with the user's identities and outbox rows.
    fn remove_user(
        &self,
        app: &AppId,
        user: UserId,
        if_version: Option<Version>,
        event: Event,
    ) -> impl Future<Output = StoreResult<RemovalOutcome>> + Send;

    /// Raises the epoch, which ends all sessions. `None` if there is no such user.
    fn end_all_sessions(
        &self,
        app: &AppId,
        user: UserId,
        event: Event,
    ) -> impl Future<Output = StoreResult<Option<EpochChange>>> + Send;

    /// Queues a mail with a code to the user, unless a mail of this kind waits already, or the user can no longer get it.
    /// The event is written only if the mail is queued.
    fn queue_mail(
        &self,
        app: &AppId,
        user: UserId,
        kind: MailKind,
        event: Event,
    ) -> impl Future<Output = StoreResult<MailOutcome>> + Send;

    /// Removes the user's identities of the Provider. Writes nothing if neither an email address nor another identity
    /// remains.
    fn remove_identities(
        &self,
        app: &AppId,
        user: UserId,
        provider: &str,
        event: Event,
    ) -> impl Future<Output = StoreResult<IdentityRemoval>> + Send;

    /// Creates users in one transaction, each unless it conflicts. Of duplicates, the first wins. The event is written
    /// only if a user was created; the outcomes are added to the counts in its detail. `dry_run` writes nothing. The
    /// outcomes of a dry run can contain the ids of users that it would create.
    fn import_users(
        &self,
        app: &AppId,
        users: Vec<NewAdministeredUser>,
        dry_run: bool,
        event: Event,
    ) -> impl Future<Output = StoreResult<Vec<ImportOutcome>>> + Send;

    /// The next users by id with their identities, for an export.
    fn export_users(
        &self,
        app: &AppId,
        after: Option<UserId>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<Vec<AdminUser>>> + Send;

    /// A page of events, newest first. Reads at most 5,000 rows, so a page can be empty although more rows follow.
    fn events(
        &self,
        app: &AppId,
        filter: &EventFilter,
        after: Option<RowPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<RowPage<AuditRow>>> + Send;

    /// A page of dead letters of the App, newest first. `kind`: the name of a mail, or `webhook`.
    fn app_dead_letters(
        &self,
        app: &AppId,
        kind: Option<&'static str>,
        after: Option<RowPosition>,
        limit: u16,
    ) -> impl Future<Output = StoreResult<RowPage<DeadLetterRow>>> + Send;

    /// Makes dead letters of the App due again, and returns how many.
    fn retry_dead_letters(
        &self,
        app: &AppId,
        selection: RetrySelection,
    ) -> impl Future<Output = StoreResult<u64>> + Send;

    /// Writes an event before the response begins, for calls that only read.
    fn record_administration(&self, app: &AppId, event: Event) -> impl Future<Output = StoreResult<()>> + Send;
}
