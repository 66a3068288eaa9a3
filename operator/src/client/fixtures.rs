//! The App and the Clients of the tests.

use latchkey_crds::{app::App, client::Client};
use serde_json::{Value, json};

use super::validate::ClientPolicy;

/// Builds the App `identity/platform` with pages and these fields.
pub(crate) fn app(fields: Value) -> App {
    let mut spec = json!({ "pages": { "mode": "Enabled" } });
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "App",
        "metadata": { "name": "platform", "namespace": "identity" },
        "spec": spec,
    }))
    .unwrap()
}

/// Returns the policy of an App with the audiences `ops` and `https://api.example.com`, which grants nothing.
pub(crate) fn policy() -> ClientPolicy {
    policy_of(json!({}))
}

/// Returns the policy of the same App with these fields.
pub(crate) fn policy_of(fields: Value) -> ClientPolicy {
    let mut all = json!({ "tokens": { "audiences": ["ops", "https://api.example.com"] } });
    all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    ClientPolicy::of_app(&app(all), &"platform".parse().unwrap())
}

/// Builds a web client of the App, with these fields in its spec. A null removes a field.
pub(crate) fn client_with(namespace: &str, name: &str, fields: Value) -> Client {
    let mut spec = web(json!({}));
    spec["appRef"] = json!({ "name": "platform", "namespace": "identity" });
    let members = spec.as_object_mut().unwrap();
    members.extend(fields.as_object().unwrap().clone());
    members.retain(|_, value| !value.is_null());
    serde_json::from_value(json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Client",
        "metadata": {
            "name": name, "namespace": namespace, "generation": 1, "uid": format!("uid-of-{namespace}/{name}"),
        },
        "spec": spec,
    }))
    .unwrap()
}

/// Returns the field `web` with these fields and one redirect URL.
pub(crate) fn web(fields: Value) -> Value {
    let mut web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
    web.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({ "web": web })
}
