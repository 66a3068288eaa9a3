//! `POST /v1/{APPID}/email/forgot-password`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{app::App, email::Email, email_account},
    http::{
        Ports,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request of *forgot-password*.
    pub struct ForgotPasswordRequest as "ForgotPasswordRequest" {
        /// The email address of the account; a reset code is sent to it.
        email: Email,
    }
}

/// The response of *forgot-password*, whether or not the address has an account.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ForgotPasswordResponse")]
pub struct ForgotPasswordResponse {
    /// The email address as it was sent.
    pub email: String,
}

/// The operation has no error `rate_limited`: over a limit, the response is the same, but no email is sent.
pub fn operation() -> Operation {
    Operation::new(
        "Request a password reset by email",
        "The response is the same whether or not the address has an account.",
    )
    .request(Content::json::<ForgotPasswordRequest>(json!({ "email": "ada@example.com" })))
    .response(Content::json::<ForgotPasswordResponse>(json!({ "email": "ada@example.com" })))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let ForgotPasswordRequest { email } = request.read_json().await?;
    email_account::forgot_password(state.call(app, &request.client), &email).await?;
    response::json(&ForgotPasswordResponse { email: email.as_str().to_owned() })
}
