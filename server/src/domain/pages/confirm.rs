//! The confirmation page. A mail scanner can run scripts and press buttons, so a code alone confirms nothing. The
//! browser must also be the one that registered, be logged in to the account, or send the password of the account.

use super::{
    registration::Registration,
    session::{BrowserLogin, BrowserSessionTimes, open_browser_session},
    session_cookie::SessionCookie,
};
use crate::domain::{
    authentication::AuthenticatedSession,
    call::Call,
    code::{CodePurpose, CodeRecord},
    email_account::{AppliedConfirmation, ConfirmError, apply_confirmation, find_confirmation_code},
    error::CommonError,
    login_limits::remember_client,
    own_account::{OwnAccountError, check_password},
    password::Password,
    ports::{AuditLog, Codes, Groups, Outbox, OwnAccounts, PasswordHasher, RateLimits, Sessions, Users},
    rate_limits,
    session::{Amr, Session},
};

/// The code, and what the browser sends with it.
pub struct BrowserConfirmInput<'a> {
    pub code: &'a str,
    pub password: Option<&'a Password>,
    /// The live session of the browser.
    pub session: Option<AuthenticatedSession>,
    /// The valid registration cookies of the browser.
    pub registrations: &'a [Registration],
    /// The valid session cookie of the request, for [`open_browser_session`].
    pub previous: Option<SessionCookie>,
}

pub struct BrowserConfirmed {
    /// The cookie to set. `None` if the session of the browser continues.
    pub cookie: Option<SessionCookie>,
    /// Whether the account was contested. If so, its password was removed, and the session can set a new one.
    pub password_required: bool,
    /// The confirmed email address, in lower case.
    pub address: String,
}

#[derive(Debug, thiserror::Error)]
pub enum BrowserConfirmError {
    /// The code is wrong, used or expired. The error does not say which.
    #[error("the code is not valid")]
    InvalidCode,
    /// The code is right and still valid, but the browser must also send the password.
    #[error("the password is required")]
    PasswordRequired,
    /// The code is right and still valid, but the user must log in first.
    #[error("a login is required")]
    LoginRequired,
    /// The password is wrong. The code is still valid.
    #[error("the password is wrong")]
    InvalidCredentials,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for BrowserConfirmError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Confirms an email address, and opens a browser session unless the browser has one of this account. Wrong codes count
/// towards the same limit as at *confirm*, and wrong passwords count towards the limits of a login.
pub async fn confirm_in_browser<S>(
    call: Call<'_, S>,
    input: BrowserConfirmInput<'_>,
    times: BrowserSessionTimes,
) -> Result<BrowserConfirmed, BrowserConfirmError>
where
    S: Users + OwnAccounts + Outbox + RateLimits + PasswordHasher + Codes + Sessions + Groups + AuditLog,
{
    let permit = call.stores.acquire(call.app_id(), rate_limits::codes(call.app, call.client_address())).await?;
    let outcome = verify_and_confirm(call, input, times).await;
    if !matches!(outcome, Err(BrowserConfirmError::InvalidCode)) {
        call.stores.release(call.app_id(), permit).await;
    }
    outcome
}

async fn verify_and_confirm<S>(
    call: Call<'_, S>,
    input: BrowserConfirmInput<'_>,
    times: BrowserSessionTimes,
) -> Result<BrowserConfirmed, BrowserConfirmError>
where
    S: Users + OwnAccounts + Outbox + RateLimits + PasswordHasher + Codes + Sessions + Groups + AuditLog,
{
    let (key, record) = find_confirmation_code(call, input.code).await.map_err(confirm_error)?;
    let kept_session = verify_user_at_browser(call, &record, &input).await?;
    let applied = apply_confirmation(call, &key, &record, kept_session).await.map_err(confirm_error)?;
    let AppliedConfirmation { user, kept_session, new_session, was_contested } = applied;
    let cookie = match kept_session {
        Some(_) => None,
        None => {
            let login =
                BrowserLogin { session: Some(new_session), ..BrowserLogin::new(&user, Amr::Code, call.env.now()) };
            let opened = open_browser_session(call, login, input.previous, times).await?;
            // If another change has raised the user's epoch again, no session is opened. The code is consumed, so the
            // error is the same as for a used code.
            Some(opened.ok_or(BrowserConfirmError::InvalidCode)?)
        }
    };
    remember_client(call, &user).await;
    Ok(BrowserConfirmed { cookie, password_required: was_contested, address: record.address })
}

/// Checks that the user who got the code is at this browser. Returns the browser's session if it is a session of this
/// user. Does not consume the code.
async fn verify_user_at_browser<S>(
    call: Call<'_, S>,
    record: &CodeRecord,
    input: &BrowserConfirmInput<'_>,
) -> Result<Option<Session>, BrowserConfirmError>
where
    S: Users + RateLimits + PasswordHasher + AuditLog,
{
    if let Some(signed_in) = input.session.as_ref().filter(|signed_in| signed_in.user_id() == record.user) {
        return Ok(Some(signed_in.session.clone()));
    }
    // Only the account that requested a new email address can confirm it, so the browser must be logged in to this
    // account.
    if record.purpose == CodePurpose::Change {
        return Err(BrowserConfirmError::LoginRequired);
    }
    if input.registrations.iter().any(|registration| registration.is_for(&record.address)) {
        return Ok(None);
    }
    let user = call.stores.user(call.app_id(), record.user).await?;
    let user = user.filter(|user| !user.disabled && user.epoch == record.epoch);
    let user = user.ok_or(BrowserConfirmError::InvalidCode)?;
    match (&user.password_hash, input.password) {
        (None, _) => Err(BrowserConfirmError::LoginRequired),
        (Some(_), None) => Err(BrowserConfirmError::PasswordRequired),
        (Some(_), Some(password)) => {
            check_password(call, &user, password, false).await.map_err(password_error)?;
            Ok(None)
        }
    }
}

fn confirm_error(error: ConfirmError) -> BrowserConfirmError {
    match error {
        ConfirmError::InvalidCode => BrowserConfirmError::InvalidCode,
        ConfirmError::Common(error) => BrowserConfirmError::Common(error),
    }
}

/// Converts the error of a password check. A password check returns only `InvalidCredentials` and `Common`.
fn password_error(error: OwnAccountError) -> BrowserConfirmError {
    match error {
        OwnAccountError::InvalidToken
        | OwnAccountError::EmailNotVerified
        | OwnAccountError::ReauthenticationRequired
        | OwnAccountError::InvalidCredentials => BrowserConfirmError::InvalidCredentials,
        OwnAccountError::Common(error) => BrowserConfirmError::Common(error),
    }
}
