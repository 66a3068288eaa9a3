//! `POST /v1/{APPID}/email/confirm-password`.

use schemars::JsonSchema;
use serde::Serialize;

use super::confirm;
use crate::{
    domain::{
        accounts::{self, ResetError, ResetPassword},
        app::App,
        email::Email,
        password::Password,
    },
    http::{
        Ports,
        error::Problem,
        request::{CodeText, Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *confirm-password* takes.
    pub struct Request as "ConfirmPasswordRequest" {
        /// The account's address.
        email: Email,
        /// The code from the reset mail; case, hyphens and spaces do not matter.
        code: CodeText,
        /// The new password; its least length and strength are the App's.
        password: Password,
    }
}

/// What *confirm-password* answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ConfirmPasswordResponse")]
pub struct Answer {
    /// The address as it was sent.
    pub email: String,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { email, code, password } = request.read().await?;
    let reset = ResetPassword { email: email.clone(), code: code.0, password };
    match accounts::reset_password(&state.stores, &state.env, app, &request.caller, reset).await {
        Ok(()) => response::json(&Answer { email: email.as_str().to_owned() }),
        Err(ResetError::InvalidCode) => Err(confirm::invalid_code()),
        Err(ResetError::Weak(weak)) => Err(Problem::weak_password(weak)),
        Err(ResetError::Trouble(trouble)) => Err(trouble.into()),
    }
}
