//! Refresh, revocation and the end of sessions (contract, 4): nobody honest is logged out, and a stolen token is found
//! out.

use std::time::Duration;

use latchkey_crds::rendered::LimitName;
use tracing::warn;

use super::{
    accounts::Trouble,
    app::App,
    audit::{Detail, Event, EventKind},
    client::Caller,
    clock::Env,
    limits::Limited,
    ports::{Audit, Sessions},
    session::{LiveSession, RefreshRules, Refreshed, Renewal, SessionId},
    token::{self, BadRefreshToken, RefreshToken, Tokens},
    user::UserId,
};

/// How long to wait for a key that other servers have already: configuration arrives within a second or two.
pub const UNKNOWN_KEY_RETRY: Duration = Duration::from_secs(2);

/// What a refresh answers.
pub struct Fresh {
    pub user: UserId,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// Unknown, expired, revoked, reused: one answer.
    #[error("the refresh token is not good any more")]
    InvalidGrant,
    /// Made by a server that knows a newer key: it may be good, so it is not refused.
    #[error("the refresh token is under a key newer than any known here")]
    UnknownKey,
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl From<BadRefreshToken> for RefreshError {
    fn from(error: BadRefreshToken) -> Self {
        match error {
            BadRefreshToken::Invalid => Self::InvalidGrant,
            BadRefreshToken::UnknownKey => Self::UnknownKey,
        }
    }
}

/// Exchanges a refresh token. Asks Redis once, and nothing else; what is to be written down of it is, after the answer.
pub async fn refresh<S: Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    token: &str,
) -> Result<Fresh, RefreshError> {
    let token = RefreshToken::open(app, token)?;
    let rules = RefreshRules {
        grace_seconds: app.doc.tokens.refresh_grace_seconds,
        windows: app.windows(LimitName::RefreshesPerSession),
    };
    let live = match stores.refresh(app.id(), &token, &rules).await.map_err(Trouble::from)? {
        Refreshed::Live(renewal, live) => {
            tell(stores, env, app, caller, &token, renewal);
            live
        }
        Refreshed::Limited { window, retry_after } => {
            let limited = Limited { limit: LimitName::RefreshesPerSession, window, retry_after };
            return Err(Trouble::from(limited).into());
        }
        Refreshed::Stolen => {
            warn!(app = %app.id(), session = %token.session, "a refresh token was used again: its session has ended");
            let event = Event::new(env, caller, EventKind::RefreshStolen, token.user).in_session(token.session);
            stores.record_later(app.id(), event);
            // It has ended already; this waits for a replica to know, so that a fail-over does not bring it back.
            // Rarer than a refresh and larger.
            if let Err(error) = Box::pin(stores.end_session(app.id(), token.user, token.session)).await {
                warn!(app = %app.id(), error = &error as &dyn std::error::Error, "no replica was asked for");
            }
            return Err(RefreshError::InvalidGrant);
        }
        Refreshed::Gone => return Err(RefreshError::InvalidGrant),
    };
    let LiveSession { session, profile } = live;
    let tokens = token::issue(app, env, &profile, &session).map_err(Trouble::from)?;
    Ok(Fresh { user: session.user, tokens })
}

fn tell<S: Audit>(stores: &S, env: &Env, app: &App, caller: &Caller, token: &RefreshToken, renewal: Renewal) {
    match renewal {
        Renewal::Next | Renewal::Again => {}
        Renewal::Late => {
            warn!(app = %app.id(), session = %token.session, "a refresh token came back late: its answer was lost, or two hold it");
            let event = Event::new(env, caller, EventKind::RefreshLate, token.user).in_session(token.session);
            stores.record_later(app.id(), event);
        }
        Renewal::Adopted => {
            warn!(app = %app.id(), session = %token.session, "Redis had gone back in time: a newer refresh token was adopted");
        }
    }
}

/// Ends the session that a refresh token or an access token belongs to (RFC 7009); a token that is none does nothing.
pub async fn revoke<S: Sessions + Audit>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &Caller,
    token: &str,
) -> Result<(), RefreshError> {
    let (user, session) = match of_token(env, app, token) {
        Ok(of) => of,
        Err(BadRefreshToken::Invalid) => return Ok(()),
        Err(BadRefreshToken::UnknownKey) => return Err(RefreshError::UnknownKey),
    };
    if stores.end_session(app.id(), user, session).await.map_err(Trouble::from)? {
        let event = Event::new(env, caller, EventKind::SessionEnded, user).in_session(session);
        stores.record_later(app.id(), event.with(Detail::ended(session)));
    }
    Ok(())
}

fn of_token(env: &Env, app: &App, token: &str) -> Result<(UserId, SessionId), BadRefreshToken> {
    if token.starts_with(token::REFRESH_PREFIX) {
        return RefreshToken::open(app, token).map(|token| (token.user, token.session));
    }
    let claims = token::verify_access(app, env.now(), token).ok_or(BadRefreshToken::Invalid)?;
    Ok((claims.sub, claims.sid))
}
