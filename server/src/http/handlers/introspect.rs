//! `POST /v1/{APPID}/introspect` (RFC 7662), for ServiceAccounts with a role that can introspect, and for clients with
//! a secret or a key.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        openid::{
            ACR,
            authenticate::RequestCount,
            claims::UserClaims,
            introspect::{ActiveClientToken, ClientTokenKind, introspect_admitted, introspect_own},
        },
        rights::Right,
        sessions::{self, ActiveToken, IntrospectError, TokenKind, UNKNOWN_KEY_RETRY},
        token::{AccessClaims, Audiences},
    },
    http::{
        Ports,
        authentication::{self, Bearer},
        clients,
        error::{ErrorCode, Problem},
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, RawText, SentBody, parse_fields, request_body},
        response::{self, Response},
        routes::Route,
    },
    state::State,
};

request_body! {
    /// The request of *introspect*. A `token_type_hint` is not needed.
    pub struct IntrospectRequest as "IntrospectRequest" {
        /// A refresh token or an access token.
        token: RawText,
    }
}

/// The response of *introspect*. If `active` is false, it has no other field.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IntrospectResponse")]
pub struct IntrospectResponse<'a> {
    /// Whether the App issued the token, it is valid, and its session is live. A replaced refresh token is not active.
    pub active: bool,
    #[serde(flatten)]
    pub token: Option<IntrospectedToken<'a>>,
}

/// The claims of an active token. Name and email address are the current ones.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IntrospectedToken")]
pub struct IntrospectedToken<'a> {
    /// `Bearer` for an access token, `refresh_token` for a refresh token.
    pub token_type: &'static str,
    pub iss: &'a str,
    pub client_id: &'a str,
    /// The user: `local_id`.
    pub sub: String,
    /// The session.
    pub sid: String,
    /// Only if the email address is verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<&'a str>,
    /// For the token of a client, `email_verified` and `name` are present only if the token has the scopes for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email_verified: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// The scopes of the token, only if it is the token of a client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<String>,
    /// The authentication context class, only in the token of a client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acr: Option<&'static str>,
    /// When the user logged in, in Unix seconds.
    pub auth_time: i64,
    /// The authentication method (RFC 8176).
    pub amr: [&'static str; 1],
    #[serde(flatten)]
    pub access: Option<IntrospectedAccessToken<'a>>,
}

/// The claims that only an access token has.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IntrospectedAccessToken")]
pub struct IntrospectedAccessToken<'a> {
    #[schemars(schema_with = "audience_schema")]
    pub aud: &'a Audiences,
    /// Unix seconds.
    pub iat: i64,
    /// Unix seconds.
    pub exp: i64,
    pub jti: String,
}

pub fn operation() -> Operation {
    Operation::new(
        "The current state of a token (RFC 7662)",
        "For the ServiceAccounts to which the App gives a role that can introspect. For anything but a token of this \
         App with a live session, the response is only `{\"active\": false}`; this includes a refresh token that was \
         replaced. Of the tokens of OpenID Connect clients, only access tokens with an audience of the App are active. \
         A client with a secret or a key can also call this, with a form, for its own tokens.",
    )
    .requires_service_account()
    .errors(&[ErrorCode::RateLimited])
    .request(Content::json_or_form::<IntrospectRequest>(json!({ "token": examples::ACCESS_TOKEN })))
    .response(Content::json::<IntrospectResponse<'static>>(json!({
        "active": true,
        "token_type": "Bearer",
        "iss": "https://auth.example.com/shop",
        "client_id": "shop",
        "sub": examples::USER_ID,
        "sid": examples::SESSION_ID,
        "email": "ada@example.com",
        "email_verified": true,
        "name": "Ada Lovelace",
        "auth_time": 1_762_339_600,
        "amr": ["pwd"],
        "aud": "shop",
        "iat": 1_762_339_600,
        "exp": 1_762_340_474,
        "jti": "019a8452-a0b1-7c2d-8e3f-405162738495",
    })))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: InboundRequest) -> Result<Response, Problem> {
    // A client has no Bearer token. Its credentials can be in the form, so the form is read before the authentication.
    if app.has_clients() && Bearer::from_headers(&request.headers) == Bearer::None {
        let body = request.read_sent_body().await?;
        if clients::is_from_client(app, &request.headers, &body.fields) {
            return Box::pin(handle_client(state, app, &request, body)).await;
        }
    }
    authentication::authenticate_caller(state, app, &request.headers).await?.require(Right::Introspect)?;
    let IntrospectRequest { token: RawText(token) } = parse_fields(request.read_sent_body().await?.fields)?;
    let call = state.call(app, &request.client);
    if let Some(active) = sessions::introspect(call, &token).await.map_err(introspect_problem)? {
        let token = Some(IntrospectedToken::new(app, &active));
        return response::json(&IntrospectResponse { active: true, token });
    }
    client_token_response(app, introspect_admitted(call, &token).await)
}

async fn handle_client<S: Ports>(
    state: &State<S>,
    app: &App,
    request: &InboundRequest,
    body: SentBody,
) -> Result<Response, Problem> {
    let count = RequestCount::NotCounted;
    let (client, form) = clients::authenticate(state, app, request, body, Route::Introspect, count).await?;
    if client.is_public() {
        // A public client has no secret, so anybody could introspect with its `client_id`.
        return Err(clients::invalid_client(app, false));
    }
    let token = form.require("token")?;
    client_token_response(app, introspect_own(state.call(app, &request.client), client, token).await)
}

fn client_token_response(
    app: &App,
    active: Result<Option<ActiveClientToken<'_>>, IntrospectError>,
) -> Result<Response, Problem> {
    let active = active.map_err(introspect_problem)?;
    let token = active.as_ref().map(|active| IntrospectedToken::of_client(app, active));
    response::json(&IntrospectResponse { active: token.is_some(), token })
}

fn introspect_problem(error: IntrospectError) -> Problem {
    match error {
        IntrospectError::UnknownKey => Problem::unavailable(UNKNOWN_KEY_RETRY).with_cause(error),
        IntrospectError::Store(error) => error.into(),
    }
}

fn audience_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
}

// === impl IntrospectedToken ===

impl<'a> IntrospectedToken<'a> {
    fn new(app: &'a App, active: &'a ActiveToken) -> Self {
        let (session, profile) = (&active.live_session.session, &active.live_session.profile);
        let (token_type, access) = match &active.kind {
            TokenKind::Access(claims) => ("Bearer", Some(IntrospectedAccessToken::new(claims))),
            // Not `Bearer`: a refresh token can only be used for the next refresh.
            TokenKind::Refresh => ("refresh_token", None),
        };
        Self {
            token_type,
            iss: app.doc.issuer.as_str(),
            client_id: app.id().as_str(),
            sub: session.user.to_string(),
            sid: session.id.to_string(),
            email: profile.verified_email(),
            email_verified: Some(profile.email_verified),
            name: Some(&profile.name),
            scope: None,
            acr: None,
            auth_time: session.auth_time.unix_timestamp(),
            amr: [session.amr.as_str()],
            access,
        }
    }

    fn of_client(app: &'a App, active: &'a ActiveClientToken<'_>) -> Self {
        let (session, profile) = (&active.session.session, &active.session.profile);
        let (token_type, access) = match &active.kind {
            ClientTokenKind::Access(claims) => ("Bearer", Some(IntrospectedAccessToken::new(claims))),
            ClientTokenKind::Refresh => ("refresh_token", None),
        };
        let user = UserClaims::new(active.client, profile, &[], active.claims());
        Self {
            token_type,
            iss: app.doc.issuer.as_str(),
            client_id: active.client.client_id.as_str(),
            sub: session.user.to_string(),
            sid: session.id.to_string(),
            email: user.email,
            email_verified: user.email_verified,
            name: user.name,
            scope: Some(active.scopes.to_string()),
            acr: Some(ACR),
            auth_time: session.auth_time.unix_timestamp(),
            amr: [session.amr.as_str()],
            access,
        }
    }
}

// === impl IntrospectedAccessToken ===

impl<'a> IntrospectedAccessToken<'a> {
    fn new(claims: &'a AccessClaims) -> Self {
        Self { aud: &claims.aud, iat: claims.iat, exp: claims.exp, jti: claims.jti.to_string() }
    }
}
