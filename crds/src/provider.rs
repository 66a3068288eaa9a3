//! The Provider resource: spec, status and validation rules.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    conditions::{Condition, ConditionType, initial_status},
    refs::SecretKeyRef,
    schema::{RootSchema, strip_one_of, with_schema},
    types::{EndpointUrl, IssuerUrl},
};

/// ProviderSpec is a client at a social provider. It has exactly one member, which is named after the provider.
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
    doc = "Provider is a social login and its client at the provider.",
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

/// ProviderClient has one member for each preset. Exactly one member is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProviderClient {
    /// google is a client at Google.
    Google(OAuthClient),
    /// apple is a client at Apple (Sign in with Apple).
    Apple(AppleClient),
    /// github is a client at GitHub.
    #[serde(rename = "github")]
    GitHub(OAuthClient),
    /// gitlab is a client at GitLab, hosted or self-managed.
    #[serde(rename = "gitlab")]
    GitLab(GitLabClient),
    /// microsoft is a client at Microsoft, for work, school and personal accounts.
    Microsoft(MicrosoftClient),
    /// facebook is a client at Facebook.
    Facebook(OAuthClient),
    /// discord is a client at Discord.
    Discord(OAuthClient),
    /// linkedin is a client at LinkedIn.
    #[serde(rename = "linkedin")]
    LinkedIn(OAuthClient),
    /// x is a client at X.
    X(OAuthClient),
    /// slack is a client at Slack.
    Slack(OAuthClient),
    /// bitbucket is a client at Bitbucket.
    Bitbucket(OAuthClient),
    /// twitch is a client at Twitch.
    Twitch(OAuthClient),
    /// spotify is a client at Spotify.
    Spotify(OAuthClient),
    /// oidc is a client at any OpenID Connect provider with a discovery document.
    Oidc(OidcClient),
    /// oauth2 is a client at any OAuth 2.0 provider with an endpoint that returns the user's profile.
    #[serde(rename = "oauth2")]
    OAuth2(OAuth2Client),
}

/// OAuthClient is a client with an ID and a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuthClient {
    /// clientID is the client ID at the provider.
    #[serde(rename = "clientID")]
    #[schemars(length(min = 1, max = 512), regex(pattern = "^[!-~]+$"))]
    pub client_id: String,
    /// clientSecretRef refers to the client secret.
    pub client_secret_ref: SecretKeyRef,
    /// scopes are requested in addition to the scopes of the preset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 256), regex(pattern = "^[!#-\\[\\]-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub scopes: Vec<String>,
    /// additionalClientIDs are the client IDs of other clients of the same owner, such as mobile apps. `login` also
    /// accepts tokens that the provider issued to these clients.
    #[serde(rename = "additionalClientIDs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        inner(length(min = 1, max = 512), regex(pattern = "^[!-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub additional_client_ids: Vec<String>,
}

/// AppleClient is a client at Apple, which authenticates with a private key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppleClient {
    /// clientID is the Services ID.
    #[serde(rename = "clientID")]
    #[schemars(length(min = 1, max = 512), regex(pattern = "^[!-~]+$"))]
    pub client_id: String,
    /// teamID is the team ID: ten letters and digits.
    #[serde(rename = "teamID")]
    #[schemars(length(min = 10, max = 10), regex(pattern = "^[A-Z0-9]{10}$"))]
    pub team_id: String,
    /// keyID is the key ID: ten letters and digits.
    #[serde(rename = "keyID")]
    #[schemars(length(min = 10, max = 10), regex(pattern = "^[A-Z0-9]{10}$"))]
    pub key_id: String,
    /// privateKeyRef refers to the private key: the .p8 file from Apple, unchanged.
    pub private_key_ref: SecretKeyRef,
    /// scopes are requested in addition to the scopes of the preset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 256), regex(pattern = "^[!#-\\[\\]-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub scopes: Vec<String>,
    /// additionalClientIDs are the bundle IDs of apps of the same team. `login` also accepts tokens that Apple issued
    /// to these apps.
    #[serde(rename = "additionalClientIDs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        inner(length(min = 1, max = 512), regex(pattern = "^[!-~]+$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub additional_client_ids: Vec<String>,
}

/// GitLabClient is a client at GitLab.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GitLabClient {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// baseURL is the URL of a self-managed GitLab. Defaults to `https://gitlab.com`.
    #[serde(rename = "baseURL", skip_serializing_if = "Option::is_none")]
    pub base_url: Option<IssuerUrl>,
}

/// MicrosoftClient is a client at Microsoft.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MicrosoftClient {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// tenant controls which accounts can log in: `common`, `organizations`, `consumers`, or the ID or domain of one
    /// directory. Defaults to `common`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?$"))]
    pub tenant: Option<String>,
}

/// OidcClient is a client at any OpenID Connect provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OidcClient {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// issuer is the issuer of the provider. The discovery document is at this URL followed by
    /// `/.well-known/openid-configuration`.
    pub issuer: IssuerUrl,
    /// claims are the names of the provider's claims. A name that begins with `/` is a JSON pointer.
    #[serde(default, skip_serializing_if = "OidcClaims::is_default")]
    pub claims: OidcClaims,
}

/// OAuth2Client is a client at any OAuth 2.0 provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuth2Client {
    #[serde(flatten)]
    pub client: OAuthClient,
    /// authorizationURL is the authorization endpoint, to which browsers are redirected to log in.
    #[serde(rename = "authorizationURL")]
    pub authorization_url: EndpointUrl,
    /// tokenURL is the token endpoint, which exchanges a code for an access token.
    #[serde(rename = "tokenURL")]
    pub token_url: EndpointUrl,
    /// userInfoURL is the endpoint that returns the profile of the access token's user.
    #[serde(rename = "userInfoURL")]
    pub user_info_url: EndpointUrl,
    /// introspectionURL is the endpoint for token introspection (RFC 7662). Without it `login` accepts no token of this
    /// provider.
    #[serde(rename = "introspectionURL", skip_serializing_if = "Option::is_none")]
    pub introspection_url: Option<EndpointUrl>,
    /// clientAuthentication is how the client sends its secret: in the `Authorization` header (`Basic`) or in the body
    /// (`Post`).
    #[serde(default)]
    pub client_authentication: ClientAuthentication,
    /// claims are the names of members in the provider's profile response. A name that begins with `/` is a JSON
    /// pointer.
    pub claims: OAuth2Claims,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ClientAuthentication {
    #[default]
    Basic,
    Post,
}

/// OidcClaims are the names of claims at an OpenID Connect provider.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OidcClaims {
    /// email is the name of the claim that contains the email address. Defaults to `email`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email: Option<String>,
    /// emailVerified is the name of the claim that is true if the email address is verified. Defaults to
    /// `email_verified`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email_verified: Option<String>,
    /// name is the name of the claim that contains the user's name. Defaults to `name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub name: Option<String>,
}

/// OAuth2Claims are the names of members in the profile response of an OAuth 2.0 provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OAuth2Claims {
    /// subject is the name of the member of the profile response that contains the user ID. The user ID must never
    /// change and must never be given to another user.
    #[schemars(length(min = 1, max = 256))]
    pub subject: String,
    /// email is the name of the member of the profile response that contains the email address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email: Option<String>,
    /// emailVerified is the name of the member of the profile response that is true if the email address is verified.
    /// If it is not set, no email address of this provider counts as verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub email_verified: Option<String>,
    /// name is the name of the member of the profile response that contains the user's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub name: Option<String>,
}

/// ProviderStatus is the observed state of a Provider.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderStatus {
    /// observedGeneration is the generation of the spec that this status reflects; -1 before the first reconcile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// conditions are the conditions Accepted, ResolvedRefs, Reachable and Ready.
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
    /// The member names, in the order of the enum.
    pub const MEMBER_NAMES: [&str; 15] = [
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

    /// Returns the name of the member, which is also the name of the preset.
    pub const fn member_name(&self) -> &'static str {
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

    /// Returns the reference to the client secret or private key.
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

    /// Returns the default of `linkByEmail` in an App's reference to this Provider: whether an identity is linked to
    /// the account with the same verified email address. False for a provider that anybody can administer
    /// (specification: Social login, Account linking).
    ///
    /// Slack is such a provider: anybody can create a workspace, and an administrator of a workspace can set the email
    /// address of a member (SCIM, SAML). Slack does not document that `email_verified` is then false.
    pub const fn links_by_email_by_default(&self) -> bool {
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

/// Returns the CustomResourceDefinition as the chart installs it.
pub fn definition() -> CustomResourceDefinition {
    let root = RootSchema {
        description: "Provider is a social login and its client at the provider.",
        rules: Vec::new(),
        initial_status: initial_status(&ConditionType::PROVIDER),
    };
    with_schema::<ProviderSpec, ProviderStatus>(Provider::crd(), root)
}

fn spec_rules() -> serde_json::Value {
    let has = ProviderClient::MEMBER_NAMES.map(|member| format!("has(self.{member})")).join(", ");
    // The message is constant, because an expression that counts the members exceeds the API server's cost budget.
    json!([{
        "rule": format!("[{has}].exists_one(m, m)"),
        "message": format!("set exactly one of {}", ProviderClient::MEMBER_NAMES.join(", ")),
    }])
}
