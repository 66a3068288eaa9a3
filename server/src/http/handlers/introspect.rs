//! `POST /v1/{APPID}/introspect` (RFC 7662), for the ServiceAccounts that the App lists.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;

use crate::{
    domain::{
        app::App,
        introspection::{self, Active, IntrospectError, Kind},
        refresh::UNKNOWN_KEY_RETRY,
        token::Audiences,
    },
    http::{
        Ports,
        error::Problem,
        guard,
        request::{Inbound, Text, request_body},
        response::{self, Response},
    },
    state::State,
};

request_body! {
    /// What *introspect* takes. A `token_type_hint` is not needed.
    pub struct Request as "IntrospectRequest" {
        /// A refresh token or an access token.
        token: Text,
    }
}

/// What *introspect* answers: `active` alone where it is false.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IntrospectResponse")]
pub struct Answer<'a> {
    /// Whether the token would be taken now: it is the App's, valid, and its session is live.
    pub active: bool,
    #[serde(flatten)]
    pub token: Option<Told<'a>>,
}

/// What is told of a token that is active. Name and address are those of now.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IntrospectedToken")]
pub struct Told<'a> {
    /// `Bearer` for an access token, `refresh_token` for a refresh token.
    pub token_type: &'static str,
    pub iss: &'a str,
    pub client_id: &'a str,
    /// The user: `local_id`.
    pub sub: String,
    /// The session.
    pub sid: String,
    /// Only of a verified address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub email: Option<&'a str>,
    pub email_verified: bool,
    pub name: &'a str,
    /// When the user logged in, in Unix seconds.
    pub auth_time: i64,
    /// How (RFC 8176).
    pub amr: [&'static str; 1],
    #[serde(flatten)]
    pub access: Option<Access<'a>>,
}

/// What only an access token has.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "IntrospectedAccessToken")]
pub struct Access<'a> {
    #[schemars(schema_with = "audiences")]
    pub aud: &'a Audiences,
    /// Unix seconds.
    pub iat: i64,
    /// Unix seconds.
    pub exp: i64,
    pub jti: String,
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, mut request: Inbound) -> Result<Response, Problem> {
    guard::administrator(state, app, &request.headers).await?;
    let Request { token: Text(token) } = request.read_form().await?;
    match introspection::introspect(&state.stores, &state.env, app, &token).await {
        Ok(active) => {
            let token = active.as_ref().map(|active| Told::of(app, active));
            response::json(&Answer { active: token.is_some(), token })
        }
        Err(error @ IntrospectError::UnknownKey) => Err(Problem::unavailable(UNKNOWN_KEY_RETRY).because(error)),
        Err(IntrospectError::Store(error)) => Err(error.into()),
    }
}

fn audiences(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
}

// === impl Told ===

impl<'a> Told<'a> {
    fn of(app: &'a App, active: &'a Active) -> Self {
        let (session, profile) = (&active.live.session, &active.live.profile);
        let (token_type, access) = match &active.kind {
            Kind::Access(claims) => {
                let jti = claims.jti.to_string();
                ("Bearer", Some(Access { aud: &claims.aud, iat: claims.iat, exp: claims.exp, jti }))
            }
            // Not `Bearer`: it opens nothing but the next refresh.
            Kind::Refresh => ("refresh_token", None),
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
