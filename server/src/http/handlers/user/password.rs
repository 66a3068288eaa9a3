//! `POST /v1/{APPID}/user/password`.

use serde_json::json;

use super::account_problem;
use crate::{
    domain::{
        app::App,
        own_account::{self, ChangePasswordError, ChangePasswordInput},
        password::Password,
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        openapi::operation::{Content, Operation},
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// The request to change the password.
    pub struct ChangePasswordRequest as "ChangePasswordRequest" {
        /// The new password; the App sets its minimum length and strength.
        password: Password,
        /// The current password. Without it, a login in the last five minutes is required.
        current_password: Option<Password>,
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Set a new password",
        "Requires the current password or a login in the last five minutes. Ends all other sessions, all codes and a \
         pending change of the email address.",
    )
    .requires_access_token()
    .request(Content::json::<ChangePasswordRequest>(
        json!({ "password": "a better horse battery", "current_password": "correct horse battery" }),
    ))
    .response(Content::empty_object())
    .errors(&[
        ErrorCode::WeakPassword,
        ErrorCode::InvalidCredentials,
        ErrorCode::ReauthenticationRequired,
        ErrorCode::EmailNotVerified,
        ErrorCode::RateLimited,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let ChangePasswordRequest { password, current_password } = request.read_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let change = ChangePasswordInput { password, current: current_password };
    let changed = own_account::change_password(state.call(app, &request.client), &signed_in, &change).await;
    changed.map_err(|error| change_password_problem(app, error))?;
    response::empty_object()
}

pub fn change_password_problem(app: &App, error: ChangePasswordError) -> Problem {
    match error {
        ChangePasswordError::Weak(weak) => Problem::weak_password(weak),
        ChangePasswordError::Account(error) => account_problem(app, error),
    }
}
