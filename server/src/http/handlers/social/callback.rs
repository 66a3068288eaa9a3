//! `GET /{APPID}/{PROVIDER}/callback`.

use http::StatusCode;
use latchkey_crds::rendered::RenderedProvider;
use schemars::{JsonSchema, json_schema};
use serde::Serialize;

use super::SessionResponse;
use crate::{
    domain::{
        app::App,
        flow::FlowState,
        social::{self, CallbackError, CallbackInput, FinishedFlow, FlowResult},
    },
    http::{
        Ports,
        cookies::CookieScheme,
        error::{ErrorCode, Problem},
        openapi::{
            operation::{Content, Operation, Parameter},
            patterns,
        },
        pages,
        parameters::Parameters,
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

/// The response of *callback* if the App has no redirect URLs.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "CallbackResponse")]
pub enum CallbackResponse {
    Session {
        #[serde(flatten)]
        session: SessionResponse,
        /// The `state` that was given to *redirect*.
        #[serde(skip_serializing_if = "Option::is_none")]
        state: Option<String>,
    },
    Code {
        /// Must be exchanged at *token* within a minute.
        code: String,
        /// The `state` that was given to *redirect*.
        #[serde(skip_serializing_if = "Option::is_none")]
        state: Option<String>,
    },
}

pub fn operation() -> Operation {
    operation_without_parameters().query(parameters())
}

/// The parameters of *callback*, which the provider sends.
pub(super) fn parameters() -> [Parameter; 5] {
    let state = json_schema!({ "type": "string", "pattern": patterns::BASE64URL_OF_32_BYTES });
    [
        Parameter::new("state", "The `state` of the flow.", state).required(),
        Parameter::text("code", "The provider's code."),
        Parameter::text("iss", "The provider's issuer (RFC 9207)."),
        Parameter::text("error", "Why the provider returns no code (RFC 6749, 4.1.2.1)."),
        Parameter::text("error_description", "Ignored."),
    ]
}

/// Returns the OpenAPI operation that the GET and POST callbacks share. It has no parameters.
pub(super) fn operation_without_parameters() -> Operation {
    Operation::new(
        "The address to which the provider sends the user back",
        "Not for the application itself: register this address at the provider. The response is a redirect to the \
         `redirect_url` of the flow, with a session, a `code` or an `error`. It is JSON only if the App has no \
         redirect URLs, or if the `redirect_url` of the flow is unknown or no longer allowed.",
    )
    .response(Content::json::<CallbackResponse>(SessionResponse::example()))
    .redirect(
        "To the `redirect_url` of the flow. Its parameters are the fields of the JSON response, or `error` and \
         `error_description`, and the `state` that was given to *redirect*.",
    )
    .errors(&[
        ErrorCode::InvalidState,
        ErrorCode::RedirectUrlNotAllowed,
        ErrorCode::EmailNotVerified,
        ErrorCode::RegistrationDisabled,
        ErrorCode::UserDisabled,
        ErrorCode::AccessDenied,
        ErrorCode::ProviderNotFound,
        ErrorCode::AccountLinkRequired,
        ErrorCode::RateLimited,
        ErrorCode::ProviderError,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let provider = super::requested_provider(app, &request)?;
    let parameters = Parameters::parse(request.uri.query().unwrap_or_default())?;
    finish_flow(state, app, provider, &request, &parameters, None).await
}

/// Finishes the flow that the parameter `state` names.
pub(super) async fn finish_flow<S: Ports>(
    state: &State<S>,
    app: &App,
    provider: &RenderedProvider,
    request: &InboundRequest,
    parameters: &Parameters<'_>,
    posted_user: Option<&str>,
) -> Result<Response, Problem> {
    let flow =
        parameters.get_once("state").ok().flatten().and_then(FlowState::parse).ok_or_else(Problem::invalid_state)?;
    let id = flow.id();
    let cookies = CookieScheme::for_base_url(&state.settings.base_url).flows();
    let sent_cookies = cookies.from_request(&request.headers);
    let continue_url = pages::continue_url(&state.apps, app);
    let input = CallbackInput {
        state: flow,
        code: parameters.get_once("code")?,
        iss: parameters.get_once("iss")?,
        error: parameters.get_once("error")?,
        posted_user,
        sealed: sent_cookies.iter().filter(|cookie| cookie.belongs_to(&id)).map(|cookie| cookie.value).collect(),
        continue_url: continue_url.as_deref(),
    };
    let finished = social::finish_flow(state.call(app, &request.client), provider, input).await;
    // A callback with an invalid state, or a callback that was refused before it used the state, clears no cookie: the
    // flow may still complete.
    let cleared = match &finished {
        Err(CallbackError::InvalidState) | Ok(FinishedFlow { is_state_used: false, .. }) => Vec::new(),
        Ok(FinishedFlow { is_state_used: true, .. })
        | Err(CallbackError::RedirectUrl(_) | CallbackError::Common(_)) => cookies.remove(&sent_cookies, &id),
    };
    match finished.map_err(callback_problem).and_then(|finished| callback_response(app, finished)) {
        Ok(response) => Ok(super::with_headers(response, cleared)),
        Err(problem) => {
            Err(cleared.into_iter().fold(problem, |problem, (name, value)| problem.with_header(name, value)))
        }
    }
}

fn callback_response(app: &App, finished: FinishedFlow) -> Result<Response, Problem> {
    let FinishedFlow { target, parameter_location, app_state, is_state_used: _, outcome } = finished;
    let Some(target) = target else {
        return match outcome {
            Ok(FlowResult::Session(login)) => {
                response::json(&CallbackResponse::Session { session: SessionResponse::from(*login), state: app_state })
            }
            Ok(FlowResult::Code(code)) => {
                response::json(&CallbackResponse::Code { code: code.expose().to_owned(), state: app_state })
            }
            Err(error) => Err(super::provider_login_problem(app, error)),
        };
    };
    let mut problem = None;
    let mut parameters: Vec<(&str, String)> = match outcome {
        Ok(FlowResult::Session(login)) => {
            let session = SessionResponse::from(*login);
            vec![
                ("access_token", session.access_token),
                ("refresh_token", session.refresh_token),
                ("session_id", session.session_id),
                ("local_id", session.local_id),
                ("email_verified", session.email_verified.to_string()),
                ("expires_at", session.expires_at.to_string()),
                ("expires_in", session.expires_in.to_string()),
            ]
        }
        Ok(FlowResult::Code(code)) => vec![("code", code.expose().to_owned())],
        Err(error) => {
            let (code, redirected) = super::redirect_error(app, error);
            let description = redirected.0.description.to_string();
            problem = Some(redirected);
            vec![("error", code.to_owned()), ("error_description", description)]
        }
    };
    parameters.extend(app_state.map(|state| ("state", state)));
    let url =
        target.with_parameters(parameter_location, parameters.iter().map(|(name, value)| (*name, value.as_str())));
    let mut response = response::redirect(StatusCode::FOUND, &url)?;
    if let Some(problem) = problem {
        response.extensions_mut().insert(problem);
    }
    Ok(response)
}

fn callback_problem(error: CallbackError) -> Problem {
    match error {
        CallbackError::InvalidState => Problem::invalid_state(),
        CallbackError::RedirectUrl(_) => Problem::new(
            ErrorCode::RedirectUrlNotAllowed,
            "the redirect URL of this login is no longer on the App's list",
        ),
        CallbackError::Common(error) => error.into(),
    }
}
