//! `POST /v1/{APPID}/par`: pushed authorization requests (RFC 9126).

use std::time::Duration;

use http::StatusCode;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        openid::{
            authenticate::RequestCount,
            authorization_request::{
                AuthorizationError, AuthorizationErrorCode, AuthorizationRequest, Delivery, RequestError,
                RequestParameters, UnsafeRequest,
            },
            par::{PUSHED_REQUEST_SECONDS, PushError, push_request},
        },
    },
    http::{
        Ports, clients,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
        routes::Route,
    },
    state::State,
};

/// `Retry-After` while the secret or the key of the client is not ready.
const NOT_READY_RETRY: Duration = Duration::from_secs(5);

/// The response (RFC 9126, 2.2).
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "PushedAuthorizationResponse")]
pub struct PushedAuthorizationResponse {
    /// The value of `request_uri` at *authorize*.
    pub request_uri: String,
    /// The time in seconds within which a browser must open *authorize* with `request_uri`.
    pub expires_in: i64,
}

pub fn operation() -> Operation {
    Operation::new(
        "Store an authorization request before the browser comes (RFC 9126)",
        "Takes the parameters of an authorization request, and the same client authentication as *token*. There is \
         nothing at this path for an App without clients.",
    )
    .request(Content::form(request_schema))
    .response(Content::json::<PushedAuthorizationResponse>(json!({
        "request_uri": "urn:ietf:params:oauth:request_uri:6esc_11ACC5bwc014ltc14eY22c",
        "expires_in": 60,
    })))
    .created()
    .errors(&[
        ErrorCode::InvalidClient,
        ErrorCode::RedirectUrlNotAllowed,
        ErrorCode::InvalidScope,
        ErrorCode::UnsupportedResponseType,
        ErrorCode::RequestNotSupported,
        ErrorCode::RequestUriNotSupported,
        ErrorCode::RegistrationNotSupported,
        ErrorCode::UnmetAuthenticationRequirements,
        ErrorCode::NotFound,
        ErrorCode::RateLimited,
    ])
}

fn request_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": "The parameters of an authorization request (OpenID Connect Core 1.0, 3.1.2.1), and the \
                        authentication of the client.",
        "properties": {
            "client_id": { "type": "string" },
            "redirect_uri": { "type": "string" },
            "response_type": { "type": "string" },
            "scope": { "type": "string" },
            "state": { "type": "string", "maxLength": 2048 },
            "nonce": { "type": "string", "maxLength": 256 },
            "code_challenge": { "type": "string" },
            "code_challenge_method": { "type": "string" },
        },
        "required": ["redirect_uri", "response_type", "scope"],
        "additionalProperties": { "type": "string" },
    })
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    if !app.has_clients() {
        return Err(Problem::not_found());
    }
    let body = request.read_sent_body().await?;
    let (client, form) = clients::authenticate(state, app, &request, body, Route::Par, RequestCount::Counted).await?;
    if form.get("request_uri").is_some() {
        return Err(Problem::invalid_request("request_uri cannot be pushed"));
    }
    let parameters = RequestParameters::new(form.without_credentials());
    let known = app.client(client.client_id.as_str()).ok_or_else(Problem::server_error)?;
    AuthorizationRequest::check(app, known, &parameters, Delivery::Pushed).map_err(request_problem)?;
    let mut stored: Vec<_> = parameters.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    if form.get("client_id").is_none() {
        stored.push(("client_id".to_owned(), client.client_id.as_str().to_owned()));
    }
    let pushed = push_request(state.call(app, &request.client), client, stored).await;
    let request_uri = pushed.map_err(|error| match error {
        PushError::TooLong(error) => Problem::invalid_request(error.to_string()),
        PushError::Common(error) => error.into(),
    })?;
    let body = PushedAuthorizationResponse { request_uri, expires_in: PUSHED_REQUEST_SECONDS };
    let mut response = response::json(&body)?;
    *response.status_mut() = StatusCode::CREATED;
    Ok(response)
}

/// Returns the error for a request that *authorize* would refuse. The code is the same as at *authorize*.
fn request_problem(error: RequestError) -> Problem {
    match error {
        RequestError::Page(error @ UnsafeRequest::RedirectUrlNotAllowed) => {
            Problem::new(ErrorCode::RedirectUrlNotAllowed, error.to_string())
        }
        RequestError::Page(error @ (UnsafeRequest::InvalidClient | UnsafeRequest::InvalidRequestUri)) => {
            Problem::invalid_request(error.to_string())
        }
        RequestError::Reply { error, .. } => authorization_problem(error),
    }
}

fn authorization_problem(error: AuthorizationError) -> Problem {
    if error.code == AuthorizationErrorCode::TemporarilyUnavailable {
        return Problem::unavailable(NOT_READY_RETRY).with_cause(error);
    }
    // Error codes that need a user, for example `login_required`, do not occur here.
    let code = ErrorCode::from_name(error.code.as_str()).unwrap_or(ErrorCode::InvalidRequest);
    Problem::new(code, error.description).with_status(StatusCode::BAD_REQUEST)
}
