//! Introspection (RFC 7662): what a token is worth now.

use super::{
    app::App,
    clock::Env,
    ports::{Sessions, StoreError},
    session::LiveSession,
    token::{self, AccessClaims, BadRefreshToken, REFRESH_PREFIX, RefreshToken},
};

/// A token that would be taken now, and the session that it is of.
#[derive(Clone, Debug)]
pub struct Active {
    pub kind: Kind,
    pub live: LiveSession,
}

/// Which sort of token it is.
#[derive(Clone, Debug)]
pub enum Kind {
    Access(AccessClaims),
    Refresh,
}

#[derive(Debug, thiserror::Error)]
pub enum IntrospectError {
    /// Made by a server that knows a newer key: it may be good, so it is not called inactive.
    #[error("the refresh token is under a key newer than any known here")]
    UnknownKey,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// None for whatever is not a token of this App that would be taken now. Nothing is used up by asking.
pub async fn introspect<S: Sessions>(
    stores: &S,
    env: &Env,
    app: &App,
    token: &str,
) -> Result<Option<Active>, IntrospectError> {
    if token.starts_with(REFRESH_PREFIX) {
        let token = match RefreshToken::open(app, token) {
            Ok(token) => token,
            Err(BadRefreshToken::Invalid) => return Ok(None),
            Err(BadRefreshToken::UnknownKey) => return Err(IntrospectError::UnknownKey),
        };
        let live = stores.session(app.id(), token.user, token.session).await?;
        // One before the current generation may still be answered, for those who lost the answer; it has been replaced
        // all the same. A later one than the store knows would be adopted (contract, 4).
        let live = live.filter(|live| token.generation >= live.session.generation);
        return Ok(live.map(|live| Active { kind: Kind::Refresh, live }));
    }
    let Some(claims) = token::verify_access(app, env.now(), token) else { return Ok(None) };
    let live = stores.session(app.id(), claims.sub, claims.sid).await?;
    Ok(live.map(|live| Active { kind: Kind::Access(claims), live }))
}
