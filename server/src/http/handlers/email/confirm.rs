//! `POST /v1/{APPID}/email/confirm`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        email_account::{self, ConfirmError, Confirmed},
    },
    http::{
        Ports,
        authentication::Bearer,
        error::{ErrorCode, Problem},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{CodeText, InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request of *confirm*.
    pub struct ConfirmRequest as "ConfirmRequest" {
        /// The code from the confirmation email; case, hyphens and spaces do not matter.
        code: CodeText,
    }
}

/// The response of *confirm*.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ConfirmResponse")]
pub struct ConfirmResponse {
    /// The access token, a JWT (RFC 9068).
    pub access_token: String,
    pub refresh_token: String,
    /// Lifetime of `access_token` in seconds.
    pub expires_in: i64,
    /// When `access_token` expires, in Unix seconds.
    pub expires_at: i64,
    pub name: String,
    pub local_id: String,
    pub email: String,
    pub session_id: String,
    /// True if the password of the account was removed. This session can set a new password. Left out if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub password_required: bool,
}

pub fn operation() -> Operation {
    Operation::new(
        "Confirm the email address with the code from the email",
        "Ends every other session and code. With a token of the same account, its session continues; otherwise a new \
         session is opened.",
    )
    .takes_optional_access_token()
    .request(Content::json::<ConfirmRequest>(json!({ "code": "7H2KM-Q4VXD" })))
    .response(Content::json::<ConfirmResponse>(json!({
        "access_token": examples::ACCESS_TOKEN,
        "refresh_token": examples::REFRESH_TOKEN,
        "expires_in": 874,
        "expires_at": 1_762_340_474,
        "name": "Ada Lovelace",
        "local_id": examples::USER_ID,
        "email": "ada@example.com",
        "session_id": examples::SESSION_ID,
    })))
    .errors(&[ErrorCode::InvalidCode, ErrorCode::RateLimited])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let ConfirmRequest { code } = request.read_json().await?;
    let bearer = Bearer::from_headers(&request.headers).token();
    match email_account::confirm(state.call(app, &request.client), &code.0, bearer).await {
        Ok(Confirmed { user, tokens, password_required }) => response::json(&ConfirmResponse {
            access_token: tokens.access_token,
            refresh_token: tokens.refresh_token,
            expires_in: tokens.expires_in,
            expires_at: tokens.expires_at,
            local_id: user.id.to_string(),
            email: user.email.as_ref().map_or_else(String::new, |email| email.as_str().to_owned()),
            name: user.name,
            session_id: tokens.session_id.to_string(),
            password_required,
        }),
        Err(ConfirmError::InvalidCode) => Err(invalid_code()),
        Err(ConfirmError::Common(error)) => Err(error.into()),
    }
}

/// Returns the error for a code that is not accepted. The error is the same, whatever the reason.
pub fn invalid_code() -> Problem {
    Problem::new(ErrorCode::InvalidCode, "the code is wrong, used or expired")
}
