//! Discovery documents (RFC 8414; OpenID Connect Discovery 1.0) for services that check the tokens of an App.

use latchkey_crds::types::IssuerUrl;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    domain::{
        app::App,
        openid::{ACR, authenticate::AuthenticationMethod, scope::Scopes},
        pages::PagesUrl,
    },
    http::{
        error::Problem,
        request::InboundRequest,
        response::{self, Response},
        routes::{Route, RouteTable},
    },
    state::State,
};

pub mod authorization_server;
pub mod openid_configuration;

/// The metadata of an App. It lists only supported features. Without clients it has no scopes and no authorization
/// endpoint, because the App is not an OpenID provider.
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
    pub response_types_supported: Vec<&'static str>,
    /// Included, because the default of RFC 8414, 2 includes grant types that are not supported.
    pub grant_types_supported: [&'static str; 2],
    /// For a social login that ends with a code (RFC 7636).
    pub code_challenge_methods_supported: [&'static str; 1],
    /// `none`: front ends of the App have no secret. A refresh token needs no other proof.
    pub token_endpoint_auth_methods_supported: Vec<&'static str>,
    pub revocation_endpoint_auth_methods_supported: Vec<&'static str>,
    /// `Bearer`: the caller sends the token of a ServiceAccount. Section 2 of RFC 8414 allows access token types here,
    /// and `Bearer` is one.
    pub introspection_endpoint_auth_methods_supported: Vec<&'static str>,
    /// Only if the App is an OpenID provider.
    #[serde(flatten)]
    pub provider: Option<ProviderMetadata>,
}

/// The additional metadata of an OpenID provider, that is, an App with clients (OpenID Connect Discovery 1.0, 3; RFC
/// 9126, 5; RFC 9207, 3).
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ProviderMetadata")]
pub struct ProviderMetadata {
    pub authorization_endpoint: String,
    pub end_session_endpoint: String,
    pub pushed_authorization_request_endpoint: String,
    pub scopes_supported: [&'static str; 5],
    pub response_modes_supported: [&'static str; 2],
    pub prompt_values_supported: [&'static str; 5],
    pub token_endpoint_auth_signing_alg_values_supported: [&'static str; 4],
    pub revocation_endpoint_auth_signing_alg_values_supported: [&'static str; 4],
    pub introspection_endpoint_auth_signing_alg_values_supported: [&'static str; 4],
    pub acr_values_supported: [&'static str; 1],
    pub claim_types_supported: [&'static str; 1],
    pub claims_parameter_supported: bool,
    pub request_parameter_supported: bool,
    pub request_uri_parameter_supported: bool,
    pub authorization_response_iss_parameter_supported: bool,
}

/// The algorithms with which a client can sign an assertion (`private_key_jwt`).
const ASSERTION_ALGORITHMS: [&str; 4] = ["RS256", "PS256", "ES256", "EdDSA"];

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
    fn for_app<S>(state: &State<S>, app: &'a App) -> Self {
        let base = &state.settings.base_url;
        let metadata = Self::without_clients(base, app);
        if !app.has_clients() {
            return metadata;
        }
        let pages = PagesUrl::new(app, state.apps.held_pages_host(app));
        let methods = AuthenticationMethod::ALL.map(AuthenticationMethod::as_str).to_vec();
        let with_secret = methods.iter().copied().filter(|method| *method != AuthenticationMethod::None.as_str());
        Self {
            response_types_supported: vec!["code"],
            introspection_endpoint_auth_methods_supported: with_secret.chain(["Bearer"]).collect(),
            revocation_endpoint_auth_methods_supported: methods.clone(),
            token_endpoint_auth_methods_supported: methods,
            provider: Some(ProviderMetadata {
                authorization_endpoint: pages.page("authorize"),
                end_session_endpoint: pages.page("logout"),
                pushed_authorization_request_endpoint: Route::Par.url(base, app.id()),
                scopes_supported: Scopes::all_names(),
                response_modes_supported: ["query", "form_post"],
                prompt_values_supported: ["none", "login", "consent", "select_account", "create"],
                token_endpoint_auth_signing_alg_values_supported: ASSERTION_ALGORITHMS,
                revocation_endpoint_auth_signing_alg_values_supported: ASSERTION_ALGORITHMS,
                introspection_endpoint_auth_signing_alg_values_supported: ASSERTION_ALGORITHMS,
                acr_values_supported: [ACR],
                claim_types_supported: ["normal"],
                claims_parameter_supported: true,
                request_parameter_supported: false,
                request_uri_parameter_supported: false,
                authorization_response_iss_parameter_supported: true,
            }),
            ..metadata
        }
    }

    fn without_clients(base: &IssuerUrl, app: &'a App) -> Self {
        Self {
            issuer: app.doc.issuer.as_str(),
            jwks_uri: Route::Jwks.url(base, app.id()),
            token_endpoint: Route::Token.url(base, app.id()),
            revocation_endpoint: Route::Revoke.url(base, app.id()),
            introspection_endpoint: Route::Introspect.url(base, app.id()),
            response_types_supported: vec!["none"],
            grant_types_supported: ["authorization_code", "refresh_token"],
            code_challenge_methods_supported: ["S256"],
            token_endpoint_auth_methods_supported: vec!["none"],
            revocation_endpoint_auth_methods_supported: vec!["none"],
            introspection_endpoint_auth_methods_supported: vec!["Bearer"],
            provider: None,
        }
    }
}
