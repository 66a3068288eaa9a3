//! References to other objects: always by name, always in the namespace of the object that refers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::types::ProviderName;

/// A key of a Secret in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SecretKeyRef {
    /// The Secret's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The key in it.
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[-._a-zA-Z0-9]+$"))]
    pub key: String,
}

/// An object in the same namespace, whose kind the field's name says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LocalRef {
    /// The object's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// A Provider in the App's namespace, and how the App uses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = provider_ref_rules()))]
pub struct ProviderRef {
    /// The Provider's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// What stands for it in paths (`/{APPID}/{PROVIDER}/…`); default: its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias: Option<ProviderName>,
    /// Whether a new identity of this provider with a verified address joins the account of that address. Default: yes
    /// for presets, no for `slack`, `oidc`, `oauth2` and a `gitlab` with a `baseURL`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_by_email: Option<bool>,
}

fn provider_ref_rules() -> serde_json::Value {
    serde_json::json!([
        {
            "rule": "has(self.alias) || self.name.matches('^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$')",
            "message": "the name cannot stand in a path; set alias to up to 63 lower-case letters, digits and inner hyphens",
        },
        {
            "rule": "(has(self.alias) ? self.alias : self.name) != 'email'",
            "message": "email is a path that the service keeps for itself; set another alias",
        },
    ])
}
