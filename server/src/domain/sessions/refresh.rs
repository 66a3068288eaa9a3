//! Refresh: honest clients stay logged in, and the use of a stolen token is detected (specification: Sessions and
//! tokens, Refresh).

use std::time::Duration;

use latchkey_crds::rendered::LimitName;
use tracing::warn;

use crate::domain::{
    audit::EventKind,
    call::Call,
    error::CommonError,
    ports::{AuditLog, Sessions},
    rate_limits::RateLimited,
    session::{LiveSession, RefreshKind, RefreshOutcome, RefreshRules},
    token::{self, RefreshToken, RefreshTokenError, Tokens},
    user::UserId,
};

/// The time until a retry if another server has a newer key than this server. The rendered document with the newer key
/// arrives within two seconds.
pub const UNKNOWN_KEY_RETRY: Duration = Duration::from_secs(2);

/// The result of a refresh.
pub struct RefreshedSession {
    pub user: UserId,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum RefreshError {
    /// The token is unknown, expired, revoked or was reused. The error does not say which.
    #[error("the refresh token is not valid")]
    InvalidGrant,
    /// A server with a newer key made the token. The token may be valid, so the client must try again.
    #[error("the refresh token was made with a newer key than this server has")]
    UnknownKey,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for RefreshError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

impl From<RefreshTokenError> for RefreshError {
    fn from(error: RefreshTokenError) -> Self {
        match error {
            RefreshTokenError::Invalid => Self::InvalidGrant,
            RefreshTokenError::UnknownKey => Self::UnknownKey,
        }
    }
}

/// Exchanges a refresh token, with one call to Redis (two if reuse is detected) and no call to Postgres. Events are
/// written after the response.
pub async fn refresh<S: Sessions + AuditLog>(call: Call<'_, S>, token: &str) -> Result<RefreshedSession, RefreshError> {
    let token = RefreshToken::decode(call.app, token)?;
    let rules = RefreshRules {
        grace_seconds: call.app.doc.tokens.refresh_grace_seconds,
        windows: call.app.windows(LimitName::RefreshesPerSession),
    };
    let live = match call.stores.refresh(call.app_id(), &token, &rules).await? {
        RefreshOutcome::Renewed(renewal, live) => {
            report_renewal(call, &token, renewal);
            live
        }
        RefreshOutcome::Limited { window, retry_after } => {
            let limited = RateLimited { limit: LimitName::RefreshesPerSession.into(), window, retry_after };
            return Err(limited.into());
        }
        RefreshOutcome::ReuseDetected => {
            warn!(
                app = %call.app_id(),
                session = %token.session,
                "a replaced refresh token was used; the session was ended"
            );
            let event = call.event(EventKind::RefreshStolen, token.user).in_session(token.session);
            call.stores.record_later(call.app_id(), event);
            // The session has already ended. This call waits for a replica to acknowledge the end, so that a failover
            // does not restore the session. The future is boxed because it is large and rarely needed.
            if let Err(error) = Box::pin(call.stores.end_session(call.app_id(), token.user, token.session)).await {
                warn!(
                    app = %call.app_id(),
                    error = &error as &dyn std::error::Error,
                    "the end of a session was not replicated; a failover can restore it"
                );
            }
            return Err(RefreshError::InvalidGrant);
        }
        RefreshOutcome::NotFound => return Err(RefreshError::InvalidGrant),
    };
    let LiveSession { session, profile } = live;
    let tokens = token::issue_tokens(call.app, call.env, &profile, &session)?;
    Ok(RefreshedSession { user: session.user, tokens })
}

fn report_renewal<S: AuditLog>(call: Call<'_, S>, token: &RefreshToken, renewal: RefreshKind) {
    match renewal {
        RefreshKind::Rotated | RefreshKind::Repeated => {}
        RefreshKind::Late => {
            warn!(
                app = %call.app_id(),
                session = %token.session,
                "a refresh token was used after its grace period; the response with the next token was lost, or two \
                 clients use the token"
            );
            let event = call.event(EventKind::RefreshLate, token.user).in_session(token.session);
            call.stores.record_later(call.app_id(), event);
        }
        RefreshKind::Adopted => {
            warn!(app = %call.app_id(), session = %token.session, "Redis lost data: a newer refresh token was adopted");
        }
    }
}
