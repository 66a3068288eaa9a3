//! The Client resource: spec, status and validation rules.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResource, CustomResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    conditions::{Condition, ConditionType, initial_status},
    refs::{AppRef, ConfigMapKeyRef, SecretKeyRef},
    rendered::SigningAlgorithm,
    schema::{RootSchema, Rule, strip_one_of, with_schema},
    types::{ClientId, CustomClientId, GroupName, GroupPattern, Invalid, RedirectUrl},
};

/// ClientSpec is a program that signs in users of an App with OpenID Connect. Exactly one of `web` and `public` is set.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "latchkey.dev",
    version = "v1alpha1",
    kind = "Client",
    plural = "clients",
    shortname = "lkclient",
    category = "latchkey",
    namespaced,
    schema = "disabled",
    doc = "Client is a program that signs in users of an App with OpenID Connect.",
    status = "ClientStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Ready","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].status"}"#,
    printcolumn = r#"{"name":"Reason","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"ClientID","type":"string","jsonPath":".status.clientID"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"Message","type":"string","priority":1,"jsonPath":".status.conditions[?(@.type==\"Ready\")].message"}"#
)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = strip_one_of, extend("x-kubernetes-validations" = spec_rules()))]
pub struct ClientSpec {
    /// appRef refers to the App with the users. It cannot change. The App needs hosted pages (`pages.mode: Enabled`).
    /// An App in another namespace must also allow Clients from the Client's namespace.
    pub app_ref: AppRef,
    /// clientID is `client_id` in OAuth. Only a Client in the App's namespace can set it, and it cannot change. It must
    /// be neither the appID nor one of the App's audiences. Defaults to `<namespace>.<name>` of the Client.
    #[serde(rename = "clientID", skip_serializing_if = "Option::is_none")]
    pub client_id: Option<CustomClientId>,
    /// displayName is the name of the program on pages. Defaults to the client ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 100), regex(pattern = r"^[^\x00-\x1f\x7f]*$"))]
    pub display_name: Option<String>,
    #[serde(flatten)]
    pub kind: ClientKind,
    /// pushedAuthorization controls whether every authorization request must be pushed first (PAR, RFC 9126).
    #[serde(default)]
    pub pushed_authorization: Requirement,
    /// scopes are the scopes that the client can request. They must contain `openid`. Defaults to `openid`, `profile`
    /// and `email`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 5),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = scopes_rules())
    )]
    pub scopes: Vec<ClientScope>,
    /// consent controls whether users are asked before the client receives their data: never, once, or at each
    /// authorization.
    #[serde(default)]
    pub consent: Consent,
    /// allow restricts the users that can sign in at the client.
    #[serde(default, skip_serializing_if = "AllowSpec::is_default")]
    pub allow: AllowSpec,
    /// groups configures the claim `groups`.
    #[serde(default, skip_serializing_if = "ClientGroupsSpec::is_default")]
    pub groups: ClientGroupsSpec,
    /// tokens configures the tokens of the client.
    #[serde(default, skip_serializing_if = "ClientTokensSpec::is_default")]
    pub tokens: ClientTokensSpec,
}

/// ClientKind is the type of the client (RFC 6749, 2.1). Exactly one member is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ClientKind {
    /// web is a client on a server, which authenticates with a secret or a private key.
    Web(WebClient),
    /// public is a client on the devices of users, which has no secret. PKCE is always required.
    Public(PublicClient),
}

/// WebClient is a client that authenticates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = web_rules()))]
pub struct WebClient {
    /// redirectURLs are the URLs to which a browser can be redirected with a code. A URL must match byte for byte,
    /// except for the port of an `http` loopback URL.
    #[serde(rename = "redirectURLs")]
    #[schemars(
        length(min = 1, max = 20),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = web_urls_rules())
    )]
    pub redirect_urls: Vec<RedirectUrl>,
    /// postLogoutRedirectURLs are the URLs to which a browser can be redirected after a logout. They are compared like
    /// `redirectURLs`.
    #[serde(rename = "postLogoutRedirectURLs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 20),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = web_urls_rules())
    )]
    pub post_logout_redirect_urls: Vec<RedirectUrl>,
    /// authentication is how the client authenticates: with a secret in the `Authorization` header or in the body
    /// (`Secret`), or with a JWT that it signs (`PrivateKeyJWT`, RFC 7523).
    #[serde(default)]
    pub authentication: WebAuthentication,
    /// secret is the Secret that the operator creates for the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<ClientSecretSpec>,
    /// secretRef refers to the client secret in a Secret of your own: 16 to 512 printable ASCII characters. If it is
    /// set, the operator creates no Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretKeyRef>,
    /// previousSecretRef refers to the previous client secret, which also works. It requires `secretRef`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_secret_ref: Option<SecretKeyRef>,
    /// jwksRef refers to the public keys of the client in a ConfigMap: a JWK Set (RFC 7517) of at most 16 KiB with 1 to
    /// 8 keys for RS256, PS256, ES256 or EdDSA. It is required with `PrivateKeyJWT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jwks_ref: Option<ConfigMapKeyRef>,
    /// pkce controls whether every authorization request must have a `code_challenge` (RFC 7636).
    #[serde(default)]
    pub pkce: Requirement,
}

/// PublicClient is a client that cannot keep a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PublicClient {
    /// redirectURLs are the URLs to which a browser can be redirected with a code. A URL must match byte for byte,
    /// except for the port of an `http` loopback URL.
    #[serde(rename = "redirectURLs")]
    #[schemars(length(min = 1, max = 20), extend("x-kubernetes-list-type" = "set"))]
    pub redirect_urls: Vec<RedirectUrl>,
    /// postLogoutRedirectURLs are the URLs to which a browser can be redirected after a logout. They are compared like
    /// `redirectURLs`.
    #[serde(rename = "postLogoutRedirectURLs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20), extend("x-kubernetes-list-type" = "set"))]
    pub post_logout_redirect_urls: Vec<RedirectUrl>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WebAuthentication {
    #[default]
    Secret,
    #[serde(rename = "PrivateKeyJWT")]
    PrivateKeyJwt,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Requirement {
    #[default]
    Optional,
    Required,
}

/// ClientSecretSpec is the Secret that the operator creates. Its keys are `issuer`, `client-id` and `client-secret`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClientSecretSpec {
    /// name is the name of the Secret. Defaults to the name of the Client followed by `-oidc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$")
    )]
    pub name: Option<String>,
    /// rotationOverlapSeconds is the number of seconds after a rotation in which the previous secret also works,
    /// 0–604800. Defaults to 86400 (one day).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 604_800))]
    pub rotation_overlap_seconds: Option<i32>,
}

/// ClientScope is a scope that a client can request (OpenID Connect Core, 5.4 and 11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ClientScope {
    #[serde(rename = "openid")]
    OpenId,
    #[serde(rename = "profile")]
    Profile,
    #[serde(rename = "email")]
    Email,
    #[serde(rename = "groups")]
    Groups,
    #[serde(rename = "offline_access")]
    OfflineAccess,
}

/// Consent is how often a user is asked for consent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Consent {
    #[default]
    Never,
    Once,
    Always,
}

/// AllowSpec restricts the users of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AllowSpec {
    /// groups are the groups that can sign in. A user must be a member of one of them. Empty admits every user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 50), extend("x-kubernetes-list-type" = "set"))]
    pub groups: Vec<GroupName>,
}

/// ClientGroupsSpec configures the claim `groups`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClientGroupsSpec {
    /// only are the groups that the client sees: names, or the beginning of names followed by `*`. Empty shows every
    /// group of the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 50), extend("x-kubernetes-list-type" = "set"))]
    pub only: Vec<GroupPattern>,
    /// max is the maximum number of groups in the claim, 1–500. With more groups, the claim is omitted. Defaults to
    /// 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 500))]
    pub max: Option<i32>,
}

/// ClientTokensSpec configures the tokens of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClientTokensSpec {
    /// idTokenAlgorithm is the algorithm that signs ID tokens.
    #[serde(default)]
    pub id_token_algorithm: IdTokenAlgorithm,
    /// idTokenLifetimeSeconds is the lifetime of an ID token in seconds, 60–86400. Defaults to 3600 (one hour).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 86_400))]
    pub id_token_lifetime_seconds: Option<i32>,
    /// audiences are the values of `aud` in access tokens besides the issuer. Each must be one of the App's audiences,
    /// and only a Client in the App's namespace can set them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 256)), extend("x-kubernetes-list-type" = "set"))]
    pub audiences: Vec<String>,
}

/// IdTokenAlgorithm is the algorithm that signs the ID tokens of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum IdTokenAlgorithm {
    #[default]
    RS256,
    ES256,
}

/// ClientStatus is the observed state of a Client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClientStatus {
    /// observedGeneration is the generation of the spec that this status reflects; -1 before the first reconcile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// clientID is `client_id` in OAuth.
    #[serde(rename = "clientID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 317))]
    pub client_id: Option<String>,
    /// issuer is the issuer of the App. The discovery document is at this URL followed by
    /// `/.well-known/openid-configuration`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub issuer: Option<String>,
    /// secretName is the name of the Secret with the client secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub secret_name: Option<String>,
    /// conditions are the conditions Accepted, ResolvedRefs, Programmed and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// The default of `web.secret.rotationOverlapSeconds`: one day.
pub const DEFAULT_ROTATION_OVERLAP_SECONDS: u32 = 86_400;
/// The default of `tokens.idTokenLifetimeSeconds`: one hour.
pub const DEFAULT_ID_TOKEN_LIFETIME_SECONDS: u32 = 3600;
/// The default of `groups.max`.
pub const DEFAULT_MAX_GROUPS: u32 = 100;

/// ClientsSpec configures the Clients of an App.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClientsSpec {
    /// namespaces selects the namespaces from which Clients can refer to the App. Clients in the App's namespace always
    /// can.
    #[serde(default, skip_serializing_if = "ClientNamespaces::is_default")]
    pub namespaces: ClientNamespaces,
}

/// ClientNamespaces selects the namespaces, besides the App's own, from which Clients can refer to the App. It has the
/// form that Gateway API uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("x-kubernetes-validations" = client_namespaces_rules()))]
pub struct ClientNamespaces {
    /// from controls which namespaces are granted: only that of the App (`Same`), every namespace (`All`), or the
    /// namespaces that `selector` matches (`Selector`).
    #[serde(default)]
    pub from: NamespacesFrom,
    /// selector matches the labels of namespaces. It is required with `Selector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<NamespaceSelector>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NamespacesFrom {
    #[default]
    Same,
    All,
    Selector,
}

/// NamespaceSelector is a label selector, as in Kubernetes. All requirements must hold. An empty selector matches every
/// namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceSelector {
    /// matchLabels are labels that a namespace must have, with their values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16, "additionalProperties" = label_value_schema()))]
    pub match_labels: BTreeMap<String, String>,
    /// matchExpressions are requirements on the labels of a namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub match_expressions: Vec<LabelRequirement>,
}

/// LabelRequirement is a requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("x-kubernetes-validations" = label_requirement_rules()))]
pub struct LabelRequirement {
    /// key is the key of the label.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// operator is the relation between the label and the values.
    pub operator: LabelOperator,
    /// values are the values for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LabelOperator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

// === impl Client ===

impl Client {
    /// Returns the client ID: `spec.clientID` if set, otherwise namespace and name.
    pub fn client_id(&self) -> Result<ClientId, Invalid> {
        match &self.spec.client_id {
            Some(custom) => Ok(custom.clone().into()),
            None => ClientId::of_client(
                self.metadata.namespace.as_deref().unwrap_or_default(),
                self.metadata.name.as_deref().unwrap_or_default(),
            ),
        }
    }

    /// Returns the namespace of the App.
    pub fn app_namespace(&self) -> &str {
        let own = self.metadata.namespace.as_deref().unwrap_or_default();
        self.spec.app_ref.namespace.as_deref().unwrap_or(own)
    }

    /// Whether the Client is in the namespace of its App.
    pub fn is_in_app_namespace(&self) -> bool {
        self.metadata.namespace.as_deref().unwrap_or_default() == self.app_namespace()
    }

    /// Returns the name of the Secret that the operator creates. Returns `None` if the Client authenticates without a
    /// secret, or names an existing Secret in `secretRef`.
    pub fn created_secret(&self) -> Option<String> {
        let web = self.spec.web().filter(|web| web.has_created_secret())?;
        let name = web.secret.as_ref().and_then(|secret| secret.name.clone());
        Some(name.unwrap_or_else(|| format!("{}-oidc", self.metadata.name.as_deref().unwrap_or_default())))
    }

    /// Returns the name of the Secret with the client secret: the Secret in `secretRef` or the Secret that the operator
    /// creates. Returns `None` if the Client authenticates without a secret.
    pub fn secret_name(&self) -> Option<String> {
        let own = self.spec.web().and_then(|web| web.secret_ref.as_ref());
        own.map(|reference| reference.name.clone()).or_else(|| self.created_secret())
    }
}

// === impl ClientSpec ===

impl ClientSpec {
    /// Returns the web client, or `None` if the client is public.
    pub const fn web(&self) -> Option<&WebClient> {
        match &self.kind {
            ClientKind::Web(web) => Some(web),
            ClientKind::Public(_) => None,
        }
    }

    pub fn redirect_urls(&self) -> &[RedirectUrl] {
        match &self.kind {
            ClientKind::Web(web) => &web.redirect_urls,
            ClientKind::Public(public) => &public.redirect_urls,
        }
    }

    pub fn post_logout_redirect_urls(&self) -> &[RedirectUrl] {
        match &self.kind {
            ClientKind::Web(web) => &web.post_logout_redirect_urls,
            ClientKind::Public(public) => &public.post_logout_redirect_urls,
        }
    }

    /// Returns the references to Secrets that the operator does not create: `secretRef` and `previousSecretRef`.
    pub fn secret_refs(&self) -> impl Iterator<Item = &SecretKeyRef> {
        self.web().into_iter().flat_map(|web| web.secret_ref.iter().chain(&web.previous_secret_ref))
    }

    /// Returns the reference to the public keys of the client.
    pub fn jwks_ref(&self) -> Option<&ConfigMapKeyRef> {
        self.web().and_then(|web| web.jwks_ref.as_ref())
    }
}

// === impl WebClient ===

impl WebClient {
    /// Whether the operator creates the Secret of the client.
    pub fn has_created_secret(&self) -> bool {
        self.authentication == WebAuthentication::Secret && self.secret_ref.is_none()
    }

    /// Returns the number of seconds after a rotation in which the previous secret also works.
    pub fn rotation_overlap_seconds(&self) -> u32 {
        let seconds = self.secret.as_ref().and_then(|secret| secret.rotation_overlap_seconds);
        seconds.map_or(DEFAULT_ROTATION_OVERLAP_SECONDS, |seconds| u32::try_from(seconds).unwrap_or_default())
    }
}

// === impl ClientScope ===

impl ClientScope {
    pub const ALL: [Self; 5] = [Self::OpenId, Self::Profile, Self::Email, Self::Groups, Self::OfflineAccess];
    /// The scopes of a Client without the field `scopes`.
    pub const DEFAULT: [Self; 3] = [Self::OpenId, Self::Profile, Self::Email];

    /// Returns the name in manifests and in OAuth.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OpenId => "openid",
            Self::Profile => "profile",
            Self::Email => "email",
            Self::Groups => "groups",
            Self::OfflineAccess => "offline_access",
        }
    }
}

// === impl IdTokenAlgorithm ===

impl IdTokenAlgorithm {
    pub const ALL: [Self; 2] = [Self::RS256, Self::ES256];

    /// Returns the same algorithm in the type that signing keys use.
    pub const fn signing_algorithm(self) -> SigningAlgorithm {
        match self {
            Self::RS256 => SigningAlgorithm::RS256,
            Self::ES256 => SigningAlgorithm::ES256,
        }
    }

    /// Returns the algorithm of ID tokens that are signed with a key for `algorithm`, or `None` if such a key cannot
    /// sign ID tokens.
    pub const fn of_key(algorithm: SigningAlgorithm) -> Option<Self> {
        match algorithm {
            SigningAlgorithm::RS256 => Some(Self::RS256),
            SigningAlgorithm::ES256 => Some(Self::ES256),
            SigningAlgorithm::EdDSA => None,
        }
    }
}

// === impl AllowSpec, ClientGroupsSpec, ClientTokensSpec ===

impl AllowSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl ClientGroupsSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl ClientTokensSpec {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

// === impl ClientsSpec, ClientNamespaces, NamespaceSelector, LabelRequirement ===

impl ClientsSpec {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl ClientNamespaces {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether Clients can refer to the App from another namespace that has these labels.
    pub fn grants(&self, labels: &BTreeMap<String, String>) -> bool {
        match self.from {
            NamespacesFrom::Same => false,
            NamespacesFrom::All => true,
            NamespacesFrom::Selector => self.selector.as_ref().is_some_and(|selector| selector.matches(labels)),
        }
    }
}

impl NamespaceSelector {
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.matches(labels))
    }
}

impl LabelRequirement {
    /// Whether the labels fulfil the requirement. As in Kubernetes, `NotIn` is also fulfilled if the label is missing.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            LabelOperator::In => value.is_some_and(|value| self.values.contains(value)),
            LabelOperator::NotIn => value.is_none_or(|value| !self.values.contains(value)),
            LabelOperator::Exists => value.is_some(),
            LabelOperator::DoesNotExist => value.is_none(),
        }
    }
}

/// Returns the CustomResourceDefinition as the chart installs it.
pub fn definition() -> CustomResourceDefinition {
    let root = RootSchema {
        description: "Client is a program that signs in users of an App with OpenID Connect.",
        rules: root_rules(),
        initial_status: initial_status(&ConditionType::CLIENT),
    };
    with_schema::<ClientSpec, ClientStatus>(Client::crd(), root)
}

/// The rules are on the root, because a rule on a field could be bypassed by removing the field.
fn root_rules() -> Vec<Rule> {
    vec![
        Rule::from_static(
            "self.spec.appRef == oldSelf.spec.appRef",
            "appRef cannot change, because sessions and consents belong to the App; create a new Client instead",
        )
        .at_field(".spec.appRef"),
        Rule::from_static(
            "has(self.spec.clientID) == has(oldSelf.spec.clientID) && \
             (!has(self.spec.clientID) || self.spec.clientID == oldSelf.spec.clientID)",
            "the client ID cannot change, because the client is configured with it; create a new Client instead",
        )
        .at_field(".spec.clientID"),
        Rule::from_static(
            "!has(self.spec.web) || self.spec.web.authentication != 'Secret' || has(self.spec.web.secretRef) || \
             (has(self.spec.web.secret) && has(self.spec.web.secret.name)) || size(self.metadata.name) <= 248",
            "the name with -oidc is too long for the Secret; set spec.web.secret.name",
        )
        .at_field(".spec.web"),
    ]
}

fn spec_rules() -> serde_json::Value {
    json!([{ "rule": "has(self.web) != has(self.public)", "message": "set exactly one of web, public" }])
}

fn scopes_rules() -> serde_json::Value {
    json!([{
        "rule": "size(self) == 0 || 'openid' in self",
        "message": "add openid, without which nobody can sign in",
    }])
}

fn web_urls_rules() -> serde_json::Value {
    json!([{
        "rule": "self.all(url, url.startsWith('https://') || url.startsWith('http://'))",
        "message": "only a public client can have a private-use scheme; use https, or set public instead of web",
    }])
}

fn web_rules() -> serde_json::Value {
    json!([
        {
            "rule": "(self.authentication == 'PrivateKeyJWT') == has(self.jwksRef)",
            "message": "set jwksRef if authentication is PrivateKeyJWT, and only then",
        },
        {
            "rule": "self.authentication == 'Secret' || \
                     !(has(self.secret) || has(self.secretRef) || has(self.previousSecretRef))",
            "message": "a client with PrivateKeyJWT has no secret; remove secret, secretRef and previousSecretRef",
        },
        {
            "rule": "!(has(self.secret) && has(self.secretRef))",
            "message": "set secret, so that the operator creates the Secret, or secretRef for your own, not both",
        },
        {
            "rule": "!has(self.previousSecretRef) || has(self.secretRef)",
            "message": "previousSecretRef is the former value of an own Secret; set secretRef too",
        },
        object_name_rule("secretRef", "Secret"),
        object_name_rule("previousSecretRef", "Secret"),
        object_name_rule("jwksRef", "ConfigMap"),
    ])
}

/// Returns a rule that requires the name in a reference to be a valid object name (RFC 1123, 2.1). The rule is not a
/// pattern of [`SecretKeyRef`], because Apps and Providers that are already stored with other names must stay writable.
fn object_name_rule(field: &str, kind: &str) -> serde_json::Value {
    json!({
        "rule": format!(
            "!has(self.{field}) || \
             self.{field}.name.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?([.][a-z0-9]([a-z0-9-]*[a-z0-9])?)*$')"
        ),
        "message":
            format!("{field}.name is not the name of a {kind}; use lower-case letters, digits, hyphens and dots"),
    })
}

fn client_namespaces_rules() -> serde_json::Value {
    json!([{
        "rule": "(self.from == 'Selector') == has(self.selector)",
        "message": "set selector if from is Selector, and only then",
    }])
}

fn label_requirement_rules() -> serde_json::Value {
    json!([{
        "rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
        "message": "set values with In and NotIn, and only then",
    }])
}

fn label_value_schema() -> serde_json::Value {
    json!({ "type": "string", "maxLength": 63 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(namespace: &str, name: &str, spec: serde_json::Value) -> Client {
        let metadata = json!({ "namespace": namespace, "name": name });
        serde_json::from_value(json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "Client", "metadata": metadata, "spec": spec,
        }))
        .unwrap()
    }

    fn web(fields: serde_json::Value) -> serde_json::Value {
        let mut web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
        web.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({ "appRef": { "name": "platform" }, "web": web })
    }

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn namespaces(value: serde_json::Value) -> ClientNamespaces {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_scope_is_written_as_its_name() {
        for scope in ClientScope::ALL {
            assert_eq!(json!(scope), json!(scope.as_str()));
        }
    }

    #[test]
    fn id_tokens_can_have_every_algorithm_of_keys_except_eddsa() {
        for algorithm in IdTokenAlgorithm::ALL {
            assert_eq!(json!(algorithm), json!(algorithm.signing_algorithm()));
            assert_eq!(IdTokenAlgorithm::of_key(algorithm.signing_algorithm()), Some(algorithm));
        }
        assert_eq!(IdTokenAlgorithm::of_key(SigningAlgorithm::EdDSA), None);
    }

    #[test]
    fn the_client_id_defaults_to_namespace_and_name() {
        let mut spec = web(json!({}));
        assert_eq!(client("monitoring", "grafana", spec.clone()).client_id().unwrap().as_str(), "monitoring.grafana");
        spec["clientID"] = json!("grafana");
        assert_eq!(client("monitoring", "grafana", spec).client_id().unwrap().as_str(), "grafana");
    }

    #[test]
    fn the_app_is_in_the_namespace_of_the_client_unless_its_reference_names_another() {
        let mut spec = web(json!({}));
        let same = client("monitoring", "grafana", spec.clone());
        assert_eq!((same.app_namespace(), same.is_in_app_namespace()), ("monitoring", true));
        spec["appRef"]["namespace"] = json!("identity");
        let other = client("monitoring", "grafana", spec);
        assert_eq!((other.app_namespace(), other.is_in_app_namespace()), ("identity", false));
    }

    #[test]
    fn the_operator_creates_a_secret_only_for_a_web_client_that_has_neither_secret_ref_nor_keys() {
        let secrets = |spec: serde_json::Value| {
            let client = client("monitoring", "grafana", spec);
            (client.created_secret(), client.secret_name())
        };
        let some = |name: &str| Some(name.to_owned());
        assert_eq!(secrets(web(json!({}))), (some("grafana-oidc"), some("grafana-oidc")));
        assert_eq!(secrets(web(json!({ "secret": { "name": "a" } }))), (some("a"), some("a")));
        assert_eq!(secrets(web(json!({ "secretRef": { "name": "b", "key": "k" } }))), (None, some("b")));
        let keys = json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "c", "key": "k" } });
        assert_eq!(secrets(web(keys)), (None, None));
        let public = json!({ "appRef": { "name": "platform" }, "public": { "redirectURLs": ["com.example:/"] } });
        assert_eq!(secrets(public), (None, None));
    }

    #[test]
    fn the_rotation_overlap_defaults_to_one_day() {
        let overlap = |fields: serde_json::Value| {
            client("monitoring", "grafana", web(fields)).spec.web().unwrap().rotation_overlap_seconds()
        };
        assert_eq!(overlap(json!({})), 86_400);
        assert_eq!(overlap(json!({ "secret": { "name": "a" } })), 86_400);
        assert_eq!(overlap(json!({ "secret": { "rotationOverlapSeconds": 0 } })), 0);
    }

    #[test]
    fn clients_from_other_namespaces_are_allowed_never_always_or_by_label() {
        let production = labels(&[("env", "production"), ("team", "a")]);
        assert!(!ClientNamespaces::default().grants(&production));
        assert!(namespaces(json!({ "from": "All" })).grants(&labels(&[])));
        let granted = |selector: serde_json::Value, labels: &BTreeMap<String, String>| {
            namespaces(json!({ "from": "Selector", "selector": selector })).grants(labels)
        };
        assert!(granted(json!({}), &labels(&[])), "an empty selector matches everything");
        assert!(granted(json!({ "matchLabels": { "env": "production" } }), &production));
        assert!(!granted(json!({ "matchLabels": { "env": "production", "team": "b" } }), &production));
        let expression = |operator: &str, values: &[&str]| {
            let requirement = json!({ "key": "env", "operator": operator, "values": values });
            json!({ "matchExpressions": [requirement] })
        };
        let none = labels(&[]);
        for (operator, values, of_production, of_none) in [
            ("In", &["test", "production"][..], true, false),
            ("In", &["test"], false, false),
            ("NotIn", &["test"], true, true),
            ("NotIn", &["production"], false, true),
            ("Exists", &[], true, false),
            ("DoesNotExist", &[], false, true),
        ] {
            assert_eq!(granted(expression(operator, values), &production), of_production, "{operator} {values:?}");
            assert_eq!(granted(expression(operator, values), &none), of_none, "{operator} {values:?}");
        }
        let both = json!({
            "matchLabels": { "team": "a" }, "matchExpressions": [{ "key": "env", "operator": "DoesNotExist" }],
        });
        assert!(!granted(both, &production), "all requirements must hold");
        assert!(!namespaces(json!({ "from": "Selector" })).grants(&production));
    }
}
