//! `POST /v1/{APPID}/token`: refresh (RFC 6749, 6).

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        refresh::{self, Fresh},
    },
    http::{
        Ports,
        error::{ErrorCode, FieldCode, FieldProblem, Problem},
        request::{Inbound, Text, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *token* takes.
    pub struct Request as "TokenRequest" {
        /// `refresh_token`, which is meant too where only a refresh token is sent.
        grant_type: Option<Text>,
        /// The refresh token.
        refresh_token: Option<Text>,
    }
}

/// What *token* answers (RFC 6749, 5.1).
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TokenResponse")]
pub struct Answer {
    /// A JWT (RFC 9068).
    pub access_token: String,
    /// The one to use next.
    pub refresh_token: String,
    pub token_type: &'static str,
    /// Seconds that `access_token` is valid.
    pub expires_in: i64,
    /// Unix seconds at which `access_token` ends.
    pub expires_at: i64,
    pub session_id: String,
    pub local_id: String,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    let Request { grant_type, refresh_token } = request.read_form().await?;
    match grant_type.as_ref().map(|Text(grant)| grant.as_str()) {
        None | Some("refresh_token") => {}
        Some(_) => return Err(Problem::new(ErrorCode::UnsupportedGrantType, "grant_type may be refresh_token")),
    }
    let Some(Text(token)) = refresh_token else {
        let missing = FieldProblem { field: "refresh_token", code: FieldCode::Missing, message: "is missing".into() };
        return Err(Problem::invalid_fields(vec![missing]));
    };
    let Fresh { user, tokens } = refresh::refresh(&state.stores, &state.env, app, &request.caller, &token).await?;
    response::json(&Answer {
        access_token: tokens.access_token,
        refresh_token: tokens.refresh_token,
        token_type: "Bearer",
        expires_in: tokens.expires_in,
        expires_at: tokens.expires_at,
        session_id: tokens.session_id.to_string(),
        local_id: user.to_string(),
    })
}
