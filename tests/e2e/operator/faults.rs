//! Users notice no outage of the API server, no lost packets and no killed operator.

use std::time::{Duration, Instant};

use http::StatusCode;
use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Endpoint, Installation, ServerInPod, TestCluster},
    eventually,
    passwords::PASSWORD,
    proxy::Proxy,
};
use serde_json::json;

/// Time limit for steps that take a second or two; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(60);
/// A server detects a silently dropped watch after at most 35 s, and starts it again within 5 s (specification:
/// Delivery of configuration, Servers). The limit is ten times as long, for a loaded machine.
const SILENT_DROP_LIMIT: Duration = Duration::from_secs(400);

async fn wait_until_served(install: &Installation<'_>, server: &ServerInPod, app: &App, limit: Duration) {
    let jwks = format!("{}/.well-known/jwks.json", app.id());
    eventually(&format!("{} is served", app.id()), limit, || async {
        install.client_of(server).get(&jwks).await.status.is_success().then_some(())
    })
    .await;
}

async fn log_in(install: &Installation<'_>, server: &ServerInPod, app: &App) {
    install.client_of(server).login(app.id(), "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
}

#[tokio::test]
async fn logins_continue_while_the_api_server_is_unavailable() {
    let cluster = TestCluster::start().await.unwrap();
    let install = cluster.install().await;
    let servers = install.start_servers(2).await;
    let operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let ada = install.client_of(&servers[0]);
    ada.register(app.id(), "Ada", "ada@example.com", PASSWORD).await.expect(StatusCode::OK);

    cluster.plane().kill();
    for server in &servers {
        log_in(&install, server, &app).await;
    }
    // The server restarts, as the kubelet would restart its container. It has only its local copy of the rendered
    // documents.
    servers[1].kill();
    servers[1].start_ready().await.unwrap();
    log_in(&install, &servers[1], &app).await;
    // The outage lasts longer than the Lease. An operator that cannot renew its Lease ends; a kubelet would restart it.
    eventually("the operator ends", LIMIT, || async { operator.exit_status() }).await;
    assert!(!operator.exit_status().unwrap().success());

    cluster.plane().start_api_server().await.unwrap();
    let mut edited = app.clone();
    edited = edited.set("/signUp", "Closed");
    install.apply(&edited).await.unwrap();
    operator.start().unwrap();
    install.wait_until_ready(&edited).await;
    let other = App::new("other");
    install.apply(&other).await.unwrap();
    install.wait_until_ready(&other).await;
    for server in &servers {
        log_in(&install, server, &app).await;
        wait_until_served(&install, server, &other, LIMIT).await;
        let refused = install.client_of(server).register(app.id(), "Bob", "bob@example.com", PASSWORD).await;
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "the server has the edit");
    }
}

#[tokio::test]
async fn a_server_recovers_from_a_silently_dropped_watch() {
    let cluster = TestCluster::shared().await;
    let install = cluster.install().await;
    let proxy = Proxy::start(cluster.plane().addr()).unwrap();
    let account = cluster.plane().account_at(install.server_account(), proxy.addr()).unwrap();
    let server = install.create_server(&account, &[]).await.unwrap();
    server.start_ready().await.unwrap();
    server.set_endpoint(Endpoint::SERVING).await.unwrap();
    let _operator = install.start_operator().await;
    let first = App::new("first");
    install.apply(&first).await.unwrap();
    install.wait_until_ready(&first).await;

    proxy.lose();
    let lost_at = Instant::now();
    let second = App::new("second");
    install.apply(&second).await.unwrap();
    // The operator waits until this server has received the revision.
    install.wait_for_condition(&second, ConditionType::Programmed, ConditionStatus::False, "WaitingForServers").await;
    wait_until_served(&install, &server, &second, SILENT_DROP_LIMIT).await;
    println!("current again after {:?}", lost_at.elapsed());
    install.wait_until_ready(&second).await;
}

#[tokio::test]
async fn an_operator_recovers_from_silently_dropped_watches() {
    let cluster = TestCluster::shared().await;
    let install = cluster.install().await;
    let proxy = Proxy::start(cluster.plane().addr()).unwrap();
    let account = cluster.plane().account_at(install.operator_account(), proxy.addr()).unwrap();
    let server = install.start_server().await;
    let operator = install.start_operator_as(&account, &[]);
    let first = App::new("first");
    install.apply(&first).await.unwrap();
    install.wait_until_ready(&first).await;

    proxy.lose();
    let lost_at = Instant::now();
    let second = App::new("second");
    install.apply(&second).await.unwrap();
    // Because of the lost packets, the operator can lose its Lease and end. A kubelet would restart it.
    let jwks = format!("{}/.well-known/jwks.json", second.id());
    eventually("the App is served", SILENT_DROP_LIMIT, || async {
        if operator.exit_status().is_some() {
            operator.start().unwrap();
        }
        install.client_of(&server).get(&jwks).await.status.is_success().then_some(())
    })
    .await;
    println!("served after {:?}", lost_at.elapsed());
    install.wait_until_ready(&second).await;
}

#[tokio::test]
async fn cut_watches_continue_immediately() {
    let cluster = TestCluster::shared().await;
    let install = cluster.install().await;
    let proxy = Proxy::start(cluster.plane().addr()).unwrap();
    let account = cluster.plane().account_at(install.server_account(), proxy.addr()).unwrap();
    let server = install.create_server(&account, &[]).await.unwrap();
    server.start_ready().await.unwrap();
    server.set_endpoint(Endpoint::SERVING).await.unwrap();
    let account = cluster.plane().account_at(install.operator_account(), proxy.addr()).unwrap();
    let _operator = install.start_operator_as(&account, &[]);
    for number in 0..5 {
        let app = App::new(&format!("app{number}"));
        proxy.cut();
        install.apply(&app).await.unwrap();
        install.wait_until_ready(&app).await;
        wait_until_served(&install, &server, &app, LIMIT).await;
    }
}

/// Reconciliation is level-based: after a kill at any step, the next operator reaches the same state as without the
/// kill.
#[tokio::test]
async fn the_next_operator_reaches_the_same_state_after_a_kill_at_any_step() {
    let install = TestCluster::shared().await.install().await;
    let server = install.start_server().await;
    let operator = install.start_operator().await;
    let first = App::new("first");
    install.apply(&first).await.unwrap();
    install.wait_until_ready(&first).await;

    let mut apps = Vec::new();
    for step in 0..12_u64 {
        operator.kill();
        let app = App::new("shop").set("/deletionPolicy", if step % 2 == 0 { "Delete" } else { "Retain" });
        install.apply(&app).await.unwrap();
        operator.start().unwrap();
        // Each round kills the operator at another time: from before the first reconcile of the App until after the
        // write of its status, which is about half a second later.
        tokio::time::sleep(Duration::from_millis(60 * step)).await;
        apps.push(app);
    }
    operator.kill();
    operator.start().unwrap();
    for app in &apps {
        install.wait_until_ready(app).await;
        wait_until_served(&install, &server, app, LIMIT).await;
        let status = install.get(app).await.unwrap().status.unwrap();
        let keys: Vec<_> = status.signing_keys.iter().chain(&status.hmac_keys).map(|key| key.id.as_str()).collect();
        assert_eq!(keys, ["s1", "h1"], "one set of keys was made");
        // The App has a user, so its keys stay after a deletion with `Retain`.
        let ada = install.client_of(&server);
        ada.register(app.id(), "Ada", "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
    for app in &apps {
        operator.kill();
        install.delete(app).await.unwrap();
        operator.start().unwrap();
    }
    let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> =
        kube::Api::namespaced(install.admin(), install.namespace());
    for app in &apps {
        let id = app.id().parse().unwrap();
        eventually(&format!("{} is deleted", app.id()), LIMIT, || async {
            let no_document = secrets.get_opt(&latchkey_crds::names::rendered_app_secret(&id)).await.ok()?.is_none();
            (no_document && install.apps().get_opt(app.id()).await.ok()?.is_none()).then_some(())
        })
        .await;
        let retained = app.spec_value("/deletionPolicy") == Some(json!("Retain"));
        let keys = secrets.get_opt(&latchkey_crds::names::app_keys_secret(&id)).await.unwrap();
        assert_eq!(keys.is_some(), retained, "keys stay with the users");
    }
}
