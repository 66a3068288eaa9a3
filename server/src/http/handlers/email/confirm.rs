//! `POST /v1/{APPID}/email/confirm`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        accounts::{self, ConfirmError, Confirmed},
        app::App,
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        guard::Bearer,
        request::{CodeText, Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *confirm* takes.
    pub struct Request as "ConfirmRequest" {
        /// The code from the confirmation mail; case, hyphens and spaces do not matter.
        code: CodeText,
    }
}

/// What *confirm* answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ConfirmResponse")]
pub struct Answer {
    /// The access token, a JWT (RFC 9068).
    pub access_token: String,
    pub refresh_token: String,
    /// Seconds that `access_token` is valid.
    pub expires_in: i64,
    /// Unix seconds at which `access_token` ends.
    pub expires_at: i64,
    pub name: String,
    pub local_id: String,
    pub email: String,
    pub session_id: String,
    /// There, and true, where the account had to lose its password: this session may set one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub password_required: bool,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { code } = request.read().await?;
    let bearer = Bearer::of(&request.headers).optional();
    match accounts::confirm(&state.stores, &state.env, app, &request.caller, &code.0, bearer).await {
        Ok(Confirmed { user, tokens, password_required }) => response::json(&Answer {
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
        Err(ConfirmError::Trouble(trouble)) => Err(trouble.into()),
    }
}

/// One answer for whatever is wrong with a code.
pub fn invalid_code() -> Problem {
    Problem::new(ErrorCode::InvalidCode, "the code is wrong, used or expired")
}
