//! What the tests of the operator look at beside an App's conditions: Secrets, documents, Events, users, and what
//! kubectl says.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use http::StatusCode;
use k8s_openapi::api::{core::v1::Secret, events::v1::Event};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams},
};
use latchkey_crds::conditions::{Condition, ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    client::Anonymous,
    cluster::{Install, PodServer},
    control_plane, eventually, eventually_ok,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};

/// What the operator and the servers do, they do within a second or two; a loaded machine takes longer.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

pub(super) const PASSWORD: &str = "a quiet harbour at noon";

/// An object of ours, by kind, namespace and name: as it is stored, whether it decodes or not.
pub(super) async fn object(install: &Install<'_>, kind: &str, namespace: &str, name: &str) -> Result<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("latchkey.dev", "v1alpha1", kind));
    let api: Api<DynamicObject> = Api::namespaced_with(install.admin(), namespace, &resource);
    Ok(api.get(name).await?)
}

/// The conditions of an object of ours.
pub(super) fn conditions(object: &DynamicObject) -> Result<Vec<Condition>> {
    let conditions = object.data["status"]["conditions"].clone();
    serde_json::from_value(conditions).context("conditions")
}

/// Waits until a condition says this about the object as it is written now, and gives its message.
pub(super) async fn told(
    install: &Install<'_>,
    (kind, namespace, name): (&str, &str, &str),
    type_: ConditionType,
    status: ConditionStatus,
    reason: &str,
) -> String {
    let what = format!("{type_} of {kind} {namespace}/{name} is {status:?}, {reason}");
    eventually_ok(&what, LIMIT, || async {
        let object = object(install, kind, namespace, name).await?;
        let conditions = conditions(&object)?;
        let found = conditions.into_iter().find(|one| one.type_ == type_.as_str()).context("no such condition")?;
        ensure!(found.observed_generation == object.metadata.generation, "of another generation: {found:?}");
        ensure!(found.status == status && found.reason == reason, "{found:?}");
        Ok(found.message)
    })
    .await
}

/// The App under another name, in that namespace, and with its id as the appID.
pub(super) fn named(app: &App, name: &str, namespace: &str) -> Vec<Value> {
    let mut objects = app.objects(namespace);
    objects[0]["metadata"]["name"] = json!(name);
    objects[0]["spec"]["appID"] = json!(app.id());
    objects
}

/// A Secret with these values.
pub(super) fn secret_object(namespace: &str, name: &str, values: &[(&str, &str)]) -> Value {
    // Not as `stringData`: what is applied without a key would not take it away.
    let data: serde_json::Map<_, _> =
        values.iter().map(|(key, value)| ((*key).to_owned(), json!(STANDARD.encode(value)))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": name, "namespace": namespace },
        "data": data,
    })
}

/// The Secrets of the install's own namespace.
pub(super) fn own_secrets(install: &Install<'_>) -> Api<Secret> {
    Api::namespaced(install.admin(), install.namespace())
}

pub(super) fn rendered_name(app: &App) -> String {
    format!("latchkey-app-{}", app.id())
}

pub(super) fn keys_name(app: &App) -> String {
    format!("latchkey-keys-{}", app.id())
}

/// The rendered Secret, if there is one.
pub(super) async fn rendered(install: &Install<'_>, app: &App) -> Option<Secret> {
    own_secrets(install).get_opt(&rendered_name(app)).await.unwrap()
}

/// The key Secret, if there is one.
pub(super) async fn keys(install: &Install<'_>, app: &App) -> Option<Secret> {
    own_secrets(install).get_opt(&keys_name(app)).await.unwrap()
}

/// The values of a Secret.
pub(super) fn values(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect()
}

/// The document that is published.
pub(super) async fn document(install: &Install<'_>, app: &App) -> Value {
    let secret = rendered(install, app).await.expect("a rendered Secret");
    serde_json::from_slice(&values(&secret)["app.json"]).expect("a document")
}

/// Waits until every one of these servers serves the App, or until none does.
pub(super) async fn served(install: &Install<'_>, servers: &[PodServer], app: &App, wanted: bool) {
    for server in servers {
        let client = install.client_of(server);
        eventually(&format!("{} serves {}: {wanted}", server.name(), app.id()), LIMIT, || async {
            (serves(&client, app).await == wanted).then_some(())
        })
        .await;
    }
}

/// Whether a server serves the App at this moment.
pub(super) async fn serves(client: &Anonymous, app: &App) -> bool {
    match client.get(&format!("{}/.well-known/jwks.json", app.id())).await.status {
        StatusCode::OK => true,
        StatusCode::NOT_FOUND => false,
        other => panic!("the keys of {} answer {other}", app.id()),
    }
}

/// The ids and public keys under which the App's tokens verify.
pub(super) async fn jwks(install: &Install<'_>, server: &PodServer, app: &App) -> Value {
    let answer = install.client_of(server).get(&format!("{}/.well-known/jwks.json", app.id())).await;
    answer.expect(StatusCode::OK).body["keys"].clone()
}

/// Registers somebody of that name.
pub(super) async fn register(install: &Install<'_>, server: &PodServer, app: &App, name: &str) {
    let email = format!("{name}@example.com");
    let answer = install.client_of(server).register(app.id(), name, &email, PASSWORD).await;
    answer.expect(StatusCode::OK);
}

/// What a question that counts comes to in the install's database.
pub(super) async fn count(install: &Install<'_>, sql: &str) -> i64 {
    let mut connection = install.database.connect().await.unwrap();
    let count = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    count
}

pub(super) async fn sql(install: &Install<'_>, sql: &str) {
    let mut connection = install.database.connect().await.unwrap();
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

/// Several statements.
pub(super) async fn sql_all(install: &Install<'_>, sql: &str) {
    let mut connection = install.database.connect().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

pub(super) async fn users(install: &Install<'_>, app: &App) -> i64 {
    count(install, &format!("SELECT count(*) FROM users WHERE app_id = '{}'", app.id())).await
}

/// Type, reason and note of each Event in that namespace about an App of that name.
pub(super) async fn events(install: &Install<'_>, namespace: &str, name: &str) -> Vec<(String, String, String)> {
    let events: Api<Event> = Api::namespaced(install.admin(), namespace);
    let about = |event: &Event| {
        event.regarding.as_ref().is_some_and(|of| of.kind.as_deref() == Some("App") && of.name.as_deref() == Some(name))
    };
    let found = events.list(&ListParams::default()).await.unwrap().items;
    let told = found.into_iter().filter(about).map(|event| {
        let text = Option::unwrap_or_default;
        (text(event.type_), text(event.reason), text(event.note))
    });
    told.collect()
}

/// `kubectl` as the administrator, in the tenant's namespace: what it prints. It must succeed.
pub(super) async fn kubectl(install: &Install<'_>, args: &[&str]) -> String {
    let kubectl = control_plane::kubectl().unwrap();
    let mut command = tokio::process::Command::new(kubectl);
    command
        .arg("--kubeconfig")
        .arg(install.cluster().plane().admin_kubeconfig())
        .args(["--namespace", install.tenant()])
        .args(args)
        // What it finds out about the API server it would keep for the next user of this machine.
        .arg("--cache-dir")
        .arg(install.dir().join("kubectl"))
        .kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output()).await.expect("kubectl ends in time").unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "kubectl {args:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}
