//! `POST /v1/{APPID}/email/confirm-password`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::confirm;
use crate::{
    domain::{
        app::App,
        email::Email,
        email_account::{self, ResetPasswordError, ResetPasswordInput},
        password::Password,
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::{CodeText, InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request of *confirm-password*.
    pub struct ConfirmPasswordRequest as "ConfirmPasswordRequest" {
        /// The email address of the account.
        email: Email,
        /// The code from the reset email; case, hyphens and spaces do not matter.
        code: CodeText,
        /// The new password; the App sets its minimum length and strength.
        password: Password,
    }
}

/// The response of *confirm-password*.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ConfirmPasswordResponse")]
pub struct ConfirmPasswordResponse {
    /// The email address as it was sent.
    pub email: String,
}

pub fn operation() -> Operation {
    Operation::new(
        "Set a new password with the code from the email",
        "Ends all sessions and other codes of the user, and marks the email address as verified.",
    )
    .request(Content::json::<ConfirmPasswordRequest>(
        json!({ "email": "ada@example.com", "code": "7H2KM-Q4VXD", "password": "a better horse battery" }),
    ))
    .response(Content::json::<ConfirmPasswordResponse>(json!({ "email": "ada@example.com" })))
    .errors(&[ErrorCode::InvalidCode, ErrorCode::WeakPassword, ErrorCode::RateLimited])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let ConfirmPasswordRequest { email, code, password } = request.read_json().await?;
    let reset = ResetPasswordInput { email: email.clone(), code: code.0, password };
    match email_account::reset_password(state.call(app, &request.client), reset).await {
        Ok(()) => response::json(&ConfirmPasswordResponse { email: email.as_str().to_owned() }),
        Err(error) => Err(reset_problem(error)),
    }
}

pub fn reset_problem(error: ResetPasswordError) -> Problem {
    match error {
        ResetPasswordError::InvalidCode => confirm::invalid_code(),
        ResetPasswordError::Weak(weak) => Problem::weak_password(weak),
        ResetPasswordError::Common(error) => error.into(),
    }
}
