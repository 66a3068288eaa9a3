//! `POST /v1/{APPID}/email/login`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        accounts::{self, LogIn, LogInError, LoggedIn},
        app::App,
        email::Email,
        password::Password,
    },
    http::{
        Ports,
        error::{ErrorCode, Problem},
        guard,
        request::{Inbound, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *login* takes.
    pub struct Request as "LoginRequest" {
        /// The account's address.
        email: Email,
        /// Its password.
        password: Password,
    }
}

/// What *login* answers.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "LoginResponse")]
pub struct Answer {
    /// The access token, a JWT (RFC 9068).
    pub token: String,
    pub user: User,
    /// The refresh token of the session.
    pub refresh_token: String,
    pub session_id: String,
    /// Seconds that `token` is valid.
    pub expires_in: i64,
    /// Unix seconds at which `token` ends.
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

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { email, password } = request.read().await?;
    let outcome = accounts::log_in(&state.stores, &state.env, app, &request.caller, LogIn { email, password }).await;
    match outcome {
        Ok(LoggedIn { user, tokens }) => response::json(&Answer {
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
        Err(error) => Err(problem(app, error)),
    }
}

fn problem(app: &App, error: LogInError) -> Problem {
    match error {
        LogInError::InvalidCredentials => invalid_credentials(app),
        LogInError::Disabled => Problem::new(ErrorCode::UserDisabled, "the user is disabled"),
        LogInError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "the address must be verified before the first login")
        }
        LogInError::Trouble(trouble) => trouble.into(),
    }
}

fn invalid_credentials(app: &App) -> Problem {
    Problem::unauthorized(
        ErrorCode::InvalidCredentials,
        "the address or the password is wrong",
        guard::challenge(app, None),
    )
}
