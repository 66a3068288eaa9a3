//! The use case of *redirect*: starts a flow (specification: Social login, Redirect).

use latchkey_crds::rendered::{BrowserBinding, CallbackMode, RenderedProvider};

use super::provider::callback_url;
use crate::domain::{
    call::Call,
    error::CommonError,
    flow::{CodeChallenge, FLOW_SECONDS, Flow, FlowBinding, FlowState, InvalidChallenge, TooManyFlows},
    identity::{AuthorizationRequest, ProviderError, ProviderOperation},
    pages::SocialState,
    ports::{Flows, Providers, StoreFlowError},
    redirect::{self, RedirectNotAllowed, RedirectTarget},
};

/// The longest `state` parameter, in characters (specification: Social login, Redirect).
pub const MAX_STATE_PARAM_CHARS: usize = 512;
/// The longest `prompt` and `login_hint` that are passed on, in characters: an email address fits.
pub const MAX_HINT_CHARS: usize = 254;

/// The parameters of *redirect*.
pub struct StartFlowInput<'a> {
    pub redirect_url: Option<&'a str>,
    pub state: Option<&'a str>,
    pub prompt: Option<&'a str>,
    pub login_hint: Option<&'a str>,
    pub code_challenge: Option<&'a str>,
    pub binding: FlowBinding,
    /// Whether the browser itself opens *redirect*. Otherwise a script requests the authorization URL as JSON, which
    /// hosted pages never do.
    pub is_navigation: bool,
    /// The URL of the page *continue*. `None` if the App has no pages.
    pub continue_url: Option<&'a str>,
}

pub struct StartedFlow {
    /// The provider's authorization URL, to which the browser goes.
    pub url: String,
    pub state: FlowState,
    /// The sealed flow for the browser's cookie. `None` if the flow is not bound to a browser.
    pub sealed: Option<String>,
    /// Lifetime of the flow in seconds.
    pub seconds: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum StartFlowError {
    #[error(transparent)]
    RedirectUrl(#[from] RedirectNotAllowed),
    #[error("state {0}")]
    State(InvalidText),
    #[error("prompt {0}")]
    Prompt(InvalidText),
    #[error("login_hint {0}")]
    LoginHint(InvalidText),
    #[error("code_challenge {0}")]
    Challenge(#[from] InvalidChallenge),
    /// The App's callback mode is `Code`, which requires a challenge.
    #[error("code_challenge is missing; this App requires it")]
    MissingChallenge,
    /// The App accepts only flows that are bound to a browser.
    #[error("format=json is only for pages of the same site")]
    Unbound,
    #[error(transparent)]
    TooMany(#[from] TooManyFlows),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error(transparent)]
    Common(#[from] CommonError),
}

impl From<StoreFlowError> for StartFlowError {
    fn from(error: StoreFlowError) -> Self {
        match error {
            StoreFlowError::TooManyFlows(too_many) => Self::TooMany(too_many),
            StoreFlowError::Store(error) => Self::Common(error.into()),
        }
    }
}

/// Why a parameter is not passed on to the provider or the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidText {
    #[error("is longer than {0} characters")]
    TooLong(usize),
    #[error("has a control character")]
    ControlCharacter,
}

fn validate_text(text: Option<&str>, max_chars: usize) -> Result<Option<&str>, InvalidText> {
    let Some(text) = text else { return Ok(None) };
    if text.chars().count() > max_chars {
        return Err(InvalidText::TooLong(max_chars));
    }
    if text.chars().any(char::is_control) { Err(InvalidText::ControlCharacter) } else { Ok(Some(text)) }
}

/// Starts a flow. Nothing is stored before all parameters of the request have been validated.
pub async fn start_flow<S: Flows + Providers>(
    call: Call<'_, S>,
    provider: &RenderedProvider,
    request: StartFlowInput<'_>,
) -> Result<StartedFlow, StartFlowError> {
    let target = choose_target(call, &request)?;
    let app_state = validate_text(request.state, MAX_STATE_PARAM_CHARS).map_err(StartFlowError::State)?;
    let prompt = validate_text(request.prompt, MAX_HINT_CHARS).map_err(StartFlowError::Prompt)?;
    let login_hint = validate_text(request.login_hint, MAX_HINT_CHARS).map_err(StartFlowError::LoginHint)?;
    let code_challenge = request.code_challenge.map(CodeChallenge::parse).transpose()?;
    if code_challenge.is_none() && call.app.doc.callback_mode == CallbackMode::Code {
        return Err(StartFlowError::MissingChallenge);
    }
    if request.binding == FlowBinding::Unbound && call.app.doc.browser_binding == BrowserBinding::Required {
        return Err(StartFlowError::Unbound);
    }

    let state = FlowState::generate(call.env);
    let flow = Flow {
        target: target.as_ref().map(|target| target.reference().clone()),
        app_state: app_state.map(str::to_owned),
        code_challenge,
        ..Flow::start(call.env)
    };
    let authorization = AuthorizationRequest {
        redirect_uri: &callback_url(call.app, provider),
        state: state.as_str(),
        code_challenge: &flow.provider_challenge(),
        nonce: call.stores.capabilities(provider).has_nonce.then_some(flow.nonce.as_str()),
        prompt,
        login_hint,
    };
    let permit = call.stores.try_acquire(ProviderOperation::Redirect, call.app, provider, call.client_address())?;
    let url = call.stores.authorization_url(&permit, provider, &authorization).await?;
    drop(permit);
    let sealed = flow.seal(call.env, call.app, &provider.name, &state, request.binding);
    let sealed = match request.binding {
        FlowBinding::Browser => Some(sealed),
        FlowBinding::Unbound => {
            call.stores.store_flow(call.app_id(), &state.id(), &sealed, call.client_address(), FLOW_SECONDS).await?;
            None
        }
    };
    Ok(StartedFlow { url, state, sealed, seconds: FLOW_SECONDS })
}

/// Returns the page *continue* if a page started the flow. Such a request has a challenge, and a state that a page
/// sealed.
pub fn page_target<S>(call: Call<'_, S>, request: &StartFlowInput<'_>) -> Option<RedirectTarget> {
    let page = request.continue_url.filter(|url| request.is_navigation && request.redirect_url == Some(*url))?;
    request.code_challenge?;
    SocialState::open(call.app, request.state?, call.env.now())?;
    Some(RedirectTarget::from_page(page))
}

/// Chooses the redirect URL. The page *continue* is accepted only if a page started the flow, even if the App's list
/// contains it.
fn choose_target<S>(
    call: Call<'_, S>,
    request: &StartFlowInput<'_>,
) -> Result<Option<RedirectTarget>, RedirectNotAllowed> {
    if let Some(page) = page_target(call, request) {
        return Ok(Some(page));
    }
    let target = redirect::choose_target(&call.app.doc.redirect_urls, request.redirect_url)?;
    let is_page = target.as_ref().is_some_and(|target| request.continue_url == Some(target.as_str()));
    if is_page { Err(RedirectNotAllowed) } else { Ok(target) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_is_too_long_or_has_control_characters_is_not_passed_on() {
        assert_eq!(validate_text(None, 3), Ok(None));
        assert_eq!(validate_text(Some("äöü"), 3), Ok(Some("äöü")), "the limit is in characters, not in bytes");
        assert_eq!(validate_text(Some("äöüß"), 3), Err(InvalidText::TooLong(3)));
        for control in ["\0", "\r\n", "\u{7f}", "\u{85}"] {
            assert_eq!(validate_text(Some(control), 3), Err(InvalidText::ControlCharacter));
        }
    }
}
