//! `POST /v1/{APPID}/email/verify`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        email_account::{self, VerifyError},
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

/// The response of *verify*.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "VerifyResponse")]
pub struct VerifyResponse {
    /// The email address to which the code is sent, or the verified one if there is nothing to verify.
    pub email: String,
}

pub fn operation() -> Operation {
    Operation::new(
        "Send a new confirmation code",
        "Sends it to the user of the token, unless the email address is already verified.",
    )
    .requires_access_token()
    .request(Content::empty_object())
    .response(Content::json::<VerifyResponse>(json!({ "email": "ada@example.com" })))
    .errors(&[ErrorCode::RateLimited])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    request.expect_no_data().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    match email_account::verify(state.call(app, &request.client), &signed_in).await {
        Ok(email) => response::json(&VerifyResponse { email: email.as_str().to_owned() }),
        Err(error) => Err(verify_problem(app, error)),
    }
}

pub fn verify_problem(app: &App, error: VerifyError) -> Problem {
    match error {
        VerifyError::InvalidToken => authentication::invalid_token(app, true),
        VerifyError::Common(error) => error.into(),
    }
}
