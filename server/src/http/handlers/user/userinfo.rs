//! `GET /v1/{APPID}/userinfo`: the user's account as claims of OpenID Connect.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::account_problem;
use crate::{
    domain::{app::App, own_account},
    http::{
        Ports, authentication,
        error::Problem,
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::InboundRequest,
        response::{self, Response},
    },
    state::State,
};

/// The claims (OpenID Connect Core 1.0, 5.1 and 5.3.2). A claim without a value is omitted.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserInfoResponse")]
pub struct UserInfoResponse {
    pub sub: String,
    pub name: String,
    /// Only if it is verified, as in access tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<String>,
    pub email_verified: bool,
    /// Unix seconds.
    pub updated_at: i64,
}

pub fn operation() -> Operation {
    Operation::new(
        "The user's claims (OpenID Connect Core 1.0, 5.3)",
        "The email address is included only if it is verified.",
    )
    .requires_access_token()
    .response(Content::json::<UserInfoResponse>(json!({
        "sub": examples::USER_ID,
        "name": "Ada Lovelace",
        "email": "ada@example.com",
        "email_verified": true,
        "updated_at": 1_762_339_600,
    })))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let signed_in = authentication::authenticate(state, app, &request).await?;
    let user = own_account::load_user(state.call(app, &request.client), &signed_in).await;
    let user = user.map_err(|error| account_problem(app, error))?;
    response::json(&UserInfoResponse {
        sub: user.id.to_string(),
        email: user.email.filter(|_| user.email_verified).map(|email| email.as_str().to_owned()),
        email_verified: user.email_verified,
        name: user.name,
        updated_at: user.updated_at.unix_timestamp(),
    })
}
