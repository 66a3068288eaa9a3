//! The rate limits of calls that check a password.

use super::{
    app::App,
    audit::{Refusal, RefusalKind},
    client::ClientInfo,
    email::AccountKey,
    error::CommonError,
    ports::{AcquireError, AuditLog, PasswordHasher, RateLimitPermit, RateLimits},
    rate_limits,
    user::{User, UserId},
};

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

/// Makes the client address known to the account from now on.
pub(super) async fn remember_client<S: RateLimits>(stores: &S, app: &App, caller: &ClientInfo, user: &User) {
    let account: Option<AccountKey> = user.email.as_ref().map(|email| email.account_key(app.id()));
    if let Some(account) = account {
        stores.remember_client(app.id(), &account, caller.client_address()).await;
    }
}
