//! The App and the Clients for the tests.

use k8s_openapi::ByteString;
use latchkey_crds::{
    app::App,
    client::Client,
    names::{NAME_ANNOTATION, NAMESPACE_ANNOTATION, RENDERED_APP_KEY},
    rendered::{FORMAT, RenderedClient, SigningAlgorithm},
};
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::validate::ClientPolicy;
use crate::{
    app::{
        keys::KeyDocument,
        render::{Room, render},
        resolve::{Ownership, resolve},
        validate::{ValidatedApp, validate},
    },
    context::Context,
    facts::Settings,
    manifests::Manifests,
    watch::PublishedApp,
};

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

/// Returns the policy of an App with the audiences `ops` and `https://api.example.com`. The App accepts no Clients of
/// other namespaces.
pub(crate) fn policy() -> ClientPolicy {
    policy_of(json!({}))
}

/// Like [`policy`], but the spec of the App also has these fields.
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

/// Returns a spec in which the field `web` has one redirect URL and these fields.
pub(crate) fn web(fields: Value) -> Value {
    let mut web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
    web.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({ "web": web })
}

/// Returns the validated App `identity/platform`, without Clients.
pub(crate) fn validated() -> ValidatedApp {
    let facts = resolve(app(json!({})), Ownership::Ours, false, &Manifests::default());
    let settings = Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false };
    validate(&facts, &settings).unwrap()
}

/// Returns the rendered Secret of the App `identity/platform`. Its document contains these clients.
pub(crate) fn rendered_secret(clients: Vec<RenderedClient>) -> Value {
    let validated = ValidatedApp { clients, ..validated() };
    let keys = KeyDocument::first(&validated.app_id, SigningAlgorithm::ES256, OffsetDateTime::UNIX_EPOCH).unwrap();
    let rendered = render(&validated, &keys, Room::new(FORMAT, u64::MAX)).unwrap();
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {
            "name": "latchkey-app-platform", "namespace": "latchkey", "uid": "1", "resourceVersion": "7",
            "annotations": { NAMESPACE_ANNOTATION: "identity", NAME_ANNOTATION: "platform" },
        },
        "data": { RENDERED_APP_KEY: ByteString(rendered.bytes) },
    })
}

/// Records that the published document of the App `identity/platform` contains these clients.
pub(crate) fn record_document(context: &Context, clients: Vec<RenderedClient>) {
    let secret = serde_json::from_value(rendered_secret(clients)).unwrap();
    let published = PublishedApp::from_secret(&secret).unwrap();
    context.objects.published.record_write("latchkey-app-platform", published);
}
