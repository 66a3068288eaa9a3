//! Deleting an App keeps its users (`Retain`) or deletes them and no others (`Delete`).
//!
//! The owner of the App can always end a deletion that is stuck.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use latchkey_crds::{
    app,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, ServerInPod, TestCluster},
    eventually,
    passwords::PASSWORD,
    postgres::write_private,
    proxy::Proxy,
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection};

use super::helpers::{
    LIMIT, count_users, events_of, execute_sql, jwks, key_secret, key_secret_name, objects_named, operator_secrets,
    register_user, rendered_secret, secret_values, wait_for_condition, wait_until_served,
};
use crate::support::RevisionStream;

const FINALIZER: &str = "latchkey.dev/delete-users";
const RETAIN_HINT: &str = "to keep the remaining users and delete the App at once, set spec.deletionPolicy to Retain";

/// An App with `deletionPolicy: Delete`.
fn app_with_delete_policy(prefix: &str) -> App {
    App::new(prefix).set("/deletionPolicy", "Delete")
}

/// Applies an App, and registers users with these names.
async fn apply_with_users(install: &Installation<'_>, server: &ServerInPod, app: &App, names: &[&str]) {
    install.apply(app).await.unwrap();
    install.wait_until_ready(app).await;
    for name in names {
        register_user(install, server, app, name).await;
    }
    assert_eq!(count_users(install, app).await, i64::try_from(names.len()).unwrap());
}

/// Waits until the App no longer exists.
async fn wait_until_deleted(install: &Installation<'_>, namespace: &str, name: &str) {
    let apps: Api<app::App> = Api::namespaced(install.admin(), namespace);
    eventually(&format!("the App {name} is deleted"), LIMIT, || async {
        apps.get_opt(name).await.unwrap().is_none().then_some(())
    })
    .await;
}

/// Waits until the message of the App's condition Programmed reports the deletion and contains this text.
async fn wait_for_deletion_message(install: &Installation<'_>, app: &App, text: &str) {
    eventually(&format!("the condition says {text:?}"), LIMIT, || async {
        let condition = install.condition(app, ConditionType::Programmed).await.unwrap();
        (condition.reason == "Deleting" && condition.message.contains(text) && condition.message.ends_with(RETAIN_HINT))
            .then_some(())
    })
    .await;
    install.wait_for_condition(app, ConditionType::Ready, ConditionStatus::False, "Deleting").await;
}

async fn set_retain(install: &Installation<'_>, app: &App) {
    let patch = Patch::Merge(json!({ "spec": { "deletionPolicy": "Retain" } }));
    install.apps().patch(app.id(), &PatchParams::default(), &patch).await.unwrap();
}

async fn wait_until_document_deleted(install: &Installation<'_>, app: &App) {
    eventually(&format!("the document of {} is deleted", app.id()), LIMIT, || async {
        rendered_secret(install, app).await.is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn deleting_an_app_keeps_its_users_by_default_and_never_deletes_other_users() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("retain");
    apply_with_users(&install, &servers[0], &app, &["ada", "grace"]).await;
    assert!(install.get(&app).await.unwrap().finalizers().is_empty());
    let before = key_secret(&install, &app).await.unwrap();

    // If an App that does not own its appID is deleted, the users stay.
    let other_namespace = install.tenants()[1].as_str();
    let stranger = app.clone().set("/deletionPolicy", "Delete");
    install.apply_all(&objects_named(&stranger, "stranger", other_namespace)).await.unwrap();
    let conflict = ("App", other_namespace, "stranger");
    wait_for_condition(&install, conflict, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    let apps: Api<app::App> = Api::namespaced(install.admin(), other_namespace);
    apps.delete("stranger", &DeleteParams::default()).await.unwrap();
    wait_until_deleted(&install, other_namespace, "stranger").await;
    install.wait_until_ready(&app).await;
    wait_until_served(&install, &servers, &app, true).await;
    assert_eq!(count_users(&install, &app).await, 2);

    install.delete(&app).await.unwrap();
    assert!(install.apps().get_opt(app.id()).await.unwrap().is_none(), "no finalizer delays the deletion");
    wait_until_document_deleted(&install, &app).await;
    wait_until_served(&install, &servers, &app, false).await;
    let after = key_secret(&install, &app).await.unwrap();
    let keys_of = |secret: &Secret| {
        let mut keys: serde_json::Value = serde_json::from_slice(&secret_values(secret)["keys.json"]).unwrap();
        // The operator raises the counter `handover` when it asks the servers whether the appID is free.
        keys.as_object_mut().unwrap().remove("handover");
        keys
    };
    assert_eq!((after.uid(), keys_of(&after)), (before.uid(), keys_of(&before)));
    assert_eq!(count_users(&install, &app).await, 2);
}

#[tokio::test]
async fn users_are_deleted_before_their_app() {
    let install = TestCluster::shared().await.builder().tenants(3).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let bystander = App::new("bystander");
    apply_with_users(&install, &servers[0], &bystander, &["ada"]).await;
    tokio::join!(
        another_namespace_can_take_the_appid_of_a_deleted_app(&install, &servers),
        deletion_of_a_namespace_is_not_blocked(&install, &servers),
        a_rejection_by_a_server_is_reported(&install, &servers),
        the_number_of_remaining_users_is_reported(&install, &servers),
    );
    install.wait_until_ready(&bystander).await;
    wait_until_served(&install, &servers, &bystander, true).await;
    assert_eq!(count_users(&install, &bystander).await, 1);
}

async fn another_namespace_can_take_the_appid_of_a_deleted_app(install: &Installation<'_>, servers: &[ServerInPod]) {
    let (app, other_namespace) = (app_with_delete_policy("delete"), install.tenants()[1].as_str());
    apply_with_users(install, &servers[0], &app, &["ada", "grace"]).await;
    assert_eq!(install.get(&app).await.unwrap().finalizers(), [FINALIZER]);
    let jwks_before = jwks(install, &servers[0], &app).await;
    install.apply_all(&objects_named(&app, "next", other_namespace)).await.unwrap();
    let next = ("App", other_namespace, "next");
    wait_for_condition(install, next, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;

    // The App and its keys stay until every server has stopped serving the App.
    servers[1].pause();
    install.delete(&app).await.unwrap();
    wait_for_deletion_message(
        install,
        &app,
        &format!("waiting for server pod {} to stop serving the App", servers[1].name()),
    )
    .await;
    wait_until_served(install, &servers[..1], &app, false).await;
    assert!(key_secret(install, &app).await.is_some());
    assert_eq!(install.get(&app).await.unwrap().finalizers(), [FINALIZER]);
    wait_for_condition(install, next, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    servers[1].resume();

    wait_until_deleted(install, install.tenant(), app.id()).await;
    assert_eq!(count_users(install, &app).await, 0);
    wait_for_condition(install, next, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    wait_until_served(install, servers, &app, true).await;
    assert_ne!(jwks(install, &servers[1], &app).await, jwks_before, "the keys of the previous App are not used again");
    let client = install.client_of(&servers[1]);
    client
        .login(app.id(), "ada@example.com", PASSWORD)
        .await
        .expect_error(http::StatusCode::UNAUTHORIZED, "invalid_credentials");
    let events = events_of(install, install.tenant(), app.id()).await;
    assert!(events.iter().any(|(_, reason, _)| reason == "UsersDeleted"), "{events:?}");
}

/// No namespace controller runs here, so the test deletes the contents of the namespace itself.
async fn deletion_of_a_namespace_is_not_blocked(install: &Installation<'_>, servers: &[ServerInPod]) {
    let (app, other_namespace) = (app_with_delete_policy("namespace"), install.tenants()[2].as_str());
    install.apply_all(&app.objects(other_namespace)).await.unwrap();
    wait_for_condition(
        install,
        ("App", other_namespace, app.id()),
        ConditionType::Ready,
        ConditionStatus::True,
        "Ready",
    )
    .await;
    register_user(install, &servers[0], &app, "ada").await;
    let namespaces: Api<Namespace> = Api::all(install.admin());
    namespaces.delete(other_namespace, &DeleteParams::default()).await.unwrap();
    let phase = namespaces.get(other_namespace).await.unwrap().status.and_then(|status| status.phase);
    assert_eq!(phase.as_deref(), Some("Terminating"));
    let apps: Api<app::App> = Api::namespaced(install.admin(), other_namespace);
    apps.delete(app.id(), &DeleteParams::default()).await.unwrap();
    wait_until_deleted(install, other_namespace, app.id()).await;
    assert_eq!(count_users(install, &app).await, 0);
    assert!(key_secret(install, &app).await.is_none());
    wait_until_document_deleted(install, &app).await;
}

async fn a_rejection_by_a_server_is_reported(install: &Installation<'_>, servers: &[ServerInPod]) {
    let app = app_with_delete_policy("refused");
    apply_with_users(install, &servers[0], &app, &["ada"]).await;
    let set_owner = async |namespace: &str| {
        let id = app.id();
        execute_sql(install, &format!("UPDATE apps SET namespace = '{namespace}' WHERE app_id = '{id}'")).await;
    };
    // The database says that the appID belongs to another namespace, for example after a restore of another cluster's
    // database.
    set_owner("elsewhere").await;
    install.delete(&app).await.unwrap();
    wait_for_deletion_message(install, &app, "rejects it: the appID belongs to another namespace").await;
    assert_eq!(count_users(install, &app).await, 1);
    set_owner(install.tenant()).await;
    wait_until_deleted(install, install.tenant(), app.id()).await;
    assert_eq!(count_users(install, &app).await, 0);
}

async fn the_number_of_remaining_users_is_reported(install: &Installation<'_>, servers: &[ServerInPod]) {
    let app = app_with_delete_policy("progress");
    apply_with_users(install, &servers[0], &app, &["ada", "grace"]).await;
    // Takes the lock that a server needs to delete the users, so that the deletion waits.
    let mut connection = install.database.connect().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    let lock = format!("SELECT FROM apps WHERE app_id = '{}' FOR UPDATE", app.id());
    sqlx::query(AssertSqlSafe(lock)).execute(&mut *transaction).await.unwrap();
    install.delete(&app).await.unwrap();
    wait_for_deletion_message(install, &app, "deleting the users: 2 left; ").await;
    transaction.rollback().await.unwrap();
    wait_until_deleted(install, install.tenant(), app.id()).await;
    assert_eq!(count_users(install, &app).await, 0);
}

#[tokio::test]
async fn a_deletion_waits_without_servers_and_says_how_to_end_it() {
    let install = TestCluster::shared().await.install().await;
    let mut servers = install.start_servers(1).await;
    let operator = install.start_operator().await;
    let (kept, deleted, lost) =
        (app_with_delete_policy("kept"), app_with_delete_policy("deleted"), app_with_delete_policy("lost"));
    for app in [&kept, &deleted, &lost] {
        apply_with_users(&install, &servers[0], app, &["ada"]).await;
    }
    let jwks_before = jwks(&install, &servers[0], &kept).await;

    servers.remove(0).remove().await.unwrap();
    for app in [&kept, &deleted] {
        install.delete(app).await.unwrap();
        wait_for_deletion_message(&install, app, "server pod").await;
    }
    wait_for_deletion_message(&install, &kept, "no server pod is running that could delete the users").await;
    set_retain(&install, &kept).await;
    wait_until_deleted(&install, install.tenant(), kept.id()).await;
    wait_until_document_deleted(&install, &kept).await;
    assert!(key_secret(&install, &kept).await.is_some());

    // Lost keys do not block a deletion, and the deletion still deletes the users.
    operator.kill();
    operator_secrets(&install).delete(&key_secret_name(&lost), &DeleteParams::default()).await.unwrap();
    install.delete(&lost).await.unwrap();
    operator.start().unwrap();
    wait_for_deletion_message(&install, &lost, "server pod").await;

    let servers = install.start_servers(1).await;
    for app in [&deleted, &lost] {
        wait_until_deleted(&install, install.tenant(), app.id()).await;
        assert_eq!(count_users(&install, app).await, 0);
        assert!(key_secret(&install, app).await.is_none());
        wait_until_document_deleted(&install, app).await;
    }
    // The cancelled deletion has deleted nothing: after a new apply, everything is as before.
    assert_eq!(count_users(&install, &kept).await, 1);
    install.apply(&kept).await.unwrap();
    install.wait_until_ready(&kept).await;
    assert_eq!(jwks(&install, &servers[0], &kept).await, jwks_before);
    let client = install.client_of(&servers[0]);
    client.login(kept.id(), "ada@example.com", PASSWORD).await.expect(http::StatusCode::OK);
}

#[tokio::test]
async fn a_deletion_waits_without_postgres_and_says_how_to_end_it() {
    let install = TestCluster::shared().await.install().await;
    let proxy = Proxy::start(install.database.addr).unwrap();
    let url = url_at(&install.database.url, install.database.addr, proxy.addr());
    write_private(&install.dir().join("database-url"), &url).unwrap();
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let (kept, deleted, damaged) =
        (app_with_delete_policy("kept"), app_with_delete_policy("deleted"), app_with_delete_policy("damaged"));
    for app in [&kept, &deleted, &damaged] {
        apply_with_users(&install, &servers[0], app, &["ada"]).await;
    }
    // Damages the keys of an App. The operator then lacks `incarnation` and `handover`, by which the servers recognize
    // the users of the App.
    let secrets: Api<Secret> = operator_secrets(&install);
    let set_key_data = async |data: serde_json::Value| {
        let patch = Patch::Merge(json!({ "data": data }));
        secrets.patch(&key_secret_name(&damaged), &PatchParams::default(), &patch).await.unwrap();
    };
    let undamaged_data = json!(key_secret(&install, &damaged).await.unwrap().data);
    set_key_data(json!(null)).await;
    install.wait_for_condition(&damaged, ConditionType::Accepted, ConditionStatus::False, "KeysInvalid").await;

    proxy.refuse().await;
    for app in [&kept, &deleted, &damaged] {
        install.delete(app).await.unwrap();
    }
    wait_for_deletion_message(
        &install,
        &damaged,
        "the key Secret of the App cannot be used: it has no key keys.json; restore it",
    )
    .await;
    for app in [&kept, &deleted] {
        wait_until_served(&install, &servers, app, false).await;
        let text = "the servers have not started; if this does not change, check that they can reach Postgres";
        wait_for_deletion_message(&install, app, text).await;
    }
    let times_served = || {
        let is_about_kept = |line: &&str| line.contains(kept.id()) && line.contains("\"serving\"");
        servers.iter().map(|server| server.read_log().lines().filter(is_about_kept).count()).collect::<Vec<_>>()
    };
    let before = times_served();
    assert!(before.iter().all(|times| *times > 0), "the log has a line when a server serves an App");
    set_retain(&install, &kept).await;
    wait_until_deleted(&install, install.tenant(), kept.id()).await;
    wait_until_document_deleted(&install, &kept).await;
    // Waits until the servers have received the cancellation.
    for server in &servers {
        eventually("the server knows that the deletion was cancelled", LIMIT, || async {
            let (_, hello) = RevisionStream::open(server).await;
            (!hello.revisions.contains_key(kept.id())).then_some(())
        })
        .await;
    }
    set_key_data(undamaged_data).await;
    proxy.restore().unwrap();

    for app in [&deleted, &damaged] {
        wait_until_deleted(&install, install.tenant(), app.id()).await;
        assert_eq!(count_users(&install, app).await, 0);
    }
    assert_eq!(count_users(&install, &kept).await, 1);
    assert_eq!(times_served(), before, "a server does not serve a removed App again");
}

/// Replaces the socket address `from` in the URL of a database with `to`.
fn url_at(url: &str, from: SocketAddr, to: SocketAddr) -> String {
    let (from, to) = (from.to_string(), to.to_string());
    assert!(url.contains(&from), "{url}");
    url.replace(&from, &to)
}
