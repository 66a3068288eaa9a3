//! The rate limits of calls that check a password.

use futures::join;

use super::{
    audit::RefusalKind,
    call::Call,
    email::AccountKey,
    error::CommonError,
    ports::{AcquireError, AuditLog, PasswordHasher, RateLimitPermit, RateLimits},
    rate_limits,
    user::{User, UserId},
};

/// Acquires the rate limits of a login. Must be called before hashing. Returns the permit of the limits on wrong
/// passwords. The use case releases this permit if the password was right or was not checked.
pub(super) async fn acquire_login_limits<S: RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    call.stores.check_capacity(call.app, call.client_address())?;
    // These calls do not depend on each other. If they run concurrently, they take the time of one round trip to Redis.
    let is_known = call.stores.is_known_client(call.app_id(), account, call.client_address());
    let (attempt, is_known) = join!(acquire_attempt_limit(call, account, user), is_known);
    let attempt = attempt?;
    let failures = match is_known {
        Ok(is_known) => acquire_failure_limits(call, account, user, is_known).await,
        Err(error) => Err(error.into()),
    };
    match failures {
        Ok(permit) => Ok(permit),
        Err(error) => {
            // The request is rejected, so it must not count towards the limit on attempts.
            call.stores.release(call.app_id(), attempt).await;
            Err(error)
        }
    }
}

/// Acquires the rate limit of calls that hash a password. Its permit is not released after the hashing has started.
pub(super) async fn acquire_login_attempt_limit<S: RateLimits + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    call.stores.check_capacity(call.app, call.client_address())?;
    acquire_attempt_limit(call, account, user).await
}

/// Acquires the rate limits on wrong passwords. The use case releases the permit if the password was right or was not
/// checked.
pub(super) async fn acquire_login_failure_limits<S: RateLimits + AuditLog>(
    call: Call<'_, S>,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    let is_known = call.stores.is_known_client(call.app_id(), account, call.client_address()).await?;
    acquire_failure_limits(call, account, user, is_known).await
}

async fn acquire_attempt_limit<S: RateLimits + AuditLog>(
    call: Call<'_, S>,
    account: &AccountKey,
    user: Option<UserId>,
) -> Result<RateLimitPermit, CommonError> {
    let checks = rate_limits::logins(call.app, call.client_address());
    call.stores.acquire(call.app_id(), checks).await.map_err(|error| count_limited_login(call, account, user, error))
}

/// `is_known`: whether the client address is known to the account.
async fn acquire_failure_limits<S: RateLimits + AuditLog>(
    call: Call<'_, S>,
    account: &AccountKey,
    user: Option<UserId>,
    is_known: bool,
) -> Result<RateLimitPermit, CommonError> {
    let checks = rate_limits::login_failures(call.app, call.client_address(), account, is_known);
    call.stores.acquire(call.app_id(), checks).await.map_err(|error| count_limited_login(call, account, user, error))
}

/// Converts the error. If a rate limit is reached, also counts a refusal.
fn count_limited_login<S: AuditLog>(
    call: Call<'_, S>,
    account: &AccountKey,
    user: Option<UserId>,
    error: AcquireError,
) -> CommonError {
    if matches!(error, AcquireError::RateLimited(_)) {
        let account = Some(account.clone());
        call.stores.count_refusal(call.app_id(), call.refusal(RefusalKind::LoginLimit, account, user));
    }
    CommonError::from(error)
}

/// Makes the client address known to the account (specification: Limits, Rate limits).
pub(super) async fn remember_client<S: RateLimits>(call: Call<'_, S>, user: &User) {
    if let Some(email) = &user.email {
        call.stores.remember_client(call.app_id(), &call.account_key(email), call.client_address()).await;
    }
}
