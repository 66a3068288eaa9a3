//! Refresh: honest clients stay logged in, and the use of a stolen token is detected (specification: Sessions and
//! tokens, Refresh).

use std::time::Duration;

use latchkey_crds::rendered::LimitName;
use tracing::warn;

use crate::domain::{
    app::App,
    audit::{Event, EventKind},
    client::ClientInfo,
    clock::Env,
    error::CommonError,
    ports::{AuditLog, Sessions},
    rate_limits::RateLimited,
    session::{LiveSession, RefreshKind, RefreshOutcome, RefreshRules},
    token::{self, RefreshToken, RefreshTokenError, Tokens},
    user::UserId,
};

/// How long to wait for a key that other servers already have: configuration arrives within one or two seconds.
pub const UNKNOWN_KEY_RETRY: Duration = Duration::from_secs(2);

/// The result of a refresh.
pub struct RefreshedSession {
    pub user: UserId,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// Unknown, expired, revoked and reused tokens give the same error.
    #[error("the refresh token is not valid")]
    InvalidGrant,
    /// A server that has a newer key made it. It may be valid, so it is not rejected.
    #[error("the refresh token was made with a newer key than this server has")]
    UnknownKey,
    #[error(transparent)]
    Common(#[from] CommonError),
}

impl From<RefreshTokenError> for RefreshError {
    fn from(error: RefreshTokenError) -> Self {
        match error {
            RefreshTokenError::Invalid => Self::InvalidGrant,
            RefreshTokenError::UnknownKey => Self::UnknownKey,
        }
    }
}

/// Exchanges a refresh token with one call to Redis and none to another store. Events are written after the response.
pub async fn refresh<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    token: &str,
) -> Result<RefreshedSession, RefreshError> {
    let token = RefreshToken::decode(app, token)?;
    let rules = RefreshRules {
        grace_seconds: app.doc.tokens.refresh_grace_seconds,
        windows: app.windows(LimitName::RefreshesPerSession),
    };
    let live = match stores.refresh(app.id(), &token, &rules).await.map_err(CommonError::from)? {
        RefreshOutcome::Renewed(renewal, live) => {
            log_renewal(stores, env, app, caller, &token, renewal);
            live
        }
        RefreshOutcome::Limited { window, retry_after } => {
            let limited = RateLimited { limit: LimitName::RefreshesPerSession, window, retry_after };
            return Err(CommonError::from(limited).into());
        }
        RefreshOutcome::ReuseDetected => {
            warn!(app = %app.id(), session = %token.session, "a replaced refresh token was used: its session ended");
            let event = Event::new(env, caller, EventKind::RefreshStolen, token.user).in_session(token.session);
            stores.record_later(app.id(), event);
            // The session has already ended. This call waits for a replica to acknowledge it, so that a fail-over does
            // not restore the session. Boxed because this future is rarer and larger than that of a refresh.
            if let Err(error) = Box::pin(stores.end_session(app.id(), token.user, token.session)).await {
                warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a session's end was not replicated");
            }
            return Err(RefreshError::InvalidGrant);
        }
        RefreshOutcome::NotFound => return Err(RefreshError::InvalidGrant),
    };
    let LiveSession { session, profile } = live;
    let tokens = token::issue_tokens(app, env, &profile, &session).map_err(CommonError::from)?;
    Ok(RefreshedSession { user: session.user, tokens })
}

fn log_renewal<S: AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    token: &RefreshToken,
    renewal: RefreshKind,
) {
    match renewal {
        RefreshKind::Rotated | RefreshKind::Repeated => {}
        RefreshKind::Late => {
            warn!(app = %app.id(), session = %token.session, "a refresh token was used after its grace period: its response was lost, or two clients hold it");
            let event = Event::new(env, caller, EventKind::RefreshLate, token.user).in_session(token.session);
            stores.record_later(app.id(), event);
        }
        RefreshKind::Adopted => {
            warn!(app = %app.id(), session = %token.session, "Redis lost data: a newer refresh token was adopted");
        }
    }
}
