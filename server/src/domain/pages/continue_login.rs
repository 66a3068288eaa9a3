//! The page *continue*: redeems the one-time code of a social login that a page started.

use latchkey_crds::types::ProviderName;
use time::OffsetDateTime;

use super::{
    session::{BrowserLogin, BrowserSessionTimes, open_browser_session},
    session_cookie::SessionCookie,
};
use crate::domain::{
    authentication::AuthenticatedSession,
    call::Call,
    client::ClientInfo,
    error::CommonError,
    flow::{ContinuePurpose, LoginCode, PendingLogin},
    ports::{AuditLog, Flows, Groups, Identities, Sessions, Users},
    session::{Amr, SessionId},
    social::{LinkError, link_stored_identity},
};

#[derive(Debug, thiserror::Error)]
pub enum ContinueError {
    /// The code is unknown, expired or used, or it does not belong to this login.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Link(LinkError),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ContinueError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Opens the browser session of a social login. Returns the cookie to set. `previous`: the valid session cookie of the
/// request, as in [`open_browser_session`].
pub async fn continue_login<S: Flows + Sessions + Groups + AuditLog>(
    call: Call<'_, S>,
    code: &str,
    code_verifier: &str,
    previous: Option<SessionCookie>,
    times: BrowserSessionTimes,
) -> Result<SessionCookie, ContinueError> {
    let (pending, page) = redeem(call, code, code_verifier).await?;
    if page != ContinuePurpose::LogIn {
        return Err(ContinueError::InvalidCode);
    }
    let auth_time = OffsetDateTime::from_unix_timestamp(pending.auth_time).map_err(|_| ContinueError::InvalidCode)?;
    let ip = pending.ip.parse().map_err(|_| ContinueError::InvalidCode)?;
    let client = ClientInfo { ip, user_agent: pending.user_agent };
    let login = BrowserLogin {
        user: pending.user,
        epoch: pending.epoch,
        profile: pending.profile,
        amr: Amr::Federated,
        auth_time,
        session: None,
    };
    let opened = open_browser_session(Call { client: &client, ..call }, login, previous, times).await?;
    // The user's epoch has risen since the login, for example because the password was reset.
    opened.ok_or(ContinueError::InvalidCode)
}

/// Links the identity of a social login to the user of this session. Returns the name of the Provider.
pub async fn continue_link<S: Users + Identities + Flows>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    code: &str,
    code_verifier: &str,
) -> Result<ProviderName, ContinueError> {
    let (pending, page) = redeem(call, code, code_verifier).await?;
    let ContinuePurpose::Link(identity) = page else { return Err(ContinueError::InvalidCode) };
    if pending.user != signed_in.user_id() {
        return Err(ContinueError::InvalidCode);
    }
    let provider = identity.provider.clone();
    link_stored_identity(call, signed_in, identity).await.map_err(ContinueError::Link)?;
    Ok(provider)
}

/// Marks the code as used. Of concurrent calls, only one gets the login.
async fn redeem<S: Flows>(
    call: Call<'_, S>,
    code: &str,
    code_verifier: &str,
) -> Result<(PendingLogin, ContinuePurpose), ContinueError> {
    let key = LoginCode::parse(code).ok_or(ContinueError::InvalidCode)?.key();
    let found = call.stores.find_login(call.app_id(), &key).await?.ok_or(ContinueError::InvalidCode)?;
    let mut pending = found.login;
    let page = pending.page.take().ok_or(ContinueError::InvalidCode)?;
    let is_in_time = call.env.now().unix_timestamp() < pending.expires_at;
    if !is_in_time || !pending.challenge.is_satisfied_by(code_verifier) {
        return Err(ContinueError::InvalidCode);
    }
    // The id belongs to no session. It only marks the code as used.
    let marker = SessionId(call.env.new_uuid());
    match call.stores.redeem_login(call.app_id(), &key, marker).await? {
        None => Ok((pending, page)),
        Some(_) => Err(ContinueError::InvalidCode),
    }
}
