//! Discovery documents (RFC 8414; OpenID Connect Discovery 1.0) for services that check the tokens of an App.

use latchkey_crds::types::IssuerUrl;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    domain::app::App,
    http::{
        error::Problem,
        request::InboundRequest,
        response::{self, Response},
        routes::{Route, RouteTable},
    },
};

pub mod authorization_server;
pub mod openid_configuration;

/// The metadata of an App. It lists only what is served. There are no scopes, and there is no authorization endpoint,
/// because this is not an OpenID provider.
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
    /// Included, because the default of RFC 8414, 2 includes grant types that are not supported.
    pub grant_types_supported: [&'static str; 2],
    /// For a social login that ends with a code (RFC 7636).
    pub code_challenge_methods_supported: [&'static str; 1],
    /// Clients have no secret: a refresh token needs no other proof.
    pub token_endpoint_auth_methods_supported: [&'static str; 1],
    pub revocation_endpoint_auth_methods_supported: [&'static str; 1],
    /// The token of a ServiceAccount. RFC 8414, 2 allows access token types here.
    pub introspection_endpoint_auth_methods_supported: [&'static str; 1],
}

fn metadata_response<T: Serialize>(document: &T, request: &InboundRequest) -> Result<Response, Problem> {
    let bytes = serde_json::to_vec(document).map_err(|error| Problem::server_error().with_cause(error))?;
    Ok(response::public_document(bytes, &request.headers))
}

// === impl AuthorizationServerMetadata ===

impl AuthorizationServerMetadata<'_> {
    fn example() -> Value {
        json!({
            "issuer": "https://auth.example.com/shop",
            "jwks_uri": "https://auth.example.com/shop/.well-known/jwks.json",
            "token_endpoint": "https://auth.example.com/v1/shop/token",
            "revocation_endpoint": "https://auth.example.com/v1/shop/revoke",
            "introspection_endpoint": "https://auth.example.com/v1/shop/introspect",
            "response_types_supported": ["none"],
            "grant_types_supported": ["authorization_code", "refresh_token"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
            "revocation_endpoint_auth_methods_supported": ["none"],
            "introspection_endpoint_auth_methods_supported": ["Bearer"],
        })
    }
}

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
