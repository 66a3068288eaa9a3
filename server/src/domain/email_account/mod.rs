//! Email accounts: register, log in, verify, confirm, forgot and reset a password (specification: Accounts).

use latchkey_crds::rendered::{EnumerationProtection, SignUp};
use time::Duration;
use tracing::warn;

use super::{
    app::App,
    audit::{Detail, Event, EventKind, Refusal, RefusalKind},
    authentication::{AuthenticatedSession, AuthenticationError},
    client::ClientInfo,
    clock::Env,
    code::{Code, CodeKey, CodePurpose, CodeRecord},
    email::{AccountKey, Email},
    keys::SignError,
    mail::{EpochChange, Mail, MailKind},
    password::{self, Overloaded, Password, WeakPassword},
    ports::{
        AcquireError, AddressChange, AddressChanged, AuditLog, ChangedUser, Codes, Confirmation, CreateUserOutcome,
        NewUser, Outbox, OwnAccounts, PasswordHasher, PasswordReset, RateLimitPermit, RateLimits, Replication,
        Sessions, StoreError, Users,
    },
    rate_limits::{self, MailPurpose, RateLimited},
    session::{Amr, NewSession, OpenOutcome, Profile, Session, SessionId},
    token::{self, Tokens},
    user::{Name, User, UserId},
};

/// Errors that any request can have.
#[derive(Debug, thiserror::Error)]
pub enum CommonError {
    #[error(transparent)]
    RateLimited(#[from] RateLimited),
    #[error(transparent)]
    Overloaded(#[from] Overloaded),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("a token could not be signed")]
    Signing(#[from] SignError),
}

impl From<AcquireError> for CommonError {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::RateLimited(limited) => Self::RateLimited(limited),
            AcquireError::Store(store) => Self::Store(store),
        }
    }
}

// === register ===

pub struct RegisterInput {
    pub email: Email,
    pub name: Name,
    pub password: Password,
}

pub struct Registered {
    /// For a known address a fresh random id. The id to keep is that of *confirm* or *login*.
    pub local_id: UserId,
    /// Of the confirmation code. A lower bound, since the code is made when the mail is sent.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("sign-up is closed")]
    Closed,
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    /// Only without enumeration protection.
    #[error("the address has an account")]
    EmailTaken,
    #[error(transparent)]
    Common(#[from] CommonError),
}

pub async fn register<S: Users + RateLimits + PasswordHasher>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    request: RegisterInput,
) -> Result<Registered, RegisterError> {
    if app.doc.sign_up == SignUp::Closed {
        return Err(RegisterError::Closed);
    }
    if !app.allows_email_domain(&request.email) {
        return Err(RegisterError::DomainNotAllowed);
    }
    stores.acquire(app.id(), rate_limits::registrations(app, caller)).await.map_err(CommonError::from)?;
    let guesses = password::guess_words(Some(&request.email), Some(&request.name));
    check_password_policy(stores, app, caller, &request.password, guesses).await?;

    let now = env.now();
    let known = stores.user_by_email(app.id(), &request.email).await.map_err(CommonError::from)?;
    let taken = |user: &User| user.email_verified && app.doc.enumeration_protection == EnumerationProtection::Disabled;
    if known.as_ref().is_some_and(taken) {
        return Err(RegisterError::EmailTaken);
    }
    let mailing = acquire_mail_limit(stores, app, caller, &request.email, MailPurpose::Confirm).await?;
    let fresh = UserId(env.new_uuid());
    let event = Event { at: now, ..Event::new(env, caller, EventKind::Registered, fresh) };
    if let Err(trouble) =
        create_or_contest_user(stores, app, caller, &request, known, fresh, mailing.is_some(), event).await
    {
        release_mail_limit(stores, app, mailing).await;
        return Err(trouble.into());
    }

    let expires_in = i64::from(app.doc.mail.confirm_code_lifetime_seconds);
    Ok(Registered { local_id: fresh, expires_in, expires_at: now.unix_timestamp() + expires_in })
}

/// Creates the user, or does work of the same cost if the address is known. Either way one password is hashed: for a
/// known address to check it, for an unknown address to store it.
#[expect(
    clippy::too_many_arguments,
    reason = "the second half of `register`, separate so that its failures are handled in one place"
)]
async fn create_or_contest_user<S: Users + PasswordHasher>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    request: &RegisterInput,
    known: Option<User>,
    fresh: UserId,
    mailed: bool,
    event: Event,
) -> Result<(), CommonError> {
    let known = match known {
        Some(user) => Some(user),
        None => {
            let password_hash = stores.hash(app, caller.client_address(), &request.password).await?;
            let user = NewUser {
                id: fresh,
                email: request.email.clone(),
                name: request.name.clone(),
                password_hash,
                created_at: event.at,
                event: event.clone(),
            };
            let mail =
                mailed.then_some(Mail { kind: MailKind::Confirm, recipient: Some(fresh), requested_at: event.at });
            match stores.create_user(app.id(), user, mail).await? {
                CreateUserOutcome::Created => None,
                // Two requests registered the address at once; the later one continues as for a known address.
                CreateUserOutcome::AddressTaken => stores.user_by_email(app.id(), &request.email).await?,
            }
        }
    };
    match known {
        Some(user) => register_known_address(stores, app, caller, request, &user, mailed, event).await,
        None => Ok(()),
    }
}

/// The address is known: its owner gets a mail, and an unverified account with another password becomes contested.
async fn register_known_address<S: Users + PasswordHasher>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    request: &RegisterInput,
    user: &User,
    mailed: bool,
    event: Event,
) -> Result<(), CommonError> {
    let hash = user.password_hash.as_ref();
    let same = stores.verify(app, caller.client_address(), &request.password, hash).await?;
    let kind = if user.email_verified { MailKind::AccountExists } else { MailKind::Confirm };
    // The owner of a disabled account gets no mail. The row is written all the same, and sends nothing.
    let to = (!user.disabled).then_some(user.id);
    let mail = mailed.then_some(Mail { kind, recipient: to, requested_at: event.at });
    let contest = !user.email_verified && !same;
    let event = Event { kind: EventKind::RegisteredAgain, user: Some(user.id), ..event };
    Ok(stores.record_repeated_registration(app.id(), user.id, user.epoch, contest, mail, event).await?)
}

// === login ===

pub struct LoginInput {
    pub email: Email,
    pub password: Password,
}

pub struct LoggedIn {
    pub user: User,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// Unknown address, wrong password and no password give the same error.
    #[error("address or password is wrong")]
    InvalidCredentials,
    /// Only after the right password.
    #[error("the user is disabled")]
    Disabled,
    /// Only with enumeration protection `Disabled`, after the right password. Otherwise the error is
    /// `InvalidCredentials`.
    #[error("the address is not verified")]
    EmailNotVerified,
    #[error(transparent)]
    Common(#[from] CommonError),
}

pub async fn log_in<S: Users + RateLimits + PasswordHasher + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    request: LoginInput,
) -> Result<LoggedIn, LoginError> {
    let account = request.email.account_key(app.id());
    let refuse = |kind, user: Option<&User>| {
        let account = Some(account.clone());
        stores.count_refusal(app.id(), Refusal::new(kind, caller, account, user.map(|user| user.id)));
    };
    let failure = acquire_login_limits(stores, app, caller, &account, None).await?;
    let user = match check_password(stores, app, caller, &request).await {
        Ok(user) => user,
        Err(trouble) => {
            // The password was not checked.
            stores.release(app.id(), failure).await;
            return Err(trouble.into());
        }
    };
    let user = match user {
        Ok(user) => user,
        Err(named) => {
            refuse(RefusalKind::Login, named.as_ref());
            return Err(LoginError::InvalidCredentials);
        }
    };
    let unverified = app.doc.require_verified_email && !user.email_verified;
    if unverified && !user.disabled && app.doc.enumeration_protection == EnumerationProtection::Strict {
        // Otherwise register followed by login would reveal whether the address was known. For the same reason it
        // counts as a failed login.
        refuse(RefusalKind::Login, Some(&user));
        return Err(LoginError::InvalidCredentials);
    }
    stores.release(app.id(), failure).await;
    if user.disabled {
        refuse(RefusalKind::Login, Some(&user));
        return Err(LoginError::Disabled);
    }
    if unverified {
        refuse(RefusalKind::Login, Some(&user));
        return Err(LoginError::EmailNotVerified);
    }
    renew_hash(stores, app, caller, &user, &request.password).await;
    let tokens = match open_session(stores, env, app, caller, &user, Amr::Password).await? {
        Some(tokens) => tokens,
        // The password was right, but it was reset in the meantime.
        None => return Err(LoginError::InvalidCredentials),
    };
    stores.remember_client(app.id(), &account, caller.client_address()).await;
    Ok(LoggedIn { user, tokens })
}

/// Acquires the rate limits of a login; call it before hashing. Returns the part that counts failures, which the caller
/// releases if the password was right.
pub(super) async fn acquire_login_limits<S: RateLimits + PasswordHasher + AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    let attempt = acquire_login_attempt(stores, app, caller, account, user).await?;
    match acquire_login_failure(stores, app, caller, account, user).await {
        Ok(taken) => Ok(taken),
        Err(trouble) => {
            // A refused request consumes nothing.
            stores.release(app.id(), attempt).await;
            Err(trouble)
        }
    }
}

/// Acquires the rate limit of calls that hash a password. It is not released once the work has started.
pub(super) async fn acquire_login_attempt<S: RateLimits + PasswordHasher + AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    stores.check_capacity(app, caller.client_address())?;
    let taken = stores.acquire(app.id(), rate_limits::login_attempts(app, caller)).await;
    taken.map_err(|error| count_limited_login(stores, app, caller, account, user, error))
}

/// Acquires the rate limit of wrong passwords. The caller releases it if the password was right.
pub(super) async fn acquire_login_failure<S: RateLimits + AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    let exempt = stores.is_known_client(app.id(), account, caller.client_address()).await?;
    let taken = stores.acquire(app.id(), rate_limits::login_failures(app, caller, account, exempt)).await;
    taken.map_err(|error| count_limited_login(stores, app, caller, account, user, error))
}

/// Counts a refusal if a rate limit was reached.
fn count_limited_login<S: AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    account: &AccountKey,
    user: Option<UserId>,
    error: AcquireError,
) -> CommonError {
    if matches!(error, AcquireError::RateLimited(_)) {
        let account = Some(account.clone());
        stores.count_refusal(app.id(), Refusal::new(RefusalKind::LoginLimit, caller, account, user));
    }
    CommonError::from(error)
}

/// `Ok` has the user if the password is right; otherwise `Err` has the user of the address, if there is one. Unknown
/// addresses cost the same.
async fn check_password<S: Users + PasswordHasher>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    request: &LoginInput,
) -> Result<Result<User, Option<User>>, CommonError> {
    let user = stores.user_by_email(app.id(), &request.email).await?;
    let hash = user.as_ref().and_then(|user| user.password_hash.as_ref());
    let right = stores.verify(app, caller.client_address(), &request.password, hash).await?;
    Ok(match user {
        Some(user) if right => Ok(user),
        named => Err(named),
    })
}

/// Replaces a hash with old parameters while the password is available. After a failure the next login tries again.
async fn renew_hash<S: Users + PasswordHasher>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    password: &Password,
) {
    let Some(old) = user.password_hash.as_ref().filter(|hash| stores.is_outdated(hash)) else { return };
    let renewed = match stores.hash(app, caller.client_address(), password).await {
        Ok(new) => stores.replace_hash(app.id(), user.id, old, new).await.map_err(CommonError::from),
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
    Common(#[from] CommonError),
}

/// Sends the confirmation code again to the user of the session. Returns the address.
pub async fn verify<S: OwnAccounts + RateLimits + Outbox + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
) -> Result<Email, VerifyError> {
    let user = signed_in.load_user(stores, app).await.map_err(CommonError::from)?.ok_or(VerifyError::InvalidToken)?;
    let waiting = user.pending_email.as_ref().or(user.email.as_ref().filter(|_| !user.email_verified));
    let Some(address) = waiting else {
        return user.email.ok_or(VerifyError::InvalidToken);
    };
    let account = address.account_key(app.id());
    let known = stores.is_known_client(app.id(), &account, caller.client_address()).await.map_err(CommonError::from)?;
    let checks = rate_limits::mails(app, caller, &account, MailPurpose::Confirm, known);
    let taken = stores.acquire(app.id(), checks).await.map_err(CommonError::from)?;
    let mail = Mail { kind: MailKind::Confirm, recipient: Some(user.id), requested_at: env.now() };
    if let Err(error) = stores.enqueue(app.id(), mail).await {
        stores.release(app.id(), taken).await;
        return Err(CommonError::from(error).into());
    }
    let event = Event::new(env, caller, EventKind::ConfirmationRequested, user.id).in_session(signed_in.session.id);
    stores.record(app.id(), event).await;
    Ok(address.clone())
}

// === confirm ===

pub struct Confirmed {
    pub user: User,
    pub tokens: Tokens,
    /// The account was contested: its password was removed, and this session may set one.
    pub password_required: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfirmError {
    /// Wrong, used and expired codes give the same error.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Common(#[from] CommonError),
}

pub async fn confirm<S: Users + OwnAccounts + Outbox + RateLimits + Codes + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    code: &str,
    bearer: Option<&str>,
) -> Result<Confirmed, ConfirmError> {
    let guess = stores.acquire(app.id(), rate_limits::codes(app, caller)).await.map_err(CommonError::from)?;
    let outcome = apply_confirmation_code(stores, env, app, caller, code, bearer).await;
    if !matches!(outcome, Err(ConfirmError::InvalidCode)) {
        stores.release(app.id(), guess).await;
    }
    outcome
}

async fn apply_confirmation_code<S: Users + OwnAccounts + Outbox + RateLimits + Codes + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    code: &str,
    bearer: Option<&str>,
) -> Result<Confirmed, ConfirmError> {
    let found = find_code(stores, env, app, code, &[CodePurpose::Confirm, CodePurpose::Change]).await?;
    let (key, record) = found.ok_or(ConfirmError::InvalidCode)?;
    let own = own_session(stores, env, app, bearer, record.user).await?;
    // A code for a new address is valid only for the account that requested it. For anybody else it stays unused.
    if record.purpose == CodePurpose::Change && own.as_ref().is_none_or(|session| session.epoch != record.epoch) {
        return Err(ConfirmError::InvalidCode);
    }
    let record =
        stores.consume_code(app.id(), &key).await.map_err(CommonError::from)?.ok_or(ConfirmError::InvalidCode)?;
    let session = own.as_ref().map_or_else(|| SessionId(env.new_uuid()), |session| session.id);
    let used = match (record.purpose, &own) {
        (CodePurpose::Change, Some(_)) => change_address(stores, env, app, caller, &record, session).await,
        (CodePurpose::Change, None) => Ok(None),
        (CodePurpose::Confirm | CodePurpose::Reset, _) => {
            let event = Event {
                session: own.as_ref().map(|session| session.id),
                ..Event::new(env, caller, EventKind::Confirmed, record.user)
            };
            let change = Confirmation {
                user: record.user,
                epoch: record.epoch,
                address: record.address.clone(),
                session,
                keeps_session: own.is_some(),
                at: event.at,
                event,
            };
            stores.confirm_address(app.id(), change).await
        }
    };
    let changed = match used {
        Ok(changed) => changed.ok_or(ConfirmError::InvalidCode)?,
        Err(error) => {
            restore_code(stores, app, &key, &record).await;
            return Err(CommonError::from(error).into());
        }
    };
    let user = changed.user;
    propagate_epoch(stores, app, &user, own.as_ref().map(|session| session.id)).await;
    let tokens = match own {
        Some(session) => {
            let session = Session { epoch: user.epoch, ..session };
            token::issue_tokens(app, env, &user.profile(), &session).map_err(CommonError::from)?
        }
        // A still later change prevents the session from opening; to the caller the code is used.
        None => {
            let opened = open_session_with_id(stores, env, app, caller, &user, session, Amr::Code).await?;
            opened.ok_or(ConfirmError::InvalidCode)?
        }
    };
    remember_client(stores, app, caller, &user).await;
    Ok(Confirmed { user, tokens, password_required: changed.was_contested })
}

/// Makes the pending address the account's. An unverified account that had the address is deleted.
async fn change_address<S: OwnAccounts + Sessions + Outbox>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    record: &CodeRecord,
    session: SessionId,
) -> Result<Option<ChangedUser>, StoreError> {
    let event = Event::new(env, caller, EventKind::AddressChanged, record.user).in_session(session);
    let change = AddressChange {
        user: record.user,
        epoch: record.epoch,
        address: record.address.clone(),
        kept_session: session,
        at: event.at,
        event,
    };
    let Some(AddressChanged { user, removed }) = stores.change_address(app.id(), change).await? else {
        return Ok(None);
    };
    if let Some(news) = removed {
        propagate_epoch_change(stores, app, &news, None).await;
    }
    Ok(Some(ChangedUser { user, was_contested: false }))
}

/// The caller's session, if the Bearer token belongs to the account itself. Any other or invalid token counts as none,
/// since *confirm* needs no session.
async fn own_session<S: Sessions>(
    stores: &S,
    env: &Env,
    app: &App,
    bearer: Option<&str>,
    user: UserId,
) -> Result<Option<Session>, CommonError> {
    let Some(bearer) = bearer else { return Ok(None) };
    match AuthenticatedSession::authenticate(stores, env, app, bearer).await {
        Ok(signed_in) => Ok(Some(signed_in.session).filter(|session| session.user == user)),
        Err(AuthenticationError::InvalidToken) => Ok(None),
        Err(AuthenticationError::Store(error)) => Err(error.into()),
    }
}

// === forgot-password ===

/// Queues a reset mail. For an unknown address it writes an outbox row that sends nothing.
pub async fn forgot_password<S: Users + RateLimits + Outbox + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    email: &Email,
) -> Result<(), CommonError> {
    let mailing = acquire_mail_limit(stores, app, caller, email, MailPurpose::Reset).await?;
    let queued = async {
        let user = stores.user_by_email(app.id(), email).await?;
        let (id, disabled) = user.map(|user| (user.id, user.disabled)).unzip();
        if mailing.is_some() {
            let to = id.filter(|_| disabled != Some(true));
            stores.enqueue(app.id(), Mail { kind: MailKind::Reset, recipient: to, requested_at: env.now() }).await?;
            // Does not wait: an unknown address has no event to write, which takes less time. Only together with a
            // mail, so that the mail limits bound the events too.
            stores.record_later(app.id(), Event::new(env, caller, EventKind::PasswordResetRequested, id));
        }
        Ok(())
    };
    if let Err(error) = queued.await {
        release_mail_limit(stores, app, mailing).await;
        return Err(CommonError::Store(error));
    }
    Ok(())
}

// === confirm-password ===

pub struct ResetPasswordInput {
    pub email: Email,
    pub code: String,
    pub password: Password,
}

#[derive(Debug, thiserror::Error)]
pub enum ResetPasswordError {
    /// Wrong, used and expired codes and unknown addresses give the same error.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    #[error(transparent)]
    Common(#[from] CommonError),
}

impl From<PasswordPolicyError> for ResetPasswordError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(trouble) => Self::Common(trouble),
        }
    }
}

impl From<PasswordPolicyError> for RegisterError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(trouble) => Self::Common(trouble),
        }
    }
}

pub async fn reset_password<S: Users + Outbox + RateLimits + Codes + Sessions + PasswordHasher + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    request: ResetPasswordInput,
) -> Result<(), ResetPasswordError> {
    let guess = stores.acquire(app.id(), rate_limits::codes(app, caller)).await.map_err(CommonError::from)?;
    let email = request.email.clone();
    let outcome = apply_reset_code(stores, env, app, caller, request).await;
    // A weak password counts like a wrong code: scoring is work, and the code may not have been checked yet.
    if matches!(outcome, Ok(()) | Err(ResetPasswordError::Common(_))) {
        stores.release(app.id(), guess).await;
    }
    if matches!(outcome, Err(ResetPasswordError::InvalidCode)) {
        // Looked up for known and unknown addresses alike. A failure of the lookup does not change the response.
        let user = stores.user_by_email(app.id(), &email).await.ok().flatten();
        let account = Some(email.account_key(app.id()));
        let refusal = Refusal::new(RefusalKind::PasswordReset, caller, account, user.map(|user| user.id));
        stores.count_refusal(app.id(), refusal);
    }
    outcome
}

async fn apply_reset_code<S: Users + Outbox + RateLimits + Codes + Sessions + PasswordHasher + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    request: ResetPasswordInput,
) -> Result<(), ResetPasswordError> {
    // First with the address alone, so that a weak password is rejected alike for right and wrong codes.
    check_password_policy(stores, app, caller, &request.password, password::guess_words(Some(&request.email), None))
        .await?;
    let found = find_code(stores, env, app, &request.code, &[CodePurpose::Reset]).await?;
    let (key, record) = found.ok_or(ResetPasswordError::InvalidCode)?;
    if record.address != request.email.canonical() {
        return Err(ResetPasswordError::InvalidCode);
    }
    let user =
        stores.user(app.id(), record.user).await.map_err(CommonError::from)?.ok_or(ResetPasswordError::InvalidCode)?;
    // With a right code the name counts too. A password that is rejected here does not use the code.
    let name = Name::parse(&user.name).ok();
    check_password_policy(
        stores,
        app,
        caller,
        &request.password,
        password::guess_words(Some(&request.email), name.as_ref()),
    )
    .await?;
    let password_hash =
        stores.hash(app, caller.client_address(), &request.password).await.map_err(CommonError::from)?;
    let record =
        stores.consume_code(app.id(), &key).await.map_err(CommonError::from)?.ok_or(ResetPasswordError::InvalidCode)?;
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
        Ok(changed) => changed.ok_or(ResetPasswordError::InvalidCode)?,
        Err(error) => {
            restore_code(stores, app, &key, &record).await;
            return Err(CommonError::from(error).into());
        }
    };
    let user = changed.user;
    propagate_epoch(stores, app, &user, None).await;
    remember_client(stores, app, caller, &user).await;
    Ok(())
}

// === shared helpers ===

pub(super) enum PasswordPolicyError {
    Weak(WeakPassword),
    Common(CommonError),
}

/// Whether a password can be set: its length, then its strength given these guess words.
pub(super) async fn check_password_policy<S: PasswordHasher>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    password: &Password,
    guesses: Vec<String>,
) -> Result<(), PasswordPolicyError> {
    password.check_length(&app.doc.password).map_err(PasswordPolicyError::Weak)?;
    match stores.is_strong_enough(app, caller.client_address(), password, guesses).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(PasswordPolicyError::Weak(WeakPassword::Guessable)),
        Err(busy) => Err(PasswordPolicyError::Common(busy.into())),
    }
}

/// Acquires the rate limits of one mail. `None`: a limit is reached, which drops the mail but not the response.
pub(super) async fn acquire_mail_limit<S: RateLimits>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    email: &Email,
    purpose: MailPurpose,
) -> Result<Option<RateLimitPermit>, CommonError> {
    let account = email.account_key(app.id());
    let known = stores.is_known_client(app.id(), &account, caller.client_address()).await?;
    match stores.acquire(app.id(), rate_limits::mails(app, caller, &account, purpose, known)).await {
        Ok(taken) => Ok(Some(taken)),
        Err(AcquireError::RateLimited(_)) => Ok(None),
        Err(AcquireError::Store(error)) => Err(error.into()),
    }
}

/// Releases the rate limits of a mail that was not queued, so that a retry can send it.
pub(super) async fn release_mail_limit<S: RateLimits>(stores: &S, app: &App, mailing: Option<RateLimitPermit>) {
    if let Some(taken) = mailing {
        stores.release(app.id(), taken).await;
    }
}

/// A live code of one of these purposes. `None` for a malformed, unknown or expired code.
async fn find_code<S: Codes>(
    stores: &S,
    env: &Env,
    app: &App,
    code: &str,
    purposes: &[CodePurpose],
) -> Result<Option<(CodeKey, CodeRecord)>, CommonError> {
    let Ok(code) = Code::parse(code) else { return Ok(None) };
    let found = stores.find_code(app.id(), &code.keys_to_try(app)).await?;
    let now = env.now().unix_timestamp();
    Ok(found.filter(|(_, record)| purposes.contains(&record.purpose) && now < record.expires_at))
}

/// The transaction failed, so the code was not used. If it did commit after all, the epoch has risen and the code is
/// invalid.
async fn restore_code<S: Codes>(stores: &S, app: &App, key: &CodeKey, record: &CodeRecord) {
    if let Err(error) = stores.store_code(app.id(), key, record).await {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "an unused code could not be stored again");
    }
}

/// Writes a raised epoch to Redis before the response. If that fails, the transaction's outbox row does it.
pub(super) async fn propagate_epoch<S: Sessions + Outbox>(stores: &S, app: &App, user: &User, keep: Option<SessionId>) {
    let news = EpochChange { user: user.id, epoch: user.epoch, kept_session: keep };
    propagate_epoch_change(stores, app, &news, Some(&user.profile())).await;
}

/// The same for a given epoch change. `profile` is `None` if the user was deleted.
pub(super) async fn propagate_epoch_change<S: Sessions + Outbox>(
    stores: &S,
    app: &App,
    news: &EpochChange,
    profile: Option<&Profile>,
) {
    let carried = match stores.raise_epoch(app.id(), news, profile).await {
        Ok(Replication::Complete) => stores.remove_epoch_row(app.id(), news).await,
        Ok(Replication::Unconfirmed) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = carried {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a raised epoch is left to the outbox");
    }
}

/// Opens a session at the user's epoch and records the event. `None` if the epoch has risen since the user was read.
pub(super) async fn open_session<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    amr: Amr,
) -> Result<Option<Tokens>, CommonError> {
    open_session_with_id(stores, env, app, caller, user, SessionId(env.new_uuid()), amr).await
}

/// The same with an id that was used before.
async fn open_session_with_id<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    id: SessionId,
    amr: Amr,
) -> Result<Option<Tokens>, CommonError> {
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
    open_prepared_session(stores, env, app, caller, &new).await
}

/// The same for a prepared session: its login was an earlier request.
pub(super) async fn open_prepared_session<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    new: &NewSession,
) -> Result<Option<Tokens>, CommonError> {
    // Signed first: if the tokens cannot be returned, no session is opened.
    let tokens = token::issue_tokens(app, env, &new.profile, &Session::opened(new))?;
    match stores.open_session(app.id(), new).await? {
        OpenOutcome::Opened => {}
        OpenOutcome::EpochRaised => return Ok(None),
    }
    let event = Event::new(env, caller, EventKind::LoggedIn, new.user);
    let event = event.in_session(new.id).with_detail(Detail::from_amr(new.amr));
    stores.record(app.id(), event).await;
    Ok(Some(tokens))
}

/// Makes the client address known to the account from now on.
pub(super) async fn remember_client<S: RateLimits>(stores: &S, app: &App, caller: &ClientInfo, user: &User) {
    let account: Option<AccountKey> = user.email.as_ref().map(|email| email.account_key(app.id()));
    if let Some(account) = account {
        stores.remember_client(app.id(), &account, caller.client_address()).await;
    }
}
