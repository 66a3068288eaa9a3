//! What the rules need from outside, as narrow traits. `store`, `hashing` and `providers` implement them on one type. A
//! use case is generic over it and names only the traits that it needs.

use std::future::Future;

use latchkey_crds::{
    rendered::RenderedProvider,
    types::{AppId, ProviderName},
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    app::App,
    audit::{ActivityEntry, Event, Refusal},
    client::ClientAddress,
    code::{CodeKey, CodeRecord},
    email::{AccountKey, Email},
    flow::{FlowBinding, FlowId, LoginCodeKey, PendingLogin, StoredLogin, TooManyFlows},
    identity::{
        AuthorizationCodeGrant, AuthorizationRequest, Identity, ProviderCapabilities, ProviderError, ProviderOperation,
        VerifiedIdentity,
    },
    mail::{EpochChange, Mail},
    password::{Overloaded, Password, PasswordHash},
    rate_limits::{RateLimitCheck, RateLimited},
    session::{
        LiveSession, NewSession, OpenOutcome, Profile, RefreshOutcome, RefreshRules, Session, SessionId, SessionInfo,
    },
    token::RefreshToken,
    user::{Epoch, Name, User, UserId},
};

/// A call to a store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store is unavailable, slow or at capacity: the client can try again (503).
    #[error("{store} is unavailable")]
    Unavailable {
        store: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The store answered with something that it must not answer: a bug (500).
    #[error("{store} answered something unexpected")]
    Unexpected {
        store: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

type StoreResult<T> = Result<T, StoreError>;

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
    /// Another account has the address; nothing was written.
    AddressTaken,
}

/// Marks the user's own address as verified.
#[derive(Clone, Debug)]
pub struct Confirmation {
    pub user: UserId,
    /// The code's epoch: applies only while it is the user's.
    pub epoch: Epoch,
    /// The canonical address to which the code was sent: applies only while it is the user's.
    pub address: String,
    /// The session that is returned. If the account was contested, it can set a password without the old one.
    pub session: SessionId,
    /// Whether that session exists already, because the caller is the account itself: it continues, and identities
    /// stay.
    pub keeps_session: bool,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// The result of a confirmation or a reset.
#[derive(Clone, Debug)]
pub struct ChangedUser {
    /// After the change, with the raised epoch.
    pub user: User,
    /// The account was contested, so its password was removed.
    pub was_contested: bool,
}

/// Sets a password with a code that was sent by email.
#[derive(Clone, Debug)]
pub struct PasswordReset {
    pub user: UserId,
    /// As in [`Confirmation`].
    pub epoch: Epoch,
    pub address: String,
    pub password_hash: PasswordHash,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// Users, in Postgres. A change of a user, the mails about it and its event are one transaction.
pub trait Users: Sync {
    fn user(&self, app: &AppId, id: UserId) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Matches the canonical address. A pending address matches no user.
    fn user_by_email(&self, app: &AppId, email: &Email) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Creates the user and queues the mail. If the address is taken it writes nothing. Of concurrent calls for one
    /// address one creates the user.
    fn create_user(
        &self,
        app: &AppId,
        user: NewUser,
        mail: Option<Mail>,
    ) -> impl Future<Output = StoreResult<CreateUserOutcome>> + Send;

    /// Somebody registered a known address again. If the user is still unverified and at `epoch`, `contest` makes it
    /// contested. The mail is queued in any case. Costs the same as `create_user`.
    fn record_repeated_registration(
        &self,
        app: &AppId,
        user: UserId,
        epoch: Epoch,
        contest: bool,
        mail: Option<Mail>,
        event: Event,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Replaces a hash by a newer one of the same password. Does nothing if the stored hash has changed.
    fn replace_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Returns `Unbound` and writes nothing if the epoch or the address has changed, or the user is deleted or disabled.
    /// Otherwise, in one transaction: marks the address verified, raises the epoch, ends a contest and removes the
    /// contested password, removes identities unless a session is kept, and adds an outbox row that propagates the
    /// epoch.
    fn confirm_address(
        &self,
        app: &AppId,
        change: Confirmation,
    ) -> impl Future<Output = StoreResult<Option<ChangedUser>>> + Send;

    /// Returns `Unbound` as `confirm_address` does. Otherwise, in one transaction: sets the password, marks the address
    /// verified, ends a contest, removes identities if the address was unverified, raises the epoch, queues the notice,
    /// and adds an outbox row that propagates the epoch.
    fn reset_password(
        &self,
        app: &AppId,
        change: PasswordReset,
    ) -> impl Future<Output = StoreResult<Option<ChangedUser>>> + Send;
}

/// A new name.
#[derive(Clone, Debug)]
pub struct Rename {
    pub user: UserId,
    /// The epoch of the user as it was read: applies only while it is the user's. The same holds for the types below.
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

/// A password that is set in a session.
#[derive(Clone, Debug)]
pub struct PasswordChange {
    pub user: UserId,
    pub epoch: Epoch,
    pub password_hash: PasswordHash,
    /// The session that continues.
    pub kept_session: SessionId,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// A new address that waits for its code.
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

/// Makes the pending address the user's address.
#[derive(Clone, Debug)]
pub struct AddressChange {
    pub user: UserId,
    /// The code's epoch.
    pub epoch: Epoch,
    /// The canonical address to which the code was sent: applies only while it is the pending one.
    pub address: String,
    /// The session that continues.
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

/// The result of a change of address.
#[derive(Clone, Debug)]
pub struct AddressChanged {
    pub user: User,
    /// An unverified account had the address and was deleted.
    pub removed: Option<EpochChange>,
}

/// The account of a logged-in user, in Postgres. Each change is one transaction together with its event. It returns
/// `Unbound` and writes nothing if the user is deleted or disabled, or the epoch has risen. Except for `rename`, the same
/// applies to an account with an unverified address.
pub trait OwnAccounts: Sync {
    /// The user of the session: at the session's epoch, or at a later one that is not in Redis yet and keeps this
    /// session. `Unbound` if the user is disabled.
    fn user_of_session(&self, app: &AppId, session: &Session)
    -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Sets the name and adds an outbox row that propagates the profile.
    fn rename(&self, app: &AppId, change: Rename) -> impl Future<Output = StoreResult<Option<Renamed>>> + Send;

    /// Removes the outbox row of a rename after its profile was written to Redis.
    fn remove_profile_row(&self, app: &AppId, row: Uuid) -> impl Future<Output = StoreResult<()>> + Send;

    /// Sets the password, raises the epoch, removes a pending address unless it is the only address, queues the notice,
    /// and adds an outbox row that propagates the epoch.
    fn set_password(
        &self,
        app: &AppId,
        change: PasswordChange,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Makes the address pending in place of any other. Queues its mail, and the notice to the current address.
    fn request_address_change(
        &self,
        app: &AppId,
        request: AddressChangeRequest,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Makes the pending address the user's verified address, deletes an unverified account that had it, raises the
    /// epoch, queues the notice to the former address, and adds outbox rows that propagate the epochs. Also returns
    /// `Unbound` if another account has the address verified.
    fn change_address(
        &self,
        app: &AppId,
        change: AddressChange,
    ) -> impl Future<Output = StoreResult<Option<AddressChanged>>> + Send;

    /// Deletes the user with identities and outbox rows. An outbox row propagates the epoch, which is returned.
    fn delete_user(
        &self,
        app: &AppId,
        removal: UserDeletion,
    ) -> impl Future<Output = StoreResult<Option<Epoch>>> + Send;
}

/// An outbox row that a worker holds until `lease_until`.
#[derive(Clone, Debug)]
pub struct ClaimedRow {
    pub id: Uuid,
    pub app: AppId,
    /// Failed attempts before this one.
    pub attempts: u32,
    pub task: OutboxTask,
    pub lease_until: OffsetDateTime,
    /// The span of the request that caused the row, as a `traceparent`, if spans are exported.
    pub trace: Option<String>,
}

#[derive(Clone, Debug)]
pub enum OutboxTask {
    Mail(Mail),
    /// A mail to the address that the user had until the change that the mail reports.
    MailToFormerAddress(Mail, Email),
    PropagateEpoch(EpochChange),
    /// The user's name has changed, and Redis may not have it.
    PropagateProfile(UserId),
}

/// What a worker does with its row.
#[derive(Clone, Debug)]
pub enum DeliveryOutcome {
    /// Removes the row.
    Done,
    /// Tries again later. `error` is our own text, never the peer's.
    Retry { at: OffsetDateTime, error: String },
    /// Waits without counting an attempt: the relay's configuration does not resolve.
    Wait { at: OffsetDateTime },
    /// Keeps the row as a dead letter, for an operator to inspect.
    Dead { error: String },
}

/// The outbox, in Postgres.
pub trait Outbox: Sync {
    /// Queues one mail in a transaction of its own.
    fn enqueue(&self, app: &AppId, mail: Mail) -> impl Future<Output = StoreResult<()>> + Send;

    /// Claims up to `most` due rows and holds them for `lease`. Claims round-robin over Apps, and the oldest rows of an
    /// App first. Over all servers, at most `per_app` rows of one App are held at a time.
    fn claim(
        &self,
        most: usize,
        per_app: usize,
        lease: std::time::Duration,
    ) -> impl Future<Output = StoreResult<Vec<ClaimedRow>>> + Send;

    /// Ends the hold. Does nothing if the lease has expired and another worker holds the row.
    fn finish(&self, claimed: &ClaimedRow, outcome: DeliveryOutcome) -> impl Future<Output = StoreResult<()>> + Send;

    /// Removes the row of this epoch: Redis has it, and so has a replica if there are any.
    fn remove_epoch_row(&self, app: &AppId, news: &EpochChange) -> impl Future<Output = StoreResult<()>> + Send;

    /// Resolves when there may be new rows (a notification), or never. Polling alone is sufficient.
    fn wait_for_notification(&self) -> impl Future<Output = ()> + Send;

    /// For metrics: how long the oldest due row has waited, and how many rows are dead letters.
    fn backlog(&self) -> impl Future<Output = StoreResult<OutboxBacklog>> + Send;
}

#[derive(Clone, Copy, Debug, Default)]
pub struct OutboxBacklog {
    pub due: u64,
    pub oldest_due_seconds: f64,
    pub dead: u64,
}

/// Codes that were sent by email, in Redis.
pub trait Codes: Sync {
    /// Stores a code until it expires. Also stores a code again after the transaction that used it failed.
    fn store_code(
        &self,
        app: &AppId,
        key: &CodeKey,
        record: &CodeRecord,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Looks under each key, without using the code.
    fn find_code(
        &self,
        app: &AppId,
        keys: &[CodeKey],
    ) -> impl Future<Output = StoreResult<Option<(CodeKey, CodeRecord)>>> + Send;

    /// Removes and returns the code: of concurrent calls one gets it.
    fn consume_code(&self, app: &AppId, key: &CodeKey) -> impl Future<Output = StoreResult<Option<CodeRecord>>> + Send;
}

/// Whether a replica has the written data, if there are replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// A replica has it, or there are none.
    Complete,
    /// No replica acknowledged it in time.
    Unconfirmed,
}

/// Sessions and epochs, in Redis.
pub trait Sessions: Sync {
    /// Opens a session unless Redis has a later epoch. A user has at most 100 sessions: the least recently used one
    /// ends.
    fn open_session(&self, app: &AppId, session: &NewSession) -> impl Future<Output = StoreResult<OpenOutcome>> + Send;

    /// A live session. `Unbound` if it has ended, has expired or has an older epoch.
    fn session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<Option<LiveSession>>> + Send;

    /// The live sessions of a user, the most recently used first.
    fn sessions(&self, app: &AppId, user: UserId) -> impl Future<Output = StoreResult<Vec<SessionInfo>>> + Send;

    /// Decides a refresh with a token that has a valid HMAC. Always one round trip.
    fn refresh(
        &self,
        app: &AppId,
        token: &RefreshToken,
        rules: &RefreshRules,
    ) -> impl Future<Output = StoreResult<RefreshOutcome>> + Send;

    /// Ends a session. Returns whether it was live.
    fn end_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Ends every session of the user except one. Returns those that were live.
    fn end_other_sessions(
        &self,
        app: &AppId,
        user: UserId,
        keep: SessionId,
    ) -> impl Future<Output = StoreResult<Vec<SessionId>>> + Send;

    /// Raises the epoch and never lowers it. Every session ends except the kept one, which moves to the new epoch. Also
    /// writes the profile; `Unbound` if the user was deleted.
    fn raise_epoch(
        &self,
        app: &AppId,
        news: &EpochChange,
        profile: Option<&Profile>,
    ) -> impl Future<Output = StoreResult<Replication>> + Send;

    /// Writes the profile that tokens contain from now on. Does nothing if the stored profile is newer.
    fn store_profile(
        &self,
        app: &AppId,
        user: UserId,
        profile: &Profile,
    ) -> impl Future<Output = StoreResult<()>> + Send;
}

/// What was acquired of rate limits, so that it can be released.
#[derive(Clone, Debug, Default)]
pub struct RateLimitPermit(pub Vec<(RateLimitCheck, i64)>);

#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    #[error(transparent)]
    RateLimited(#[from] RateLimited),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Rate limits, in Redis, so that all servers share the counts.
pub trait RateLimits: Sync {
    /// Acquires one call in every window of every check, or nothing at all.
    fn acquire(
        &self,
        app: &AppId,
        checks: Vec<RateLimitCheck>,
    ) -> impl Future<Output = Result<RateLimitPermit, AcquireError>> + Send;

    /// Releases what must not be counted. A failure is only logged: the limit is then stricter until the window ends.
    fn release(&self, app: &AppId, taken: RateLimitPermit) -> impl Future<Output = ()> + Send;

    /// Whether the client address logged in, confirmed or reset for the account in the last 30 days.
    fn is_known_client(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Makes the client address known for 30 days. A failure is only logged.
    fn remember_client(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> impl Future<Output = ()> + Send;
}

/// Password hashing with admission control. It is fair to namespaces, to the Apps of one, and to client addresses of an
/// App.
pub trait PasswordHasher: Sync {
    /// Whether a hash would be accepted now. Call it first, so that a flood of logins costs no more than this check.
    fn check_capacity(&self, app: &App, client: ClientAddress) -> Result<(), Overloaded>;

    fn hash(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
    ) -> impl Future<Output = Result<PasswordHash, Overloaded>> + Send;

    /// Whether the password matches the hash. Without a hash it does the same work and returns false.
    fn verify(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> impl Future<Output = Result<bool, Overloaded>> + Send;

    /// Whether a hash was made with other parameters than those of new hashes.
    fn is_outdated(&self, hash: &PasswordHash) -> bool;

    /// Whether the password has the App's minimum strength (zxcvbn), given the words that an attacker tries first.
    fn is_strong_enough(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        guesses: Vec<String>,
    ) -> impl Future<Output = Result<bool, Overloaded>> + Send;
}

/// The audit log: events in Postgres, and refusals that are counted in Redis until they become a row there. No request
/// fails because of it: what cannot be written is lost, and a metric counts it.
pub trait AuditLog: Sync {
    /// Writes an event. When this resolves, the event is durable or lost. Waits at most one second, then the write goes
    /// on in the background.
    fn record(&self, app: &AppId, event: Event) -> impl Future<Output = ()> + Send;

    /// The same without waiting, for requests that are answered without Postgres.
    fn record_later(&self, app: &AppId, event: Event);

    /// Counts a refusal, after the response.
    fn count_refusal(&self, app: &AppId, refusal: Refusal);

    /// The newest 100 events of a user since that time, the newest first.
    fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> impl Future<Output = StoreResult<Vec<ActivityEntry>>> + Send;
}

/// Social providers, over the network: every call to a provider, and the validation of every response. The providers
/// are those of the App's document.
pub trait Providers: Sync {
    /// What a flow must know before it calls the provider. An unknown preset has no capabilities; the calls below
    /// reject it.
    fn capabilities(&self, provider: &RenderedProvider) -> ProviderCapabilities;

    /// The permit to call a provider. Dropping it releases it.
    type Permit: Send + Sync;

    /// Acquires a permit for an operation of a client, or fails at once. The number of permits is bounded per client,
    /// per Provider, per namespace and for the whole server.
    fn try_acquire(
        &self,
        operation: ProviderOperation,
        app: &App,
        provider: &RenderedProvider,
        client: ClientAddress,
    ) -> Result<Self::Permit, ProviderError>;

    /// The URL of the provider's login page for the browser.
    fn authorization_url(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        request: &AuthorizationRequest<'_>,
    ) -> impl Future<Output = Result<String, ProviderError>> + Send;

    /// Validates `iss` of a callback without a code (RFC 9207): if it was sent, or if the provider promises to send it.
    fn validate_issuer(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> impl Future<Output = Result<(), ProviderError>> + Send;

    /// Exchanges a code for an identity: code exchange, full validation of the ID token, `iss` of the callback (RFC
    /// 9207), userinfo, addresses.
    fn exchange_code(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        grant: &AuthorizationCodeGrant<'_>,
    ) -> impl Future<Output = Result<VerifiedIdentity, ProviderError>> + Send;

    /// Validates a provider's token, an ID token or access token, that was issued for one of our clients. A nonce must
    /// equal that of the ID token, in plain text or as lower-case hexadecimal SHA-256.
    fn validate_token(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> impl Future<Output = Result<VerifiedIdentity, ProviderError>> + Send;
}

/// An identity to store.
#[derive(Clone, Debug)]
pub struct NewIdentity {
    pub authority: String,
    pub subject: String,
    /// The Provider's name, which is only a label.
    pub provider: ProviderName,
    pub email: Option<Email>,
    pub at: OffsetDateTime,
}

/// A user to create from a provider's identity.
#[derive(Clone, Debug)]
pub struct NewFederatedUser {
    pub id: UserId,
    /// Verified by the provider.
    pub email: Option<Email>,
    /// Sent by the provider but not verified: it waits for its code.
    pub pending_email: Option<Email>,
    /// Empty if the provider sends none.
    pub name: String,
    pub created_at: OffsetDateTime,
    pub event: Event,
}

/// Links an identity to a user. Applies only while the user is enabled and at the epoch.
#[derive(Clone, Debug)]
pub struct LinkRequest {
    pub user: UserId,
    pub epoch: Epoch,
    /// The canonical address by which the user was found: applies only while it is the user's verified address.
    pub address: Option<String>,
    pub identity: NewIdentity,
    pub event: Event,
}

/// Gives an account with an unconfirmed address to the user of a provider that has verified the address. Applies only
/// while the account is enabled, at the epoch, and has that address unverified.
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

/// Removes a Provider's identities from a user.
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
    /// The identity already belongs to this user; nothing was written.
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
    /// The user could no longer log in; nothing was written.
    LastLoginMethod,
}

/// Identities, in Postgres. Each change is one transaction with its audit event and its mails.
pub trait Identities: Sync {
    fn user_by_identity(
        &self,
        app: &AppId,
        authority: &str,
        subject: &str,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// Creates the user, the identity and the mail. Returns false and writes nothing if the identity or the address
    /// already belongs to a user. Of concurrent calls for one identity one creates it.
    fn create_federated_user(
        &self,
        app: &AppId,
        user: NewFederatedUser,
        identity: NewIdentity,
        mail: Option<Mail>,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Links the identity and queues the notice to the user's verified address.
    fn link_identity(&self, app: &AppId, linking: LinkRequest)
    -> impl Future<Output = StoreResult<LinkOutcome>> + Send;

    /// Returns `Unbound` and writes nothing if the user has changed or the identity already belongs to a user. Otherwise
    /// removes the password, the pending address and other identities, ends a contest, marks the address verified,
    /// links the identity, raises the epoch, and adds an outbox row that propagates it.
    fn transfer_account(
        &self,
        app: &AppId,
        change: AccountTransfer,
    ) -> impl Future<Output = StoreResult<Option<User>>> + Send;

    /// The oldest first.
    fn identities(&self, app: &AppId, user: UserId) -> impl Future<Output = StoreResult<Vec<Identity>>> + Send;

    /// Removes the identities, unless the user would have neither a password nor an identity of the Providers in
    /// `usable` left. Concurrent calls cannot together remove the last one.
    fn unlink_identity(
        &self,
        app: &AppId,
        unlinking: UnlinkRequest,
    ) -> impl Future<Output = StoreResult<UnlinkOutcome>> + Send;
}

#[derive(Debug, thiserror::Error)]
pub enum StoreFlowError {
    #[error(transparent)]
    TooManyFlows(#[from] TooManyFlows),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Social logins in progress, in Redis.
pub trait Flows: Sync {
    /// Stores a flow that is not bound to a browser, within the limits for such flows.
    fn store_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        sealed: &str,
        client: ClientAddress,
    ) -> impl Future<Output = Result<(), StoreFlowError>> + Send;

    /// Finds a flow that is not bound to a browser, without using it.
    fn find_flow(&self, app: &AppId, id: &FlowId) -> impl Future<Output = StoreResult<Option<String>>> + Send;

    /// Marks a flow as used: of all calls one returns true.
    fn consume_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        binding: FlowBinding,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Stores a login until its code is exchanged.
    fn store_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        login: &PendingLogin,
    ) -> impl Future<Output = StoreResult<()>> + Send;

    /// Finds a login without using its code. A used code can still be found for a while.
    fn find_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
    ) -> impl Future<Output = StoreResult<Option<StoredLogin>>> + Send;

    /// Records that the code was exchanged for an open session. Returns `Unbound` for the first exchange, otherwise the
    /// session of the first.
    fn redeem_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<Option<SessionId>>> + Send;
}
