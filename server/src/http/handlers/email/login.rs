//! `POST /v1/{APPID}/email/login`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        email::Email,
        email_account::{self, LoggedIn, LoginError, LoginInput},
        password::Password,
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request of *login*.
    pub struct LoginRequest as "LoginRequest" {
        /// The email address of the account.
        email: Email,
        /// The password of the account.
        password: Password,
    }
}

/// The response of *login*.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "LoginResponse")]
pub struct LoginResponse {
    /// The access token, a JWT (RFC 9068).
    pub token: String,
    pub user: User,
    /// The refresh token of the session.
    pub refresh_token: String,
    pub session_id: String,
    /// Lifetime of `token` in seconds.
    pub expires_in: i64,
    /// When `token` expires, in Unix seconds.
    pub expires_at: i64,
}

/// The user who logged in.
#[derive(Serialize, JsonSchema)]
pub struct User {
    /// The same as `local_id` and `sub`.
    pub id: String,
    pub email: String,
    pub name: String,
}

pub fn operation() -> Operation {
    Operation::new(
        "Log in with email address and password",
        "A user with an unverified email address can log in, unless the App requires a verified one.",
    )
    .request(Content::json::<LoginRequest>(json!({ "email": "ada@example.com", "password": "correct horse battery" })))
    .response(Content::json::<LoginResponse>(json!({
        "token": examples::ACCESS_TOKEN,
        "user": { "id": examples::USER_ID, "email": "ada@example.com", "name": "Ada Lovelace" },
        "refresh_token": examples::REFRESH_TOKEN,
        "session_id": examples::SESSION_ID,
        "expires_in": 874,
        "expires_at": 1_762_340_474,
    })))
    .errors(&[
        ErrorCode::InvalidCredentials,
        ErrorCode::EmailNotVerified,
        ErrorCode::UserDisabled,
        ErrorCode::RateLimited,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let LoginRequest { email, password } = request.read_json().await?;
    request.release_bytes();
    let outcome = email_account::log_in(state.call(app, &request.client), LoginInput { email, password }).await;
    match outcome {
        Ok(LoggedIn { user, tokens }) => response::json(&LoginResponse {
            token: tokens.access_token,
            user: User {
                id: user.id.to_string(),
                email: user.email.as_ref().map_or_else(String::new, |email| email.as_str().to_owned()),
                name: user.name,
            },
            refresh_token: tokens.refresh_token,
            session_id: tokens.session_id.to_string(),
            expires_in: tokens.expires_in,
            expires_at: tokens.expires_at,
        }),
        Err(error) => Err(login_problem(app, error)),
    }
}

pub fn login_problem(app: &App, error: LoginError) -> Problem {
    match error {
        LoginError::InvalidCredentials => invalid_credentials(app),
        LoginError::Disabled => Problem::new(ErrorCode::UserDisabled, "the user is disabled"),
        LoginError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "the email address must be verified before the first login")
        }
        LoginError::Common(error) => error.into(),
    }
}

pub fn invalid_credentials(app: &App) -> Problem {
    Problem::unauthorized(
        ErrorCode::InvalidCredentials,
        "the email address or the password is wrong",
        authentication::challenge(app, None),
    )
}
