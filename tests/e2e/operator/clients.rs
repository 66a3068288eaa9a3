//! Clients: which Clients an App accepts, their Secrets, and their statuses.

use std::time::{Duration, Instant};

use aws_lc_rs::digest;
use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ObjectMeta, Patch, PatchParams, PostParams},
};
use latchkey_crds::{
    conditions::{ConditionStatus, ConditionType},
    names::{CLIENT_SECRET_TYPE, RENDERED_APP_KEY, ROTATE_SECRET_ANNOTATION},
    rendered::Revision,
};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, RevisionScript, TestCluster},
    control_plane::audit::AuditEvent,
    eventually, eventually_ok,
};
use serde_json::{Value, json};

use super::{
    helpers::{
        LIMIT, conditions_of, get_object, key_secret_name, operator_secrets, rendered_document, rendered_secret,
        rendered_secret_name, secret_object, secret_values, wait_for_condition,
    },
    leader::{leader_and_standby, wait_until_leader},
};

/// An App with pages.
fn app_with_pages(prefix: &str) -> App {
    App::new(prefix).set("/pages/mode", "Enabled")
}

/// A web client of an App, with more fields in its spec.
fn client_object(namespace: &str, name: &str, (app_namespace, app): (&str, &App), fields: &Value) -> Value {
    let mut spec = json!({
        "appRef": { "name": app.id(), "namespace": app_namespace },
        "web": { "redirectURLs": ["https://grafana.example.com/login"] },
    });
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Client",
        "metadata": { "name": name, "namespace": namespace },
        "spec": spec,
    })
}

/// The field `web` with one redirect URL and more fields.
fn web(fields: &Value) -> Value {
    let mut web = json!({ "redirectURLs": ["https://grafana.example.com/login"] });
    web.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({ "web": web })
}

/// Applies a web client in the first tenant's namespace, for an App in that namespace.
async fn apply_client(install: &Installation<'_>, app: &App, name: &str, fields: &Value) {
    let tenant = install.tenant();
    install.apply_all(&[client_object(tenant, name, (tenant, app), fields)]).await.unwrap();
}

async fn apply_app(install: &Installation<'_>, app: &App) {
    install.apply(app).await.unwrap();
    install.wait_until_ready(app).await;
}

async fn wait_until_ready(install: &Installation<'_>, namespace: &str, name: &str) {
    let client = ("Client", namespace, name);
    wait_for_condition(install, client, ConditionType::Ready, ConditionStatus::True, "Ready").await;
}

async fn wait_until_refused(install: &Installation<'_>, namespace: &str, name: &str, reason: &str) -> String {
    let client = ("Client", namespace, name);
    wait_for_condition(install, client, ConditionType::Ready, ConditionStatus::False, reason).await;
    wait_for_condition(install, client, ConditionType::Accepted, ConditionStatus::False, reason).await
}

async fn wait_until_unresolved(install: &Installation<'_>, namespace: &str, name: &str, reason: &str) -> String {
    let client = ("Client", namespace, name);
    wait_for_condition(install, client, ConditionType::Accepted, ConditionStatus::True, "Accepted").await;
    wait_for_condition(install, client, ConditionType::ResolvedRefs, ConditionStatus::False, reason).await
}

fn clients(install: &Installation<'_>, namespace: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("latchkey.dev", "v1alpha1", "Client"));
    Api::namespaced_with(install.admin(), namespace, &resource)
}

fn secrets(install: &Installation<'_>, namespace: &str) -> Api<Secret> {
    Api::namespaced(install.admin(), namespace)
}

/// Requests a rotation of the client secret.
async fn request_rotation(install: &Installation<'_>, name: &str, request: &str) {
    let annotation = json!({ "metadata": { "annotations": { ROTATE_SECRET_ANNOTATION: request } } });
    let api = clients(install, install.tenant());
    api.patch(name, &PatchParams::default(), &Patch::Merge(annotation)).await.unwrap();
}

/// Waits until the document of the App does not have the Client. The status can report a refusal up to half a second
/// before the document changes.
async fn wait_until_not_rendered(install: &Installation<'_>, app: &App, name: &str) {
    eventually("the document does not have the Client", LIMIT, || async {
        rendered_client(install, app, name).await.is_null().then_some(())
    })
    .await;
}

/// The client in the rendered document of the App; null if the document does not have it.
async fn rendered_client(install: &Installation<'_>, app: &App, name: &str) -> Value {
    let document = rendered_document(install, app).await;
    let found =
        document["clients"].as_array().and_then(|all| all.iter().find(|client| client["name"] == name).cloned());
    found.unwrap_or_default()
}

/// Waits until the document of the App has this hash for the newest secret of the Client.
async fn wait_for_hash(install: &Installation<'_>, app: &App, name: &str, sha256: &str) {
    eventually(&format!("the document has the hash of the secret of {name}"), LIMIT, || async {
        (rendered_client(install, app, name).await["authentication"]["sha256"] == sha256).then_some(())
    })
    .await;
}

fn sha256(value: &[u8]) -> String {
    STANDARD.encode(digest::digest(&digest::SHA256, value))
}

/// The client secret in the Secret that the operator has created.
async fn client_secret(install: &Installation<'_>, name: &str) -> Vec<u8> {
    let secret = secrets(install, install.tenant()).get(&format!("{name}-oidc")).await.unwrap();
    secret_values(&secret)["client-secret"].clone()
}

/// The conditions of an App, without the times and generations.
async fn app_conditions(install: &Installation<'_>, app: &App) -> Vec<(String, ConditionStatus, String, String)> {
    let object = get_object(install, "App", install.tenant(), app.id()).await.unwrap();
    let conditions = conditions_of(&object).unwrap().into_iter();
    conditions.map(|one| (one.type_, one.status, one.reason, one.message)).collect()
}

#[tokio::test]
async fn an_applied_client_becomes_ready_with_a_created_secret() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    let conditions_before = app_conditions(&install, &app).await;
    apply_client(&install, &app, "grafana", &json!({ "displayName": "Grafana" })).await;
    wait_until_ready(&install, tenant, "grafana").await;

    let issuer = format!("{}/{}", install.base_url(), app.id());
    let client_id = format!("{tenant}.grafana");
    let object = get_object(&install, "Client", tenant, "grafana").await.unwrap();
    let status = &object.data["status"];
    assert_eq!(status["clientID"], client_id.as_str());
    assert_eq!(status["issuer"], issuer.as_str());
    assert_eq!(status["secretName"], "grafana-oidc");
    for type_ in ConditionType::CLIENT {
        let conditions = conditions_of(&object).unwrap();
        let condition = conditions.iter().find(|one| one.type_ == type_.as_str()).unwrap();
        assert_eq!(condition.status, ConditionStatus::True, "{condition:?}");
    }
    assert!(object.finalizers().is_empty());

    let secret = secrets(&install, tenant).get("grafana-oidc").await.unwrap();
    assert_eq!(secret.type_.as_deref(), Some(CLIENT_SECRET_TYPE));
    let owner = &secret.owner_references()[0];
    assert_eq!((&owner.uid, owner.controller), (&object.uid().unwrap(), Some(true)));
    let values = secret_values(&secret);
    assert_eq!(values.keys().collect::<Vec<_>>(), ["client-id", "client-secret", "issuer"]);
    assert_eq!((&values["issuer"][..], &values["client-id"][..]), (issuer.as_bytes(), client_id.as_bytes()));
    assert!(values["client-secret"].starts_with(b"lks_"));

    let rendered = rendered_client(&install, &app, "grafana").await;
    assert_eq!(rendered["authentication"], json!({ "method": "secret", "sha256": sha256(&values["client-secret"]) }));
    assert_eq!(rendered["uid"], object.uid().unwrap().as_str());
    assert_eq!(rendered["displayName"], "Grafana");

    let begun = Instant::now();
    apply_client(&install, &app, "grafana", &json!({ "displayName": "Edited" })).await;
    wait_until_ready(&install, tenant, "grafana").await;
    println!("an edited Client was Ready after {:?}", begun.elapsed());
    assert_eq!(rendered_client(&install, &app, "grafana").await["displayName"], "Edited");
    let after = secrets(&install, tenant).get("grafana-oidc").await.unwrap();
    assert_eq!(after.resource_version(), secret.resource_version(), "the edit does not affect the Secret");
    assert_eq!(app_conditions(&install, &app).await, conditions_before, "Clients never change the App's conditions");
}

#[tokio::test]
async fn an_app_accepts_clients_only_from_namespaces_that_it_allows() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, other) = (install.tenant(), install.tenants()[1].as_str());
    let app = app_with_pages("platform");
    let with_grant = |namespaces: Value| app.clone().set("/clients", json!({ "namespaces": namespaces }));
    apply_client(&install, &app, "own", &json!({})).await;
    let foreign = client_object(other, "foreign", (tenant, &app), &json!({}));
    install.apply_all(&[foreign]).await.unwrap();
    let message = wait_until_refused(&install, tenant, "own", "AppNotFound").await;
    assert!(message.contains(&format!("App {} does not exist", app.id())), "{message}");
    let without_app = wait_until_refused(&install, other, "foreign", "NotGranted").await;

    apply_app(&install, &app).await;
    wait_until_ready(&install, tenant, "own").await;
    let without_grant = wait_until_refused(&install, other, "foreign", "NotGranted").await;
    assert_eq!(without_grant, without_app, "the message does not reveal whether the App exists");
    wait_until_not_rendered(&install, &app, "foreign").await;
    assert!(secrets(&install, other).get_opt("foreign-oidc").await.unwrap().is_none());

    let label = "kubernetes.io/metadata.name";
    for (grant, withdrawal) in [
        (json!({ "from": "All" }), json!({ "from": "Same" })),
        (
            json!({ "from": "Selector", "selector": { "matchLabels": { label: other } } }),
            json!({ "from": "Selector", "selector": { "matchLabels": { label: "somewhere" } } }),
        ),
        (
            json!({ "from": "Selector", "selector": {
                "matchExpressions": [{ "key": label, "operator": "In", "values": [other] }],
            }}),
            json!({ "from": "Same" }),
        ),
    ] {
        install.apply(&with_grant(grant.clone())).await.unwrap();
        wait_until_ready(&install, other, "foreign").await;
        assert_eq!(rendered_client(&install, &app, "foreign").await["clientID"], format!("{other}.foreign"));
        install.apply(&with_grant(withdrawal)).await.unwrap();
        wait_until_refused(&install, other, "foreign", "NotGranted").await;
        wait_until_not_rendered(&install, &app, "foreign").await;
        wait_until_ready(&install, tenant, "own").await;
    }

    // If the App is deleted, its Clients report it.
    install.delete(&app).await.unwrap();
    wait_until_refused(&install, tenant, "own", "AppNotFound").await;
}

/// Only an operator that watches all namespaces can read their labels.
#[tokio::test]
async fn labels_of_a_namespace_grant_and_withdraw_access_to_an_app() {
    let cluster = TestCluster::start().await.unwrap();
    let install = cluster.builder().watch_all_namespaces().tenants(2).install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, other) = (install.tenant(), install.tenants()[1].as_str());
    let selector = json!({ "from": "Selector", "selector": { "matchLabels": { "env": "live" } } });
    let app = app_with_pages("platform").set("/clients", json!({ "namespaces": selector }));
    apply_app(&install, &app).await;
    install.apply_all(&[client_object(other, "foreign", (tenant, &app), &json!({}))]).await.unwrap();
    wait_until_refused(&install, other, "foreign", "NotGranted").await;
    let namespaces: Api<Namespace> = Api::all(install.admin());
    let set_label = async |value: Value| {
        let labels = json!({ "metadata": { "labels": { "env": value } } });
        namespaces.patch(other, &PatchParams::default(), &Patch::Merge(labels)).await.unwrap();
    };
    set_label(json!("live")).await;
    wait_until_ready(&install, other, "foreign").await;
    set_label(json!("test")).await;
    wait_until_refused(&install, other, "foreign", "NotGranted").await;
    wait_until_not_rendered(&install, &app, "foreign").await;
    set_label(json!("live")).await;
    wait_until_ready(&install, other, "foreign").await;
    set_label(Value::Null).await;
    wait_until_refused(&install, other, "foreign", "NotGranted").await;
}

#[tokio::test]
async fn a_client_id_belongs_to_the_oldest_client_until_it_is_deleted() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    // If both Clients are created in the same second, the first by name counts as the older one.
    for name in ["a-first", "b-second"] {
        apply_client(&install, &app, name, &json!({ "clientID": "grafana" })).await;
    }
    wait_until_ready(&install, tenant, "a-first").await;
    wait_until_refused(&install, tenant, "b-second", "ClientIDConflict").await;
    assert!(secrets(&install, tenant).get_opt("b-second-oidc").await.unwrap().is_none());
    clients(&install, tenant).delete("a-first", &DeleteParams::default()).await.unwrap();
    wait_until_ready(&install, tenant, "b-second").await;
    assert_eq!(rendered_client(&install, &app, "b-second").await["clientID"], "grafana");
    assert_eq!(rendered_client(&install, &app, "a-first").await, Value::Null);
    apply_client(&install, &app, "reserved", &json!({ "clientID": app.id() })).await;
    wait_until_refused(&install, tenant, "reserved", "InvalidSpec").await;
}

#[tokio::test]
async fn a_client_of_an_app_without_pages_is_refused_and_removed() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "grafana", &json!({})).await;
    wait_until_ready(&install, tenant, "grafana").await;
    let without_pages = app.clone().set("/pages/mode", "Disabled");
    install.apply(&without_pages).await.unwrap();
    wait_until_refused(&install, tenant, "grafana", "PagesOff").await;
    assert_eq!(rendered_document(&install, &app).await.get("clients"), None);
    install.wait_until_ready(&without_pages).await;
    install.apply(&app).await.unwrap();
    wait_until_ready(&install, tenant, "grafana").await;
}

#[tokio::test]
async fn a_client_is_served_as_before_if_its_new_spec_is_not_accepted() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "grafana", &json!({ "displayName": "Before" })).await;
    wait_until_ready(&install, tenant, "grafana").await;
    let before = rendered_client(&install, &app, "grafana").await;
    let invalid = json!({ "displayName": "After", "tokens": { "audiences": ["https://other.example.com"] } });
    apply_client(&install, &app, "grafana", &invalid).await;
    wait_until_refused(&install, tenant, "grafana", "InvalidSpec").await;
    let programmed = ("Client", tenant, "grafana");
    let message =
        wait_for_condition(&install, programmed, ConditionType::Programmed, ConditionStatus::Unknown, "Pending").await;
    assert!(message.contains("still served"), "{message}");
    assert_eq!(rendered_client(&install, &app, "grafana").await, before);
}

#[tokio::test]
async fn a_secret_that_the_client_does_not_own_is_never_changed() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    let of_type = {
        let mut secret = secret_object(tenant, "typed-oidc", &[("client-secret", "0123456789abcdef")]);
        secret["type"] = json!(CLIENT_SECRET_TYPE);
        secret
    };
    let opaque = secret_object(tenant, "opaque-oidc", &[("client-secret", "0123456789abcdef")]);
    install.apply_all(&[of_type, opaque]).await.unwrap();
    for name in ["typed", "opaque"] {
        let secret_name = format!("{name}-oidc");
        let before = secrets(&install, tenant).get(&secret_name).await.unwrap();
        apply_client(&install, &app, name, &json!({})).await;
        let message = wait_until_unresolved(&install, tenant, name, "SecretConflict").await;
        assert!(message.contains(&secret_name), "{message}");
        let rendered = rendered_client(&install, &app, name).await;
        assert_eq!(rendered["authentication"], json!({ "method": "unresolved" }));
        request_rotation(&install, name, "1").await;
        wait_until_unresolved(&install, tenant, name, "SecretConflict").await;
        let after = secrets(&install, tenant).get(&secret_name).await.unwrap();
        assert_eq!(after.resource_version(), before.resource_version());

        secrets(&install, tenant).delete(&secret_name, &DeleteParams::default()).await.unwrap();
        wait_until_ready(&install, tenant, name).await;
        wait_for_hash(&install, &app, name, &sha256(&client_secret(&install, name).await)).await;
    }
}

#[tokio::test]
async fn an_edited_client_secret_is_repaired_or_adopted_but_a_deleted_one_is_replaced() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "grafana", &json!({})).await;
    wait_until_ready(&install, tenant, "grafana").await;
    let api = secrets(&install, tenant);
    let original = secret_values(&api.get("grafana-oidc").await.unwrap());
    let patch = async |values: Value| {
        api.patch("grafana-oidc", &PatchParams::default(), &Patch::Merge(values)).await.unwrap();
    };

    patch(json!({ "data": { "issuer": null }, "stringData": { "client-id": "other", "more": "kept" } })).await;
    eventually("issuer and client-id are repaired", LIMIT, || async {
        let values = secret_values(&api.get("grafana-oidc").await.ok()?);
        let is_same = |key: &str| values.get(key) == Some(&original[key]);
        (is_same("issuer") && is_same("client-id") && is_same("client-secret")).then_some(())
    })
    .await;
    assert_eq!(secret_values(&api.get("grafana-oidc").await.unwrap())["more"], b"kept");

    patch(json!({ "stringData": { "client-secret": "a secret of my own" } })).await;
    wait_for_hash(&install, &app, "grafana", &sha256(b"a secret of my own")).await;
    assert_eq!(client_secret(&install, "grafana").await, b"a secret of my own");

    patch(json!({ "stringData": { "client-secret": "short" } })).await;
    eventually("a value that cannot be used is replaced", LIMIT, || async {
        client_secret(&install, "grafana").await.starts_with(b"lks_").then_some(())
    })
    .await;
    let replaced = client_secret(&install, "grafana").await;
    wait_for_hash(&install, &app, "grafana", &sha256(&replaced)).await;

    api.delete("grafana-oidc", &DeleteParams::default()).await.unwrap();
    let created = eventually("a deleted Secret is created again", LIMIT, || async {
        api.get_opt("grafana-oidc").await.ok()?.map(|secret| secret_values(&secret)["client-secret"].clone())
    })
    .await;
    assert!(created != replaced && created != original["client-secret"]);
    wait_for_hash(&install, &app, "grafana", &sha256(&created)).await;
    assert_eq!(rendered_client(&install, &app, "grafana").await["authentication"]["previous"], Value::Null);
    wait_until_ready(&install, tenant, "grafana").await;
}

#[tokio::test]
async fn a_rotation_keeps_the_previous_secret_until_the_end_of_the_overlap() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "grafana", &web(&json!({ "secret": { "rotationOverlapSeconds": 15 } }))).await;
    wait_until_ready(&install, tenant, "grafana").await;
    let before = sha256(&client_secret(&install, "grafana").await);

    request_rotation(&install, "grafana", "1").await;
    let both = eventually("the document has both secrets", LIMIT, || async {
        let authentication = rendered_client(&install, &app, "grafana").await["authentication"].clone();
        (authentication["previous"]["sha256"] == before.as_str()).then_some(authentication)
    })
    .await;
    let rotated = client_secret(&install, "grafana").await;
    assert_eq!(both["sha256"], sha256(&rotated));
    assert_ne!(both["sha256"], before.as_str());
    assert!(both["previous"]["expiresAt"].is_i64());
    // The same request, a removed annotation and another edit of the Client cause no rotation.
    request_rotation(&install, "grafana", "1").await;
    let removed = json!({ "metadata": { "annotations": { ROTATE_SECRET_ANNOTATION: null } } });
    clients(&install, tenant).patch("grafana", &PatchParams::default(), &Patch::Merge(removed)).await.unwrap();
    wait_until_ready(&install, tenant, "grafana").await;

    eventually("the previous secret has ended", LIMIT, || async {
        let authentication = rendered_client(&install, &app, "grafana").await["authentication"].clone();
        authentication.get("previous").is_none().then_some(())
    })
    .await;
    assert_eq!(client_secret(&install, "grafana").await, rotated);
    wait_for_hash(&install, &app, "grafana", &sha256(&rotated)).await;
    wait_until_ready(&install, tenant, "grafana").await;
}

/// Whether the event is a successful update of this Secret.
fn is_update_of(event: &AuditEvent, secret: &str) -> bool {
    event.resource == "secrets" && event.name == secret && event.verb == "update" && event.status == 200
}

#[tokio::test]
async fn a_rotation_happens_once_even_if_the_leader_is_killed() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let operators = [install.start_operator().await, install.start_operator().await];
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "grafana", &json!({})).await;
    wait_until_ready(&install, tenant, "grafana").await;
    // The leader is killed before, during and after the rotation.
    for (round, delay_ms) in [0, 5, 15, 40].into_iter().enumerate() {
        let [leader, standby] = leader_and_standby(&install, &operators).await;
        let before = client_secret(&install, "grafana").await;
        let mark = install.cluster().plane().audit_mark();
        request_rotation(&install, "grafana", &round.to_string()).await;
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        leader.kill();
        wait_until_leader(&install, standby).await;
        let authentication = eventually("the document has both secrets", LIMIT, || async {
            let authentication = rendered_client(&install, &app, "grafana").await["authentication"].clone();
            (authentication["previous"]["sha256"] == sha256(&before)).then_some(authentication)
        })
        .await;
        assert_eq!(authentication["sha256"], sha256(&client_secret(&install, "grafana").await));
        leader.start().unwrap();
        wait_until_ready(&install, tenant, "grafana").await;
        // If the new leader rotated a second time, it would do so before this other Client becomes Ready. Then the
        // Secret and the document would have other values, and the audit log two updates of the Secret. The log can
        // also have none: if the killed leader sent the update, the API server may not have logged its success.
        let other = format!("other-{round}");
        apply_client(&install, &app, &other, &json!({})).await;
        wait_until_ready(&install, tenant, &other).await;
        assert_eq!(rendered_client(&install, &app, "grafana").await["authentication"], authentication);
        assert_eq!(authentication["sha256"], sha256(&client_secret(&install, "grafana").await));
        let events = install.cluster().plane().audit_since(mark).unwrap();
        let events = events.iter().filter(|event| event.namespace == tenant && event.name == "grafana-oidc");
        let updates = events.clone().filter(|event| is_update_of(event, "grafana-oidc")).count();
        assert!(updates <= 1, "killed after {delay_ms} ms: {:?}", events.collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn a_client_can_reference_a_secret_or_keys() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    let own = web(&json!({
        "secretRef": { "name": "own", "key": "current" }, "previousSecretRef": { "name": "own", "key": "former" },
    }));
    apply_client(&install, &app, "own", &own).await;
    let message = wait_until_unresolved(&install, tenant, "own", "SecretNotFound").await;
    assert!(message.contains("Secret own does not exist"), "{message}");
    assert_eq!(rendered_client(&install, &app, "own").await["authentication"], json!({ "method": "unresolved" }));
    assert!(secrets(&install, tenant).get_opt("own-oidc").await.unwrap().is_none(), "the operator creates none");
    let apply_secret = async |values: &[(&str, &str)]| {
        install.apply_all(&[secret_object(tenant, "own", values)]).await.unwrap();
    };
    apply_secret(&[("current", "the first of my own")]).await;
    wait_until_unresolved(&install, tenant, "own", "SecretKeyNotFound").await;
    wait_for_hash(&install, &app, "own", &sha256(b"the first of my own")).await;
    apply_secret(&[("current", "the second of my own"), ("former", "the first of my own")]).await;
    wait_for_hash(&install, &app, "own", &sha256(b"the second of my own")).await;
    wait_until_ready(&install, tenant, "own").await;
    let authentication = rendered_client(&install, &app, "own").await["authentication"].clone();
    assert_eq!(authentication["previous"]["sha256"], sha256(b"the first of my own"));
    apply_secret(&[("current", "short"), ("former", "the first of my own")]).await;
    wait_until_unresolved(&install, tenant, "own", "SecretKeyInvalid").await;
    secrets(&install, tenant).delete("own", &DeleteParams::default()).await.unwrap();
    wait_until_unresolved(&install, tenant, "own", "SecretNotFound").await;
    assert_eq!(rendered_client(&install, &app, "own").await["authentication"], json!({ "method": "unresolved" }));

    let keys = web(&json!({
        "authentication": "PrivateKeyJWT", "jwksRef": { "name": "keys", "key": "jwks.json" },
    }));
    apply_client(&install, &app, "keys", &keys).await;
    wait_until_unresolved(&install, tenant, "keys", "ConfigMapNotFound").await;
    let apply_keys = async |jwks: Value| {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "keys", "namespace": tenant },
            "data": { "jwks.json": jwks.to_string() },
        });
        install.apply_all(&[map]).await.unwrap();
    };
    apply_keys(json!({ "keys": [] })).await;
    wait_until_unresolved(&install, tenant, "keys", "KeySetInvalid").await;
    // The public key of RFC 8037, appendix A.2.
    let key = json!({ "kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo" });
    apply_keys(json!({ "keys": [key] })).await;
    wait_until_ready(&install, tenant, "keys").await;
    assert_eq!(rendered_client(&install, &app, "keys").await["authentication"]["method"], "privateKeyJwt");
}

#[tokio::test]
async fn a_deleted_client_is_removed_and_a_new_one_inherits_nothing() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "grafana", &json!({})).await;
    wait_until_ready(&install, tenant, "grafana").await;
    let before = rendered_client(&install, &app, "grafana").await;
    clients(&install, tenant).delete("grafana", &DeleteParams::default()).await.unwrap();
    wait_until_not_rendered(&install, &app, "grafana").await;
    install.wait_until_ready(&app).await;

    // No garbage collector runs here, so the Secret of the deleted Client is still there.
    apply_client(&install, &app, "grafana", &json!({})).await;
    wait_until_unresolved(&install, tenant, "grafana", "SecretConflict").await;
    secrets(&install, tenant).delete("grafana-oidc", &DeleteParams::default()).await.unwrap();
    wait_until_ready(&install, tenant, "grafana").await;
    let after = rendered_client(&install, &app, "grafana").await;
    assert_ne!(after["uid"], before["uid"]);
    assert_ne!(after["authentication"], before["authentication"]);

    // A deleted Client is removed even if its App is not accepted.
    let damage = Patch::Merge(json!({ "data": null }));
    operator_secrets(&install).patch(&key_secret_name(&app), &PatchParams::default(), &damage).await.unwrap();
    install.wait_for_condition(&app, ConditionType::Accepted, ConditionStatus::False, "KeysInvalid").await;
    wait_until_ready(&install, tenant, "grafana").await;
    clients(&install, tenant).delete("grafana", &DeleteParams::default()).await.unwrap();
    wait_until_not_rendered(&install, &app, "grafana").await;
}

#[tokio::test]
async fn nothing_is_written_while_nothing_changes() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let _servers = install.start_servers(2).await;
    let operator = install.start_operator().await;
    let (tenant, other, app) = (install.tenant(), install.tenants()[1].as_str(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "created", &json!({})).await;
    apply_client(&install, &app, "conflict", &json!({ "clientID": "one" })).await;
    apply_client(&install, &app, "conflict-2", &json!({ "clientID": "one" })).await;
    let own = web(&json!({ "secretRef": { "name": "missing", "key": "secret" } }));
    apply_client(&install, &app, "own", &own).await;
    let foreign = client_object(other, "foreign", (tenant, &app), &json!({}));
    install.apply_all(std::slice::from_ref(&foreign)).await.unwrap();
    wait_until_ready(&install, tenant, "created").await;
    wait_until_ready(&install, tenant, "conflict").await;
    wait_until_refused(&install, tenant, "conflict-2", "ClientIDConflict").await;
    wait_until_unresolved(&install, tenant, "own", "SecretNotFound").await;
    wait_until_refused(&install, other, "foreign", "NotGranted").await;
    install.wait_until_ready(&app).await;

    let mark = install.cluster().plane().audit_mark();
    for round in 0..3 {
        apply_client(&install, &app, "created", &json!({})).await;
        install.apply_all(std::slice::from_ref(&foreign)).await.unwrap();
        let annotation = json!({ "metadata": { "annotations": { "latchkey.dev/note": round.to_string() } } });
        let patch = Patch::Merge(&annotation);
        for name in ["created", "conflict-2", "own"] {
            clients(&install, tenant).patch_metadata(name, &PatchParams::default(), &patch).await.unwrap();
        }
        let unused = json!({ "stringData": { "unused": round.to_string() } });
        let api = secrets(&install, tenant);
        api.patch("created-oidc", &PatchParams::default(), &Patch::Merge(&unused)).await.unwrap();
    }
    // After its start, an operator reconciles every object.
    operator.kill();
    operator.start().unwrap();
    let later = app_with_pages("later");
    apply_app(&install, &later).await;
    apply_client(&install, &later, "later", &json!({})).await;
    wait_until_ready(&install, tenant, "later").await;

    let user = install.operator_account().user_name();
    let events = install.cluster().plane().audit_since(mark).unwrap();
    let is_about_later = |event: &AuditEvent| event.name.contains(later.id()) || event.name.starts_with("later");
    let writes: Vec<_> = events
        .iter()
        .filter(|event| event.user == user && event.is_write())
        .filter(|event| !matches!(event.resource.as_str(), "leases" | "events") && !is_about_later(event))
        // Creates are checked below: the name of a created Secret is only in the request body.
        .filter(|event| event.verb != "create")
        .collect();
    assert!(writes.is_empty(), "{writes:#?}");
    let created = events.iter().filter(|event| {
        event.user == user && event.verb == "create" && event.resource == "secrets" && event.namespace == tenant
    });
    assert_eq!(created.count(), 1, "the Secret of the later Client");
    assert!(events.iter().any(|event| event.user == user && event.name == rendered_secret_name(&later)));
}

/// Waits until the App has published a revision other than this one.
async fn wait_for_other_revision(install: &Installation<'_>, app: &App, before: &str) -> String {
    eventually("the App has another revision", LIMIT, || async {
        install.get(app).await.ok()?.status?.revision.filter(|revision| revision != before)
    })
    .await
}

/// Waits until the status of an App has the revision of the published document. Returns this revision.
async fn wait_for_published_revision(install: &Installation<'_>, app: &App) -> String {
    eventually("the status has the published revision", LIMIT, || async {
        let document = secret_values(&rendered_secret(install, app).await?).remove(RENDERED_APP_KEY)?;
        let published = Revision::of(&document);
        install.get(app).await.ok()?.status?.revision.filter(|revision| revision == published.as_str())
    })
    .await
}

#[tokio::test]
async fn a_server_that_is_too_old_affects_the_clients_and_not_the_app() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    let first = install.get(&app).await.unwrap().status.unwrap().revision.unwrap();
    let scripted = install.scripted_server(RevisionScript::serving(3, app.id(), &first)).await.unwrap();
    install.wait_until_ready(&app).await;

    apply_client(&install, &app, "grafana", &json!({})).await;
    let grafana = ("Client", tenant, "grafana");
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    let message = wait_for_condition(&install, grafana, type_, status, "ServersTooOld").await;
    assert!(message.contains("format 4") && message.contains(scripted.pod().name()), "{message}");
    let with_client = wait_for_other_revision(&install, &app, &first).await;
    // The old server still serves the first document, which does not contain the Client. The App is Programmed anyway,
    // because the App's own part is the same in both documents.
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    scripted.set_script(RevisionScript::serving(3, app.id(), &with_client));
    wait_for_condition(&install, grafana, type_, status, "ServersTooOld").await;
    install.wait_until_ready(&app).await;

    scripted.set_script(RevisionScript::serving(4, app.id(), &with_client));
    wait_until_ready(&install, tenant, "grafana").await;
}

#[tokio::test]
async fn a_server_with_an_older_document_affects_only_the_clients_that_have_changed() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "old", &json!({})).await;
    wait_until_ready(&install, tenant, "old").await;
    let before = wait_for_published_revision(&install, &app).await;
    let scripted = install.scripted_server(RevisionScript::serving(4, app.id(), &before)).await.unwrap();
    wait_until_ready(&install, tenant, "old").await;
    install.wait_until_ready(&app).await;
    let object_before = get_object(&install, "Client", tenant, "old").await.unwrap();

    apply_client(&install, &app, "new", &json!({})).await;
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    let message = wait_for_condition(&install, ("Client", tenant, "new"), type_, status, "WaitingForServers").await;
    assert!(message.contains(scripted.pod().name()), "{message}");
    let after = wait_for_other_revision(&install, &app, &before).await;
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    let object = get_object(&install, "Client", tenant, "old").await.unwrap();
    assert_eq!(object.resource_version(), object_before.resource_version(), "nothing was written to the other Client");

    scripted.set_script(RevisionScript::serving(4, app.id(), &after));
    wait_until_ready(&install, tenant, "new").await;
    let object = get_object(&install, "Client", tenant, "old").await.unwrap();
    assert_eq!(object.resource_version(), object_before.resource_version());
}

#[tokio::test]
async fn a_storm_of_clients_causes_at_most_two_publishes_per_second_and_delays_no_other_namespace() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let _servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (tenant, calm) = (install.tenant(), install.tenants()[1].as_str());
    let (stormy_app, calm_app) = (app_with_pages("stormy"), app_with_pages("calm"));
    apply_app(&install, &stormy_app).await;
    install.apply_all(&calm_app.objects(calm)).await.unwrap();
    let of_calm =
        |display_name: &str| client_object(calm, "calm", (calm, &calm_app), &json!({ "displayName": display_name }));
    install.apply_all(&[of_calm("Before")]).await.unwrap();
    wait_until_ready(&install, calm, "calm").await;
    for number in 0..10 {
        apply_client(&install, &stormy_app, &format!("storm-{number}"), &json!({})).await;
    }
    for number in 0..10 {
        wait_until_ready(&install, tenant, &format!("storm-{number}")).await;
    }

    let conditions_before = app_conditions(&install, &stormy_app).await;
    let mark = install.cluster().plane().audit_mark();
    let begun = Instant::now();
    let storm = async {
        for round in 0..20 {
            for number in 0..10 {
                let fields = json!({ "displayName": format!("Round {round}") });
                apply_client(&install, &stormy_app, &format!("storm-{number}"), &fields).await;
            }
        }
    };
    let edit = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let edited = Instant::now();
        install.apply_all(&[of_calm("After")]).await.unwrap();
        wait_until_ready(&install, calm, "calm").await;
        edited.elapsed()
    };
    let ((), took) = tokio::join!(storm, edit);
    println!("during the storm, an edit in another namespace was Ready after {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    for number in 0..10 {
        wait_until_ready(&install, tenant, &format!("storm-{number}")).await;
    }
    assert_eq!(rendered_client(&install, &stormy_app, "storm-9").await["displayName"], "Round 19");
    let elapsed = begun.elapsed();
    let document = rendered_secret_name(&stormy_app);
    let events = install.cluster().plane().audit_since(mark).unwrap();
    let publishes = events.iter().filter(|event| event.verb == "patch" && event.name == document).count();
    println!("{publishes} publishes in {elapsed:?}");
    assert!(publishes >= 1 && publishes as u128 <= elapsed.as_millis() / 500 + 1, "{publishes} in {elapsed:?}");
    assert_eq!(app_conditions(&install, &stormy_app).await, conditions_before);
}

fn new_secret(name: &str, type_: &str) -> Secret {
    Secret {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        type_: Some(type_.to_owned()),
        ..Secret::default()
    }
}

/// RBAC lets the operator write every Secret of a tenant. Only the policy restricts it to the Secrets of Clients.
#[tokio::test]
async fn the_policy_lets_the_operator_write_only_secrets_of_clients() {
    let install = TestCluster::shared().await.install().await;
    let operator = install.operator_account().client().await;
    let tenant_secrets: Api<Secret> = Api::namespaced(operator.clone(), install.tenant());
    let create = async |api: &Api<Secret>, type_: &str| {
        let name = format!("s-{:016x}", rand::random::<u64>());
        api.create(&PostParams::default(), &new_secret(&name, type_)).await
    };
    // A policy takes effect a moment after its creation.
    let refused =
        eventually("the policy applies", LIMIT, || async { create(&tenant_secrets, "Opaque").await.err() }).await;
    let kube::Error::Api(status) = &refused else { panic!("{refused}") };
    assert_eq!(status.code, 403, "{status:?}");
    assert!(status.message.contains("only Secrets of the type latchkey.dev/client"), "{}", status.message);
    create(&tenant_secrets, "kubernetes.io/tls").await.unwrap_err();
    create(&tenant_secrets, CLIENT_SECRET_TYPE).await.unwrap();

    install.apply_all(&[secret_object(install.tenant(), "foreign", &[("a", "b")])]).await.unwrap();
    let mut foreign = tenant_secrets.get("foreign").await.unwrap();
    foreign.metadata.managed_fields = None;
    foreign.string_data = Some([("a".to_owned(), "c".to_owned())].into());
    tenant_secrets.replace("foreign", &PostParams::default(), &foreign).await.unwrap_err();
    foreign.type_ = Some(CLIENT_SECRET_TYPE.to_owned());
    tenant_secrets.replace("foreign", &PostParams::default(), &foreign).await.unwrap_err();
    let own_secrets: Api<Secret> = Api::namespaced(operator, install.namespace());
    create(&own_secrets, "Opaque").await.unwrap();
    // The policy restricts nobody else.
    let admin_secrets = secrets(&install, install.tenant());
    create(&admin_secrets, "Opaque").await.unwrap();

    // Without the policy, the operator can create any Secret.
    let binding = install
        .objects()
        .iter()
        .find(|object| object["kind"] == "ValidatingAdmissionPolicyBinding")
        .and_then(|object| object["metadata"]["name"].as_str())
        .expect("the chart has a binding of the policy");
    let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicyBinding");
    let bindings: Api<DynamicObject> = Api::all_with(install.admin(), &ApiResource::from_gvk(&kind));
    bindings.delete(binding, &DeleteParams::default()).await.unwrap();
    eventually_ok("the policy no longer applies", LIMIT, || create(&tenant_secrets, "Opaque")).await;
}

#[tokio::test]
async fn a_client_must_reference_a_secret_if_the_operator_creates_none() {
    let install = TestCluster::shared().await.builder().value("operator.clientSecrets=false").install().await;
    let _servers = install.start_servers(1).await;
    let operator = install.start_operator_as(install.operator_account(), &["--client-secrets=false"]);
    let (tenant, app) = (install.tenant(), app_with_pages("platform"));
    apply_app(&install, &app).await;
    apply_client(&install, &app, "created", &json!({})).await;
    let message = wait_until_unresolved(&install, tenant, "created", "SecretNotFound").await;
    assert!(message.contains("spec.web.secretRef"), "{message}");
    install.apply_all(&[secret_object(tenant, "own", &[("secret", "a secret of my own")])]).await.unwrap();
    apply_client(&install, &app, "own", &web(&json!({ "secretRef": { "name": "own", "key": "secret" } }))).await;
    wait_until_ready(&install, tenant, "own").await;
    wait_for_hash(&install, &app, "own", &sha256(b"a secret of my own")).await;
    assert!(!operator.read_log().contains("forbidden"), "the operator does not try to create Secrets");
}
