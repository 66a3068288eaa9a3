//! The user's own account: read, rename, delete, change of password and of address (specification: Accounts).

use latchkey_crds::rendered::EnumerationProtection;
use time::Duration;
use tracing::warn;
use uuid::Uuid;

use super::{
    app::App,
    audit::{Event, EventKind, Refusal, RefusalKind},
    authentication::AuthenticatedSession,
    client::ClientInfo,
    clock::Env,
    email::{AccountKey, Email},
    email_account::{
        CommonError, PasswordPolicyError, acquire_login_attempt, acquire_login_failure, acquire_login_limits,
        acquire_mail_limit, check_password_policy, propagate_epoch, propagate_epoch_change, release_mail_limit,
    },
    mail::EpochChange,
    password::{self, Password, WeakPassword},
    ports::{
        AddressChangeRequest, AuditLog, Outbox, OwnAccounts, PasswordChange, PasswordHasher, RateLimitPermit,
        RateLimits, Rename, Renamed, Sessions, UserDeletion, Users,
    },
    rate_limits::MailPurpose,
    session::{Session, SessionId},
    user::{Name, User},
};

/// For how long a login counts in place of the password.
const RECENT_LOGIN: Duration = Duration::minutes(5);

/// Why a request about the user's own account failed.
#[derive(Debug, thiserror::Error)]
pub enum OwnAccountError {
    /// The user is deleted or disabled, or the session has ended.
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error("the address is not verified")]
    EmailNotVerified,
    /// The request has no password, and the login is too old.
    #[error("the password or a recent login is required")]
    ReauthenticationRequired,
    #[error("the password is wrong")]
    InvalidCredentials,
    #[error(transparent)]
    Common(#[from] CommonError),
}

// === read ===

/// The user of the session, as Postgres has it now.
pub async fn load_user<S: OwnAccounts + Sessions>(
    stores: &S,
    app: &App,
    signed_in: &AuthenticatedSession,
) -> Result<User, OwnAccountError> {
    signed_in.load_user(stores, app).await.map_err(CommonError::from)?.ok_or(OwnAccountError::InvalidToken)
}

// === rename ===

pub async fn rename_user<S: OwnAccounts + Sessions>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    name: &Name,
) -> Result<User, OwnAccountError> {
    loop {
        let user = load_user(stores, app, signed_in).await?;
        let event = event(env, caller, EventKind::Renamed, signed_in);
        let change = Rename { user: user.id, epoch: user.epoch, name: name.clone(), at: event.at, event };
        if let Some(Renamed { user, outbox_row: row }) =
            stores.rename(app.id(), change).await.map_err(CommonError::from)?
        {
            propagate_profile(stores, app, &user, row).await;
            return Ok(user);
        }
        // The epoch has risen since the user was read: start again with the new state. The same applies below.
    }
}

/// Writes a new name to Redis before the response. If that fails, the transaction's outbox row does it.
async fn propagate_profile<S: OwnAccounts + Sessions>(stores: &S, app: &App, user: &User, row: Uuid) {
    let carried = async {
        stores.store_profile(app.id(), user.id, &user.profile()).await?;
        stores.remove_profile_row(app.id(), row).await
    };
    if let Err(error) = carried.await {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a new name is left to the outbox");
    }
}

// === delete ===

/// Deletes the account with all its data.
pub async fn delete_account<S: OwnAccounts + RateLimits + PasswordHasher + Sessions + Outbox + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    password: Option<&Password>,
) -> Result<(), OwnAccountError> {
    loop {
        let user = load_user(stores, app, signed_in).await?;
        require_verified_address(&user)?;
        match password {
            Some(password) => check_password(stores, app, caller, &user, password).await?,
            None if is_recent_login(env, &signed_in.session) => {}
            None => return Err(OwnAccountError::ReauthenticationRequired),
        }
        let event = event(env, caller, EventKind::UserDeleted, signed_in);
        let removal = UserDeletion { user: user.id, epoch: user.epoch, event };
        let deleted = stores.delete_user(app.id(), removal).await.map_err(CommonError::from)?;
        if let Some(epoch) = deleted {
            propagate_epoch_change(stores, app, &EpochChange { user: user.id, epoch, kept_session: None }, None).await;
            return Ok(());
        }
    }
}

// === change of the password ===

pub struct ChangePasswordInput {
    pub password: Password,
    pub current: Option<Password>,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangePasswordError {
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    #[error(transparent)]
    Refused(#[from] OwnAccountError),
}

impl From<PasswordPolicyError> for ChangePasswordError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(trouble) => Self::Refused(trouble.into()),
        }
    }
}

/// Ends all other sessions and all codes. The caller's session continues.
pub async fn change_password<S: OwnAccounts + RateLimits + PasswordHasher + Sessions + Outbox + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    request: &ChangePasswordInput,
) -> Result<(), ChangePasswordError> {
    let session = signed_in.session.id;
    let mut is_counted = false;
    loop {
        let user = load_user(stores, app, signed_in).await?;
        require_verified_address(&user)?;
        let proven = request.current.is_some()
            || is_recent_login(env, &signed_in.session)
            || can_set_first_password(&user, session);
        if !proven {
            return Err(OwnAccountError::ReauthenticationRequired.into());
        }
        if !is_counted {
            // Scoring and hashing are work even if no old password was sent.
            let attempt = acquire_login_attempt(stores, app, caller, &account_key(app, &user), Some(user.id)).await;
            attempt.map_err(OwnAccountError::Common)?;
            is_counted = true;
        }
        check_password_policy(stores, app, caller, &request.password, guess_words(&user)).await?;
        if let Some(current) = &request.current {
            let failure = acquire_login_failure(stores, app, caller, &account_key(app, &user), Some(user.id)).await;
            verify_password(stores, app, caller, &user, current, failure.map_err(OwnAccountError::Common)?).await?;
        }
        let hashed = stores.hash(app, caller.client_address(), &request.password).await;
        let password_hash = hashed.map_err(|busy| OwnAccountError::Common(busy.into()))?;
        let event = event(env, caller, EventKind::PasswordChanged, signed_in);
        let change = PasswordChange {
            user: user.id,
            epoch: user.epoch,
            password_hash,
            kept_session: session,
            at: event.at,
            event,
        };
        let changed = stores.set_password(app.id(), change).await;
        if let Some(user) = changed.map_err(|error| OwnAccountError::Common(error.into()))? {
            propagate_epoch(stores, app, &user, Some(session)).await;
            return Ok(());
        }
    }
}

/// *Confirm* removed the password of a contested account and allowed this session to set one.
fn can_set_first_password(user: &User, session: SessionId) -> bool {
    user.password_hash.is_none() && user.password_session == Some(session)
}

/// The words that an attacker would try first.
fn guess_words(user: &User) -> Vec<String> {
    let name = Name::parse(&user.name).ok();
    password::guess_words(user.email.as_ref().or(user.pending_email.as_ref()), name.as_ref())
}

// === change of the address ===

pub struct ChangeAddressInput {
    pub email: Email,
    pub password: Option<Password>,
}

pub struct PendingAddressChange {
    pub user: User,
    /// Lifetime of the confirmation code, as in the response of *register*.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangeAddressError {
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    /// Only without enumeration protection.
    #[error("the address belongs to another account")]
    EmailTaken,
    #[error(transparent)]
    Refused(#[from] OwnAccountError),
}

/// Makes an address pending until its code is confirmed. Whether the address has an account is not checked here, unless
/// enumeration protection is off: the content of the mail is decided when it is sent. So known and unknown addresses
/// cost the same.
pub async fn request_address_change<S: Users + OwnAccounts + RateLimits + PasswordHasher + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    request: &ChangeAddressInput,
) -> Result<PendingAddressChange, ChangeAddressError> {
    loop {
        let user = load_user(stores, app, signed_in).await?;
        require_verified_address(&user)?;
        if !app.allows_email_domain(&request.email) {
            return Err(ChangeAddressError::DomainNotAllowed);
        }
        match &request.password {
            Some(password) => check_password(stores, app, caller, &user, password).await?,
            // A recent login is enough only if the account has no password.
            None if user.password_hash.is_none() && is_recent_login(env, &signed_in.session) => {}
            None => return Err(OwnAccountError::ReauthenticationRequired.into()),
        }
        if is_reported_as_taken(stores, app, &user, &request.email).await? {
            return Err(ChangeAddressError::EmailTaken);
        }
        let mailing = acquire_mail_limit(stores, app, caller, &request.email, MailPurpose::Confirm).await;
        let mailing = mailing.map_err(OwnAccountError::from)?;
        let now = env.now();
        let address = AddressChangeRequest {
            user: user.id,
            epoch: user.epoch,
            address: request.email.clone(),
            is_mailed: mailing.is_some(),
            at: now,
            event: event(env, caller, EventKind::AddressChangeRequested, signed_in),
        };
        let waiting = match stores.request_address_change(app.id(), address).await {
            Ok(Some(user)) => {
                let expires_in = i64::from(app.doc.mail.confirm_code_lifetime_seconds);
                return Ok(PendingAddressChange { user, expires_in, expires_at: now.unix_timestamp() + expires_in });
            }
            Ok(None) => Ok(()),
            Err(error) => Err(OwnAccountError::Common(error.into())),
        };
        release_mail_limit(stores, app, mailing).await;
        waiting?;
    }
}

/// Whether another account has the address verified, if the App permits that to be reported.
async fn is_reported_as_taken<S: Users>(
    stores: &S,
    app: &App,
    user: &User,
    email: &Email,
) -> Result<bool, OwnAccountError> {
    match app.doc.enumeration_protection {
        EnumerationProtection::Strict => Ok(false),
        EnumerationProtection::Disabled => {
            let known = stores.user_by_email(app.id(), email).await.map_err(CommonError::from)?;
            Ok(known.is_some_and(|known| known.id != user.id && known.email_verified))
        }
    }
}

// === shared helpers ===

fn event(env: &Env, caller: &ClientInfo, kind: EventKind, signed_in: &AuthenticatedSession) -> Event {
    Event::new(env, caller, kind, signed_in.user_id()).in_session(signed_in.session.id)
}

/// Fails while the account's address is unverified. An account without any address passes.
fn require_verified_address(user: &User) -> Result<(), OwnAccountError> {
    if user.email.is_some() && !user.email_verified { Err(OwnAccountError::EmailNotVerified) } else { Ok(()) }
}

/// Whether the login is recent. The absolute difference is compared because the clocks of two servers differ.
fn is_recent_login(env: &Env, session: &Session) -> bool {
    (env.now() - session.auth_time).abs() < RECENT_LOGIN
}

/// Checks the account's password like a login: it counts as one, and rate limits apply before hashing.
async fn check_password<S: RateLimits + PasswordHasher + AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    password: &Password,
) -> Result<(), OwnAccountError> {
    let failure = acquire_login_limits(stores, app, caller, &account_key(app, user), Some(user.id)).await?;
    verify_password(stores, app, caller, user, password, failure).await
}

/// The account as rate limits count it.
fn account_key(app: &App, user: &User) -> AccountKey {
    match &user.email {
        Some(email) => email.account_key(app.id()),
        None => AccountKey::for_user(app.id(), user.id),
    }
}

/// Checks the account's password. `failure` was acquired from the rate limits before.
async fn verify_password<S: RateLimits + PasswordHasher + AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    password: &Password,
    failure: RateLimitPermit,
) -> Result<(), OwnAccountError> {
    let right = stores.verify(app, caller.client_address(), password, user.password_hash.as_ref()).await;
    if matches!(right, Ok(false)) {
        let refusal = Refusal::new(RefusalKind::PasswordCheck, caller, Some(account_key(app, user)), Some(user.id));
        stores.count_refusal(app.id(), refusal);
        return Err(OwnAccountError::InvalidCredentials);
    }
    // The password was right, or it was not checked at all.
    stores.release(app.id(), failure).await;
    right.map(drop).map_err(|busy| OwnAccountError::Common(busy.into()))
}
