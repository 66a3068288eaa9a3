//! Revokes a token of a client (RFC 7009).

use super::{
    client::OpenIdClient,
    client_session::{SessionUse, find_client_session},
};
use crate::domain::{
    audit::{Detail, EventKind},
    call::Call,
    error::CommonError,
    ports::{AuditLog, ClientSessions, Sessions},
    session::SessionId,
    token::{CLIENT_REFRESH_PREFIX, REFRESH_PREFIX, RefreshToken, RefreshTokenError, verify_any_access_token},
    user::UserId,
};

#[derive(Debug, thiserror::Error)]
pub enum ClientRevokeError {
    /// The token belongs to another client, or to the App itself.
    #[error("the token was issued to another client")]
    OtherClient,
    /// A server with a newer key made the token.
    #[error("the refresh token was made with a newer key than this server has")]
    UnknownKey,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ClientRevokeError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Ends the session of a refresh token or an access token of this client, which has authenticated or is public. An
/// invalid token changes nothing.
pub async fn revoke_client_token<S: ClientSessions + Sessions + AuditLog>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    token: &str,
) -> Result<(), ClientRevokeError> {
    let Some((user, session)) = session_of_token(call, client, token)? else { return Ok(()) };
    let Some((owner, _)) = find_client_session(call, user, session, SessionUse::NotCounted).await? else {
        return Ok(());
    };
    if owner.uid != client.uid {
        return Err(ClientRevokeError::OtherClient);
    }
    if call.stores.end_session(call.app_id(), user, session).await? {
        let event = call.event(EventKind::SessionEnded, user).in_session(session);
        let detail = Detail { ended: Some(session), ..Detail::from_client(&client.client_id) };
        call.stores.record_later(call.app_id(), event.with_detail(detail));
    }
    Ok(())
}

/// The session that a token names. `None` for an invalid token.
fn session_of_token<S>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    token: &str,
) -> Result<Option<(UserId, SessionId)>, ClientRevokeError> {
    if token.starts_with(CLIENT_REFRESH_PREFIX) {
        return match RefreshToken::decode_for_client(call.app, token) {
            Ok(token) => Ok(Some((token.user, token.session))),
            Err(RefreshTokenError::Invalid) => Ok(None),
            Err(RefreshTokenError::UnknownKey) => Err(ClientRevokeError::UnknownKey),
        };
    }
    if token.starts_with(REFRESH_PREFIX) {
        return match RefreshToken::decode(call.app, token) {
            Ok(_) => Err(ClientRevokeError::OtherClient),
            Err(_) => Ok(None),
        };
    }
    match verify_any_access_token(call.app, call.env.now(), token) {
        Some(claims) if claims.client_id == client.client_id.as_str() => Ok(Some((claims.sub, claims.sid))),
        Some(_) => Err(ClientRevokeError::OtherClient),
        None => Ok(None),
    }
}
