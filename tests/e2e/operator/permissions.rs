//! The operator needs every permission that the chart grants, and logs a missing one.

use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Secret};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use latchkey_crds::{
    app::App as Resource,
    conditions::{ConditionStatus, ConditionType},
    names::{HANDLED_ROTATION_ANNOTATION, ROTATE_KEYS_ANNOTATION, ROTATE_SECRET_ANNOTATION},
};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::{Installation, OperatorProcess, Permission, TestCluster},
    eventually,
};
use serde_json::json;

use super::helpers::wait_for_condition;

/// Time limit for one step of the test. The operator logs a missing permission within a second or two.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a Lease lasts without a renewal.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// The name of the Client that [`run_lifecycle`] creates for an App.
const CLIENT: &str = "grafana";
/// Number of installations, which test different permissions at the same time.
const INSTALLS: usize = 4;

#[tokio::test]
async fn the_operator_needs_each_permission_and_logs_a_missing_one() {
    let cluster = TestCluster::start().await.unwrap();
    let mut installs = Vec::new();
    for _ in 0..INSTALLS {
        installs.push(cluster.install().await);
    }
    let permissions = installs[0].permissions("operator");
    assert!(permissions.len() > 20, "{permissions:?}");
    // Each installation has the same permissions, in its own roles. So each installation can test a part of the
    // permissions.
    let checks = installs.iter().enumerate().map(|(number, install)| async move {
        let mut unneeded = Vec::new();
        let all_permissions = install.permissions("operator");
        for permission in all_permissions.into_iter().skip(number).step_by(INSTALLS) {
            if !is_needed(install, &permission).await {
                unneeded.push(permission);
            }
        }
        unneeded
    });
    let unneeded: Vec<_> = join_all(checks).await.into_iter().flatten().collect();
    assert!(unneeded.is_empty(), "nothing broke without {unneeded:#?}");
}

/// Only an operator that watches all namespaces can read Namespaces.
#[tokio::test]
async fn an_operator_that_watches_all_namespaces_logs_that_it_cannot_read_namespaces() {
    let cluster = TestCluster::start().await.unwrap();
    let install = cluster.builder().watch_all_namespaces().install().await;
    let of_namespaces: Vec<_> =
        install.permissions("operator").into_iter().filter(|permission| permission.resource == "namespaces").collect();
    assert_eq!(of_namespaces.iter().map(|permission| permission.verb.as_str()).collect::<Vec<_>>(), ["list", "watch"]);
    for permission in of_namespaces {
        install.revoke(&permission).await.unwrap();
        let operator = install.start_operator().await;
        wait_until_logged(&operator, &permission).await;
        operator.terminate().await;
        install.grant(&permission).await.unwrap();
    }
}

/// Runs the lifecycle of an App and a Client without the permission. Returns whether the operator logs that the
/// permission is missing.
async fn is_needed(install: &Installation<'_>, permission: &Permission) -> bool {
    install.revoke(permission).await.unwrap();
    // Deletes the Lease, so that the operator must create it.
    let leases: Api<Lease> = Api::namespaced(install.admin(), install.namespace());
    drop(leases.delete(install.lease(), &DeleteParams::default()).await);
    let server = install.start_server().await;
    let provider = Provider::new(&format!("p{:08x}", rand::random::<u32>()), "github");
    let app = App::new("shop")
        .relay(Relay::of(&install.smtp))
        .template("confirm.txt", "{{ code }}")
        .provider(&provider)
        .set("/pages/mode", "Enabled")
        .set("/deletionPolicy", "Delete");
    install.apply_provider(&provider).await.unwrap();
    install.apply(&app).await.unwrap();
    let operator = install.start_operator().await;
    let is_logged = tokio::select! {
        () = wait_until_logged(&operator, permission) => true,
        // The operator renews the Lease every two seconds. The lifecycle can end before the next renewal.
        () = run_lifecycle(install, &app) => tokio::time::timeout(LEASE_DURATION, wait_until_logged(&operator, permission)).await.is_ok(),
    };
    operator.terminate().await;
    install.grant(permission).await.unwrap();
    server.remove().await.unwrap();
    remove_app(install, &app).await;
    is_logged
}

fn missing_permission_text(permission: &Permission) -> String {
    // The API server's message for a missing permission. Its quotation marks are escaped, because the log contains the
    // message in a JSON string.
    format!("cannot {} resource \\\"{}\\\"", permission.verb, permission.resource)
}

async fn wait_until_logged(operator: &OperatorProcess, permission: &Permission) {
    let text = missing_permission_text(permission);
    eventually(&text, LIMIT * 4, || async { operator.read_log().contains(&text).then_some(()) }).await;
}

/// Waits until the App is Ready, rotates its keys twice, rotates the secret of a Client, and deletes the App. Then
/// creates and deletes an App with `Retain`.
async fn run_lifecycle(install: &Installation<'_>, app: &App) {
    install.wait_until_ready(app).await;
    let apps = install.apps();
    for rotation in ["one", "two"] {
        let annotation = json!({ "metadata": { "annotations": { ROTATE_KEYS_ANNOTATION: rotation } } });
        let before = key_states(&apps.get(app.id()).await.unwrap());
        apps.patch(app.id(), &PatchParams::default(), &Patch::Merge(annotation)).await.unwrap();
        eventually("the keys changed", LIMIT, || async {
            let now = key_states(&apps.get(app.id()).await.ok()?);
            (now != before).then_some(())
        })
        .await;
        // When the App is Ready again, the server has the new HMAC key, and the key becomes Active.
        install.wait_until_ready(app).await;
    }
    rotate_client_secret(install, app).await;
    install.delete(app).await.unwrap();
    wait_until_deleted(&apps, app).await;

    let kept = App::new("kept");
    install.apply(&kept).await.unwrap();
    install.wait_until_ready(&kept).await;
    install.delete(&kept).await.unwrap();
    wait_until_deleted(&apps, &kept).await;
    let document = latchkey_crds::names::rendered_app_secret(&kept.id().parse().unwrap());
    let secrets: Api<Secret> = Api::namespaced(install.admin(), install.namespace());
    eventually("the rendered Secret is deleted", LIMIT, || async {
        secrets.get_opt(&document).await.ok()?.is_none().then_some(())
    })
    .await;
}

/// Creates a Client of the App, waits until it is Ready, and rotates its secret.
async fn rotate_client_secret(install: &Installation<'_>, app: &App) {
    let client = |annotations: serde_json::Value| {
        json!({
            "apiVersion": "latchkey.dev/v1alpha1",
            "kind": "Client",
            "metadata": { "name": CLIENT, "namespace": install.tenant(), "annotations": annotations },
            "spec": {
                "appRef": { "name": app.id() },
                "web": { "redirectURLs": ["https://grafana.example.com/login"] },
            },
        })
    };
    install.apply_all(&[client(json!({}))]).await.unwrap();
    let ready = ("Client", install.tenant(), CLIENT);
    wait_for_condition(install, ready, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    install.apply_all(&[client(json!({ ROTATE_SECRET_ANNOTATION: "one" }))]).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(install.admin(), install.tenant());
    eventually("the client secret is rotated", LIMIT, || async {
        let secret = secrets.get_opt(&format!("{CLIENT}-oidc")).await.ok()??;
        (secret.annotations().get(HANDLED_ROTATION_ANNOTATION).map(String::as_str) == Some("one")).then_some(())
    })
    .await;
}

fn key_states(app: &Resource) -> Vec<String> {
    let status = app.status.clone().unwrap_or_default();
    status.signing_keys.iter().chain(&status.hmac_keys).map(|key| format!("{} {:?}", key.id, key.state)).collect()
}

async fn wait_until_deleted(apps: &Api<Resource>, app: &App) {
    eventually("the App is deleted", LIMIT, || async { apps.get_opt(app.id()).await.ok()?.is_none().then_some(()) })
        .await;
}

/// Removes the App, so that the next operator does not fail because of it.
async fn remove_app(install: &Installation<'_>, app: &App) {
    let apps = install.apps();
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("latchkey.dev", "v1alpha1", "Client"));
    let clients: Api<DynamicObject> = Api::namespaced_with(install.admin(), install.tenant(), &resource);
    drop(clients.delete(CLIENT, &DeleteParams::default()).await);
    let tenant_secrets: Api<Secret> = Api::namespaced(install.admin(), install.tenant());
    drop(tenant_secrets.delete(&format!("{CLIENT}-oidc"), &DeleteParams::default()).await);
    let no_finalizers = json!({ "metadata": { "finalizers": [] } });
    drop(apps.patch(app.id(), &PatchParams::default(), &Patch::Merge(no_finalizers)).await);
    drop(apps.delete(app.id(), &DeleteParams::default()).await);
    wait_until_deleted(&apps, app).await;
}
