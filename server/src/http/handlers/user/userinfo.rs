//! `GET /v1/{APPID}/userinfo`: the same account in claims of OpenID Connect.

use schemars::JsonSchema;
use serde::Serialize;

use super::problem;
use crate::{
    domain::{app::App, own_account},
    http::{
        Ports,
        error::Problem,
        guard,
        request::Inbound,
        response::{self, Response},
    },
    state::State,
};

/// The claims (OpenID Connect Core 1.0, 5.1 and 5.3.2). What there is not is left out.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserInfoResponse")]
pub struct Answer {
    pub sub: String,
    pub name: String,
    /// There only when it is verified, as in access tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<String>,
    pub email_verified: bool,
    /// Unix seconds.
    pub updated_at: i64,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: &Inbound) -> Result<Response, Problem> {
    let signed_in = guard::signed_in(state, app, &request.headers).await?;
    let user = own_account::read(&state.stores, app, &signed_in).await;
    let user = user.map_err(|refused| problem(app, refused))?;
    response::json(&Answer {
        sub: user.id.to_string(),
        email: user.email.filter(|_| user.email_verified).map(|email| email.as_str().to_owned()),
        email_verified: user.email_verified,
        name: user.name,
        updated_at: user.updated_at.unix_timestamp(),
    })
}
