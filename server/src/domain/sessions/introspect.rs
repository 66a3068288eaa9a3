//! Introspection (RFC 7662): whether a token is active now.

use crate::domain::{
    call::Call,
    ports::{Sessions, StoreError},
    session::LiveSession,
    token::{self, AccessClaims, REFRESH_PREFIX, RefreshToken, RefreshTokenError},
};

/// A valid token that was not replaced, and its live session.
#[derive(Clone, Debug)]
pub struct ActiveToken {
    pub kind: TokenKind,
    pub live_session: LiveSession,
}

#[derive(Clone, Debug)]
pub enum TokenKind {
    Access(AccessClaims),
    Refresh,
}

#[derive(Debug, thiserror::Error)]
pub enum IntrospectError {
    /// A server with a newer key made the token. The token may be valid, so it is not reported as inactive.
    #[error("the refresh token was made with a newer key than this server has")]
    UnknownKey,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Returns the token if it is a valid token of a live session of this App, otherwise `None`. A refresh token that was
/// replaced by a newer one counts as invalid. Changes nothing.
pub async fn introspect<S: Sessions>(call: Call<'_, S>, token: &str) -> Result<Option<ActiveToken>, IntrospectError> {
    if token.starts_with(REFRESH_PREFIX) {
        let token = match RefreshToken::decode(call.app, token) {
            Ok(token) => token,
            Err(RefreshTokenError::Invalid) => return Ok(None),
            Err(RefreshTokenError::UnknownKey) => return Err(IntrospectError::UnknownKey),
        };
        let live = call.stores.session(call.app_id(), token.user, token.session).await?;
        // A token of an earlier generation has been replaced and is not active, although the refresh endpoint may still
        // accept it from a client that did not get the response. A token of a generation newer than the stored one is
        // active, because the refresh endpoint would adopt it (specification: Sessions and tokens, Refresh).
        let live = live.filter(|live| token.generation >= live.session.generation);
        return Ok(live.map(|live| ActiveToken { kind: TokenKind::Refresh, live_session: live }));
    }
    let Some(claims) = token::verify_access_token(call.app, call.env.now(), token) else { return Ok(None) };
    let live = call.stores.session(call.app_id(), claims.sub, claims.sid).await?;
    Ok(live.map(|live| ActiveToken { kind: TokenKind::Access(claims), live_session: live }))
}
