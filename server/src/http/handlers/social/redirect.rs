//! `GET /{APPID}/{PROVIDER}/redirect`.

use http::{HeaderMap, header::ORIGIN};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        flow::Binding,
        social::{self, Begin, BeginError},
    },
    http::{
        Ports,
        cookies::FlowCookies,
        cors::Cors,
        error::{ErrorCode, Problem},
        parameters::Parameters,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// What *redirect* answers with `format=json`.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RedirectResponse")]
pub struct Answer {
    /// The provider's authorization address.
    pub url: String,
}

/// How the address of the provider is told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Redirect,
    Json,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: Inbound) -> Result<Response, Problem> {
    let provider = super::provider(app, &request)?;
    let parameters = Parameters::parse(request.uri.query().unwrap_or_default())?;
    let format = match parameters.once("format")? {
        None | Some("redirect") => Format::Redirect,
        Some("json") => Format::Json,
        Some(_) => return Err(Problem::invalid_request("format is neither json nor redirect")),
    };
    if !matches!(parameters.once("code_challenge_method")?, None | Some("S256")) {
        return Err(Problem::invalid_request("code_challenge_method is not S256"));
    }
    let binding = match format {
        Format::Redirect => Binding::Browser,
        Format::Json => binding_of_page(&request.headers),
    };
    if binding == Binding::Browser && is_foreign(&request.headers, app) {
        return Err(Problem::new(ErrorCode::OriginNotAllowed, "this origin is not on the App's list"));
    }
    let begin = Begin {
        redirect_url: parameters.once("redirect_url").map_err(|_| not_allowed())?,
        state: parameters.once("state")?,
        prompt: parameters.once("prompt")?,
        login_hint: parameters.once("login_hint")?,
        code_challenge: parameters.once("code_challenge")?,
        binding,
    };
    let begun = social::begin(&state.stores, &state.env, app, provider, &request.caller, begin).await;
    let begun = begun.map_err(|error| problem(app, error))?;
    let cookies = FlowCookies::of(&state.settings.base_url);
    let headers = begun.sealed.as_ref().map(|sealed| {
        let sent = cookies.sent(&request.headers);
        cookies.begin(&sent, &begun.state.id(), state.env.now(), sealed, begun.seconds)
    });
    let response = match format {
        Format::Redirect => super::redirect_to(&begun.url)?,
        Format::Json => response::json(&Answer { url: begun.url })?,
    };
    Ok(super::with_headers(response, headers.unwrap_or_default()))
}

/// A page of the same site can keep a cookie of ours; whoever else asks for JSON cannot.
fn binding_of_page(request: &HeaderMap) -> Binding {
    let site = request.get("sec-fetch-site").map(http::HeaderValue::as_bytes);
    if matches!(site, Some(b"same-origin" | b"same-site")) { Binding::Browser } else { Binding::None }
}

/// Navigations carry no `Origin`: one that is there is that of a page that calls by itself.
fn is_foreign(request: &HeaderMap, app: &App) -> bool {
    request.contains_key(ORIGIN) && !matches!(Cors::of(request, &app.doc.allowed_origins), Cors::Listed(_))
}

fn not_allowed() -> Problem {
    Problem::new(ErrorCode::RedirectUrlNotAllowed, "redirect_url is not on the App's list of redirect addresses")
}

fn problem(app: &App, error: BeginError) -> Problem {
    match error {
        BeginError::RedirectUrl(_) => not_allowed(),
        BeginError::State(_)
        | BeginError::Prompt(_)
        | BeginError::LoginHint(_)
        | BeginError::Challenge(_)
        | BeginError::NoChallenge
        | BeginError::Unbound => Problem::invalid_request(error.to_string()),
        BeginError::TooMany(too_many) => super::too_many_flows(&too_many),
        BeginError::Provider(error) => super::provider_problem(app, error),
        BeginError::Trouble(trouble) => trouble.into(),
    }
}
