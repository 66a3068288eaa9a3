//! `DELETE /v1/{APPID}/user`.

use serde_json::json;

use super::account_problem;
use crate::{
    domain::{app::App, own_account, password::Password},
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
    /// The request to delete the user.
    pub struct DeleteUserRequest as "DeleteUserRequest" {
        /// The password. Without it, a login in the last five minutes is required.
        password: Option<Password>,
    }
}

pub fn operation() -> Operation {
    Operation::new(
        "Delete the account",
        "Requires the password or a login in the last five minutes. Ends all sessions. Services that check only the \
         signature accept access tokens until they expire.",
    )
    .requires_access_token()
    .request(Content::optional_json::<DeleteUserRequest>(json!({ "password": "correct horse battery" })))
    .response(Content::empty_object())
    .errors(&[
        ErrorCode::InvalidCredentials,
        ErrorCode::ReauthenticationRequired,
        ErrorCode::EmailNotVerified,
        ErrorCode::RateLimited,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let DeleteUserRequest { password } = request.read_optional_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let password = password.as_ref();
    let deleted = own_account::delete_account(state.call(app, &request.client), &signed_in, password).await;
    deleted.map_err(|error| account_problem(app, error))?;
    response::empty_object()
}
