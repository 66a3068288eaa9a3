//! `POST /{APPID}/{PROVIDER}/login`.

use super::Session;
use crate::{
    domain::{app::App, social},
    http::{
        Ports,
        error::Problem,
        request::{Inbound, Text, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *login* with a provider's token takes.
    pub struct Request as "ProviderTokenRequest" {
        /// An access token or ID token of the provider, issued for one of the Provider's client ids.
        token: Text,
        /// What the ID token's `nonce` must be, plain or as lower-case hexadecimal SHA-256.
        nonce: Option<Text>,
    }
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let provider = super::provider(app, &request)?;
    let Request { token, nonce } = request.read().await?;
    let nonce = nonce.as_ref().map(|Text(nonce)| nonce.as_str());
    let outcome =
        social::log_in(&state.stores, &state.env, app, provider, &request.caller, &token.0, nonce).await;
    match outcome {
        Ok(signed_up) => response::json(&Session::from(signed_up)),
        Err(error) => Err(super::sign_in_problem(app, error)),
    }
}
