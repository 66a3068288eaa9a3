//! Tests of the harness's control plane.

use std::{collections::BTreeMap, time::Duration};

use futures::StreamExt;
use k8s_openapi::{
    api::core::v1::{Secret, ServiceAccount},
    apimachinery::pkg::version::Info,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, ObjectMeta, PostParams, WatchEvent, WatchParams},
};
use latchkey_tests::{
    control_plane::{ControlPlane, ServiceAccountToken, audit},
    eventually, eventually_ok,
    proxy::Proxy,
};

/// Maximum time that a test waits for a condition.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a test waits for something that must not happen.
const ABSENCE_WAIT: Duration = Duration::from_millis(300);

async fn create_account(plane: &ControlPlane, namespace: &str, name: &str) -> ServiceAccountToken {
    let accounts: Api<ServiceAccount> = Api::namespaced(plane.admin().await, namespace);
    let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    accounts.create(&PostParams::default(), &ServiceAccount { metadata, ..ServiceAccount::default() }).await.unwrap();
    plane.account(namespace, name).await.unwrap()
}

fn secret(name: &str) -> Secret {
    Secret { metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }, ..Secret::default() }
}

async fn version(client: &Client) -> Result<Info, String> {
    let response = tokio::time::timeout(Duration::from_secs(2), client.apiserver_version()).await;
    response.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

#[tokio::test]
async fn the_api_server_has_the_version_that_go_mod_pins() {
    let plane = ControlPlane::shared().await;
    let info = plane.admin().await.apiserver_version().await.unwrap();
    let go_mod = include_str!("../tools/go.mod");
    if std::env::var_os("KUBEBUILDER_ASSETS").is_none() {
        assert!(go_mod.contains(&format!("k8s.io/kubernetes {} ", info.git_version)), "{info:?}");
    }
}

#[tokio::test]
async fn a_service_account_can_do_only_what_a_role_grants() {
    let plane = ControlPlane::shared().await;
    let namespace = plane.namespace("accounts").await.unwrap();
    let account = create_account(plane, &namespace, "nobody").await;
    let error = Api::<Secret>::namespaced(account.client().await, &namespace)
        .list(&ListParams::default())
        .await
        .map(|list| list.items.len())
        .unwrap_err();
    let kube::Error::Api(status) = error else { panic!("{error}") };
    assert_eq!(status.code, 403);
    assert!(status.message.contains(&account.user_name()), "{}", status.message);
}

#[tokio::test]
async fn the_audit_log_shows_who_did_what() {
    let plane = ControlPlane::shared().await;
    let namespace = plane.namespace("audit").await.unwrap();
    let unprivileged = create_account(plane, &namespace, "nobody").await;
    let secrets: Api<Secret> = Api::namespaced(plane.admin().await, &namespace);
    let mark = plane.audit_mark();
    secrets.create(&PostParams::default(), &secret("one")).await.unwrap();
    secrets.get("one").await.unwrap();
    let mut watch = secrets.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    watch.next().await.unwrap().unwrap();
    Api::<Secret>::namespaced(unprivileged.client().await, &namespace)
        .delete("one", &DeleteParams::default())
        .await
        .map(|_| ())
        .unwrap_err();
    // The API server can write a line of the audit log after the response.
    let events = eventually("the lines of four requests", LIMIT, || async {
        let events = plane.audit_since(mark).unwrap();
        let ours: Vec<_> = events.into_iter().filter(|event| event.namespace == namespace).collect();
        (ours.len() >= 4).then_some(ours)
    })
    .await;
    let (by_admin, by_unprivileged): (Vec<_>, Vec<_>) = events.iter().partition(|event| event.user == "admin");
    let once = |verb: &str| ((verb.to_owned(), "secrets".to_owned()), 1);
    assert_eq!(audit::count(by_admin), BTreeMap::from(["create", "get", "watch"].map(once)));
    assert_eq!(by_unprivileged.len(), 1, "{by_unprivileged:?}");
    assert_eq!(by_unprivileged[0].user, unprivileged.user_name());
    assert_eq!(by_unprivileged[0].credential.as_deref(), Some(unprivileged.credential()));
    assert!(by_unprivileged[0].is_write() && by_unprivileged[0].is_forbidden(), "{by_unprivileged:?}");
}

#[tokio::test]
async fn a_restarted_api_server_keeps_its_data() {
    let plane = ControlPlane::start().await.unwrap();
    let client = plane.admin().await;
    let namespace = plane.namespace("restart").await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    secrets.create(&PostParams::default(), &secret("kept")).await.unwrap();

    plane.stop();
    version(&client).await.unwrap_err();
    plane.start_api_server().await.unwrap();
    secrets.get("kept").await.unwrap();

    plane.pause();
    version(&client).await.unwrap_err();
    plane.resume();
    eventually_ok("the resumed API server", LIMIT, || version(&client)).await;

    plane.kill();
    plane.start_api_server().await.unwrap();
    // The client that was created before the restart works again.
    eventually_ok("the restarted API server", LIMIT, || version(&client)).await;
    secrets.get("kept").await.unwrap();
}

#[tokio::test]
async fn a_watch_through_a_proxy_can_go_silent_and_be_cut() {
    let plane = ControlPlane::shared().await;
    let namespace = plane.namespace("proxied").await.unwrap();
    let proxy = Proxy::start(plane.addr()).unwrap();
    let direct: Api<Secret> = Api::namespaced(plane.admin().await, &namespace);
    let proxied: Api<Secret> = Api::namespaced(plane.admin_at(proxy.addr()).await.unwrap(), &namespace);
    let list_version = direct.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut watch = proxied.watch(&WatchParams::default(), &list_version).await.unwrap().boxed();

    proxy.stall();
    direct.create(&PostParams::default(), &secret("one")).await.unwrap();
    tokio::time::timeout(ABSENCE_WAIT, watch.next()).await.map(|_| ()).unwrap_err();
    proxy.restore().unwrap();
    let seen = tokio::time::timeout(LIMIT, watch.next()).await.unwrap().unwrap().unwrap();
    assert!(matches!(seen, WatchEvent::Added(_)), "{seen:?}");
    proxy.cut();
    let end = tokio::time::timeout(LIMIT, watch.next()).await.unwrap();
    assert!(!matches!(end, Some(Ok(_))), "{end:?}");
}
