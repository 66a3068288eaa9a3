//! `GET`, `PATCH` and `DELETE /v1/{APPID}/user`: the account of who is signed in.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        own_account::{self, Refused},
        password::Password,
        user::{self, Name},
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

pub mod email;
pub mod password;
pub mod userinfo;

request_body! {
    /// What renaming takes.
    pub struct Renaming as "RenameRequest" {
        /// The new name; white space at its ends is taken away.
        name: Name,
    }
}

request_body! {
    /// What a deletion takes.
    pub struct Deletion as "DeleteUserRequest" {
        /// The password; without it a login in the last five minutes must do.
        password: Option<Password>,
    }
}

/// The account.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserResponse")]
pub struct Answer {
    /// The same as `local_id` and `sub`.
    pub id: String,
    pub local_id: String,
    /// The address, verified or not; null where there is none.
    pub email: Option<String>,
    pub email_verified: bool,
    pub name: String,
    /// Unix seconds.
    pub created_at: i64,
    /// Whether a password is set.
    pub has_password: bool,
}

/// `GET user`.
pub async fn read<S: Ports>(state: &State<S>, app: &App, request: &Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    let user = own_account::read(&state.stores, app, &signed_in).await;
    response::json(&Answer::from(user.map_err(|refused| problem(app, refused))?))
}

/// `PATCH user`.
pub async fn rename<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    let Renaming { name } = request.read().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    let user = own_account::rename(&state.stores, &state.env, app, &request.caller, &signed_in, &name).await;
    response::json(&Answer::from(user.map_err(|refused| problem(app, refused))?))
}

/// `DELETE user`.
pub async fn delete<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::signed_in(state, app, &request.headers).await?;
    let Deletion { password } = request.read_optional().await?;
    let signed_in = guard::signed_in_still(state, app, &request.headers).await?;
    let password = password.as_ref();
    let deleted = own_account::delete(&state.stores, &state.env, app, &request.caller, &signed_in, password).await;
    deleted.map_err(|refused| problem(app, refused))?;
    response::nothing()
}

/// What may come of any call on the own account.
pub(super) fn problem(app: &App, refused: Refused) -> Problem {
    match refused {
        Refused::InvalidToken => guard::invalid_token(app, true),
        Refused::EmailNotVerified => Problem::new(ErrorCode::EmailNotVerified, "the address must be verified first"),
        Refused::ReauthenticationRequired => Problem::unauthorized(
            ErrorCode::ReauthenticationRequired,
            "the call needs the password, or a login in the last five minutes",
            guard::challenge(app, None),
        ),
        Refused::InvalidCredentials => {
            Problem::unauthorized(ErrorCode::InvalidCredentials, "the password is wrong", guard::challenge(app, None))
        }
        Refused::Trouble(trouble) => trouble.into(),
    }
}

// === impl Answer ===

impl From<user::User> for Answer {
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
