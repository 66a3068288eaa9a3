//! Checks the current password of the account, under the rate limits of a login.

use super::account::OwnAccountError;
use crate::domain::{
    audit::RefusalKind,
    call::Call,
    email::AccountKey,
    login_limits::{acquire_login_failure_limits, acquire_login_limits},
    password::Password,
    ports::{AuditLog, PasswordHasher, RateLimitPermit, RateLimits},
    user::User,
};

/// Acquires the rate limits of a login and checks the password. If `is_limit_acquired` is set, the request was already
/// counted as a login, and only the rate limits on wrong passwords are acquired.
pub(in crate::domain) async fn check_password<S: RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    user: &User,
    password: &Password,
    is_limit_acquired: bool,
) -> Result<(), OwnAccountError> {
    let account = account_key(call, user);
    let failure_permit = if is_limit_acquired {
        acquire_login_failure_limits(call, &account, Some(user.id)).await?
    } else {
        acquire_login_limits(call, &account, Some(user.id)).await?
    };
    verify_password(call, user, password, failure_permit).await
}

/// Checks the password. Releases `failure_permit`, the permit of the rate limits on wrong passwords, unless the
/// password is wrong.
pub(super) async fn verify_password<S: RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    user: &User,
    password: &Password,
    failure_permit: RateLimitPermit,
) -> Result<(), OwnAccountError> {
    let is_right = call.stores.verify(call.app, call.client_address(), password, user.password_hash.as_ref()).await;
    if matches!(is_right, Ok(false)) {
        let refusal = call.refusal(RefusalKind::PasswordCheck, Some(account_key(call, user)), Some(user.id));
        call.stores.count_refusal(call.app_id(), refusal);
        return Err(OwnAccountError::InvalidCredentials);
    }
    // The password was right, or it was not checked at all.
    call.stores.release(call.app_id(), failure_permit).await;
    is_right?;
    Ok(())
}

/// Returns the key that identifies the account in rate limits and in the counts of refusals of the audit log.
pub(super) fn account_key<S>(call: Call<'_, S>, user: &User) -> AccountKey {
    match &user.email {
        Some(email) => call.account_key(email),
        None => AccountKey::for_user(call.app_id(), user.id),
    }
}
