//! References to other objects: by name, in the namespace of the referring object. ServiceAccounts can be of any
//! namespace, because they are compared by name and never read. The App of a Client can be in another namespace if the
//! App allows Clients of the Client's namespace.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::types::{GroupPattern, ProviderName};

/// SecretKeyRef refers to a key of a Secret in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SecretKeyRef {
    /// name is the name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// key is the key in the Secret.
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[-._a-zA-Z0-9]+$"))]
    pub key: String,
}

/// ConfigMapKeyRef refers to a key of a ConfigMap in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigMapKeyRef {
    /// name is the name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// key is the key in the ConfigMap.
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[-._a-zA-Z0-9]+$"))]
    pub key: String,
}

/// LocalRef refers to an object in the same namespace. The field that contains the LocalRef determines the kind of the
/// object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LocalRef {
    /// name is the name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// ProviderRef refers to a Provider in the App's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = provider_ref_rules()))]
pub struct ProviderRef {
    /// name is the name of the Provider.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// alias is the name of the provider in paths (`/{APPID}/{PROVIDER}/…`). Defaults to the name of the Provider.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias: Option<ProviderName>,
    /// linkByEmail controls whether a new identity of this provider is linked to the account with the same email
    /// address, if the provider has verified the email address. Defaults to false for `slack`, `oidc`, `oauth2` and
    /// `gitlab` with a `baseURL`, and to true for all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_by_email: Option<bool>,
    /// groups takes over the groups of a user at this provider. Only for Providers with `oidc`, `oauth2`, `gitlab` or
    /// `microsoft`. Without it, no groups are taken over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<ProviderGroupsSpec>,
}

/// ProviderGroupsSpec takes over the groups of a user at a provider. Each login replaces the groups of this provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProviderGroupsSpec {
    /// claim is the name of the claim that contains the names of the groups, as an array of strings. It is read from
    /// the ID token and, if it is not there, from the profile response. A name that begins with `/` is a JSON pointer.
    #[schemars(length(min = 1, max = 256))]
    pub claim: String,
    /// prefix is put before the name of each group, so that groups of several providers differ. Defaults to the name
    /// of the provider in paths and a colon, for example `corp:`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), regex(pattern = "^[ -~]*$"))]
    pub prefix: Option<String>,
    /// only lists the groups to take over. Each entry is the name of a group as the provider writes it, without the
    /// prefix, or the beginning of a name and then `*`, for example `team-*`. If only is empty, every group is taken
    /// over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 50), extend("x-kubernetes-list-type" = "set"))]
    pub only: Vec<GroupPattern>,
}

/// AppRef refers to an App. An App in another namespace must allow this reference in `spec.clients`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct AppRef {
    /// name is the name of the App.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// namespace is the namespace of the App. Defaults to the namespace of the referring object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))]
    pub namespace: Option<String>,
}

/// ServiceAccountRef names a ServiceAccount of any namespace. The token of a caller must contain this namespace and
/// name; the ServiceAccount object is not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceAccountRef {
    /// namespace is the namespace of the ServiceAccount.
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))]
    pub namespace: String,
    /// name is the name of the ServiceAccount.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

fn provider_ref_rules() -> serde_json::Value {
    serde_json::json!([
        {
            "rule": "has(self.alias) || self.name.matches('^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$')",
            "message": "the name cannot be used in a path; set alias to up to 63 lower-case letters, digits and inner hyphens",
        },
        {
            "rule": "(has(self.alias) ? self.alias : self.name) != 'email'",
            "message": "email is a path reserved for the service; set another alias",
        },
    ])
}
