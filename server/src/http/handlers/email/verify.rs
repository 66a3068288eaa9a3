//! `POST /v1/{APPID}/email/verify`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        accounts::{self, VerifyError},
        app::App,
    },
    http::{
        Ports,
        error::Problem,
        guard,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// What *verify* answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "VerifyResponse")]
pub struct Answer {
    /// The address that the code goes to; the verified one where nothing is left to verify.
    pub email: String,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    request.read_nothing().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    match accounts::verify(&state.stores, &state.env, app, &request.caller, &signed_in).await {
        Ok(email) => response::json(&Answer { email: email.as_str().to_owned() }),
        Err(VerifyError::InvalidToken) => Err(guard::invalid_token(app, true)),
        Err(VerifyError::Trouble(trouble)) => Err(trouble.into()),
    }
}
