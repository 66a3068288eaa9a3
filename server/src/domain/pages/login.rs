//! The login page with an email address and a password.

use super::{
    session::{BrowserLogin, BrowserSessionTimes, open_browser_session},
    session_cookie::SessionCookie,
};
use crate::domain::{
    call::Call,
    email_account::{LoginError, LoginInput, check_login},
    ports::{AuditLog, Groups, PasswordHasher, RateLimits, Sessions, Users},
    session::Amr,
};

/// Checks the password with the same limits as *login*, and opens a browser session. Returns the cookie to set.
/// `previous`: the valid session cookie of the request, as in [`open_browser_session`].
pub async fn log_in<S: Users + RateLimits + PasswordHasher + Sessions + Groups + AuditLog>(
    call: Call<'_, S>,
    request: LoginInput,
    previous: Option<SessionCookie>,
    times: BrowserSessionTimes,
) -> Result<SessionCookie, LoginError> {
    let (user, checked) = check_login(call, &request).await?;
    let login = BrowserLogin::new(&user, Amr::Password, call.env.now());
    // Boxed for the same reason as in `email_account::log_in`.
    Box::pin(checked.open_session(call, open_browser_session(call, login, previous, times))).await
}
