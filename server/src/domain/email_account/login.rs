//! The use case of *login* (specification: Accounts, Login).

use super::check_login::{LoginError, LoginInput, check_login};
use crate::domain::{
    call::Call,
    ports::{AuditLog, PasswordHasher, RateLimits, Sessions, Users},
    session::Amr,
    sessions::open::open_session,
    token::Tokens,
    user::User,
};

pub struct LoggedIn {
    pub user: User,
    pub tokens: Tokens,
}

/// Checks the password and opens a session.
pub async fn log_in<S: Users + RateLimits + PasswordHasher + Sessions + AuditLog>(
    call: Call<'_, S>,
    request: LoginInput,
) -> Result<LoggedIn, LoginError> {
    let (user, checked) = check_login(call, &request).await?;
    // Boxed, because many logins wait for their hash at the same time. Until this step, they need no memory for it.
    let tokens = Box::pin(checked.open_session(call, open_session(call, &user, Amr::Password))).await?;
    Ok(LoggedIn { user, tokens })
}
