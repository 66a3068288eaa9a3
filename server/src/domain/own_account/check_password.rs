//! The password of the account, checked like a login.

use super::account::OwnAccountError;
use crate::domain::{
    app::App,
    audit::{Refusal, RefusalKind},
    client::ClientInfo,
    email::AccountKey,
    login_limits::acquire_login_limits,
    password::Password,
    ports::{AuditLog, PasswordHasher, RateLimitPermit, RateLimits},
    user::User,
};

/// Checks the account's password like a login: it counts as one, and rate limits apply before hashing.
pub(super) async fn check_password<S: RateLimits + PasswordHasher + AuditLog>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    password: &Password,
) -> Result<(), OwnAccountError> {
    let failure = acquire_login_limits(stores, app, caller, &account_key(app, user), Some(user.id)).await?;
    verify_password(stores, app, caller, user, password, failure).await
}

/// Checks the account's password. `failure` was acquired from the rate limits before.
pub(super) async fn verify_password<S: RateLimits + PasswordHasher + AuditLog>(
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

/// The account as rate limits count it.
pub(super) fn account_key(app: &App, user: &User) -> AccountKey {
    match &user.email {
        Some(email) => email.account_key(app.id()),
        None => AccountKey::for_user(app.id(), user.id),
    }
}
