//! `GET /v1/{APPID}/userinfo`: the user's account as claims of OpenID Connect.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::account_problem;
use crate::{
    domain::{
        app::App,
        openid::{claims::UserClaims, userinfo::client_userinfo},
        own_account,
        token::{AccessClaims, verify_any_access_token},
        user::UserId,
    },
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

/// The claims (OpenID Connect Core 1.0, 5.1 and 5.3.2). A claim without a value is omitted. A client gets only the
/// claims of its scopes.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "UserInfoResponse")]
pub struct UserInfoResponse<'a> {
    pub sub: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// Only if it is verified, as in access tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email_verified: Option<bool>,
    /// Unix seconds. Not for clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updated_at: Option<i64>,
    /// Only for clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<&'a str>>,
    /// `true` if the user has more groups than the client accepts. There is no `groups` then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups_omitted: Option<bool>,
}

pub fn operation() -> Operation {
    Operation::new(
        "The user's claims (OpenID Connect Core 1.0, 5.3)",
        "The email address is included only if it is verified. Also accepts the access token of an OpenID Connect client; \
         the response then has the claims of the token's scopes.",
    )
    .requires_access_token()
    .response(Content::json::<UserInfoResponse<'static>>(example()))
}

pub(in crate::http::handlers::user) fn example() -> Value {
    json!({
        "sub": examples::USER_ID,
        "name": "Ada Lovelace",
        "email": "ada@example.com",
        "email_verified": true,
        "updated_at": 1_762_339_600,
    })
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    let token = authentication::bearer_token(app, &request.headers)?;
    userinfo_of_token(state, app, &request, token).await
}

/// The response to a request with this access token.
pub(in crate::http::handlers::user) async fn userinfo_of_token<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
    token: &str,
) -> Result<Response, Problem> {
    let of_client = if app.has_clients() { verify_any_access_token(app, state.env.now(), token) } else { None };
    if let Some(claims) = of_client.filter(|claims| claims.is_of_client(app)) {
        return userinfo_of_client(state, app, request, &claims).await;
    }
    let signed_in = authentication::authenticate_token(state, app, request, token).await?;
    let user = own_account::load_user(state.call(app, &request.client), &signed_in).await;
    let user = user.map_err(|error| account_problem(app, error))?;
    response::json(&UserInfoResponse {
        sub: user.id.to_string(),
        email: user.email.as_ref().filter(|_| user.email_verified).map(|email| email.as_str()),
        email_verified: Some(user.email_verified),
        name: Some(&user.name),
        updated_at: Some(user.updated_at.unix_timestamp()),
        groups: None,
        groups_omitted: None,
    })
}

async fn userinfo_of_client<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
    token: &AccessClaims,
) -> Result<Response, Problem> {
    let found = client_userinfo(state.call(app, &request.client), token).await?;
    let found = found.ok_or_else(|| authentication::invalid_token(app, true))?;
    response::json(&UserInfoResponse::of_client(found.user(), found.claims()))
}

// === impl UserInfoResponse ===

impl<'a> UserInfoResponse<'a> {
    fn of_client(user: UserId, claims: UserClaims<'a>) -> Self {
        let UserClaims { name, email, email_verified, groups, groups_omitted } = claims;
        Self { sub: user.to_string(), name, email, email_verified, updated_at: None, groups, groups_omitted }
    }
}
