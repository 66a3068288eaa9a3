//! Helpers that prepare tests, and read what conditions do not show: Secrets, rendered documents, Events, users, output
//! of kubectl.

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
    client::ApiClient,
    cluster::{Installation, ServerInPod},
    control_plane, eventually, eventually_ok,
    passwords::PASSWORD,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};

/// The operator and the servers apply a change within a second or two; a loaded machine takes longer.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// Gets an App, Provider or Client in the stored form. Also works if the object does not match the schema.
pub(super) async fn get_object(
    install: &Installation<'_>,
    kind: &str,
    namespace: &str,
    name: &str,
) -> Result<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("latchkey.dev", "v1alpha1", kind));
    let api: Api<DynamicObject> = Api::namespaced_with(install.admin(), namespace, &resource);
    Ok(api.get(name).await?)
}

/// The conditions of an App, Provider or Client.
pub(super) fn conditions_of(object: &DynamicObject) -> Result<Vec<Condition>> {
    let conditions = object.data["status"]["conditions"].clone();
    serde_json::from_value(conditions).context("conditions")
}

/// Waits until the condition has this status and reason for the current generation of the object. Returns its message.
pub(super) async fn wait_for_condition(
    install: &Installation<'_>,
    (kind, namespace, name): (&str, &str, &str),
    type_: ConditionType,
    status: ConditionStatus,
    reason: &str,
) -> String {
    let what = format!("{type_} of {kind} {namespace}/{name} is {status:?}, {reason}");
    eventually_ok(&what, LIMIT, || async {
        let object = get_object(install, kind, namespace, name).await?;
        let conditions = conditions_of(&object)?;
        let found =
            conditions.into_iter().find(|condition| condition.type_ == type_.as_str()).context("no such condition")?;
        ensure!(found.observed_generation == object.metadata.generation, "for another generation: {found:?}");
        ensure!(found.status == status && found.reason == reason, "{found:?}");
        Ok(found.message)
    })
    .await
}

/// Returns the objects of the App under another name and in another namespace, with the same appID.
pub(super) fn objects_named(app: &App, name: &str, namespace: &str) -> Vec<Value> {
    let mut objects = app.objects(namespace);
    objects[0]["metadata"]["name"] = json!(name);
    objects[0]["spec"]["appID"] = json!(app.id());
    objects
}

/// A Secret with these values.
pub(super) fn secret_object(namespace: &str, name: &str, values: &[(&str, &str)]) -> Value {
    // The values are in `data`, because with `stringData` a later apply without a key would not remove that key.
    let data: serde_json::Map<_, _> =
        values.iter().map(|(key, value)| ((*key).to_owned(), json!(STANDARD.encode(value)))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": name, "namespace": namespace },
        "data": data,
    })
}

/// Returns a client for the Secrets that the operator writes, which are in the namespace of the installation.
pub(super) fn operator_secrets(install: &Installation<'_>) -> Api<Secret> {
    Api::namespaced(install.admin(), install.namespace())
}

pub(super) fn rendered_secret_name(app: &App) -> String {
    format!("latchkey-app-{}", app.id())
}

pub(super) fn key_secret_name(app: &App) -> String {
    format!("latchkey-keys-{}", app.id())
}

/// The rendered Secret of an App, if it exists.
pub(super) async fn rendered_secret(install: &Installation<'_>, app: &App) -> Option<Secret> {
    operator_secrets(install).get_opt(&rendered_secret_name(app)).await.unwrap()
}

/// The key Secret of an App, if it exists.
pub(super) async fn key_secret(install: &Installation<'_>, app: &App) -> Option<Secret> {
    operator_secrets(install).get_opt(&key_secret_name(app)).await.unwrap()
}

/// The values of a Secret.
pub(super) fn secret_values(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect()
}

/// The rendered document that the operator has published.
pub(super) async fn rendered_document(install: &Installation<'_>, app: &App) -> Value {
    let secret = rendered_secret(install, app).await.expect("a rendered Secret");
    serde_json::from_slice(&secret_values(&secret)["app.json"]).expect("a document")
}

/// Waits until all of these servers serve the App, or none of them if `wanted` is false.
pub(super) async fn wait_until_served(install: &Installation<'_>, servers: &[ServerInPod], app: &App, wanted: bool) {
    for server in servers {
        let client = install.client_of(server);
        eventually(&format!("{} serves {}: {wanted}", server.name(), app.id()), LIMIT, || async {
            (is_served(&client, app).await == wanted).then_some(())
        })
        .await;
    }
}

/// Whether the server serves the App now.
pub(super) async fn is_served(client: &ApiClient, app: &App) -> bool {
    match client.get(&format!("{}/.well-known/jwks.json", app.id())).await.status {
        StatusCode::OK => true,
        StatusCode::NOT_FOUND => false,
        other => panic!("the JWKS of {} has status {other}", app.id()),
    }
}

/// The keys in the App's JWKS document at this server.
pub(super) async fn jwks(install: &Installation<'_>, server: &ServerInPod, app: &App) -> Value {
    let response = install.client_of(server).get(&format!("{}/.well-known/jwks.json", app.id())).await;
    response.expect(StatusCode::OK).body["keys"].clone()
}

/// Registers a user with this name at this server.
pub(super) async fn register_user(install: &Installation<'_>, server: &ServerInPod, app: &App, name: &str) {
    let email = format!("{name}@example.com");
    let response = install.client_of(server).register(app.id(), name, &email, PASSWORD).await;
    response.expect(StatusCode::OK);
}

/// The number that a query in the installation's database returns.
pub(super) async fn query_count(install: &Installation<'_>, sql: &str) -> i64 {
    let mut connection = install.database.connect().await.unwrap();
    let count = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    count
}

pub(super) async fn execute_sql(install: &Installation<'_>, sql: &str) {
    let mut connection = install.database.connect().await.unwrap();
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

/// Executes several SQL statements in the installation's database.
pub(super) async fn execute_statements(install: &Installation<'_>, sql: &str) {
    let mut connection = install.database.connect().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

pub(super) async fn count_users(install: &Installation<'_>, app: &App) -> i64 {
    query_count(install, &format!("SELECT count(*) FROM users WHERE app_id = '{}'", app.id())).await
}

/// Type, reason and note of each Event about the App with this name in this namespace.
pub(super) async fn events_of(
    install: &Installation<'_>,
    namespace: &str,
    name: &str,
) -> Vec<(String, String, String)> {
    let events: Api<Event> = Api::namespaced(install.admin(), namespace);
    let about = |event: &Event| {
        event
            .regarding
            .as_ref()
            .is_some_and(|object| object.kind.as_deref() == Some("App") && object.name.as_deref() == Some(name))
    };
    let found = events.list(&ListParams::default()).await.unwrap().items;
    let summaries = found.into_iter().filter(about).map(|event| {
        let text = Option::unwrap_or_default;
        (text(event.type_), text(event.reason), text(event.note))
    });
    summaries.collect()
}

/// Runs `kubectl` as the administrator in the tenant's namespace. Returns the output; panics if the command fails.
pub(super) async fn kubectl(install: &Installation<'_>, args: &[&str]) -> String {
    let kubectl = control_plane::kubectl().unwrap();
    let mut command = tokio::process::Command::new(kubectl);
    command
        .arg("--kubeconfig")
        .arg(install.cluster().plane().admin_kubeconfig())
        .args(["--namespace", install.tenant()])
        .args(args)
        // Without this argument, kubectl caches data of the API server in the home directory.
        .arg("--cache-dir")
        .arg(install.dir().join("kubectl"))
        .kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output()).await.expect("kubectl ends in time").unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "kubectl {args:?}: {printed}{}", String::from_utf8_lossy(&output.stderr));
    printed
}
