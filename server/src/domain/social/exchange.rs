//! Exchanges the one-time code of a social login for a session (specification: Social login, Code exchange).

use time::{Duration, OffsetDateTime};
use tracing::warn;

use crate::domain::{
    call::Call,
    client::ClientInfo,
    error::CommonError,
    flow::LoginCode,
    ports::{AuditLog, Flows, Sessions},
    session::{Amr, NewSession, SessionId},
    sessions::open::open_prepared_session,
    token::Tokens,
    user::UserId,
};

/// A one-time code with the verifier that proves who started the flow.
pub struct CodeExchangeInput<'a> {
    pub code: &'a str,
    pub code_verifier: &'a str,
    /// If it is sent, it must equal the redirect URL of the flow.
    pub redirect_url: Option<&'a str>,
}

pub struct ExchangedSession {
    pub user: UserId,
    pub tokens: Tokens,
}

#[derive(Debug, thiserror::Error)]
pub enum CodeExchangeError {
    /// The code is unknown, expired or used, or the verifier or the redirect URL does not match.
    #[error("the code is not valid")]
    InvalidGrant,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for CodeExchangeError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Exchanges a one-time code for a session. A second exchange of the code fails and ends the session of the first
/// exchange (RFC 6749, 4.1.2).
pub async fn exchange_code<S: Flows + Sessions + AuditLog>(
    call: Call<'_, S>,
    exchange: CodeExchangeInput<'_>,
) -> Result<ExchangedSession, CodeExchangeError> {
    let key = LoginCode::parse(exchange.code).ok_or(CodeExchangeError::InvalidGrant)?.key();
    let found = call.stores.find_login(call.app_id(), &key).await?;
    let found = found.filter(|found| found.login.page.is_none()).ok_or(CodeExchangeError::InvalidGrant)?;
    let login = found.login;
    if let Some(session) = found.session {
        call.stores.end_session(call.app_id(), login.user, session).await?;
        return Err(CodeExchangeError::InvalidGrant);
    }
    let url_matches = exchange.redirect_url.is_none_or(|url| login.redirect_url.as_deref() == Some(url));
    let is_in_time = call.env.now().unix_timestamp() < login.expires_at;
    if !is_in_time || !url_matches || !login.challenge.is_satisfied_by(exchange.code_verifier) {
        return Err(CodeExchangeError::InvalidGrant);
    }
    let logged_in_at =
        OffsetDateTime::from_unix_timestamp(login.auth_time).map_err(|_| CodeExchangeError::InvalidGrant)?;
    let tokens = &call.app.doc.tokens;
    // The session gets the IP address of the browser, even if another client exchanges the code.
    let ip = login.ip.parse().map_err(|_| CodeExchangeError::InvalidGrant)?;
    let client = ClientInfo { ip, user_agent: login.user_agent.clone() };
    let new = NewSession {
        kind: None,
        id: SessionId(call.env.new_uuid()),
        user: login.user,
        epoch: login.epoch,
        profile: login.profile,
        amr: Amr::Federated,
        auth_time: logged_in_at,
        ip: login.ip,
        user_agent: login.user_agent,
        ends_at: logged_in_at + Duration::seconds(i64::from(tokens.session_lifetime_seconds)),
        idle_seconds: tokens.refresh_idle_seconds,
    };
    // The session is opened before the exchange is recorded, so that a second exchange finds a session that it can end.
    let tokens = match open_prepared_session(Call { client: &client, ..call }, &new).await? {
        Some(tokens) => tokens,
        // The user's epoch has risen since the login, for example because the password was reset.
        None => return Err(CodeExchangeError::InvalidGrant),
    };
    match call.stores.redeem_login(call.app_id(), &key, new.id).await {
        Ok(None) => Ok(ExchangedSession { user: login.user, tokens }),
        Ok(Some(first_session)) => {
            let first_end = call.stores.end_session(call.app_id(), login.user, first_session).await;
            end_unused_session(call, login.user, new.id).await;
            first_end?;
            Err(CodeExchangeError::InvalidGrant)
        }
        Err(error) => {
            end_unused_session(call, login.user, new.id).await;
            Err(error.into())
        }
    }
}

/// Ends a session that was opened for a failed exchange. No client got its tokens.
async fn end_unused_session<S: Sessions>(call: Call<'_, S>, user: UserId, session: SessionId) {
    if let Err(error) = call.stores.end_session(call.app_id(), user, session).await {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "the session of a failed exchange was not ended"
        );
    }
}
