//! The account of the session, and what every change of it requires.

use crate::domain::{
    app::App,
    audit::{Event, EventKind},
    authentication::AuthenticatedSession,
    client::ClientInfo,
    clock::Env,
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
    #[error("the address is not verified")]
    EmailNotVerified,
    /// The request has no password, and the login is too old.
    #[error("the password or a recent login is required")]
    ReauthenticationRequired,
    #[error("the password is wrong")]
    InvalidCredentials,
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// The user of the session, as Postgres has it now.
pub async fn load_user<S: OwnAccounts + Sessions>(
    stores: &S,
    app: &App,
    signed_in: &AuthenticatedSession,
) -> Result<User, OwnAccountError> {
    signed_in.load_user(stores, app).await.map_err(CommonError::from)?.ok_or(OwnAccountError::InvalidToken)
}

/// Fails while the account's address is unverified. An account without any address passes.
pub(super) fn require_verified_address(user: &User) -> Result<(), OwnAccountError> {
    if user.email.is_some() && !user.email_verified { Err(OwnAccountError::EmailNotVerified) } else { Ok(()) }
}

pub(super) fn event(env: &Env, caller: &ClientInfo, kind: EventKind, signed_in: &AuthenticatedSession) -> Event {
    Event::new(env, caller, kind, signed_in.user_id()).in_session(signed_in.session.id)
}
