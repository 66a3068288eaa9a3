//! `GET`, `PATCH` and `DELETE /v1/{APPID}/user`: the account of the logged-in user.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        own_account::{self, OwnAccountError},
        password::Password,
        user::{self, Name},
    },
    http::{
        Ports, authentication,
        error::{ErrorCode, Problem},
        request::{InboundRequest, request_body},
        response::{self, Response},
    },
    state::State,
};

pub mod email;
pub mod password;
pub mod userinfo;

request_body! {
    /// The request to rename the user.
    pub struct RenameRequest as "RenameRequest" {
        /// The new name; leading and trailing white space is removed.
        name: Name,
    }
}

request_body! {
    /// The request to delete the user.
    pub struct DeleteUserRequest as "DeleteUserRequest" {
        /// The password. Without it, a login in the last five minutes is required.
        password: Option<Password>,
    }
}

/// The account.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserResponse")]
pub struct UserResponse {
    /// The same as `local_id` and `sub`.
    pub id: String,
    pub local_id: String,
    /// The email address, verified or not; null if there is none.
    pub email: Option<String>,
    pub email_verified: bool,
    pub name: String,
    /// Unix seconds.
    pub created_at: i64,
    /// Whether a password is set.
    pub has_password: bool,
}

/// `GET user`.
pub async fn read<S: Ports>(state: &State<S>, app: &App, request: &InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, request).await?;
    let user = own_account::load_user(state.call(app, &request.client), &signed_in).await;
    response::json(&UserResponse::from(user.map_err(|error| account_problem(app, error))?))
}

/// `PATCH user`.
pub async fn rename<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let RenameRequest { name } = request.read_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let user = own_account::rename_user(state.call(app, &request.client), &signed_in, &name).await;
    response::json(&UserResponse::from(user.map_err(|error| account_problem(app, error))?))
}

/// `DELETE user`.
pub async fn delete<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    authentication::authenticate(state, app, &request).await?;
    let DeleteUserRequest { password } = request.read_optional_json().await?;
    let signed_in = authentication::authenticate_again(state, app, &request).await?;
    let password = password.as_ref();
    let deleted = own_account::delete_account(state.call(app, &request.client), &signed_in, password).await;
    deleted.map_err(|error| account_problem(app, error))?;
    response::empty_object()
}

/// The errors of any call on the user's own account.
pub(super) fn account_problem(app: &App, error: OwnAccountError) -> Problem {
    match error {
        OwnAccountError::InvalidToken => authentication::invalid_token(app, true),
        OwnAccountError::EmailNotVerified => {
            Problem::new(ErrorCode::EmailNotVerified, "the email address must be verified first")
        }
        OwnAccountError::ReauthenticationRequired => Problem::unauthorized(
            ErrorCode::ReauthenticationRequired,
            "the call needs the password or a login in the last five minutes",
            authentication::challenge(app, None),
        ),
        OwnAccountError::InvalidCredentials => Problem::unauthorized(
            ErrorCode::InvalidCredentials,
            "the password is wrong",
            authentication::challenge(app, None),
        ),
        OwnAccountError::Common(error) => error.into(),
    }
}

// === impl UserResponse ===

impl From<user::User> for UserResponse {
    fn from(user: user::User) -> Self {
        Self {
            id: user.id.to_string(),
            local_id: user.id.to_string(),
            email: user.email.map(|email| email.as_str().to_owned()),
            email_verified: user.email_verified,
            name: user.name,
            created_at: user.created_at.unix_timestamp(),
            has_password: user.password_hash.is_some(),
        }
    }
}
