//! The types for what a reconcile knows about objects, and the trait that looks objects up. Nothing here makes
//! decisions.

use std::collections::BTreeMap;

use latchkey_crds::{conditions::Reason, provider::Provider, rendered::SecretString, types::IssuerUrl};

/// Settings of the installation, for all Apps.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The URL under which users reach the servers, without a trailing slash.
    pub(crate) base_url: IssuerUrl,
    /// Development mode: the base URL and URLs of Providers can use `http`; relays can have any port, and a password
    /// without TLS.
    pub(crate) allow_insecure: bool,
}

/// Looks up objects in manifests or in a cluster.
pub(crate) trait ObjectSource {
    /// Looks up a Provider by namespace and name.
    fn provider(&self, namespace: &str, name: &str) -> Lookup<Provider>;
    /// Looks up the decoded values of a Secret.
    fn secret(&self, namespace: &str, name: &str) -> Lookup<SecretValues>;
    /// Looks up the values of a ConfigMap.
    fn config_map(&self, namespace: &str, name: &str) -> Lookup<ConfigMapValues>;
}

/// The result of a lookup. A missing or invalid object is a result, not an error.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Lookup<T> {
    Found(T),
    Missing,
    /// The object exists but is invalid.
    Invalid,
}

/// The values of a Secret by key. Never printed.
pub(crate) type SecretValues = BTreeMap<String, SecretBytes>;

/// A value of a Secret. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct SecretBytes(pub(crate) Vec<u8>);

/// The values of a ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConfigMapValues {
    pub(crate) text: BTreeMap<String, String>,
    /// The values under `binaryData`. Templates and texts must be under `data`; if they are here, they are not used,
    /// but reported as errors.
    pub(crate) binary: BTreeMap<String, Vec<u8>>,
}

/// The result of a lookup of one key of a Secret.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SecretKeyLookup {
    NoSecret,
    NoKey,
    Value(SecretBytes),
}

/// Why a field of a resource cannot be used. An App is served without a reference that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldError {
    pub(crate) reason: Reason,
    /// The path of the field, as kubectl writes it: `spec.redirectURLs[1]`.
    pub(crate) field: String,
    /// What is wrong and what to do. Names objects and their keys, never the values of the keys.
    pub(crate) message: String,
}

// === impl SecretBytes ===

impl std::fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecretBytes(…)")
    }
}

impl SecretBytes {
    /// Returns the value as text, or `None` if it is not UTF-8. Removes trailing line breaks, because they are usually
    /// there by accident (`echo … | base64`).
    pub(crate) fn to_trimmed_utf8(&self) -> Option<SecretString> {
        let text = std::str::from_utf8(&self.0).ok()?;
        Some(SecretString::new(text.trim_end_matches(['\r', '\n'])))
    }
}

// === impl SecretKeyLookup ===

impl SecretKeyLookup {
    pub(crate) fn resolve(source: &impl ObjectSource, namespace: &str, name: &str, key: &str) -> Self {
        match source.secret(namespace, name) {
            Lookup::Found(values) => values.get(key).cloned().map_or(Self::NoKey, Self::Value),
            Lookup::Missing | Lookup::Invalid => Self::NoSecret,
        }
    }
}

// === impl FieldError ===

impl FieldError {
    pub(crate) fn new(reason: Reason, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason, field: field.into(), message: message.into() }
    }
}
