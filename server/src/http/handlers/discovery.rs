//! Discovery documents (RFC 8414; OpenID Connect Discovery 1.0) for those who check the tokens of an App.

use latchkey_crds::{rendered::SigningAlgorithm, types::IssuerUrl};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::app::App,
    http::{
        error::Problem,
        request::Inbound,
        response::{self, Response},
        routes::Route,
    },
};

/// What an App says of itself. Only what is served: no authorization endpoint, since this is no OpenID provider, and no
/// scopes.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AuthorizationServerMetadata")]
pub struct Metadata<'a> {
    /// `iss` of the App's tokens.
    pub issuer: &'a str,
    /// Where the keys are that its tokens are signed with.
    pub jwks_uri: String,
    pub token_endpoint: String,
    pub revocation_endpoint: String,
    pub introspection_endpoint: String,
    /// Required (RFC 8414, 2). `none` is the registered value for an endpoint that gives out neither code nor token.
    pub response_types_supported: [&'static str; 1],
    /// Said, since what RFC 8414, 2 takes to be served where it is not is not.
    pub grant_types_supported: [&'static str; 2],
    /// Of a social login that ends with a code (RFC 7636).
    pub code_challenge_methods_supported: [&'static str; 1],
    /// Clients have no secret: a refresh token proves itself.
    pub token_endpoint_auth_methods_supported: [&'static str; 1],
    pub revocation_endpoint_auth_methods_supported: [&'static str; 1],
    /// By the token of a ServiceAccount; RFC 8414, 2 lets access token types stand here.
    pub introspection_endpoint_auth_methods_supported: [&'static str; 1],
}

/// The same with what OpenID Connect Discovery 1.0, 3 requires beside it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OpenIdConfiguration")]
pub struct OpenIdMetadata<'a> {
    #[serde(flatten)]
    pub metadata: Metadata<'a>,
    pub userinfo_endpoint: String,
    pub subject_types_supported: [&'static str; 1],
    /// What tokens of the App may be signed with: the algorithms of its published keys.
    pub id_token_signing_alg_values_supported: Vec<SigningAlgorithm>,
    /// What access tokens and *userinfo* say.
    pub claims_supported: &'static [&'static str],
}

/// The contract's claims of an access token, and what *userinfo* has beyond them.
const CLAIMS: &[&str] = &[
    "iss",
    "aud",
    "sub",
    "client_id",
    "iat",
    "exp",
    "jti",
    "sid",
    "auth_time",
    "amr",
    "email",
    "email_verified",
    "name",
    "updated_at",
];

/// `GET /.well-known/oauth-authorization-server/{APPID}`, and the same behind the issuer.
pub fn authorization_server(base: &IssuerUrl, app: &App, request: &Inbound) -> Result<Response, Problem> {
    answer(&Metadata::of(base, app), request)
}

/// `GET /{APPID}/.well-known/openid-configuration`.
pub fn openid_configuration(base: &IssuerUrl, app: &App, request: &Inbound) -> Result<Response, Problem> {
    answer(&OpenIdMetadata::of(base, app), request)
}

fn answer<T: Serialize>(document: &T, request: &Inbound) -> Result<Response, Problem> {
    let bytes = serde_json::to_vec(document).map_err(|error| Problem::server_error().because(error))?;
    Ok(response::document(bytes, &request.headers))
}

// === impl Metadata ===

impl<'a> Metadata<'a> {
    fn of(base: &IssuerUrl, app: &'a App) -> Self {
        Self {
            issuer: app.doc.issuer.as_str(),
            jwks_uri: Route::Jwks.url(base, app.id()),
            token_endpoint: Route::Token.url(base, app.id()),
            revocation_endpoint: Route::Revoke.url(base, app.id()),
            introspection_endpoint: Route::Introspect.url(base, app.id()),
            response_types_supported: ["none"],
            grant_types_supported: ["authorization_code", "refresh_token"],
            code_challenge_methods_supported: ["S256"],
            token_endpoint_auth_methods_supported: ["none"],
            revocation_endpoint_auth_methods_supported: ["none"],
            introspection_endpoint_auth_methods_supported: ["Bearer"],
        }
    }
}

// === impl OpenIdMetadata ===

impl<'a> OpenIdMetadata<'a> {
    fn of(base: &IssuerUrl, app: &'a App) -> Self {
        let mut algorithms = Vec::new();
        for key in &app.doc.keys.signing {
            if !algorithms.contains(&key.algorithm) {
                algorithms.push(key.algorithm);
            }
        }
        Self {
            metadata: Metadata::of(base, app),
            userinfo_endpoint: Route::UserInfo.url(base, app.id()),
            subject_types_supported: ["public"],
            id_token_signing_alg_values_supported: algorithms,
            claims_supported: CLAIMS,
        }
    }
}
