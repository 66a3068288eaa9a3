//! `POST /v1/{APPID}/introspect` (RFC 7662), for the ServiceAccounts that the App lists.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::json;

use crate::{
    domain::{
        app::App,
        rights::Right,
        sessions::{self, ActiveToken, IntrospectError, TokenKind, UNKNOWN_KEY_RETRY},
        token::Audiences,
    },
    http::{
        Ports, authentication,
        error::Problem,
        openapi::{
            examples,
            operation::{Content, Operation},
        },
        request::{InboundRequest, RawText, request_body},
        response::{self, Response},
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
    pub email_verified: bool,
    pub name: &'a str,
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
         replaced.",
    )
    .requires_service_account()
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
    authentication::authenticate_caller(state, app, &request.headers).await?.require(Right::Introspect)?;
    let IntrospectRequest { token: RawText(token) } = request.read_json_or_form().await?;
    match sessions::introspect(state.call(app, &request.client), &token).await {
        Ok(active) => {
            let token = active.as_ref().map(|active| IntrospectedToken::new(app, active));
            response::json(&IntrospectResponse { active: token.is_some(), token })
        }
        Err(error @ IntrospectError::UnknownKey) => Err(Problem::unavailable(UNKNOWN_KEY_RETRY).with_cause(error)),
        Err(IntrospectError::Store(error)) => Err(error.into()),
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
            TokenKind::Access(claims) => {
                let jti = claims.jti.to_string();
                ("Bearer", Some(IntrospectedAccessToken { aud: &claims.aud, iat: claims.iat, exp: claims.exp, jti }))
            }
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
            email_verified: profile.email_verified,
            name: &profile.name,
            auth_time: session.auth_time.unix_timestamp(),
            amr: [session.amr.as_str()],
            access,
        }
    }
}
