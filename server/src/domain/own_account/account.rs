//! Reads the account of a session. Checks that the email address of the account is verified, because most changes
//! require this.

use crate::domain::{
    authentication::AuthenticatedSession,
    call::Call,
    error::CommonError,
    ports::{OwnAccounts, Sessions},
    user::User,
};

/// Why a request about the user's own account failed.
#[derive(Debug, thiserror::Error)]
pub enum OwnAccountError {
    /// The user is deleted or disabled, or the session has ended.
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error("the email address is not verified")]
    EmailNotVerified,
    /// The request has no password. Either the login is not recent, or the call requires the password even after a
    /// recent login.
    #[error("the password or a recent login is required")]
    ReauthenticationRequired,
    #[error("the password is wrong")]
    InvalidCredentials,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for OwnAccountError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Reads the user of the session from Postgres.
pub async fn load_user<S: OwnAccounts + Sessions>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<User, OwnAccountError> {
    signed_in.load_user(call).await?.ok_or(OwnAccountError::InvalidToken)
}

/// Fails if the email address of the account is unverified. An account without an email address passes.
pub(super) fn require_verified_address(user: &User) -> Result<(), OwnAccountError> {
    if user.email.is_some() && !user.email_verified { Err(OwnAccountError::EmailNotVerified) } else { Ok(()) }
}
