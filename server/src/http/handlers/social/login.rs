//! `POST /{APPID}/{PROVIDER}/login`.

use super::SessionResponse;
use crate::{
    domain::{app::App, social},
    http::{
        Ports,
        error::Problem,
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

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let provider = super::requested_provider(app, &request)?;
    let ProviderTokenRequest { token, nonce } = request.read_json().await?;
    let nonce = nonce.as_ref().map(|RawText(nonce)| nonce.as_str());
    let outcome = social::log_in_with_token(state.call(app, &request.client), provider, &token.0, nonce).await;
    match outcome {
        Ok(login) => response::json(&SessionResponse::from(login)),
        Err(error) => Err(super::sign_in_problem(app, error)),
    }
}
