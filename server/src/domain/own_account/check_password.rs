//! Checks the current password of the account, under the rate limits of a login.

use super::account::OwnAccountError;
use crate::domain::{
    audit::RefusalKind,
    call::Call,
    email::AccountKey,
    login_limits::acquire_login_limits,
    password::Password,
    ports::{AuditLog, PasswordHasher, RateLimitPermit, RateLimits},
    user::User,
};

/// Acquires the rate limits of a login and checks the password.
pub(super) async fn check_password<S: RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    user: &User,
    password: &Password,
) -> Result<(), OwnAccountError> {
    let failure = acquire_login_limits(call, &account_key(call, user), Some(user.id)).await?;
    verify_password(call, user, password, failure).await
}

/// Checks the password. Releases `failure`, the permit of the limits on wrong passwords, unless the password is wrong.
pub(super) async fn verify_password<S: RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    user: &User,
    password: &Password,
    failure: RateLimitPermit,
) -> Result<(), OwnAccountError> {
    let is_right = call.stores.verify(call.app, call.client_address(), password, user.password_hash.as_ref()).await;
    if matches!(is_right, Ok(false)) {
        let refusal = call.refusal(RefusalKind::PasswordCheck, Some(account_key(call, user)), Some(user.id));
        call.stores.count_refusal(call.app_id(), refusal);
        return Err(OwnAccountError::InvalidCredentials);
    }
    // The password was right, or it was not checked at all.
    call.stores.release(call.app_id(), failure).await;
    is_right?;
    Ok(())
}

/// The key of the account in rate limits and refusals.
pub(super) fn account_key<S>(call: Call<'_, S>, user: &User) -> AccountKey {
    match &user.email {
        Some(email) => call.account_key(email),
        None => AccountKey::for_user(call.app_id(), user.id),
    }
}
