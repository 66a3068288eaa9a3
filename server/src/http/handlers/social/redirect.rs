//! `GET /{APPID}/{PROVIDER}/redirect`.

use std::sync::Arc;

use http::{HeaderMap, StatusCode, header::ORIGIN};
use schemars::{JsonSchema, Schema, json_schema};
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        flow::FlowBinding,
        redirect::{ParameterLocation, RedirectTarget},
        social::{self, MAX_HINT_CHARS, MAX_STATE_PARAM_CHARS, StartFlowError, StartFlowInput},
    },
    http::{
        Ports,
        cookies::CookieScheme,
        cors::Cors,
        error::{ErrorCode, Problem, ReportedProblem},
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

/// The response of *redirect* with `format=json`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RedirectResponse")]
pub struct RedirectResponse {
    /// The provider's authorization URL.
    pub url: String,
}

/// How the authorization URL of the provider is returned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResponseFormat {
    Redirect,
    Json,
}

/// The only `code_challenge_method` (RFC 7636, 4.2).
const CHALLENGE_METHOD: &str = "S256";

// === impl ResponseFormat ===

impl ResponseFormat {
    const ALL: [Self; 2] = [Self::Redirect, Self::Json];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Redirect => "redirect",
            Self::Json => "json",
        }
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Send the user to the provider's login page",
        "Without `format=json`, the response is a redirect. A cookie binds the flow to the browser; with \
         `format=json`, only if the call comes from a page of the same site (`Sec-Fetch-Site`).",
    )
    .query([
        Parameter::new(
            "format",
            "`json` returns the provider's address as JSON; `redirect` redirects to it.",
            json_schema!({
                "type": "string",
                "enum": ResponseFormat::ALL.map(ResponseFormat::as_str),
                "default": ResponseFormat::Redirect.as_str(),
            }),
        ),
        Parameter::new(
            "redirect_url",
            "The address to which the user returns at the end. It must be on the App's list, byte for byte, except for \
             the port of an `http` loopback address. Default: the first of the list.",
            json_schema!({ "type": "string", "format": "uri" }),
        ),
        Parameter::new(
            "state",
            "Returned unchanged with the parameters of *callback*.",
            text_schema(MAX_STATE_PARAM_CHARS),
        ),
        Parameter::new("prompt", "Passed to a provider that supports it.", text_schema(MAX_HINT_CHARS)),
        Parameter::new("login_hint", "Passed to a provider that supports it.", text_schema(MAX_HINT_CHARS)),
        Parameter::new(
            "code_challenge",
            "The SHA-256 of the verifier (RFC 7636): the flow ends with a `code` for *token*.",
            json_schema!({ "type": "string", "pattern": patterns::BASE64URL_OF_32_BYTES }),
        ),
        Parameter::new(
            "code_challenge_method",
            "How `code_challenge` is derived from the verifier.",
            json_schema!({ "type": "string", "enum": [CHALLENGE_METHOD], "default": CHALLENGE_METHOD }),
        ),
    ])
    .response(Content::json::<RedirectResponse>(
        json!({ "url": "https://github.com/login/oauth/authorize?client_id=…&redirect_uri=…&scope=…" }),
    ))
    .redirect("To the provider's login page.")
    .errors(&[
        ErrorCode::RedirectUrlNotAllowed,
        ErrorCode::OriginNotAllowed,
        ErrorCode::ProviderNotFound,
        ErrorCode::RateLimited,
        ErrorCode::ProviderError,
    ])
}

/// The schema of a text that is passed to the provider or to the application unchanged.
fn text_schema(max_chars: usize) -> Schema {
    json_schema!({ "type": "string", "maxLength": max_chars, "pattern": patterns::NO_CONTROL_CHARACTERS })
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let provider = super::requested_provider(app, &request)?;
    let parameters = Parameters::parse(request.uri.query().unwrap_or_default())?;
    let format = match parameters.get_once("format")? {
        None => ResponseFormat::Redirect,
        Some(name) => ResponseFormat::ALL
            .into_iter()
            .find(|format| format.as_str() == name)
            .ok_or_else(|| Problem::invalid_request("format must be json or redirect"))?,
    };
    if parameters.get_once("code_challenge_method")?.is_some_and(|method| method != CHALLENGE_METHOD) {
        return Err(Problem::invalid_request("code_challenge_method must be S256"));
    }
    let binding = match format {
        ResponseFormat::Redirect => FlowBinding::Browser,
        ResponseFormat::Json => json_binding(&request.headers),
    };
    if binding == FlowBinding::Browser && has_unlisted_origin(&request.headers, app) {
        return Err(Problem::new(ErrorCode::OriginNotAllowed, "this origin is not on the App's list"));
    }
    let continue_url = pages::continue_url(&state.apps, app);
    let input = StartFlowInput {
        redirect_url: parameters.get_once("redirect_url").map_err(|_| redirect_url_not_allowed())?,
        state: parameters.get_once("state")?,
        prompt: parameters.get_once("prompt")?,
        login_hint: parameters.get_once("login_hint")?,
        code_challenge: parameters.get_once("code_challenge")?,
        binding,
        is_navigation: format == ResponseFormat::Redirect,
        continue_url: continue_url.as_deref(),
    };
    let call = state.call(app, &request.client);
    let (page, app_state) = (social::page_target(call, &input), input.state);
    let started = match (social::start_flow(call, provider, input).await, page) {
        (Ok(started), _) => started,
        (Err(error), Some(page)) => return redirect_error(&page, app_state, redirect_problem(app, error)),
        (Err(error), None) => return Err(redirect_problem(app, error)),
    };
    let cookies = CookieScheme::for_base_url(&state.settings.base_url).flows();
    let cookie_headers = started.sealed.as_ref().map(|sealed| {
        let sent_cookies = cookies.from_request(&request.headers);
        cookies.add(&sent_cookies, &started.state.id(), state.env.now(), sealed, started.seconds)
    });
    let response = match format {
        ResponseFormat::Redirect => response::redirect(StatusCode::FOUND, &started.url)?,
        ResponseFormat::Json => response::json(&RedirectResponse { url: started.url })?,
    };
    Ok(super::with_headers(response, cookie_headers.unwrap_or_default()))
}

/// Returns whether a cookie binds the flow to the browser. Of the clients that request JSON, only a page on the same
/// site can store our cookie.
fn json_binding(headers: &HeaderMap) -> FlowBinding {
    let site = headers.get("sec-fetch-site").map(http::HeaderValue::as_bytes);
    if matches!(site, Some(b"same-origin" | b"same-site")) { FlowBinding::Browser } else { FlowBinding::Unbound }
}

/// Whether a script from an unlisted origin made the call. A navigation by GET sends no `Origin`.
fn has_unlisted_origin(headers: &HeaderMap, app: &App) -> bool {
    headers.contains_key(ORIGIN) && !matches!(Cors::from_request(headers, app, false), Cors::Listed(_))
}

/// Returns a redirect to the page that started the login. The page shows the error.
fn redirect_error(page: &RedirectTarget, app_state: Option<&str>, problem: Problem) -> Result<Response, Problem> {
    let state = app_state.map(|state| ("state", state));
    let parameters = [("error", problem.code.as_str())].into_iter().chain(state);
    let mut response =
        response::redirect(StatusCode::FOUND, &page.with_parameters(ParameterLocation::Query, parameters))?;
    response.extensions_mut().insert(ReportedProblem(Arc::new(problem)));
    Ok(response)
}

fn redirect_url_not_allowed() -> Problem {
    Problem::new(ErrorCode::RedirectUrlNotAllowed, "redirect_url is not on the App's list of redirect URLs")
}

fn redirect_problem(app: &App, error: StartFlowError) -> Problem {
    match error {
        StartFlowError::RedirectUrl(_) => redirect_url_not_allowed(),
        StartFlowError::State(_)
        | StartFlowError::Prompt(_)
        | StartFlowError::LoginHint(_)
        | StartFlowError::Challenge(_)
        | StartFlowError::MissingChallenge
        | StartFlowError::Unbound => Problem::invalid_request(error.to_string()),
        StartFlowError::TooMany(too_many) => super::too_many_flows_problem(&too_many),
        StartFlowError::Provider(error) => super::provider_problem(app, error),
        StartFlowError::Common(error) => error.into(),
    }
}
