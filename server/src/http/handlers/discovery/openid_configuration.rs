//! `GET /{APPID}/.well-known/openid-configuration` (OpenID Connect Discovery 1.0).

use latchkey_crds::rendered::SigningAlgorithm;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use super::{AuthorizationServerMetadata, metadata_response};
use crate::{
    domain::app::App,
    http::{
        Ports,
        error::Problem,
        openapi::operation::{Content, Operation},
        request::InboundRequest,
        response::Response,
        routes::{Route, RouteTable},
    },
    state::State,
};

/// The metadata of RFC 8414, with the members that OpenID Connect Discovery 1.0, 3 requires in addition.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "OpenIdConfiguration")]
pub struct OpenIdConfiguration<'a> {
    #[serde(flatten)]
    pub metadata: AuthorizationServerMetadata<'a>,
    pub userinfo_endpoint: String,
    pub subject_types_supported: [&'static str; 1],
    /// The algorithms of the keys in the App's JWKS or, with clients, those that a client can choose.
    pub id_token_signing_alg_values_supported: Vec<SigningAlgorithm>,
    /// The claims of access tokens and *userinfo*.
    pub claims_supported: &'static [&'static str],
}

/// The claims of an access token (specification: Sessions and tokens, Access tokens), and the claims that only
/// *userinfo* has.
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

/// The claims of ID tokens, access tokens and *userinfo*, for an App with clients.
const PROVIDER_CLAIMS: &[&str] = &[
    "iss",
    "aud",
    "sub",
    "client_id",
    "iat",
    "exp",
    "jti",
    "sid",
    "auth_time",
    "nonce",
    "acr",
    "amr",
    "at_hash",
    "scope",
    "name",
    "email",
    "email_verified",
    "groups",
    "updated_at",
];

// === impl OpenIdConfiguration ===

impl<'a> OpenIdConfiguration<'a> {
    pub(super) fn for_app<S>(state: &State<S>, app: &'a App) -> Self {
        let mut algorithms = Vec::new();
        for key in &app.doc.keys.signing {
            if !algorithms.contains(&key.algorithm) {
                algorithms.push(key.algorithm);
            }
        }
        let has_clients = app.has_clients();
        Self {
            metadata: AuthorizationServerMetadata::for_app(state, app),
            userinfo_endpoint: Route::UserInfo.url(&state.settings.base_url, app.id()),
            subject_types_supported: ["public"],
            id_token_signing_alg_values_supported: if has_clients {
                vec![SigningAlgorithm::RS256, SigningAlgorithm::ES256]
            } else {
                algorithms
            },
            claims_supported: if has_clients { PROVIDER_CLAIMS } else { CLAIMS },
        }
    }
}

pub fn operation() -> Operation {
    let mut example = AuthorizationServerMetadata::example();
    example["userinfo_endpoint"] = "https://auth.example.com/v1/shop/userinfo".into();
    example["subject_types_supported"] = json!(["public"]);
    example["id_token_signing_alg_values_supported"] = json!(["ES256"]);
    example["claims_supported"] = json!(["sub", "name", "email", "email_verified", "updated_at"]);
    Operation::new(
        "Metadata for services that check tokens of the App (OpenID Connect Discovery)",
        "Issuer, keys and endpoints. Only an App with OpenID Connect clients has an authorization endpoint: any other App is \
         not an OpenID provider.",
    )
    .public_document(Content::json::<OpenIdConfiguration<'static>>(example))
}

pub async fn handle<S: Ports>(state: &State<S>, app: &App, request: InboundRequest) -> Result<Response, Problem> {
    metadata_response(&OpenIdConfiguration::for_app(state, app), &request)
}
