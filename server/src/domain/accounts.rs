//! Email accounts: register, log in, verify, confirm, forget and reset, in the contract's order (3).

use latchkey_crds::rendered::{EnumerationProtection, SignUp};
use time::Duration;
use tracing::warn;

use super::{
    app::App,
    audit::{Detail, Event, EventKind, Refusal, RefusalKind},
    client::Caller,
    clock::Env,
    code::{Code, CodeKey, CodeRecord, Purpose},
    email::{AccountKey, Email},
    keys::SignError,
    limits::{self, Limited, MailPurpose},
    mail::{EpochNews, Mail, MailKind},
    password::{self, Busy, Password, Weak},
    ports::{
        Accounts, AddressChange, AddressChanged, Audit, Carried, Changed, Codes, Confirmation, Creation, Hasher,
        Limits, NewUser, Outbox, PasswordReset, Sessions, StoreError, TakeError, Taken, Users,
    },
    session::{Amr, NewSession, Opening, Profile, Session, SessionId},
    signed_in::{NotSignedIn, SignedIn},
    token::{self, Tokens},
    user::{Name, User, UserId},
};

/// What may come between any request and its answer.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    #[error(transparent)]
    Limited(#[from] Limited),
    #[error(transparent)]
    Busy(#[from] Busy),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("a token could not be signed")]
    Signing(#[from] SignError),
}

impl From<TakeError> for Trouble {
    fn from(error: TakeError) -> Self {
        match error {
            TakeError::Limited(limited) => Self::Limited(limited),
            TakeError::Store(store) => Self::Store(store),
        }
    }
}

// === register ===

pub struct Register {
    pub email: Email,
    pub name: Name,
    pub password: Password,
}

pub struct Registered {
    /// The one to keep is that of *confirm* or *login*: for a known address it is a fresh random one.
    pub local_id: UserId,
    /// Of the confirmation code; a lower bound, since the code is made when the mail is sent.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("sign-up is closed")]
    Closed,
    #[error("addresses of this domain are not taken")]
    DomainNotAllowed,
    #[error(transparent)]
    Weak(#[from] Weak),
    /// Only without enumeration protection.
    #[error("the address has an account")]
    EmailTaken,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

pub async fn register<S: Users + Limits + Hasher>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    request: Register,
) -> Result<Registered, RegisterError> {
    if app.doc.sign_up == SignUp::Closed {
        return Err(RegisterError::Closed);
    }
    if !app.allows(&request.email) {
        return Err(RegisterError::DomainNotAllowed);
    }
    stores.take(app.id(), limits::registration(app, caller)).await.map_err(Trouble::from)?;
    let guesses = password::guesses(Some(&request.email), Some(&request.name));
    judge(stores, app, caller, &request.password, guesses).await?;

    let now = env.now();
    let known = stores.user_by_email(app.id(), &request.email).await.map_err(Trouble::from)?;
    let taken = |user: &User| user.email_verified && app.doc.enumeration_protection == EnumerationProtection::Disabled;
    if known.as_ref().is_some_and(taken) {
        return Err(RegisterError::EmailTaken);
    }
    let mailing = may_mail(stores, app, caller, &request.email, MailPurpose::Confirm).await?;
    let fresh = UserId(env.uuid());
    let event = Event { at: now, ..Event::new(env, caller, EventKind::Registered, fresh) };
    if let Err(trouble) = enter(stores, app, caller, &request, known, fresh, mailing.is_some(), event).await {
        not_mailed(stores, app, mailing).await;
        return Err(trouble.into());
    }

    let expires_in = i64::from(app.doc.mail.confirm_code_lifetime_seconds);
    Ok(Registered { local_id: fresh, expires_in, expires_at: now.unix_timestamp() + expires_in })
}

/// Makes the user, or does for a known address what costs the same. One hash on either way: a known address checks its
/// own, an unknown one makes one.
#[expect(
    clippy::too_many_arguments,
    reason = "the second half of `register`, apart so that its failure has one way out"
)]
async fn enter<S: Users + Hasher>(
    stores: &S,
    app: &App,
    caller: &Caller,
    request: &Register,
    known: Option<User>,
    fresh: UserId,
    mailed: bool,
    event: Event,
) -> Result<(), Trouble> {
    let known = match known {
        Some(user) => Some(user),
        None => {
            let password_hash = stores.hash(app, caller.address(), &request.password).await?;
            let user = NewUser {
                id: fresh,
                email: request.email.clone(),
                name: request.name.clone(),
                password_hash,
                created_at: event.at,
                event: event.clone(),
            };
            let mail = mailed.then_some(Mail { kind: MailKind::Confirm, user: Some(fresh), requested_at: event.at });
            match stores.create_user(app.id(), user, mail).await? {
                Creation::Created => None,
                // Two registered the address at once; the later one goes on as for a known address.
                Creation::AddressTaken => stores.user_by_email(app.id(), &request.email).await?,
            }
        }
    };
    match known {
        Some(user) => registered_again(stores, app, caller, request, &user, mailed, event).await,
        None => Ok(()),
    }
}

/// The address is known: its owner hears of it, and an unverified account with another password becomes contested.
async fn registered_again<S: Users + Hasher>(
    stores: &S,
    app: &App,
    caller: &Caller,
    request: &Register,
    user: &User,
    mailed: bool,
    event: Event,
) -> Result<(), Trouble> {
    let hash = user.password_hash.as_ref();
    let same = stores.verify(app, caller.address(), &request.password, hash).await?;
    let kind = if user.email_verified { MailKind::AccountExists } else { MailKind::Confirm };
    // A disabled account's owner is not bothered; the row is there all the same, and sends nothing.
    let to = (!user.disabled).then_some(user.id);
    let mail = mailed.then_some(Mail { kind, user: to, requested_at: event.at });
    let contest = !user.email_verified && !same;
    let event = Event { kind: EventKind::RegisteredAgain, user: Some(user.id), ..event };
    Ok(stores.registered_again(app.id(), user.id, user.epoch, contest, mail, event).await?)
}

// === login ===

pub struct LogIn {
    pub email: Email,
    pub password: Password,
}

pub struct LoggedIn {
    pub user: User,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum LogInError {
    /// Unknown address, wrong password, no password: one answer.
    #[error("address or password is wrong")]
    InvalidCredentials,
    /// Only after the right password.
    #[error("the user is disabled")]
    Disabled,
    /// Only with enumeration protection `Disabled`, after the right password; otherwise it is `InvalidCredentials`.
    #[error("the address is not verified")]
    EmailNotVerified,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

pub async fn log_in<S: Users + Limits + Hasher + Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    request: LogIn,
) -> Result<LoggedIn, LogInError> {
    let account = request.email.account(app.id());
    let refuse = |kind, user: Option<&User>| {
        let account = Some(account.clone());
        stores.refuse(app.id(), Refusal::new(kind, caller, account, user.map(|user| user.id)));
    };
    let failure = take_login(stores, app, caller, &account, None).await?;
    let user = match check_password(stores, app, caller, &request).await {
        Ok(user) => user,
        Err(trouble) => {
            // Nothing was learned about the password.
            stores.give_back(app.id(), failure).await;
            return Err(trouble.into());
        }
    };
    let user = match user {
        Ok(user) => user,
        Err(named) => {
            refuse(RefusalKind::LogIn, named.as_ref());
            return Err(LogInError::InvalidCredentials);
        }
    };
    let unverified = app.doc.require_verified_email && !user.email_verified;
    if unverified && !user.disabled && app.doc.enumeration_protection == EnumerationProtection::Strict {
        // Else register followed by login would tell whether the address was known; it counts as a failure for the
        // same reason.
        refuse(RefusalKind::LogIn, Some(&user));
        return Err(LogInError::InvalidCredentials);
    }
    stores.give_back(app.id(), failure).await;
    if user.disabled {
        refuse(RefusalKind::LogIn, Some(&user));
        return Err(LogInError::Disabled);
    }
    if unverified {
        refuse(RefusalKind::LogIn, Some(&user));
        return Err(LogInError::EmailNotVerified);
    }
    renew_hash(stores, app, caller, &user, &request.password).await;
    let tokens = match open(stores, env, app, caller, &user, Amr::Password).await? {
        Some(tokens) => tokens,
        // The password that was right a moment ago was reset meanwhile.
        None => return Err(LogInError::InvalidCredentials),
    };
    stores.remember(app.id(), &account, caller.address()).await;
    Ok(LoggedIn { user, tokens })
}

/// The place of a password check under the limits of logins, to be had before hashing. What it answers is a failure's,
/// to be given back where the password was right.
pub(super) async fn take_login<S: Limits + Hasher + Audit>(
    stores: &S,
    app: &App,
    caller: &Caller,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<Taken, Trouble> {
    let attempt = take_attempt(stores, app, caller, account, user).await?;
    match take_failure(stores, app, caller, account, user).await {
        Ok(taken) => Ok(taken),
        Err(trouble) => {
            // What is refused consumes nothing.
            stores.give_back(app.id(), attempt).await;
            Err(trouble)
        }
    }
}

/// The place of a call that hashes a password. It is never given back once the work has begun.
pub(super) async fn take_attempt<S: Limits + Hasher + Audit>(
    stores: &S,
    app: &App,
    caller: &Caller,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<Taken, Trouble> {
    stores.admit(app, caller.address())?;
    let taken = stores.take(app.id(), limits::login_attempts(app, caller)).await;
    taken.map_err(|error| limited_login(stores, app, caller, account, user, error))
}

/// The place of a wrong password, to be given back if it was right.
pub(super) async fn take_failure<S: Limits + Audit>(
    stores: &S,
    app: &App,
    caller: &Caller,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<Taken, Trouble> {
    let exempt = stores.is_known(app.id(), account, caller.address()).await?;
    let taken = stores.take(app.id(), limits::login_failures(app, caller, account, exempt)).await;
    taken.map_err(|error| limited_login(stores, app, caller, account, user, error))
}

/// Records a login that a limit refused.
fn limited_login<S: Audit>(
    stores: &S,
    app: &App,
    caller: &Caller,
    account: &AccountKey,
    user: Option<UserId>,
    error: TakeError,
) -> Trouble {
    if matches!(error, TakeError::Limited(_)) {
        let account = Some(account.clone());
        stores.refuse(app.id(), Refusal::new(RefusalKind::LogInLimit, caller, account, user));
    }
    Trouble::from(error)
}

/// The user whose password it is, or else the one whose address it is. Unknown addresses take the same way.
async fn check_password<S: Users + Hasher>(
    stores: &S,
    app: &App,
    caller: &Caller,
    request: &LogIn,
) -> Result<Result<User, Option<User>>, Trouble> {
    let user = stores.user_by_email(app.id(), &request.email).await?;
    let hash = user.as_ref().and_then(|user| user.password_hash.as_ref());
    let right = stores.verify(app, caller.address(), &request.password, hash).await?;
    Ok(match user {
        Some(user) if right => Ok(user),
        named => Err(named),
    })
}

/// A hash with old parameters is replaced while the password is at hand. What fails here is done at the next log-in.
async fn renew_hash<S: Users + Hasher>(stores: &S, app: &App, caller: &Caller, user: &User, password: &Password) {
    let Some(old) = user.password_hash.as_ref().filter(|hash| stores.is_outdated(hash)) else { return };
    let renewed = match stores.hash(app, caller.address(), password).await {
        Ok(new) => stores.renew_hash(app.id(), user.id, old, new).await.map_err(Trouble::from),
        Err(busy) => Err(busy.into()),
    };
    if let Err(trouble) = renewed {
        warn!(app = %app.id(), error = &trouble as &dyn std::error::Error, "a password hash keeps its old parameters");
    }
}

// === verify ===

#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

/// Sends the confirmation code again to the user of the session; answers the address.
pub async fn verify<S: Accounts + Limits + Outbox + Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
) -> Result<Email, VerifyError> {
    let user = signed_in.account(stores, app).await.map_err(Trouble::from)?.ok_or(VerifyError::InvalidToken)?;
    let waiting = user.pending_email.as_ref().or(user.email.as_ref().filter(|_| !user.email_verified));
    let Some(address) = waiting else {
        return user.email.ok_or(VerifyError::InvalidToken);
    };
    let account = address.account(app.id());
    let known = stores.is_known(app.id(), &account, caller.address()).await.map_err(Trouble::from)?;
    let checks = limits::mail(app, caller, &account, MailPurpose::Confirm, known);
    let taken = stores.take(app.id(), checks).await.map_err(Trouble::from)?;
    let mail = Mail { kind: MailKind::Confirm, user: Some(user.id), requested_at: env.now() };
    if let Err(error) = stores.enqueue(app.id(), mail).await {
        stores.give_back(app.id(), taken).await;
        return Err(Trouble::from(error).into());
    }
    let event = Event::new(env, caller, EventKind::ConfirmationRequested, user.id).in_session(signed_in.session.id);
    stores.record(app.id(), event).await;
    Ok(address.clone())
}

// === confirm ===

pub struct Confirmed {
    pub user: User,
    pub tokens: Tokens,
    /// The account was contested: its password is gone, and this session may set one.
    pub password_required: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfirmError {
    /// Wrong, used and expired alike.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

pub async fn confirm<S: Users + Accounts + Outbox + Limits + Codes + Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    code: &str,
    bearer: Option<&str>,
) -> Result<Confirmed, ConfirmError> {
    let guess = stores.take(app.id(), limits::codes(app, caller)).await.map_err(Trouble::from)?;
    let outcome = use_confirmation(stores, env, app, caller, code, bearer).await;
    if !matches!(outcome, Err(ConfirmError::InvalidCode)) {
        stores.give_back(app.id(), guess).await;
    }
    outcome
}

async fn use_confirmation<S: Users + Accounts + Outbox + Limits + Codes + Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    code: &str,
    bearer: Option<&str>,
) -> Result<Confirmed, ConfirmError> {
    let found = find_code(stores, env, app, code, &[Purpose::Confirm, Purpose::Change]).await?;
    let (key, record) = found.ok_or(ConfirmError::InvalidCode)?;
    let own = own_session(stores, env, app, bearer, record.user).await?;
    // A code for another address is good for nobody but the account that asked, and else it is not used up.
    if record.purpose == Purpose::Change && own.as_ref().is_none_or(|session| session.epoch != record.epoch) {
        return Err(ConfirmError::InvalidCode);
    }
    let record = stores.take_code(app.id(), &key).await.map_err(Trouble::from)?.ok_or(ConfirmError::InvalidCode)?;
    let session = own.as_ref().map_or_else(|| SessionId(env.uuid()), |session| session.id);
    let used = match (record.purpose, &own) {
        (Purpose::Change, Some(_)) => change_address(stores, env, app, caller, &record, session).await,
        (Purpose::Change, None) => Ok(None),
        (Purpose::Confirm | Purpose::Reset, _) => {
            let event = Event {
                session: own.as_ref().map(|session| session.id),
                ..Event::new(env, caller, EventKind::Confirmed, record.user)
            };
            let change = Confirmation {
                user: record.user,
                epoch: record.epoch,
                address: record.address.clone(),
                session,
                kept: own.is_some(),
                at: event.at,
                event,
            };
            stores.confirm_address(app.id(), change).await
        }
    };
    let changed = match used {
        Ok(changed) => changed.ok_or(ConfirmError::InvalidCode)?,
        Err(error) => {
            put_back(stores, app, &key, &record).await;
            return Err(Trouble::from(error).into());
        }
    };
    let user = changed.user;
    carry_epoch(stores, app, &user, own.as_ref().map(|session| session.id)).await;
    let tokens = match own {
        Some(session) => {
            let session = Session { epoch: user.epoch, ..session };
            token::issue(app, env, &user.profile(), &session).map_err(Trouble::from)?
        }
        // A session that cannot open because of a still later change: to the caller the code is spent.
        None => {
            let opened = open_as(stores, env, app, caller, &user, session, Amr::Code).await?;
            opened.ok_or(ConfirmError::InvalidCode)?
        }
    };
    remember(stores, app, caller, &user).await;
    Ok(Confirmed { user, tokens, password_required: changed.was_contested })
}

/// The pending address becomes the account's; an unverified account that had it is gone.
async fn change_address<S: Accounts + Sessions + Outbox>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    record: &CodeRecord,
    session: SessionId,
) -> Result<Option<Changed>, StoreError> {
    let event = Event::new(env, caller, EventKind::AddressChanged, record.user).in_session(session);
    let change = AddressChange {
        user: record.user,
        epoch: record.epoch,
        address: record.address.clone(),
        keep: session,
        at: event.at,
        event,
    };
    let Some(AddressChanged { user, removed }) = stores.change_address(app.id(), change).await? else {
        return Ok(None);
    };
    if let Some(news) = removed {
        carry(stores, app, &news, None).await;
    }
    Ok(Some(Changed { user, was_contested: false }))
}

/// The caller's session where the Bearer is that of the account itself. Another Bearer, or one that is not valid, is as
/// good as none: *confirm* needs no session.
async fn own_session<S: Sessions>(
    stores: &S,
    env: &Env,
    app: &App,
    bearer: Option<&str>,
    user: UserId,
) -> Result<Option<Session>, Trouble> {
    let Some(bearer) = bearer else { return Ok(None) };
    match SignedIn::prove(stores, env, app, bearer).await {
        Ok(signed_in) => Ok(Some(signed_in.session).filter(|session| session.user == user)),
        Err(NotSignedIn::InvalidToken) => Ok(None),
        Err(NotSignedIn::Store(error)) => Err(error.into()),
    }
}

// === forgot-password ===

/// Queues a reset mail; an unknown address makes a row too, one that sends nothing.
pub async fn forgot_password<S: Users + Limits + Outbox + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    email: &Email,
) -> Result<(), Trouble> {
    let mailing = may_mail(stores, app, caller, email, MailPurpose::Reset).await?;
    let queued = async {
        let user = stores.user_by_email(app.id(), email).await?;
        let (id, disabled) = user.map(|user| (user.id, user.disabled)).unzip();
        if mailing.is_some() {
            let to = id.filter(|_| disabled != Some(true));
            stores.enqueue(app.id(), Mail { kind: MailKind::Reset, user: to, requested_at: env.now() }).await?;
            // Without waiting: an unknown address writes nothing, which takes less time. And only with a mail, whose
            // limits then hold for the rows too.
            stores.record_later(app.id(), Event::new(env, caller, EventKind::PasswordResetRequested, id));
        }
        Ok(())
    };
    if let Err(error) = queued.await {
        not_mailed(stores, app, mailing).await;
        return Err(Trouble::Store(error));
    }
    Ok(())
}

// === confirm-password ===

pub struct ResetPassword {
    pub email: Email,
    pub code: String,
    pub password: Password,
}

#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// Wrong, used and expired code, unknown address: one answer.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Weak(#[from] Weak),
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<JudgeError> for ResetError {
    fn from(error: JudgeError) -> Self {
        match error {
            JudgeError::Weak(weak) => Self::Weak(weak),
            JudgeError::Trouble(trouble) => Self::Trouble(trouble),
        }
    }
}

impl From<JudgeError> for RegisterError {
    fn from(error: JudgeError) -> Self {
        match error {
            JudgeError::Weak(weak) => Self::Weak(weak),
            JudgeError::Trouble(trouble) => Self::Trouble(trouble),
        }
    }
}

pub async fn reset_password<S: Users + Outbox + Limits + Codes + Sessions + Hasher + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    request: ResetPassword,
) -> Result<(), ResetError> {
    let guess = stores.take(app.id(), limits::codes(app, caller)).await.map_err(Trouble::from)?;
    let email = request.email.clone();
    let outcome = use_reset_code(stores, env, app, caller, request).await;
    // A weak password counts like a wrong code: judging it is work, and the code was perhaps never looked at.
    if matches!(outcome, Ok(()) | Err(ResetError::Trouble(_))) {
        stores.give_back(app.id(), guess).await;
    }
    if matches!(outcome, Err(ResetError::InvalidCode)) {
        // Looked up for known and unknown addresses alike; that it fails changes nothing about the answer.
        let user = stores.user_by_email(app.id(), &email).await.ok().flatten();
        let account = Some(email.account(app.id()));
        let refusal = Refusal::new(RefusalKind::PasswordReset, caller, account, user.map(|user| user.id));
        stores.refuse(app.id(), refusal);
    }
    outcome
}

async fn use_reset_code<S: Users + Outbox + Limits + Codes + Sessions + Hasher + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    request: ResetPassword,
) -> Result<(), ResetError> {
    // First by the address alone, so that a weak password is refused alike for right and wrong codes.
    judge(stores, app, caller, &request.password, password::guesses(Some(&request.email), None)).await?;
    let found = find_code(stores, env, app, &request.code, &[Purpose::Reset]).await?;
    let (key, record) = found.ok_or(ResetError::InvalidCode)?;
    if record.address != request.email.canonical() {
        return Err(ResetError::InvalidCode);
    }
    let user = stores.user(app.id(), record.user).await.map_err(Trouble::from)?.ok_or(ResetError::InvalidCode)?;
    // With a right code the name counts too; a password refused here does not use the code up.
    let name = Name::parse(&user.name).ok();
    judge(stores, app, caller, &request.password, password::guesses(Some(&request.email), name.as_ref())).await?;
    let password_hash = stores.hash(app, caller.address(), &request.password).await.map_err(Trouble::from)?;
    let record = stores.take_code(app.id(), &key).await.map_err(Trouble::from)?.ok_or(ResetError::InvalidCode)?;
    let event = Event::new(env, caller, EventKind::PasswordReset, record.user);
    let change = PasswordReset {
        user: record.user,
        epoch: record.epoch,
        address: record.address.clone(),
        password_hash,
        at: event.at,
        event,
    };
    let changed = match stores.reset_password(app.id(), change).await {
        Ok(changed) => changed.ok_or(ResetError::InvalidCode)?,
        Err(error) => {
            put_back(stores, app, &key, &record).await;
            return Err(Trouble::from(error).into());
        }
    };
    let user = changed.user;
    carry_epoch(stores, app, &user, None).await;
    remember(stores, app, caller, &user).await;
    Ok(())
}

// === what they share ===

pub(super) enum JudgeError {
    Weak(Weak),
    Trouble(Trouble),
}

/// Whether a password may be set: length, then strength with these guesses.
pub(super) async fn judge<S: Hasher>(
    stores: &S,
    app: &App,
    caller: &Caller,
    password: &Password,
    guesses: Vec<String>,
) -> Result<(), JudgeError> {
    password.check_length(&app.doc.password).map_err(JudgeError::Weak)?;
    match stores.strong_enough(app, caller.address(), password, guesses).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(JudgeError::Weak(Weak::Guessable)),
        Err(busy) => Err(JudgeError::Trouble(busy.into())),
    }
}

/// A place for one more mail under the limits, or none: a limit that is reached drops the mail, not the answer.
pub(super) async fn may_mail<S: Limits>(
    stores: &S,
    app: &App,
    caller: &Caller,
    email: &Email,
    purpose: MailPurpose,
) -> Result<Option<Taken>, Trouble> {
    let account = email.account(app.id());
    let known = stores.is_known(app.id(), &account, caller.address()).await?;
    match stores.take(app.id(), limits::mail(app, caller, &account, purpose, known)).await {
        Ok(taken) => Ok(Some(taken)),
        Err(TakeError::Limited(_)) => Ok(None),
        Err(TakeError::Store(error)) => Err(error.into()),
    }
}

/// No mail was queued after all: the call that is tried again must find its place.
pub(super) async fn not_mailed<S: Limits>(stores: &S, app: &App, mailing: Option<Taken>) {
    if let Some(taken) = mailing {
        stores.give_back(app.id(), taken).await;
    }
}

/// A live code of one of these purposes; a wrong form, an unknown code and an ended one are all none.
async fn find_code<S: Codes>(
    stores: &S,
    env: &Env,
    app: &App,
    code: &str,
    purposes: &[Purpose],
) -> Result<Option<(CodeKey, CodeRecord)>, Trouble> {
    let Ok(code) = Code::parse(code) else { return Ok(None) };
    let found = stores.find_code(app.id(), &code.keys_to_try(app)).await?;
    let now = env.now().unix_timestamp();
    Ok(found.filter(|(_, record)| purposes.contains(&record.purpose) && now < record.expires_at))
}

/// The transaction failed, so the code was not used. Where it did commit after all, the epoch has moved and the code is
/// dead.
async fn put_back<S: Codes>(stores: &S, app: &App, key: &CodeKey, record: &CodeRecord) {
    if let Err(error) = stores.put_code(app.id(), key, record).await {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a code could not be put back");
    }
}

/// Tells Redis of a raised epoch before the answer; where that fails, the outbox row of the transaction does it.
pub(super) async fn carry_epoch<S: Sessions + Outbox>(stores: &S, app: &App, user: &User, keep: Option<SessionId>) {
    let news = EpochNews { user: user.id, epoch: user.epoch, keep };
    carry(stores, app, &news, Some(&user.profile())).await;
}

/// As above; without a profile the user is gone.
pub(super) async fn carry<S: Sessions + Outbox>(stores: &S, app: &App, news: &EpochNews, profile: Option<&Profile>) {
    let carried = match stores.raise_epoch(app.id(), news, profile).await {
        Ok(Carried::Safely) => stores.epoch_carried(app.id(), news).await,
        Ok(Carried::Unconfirmed) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = carried {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a raised epoch is left to the outbox");
    }
}

/// Opens a session at the user's epoch, and writes down that it was; none where the epoch has moved since the user was
/// read.
pub(super) async fn open<S: Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    user: &User,
    amr: Amr,
) -> Result<Option<Tokens>, Trouble> {
    open_as(stores, env, app, caller, user, SessionId(env.uuid()), amr).await
}

/// The same under an id that was told before.
async fn open_as<S: Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    user: &User,
    id: SessionId,
    amr: Amr,
) -> Result<Option<Tokens>, Trouble> {
    let now = env.now();
    let new = NewSession {
        id,
        user: user.id,
        epoch: user.epoch,
        profile: user.profile(),
        amr,
        auth_time: now,
        ip: caller.ip.to_string(),
        user_agent: caller.user_agent.clone(),
        ends_at: now + Duration::seconds(i64::from(app.doc.tokens.session_lifetime_seconds)),
        idle_seconds: app.doc.tokens.refresh_idle_seconds,
    };
    open_new(stores, env, app, caller, &new).await
}

/// As `open`, where the login was an earlier call.
pub(super) async fn open_new<S: Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    new: &NewSession,
) -> Result<Option<Tokens>, Trouble> {
    // Signed first: what cannot be answered is not opened.
    let tokens = token::issue(app, env, &new.profile, &Session::opened(new))?;
    match stores.open_session(app.id(), new).await? {
        Opening::Opened => {}
        Opening::Stale => return Ok(None),
    }
    let event = Event::new(env, caller, EventKind::LoggedIn, new.user);
    let event = event.in_session(new.id).with(Detail::amr(new.amr));
    stores.record(app.id(), event).await;
    Ok(Some(tokens))
}

/// From here on the client address is known to the account.
pub(super) async fn remember<S: Limits>(stores: &S, app: &App, caller: &Caller, user: &User) {
    let account: Option<AccountKey> = user.email.as_ref().map(|email| email.account(app.id()));
    if let Some(account) = account {
        stores.remember(app.id(), &account, caller.address()).await;
    }
}
