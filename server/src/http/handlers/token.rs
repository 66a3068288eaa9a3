//! `POST /v1/{APPID}/token`: refresh (RFC 6749, 6), and the exchange of a social login's code (4.1.3).

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        client::Caller,
        refresh::{self, Fresh},
        social::{self, Exchange, ExchangeError},
        token::Tokens,
        user::UserId,
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
        /// `refresh_token`, which is meant too where only a refresh token is sent, or `authorization_code`.
        grant_type: Option<Text>,
        /// The refresh token.
        refresh_token: Option<Text>,
        /// The `code` that came back from a social login.
        code: Option<Text>,
        /// What the `code_challenge` given to *redirect* was made from (RFC 7636).
        code_verifier: Option<Text>,
        /// Where it is sent, it must be the address that the code came to.
        redirect_url: Option<Text>,
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
    let body: Request = request.read_form().await?;
    match body.grant_type.as_ref().map(|Text(grant)| grant.as_str()) {
        None | Some("refresh_token") => refreshed(state, app, &request.caller, body).await,
        // Rarer than a refresh and larger.
        Some("authorization_code") => Box::pin(exchanged(state, app, body)).await,
        Some(_) => {
            let why = "grant_type may be refresh_token or authorization_code";
            Err(Problem::new(ErrorCode::UnsupportedGrantType, why))
        }
    }
}

async fn refreshed<S: Ports>(state: &State<S>, app: &App, caller: &Caller, body: Request) -> Result<Response, Problem> {
    let Some(Text(token)) = body.refresh_token else { return Err(missing(&["refresh_token"])) };
    let Fresh { user, tokens } = refresh::refresh(&state.stores, &state.env, app, caller, &token).await?;
    answer(user, tokens)
}

async fn exchanged<S: Ports>(state: &State<S>, app: &App, body: Request) -> Result<Response, Problem> {
    let (code, code_verifier) = match (&body.code, &body.code_verifier) {
        (Some(Text(code)), Some(Text(verifier))) => (code, verifier),
        (None, Some(_)) => return Err(missing(&["code"])),
        (Some(_), None) => return Err(missing(&["code_verifier"])),
        (None, None) => return Err(missing(&["code", "code_verifier"])),
    };
    let redirect_url = body.redirect_url.as_ref().map(|Text(url)| url.as_str());
    let exchange = Exchange { code, code_verifier, redirect_url };
    match social::exchange(&state.stores, &state.env, app, exchange).await {
        Ok(exchanged) => answer(exchanged.user, exchanged.tokens),
        Err(ExchangeError::InvalidGrant) => {
            let why = "the code is unknown, expired or used, or its verifier or address is another; begin again";
            Err(Problem::new(ErrorCode::InvalidGrant, why))
        }
        Err(ExchangeError::Trouble(trouble)) => Err(trouble.into()),
    }
}

fn missing(fields: &[&'static str]) -> Problem {
    let missing = |field: &&'static str| FieldProblem { field, code: FieldCode::Missing, message: "is missing".into() };
    Problem::invalid_fields(fields.iter().map(missing).collect())
}

fn answer(user: UserId, tokens: Tokens) -> Result<Response, Problem> {
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
