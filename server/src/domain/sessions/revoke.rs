//! Revokes a token (RFC 7009).

use super::refresh::RefreshError;
use crate::domain::{
    app::App,
    audit::{Detail, EventKind},
    call::Call,
    clock::Env,
    ports::{AuditLog, Sessions},
    session::SessionId,
    token::{self, RefreshToken, RefreshTokenError},
    user::UserId,
};

/// Ends the session of a refresh token or an access token (RFC 7009). An invalid token changes nothing.
pub async fn revoke<S: Sessions + AuditLog>(call: Call<'_, S>, token: &str) -> Result<(), RefreshError> {
    let (user, session) = match session_of_token(call.env, call.app, token) {
        Ok(ids) => ids,
        Err(RefreshTokenError::Invalid) => return Ok(()),
        Err(RefreshTokenError::UnknownKey) => return Err(RefreshError::UnknownKey),
    };
    if call.stores.end_session(call.app_id(), user, session).await? {
        let event = call.event(EventKind::SessionEnded, user).in_session(session);
        call.stores.record_later(call.app_id(), event.with_detail(Detail::from_ended_session(session)));
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
