//! The four social endpoints (docs/specification/social-login.md), and the parts that their responses share.

pub mod callback;
pub mod callback_form;
pub mod login;
pub mod redirect;

use std::{sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue};
use latchkey_crds::rendered::RenderedProvider;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    domain::{
        app::App,
        flow::TooManyFlows,
        identity::{AuthorizationError, ProviderError},
        social::{self, ProviderLogin, ProviderLoginError},
    },
    http::{
        authentication,
        error::{ErrorCode, Problem, ReportedProblem},
        openapi::examples,
        request::InboundRequest,
        response::Response,
    },
};

/// The session that a social login opens.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionResponse")]
pub struct SessionResponse {
    /// The access token, a JWT (RFC 9068).
    pub access_token: String,
    /// The refresh token of the session.
    pub refresh_token: String,
    pub session_id: String,
    /// The user's identifier.
    pub local_id: String,
    /// Whether the user's email address is verified.
    pub email_verified: bool,
    /// When `access_token` expires, in Unix seconds.
    pub expires_at: i64,
    /// Lifetime of `access_token` in seconds.
    pub expires_in: i64,
}

/// `Retry-After` while a provider is unavailable or has too many concurrent calls.
const PROVIDER_RETRY_AFTER: Duration = Duration::from_secs(5);
/// `Retry-After` while a Provider (the resource) cannot be used. Somebody must repair the Provider first.
const UNUSABLE_PROVIDER_RETRY_AFTER: Duration = Duration::from_secs(60);

/// The App's provider with the name in the path of the request.
pub fn requested_provider<'a>(app: &'a App, request: &InboundRequest) -> Result<&'a RenderedProvider, Problem> {
    social::find_provider(app, request.path_parameter(0)).ok_or_else(Problem::provider_not_found)
}

fn with_headers(mut response: Response, headers: Vec<(HeaderName, HeaderValue)>) -> Response {
    for (name, value) in headers {
        response.headers_mut().append(name, value);
    }
    response
}

// === impl SessionResponse ===

impl SessionResponse {
    fn example() -> Value {
        json!({
            "access_token": examples::ACCESS_TOKEN,
            "refresh_token": examples::REFRESH_TOKEN,
            "session_id": examples::SESSION_ID,
            "local_id": examples::USER_ID,
            "email_verified": true,
            "expires_at": 1_762_340_474,
            "expires_in": 874,
        })
    }
}

impl From<ProviderLogin> for SessionResponse {
    fn from(ProviderLogin { user, tokens }: ProviderLogin) -> Self {
        Self {
            access_token: tokens.access_token,
            refresh_token: tokens.refresh_token,
            session_id: tokens.session_id.to_string(),
            local_id: user.id.to_string(),
            email_verified: user.email_verified,
            expires_at: tokens.expires_at,
            expires_in: tokens.expires_in,
        }
    }
}

// === errors ===

/// The `error` parameter of a redirect, and the [`ReportedProblem`] to add to the response.
fn redirect_error(app: &App, error: ProviderLoginError) -> (&'static str, ReportedProblem) {
    let provider_code = match &error {
        ProviderLoginError::ProviderReported(reported) => reported.map(AuthorizationError::as_str),
        ProviderLoginError::Provider(_)
        | ProviderLoginError::Closed
        | ProviderLoginError::DomainNotAllowed
        | ProviderLoginError::EmailNotVerified
        | ProviderLoginError::LinkRequired
        | ProviderLoginError::MissingEmail
        | ProviderLoginError::Disabled
        | ProviderLoginError::Common(_) => None,
    };
    let problem = provider_login_problem(app, error);
    (provider_code.unwrap_or(problem.code.as_str()), ReportedProblem(Arc::new(problem)))
}

fn provider_login_problem(app: &App, error: ProviderLoginError) -> Problem {
    match error {
        ProviderLoginError::ProviderReported(reported) => authorization_problem(reported),
        ProviderLoginError::Provider(error) => provider_problem(app, error),
        ProviderLoginError::Closed => {
            Problem::new(ErrorCode::RegistrationDisabled, "this App does not accept registrations")
        }
        ProviderLoginError::DomainNotAllowed => {
            Problem::new(ErrorCode::AccessDenied, "this App does not accept email addresses of this domain")
        }
        ProviderLoginError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "this App requires an email address that the provider verified")
        }
        ProviderLoginError::LinkRequired => Problem::new(
            ErrorCode::AccountLinkRequired,
            "the email address has an account; log in to it and link this provider",
        ),
        ProviderLoginError::MissingEmail => {
            Problem::new(ErrorCode::AccessDenied, "this App requires an email address, and the provider returned none")
        }
        ProviderLoginError::Disabled => Problem::new(ErrorCode::UserDisabled, "the user is disabled"),
        ProviderLoginError::Common(error) => error.into(),
    }
}

fn authorization_problem(reported: Option<AuthorizationError>) -> Problem {
    match reported {
        Some(AuthorizationError::AccessDenied) => {
            Problem::new(ErrorCode::AccessDenied, "the login at the provider was refused or cancelled")
        }
        Some(AuthorizationError::TemporarilyUnavailable) => Problem::unavailable(PROVIDER_RETRY_AFTER),
        Some(
            AuthorizationError::InvalidRequest
            | AuthorizationError::UnauthorizedClient
            | AuthorizationError::UnsupportedResponseType
            | AuthorizationError::InvalidScope
            | AuthorizationError::ServerError,
        )
        | None => Problem::new(ErrorCode::ProviderError, "the provider returned an error"),
    }
}

/// Returns the response to a provider error. It contains no text from the provider; the log describes the error in our
/// own words.
pub fn provider_problem(app: &App, error: ProviderError) -> Problem {
    match error {
        ProviderError::Unavailable(_) => Problem::unavailable(PROVIDER_RETRY_AFTER).with_cause(error),
        ProviderError::Unusable(_) => Problem::unavailable(UNUSABLE_PROVIDER_RETRY_AFTER).with_cause(error),
        ProviderError::InvalidResponse { .. } | ProviderError::InvalidCallback(_) => {
            Problem::new(ErrorCode::ProviderError, "the response of the provider is invalid").with_cause(error)
        }
        ProviderError::InvalidToken(_) => Problem::unauthorized(
            ErrorCode::InvalidProviderToken,
            "the provider's token is not valid, or was issued for another client",
            authentication::challenge(app, None),
        )
        .with_cause(error),
        ProviderError::NoTokenCheck => Problem::invalid_request(
            "this provider offers no way to check for which client a token was issued; use redirect instead",
        ),
    }
}

pub fn too_many_flows_problem(too_many: &TooManyFlows) -> Problem {
    Problem::rate_limited(too_many.name, too_many.window, too_many.retry_after)
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;
    use crate::{domain::identity::UnavailableReason, fixtures};

    #[test]
    fn a_provider_call_over_capacity_is_a_refusal() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let problem = provider_problem(&app, ProviderError::Unavailable(UnavailableReason::TooManyCalls));
        assert_eq!(
            (problem.status, problem.refusal_retry_after),
            (StatusCode::SERVICE_UNAVAILABLE, Some(PROVIDER_RETRY_AFTER))
        );
    }
}
