//! The three social endpoints (contract, 5), and what their answers have in common.

pub mod callback;
pub mod login;
pub mod redirect;

use std::{sync::Arc, time::Duration};

use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{CACHE_CONTROL, LOCATION, REFERRER_POLICY},
};
use latchkey_crds::rendered::RenderedProvider;
use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        flow::TooManyFlows,
        identity::{AuthorizationError, ProviderError},
        social::{self, SignInError, SignedUp},
    },
    http::{
        error::{ErrorCode, Problem, RedirectedProblem},
        guard,
        request::Inbound,
        response::{self, Response},
    },
};

/// What social flows answer.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "SessionResponse")]
pub struct Session {
    /// The access token, a JWT (RFC 9068).
    pub access_token: String,
    /// The refresh token of the session.
    pub refresh_token: String,
    pub session_id: String,
    /// The user's identifier.
    pub local_id: String,
    /// Whether the user's address is verified.
    pub email_verified: bool,
    /// Unix seconds at which `access_token` ends.
    pub expires_at: i64,
    /// Seconds that `access_token` is valid.
    pub expires_in: i64,
}

/// How long to wait for a provider that is away.
const PROVIDER_AWAY: Duration = Duration::from_secs(5);
/// How long to wait for somebody to mend a Provider; a change of it is live within seconds.
const PROVIDER_UNUSABLE: Duration = Duration::from_secs(60);

/// The provider that a path names.
pub fn provider<'a>(app: &'a App, request: &Inbound) -> Result<&'a RenderedProvider, Problem> {
    social::provider(app, request.item.as_deref().unwrap_or_default()).ok_or_else(Problem::provider_not_found)
}

/// 302 to an address that nobody learns of by a `Referer`, and that nobody keeps.
fn redirect_to(address: &str) -> Result<Response, Problem> {
    let location = HeaderValue::try_from(address).map_err(|error| Problem::server_error().because(error))?;
    let mut response = response::empty(StatusCode::FOUND);
    let headers = response.headers_mut();
    headers.insert(LOCATION, location);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    Ok(response)
}

fn with_headers(mut response: Response, headers: Vec<(HeaderName, HeaderValue)>) -> Response {
    for (name, value) in headers {
        response.headers_mut().append(name, value);
    }
    response
}

// === impl Session ===

impl From<SignedUp> for Session {
    fn from(SignedUp { user, tokens }: SignedUp) -> Self {
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

/// The `error` of a redirect, and the error that its response must carry as [`RedirectedProblem`].
fn redirected(app: &App, error: SignInError) -> (&'static str, RedirectedProblem) {
    let said = match &error {
        SignInError::Refused(refusal) => refusal.map(AuthorizationError::as_str),
        SignInError::Provider(_)
        | SignInError::Closed
        | SignInError::DomainNotAllowed
        | SignInError::EmailNotVerified
        | SignInError::LinkRequired
        | SignInError::NoEmail
        | SignInError::Disabled
        | SignInError::Trouble(_) => None,
    };
    let problem = sign_in_problem(app, error);
    (said.unwrap_or(problem.code.as_str()), RedirectedProblem(Arc::new(problem)))
}

fn sign_in_problem(app: &App, error: SignInError) -> Problem {
    match error {
        SignInError::Refused(refusal) => refused(refusal),
        SignInError::Provider(error) => provider_problem(app, error),
        SignInError::Closed => Problem::new(ErrorCode::RegistrationDisabled, "this App takes no registrations"),
        SignInError::DomainNotAllowed => {
            Problem::new(ErrorCode::AccessDenied, "this App takes no addresses of this domain")
        }
        SignInError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "this App demands an address that the provider has verified")
        }
        SignInError::LinkRequired => Problem::new(
            ErrorCode::AccountLinkRequired,
            "the address has an account; log in to it, and link this provider there",
        ),
        SignInError::NoEmail => {
            Problem::new(ErrorCode::AccessDenied, "the provider tells no address, which this App demands")
        }
        SignInError::Disabled => Problem::new(ErrorCode::UserDisabled, "the user is disabled"),
        SignInError::Trouble(trouble) => trouble.into(),
    }
}

fn refused(refusal: Option<AuthorizationError>) -> Problem {
    match refusal {
        Some(AuthorizationError::AccessDenied) => {
            Problem::new(ErrorCode::AccessDenied, "the login at the provider was refused or given up")
        }
        Some(AuthorizationError::TemporarilyUnavailable) => Problem::unavailable(PROVIDER_AWAY),
        Some(
            AuthorizationError::InvalidRequest
            | AuthorizationError::UnauthorizedClient
            | AuthorizationError::UnsupportedResponseType
            | AuthorizationError::InvalidScope
            | AuthorizationError::ServerError,
        )
        | None => Problem::new(ErrorCode::ProviderError, "the provider answered with an error"),
    }
}

/// What the peer wrote is in none of it; the log gets our own words for it.
pub fn provider_problem(app: &App, error: ProviderError) -> Problem {
    match error {
        ProviderError::Away(_) => Problem::unavailable(PROVIDER_AWAY).because(error),
        ProviderError::Unusable(_) => Problem::unavailable(PROVIDER_UNUSABLE).because(error),
        ProviderError::Answer { .. } | ProviderError::Callback(_) => {
            Problem::new(ErrorCode::ProviderError, "the provider answered what it must not").because(error)
        }
        ProviderError::Token(_) => Problem::unauthorized(
            ErrorCode::InvalidProviderToken,
            "the provider's token is not valid, or was issued for another client",
            guard::challenge(app, None),
        )
        .because(error),
        ProviderError::NoTokenCheck => Problem::invalid_request(
            "this provider offers no way to check whose client a token was issued to; use redirect instead",
        ),
    }
}

fn too_many_flows(too_many: &TooManyFlows) -> Problem {
    Problem::rate_limited(too_many.name, too_many.window, too_many.retry_after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{domain::identity::Away, fixtures};

    #[test]
    fn a_call_that_finds_no_room_is_a_refusal() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let problem = provider_problem(&app, ProviderError::Away(Away::TooMany));
        assert_eq!((problem.status, problem.refused_for), (StatusCode::SERVICE_UNAVAILABLE, Some(PROVIDER_AWAY)));
    }
}
