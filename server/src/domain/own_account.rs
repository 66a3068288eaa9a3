//! The account of who is signed in: read, rename, delete, change of password and of address, in the contract's order (4).

use latchkey_crds::rendered::EnumerationProtection;
use time::Duration;
use tracing::warn;
use uuid::Uuid;

use super::{
    accounts::{
        JudgeError, Trouble, carry, carry_epoch, judge, may_mail, not_mailed, take_attempt, take_failure, take_login,
    },
    app::App,
    audit::{Event, EventKind, Refusal, RefusalKind},
    client::Caller,
    clock::Env,
    email::{AccountKey, Email},
    limits::MailPurpose,
    mail::EpochNews,
    password::{self, Password, Weak},
    ports::{
        Accounts, AddressRequest, Audit, Hasher, Limits, NewPassword, Outbox, Removal, Rename, Renamed, Sessions,
        Taken, Users,
    },
    session::{Session, SessionId},
    signed_in::SignedIn,
    user::{Name, User},
};

/// How long a login counts in place of the password (contract, 4).
const FRESH: Duration = Duration::minutes(5);

/// Why nothing was done with the own account.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The user is gone or disabled, or the session has ended.
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error("the address is not verified")]
    EmailNotVerified,
    /// There is neither the password nor a login of late.
    #[error("the password or a fresh login is needed")]
    ReauthenticationRequired,
    #[error("the password is wrong")]
    InvalidCredentials,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

// === read ===

/// The user of the session, as Postgres has them now.
pub async fn read<S: Accounts + Sessions>(stores: &S, app: &App, signed_in: &SignedIn) -> Result<User, Refused> {
    signed_in.account(stores, app).await.map_err(Trouble::from)?.ok_or(Refused::InvalidToken)
}

// === rename ===

pub async fn rename<S: Accounts + Sessions>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
    name: &Name,
) -> Result<User, Refused> {
    loop {
        let user = read(stores, app, signed_in).await?;
        let event = event(env, caller, EventKind::Renamed, signed_in);
        let change = Rename { user: user.id, epoch: user.epoch, name: name.clone(), at: event.at, event };
        if let Some(Renamed { user, row }) = stores.rename(app.id(), change).await.map_err(Trouble::from)? {
            carry_profile(stores, app, &user, row).await;
            return Ok(user);
        }
        // The epoch has moved since the user was read: judged again by what that left. So below.
    }
}

/// Tells Redis of a new name before the answer; where that fails, the outbox row of the transaction does it.
async fn carry_profile<S: Accounts + Sessions>(stores: &S, app: &App, user: &User, row: Uuid) {
    let carried = async {
        stores.put_profile(app.id(), user.id, &user.profile()).await?;
        stores.profile_carried(app.id(), row).await
    };
    if let Err(error) = carried.await {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a new name is left to the outbox");
    }
}

// === delete ===

/// Deletes the account with all that hangs on it.
pub async fn delete<S: Accounts + Limits + Hasher + Sessions + Outbox + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
    password: Option<&Password>,
) -> Result<(), Refused> {
    loop {
        let user = read(stores, app, signed_in).await?;
        demand_settled(&user)?;
        match password {
            Some(password) => check_password(stores, app, caller, &user, password).await?,
            None if is_fresh(env, &signed_in.session) => {}
            None => return Err(Refused::ReauthenticationRequired),
        }
        let event = event(env, caller, EventKind::UserDeleted, signed_in);
        let removal = Removal { user: user.id, epoch: user.epoch, event };
        let deleted = stores.delete_user(app.id(), removal).await.map_err(Trouble::from)?;
        if let Some(epoch) = deleted {
            carry(stores, app, &EpochNews { user: user.id, epoch, keep: None }, None).await;
            return Ok(());
        }
    }
}

// === change of the password ===

pub struct ChangePassword {
    pub password: Password,
    pub current: Option<Password>,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangePasswordError {
    #[error(transparent)]
    Weak(#[from] Weak),
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl From<JudgeError> for ChangePasswordError {
    fn from(error: JudgeError) -> Self {
        match error {
            JudgeError::Weak(weak) => Self::Weak(weak),
            JudgeError::Trouble(trouble) => Self::Refused(trouble.into()),
        }
    }
}

/// Ends all other sessions and codes; the caller's session goes on.
pub async fn change_password<S: Accounts + Limits + Hasher + Sessions + Outbox + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
    request: &ChangePassword,
) -> Result<(), ChangePasswordError> {
    let session = signed_in.session.id;
    let mut is_counted = false;
    loop {
        let user = read(stores, app, signed_in).await?;
        demand_settled(&user)?;
        let proven = request.current.is_some() || is_fresh(env, &signed_in.session) || may_set_first(&user, session);
        if !proven {
            return Err(Refused::ReauthenticationRequired.into());
        }
        if !is_counted {
            // Judging and hashing are work, also without the old password.
            let attempt = take_attempt(stores, app, caller, &account(app, &user), Some(user.id)).await;
            attempt.map_err(Refused::Trouble)?;
            is_counted = true;
        }
        judge(stores, app, caller, &request.password, guesses(&user)).await?;
        if let Some(current) = &request.current {
            let failure = take_failure(stores, app, caller, &account(app, &user), Some(user.id)).await;
            verify_password(stores, app, caller, &user, current, failure.map_err(Refused::Trouble)?).await?;
        }
        let hashed = stores.hash(app, caller.address(), &request.password).await;
        let password_hash = hashed.map_err(|busy| Refused::Trouble(busy.into()))?;
        let event = event(env, caller, EventKind::PasswordChanged, signed_in);
        let change =
            NewPassword { user: user.id, epoch: user.epoch, password_hash, keep: session, at: event.at, event };
        let changed = stores.set_password(app.id(), change).await;
        if let Some(user) = changed.map_err(|error| Refused::Trouble(error.into()))? {
            carry_epoch(stores, app, &user, Some(session)).await;
            return Ok(());
        }
    }
}

/// *Confirm* took the password of a contested account and promised this session that it may set one.
fn may_set_first(user: &User, session: SessionId) -> bool {
    user.password_hash.is_none() && user.password_session == Some(session)
}

/// What a guesser would try first.
fn guesses(user: &User) -> Vec<String> {
    let name = Name::parse(&user.name).ok();
    password::guesses(user.email.as_ref().or(user.pending_email.as_ref()), name.as_ref())
}

// === change of the address ===

pub struct ChangeAddress {
    pub email: Email,
    pub password: Option<Password>,
}

pub struct AddressAsked {
    pub user: User,
    /// As *register* answers it; of the code.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangeAddressError {
    #[error("addresses of this domain are not taken")]
    DomainNotAllowed,
    /// Only without enumeration protection.
    #[error("the address has an account")]
    EmailTaken,
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// Lets an address wait for its code. Whose it is now nobody asks here (but without enumeration protection): the mail
/// goes out later, and what it says is decided then. So known and unknown addresses cost the same.
pub async fn ask_for_address<S: Users + Accounts + Limits + Hasher + Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    signed_in: &SignedIn,
    request: &ChangeAddress,
) -> Result<AddressAsked, ChangeAddressError> {
    loop {
        let user = read(stores, app, signed_in).await?;
        demand_settled(&user)?;
        if !app.allows(&request.email) {
            return Err(ChangeAddressError::DomainNotAllowed);
        }
        match &request.password {
            Some(password) => check_password(stores, app, caller, &user, password).await?,
            // A login of late is enough only where there is no password to ask for.
            None if user.password_hash.is_none() && is_fresh(env, &signed_in.session) => {}
            None => return Err(Refused::ReauthenticationRequired.into()),
        }
        if is_told_taken(stores, app, &user, &request.email).await? {
            return Err(ChangeAddressError::EmailTaken);
        }
        let mailing = may_mail(stores, app, caller, &request.email, MailPurpose::Confirm).await;
        let mailing = mailing.map_err(Refused::from)?;
        let now = env.now();
        let address = AddressRequest {
            user: user.id,
            epoch: user.epoch,
            address: request.email.clone(),
            mailed: mailing.is_some(),
            at: now,
            event: event(env, caller, EventKind::AddressChangeRequested, signed_in),
        };
        let waiting = match stores.ask_for_address(app.id(), address).await {
            Ok(Some(user)) => {
                let expires_in = i64::from(app.doc.mail.confirm_code_lifetime_seconds);
                return Ok(AddressAsked { user, expires_in, expires_at: now.unix_timestamp() + expires_in });
            }
            Ok(None) => Ok(()),
            Err(error) => Err(Refused::Trouble(error.into())),
        };
        not_mailed(stores, app, mailing).await;
        waiting?;
    }
}

/// Whether somebody else has the address, where the App has that told.
async fn is_told_taken<S: Users>(stores: &S, app: &App, user: &User, email: &Email) -> Result<bool, Refused> {
    match app.doc.enumeration_protection {
        EnumerationProtection::Strict => Ok(false),
        EnumerationProtection::Disabled => {
            let known = stores.user_by_email(app.id(), email).await.map_err(Trouble::from)?;
            Ok(known.is_some_and(|known| known.id != user.id && known.email_verified))
        }
    }
}

// === what they share ===

fn event(env: &Env, caller: &Caller, kind: EventKind, signed_in: &SignedIn) -> Event {
    Event::new(env, caller, kind, signed_in.user()).in_session(signed_in.session.id)
}

/// While its address is unverified a session may not do this; an account without any address may.
fn demand_settled(user: &User) -> Result<(), Refused> {
    if user.email.is_some() && !user.email_verified { Err(Refused::EmailNotVerified) } else { Ok(()) }
}

/// Whether the login was of late. Either way, since the clocks of two servers differ.
fn is_fresh(env: &Env, session: &Session) -> bool {
    (env.now() - session.auth_time).abs() < FRESH
}

/// Checks the account's password as a login does: it counts as one, and limits come before hashing.
async fn check_password<S: Limits + Hasher + Audit>(
    stores: &S,
    app: &App,
    caller: &Caller,
    user: &User,
    password: &Password,
) -> Result<(), Refused> {
    let failure = take_login(stores, app, caller, &account(app, user), Some(user.id)).await?;
    verify_password(stores, app, caller, user, password, failure).await
}

/// The account that the limits count.
fn account(app: &App, user: &User) -> AccountKey {
    match &user.email {
        Some(email) => email.account(app.id()),
        None => AccountKey::of_user(app.id(), user.id),
    }
}

/// Checks the account's password; `failure` is its place under the limits.
async fn verify_password<S: Limits + Hasher + Audit>(
    stores: &S,
    app: &App,
    caller: &Caller,
    user: &User,
    password: &Password,
    failure: Taken,
) -> Result<(), Refused> {
    let right = stores.verify(app, caller.address(), password, user.password_hash.as_ref()).await;
    if matches!(right, Ok(false)) {
        let refusal = Refusal::new(RefusalKind::PasswordCheck, caller, Some(account(app, user)), Some(user.id));
        stores.refuse(app.id(), refusal);
        return Err(Refused::InvalidCredentials);
    }
    // It was right, or nothing was learned about it.
    stores.give_back(app.id(), failure).await;
    right.map(drop).map_err(|busy| Refused::Trouble(busy.into()))
}
