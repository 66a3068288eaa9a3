//! `POST /{APPID}/{PROVIDER}/login`.

use serde_json::{Value, json};

use super::SessionResponse;
use crate::{
    domain::{app::App, social},
    http::{
        Ports,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::{InboundRequest, RawText, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request of *login* with a provider's token.
    pub struct ProviderTokenRequest as "ProviderTokenRequest" {
        /// An access token or ID token of the provider, issued for one of the Provider's client IDs.
        token: RawText,
        /// The expected `nonce` of the ID token, plain or as lower-case hexadecimal SHA-256.
        nonce: Option<RawText>,
    }
}

// === impl ProviderTokenRequest ===

impl ProviderTokenRequest {
    pub fn example() -> Value {
        json!({ "token": "gho_16C7e42F292c…" })
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Log in with a token of the provider",
        "For apps that log in with the provider's own SDK. Only tokens that were issued for one of the Provider's \
         client IDs are accepted. If the provider offers no way to check this, the call is refused.",
    )
    .request(Content::json::<ProviderTokenRequest>(ProviderTokenRequest::example()))
    .response(Content::json::<SessionResponse>(SessionResponse::example()))
    .errors(&[
        ErrorCode::InvalidProviderToken,
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

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let provider = super::requested_provider(app, &request)?;
    let ProviderTokenRequest { token, nonce } = request.read_json().await?;
    let nonce = nonce.as_ref().map(|RawText(nonce)| nonce.as_str());
    let outcome = social::log_in_with_token(state.call(app, &request.client), provider, &token.0, nonce).await;
    match outcome {
        Ok(login) => response::json(&SessionResponse::from(login)),
        Err(error) => Err(super::provider_login_problem(app, error)),
    }
}
