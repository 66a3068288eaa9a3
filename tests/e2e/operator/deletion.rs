//! The end of an App: `Retain` keeps the users, `Delete` deletes them and nobody else's, and there is always a way out.

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
    cluster::{Cluster, Install, PodServer},
    eventually,
    postgres::write_private,
    proxy::Proxy,
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection};

use super::look::{
    LIMIT, PASSWORD, events, jwks, keys, keys_name, named, own_secrets, register, rendered, served, sql, told, users,
    values,
};
use crate::support::Revisions;

const FINALIZER: &str = "latchkey.dev/delete-users";
const WAY_OUT: &str = "to keep those that are left and let the App go at once, set spec.deletionPolicy to Retain";

/// An App whose users go with it.
fn going(prefix: &str) -> App {
    App::new(prefix).set("/deletionPolicy", "Delete")
}

/// Applies an App, and has some register at it.
async fn with_users(install: &Install<'_>, server: &PodServer, app: &App, names: &[&str]) {
    install.apply(app).await.unwrap();
    install.ready(app).await;
    for name in names {
        register(install, server, app, name).await;
    }
    assert_eq!(users(install, app).await, i64::try_from(names.len()).unwrap());
}

/// Waits until there is no such App.
async fn gone(install: &Install<'_>, namespace: &str, name: &str) {
    let apps: Api<app::App> = Api::namespaced(install.admin(), namespace);
    eventually(&format!("the App {name} is gone"), LIMIT, || async {
        apps.get_opt(name).await.unwrap().is_none().then_some(())
    })
    .await;
}

/// Waits until the condition of a deletion says this.
async fn deleting(install: &Install<'_>, app: &App, says: &str) {
    eventually(&format!("it says {says:?}"), LIMIT, || async {
        let told = install.condition(app, ConditionType::Programmed).await.unwrap();
        (told.reason == "Deleting" && told.message.contains(says) && told.message.ends_with(WAY_OUT)).then_some(())
    })
    .await;
    install.until(app, ConditionType::Ready, ConditionStatus::False, "Deleting").await;
}

async fn retain(install: &Install<'_>, app: &App) {
    let patch = Patch::Merge(json!({ "spec": { "deletionPolicy": "Retain" } }));
    install.apps().patch(app.id(), &PatchParams::default(), &patch).await.unwrap();
}

async fn no_document(install: &Install<'_>, app: &App) {
    eventually(&format!("the document of {} is taken away", app.id()), LIMIT, || async {
        rendered(install, app).await.is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_app_that_goes_takes_no_users_with_it_unless_it_says_so_and_nobody_elses_ever() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("retain");
    with_users(&install, &servers[0], &app, &["ada", "grace"]).await;
    assert!(install.get(&app).await.unwrap().finalizers().is_empty());
    let before = keys(&install, &app).await.unwrap();

    // One that was refused the appID has no users to delete.
    let there = install.tenants()[1].as_str();
    let stranger = app.clone().set("/deletionPolicy", "Delete");
    install.apply_all(&named(&stranger, "stranger", there)).await.unwrap();
    let conflict = ("App", there, "stranger");
    told(&install, conflict, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    let apps: Api<app::App> = Api::namespaced(install.admin(), there);
    apps.delete("stranger", &DeleteParams::default()).await.unwrap();
    gone(&install, there, "stranger").await;
    install.ready(&app).await;
    served(&install, &servers, &app, true).await;
    assert_eq!(users(&install, &app).await, 2);

    install.delete(&app).await.unwrap();
    assert!(install.apps().get_opt(app.id()).await.unwrap().is_none(), "nothing holds it back");
    no_document(&install, &app).await;
    served(&install, &servers, &app, false).await;
    let after = keys(&install, &app).await.unwrap();
    let made = |secret: &Secret| {
        let mut keys: serde_json::Value = serde_json::from_slice(&values(secret)["keys.json"]).unwrap();
        // It grows when the servers are asked whether the appID is free.
        keys.as_object_mut().unwrap().remove("handover");
        keys
    };
    assert_eq!((after.uid(), made(&after)), (before.uid(), made(&before)));
    assert_eq!(users(&install, &app).await, 2);
}

#[tokio::test]
async fn users_are_deleted_before_their_app_goes() {
    let install = Cluster::shared().await.builder().tenants(3).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let bystander = App::new("bystander");
    with_users(&install, &servers[0], &bystander, &["ada"]).await;
    tokio::join!(
        another_namespace_may_have_the_appid_after_it(&install, &servers),
        a_namespace_that_is_deleted_is_not_held(&install, &servers),
        a_server_that_refuses_is_told(&install, &servers),
        how_many_are_left_is_told(&install, &servers),
    );
    install.ready(&bystander).await;
    served(&install, &servers, &bystander, true).await;
    assert_eq!(users(&install, &bystander).await, 1);
}

async fn another_namespace_may_have_the_appid_after_it(install: &Install<'_>, servers: &[PodServer]) {
    let (app, there) = (going("delete"), install.tenants()[1].as_str());
    with_users(install, &servers[0], &app, &["ada", "grace"]).await;
    assert_eq!(install.get(&app).await.unwrap().finalizers(), [FINALIZER]);
    let public = jwks(install, &servers[0], &app).await;
    install.apply_all(&named(&app, "next", there)).await.unwrap();
    let next = ("App", there, "next");
    told(install, next, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;

    // It stays, with its keys, until every server has stopped serving it.
    servers[1].pause();
    install.delete(&app).await.unwrap();
    deleting(install, &app, &format!("waiting for server pod {} to stop serving the App", servers[1].name())).await;
    served(install, &servers[..1], &app, false).await;
    assert!(keys(install, &app).await.is_some());
    assert_eq!(install.get(&app).await.unwrap().finalizers(), [FINALIZER]);
    told(install, next, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
    servers[1].resume();

    gone(install, install.tenant(), app.id()).await;
    assert_eq!(users(install, &app).await, 0);
    told(install, next, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    served(install, servers, &app, true).await;
    assert_ne!(jwks(install, &servers[1], &app).await, public, "nothing of the App before is good");
    let client = install.client_of(&servers[1]);
    client
        .login(app.id(), "ada@example.com", PASSWORD)
        .await
        .expect_error(http::StatusCode::UNAUTHORIZED, "invalid_credentials");
    let events = events(install, install.tenant(), app.id()).await;
    assert!(events.iter().any(|(_, reason, _)| reason == "UsersDeleted"), "{events:?}");
}

/// No controller of namespaces runs here: the test deletes, as one does, what is in it.
async fn a_namespace_that_is_deleted_is_not_held(install: &Install<'_>, servers: &[PodServer]) {
    let (app, there) = (going("namespace"), install.tenants()[2].as_str());
    install.apply_all(&app.objects(there)).await.unwrap();
    told(install, ("App", there, app.id()), ConditionType::Ready, ConditionStatus::True, "Ready").await;
    register(install, &servers[0], &app, "ada").await;
    let namespaces: Api<Namespace> = Api::all(install.admin());
    namespaces.delete(there, &DeleteParams::default()).await.unwrap();
    let phase = namespaces.get(there).await.unwrap().status.and_then(|status| status.phase);
    assert_eq!(phase.as_deref(), Some("Terminating"));
    let apps: Api<app::App> = Api::namespaced(install.admin(), there);
    apps.delete(app.id(), &DeleteParams::default()).await.unwrap();
    gone(install, there, app.id()).await;
    assert_eq!(users(install, &app).await, 0);
    assert!(keys(install, &app).await.is_none());
    no_document(install, &app).await;
}

async fn a_server_that_refuses_is_told(install: &Install<'_>, servers: &[PodServer]) {
    let app = going("refused");
    with_users(install, &servers[0], &app, &["ada"]).await;
    let owner = async |namespace: &str| {
        let id = app.id();
        sql(install, &format!("UPDATE apps SET namespace = '{namespace}' WHERE app_id = '{id}'")).await;
    };
    // As after a restore of another cluster's database: the servers do not believe that the users are this App's.
    owner("elsewhere").await;
    install.delete(&app).await.unwrap();
    deleting(install, &app, "refuses to: the appID belongs to another namespace").await;
    assert_eq!(users(install, &app).await, 1);
    owner(install.tenant()).await;
    gone(install, install.tenant(), app.id()).await;
    assert_eq!(users(install, &app).await, 0);
}

async fn how_many_are_left_is_told(install: &Install<'_>, servers: &[PodServer]) {
    let app = going("progress");
    with_users(install, &servers[0], &app, &["ada", "grace"]).await;
    // As another server would that is at it.
    let mut connection = install.database.connect().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    let lock = format!("SELECT FROM apps WHERE app_id = '{}' FOR UPDATE", app.id());
    sqlx::query(AssertSqlSafe(lock)).execute(&mut *transaction).await.unwrap();
    install.delete(&app).await.unwrap();
    deleting(install, &app, "deleting the users: 2 left; ").await;
    transaction.rollback().await.unwrap();
    gone(install, install.tenant(), app.id()).await;
    assert_eq!(users(install, &app).await, 0);
}

#[tokio::test]
async fn without_servers_a_deletion_waits_and_names_the_way_out() {
    let install = Cluster::shared().await.install().await;
    let mut servers = install.serve(1).await;
    let operator = install.operator().await;
    let (kept, deleted, lost) = (going("kept"), going("deleted"), going("lost"));
    for app in [&kept, &deleted, &lost] {
        with_users(&install, &servers[0], app, &["ada"]).await;
    }
    let public = jwks(&install, &servers[0], &kept).await;

    servers.remove(0).remove().await.unwrap();
    for app in [&kept, &deleted] {
        install.delete(app).await.unwrap();
        deleting(&install, app, "server pod").await;
    }
    deleting(&install, &kept, "no server pod is there that could delete the users").await;
    retain(&install, &kept).await;
    gone(&install, install.tenant(), kept.id()).await;
    no_document(&install, &kept).await;
    assert!(keys(&install, &kept).await.is_some());

    // Keys that are lost meanwhile do not hold it, nor let it go without its users.
    operator.kill();
    own_secrets(&install).delete(&keys_name(&lost), &DeleteParams::default()).await.unwrap();
    install.delete(&lost).await.unwrap();
    operator.start().unwrap();
    deleting(&install, &lost, "server pod").await;

    let servers = install.serve(1).await;
    for app in [&deleted, &lost] {
        gone(&install, install.tenant(), app.id()).await;
        assert_eq!(users(&install, app).await, 0);
        assert!(keys(&install, app).await.is_none());
        no_document(&install, app).await;
    }
    // Who took it back has everything as it was.
    assert_eq!(users(&install, &kept).await, 1);
    install.apply(&kept).await.unwrap();
    install.ready(&kept).await;
    assert_eq!(jwks(&install, &servers[0], &kept).await, public);
    let client = install.client_of(&servers[0]);
    client.login(kept.id(), "ada@example.com", PASSWORD).await.expect(http::StatusCode::OK);
}

#[tokio::test]
async fn without_postgres_a_deletion_waits_and_names_the_way_out() {
    let install = Cluster::shared().await.install().await;
    let proxy = Proxy::start(install.database.addr).unwrap();
    let url = through(&install.database.url, install.database.addr, proxy.addr());
    write_private(&install.dir().join("database-url"), &url).unwrap();
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let (kept, deleted, damaged) = (going("kept"), going("deleted"), going("damaged"));
    for app in [&kept, &deleted, &damaged] {
        with_users(&install, &servers[0], app, &["ada"]).await;
    }
    // Whose users they are cannot be told from these keys.
    let secrets: Api<Secret> = own_secrets(&install);
    let damage = async |data: serde_json::Value| {
        let patch = Patch::Merge(json!({ "data": data }));
        secrets.patch(&keys_name(&damaged), &PatchParams::default(), &patch).await.unwrap();
    };
    let good = json!(keys(&install, &damaged).await.unwrap().data);
    damage(json!(null)).await;
    install.until(&damaged, ConditionType::Accepted, ConditionStatus::False, "KeysInvalid").await;

    proxy.refuse().await;
    for app in [&kept, &deleted, &damaged] {
        install.delete(app).await.unwrap();
    }
    deleting(&install, &damaged, "the key Secret of the App cannot be used: it has no key keys.json; put it back")
        .await;
    for app in [&kept, &deleted] {
        served(&install, &servers, app, false).await;
        deleting(&install, app, "the servers have not begun; where that stays so, see whether they reach Postgres")
            .await;
    }
    let times_served = || {
        let is_of = |line: &&str| line.contains(kept.id()) && line.contains("\"serving\"");
        servers.iter().map(|server| server.logged().lines().filter(is_of).count()).collect::<Vec<_>>()
    };
    let before = times_served();
    assert!(before.iter().all(|times| *times > 0), "the log says when an App is served");
    retain(&install, &kept).await;
    gone(&install, install.tenant(), kept.id()).await;
    no_document(&install, &kept).await;
    // What a server has not heard of it cannot heed.
    for server in &servers {
        eventually("the server knows that it was taken back", LIMIT, || async {
            let (_, hello) = Revisions::of(server).await;
            (!hello.revisions.contains_key(kept.id())).then_some(())
        })
        .await;
    }
    damage(good).await;
    proxy.restore().unwrap();

    for app in [&deleted, &damaged] {
        gone(&install, install.tenant(), app.id()).await;
        assert_eq!(users(&install, app).await, 0);
    }
    assert_eq!(users(&install, &kept).await, 1);
    assert_eq!(times_served(), before, "what is let go is not served once more");
}

/// The URL of a database, by way of another address.
fn through(url: &str, from: SocketAddr, to: SocketAddr) -> String {
    let (from, to) = (from.to_string(), to.to_string());
    assert!(url.contains(&from), "{url}");
    url.replace(&from, &to)
}
