//! Discovery documents (RFC 8414; OpenID Connect Discovery 1.0) for services that check the tokens of an App.

use latchkey_crds::{rendered::SigningAlgorithm, types::IssuerUrl};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    domain::app::App,
    http::{
        error::Problem,
        request::InboundRequest,
        response::{self, Response},
        routes::Route,
    },
};

/// The metadata of an App. It lists only what is served: no scopes and, because this is not an OpenID provider, no
/// authorization endpoint.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AuthorizationServerMetadata")]
pub struct AuthorizationServerMetadata<'a> {
    /// `iss` of the App's tokens.
    pub issuer: &'a str,
    /// The address of the keys that sign its tokens.
    pub jwks_uri: String,
    pub token_endpoint: String,
    pub revocation_endpoint: String,
    pub introspection_endpoint: String,
    /// Required (RFC 8414, 2). `none` is the registered value for an endpoint that issues neither code nor token.
    pub response_types_supported: [&'static str; 1],
    /// Stated, because the default of RFC 8414, 2 includes grant types that are not supported.
    pub grant_types_supported: [&'static str; 2],
    /// For a social login that ends with a code (RFC 7636).
    pub code_challenge_methods_supported: [&'static str; 1],
    /// Clients have no secret: a refresh token is its own proof.
    pub token_endpoint_auth_methods_supported: [&'static str; 1],
    pub revocation_endpoint_auth_methods_supported: [&'static str; 1],
    /// The token of a ServiceAccount. RFC 8414, 2 allows access token types here.
    pub introspection_endpoint_auth_methods_supported: [&'static str; 1],
}

/// The same, with the members that OpenID Connect Discovery 1.0, 3 requires in addition.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OpenIdConfiguration")]
pub struct OpenIdConfiguration<'a> {
    #[serde(flatten)]
    pub metadata: AuthorizationServerMetadata<'a>,
    pub userinfo_endpoint: String,
    pub subject_types_supported: [&'static str; 1],
    /// The algorithms of the App's published keys, which can sign its tokens.
    pub id_token_signing_alg_values_supported: Vec<SigningAlgorithm>,
    /// The claims of access tokens and *userinfo*.
    pub claims_supported: &'static [&'static str],
}

/// The claims of an access token (specification: Sessions and tokens, Access tokens), and those that only *userinfo*
/// has.
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

/// `GET /.well-known/oauth-authorization-server/{APPID}`, and the same path after the issuer.
pub fn authorization_server(base: &IssuerUrl, app: &App, request: &InboundRequest) -> Result<Response, Problem> {
    metadata_response(&AuthorizationServerMetadata::for_app(base, app), request)
}

/// `GET /{APPID}/.well-known/openid-configuration`.
pub fn openid_configuration(base: &IssuerUrl, app: &App, request: &InboundRequest) -> Result<Response, Problem> {
    metadata_response(&OpenIdConfiguration::for_app(base, app), request)
}

fn metadata_response<T: Serialize>(document: &T, request: &InboundRequest) -> Result<Response, Problem> {
    let bytes = serde_json::to_vec(document).map_err(|error| Problem::server_error().with_cause(error))?;
    Ok(response::public_document(bytes, &request.headers))
}

// === impl AuthorizationServerMetadata ===

impl<'a> AuthorizationServerMetadata<'a> {
    fn for_app(base: &IssuerUrl, app: &'a App) -> Self {
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

// === impl OpenIdConfiguration ===

impl<'a> OpenIdConfiguration<'a> {
    fn for_app(base: &IssuerUrl, app: &'a App) -> Self {
        let mut algorithms = Vec::new();
        for key in &app.doc.keys.signing {
            if !algorithms.contains(&key.algorithm) {
                algorithms.push(key.algorithm);
            }
        }
        Self {
            metadata: AuthorizationServerMetadata::for_app(base, app),
            userinfo_endpoint: Route::UserInfo.url(base, app.id()),
            subject_types_supported: ["public"],
            id_token_signing_alg_values_supported: algorithms,
            claims_supported: CLAIMS,
        }
    }
}
