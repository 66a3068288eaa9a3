//! The use case of *callback*: finishes a flow (specification: Social login, Callback).

use latchkey_crds::rendered::{BrowserBinding, CallbackMode, RenderedProvider};

use super::{
    error::ProviderLoginError,
    login_attempt::{LoginAttempt, ProviderLogin, acquire_provider_permit},
    provider::callback_url,
};
use crate::domain::{
    call::Call,
    error::CommonError,
    flow::{ContinuePurpose, Flow, FlowBinding, FlowState, LOGIN_CODE_SECONDS, LoginCode, PendingLogin},
    identity::{AuthorizationCodeGrant, AuthorizationError, ProviderOperation, VerifiedIdentity},
    login_limits::remember_client,
    pages::{SocialPurpose, SocialState},
    ports::{AuditLog, Flows, GroupChanges, Identities, Outbox, Providers, RateLimits, Sessions, Users},
    redirect::{self, ParameterLocation, RedirectNotAllowed, RedirectTarget},
};

/// What the browser sends to *callback*: the parameters of the provider, and the flows in its cookies.
pub struct CallbackInput<'a> {
    pub state: FlowState,
    pub code: Option<&'a str>,
    pub iss: Option<&'a str>,
    pub error: Option<&'a str>,
    /// The form field `user`, which only Apple sends.
    pub posted_user: Option<&'a str>,
    /// The sealed flows in the browser's cookies for this state.
    pub sealed: Vec<&'a str>,
    /// The URL of the page *continue*. `None` if the App has no pages.
    pub continue_url: Option<&'a str>,
}

/// How a flow ends, and where the browser goes.
pub struct FinishedFlow {
    /// `None` if the App has no redirect URLs: the response is then JSON.
    pub target: Option<RedirectTarget>,
    pub parameter_location: ParameterLocation,
    pub app_state: Option<String>,
    /// False if the provider could not be called, because no permit was free or a rate limit was reached: the same
    /// callback can then be sent again.
    pub is_state_used: bool,
    pub outcome: Result<FlowResult, ProviderLoginError>,
}

/// What the application gets for its user.
pub enum FlowResult {
    Session(Box<ProviderLogin>),
    /// A one-time code that the application exchanges for a session.
    Code(LoginCode),
}

/// Why the response to a callback is an error instead of a redirect: there is no redirect URL to which the error could
/// be sent.
#[derive(Debug, thiserror::Error)]
pub enum CallbackError {
    #[error("the state is missing, used, expired or of another flow")]
    InvalidState,
    /// The redirect URL was removed from the App's `redirectURLs` after the flow began.
    #[error(transparent)]
    RedirectUrl(#[from] RedirectNotAllowed),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for CallbackError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Finishes a flow. Once the permit to call the provider and the rate limit are acquired, the state is used up,
/// whatever the outcome.
pub async fn finish_flow<S>(
    call: Call<'_, S>,
    provider: &RenderedProvider,
    returned: CallbackInput<'_>,
) -> Result<FinishedFlow, CallbackError>
where
    S: Users + Identities + GroupChanges + RateLimits + Outbox + Sessions + Flows + Providers + AuditLog,
{
    let id = returned.state.id();
    let now = call.env.now();
    let open = |binding, sealed: &str| Flow::open(call.app, &provider.name, &returned.state, binding, sealed, now);
    let from_cookie = returned.sealed.iter().find_map(|sealed| open(FlowBinding::Browser, sealed));
    let (flow, binding) = match from_cookie {
        Some(flow) => (flow, FlowBinding::Browser),
        None => {
            if call.app.doc.browser_binding == BrowserBinding::Required {
                return Err(CallbackError::InvalidState);
            }
            let stored = call.stores.find_flow(call.app_id(), &id).await?;
            let flow =
                stored.and_then(|sealed| open(FlowBinding::Unbound, &sealed)).ok_or(CallbackError::InvalidState)?;
            (flow, FlowBinding::Unbound)
        }
    };
    let FlowTarget { target, purpose } = find_target(call, &flow, returned.continue_url)?;
    let parameter_location = match call.app.doc.callback_mode {
        CallbackMode::Fragment if purpose.is_none() => ParameterLocation::Fragment,
        CallbackMode::Query | CallbackMode::Code | CallbackMode::Fragment => ParameterLocation::Query,
    };
    // The permit is acquired before the state is used, so that the browser can repeat the callback if no permit is
    // free.
    let permit = match acquire_provider_permit(call, ProviderOperation::Callback, provider).await {
        Ok(permit) => permit,
        Err(error) => {
            return Ok(FinishedFlow {
                target,
                parameter_location,
                app_state: flow.app_state,
                is_state_used: false,
                outcome: Err(error),
            });
        }
    };
    let outcome = match call.stores.consume_flow(call.app_id(), &id, binding).await {
        Ok(true) => match identify(call, provider, permit, &returned, &flow).await {
            Ok(identity) => {
                let attempt = LoginAttempt { call, provider };
                complete_login(attempt, &identity, &flow, target.as_ref(), purpose).await
            }
            Err(error) => Err(error),
        },
        Ok(false) => return Err(CallbackError::InvalidState),
        Err(error) => Err(error.into()),
    };
    Ok(FinishedFlow { target, parameter_location, app_state: flow.app_state, is_state_used: true, outcome })
}

/// Where the browser goes at the end of a flow, and why the flow was started.
struct FlowTarget {
    /// `None` if the App has no redirect URLs.
    target: Option<RedirectTarget>,
    /// Why a page started the flow. `None` if the application started it.
    purpose: Option<SocialPurpose>,
}

/// Finds the target of a flow again. Nothing is sent to a redirect URL that is no longer on the list, not even an
/// error.
fn find_target<S>(call: Call<'_, S>, flow: &Flow, continue_url: Option<&str>) -> Result<FlowTarget, CallbackError> {
    let page = continue_url.map(RedirectTarget::from_page);
    if let Some(page) = page.filter(|page| flow.target.as_ref() == Some(page.reference())) {
        let state = flow.app_state.as_deref().and_then(|state| SocialState::open(call.app, state, call.env.now()));
        let state = state.ok_or(CallbackError::InvalidState)?;
        return Ok(FlowTarget { target: Some(page), purpose: Some(state.purpose) });
    }
    let find = |reference| redirect::find_target(&call.app.doc.redirect_urls, reference);
    Ok(FlowTarget { target: flow.target.as_ref().map(find).transpose()?, purpose: None })
}

/// Gets the user's identity from the provider. Must be called only after this callback has marked the state as used.
async fn identify<S: Providers>(
    call: Call<'_, S>,
    provider: &RenderedProvider,
    permit: S::Permit,
    returned: &CallbackInput<'_>,
    flow: &Flow,
) -> Result<VerifiedIdentity, ProviderLoginError> {
    let code = match (returned.error, returned.code) {
        (Some(error), _) => {
            // An error from another issuer is not an error of this provider (RFC 9207, 2.4).
            call.stores.validate_issuer(&permit, provider, returned.iss).await?;
            return Err(ProviderLoginError::ProviderReported(authorization_error(error)));
        }
        (None, Some(code)) if !code.is_empty() => code,
        (None, _) => return Err(ProviderLoginError::ProviderReported(None)),
    };
    let grant = AuthorizationCodeGrant {
        redirect_uri: &callback_url(call.app, provider),
        code,
        code_verifier: &flow.code_verifier,
        nonce: call.stores.capabilities(provider).has_nonce.then_some(flow.nonce.as_str()),
        iss: returned.iss,
        posted_user: returned.posted_user,
    };
    Ok(call.stores.exchange_code(&permit, provider, &grant).await?)
}

/// Logs the user in, or stores the login for the exchange of a one-time code.
async fn complete_login<S>(
    attempt: LoginAttempt<'_, S>,
    identity: &VerifiedIdentity,
    flow: &Flow,
    target: Option<&RedirectTarget>,
    purpose: Option<SocialPurpose>,
) -> Result<FlowResult, ProviderLoginError>
where
    S: Users + Identities + GroupChanges + RateLimits + Outbox + Sessions + Flows + AuditLog,
{
    let Some(challenge) = &flow.code_challenge else {
        return attempt.log_in(identity).await.map(|session| FlowResult::Session(Box::new(session)));
    };
    let call = attempt.call;
    let (user, page) = match purpose {
        None => (attempt.find_or_create_user(identity).await?, None),
        Some(SocialPurpose::LogIn) => (attempt.find_or_create_user(identity).await?, Some(ContinuePurpose::LogIn)),
        // The page *continue* links the identity later, if the session is still live then. Therefore the identity is
        // not used here to find or create an account.
        Some(SocialPurpose::Link { user, .. }) => {
            let user = call.stores.user(call.app_id(), user).await?.filter(|user| !user.disabled);
            let link = ContinuePurpose::Link(attempt.identity_to_link(identity));
            (user.ok_or(ProviderLoginError::Disabled)?, Some(link))
        }
    };
    let is_login = !matches!(page, Some(ContinuePurpose::Link(_)));
    let code = LoginCode::generate(call.env);
    let now = call.env.now().unix_timestamp();
    let login = PendingLogin {
        user: user.id,
        epoch: user.epoch,
        profile: user.profile(),
        redirect_url: target.map(|target| target.as_str().to_owned()),
        challenge: challenge.clone(),
        auth_time: now,
        ip: call.client.ip.to_string(),
        user_agent: call.client.user_agent.clone(),
        expires_at: now + LOGIN_CODE_SECONDS,
        page,
    };
    call.stores.store_login(call.app_id(), &code.key(), &login).await?;
    if is_login {
        remember_client(call, &user).await;
    }
    Ok(FlowResult::Code(code))
}

/// Parses the error code of a provider. Some providers (Apple, LinkedIn) have their own codes for a login that the user
/// cancels.
fn authorization_error(error: &str) -> Option<AuthorizationError> {
    match error {
        "user_cancelled_authorize" | "user_cancelled_login" => Some(AuthorizationError::AccessDenied),
        other => AuthorizationError::parse(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_login_is_recognized_for_every_provider() {
        for cancelled in ["access_denied", "user_cancelled_authorize", "user_cancelled_login"] {
            assert_eq!(authorization_error(cancelled), Some(AuthorizationError::AccessDenied));
        }
        assert_eq!(authorization_error("server_error"), Some(AuthorizationError::ServerError));
        for other in ["", "cancelled", "access_denied\r\n", "invalid_token"] {
            assert_eq!(authorization_error(other), None, "{other}");
        }
    }
}
