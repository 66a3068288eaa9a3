//! The endpoints for the account of the logged-in user (docs/specification/accounts.md), and the parts that their
//! responses share.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    domain::{app::App, own_account::OwnAccountError, user::User},
    http::{
        authentication,
        error::{ErrorCode, Problem},
        openapi::examples,
    },
};

pub mod delete;
pub mod email;
pub mod password;
pub mod read;
pub mod rename;
pub mod userinfo;
pub mod userinfo_form;

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

// === impl UserResponse ===

impl UserResponse {
    fn example() -> Value {
        json!({
            "id": examples::USER_ID,
            "local_id": examples::USER_ID,
            "email": "ada@example.com",
            "email_verified": true,
            "name": "Ada Lovelace",
            "created_at": 1_762_339_600,
            "has_password": true,
        })
    }
}

impl From<User> for UserResponse {
    fn from(user: User) -> Self {
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

/// Returns the error response for a failed call on the user's own account.
pub fn account_problem(app: &App, error: OwnAccountError) -> Problem {
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
