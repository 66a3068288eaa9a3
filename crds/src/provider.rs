//! The Provider: a social login with its client at the provider; spec, status and rules.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    conditions::{Condition, ConditionType, first_status},
    refs::SecretKeyRef,
    schema::{Root, complete, strip_one_of},
    types::{EndpointUrl, IssuerUrl},
};

/// A client at a social provider: exactly one member, named as the provider.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "latchkey.dev",
    version = "v1alpha1",
    kind = "Provider",
    plural = "providers",
    shortname = "lkprov",
    category = "latchkey",
    namespaced,
    schema = "disabled",
    doc = "A social login with its client at the provider.",
    status = "ProviderStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Reachable","type":"string","jsonPath":".status.conditions[?(@.type==\"Reachable\")].status"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Message","type":"string","priority":1,"jsonPath":".status.conditions[?(@.type==\"Ready\")].message"}"#
)]
#[schemars(transform = strip_one_of, extend("x-kubernetes-validations" = spec_rules()))]
pub struct ProviderSpec {
    #[serde(flatten)]
    pub client: ProviderClient,
}

/// The members. A struct of its own, so that a cluster-wide kind can have them too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProviderClient {
    /// Google.
    Google(OAuthClient),
    /// Sign in with Apple.
    Apple(AppleClient),
    /// GitHub.
    #[serde(rename = "github")]
    GitHub(OAuthClient),
    /// GitLab, hosted or one's own.
    #[serde(rename = "gitlab")]
    GitLab(GitLabClient),
    /// Microsoft: accounts of work, school and home.
    Microsoft(MicrosoftClient),
    /// Facebook.
    Facebook(OAuthClient),
    /// Discord.
    Discord(OAuthClient),
    /// LinkedIn.
    #[serde(rename = "linkedin")]
    LinkedIn(OAuthClient),
    /// X.
    X(OAuthClient),
    /// Slack.
    Slack(OAuthClient),
    /// Bitbucket.
    Bitbucket(OAuthClient),
    /// Twitch.
    Twitch(OAuthClient),
    /// Spotify.
    Spotify(OAuthClient),
    /// Any provider that speaks OpenID Connect and has a discovery document.
    Oidc(OidcClient),
    /// Any provider that speaks OAuth 2.0 and has an endpoint that tells who the user is.
    #[serde(rename = "oauth2")]
    OAuth2(OAuth2Client),
}

/// A client with an id and a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuthClient {
    /// The client's id at the provider.
    #[serde(rename = "clientID")]
    #[schemars(length(min = 1, max = 512), regex(pattern = "^[!-~]+$"))]
    pub client_id: String,
    /// Where the client's secret is.
    pub client_secret_ref: SecretKeyRef,
    /// Scopes to ask for beside the preset's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 256), regex(pattern = "^[!#-\\[\\]-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub scopes: Vec<String>,
    /// Other clients of the same owner (mobile apps) whose tokens are accepted at `login`.
    #[serde(rename = "additionalClientIDs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        inner(length(min = 1, max = 512), regex(pattern = "^[!-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub additional_client_ids: Vec<String>,
}

/// A client at Apple, which shows itself by a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppleClient {
    /// The Services ID.
    #[serde(rename = "clientID")]
    #[schemars(length(min = 1, max = 512), regex(pattern = "^[!-~]+$"))]
    pub client_id: String,
    /// The team's id: ten letters and digits.
    #[serde(rename = "teamID")]
    #[schemars(length(min = 10, max = 10), regex(pattern = "^[A-Z0-9]{10}$"))]
    pub team_id: String,
    /// The key's id: ten letters and digits.
    #[serde(rename = "keyID")]
    #[schemars(length(min = 10, max = 10), regex(pattern = "^[A-Z0-9]{10}$"))]
    pub key_id: String,
    /// Where the private key is: the .p8 file as Apple gives it.
    pub private_key_ref: SecretKeyRef,
    /// Scopes to ask for beside the preset's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 256), regex(pattern = "^[!#-\\[\\]-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub scopes: Vec<String>,
    /// Bundle ids of the same team whose tokens are accepted at `login`.
    #[serde(rename = "additionalClientIDs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        inner(length(min = 1, max = 512), regex(pattern = "^[!-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub additional_client_ids: Vec<String>,
}

/// A client at GitLab.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GitLabClient {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// The address of a GitLab of one's own. Default: `https://gitlab.com`.
    #[serde(rename = "baseURL", skip_serializing_if = "Option::is_none")]
    pub base_url: Option<IssuerUrl>,
}

/// A client at Microsoft.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MicrosoftClient {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// Whose accounts may log in: `common`, `organizations`, `consumers`, or one directory by its id or domain.
    /// Default: `common`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?$"))]
    pub tenant: Option<String>,
}

/// A client at any OpenID provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OidcClient {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// The provider's issuer; its discovery document is at `/.well-known/openid-configuration` below it.
    pub issuer: IssuerUrl,
    /// Under which names the provider tells what is asked of it.
    #[serde(default, skip_serializing_if = "OidcClaims::is_default")]
    pub claims: OidcClaims,
}

/// A client at any OAuth 2.0 provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuth2Client {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// Where browsers are sent to log in.
    #[serde(rename = "authorizationURL")]
    pub authorization_url: EndpointUrl,
    /// Where a code becomes a token.
    #[serde(rename = "tokenURL")]
    pub token_url: EndpointUrl,
    /// Where a token tells who the user is.
    #[serde(rename = "userInfoURL")]
    pub user_info_url: EndpointUrl,
    /// Where a token can be checked (RFC 7662). Without it no token of this provider is accepted at `login`.
    #[serde(rename = "introspectionURL", skip_serializing_if = "Option::is_none")]
    pub introspection_url: Option<EndpointUrl>,
    /// How the client shows its secret: in the `Authorization` header (`Basic`) or in the body (`Post`).
    #[serde(default)]
    pub client_authentication: ClientAuthentication,
    /// Under which names the provider tells what is asked of it.
    pub claims: OAuth2Claims,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ClientAuthentication {
    #[default]
    Basic,
    Post,
}

/// Names of claims at an OpenID provider.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OidcClaims {
    /// The address. Default: `email`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email: Option<String>,
    /// Whether the address is verified. Default: `email_verified`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email_verified: Option<String>,
    /// The user's name. Default: `name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub name: Option<String>,
}

/// Names of members in an OAuth 2.0 provider's answer about the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuth2Claims {
    /// What never changes and is never given to another user.
    #[schemars(length(min = 1, max = 256))]
    pub subject: String,
    /// The address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email: Option<String>,
    /// Whether the address is verified. Without it no address of this provider counts as verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email_verified: Option<String>,
    /// The user's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub name: Option<String>,
}

/// What became of a Provider.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderStatus {
    /// The generation that this status is of; -1 before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Accepted, ResolvedRefs, Reachable, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

// === impl OidcClaims ===

impl OidcClaims {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

// === impl ProviderClient ===

impl ProviderClient {
    /// The names of the members, in the order of the enum.
    pub const MEMBERS: [&str; 15] = [
        "google",
        "apple",
        "github",
        "gitlab",
        "microsoft",
        "facebook",
        "discord",
        "linkedin",
        "x",
        "slack",
        "bitbucket",
        "twitch",
        "spotify",
        "oidc",
        "oauth2",
    ];

    /// The member's name, which is the preset's.
    pub const fn member(&self) -> &'static str {
        match self {
            Self::Google(_) => "google",
            Self::Apple(_) => "apple",
            Self::GitHub(_) => "github",
            Self::GitLab(_) => "gitlab",
            Self::Microsoft(_) => "microsoft",
            Self::Facebook(_) => "facebook",
            Self::Discord(_) => "discord",
            Self::LinkedIn(_) => "linkedin",
            Self::X(_) => "x",
            Self::Slack(_) => "slack",
            Self::Bitbucket(_) => "bitbucket",
            Self::Twitch(_) => "twitch",
            Self::Spotify(_) => "spotify",
            Self::Oidc(_) => "oidc",
            Self::OAuth2(_) => "oauth2",
        }
    }

    /// Where the secret is by which the client shows itself.
    pub fn secret_ref(&self) -> &SecretKeyRef {
        match self {
            Self::Google(client)
            | Self::GitHub(client)
            | Self::Facebook(client)
            | Self::Discord(client)
            | Self::LinkedIn(client)
            | Self::X(client)
            | Self::Slack(client)
            | Self::Bitbucket(client)
            | Self::Twitch(client)
            | Self::Spotify(client)
            | Self::GitLab(GitLabClient { client, .. })
            | Self::Microsoft(MicrosoftClient { client, .. })
            | Self::Oidc(OidcClient { client, .. })
            | Self::OAuth2(OAuth2Client { client, .. }) => &client.client_secret_ref,
            Self::Apple(client) => &client.private_key_ref,
        }
    }

    /// Whether a verified address at this provider may join an account where the App says nothing: only where the
    /// provider is one that we know (contract, 5).
    ///
    /// Not Slack: nothing in its documentation says that `email_verified` is false for members whose address an
    /// administrator of their workspace wrote (SCIM, SAML), and anybody can administer a workspace.
    pub const fn links_by_email(&self) -> bool {
        match self {
            Self::Google(_)
            | Self::Apple(_)
            | Self::GitHub(_)
            | Self::Microsoft(_)
            | Self::Facebook(_)
            | Self::Discord(_)
            | Self::LinkedIn(_)
            | Self::X(_)
            | Self::Bitbucket(_)
            | Self::Twitch(_)
            | Self::Spotify(_) => true,
            Self::GitLab(client) => client.base_url.is_none(),
            Self::Slack(_) | Self::Oidc(_) | Self::OAuth2(_) => false,
        }
    }
}

/// The definition of the resource, as it is installed.
pub fn definition() -> CustomResourceDefinition {
    let root = Root {
        description: "A social login with its client at the provider.",
        rules: Vec::new(),
        first_status: first_status(&ConditionType::PROVIDER),
    };
    complete::<ProviderSpec, ProviderStatus>(Provider::crd(), root)
}

fn spec_rules() -> serde_json::Value {
    let has = ProviderClient::MEMBERS.map(|member| format!("has(self.{member})")).join(", ");
    // The message is a constant: one that counts the members breaks the cost budget.
    json!([{
        "rule": format!("[{has}].exists_one(m, m)"),
        "message": format!("set exactly one of {}", ProviderClient::MEMBERS.join(", ")),
    }])
}
