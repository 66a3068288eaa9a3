//! Revocation (RFC 7009).

use super::refresh::RefreshError;
use crate::domain::{
    app::App,
    audit::{Detail, Event, EventKind},
    client::ClientInfo,
    clock::Env,
    error::CommonError,
    ports::{AuditLog, Sessions},
    session::SessionId,
    token::{self, RefreshToken, RefreshTokenError},
    user::UserId,
};

/// Ends the session of a refresh token or an access token (RFC 7009). An invalid token changes nothing.
pub async fn revoke<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    token: &str,
) -> Result<(), RefreshError> {
    let (user, session) = match session_of_token(env, app, token) {
        Ok(of) => of,
        Err(RefreshTokenError::Invalid) => return Ok(()),
        Err(RefreshTokenError::UnknownKey) => return Err(RefreshError::UnknownKey),
    };
    if stores.end_session(app.id(), user, session).await.map_err(CommonError::from)? {
        let event = Event::new(env, caller, EventKind::SessionEnded, user).in_session(session);
        stores.record_later(app.id(), event.with_detail(Detail::from_ended_session(session)));
    }
    Ok(())
}

fn session_of_token(env: &Env, app: &App, token: &str) -> Result<(UserId, SessionId), RefreshTokenError> {
    if token.starts_with(token::REFRESH_PREFIX) {
        return RefreshToken::decode(app, token).map(|token| (token.user, token.session));
    }
    let claims = token::verify_access_token(app, env.now(), token).ok_or(RefreshTokenError::Invalid)?;
    Ok((claims.sub, claims.sid))
}
