//! Token requests from OpenID Connect clients (OpenID Connect Core 1.0, 3.1.3 and 12).

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;

use super::{TokenRequest, TokenResponse};
use crate::{
    client_metrics::{ClientGrantType, ClientOutcome},
    domain::{
        app::App,
        call::Call,
        openid::{
            authenticate::RequestCount,
            client::OpenIdClient,
            exchange::{ClientExchange, ClientExchangeError, exchange_client_code},
            refresh::{ClientRefreshError, refresh_client},
            tokens::ClientTokens,
        },
        sessions::UNKNOWN_KEY_RETRY,
    },
    http::{
        Ports,
        clients::{self, ClientForm},
        error::{ErrorCode, Problem},
        request::{InboundRequest, RawText, SentBody, request_body},
        response::{self, Response},
        routes::Route,
    },
    state::State,
};

request_body! {
    /// The form of an OpenID Connect client. The type only describes the form for the OpenAPI document: the handler
    /// parses the form itself, because its errors are those of RFC 6749, 5.2.
    pub struct ClientTokenRequest as "ClientTokenRequest" {
        /// `authorization_code` or `refresh_token`.
        grant_type: RawText,
        /// The code from the authorization response.
        code: Option<RawText>,
        /// The redirect URL of the authorization request. Required with `code`.
        redirect_uri: Option<RawText>,
        /// The verifier of the `code_challenge` of the authorization request (RFC 7636).
        code_verifier: Option<RawText>,
        /// The refresh token.
        refresh_token: Option<RawText>,
        /// At a refresh: the scopes of the new access token, separated by spaces. Default: all that were granted.
        scope: Option<RawText>,
        /// The client, unless Basic or the assertion names it.
        client_id: Option<RawText>,
        /// For `client_secret_post`.
        client_secret: Option<RawText>,
        /// For `private_key_jwt` (RFC 7523).
        client_assertion: Option<RawText>,
        /// `urn:ietf:params:oauth:client-assertion-type:jwt-bearer`.
        client_assertion_type: Option<RawText>,
    }
}

/// The tokens of an OpenID Connect client (OpenID Connect Core 1.0, 3.1.3.3).
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ClientTokenResponse")]
pub struct ClientTokenResponse {
    /// A JWT (RFC 9068) with the issuer as an audience.
    pub access_token: String,
    pub token_type: &'static str,
    /// Lifetime of `access_token` in seconds.
    pub expires_in: i64,
    pub id_token: String,
    /// The scopes of `access_token`.
    pub scope: String,
    /// The refresh token to use next: with the scope `offline_access`, and for public clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refresh_token: Option<String>,
}

/// The schema of a token request, from a front end of the App or from a client.
pub struct AnyTokenRequest;

/// The schema of the response to a front end of the App or to a client.
pub struct AnyTokenResponse;

/// Handles a request from a client. The body must be a form.
pub async fn handle<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
    body: SentBody,
) -> Result<Response, Problem> {
    let (client, form) = clients::authenticate(state, app, request, body, Route::Token, RequestCount::Counted).await?;
    let grant = ClientGrantType::from_name(form.require("grant_type")?).ok_or_else(|| {
        let why = "grant_type must be authorization_code or refresh_token";
        Problem::new(ErrorCode::UnsupportedGrantType, why)
    })?;
    let call = state.call(app, &request.client);
    let tokens = match grant {
        ClientGrantType::AuthorizationCode => exchange(call, client, &form).await,
        ClientGrantType::RefreshToken => refresh(call, client, &form).await,
    };
    let outcome = match &tokens {
        Ok(_) => ClientOutcome::Succeeded,
        Err(problem) if problem.code == ErrorCode::RateLimited => ClientOutcome::Limited,
        Err(problem) if problem.status.is_server_error() => ClientOutcome::Failed,
        Err(_) => ClientOutcome::Refused,
    };
    state.client_metrics.count_token_request(grant, outcome);
    let tokens = tokens?;
    response::json(&ClientTokenResponse {
        access_token: tokens.access_token,
        token_type: "Bearer",
        expires_in: tokens.expires_in,
        id_token: tokens.id_token,
        scope: tokens.scope.to_string(),
        refresh_token: tokens.refresh_token,
    })
}

async fn exchange<S: Ports>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    form: &ClientForm,
) -> Result<ClientTokens, Problem> {
    let exchange = ClientExchange {
        code: form.require("code")?,
        redirect_uri: form.require("redirect_uri")?,
        code_verifier: form.get("code_verifier"),
    };
    exchange_client_code(call, client, exchange).await.map_err(|error| match error {
        ClientExchangeError::InvalidGrant => {
            let why = "the code is unknown, expired or used, or it was issued for another client, redirect_uri or \
                       code_verifier; start again";
            Problem::new(ErrorCode::InvalidGrant, why)
        }
        ClientExchangeError::IdToken(error) => error.into(),
        ClientExchangeError::Common(error) => error.into(),
    })
}

async fn refresh<S: Ports>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    form: &ClientForm,
) -> Result<ClientTokens, Problem> {
    let refreshed = refresh_client(call, client, form.require("refresh_token")?, form.get("scope")).await;
    refreshed.map_err(|error| match error {
        ClientRefreshError::InvalidGrant => {
            let why = "the refresh token is unknown, expired, revoked, used or another client's; log in again";
            Problem::new(ErrorCode::InvalidGrant, why)
        }
        ClientRefreshError::InvalidScope => {
            Problem::new(ErrorCode::InvalidScope, "scope has a scope that the refresh token does not have")
        }
        ClientRefreshError::UnknownKey => Problem::unavailable(UNKNOWN_KEY_RETRY).with_cause(error),
        ClientRefreshError::IdToken(error) => error.into(),
        ClientRefreshError::Common(error) => error.into(),
    })
}

impl JsonSchema for AnyTokenRequest {
    fn schema_name() -> Cow<'static, str> {
        "AnyTokenRequest".into()
    }

    fn json_schema(schemas: &mut SchemaGenerator) -> Schema {
        let any = [schemas.subschema_for::<TokenRequest>(), schemas.subschema_for::<ClientTokenRequest>()];
        json_schema!({ "anyOf": any })
    }
}

impl JsonSchema for AnyTokenResponse {
    fn schema_name() -> Cow<'static, str> {
        "AnyTokenResponse".into()
    }

    fn json_schema(schemas: &mut SchemaGenerator) -> Schema {
        let any = [schemas.subschema_for::<TokenResponse>(), schemas.subschema_for::<ClientTokenResponse>()];
        json_schema!({ "anyOf": any })
    }
}
