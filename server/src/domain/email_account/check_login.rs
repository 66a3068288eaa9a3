//! Checks an email address and a password, with the limits of a login. *login* and the login page share this check.

use std::future::Future;

use futures::join;
use latchkey_crds::rendered::EnumerationProtection;
use tracing::warn;

use crate::domain::{
    audit::RefusalKind,
    call::Call,
    email::{AccountKey, Email},
    error::CommonError,
    login_limits::acquire_login_limits,
    password::Password,
    ports::{AuditLog, LoginCandidate, PasswordHasher, RateLimitPermit, RateLimits, Users},
    user::User,
};

pub struct LoginInput {
    pub email: Email,
    pub password: Password,
}

#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// The same error for an unknown email address, a wrong password and an account without a password.
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

/// A login with the right password, of a user who can log in. Its session is not open yet.
#[must_use = "the limits on wrong passwords still count the login"]
pub(in crate::domain) struct CheckedLogin {
    account: AccountKey,
    /// The permit of the limits on wrong passwords. Until it is released, the login counts as a wrong password.
    failure_permit: RateLimitPermit,
}

/// Checks the password, and that the user can log in. The caller must then call [`CheckedLogin::open_session`].
pub(in crate::domain) async fn check_login<S: Users + RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    request: &LoginInput,
) -> Result<(User, CheckedLogin), LoginError> {
    let account = call.account_key(&request.email);
    let count_refusal = |kind, user: Option<&User>| {
        let account = Some(account.clone());
        call.stores.count_refusal(call.app_id(), call.refusal(kind, account, user.map(|user| user.id)));
    };
    // Boxed, so that a login that waits for its hash needs no memory for this step.
    let failure_permit = Box::pin(acquire_login_limits(call, &account, None)).await?;
    let user = match check_password(call, request).await {
        Ok(user) => user,
        Err(error) => {
            // The password was not checked, so this attempt must not count as a wrong password.
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
        // A client can call *register* and then *login* with the same password. If the email address was unknown
        // before, the password is right. *login* must still respond as to a wrong password: any other response would
        // reveal that the email address was unknown. For the same reason, the permit of the limits on wrong passwords
        // is not released.
        count_refusal(RefusalKind::Login, Some(&user));
        return Err(LoginError::InvalidCredentials);
    }
    if user.disabled || unverified {
        call.stores.release(call.app_id(), failure_permit).await;
        count_refusal(RefusalKind::Login, Some(&user));
        return Err(if user.disabled { LoginError::Disabled } else { LoginError::EmailNotVerified });
    }
    renew_hash(call, &user, &request.password).await;
    Ok((user, CheckedLogin { account, failure_permit }))
}

// === impl CheckedLogin ===

impl CheckedLogin {
    /// Releases the permit, makes the client address known to the account, and waits for `open`, which opens the
    /// session. `open` returns `None` if the user's epoch has risen since the user was read.
    pub(in crate::domain) async fn open_session<S: RateLimits, T>(
        self,
        call: Call<'_, S>,
        open: impl Future<Output = Result<Option<T>, CommonError>>,
    ) -> Result<T, LoginError> {
        let release = call.stores.release(call.app_id(), self.failure_permit);
        let remember = call.stores.remember_client(call.app_id(), &self.account, call.client_address());
        // These calls do not depend on each other. If they run concurrently, they take the time of one round trip to
        // Redis.
        let ((), (), opened) = join!(release, remember, open);
        // The password was right, but the epoch can have risen since the user was read, for example by a reset.
        opened?.ok_or(LoginError::InvalidCredentials)
    }
}

/// Checks the password. If it is right, the inner `Ok` has the user. Otherwise the inner `Err` has the user of the
/// email address, if there is one. The check takes the same time for known and unknown email addresses, and for foreign
/// (imported) hashes and the servers' own hashes.
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

/// Hashes the password again if its stored hash has another function or other parameters (weaker or stronger ones) than
/// new hashes. If this fails, the next login tries it again.
async fn renew_hash<S: Users + PasswordHasher>(call: Call<'_, S>, user: &User, password: &Password) {
    let native = call.stores.class_of_new_hashes();
    let Some(old) = user.password_hash.as_ref().filter(|hash| !hash.is_native(native)) else { return };
    let renewed = match call.stores.hash(call.app, call.client_address(), password).await {
        Ok(new) => call.stores.replace_hash(call.app_id(), user.id, old, new).await.map_err(CommonError::from),
        Err(overloaded) => Err(overloaded.into()),
    };
    if let Err(error) = renewed {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "a password hash was not replaced; the next login tries again"
        );
    }
}
