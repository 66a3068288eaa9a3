//! `POST /v1/{APPID}/token`: refresh (RFC 6749, 6), and the exchange of the one-time code of a social login (RFC 6749,
//! 4.1.3). Requests from OpenID Connect clients are in `token/client.rs`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        call::Call,
        sessions::{self, RefreshedSession},
        social::{self, CodeExchangeError, CodeExchangeInput},
        token::Tokens,
        user::UserId,
    },
    http::{
        Ports, clients,
        error::{ErrorCode, FieldCode, FieldProblem, Problem},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, RawText, parse_fields, request_body},
        response::{self, Response},
    },
    state::State,
};

pub mod client;

request_body! {
    /// The request of *token*.
    pub struct TokenRequest as "TokenRequest" {
        /// `refresh_token` (the default) or `authorization_code`.
        grant_type: Option<RawText>,
        /// The refresh token.
        refresh_token: Option<RawText>,
        /// The `code` that a social login returned.
        code: Option<RawText>,
        /// The verifier of the `code_challenge` that was given to *redirect* (RFC 7636).
        code_verifier: Option<RawText>,
        /// If sent, it must be the address to which the code was returned.
        redirect_url: Option<RawText>,
    }
}

/// The response of *token* (RFC 6749, 5.1).
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TokenResponse")]
pub struct TokenResponse {
    /// A JWT (RFC 9068).
    pub access_token: String,
    /// The refresh token to use next.
    pub refresh_token: String,
    pub token_type: &'static str,
    /// Lifetime of `access_token` in seconds.
    pub expires_in: i64,
    /// When `access_token` expires, in Unix seconds.
    pub expires_at: i64,
    pub session_id: String,
    pub local_id: String,
}

pub fn operation() -> Operation {
    Operation::new(
        "Refresh the tokens of a session, or exchange the code of a social login",
        "Within the App's grace period, the same refresh token gets the same new refresh token again, so tabs can race and a \
         client can repeat a request if the response was lost. A refresh token that is older than the previous one \
         ends its session, because two parties hold it. An OpenID Connect client must send a form and authenticate.",
    )
    .request(
        Content::json_or_form::<TokenRequest>(
            json!({ "grant_type": "refresh_token", "refresh_token": examples::REFRESH_TOKEN }),
        )
        .with_form::<client::AnyTokenRequest>(),
    )
    .response(Content::json::<client::AnyTokenResponse>(json!({
        "access_token": examples::ACCESS_TOKEN,
        "refresh_token": examples::REFRESH_TOKEN,
        "token_type": "Bearer",
        "expires_in": 874,
        "expires_at": 1_762_340_474,
        "session_id": examples::SESSION_ID,
        "local_id": examples::USER_ID,
    })))
    .errors(&[
        ErrorCode::UnsupportedGrantType,
        ErrorCode::InvalidGrant,
        ErrorCode::InvalidScope,
        ErrorCode::InvalidClient,
        ErrorCode::RateLimited,
    ])
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    let body = request.read_sent_body().await?;
    if clients::is_from_client(app, &request.headers, &body.fields) {
        // The future is boxed, because it is larger than the future of a refresh.
        return Box::pin(client::handle(state, app, &request, body)).await;
    }
    let body: TokenRequest = parse_fields(body.fields)?;
    match body.grant_type.as_ref().map(|RawText(grant)| grant.as_str()) {
        None | Some("refresh_token") => handle_refresh(state.call(app, &request.client), body).await,
        // The future of an exchange is boxed, because it is larger than the future of a refresh, and rarely needed.
        Some("authorization_code") => Box::pin(handle_exchange(state.call(app, &request.client), body)).await,
        Some(_) => {
            let why = "grant_type must be refresh_token or authorization_code";
            Err(Problem::new(ErrorCode::UnsupportedGrantType, why))
        }
    }
}

async fn handle_refresh<S: Ports>(call: Call<'_, S>, body: TokenRequest) -> Result<Response, Problem> {
    let Some(RawText(token)) = body.refresh_token else { return Err(missing_fields(&["refresh_token"])) };
    let RefreshedSession { user, tokens } = sessions::refresh(call, &token).await?;
    token_response(user, tokens)
}

async fn handle_exchange<S: Ports>(call: Call<'_, S>, body: TokenRequest) -> Result<Response, Problem> {
    let (code, code_verifier) = match (&body.code, &body.code_verifier) {
        (Some(RawText(code)), Some(RawText(verifier))) => (code, verifier),
        (None, Some(_)) => return Err(missing_fields(&["code"])),
        (Some(_), None) => return Err(missing_fields(&["code_verifier"])),
        (None, None) => return Err(missing_fields(&["code", "code_verifier"])),
    };
    let redirect_url = body.redirect_url.as_ref().map(|RawText(url)| url.as_str());
    let exchange = CodeExchangeInput { code, code_verifier, redirect_url };
    match social::exchange_code(call, exchange).await {
        Ok(exchanged) => token_response(exchanged.user, exchanged.tokens),
        Err(CodeExchangeError::InvalidGrant) => {
            let why = "the code is unknown, expired or used, or the verifier or address does not match; start again";
            Err(Problem::new(ErrorCode::InvalidGrant, why))
        }
        Err(CodeExchangeError::Common(error)) => Err(error.into()),
    }
}

fn missing_fields(fields: &[&'static str]) -> Problem {
    let missing = |field: &&'static str| FieldProblem {
        field: (*field).into(),
        code: FieldCode::Missing,
        message: "is missing".into(),
    };
    Problem::invalid_fields(fields.iter().map(missing).collect())
}

fn token_response(user: UserId, tokens: Tokens) -> Result<Response, Problem> {
    response::json(&TokenResponse {
        access_token: tokens.access_token,
        refresh_token: tokens.refresh_token,
        token_type: "Bearer",
        expires_in: tokens.expires_in,
        expires_at: tokens.expires_at,
        session_id: tokens.session_id.to_string(),
        local_id: user.to_string(),
    })
}
