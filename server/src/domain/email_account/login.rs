//! *login* with a password.

use latchkey_crds::rendered::EnumerationProtection;
use tracing::warn;

use crate::domain::{
    app::App,
    audit::{Refusal, RefusalKind},
    client::ClientInfo,
    clock::Env,
    email::Email,
    error::CommonError,
    login_limits::acquire_login_limits,
    password::Password,
    ports::{AuditLog, PasswordHasher, RateLimits, Sessions, Users},
    session::Amr,
    sessions::open::open_session,
    token::Tokens,
    user::User,
};

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
