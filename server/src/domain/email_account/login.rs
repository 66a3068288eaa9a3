//! The use case of *login* (specification: Accounts, Login).

use futures::join;
use latchkey_crds::rendered::EnumerationProtection;
use tracing::warn;

use crate::domain::{
    audit::RefusalKind,
    call::Call,
    email::Email,
    error::CommonError,
    login_limits::acquire_login_limits,
    password::Password,
    ports::{AuditLog, LoginCandidate, PasswordHasher, RateLimits, Sessions, Users},
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
    /// The email address is unknown, the password is wrong, or the account has no password. The error does not say
    /// which.
    #[error("the email address or the password is wrong")]
    InvalidCredentials,
    /// Returned only after the right password.
    #[error("the user is disabled")]
    Disabled,
    /// Returned only with enumeration protection `Disabled`, after the right password. With `Strict`, the error is
    /// `InvalidCredentials`.
    #[error("the email address is not verified")]
    EmailNotVerified,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for LoginError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Checks the password and opens a session.
pub async fn log_in<S: Users + RateLimits + PasswordHasher + Sessions + AuditLog>(
    call: Call<'_, S>,
    request: LoginInput,
) -> Result<LoggedIn, LoginError> {
    let account = call.account_key(&request.email);
    let count_refusal = |kind, user: Option<&User>| {
        let account = Some(account.clone());
        call.stores.count_refusal(call.app_id(), call.refusal(kind, account, user.map(|user| user.id)));
    };
    let failure_permit = acquire_login_limits(call, &account, None).await?;
    let user = match check_password(call, &request).await {
        Ok(user) => user,
        Err(error) => {
            // The password was not checked.
            call.stores.release(call.app_id(), failure_permit).await;
            return Err(error.into());
        }
    };
    let user = match user {
        Ok(user) => user,
        Err(known_user) => {
            count_refusal(RefusalKind::Login, known_user.as_ref());
            return Err(LoginError::InvalidCredentials);
        }
    };
    let unverified = call.app.doc.require_verified_email && !user.email_verified;
    if unverified && !user.disabled && call.app.doc.enumeration_protection == EnumerationProtection::Strict {
        // An attacker can call *register* and then *login* with the same password. A response other than the one for a
        // wrong password would then reveal that the email address was unknown before. For the same reason the permit of
        // the limits on wrong passwords is not released.
        count_refusal(RefusalKind::Login, Some(&user));
        return Err(LoginError::InvalidCredentials);
    }
    let release = call.stores.release(call.app_id(), failure_permit);
    if user.disabled || unverified {
        release.await;
        count_refusal(RefusalKind::Login, Some(&user));
        return Err(if user.disabled { LoginError::Disabled } else { LoginError::EmailNotVerified });
    }
    renew_hash(call, &user, &request.password).await;
    // The two calls are independent. Sent together, they take one round trip to Redis.
    let ((), tokens) = join!(release, open_session(call, &user, Amr::Password));
    let tokens = match tokens? {
        Some(tokens) => tokens,
        // The password was right, but the epoch has risen since the user was read, for example by a reset.
        None => return Err(LoginError::InvalidCredentials),
    };
    call.stores.remember_client(call.app_id(), &account, call.client_address()).await;
    Ok(LoggedIn { user, tokens })
}

/// Checks the password. If it is right, the inner `Ok` contains the user. Otherwise the inner `Err` contains the user
/// of the email address, if there is one. A check costs the same for known and unknown email addresses, and for users
/// with native and with foreign hashes.
async fn check_password<S: Users + PasswordHasher>(
    call: Call<'_, S>,
    request: &LoginInput,
) -> Result<Result<User, Option<User>>, CommonError> {
    let LoginCandidate { user, hash_classes } = call.stores.login_candidate(call.app_id(), &request.email).await?;
    let hash = user.as_ref().and_then(|user| user.password_hash.as_ref());
    let is_right =
        call.stores.verify_login(call.app, call.client_address(), &request.password, hash, &hash_classes).await?;
    Ok(match user {
        Some(user) if is_right => Ok(user),
        known_user => Err(known_user),
    })
}

/// Hashes the password again if its stored hash is not native: the hash is foreign, or was made with old parameters. If
/// this fails, the next login tries again.
async fn renew_hash<S: Users + PasswordHasher>(call: Call<'_, S>, user: &User, password: &Password) {
    let Some(old) = user.password_hash.as_ref().filter(|hash| !hash.is_native()) else { return };
    let renewed = match call.stores.hash(call.app, call.client_address(), password).await {
        Ok(new) => call.stores.replace_hash(call.app_id(), user.id, old, new).await.map_err(CommonError::from),
        Err(overloaded) => Err(overloaded.into()),
    };
    if let Err(error) = renewed {
        warn!(app = %call.app_id(), error = &error as &dyn std::error::Error, "a password hash could not be replaced; the next login tries again");
    }
}
