//! What the rules need from outside, as narrow traits. `store`, `hashing` and `providers` implement them on one type
//! each use-case is generic over; a use-case names just the traits it needs.

use std::future::Future;

use latchkey_crds::{
    rendered::RenderedProvider,
    types::{AppId, ProviderName},
};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    app::App,
    audit::{Activity, Event, Refusal},
    client::ClientAddress,
    code::{CodeKey, CodeRecord},
    email::{AccountKey, Email},
    flow::{Binding, FlowId, FoundLogin, LoginCodeKey, PendingLogin, TooManyFlows},
    identity::{Authorization, Grant, Identity, Operation, ProviderError, ProviderTraits, Vouched},
    limits::{Check, Limited},
    mail::{EpochNews, Mail},
    password::{Busy, Password, PasswordHash},
    session::{LiveSession, NewSession, Opening, Profile, RefreshRules, Refreshed, Session, SessionId, SessionInfo},
    token::RefreshToken,
    user::{Epoch, Name, User, UserId},
};

/// A store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It is away, slow or full: the caller may try again (503).
    #[error("{store} is unavailable")]
    Unavailable {
        store: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It answered what it must not answer: our fault (500).
    #[error("{store} answered something unexpected")]
    Unexpected {
        store: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

type Answer<T> = Result<T, StoreError>;

/// A user to be made.
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
pub enum Creation {
    Created,
    /// Somebody has the address; nothing was written.
    AddressTaken,
}

/// Marks the user's own address as verified.
#[derive(Clone, Debug)]
pub struct Confirmation {
    pub user: UserId,
    /// The code's epoch: holds only while the user's is the same.
    pub epoch: Epoch,
    /// The canonical address that the code was sent to: holds only while it is the user's.
    pub address: String,
    /// The session that is answered. Where the account was contested it may set a password without the old one.
    pub session: SessionId,
    /// Whether it is there already, since the caller is the account itself: it goes on, and identities stay.
    pub kept: bool,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// What a confirmation or a reset left.
#[derive(Clone, Debug)]
pub struct Changed {
    /// After the change: the epoch is the raised one.
    pub user: User,
    /// The account was contested, so its password went.
    pub was_contested: bool,
}

/// Sets a password by a mailed code.
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

/// Users, in Postgres. What changes a user, what must be mailed about it and its event are one transaction.
pub trait Users: Sync {
    fn user(&self, app: &AppId, id: UserId) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// Matches the canonical address; a pending address matches nobody.
    fn user_by_email(&self, app: &AppId, email: &Email) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// Makes the user and queues the mail, or finds the address taken and writes nothing. Of concurrent calls for one
    /// address one creates.
    fn create_user(
        &self,
        app: &AppId,
        user: NewUser,
        mail: Option<Mail>,
    ) -> impl Future<Output = Answer<Creation>> + Send;

    /// Somebody registered a known address again. Where the user is still unverified and at `epoch`, `contest` makes it
    /// contested; the mail is queued in any case. Costs what `create_user` costs.
    fn registered_again(
        &self,
        app: &AppId,
        user: UserId,
        epoch: Epoch,
        contest: bool,
        mail: Option<Mail>,
        event: Event,
    ) -> impl Future<Output = Answer<()>> + Send;

    /// Replaces a hash by one of the same password; nothing happens where the hash is another by now.
    fn renew_hash(
        &self,
        app: &AppId,
        user: UserId,
        old: &PasswordHash,
        new: PasswordHash,
    ) -> impl Future<Output = Answer<()>> + Send;

    /// None: the epoch or the address has moved, or the user is gone or disabled; nothing was written. Else, in one
    /// transaction: address verified, epoch raised, contested ended and its password gone, identities gone unless a
    /// session is kept, an outbox row that carries the epoch.
    fn confirm_address(
        &self,
        app: &AppId,
        change: Confirmation,
    ) -> impl Future<Output = Answer<Option<Changed>>> + Send;

    /// None as in `confirm_address`. Else, in one transaction: password set, address verified, contested ended,
    /// identities gone where the address was unverified, epoch raised, the notice queued, an outbox row that carries
    /// the epoch.
    fn reset_password(
        &self,
        app: &AppId,
        change: PasswordReset,
    ) -> impl Future<Output = Answer<Option<Changed>>> + Send;
}

/// A new name.
#[derive(Clone, Debug)]
pub struct Rename {
    pub user: UserId,
    /// That of the user as it was read: holds only while it is the same. So below.
    pub epoch: Epoch,
    pub name: Name,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// What a rename left.
#[derive(Clone, Debug)]
pub struct Renamed {
    pub user: User,
    /// The outbox row that carries the profile where the request does not.
    pub row: Uuid,
}

/// A password set by who is signed in.
#[derive(Clone, Debug)]
pub struct NewPassword {
    pub user: UserId,
    pub epoch: Epoch,
    pub password_hash: PasswordHash,
    /// The session that goes on.
    pub keep: SessionId,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// An address that is to wait for its code.
#[derive(Clone, Debug)]
pub struct AddressRequest {
    pub user: UserId,
    pub epoch: Epoch,
    pub address: Email,
    /// Whether the limits let the mail with the code go out.
    pub mailed: bool,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// Makes the pending address the user's.
#[derive(Clone, Debug)]
pub struct AddressChange {
    pub user: UserId,
    /// The code's epoch.
    pub epoch: Epoch,
    /// The canonical address that the code was sent to: holds only while it is the pending one.
    pub address: String,
    /// The session that goes on.
    pub keep: SessionId,
    pub at: OffsetDateTime,
    pub event: Event,
}

/// A user who is to go.
#[derive(Clone, Debug)]
pub struct Removal {
    pub user: UserId,
    pub epoch: Epoch,
    pub event: Event,
}

/// What a change of the address left.
#[derive(Clone, Debug)]
pub struct AddressChanged {
    pub user: User,
    /// An unverified account had the address, and is gone.
    pub removed: Option<EpochNews>,
}

/// The account of who is signed in, in Postgres. Each change is one transaction, and none where the user is gone or
/// disabled, or the epoch has moved: nothing was written then. But for `rename` an account whose address is unverified is
/// as good as gone. With each goes its event.
pub trait Accounts: Sync {
    /// The user that the session is of: at its epoch, or at a later one that is still on its way to Redis and lets this
    /// session go on. None where the user is disabled.
    fn user_of_session(&self, app: &AppId, session: &Session) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// Name set, and an outbox row that carries the profile.
    fn rename(&self, app: &AppId, change: Rename) -> impl Future<Output = Answer<Option<Renamed>>> + Send;

    /// The row of a rename is not needed any more.
    fn profile_carried(&self, app: &AppId, row: Uuid) -> impl Future<Output = Answer<()>> + Send;

    /// Password set, epoch raised, a pending address gone unless it is the only one, the notice queued, an outbox row that
    /// carries the epoch.
    fn set_password(&self, app: &AppId, change: NewPassword) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// The address is pending in place of any other; its mail is queued, and the notice to the address that there is.
    fn ask_for_address(
        &self,
        app: &AppId,
        request: AddressRequest,
    ) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// The pending address is the user's, and verified; an unverified account that had it is deleted; epoch raised, the
    /// notice to the former address queued, outbox rows that carry the epochs. None too where another account has the
    /// address verified.
    fn change_address(
        &self,
        app: &AppId,
        change: AddressChange,
    ) -> impl Future<Output = Answer<Option<AddressChanged>>> + Send;

    /// The user is gone with identities and outbox rows; an outbox row carries the epoch, which is answered.
    fn delete_user(&self, app: &AppId, removal: Removal) -> impl Future<Output = Answer<Option<Epoch>>> + Send;
}

/// A row of the outbox that a worker holds until `lease_until`.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub id: Uuid,
    pub app: AppId,
    /// Tries that failed before this one.
    pub attempts: u32,
    pub task: Task,
    pub lease_until: OffsetDateTime,
    /// The span that asked for it, as a `traceparent`, where it is exported.
    pub trace: Option<String>,
}

#[derive(Clone, Debug)]
pub enum Task {
    Mail(Mail),
    /// A mail to an address that was the user's until the change that it tells of.
    MailToFormer(Mail, Email),
    CarryEpoch(EpochNews),
    /// The user's name has changed, and Redis may not know.
    CarryProfile(UserId),
}

/// How a worker leaves a row.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The row goes.
    Done,
    /// Tried again later; `error` is our own text, never the peer's.
    Retry { at: OffsetDateTime, error: String },
    /// Not tried, and not counted as an attempt: the relay does not resolve.
    Wait { at: OffsetDateTime },
    /// Kept for people to look at.
    Dead { error: String },
}

/// The outbox, in Postgres.
pub trait Outbox: Sync {
    /// Queues one mail by itself.
    fn enqueue(&self, app: &AppId, mail: Mail) -> impl Future<Output = Answer<()>> + Send;

    /// Takes up to `most` due rows, round-robin over Apps, at most `per_app` held of one App at a time over all
    /// servers, and holds them for `lease`. The oldest first inside an App.
    fn claim(
        &self,
        most: usize,
        per_app: usize,
        lease: std::time::Duration,
    ) -> impl Future<Output = Answer<Vec<Claimed>>> + Send;

    /// Ends the hold. Nothing happens where the lease has passed and another worker holds the row.
    fn settle(&self, claimed: &Claimed, outcome: Outcome) -> impl Future<Output = Answer<()>> + Send;

    /// The row that carries this epoch is not needed any more: Redis, and a replica where there are any, has it.
    fn epoch_carried(&self, app: &AppId, news: &EpochNews) -> impl Future<Output = Answer<()>> + Send;

    /// Resolves when rows may have come (a notification), or never; polling alone is enough.
    fn notified(&self) -> impl Future<Output = ()> + Send;

    /// How long the oldest due row has waited, and how many are dead, for metrics.
    fn backlog(&self) -> impl Future<Output = Answer<Backlog>> + Send;
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Backlog {
    pub due: u64,
    pub oldest_due_seconds: f64,
    pub dead: u64,
}

/// Mailed codes, in Redis.
pub trait Codes: Sync {
    /// Keeps a code until its end; also puts one back after the transaction that it was taken for failed.
    fn put_code(&self, app: &AppId, key: &CodeKey, record: &CodeRecord) -> impl Future<Output = Answer<()>> + Send;

    /// Looks under each key; takes nothing.
    fn find_code(
        &self,
        app: &AppId,
        keys: &[CodeKey],
    ) -> impl Future<Output = Answer<Option<(CodeKey, CodeRecord)>>> + Send;

    /// Takes the code: of concurrent calls one gets it.
    fn take_code(&self, app: &AppId, key: &CodeKey) -> impl Future<Output = Answer<Option<CodeRecord>>> + Send;
}

/// Whether a replica has what was written, where there are any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// A replica has it, or there are none.
    Safely,
    /// No replica acknowledged in time.
    Unconfirmed,
}

/// Sessions and epochs, in Redis.
pub trait Sessions: Sync {
    /// Opens a session unless Redis knows a later epoch. At most 100 a user: the least recently used ends.
    fn open_session(&self, app: &AppId, session: &NewSession) -> impl Future<Output = Answer<Opening>> + Send;

    /// A live session; one that has ended, is past its time or has an older epoch is not there.
    fn session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
    ) -> impl Future<Output = Answer<Option<LiveSession>>> + Send;

    /// The live sessions of a user, the one used last first.
    fn sessions(&self, app: &AppId, user: UserId) -> impl Future<Output = Answer<Vec<SessionInfo>>> + Send;

    /// Decides a refresh by a token whose HMAC holds. One round trip, whatever comes of it.
    fn refresh(
        &self,
        app: &AppId,
        token: &RefreshToken,
        rules: &RefreshRules,
    ) -> impl Future<Output = Answer<Refreshed>> + Send;

    /// Whether a live session was there to be ended.
    fn end_session(&self, app: &AppId, user: UserId, session: SessionId) -> impl Future<Output = Answer<bool>> + Send;

    /// Ends every session of the user but one; answers those that were there.
    fn end_other_sessions(
        &self,
        app: &AppId,
        user: UserId,
        keep: SessionId,
    ) -> impl Future<Output = Answer<Vec<SessionId>>> + Send;

    /// Raises the epoch (never lowers it): every session ends but the kept one, which moves to the new epoch. Brings the
    /// profile with it; none where the user is gone.
    fn raise_epoch(
        &self,
        app: &AppId,
        news: &EpochNews,
        profile: Option<&Profile>,
    ) -> impl Future<Output = Answer<Carried>> + Send;

    /// Tells what tokens say of the user from now on; an older profile than the one that is there changes nothing.
    fn put_profile(&self, app: &AppId, user: UserId, profile: &Profile) -> impl Future<Output = Answer<()>> + Send;
}

/// What was taken of limits, so that it can be given back.
#[derive(Clone, Debug, Default)]
pub struct Taken(pub Vec<(Check, i64)>);

#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    #[error(transparent)]
    Limited(#[from] Limited),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Limits, in Redis, so that all servers count together.
pub trait Limits: Sync {
    /// Takes one of every window of every check, or nothing at all.
    fn take(&self, app: &AppId, checks: Vec<Check>) -> impl Future<Output = Result<Taken, TakeError>> + Send;

    /// Gives back what did not have to be counted. A failure is only logged: it makes a limit tighter for a while.
    fn give_back(&self, app: &AppId, taken: Taken) -> impl Future<Output = ()> + Send;

    /// Whether the client address signed in, confirmed or reset for the account in the last 30 days.
    fn is_known(
        &self,
        app: &AppId,
        account: &AccountKey,
        client: ClientAddress,
    ) -> impl Future<Output = Answer<bool>> + Send;

    /// Makes it known for 30 days. A failure is only logged.
    fn remember(&self, app: &AppId, account: &AccountKey, client: ClientAddress) -> impl Future<Output = ()> + Send;
}

/// Password hashing, with admission control that is fair to namespaces, to their Apps, and inside one to client addresses.
pub trait Hasher: Sync {
    /// Whether a hash would be taken on now. Asked first, so that a storm costs no more than this question.
    fn admit(&self, app: &App, client: ClientAddress) -> Result<(), Busy>;

    fn hash(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
    ) -> impl Future<Output = Result<PasswordHash, Busy>> + Send;

    /// Whether the password is that of the hash; without a hash the same work is done and the answer is no.
    fn verify(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> impl Future<Output = Result<bool, Busy>> + Send;

    /// Whether a hash was made with other parameters than new ones are.
    fn is_outdated(&self, hash: &PasswordHash) -> bool;

    /// Whether the App's minimum of strength (zxcvbn) is reached, with these words as what a guesser tries first.
    fn strong_enough(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        guesses: Vec<String>,
    ) -> impl Future<Output = Result<bool, Busy>> + Send;
}

/// What is written down of accounts: events in Postgres, refusals counted in Redis until they are a row there. No request
/// fails for it: what cannot be written is lost, with a metric.
pub trait Audit: Sync {
    /// Writes an event; it is durable when this resolves, or lost. Waits a second at most, then goes on without waiting.
    fn record(&self, app: &AppId, event: Event) -> impl Future<Output = ()> + Send;

    /// The same without waiting at all, for what is answered without Postgres.
    fn record_later(&self, app: &AppId, event: Event);

    /// Counts a refusal, after the answer.
    fn refuse(&self, app: &AppId, refusal: Refusal);

    /// The newest 100 events of a user since then, the newest first.
    fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> impl Future<Output = Answer<Vec<Activity>>> + Send;
}

/// Social providers, over the network: every call to one, and all that is believed of its answers. A provider is one of
/// the App's document.
pub trait Providers: Sync {
    /// What a flow must know before anybody is called. An unknown preset has none of it; the calls below refuse it.
    fn traits_of(&self, provider: &RenderedProvider) -> ProviderTraits;

    /// The right to ask a provider; it ends when it is dropped.
    type Permit: Send + Sync;

    /// A permit for an operation of a client, at once or not at all: a client, a Provider, a namespace and the whole
    /// server each have so many.
    fn try_acquire(
        &self,
        operation: Operation,
        app: &App,
        provider: &RenderedProvider,
        client: ClientAddress,
    ) -> Result<Self::Permit, ProviderError>;

    /// Where the browser is sent to log in.
    fn authorization_url(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        request: &Authorization<'_>,
    ) -> impl Future<Output = Result<String, ProviderError>> + Send;

    /// Judges `iss` of a callback that brings no code (RFC 9207): where it is sent, and where the provider promises it.
    fn judge_issuer(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        iss: Option<&str>,
    ) -> impl Future<Output = Result<(), ProviderError>> + Send;

    /// Makes a code a user: code exchange, ID token in full, `iss` of the callback (RFC 9207), userinfo, addresses.
    fn exchange(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        grant: &Grant<'_>,
    ) -> impl Future<Output = Result<Vouched, ProviderError>> + Send;

    /// Makes a provider's token, ID token or access token, a user, where it was issued for one of our clients. A nonce
    /// must be the ID token's, plain or as lower-case hexadecimal SHA-256.
    fn check_token(
        &self,
        permit: &Self::Permit,
        provider: &RenderedProvider,
        token: &str,
        nonce: Option<&str>,
    ) -> impl Future<Output = Result<Vouched, ProviderError>> + Send;
}

/// An identity to be written.
#[derive(Clone, Debug)]
pub struct NewIdentity {
    pub authority: String,
    pub subject: String,
    /// The Provider's name: a label only.
    pub provider: ProviderName,
    pub email: Option<Email>,
    pub at: OffsetDateTime,
}

/// A user that a provider vouches for, to be made.
#[derive(Clone, Debug)]
pub struct FederatedUser {
    pub id: UserId,
    /// Verified by the provider.
    pub email: Option<Email>,
    /// Told by the provider, and not verified: it waits for its code.
    pub pending_email: Option<Email>,
    /// Empty where the provider tells none.
    pub name: String,
    pub created_at: OffsetDateTime,
    pub event: Event,
}

/// Gives a user one more way to sign in. Holds only while the user is enabled and at the epoch.
#[derive(Clone, Debug)]
pub struct Linking {
    pub user: UserId,
    pub epoch: Epoch,
    /// The canonical address by which the user was found: holds only while it is the user's, and verified.
    pub address: Option<String>,
    pub identity: NewIdentity,
    pub event: Event,
}

/// Makes an account whose address nobody has confirmed that of whom a provider vouches for. Holds only while the user is
/// enabled, at the epoch, and of that address, unverified.
#[derive(Clone, Debug)]
pub struct TakeOver {
    pub user: UserId,
    pub epoch: Epoch,
    pub address: String,
    /// Replaces that of whoever registered.
    pub name: String,
    pub identity: NewIdentity,
    pub event: Event,
}

/// Takes a Provider's identities from their user.
#[derive(Clone, Debug)]
pub struct Unlinking {
    pub user: UserId,
    pub provider: ProviderName,
    /// The Providers that the App has: an identity of another is no way in.
    pub usable: Vec<ProviderName>,
    pub event: Event,
}

/// What became of a linking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linked {
    Done,
    /// The identity is somebody's already; nothing was written.
    Taken(UserId),
    /// The user is not what it was; nothing was written.
    Moved,
}

/// What became of an unlinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlinked {
    Done,
    /// The user has no identity of that Provider.
    NotLinked,
    /// Nothing would be left to sign in with; nothing was written.
    LastWayIn,
}

/// Identities, in Postgres. Each change is one transaction, with its audit event and what must be mailed about it.
pub trait Identities: Sync {
    fn user_by_identity(
        &self,
        app: &AppId,
        authority: &str,
        subject: &str,
    ) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// Makes the user, the identity and the mail; false, and nothing written, where the identity or the address is
    /// somebody's already. Of concurrent calls for one identity one creates.
    fn create_federated(
        &self,
        app: &AppId,
        user: FederatedUser,
        identity: NewIdentity,
        mail: Option<Mail>,
    ) -> impl Future<Output = Answer<bool>> + Send;

    /// Links, and queues the notice to the user's verified address.
    fn link_identity(&self, app: &AppId, linking: Linking) -> impl Future<Output = Answer<Linked>> + Send;

    /// None: the user is not what it was, or the identity is somebody's already; nothing was written. Else: password,
    /// pending address and other identities gone, contested ended, address verified, identity linked, epoch raised, an
    /// outbox row that carries it.
    fn take_over(&self, app: &AppId, change: TakeOver) -> impl Future<Output = Answer<Option<User>>> + Send;

    /// The oldest first.
    fn identities(&self, app: &AppId, user: UserId) -> impl Future<Output = Answer<Vec<Identity>>> + Send;

    /// Removes them, unless no password and no identity of the Providers in `usable` would be left. Of concurrent calls
    /// none removes what another counted on.
    fn unlink_identity(&self, app: &AppId, unlinking: Unlinking) -> impl Future<Output = Answer<Unlinked>> + Send;
}

#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    #[error(transparent)]
    TooMany(#[from] TooManyFlows),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Social logins under way, in Redis.
pub trait Flows: Sync {
    /// Keeps a flow that no browser holds, within the limits for such flows.
    fn keep_flow(
        &self,
        app: &AppId,
        id: &FlowId,
        sealed: &str,
        client: ClientAddress,
    ) -> impl Future<Output = Result<(), KeepError>> + Send;

    /// A flow that no browser holds; takes nothing.
    fn find_flow(&self, app: &AppId, id: &FlowId) -> impl Future<Output = Answer<Option<String>>> + Send;

    /// Uses a flow up: of all calls one gets true.
    fn use_flow(&self, app: &AppId, id: &FlowId, binding: Binding) -> impl Future<Output = Answer<bool>> + Send;

    /// Keeps a login for the exchange of its code.
    fn put_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        login: &PendingLogin,
    ) -> impl Future<Output = Answer<()>> + Send;

    /// Takes nothing; a code that was used is still found for a while.
    fn find_login(&self, app: &AppId, key: &LoginCodeKey) -> impl Future<Output = Answer<Option<FoundLogin>>> + Send;

    /// Notes that the code was exchanged for a session that is open; none: this was the first exchange. Else the session
    /// of the first.
    fn take_login(
        &self,
        app: &AppId,
        key: &LoginCodeKey,
        session: SessionId,
    ) -> impl Future<Output = Answer<Option<SessionId>>> + Send;
}
