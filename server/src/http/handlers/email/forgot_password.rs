//! `POST /v1/{APPID}/email/forgot-password`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{accounts, app::App, email::Email},
    http::{
        Ports,
        error::Problem,
        request::{Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *forgot-password* takes.
    pub struct Request as "ForgotPasswordRequest" {
        /// The account's address; a reset code goes there.
        email: Email,
    }
}

/// What *forgot-password* answers, whether the address has an account or not.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ForgotPasswordResponse")]
pub struct Answer {
    /// The address as it was sent.
    pub email: String,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { email } = request.read().await?;
    accounts::forgot_password(&state.stores, &state.env, app, &request.caller, &email).await?;
    response::json(&Answer { email: email.as_str().to_owned() })
}
