//! The condition Delivering follows the receiver. Events wait for a missing Secret, and are deleted with their App.

use std::fs;

use http::StatusCode;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, api::DeleteParams};
use latchkey_crds::{
    app,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::{
    builders::{App, Webhook},
    cluster::{Installation, ServerInPod, TestCluster},
    eventually, process,
    tls::{ServerTls, TlsProxy},
    webhook_receiver::{Reply, WebhookReceiver},
};

use super::helpers::{LIMIT, count_users, query_count, register_user};

const CREATED: &[&str] = &["user.created"];

/// An installation with a server that trusts the certificate of a receiver. The CRD allows only HTTPS receivers.
struct Setup {
    install: Installation<'static>,
    server: ServerInPod,
    receiver: WebhookReceiver,
    /// The URL of the receiver.
    url: String,
    _proxy: TlsProxy,
}

impl Setup {
    async fn new() -> Self {
        let receiver = WebhookReceiver::start().unwrap();
        let tls = ServerTls::new().unwrap();
        let proxy = TlsProxy::start(&tls, receiver.addr()).await.unwrap();
        let ca = process::fresh_dir("receiver").join("ca.pem");
        fs::write(&ca, &tls.ca).unwrap();
        let builder = TestCluster::shared().await.builder();
        let install = builder.server_env("SSL_CERT_FILE", &ca.display().to_string()).install().await;
        let server = install.start_server().await;
        let url = format!("{}/hook", proxy.url("127.0.0.1"));
        Self { install, server, receiver, url, _proxy: proxy }
    }
}

async fn wait_until_delivering(install: &Installation<'_>, app: &App) {
    install.wait_for_condition(app, ConditionType::Delivering, ConditionStatus::True, "Delivering").await;
}

#[tokio::test]
async fn the_condition_delivering_follows_the_receiver() {
    let Setup { install, server, receiver, url, .. } = &Setup::new().await;
    let _operator = install.start_operator().await;
    receiver.set_reply(Reply::status(410));
    let webhook = Webhook::push("crm", url, CREATED);
    let without_webhooks = App::new("hooks");
    let app = without_webhooks.clone().webhook(&webhook);
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;

    register_user(install, server, &app, "ada").await;
    let gone = (ConditionType::Delivering, ConditionStatus::False, "ReceiverGone");
    let message = install.wait_for_condition(&app, gone.0, gone.1, gone.2).await;
    assert!(message.contains("webhook crm") && message.contains("410"), "{message}");
    // The receiver belongs to somebody else, so it does not decide whether the App is ready.
    let ready = install.condition(&app, ConditionType::Ready).await.unwrap();
    assert_eq!(ready.status, ConditionStatus::True, "{ready:?}");

    receiver.set_reply(Reply::status(204));
    let changed = app.clone().webhook(&webhook.url(&format!("{}?again", url)));
    install.apply(&changed).await.unwrap();
    install.wait_until_ready(&changed).await;
    register_user(install, server, &changed, "grace").await;
    receiver.wait_for(2).await;
    wait_until_delivering(install, &changed).await;

    let without_webhooks = without_webhooks.set("/displayName", "Changed again");
    install.apply(&without_webhooks).await.unwrap();
    install.wait_until_ready(&without_webhooks).await;
    eventually("an App without webhooks has no such condition", LIMIT, || async {
        install.condition(&without_webhooks, ConditionType::Delivering).await.is_err().then_some(())
    })
    .await;
}

#[tokio::test]
async fn events_wait_for_the_secret_of_a_webhook() {
    let Setup { install, server, receiver, url, .. } = &Setup::new().await;
    let _operator = install.start_operator().await;
    let webhook = Webhook::push("crm", url, CREATED);
    let app = App::new("hooks").webhook(&webhook);
    // Applies the App without the Secret of its webhook.
    install.apply_all(&app.objects(install.tenant())[..1]).await.unwrap();
    let message =
        install.wait_for_condition(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretNotFound").await;
    assert!(message.contains(&format!("{}-crm", app.id())), "{message}");
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    register_user(install, server, &app, "ada").await;
    let waiting = format!("SELECT count(*) FROM webhook_events WHERE app_id = '{}' AND dead_at IS NULL", app.id());
    assert_eq!(query_count(install, &waiting).await, 1);
    assert!(receiver.events().is_empty());

    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let event = receiver.wait_for(1).await.remove(0);
    assert!(event.is_signed_with(webhook.key()));
    wait_until_delivering(install, &app).await;
    // Without the Secret, events wait again.
    let secrets: Api<Secret> = Api::namespaced(install.admin(), install.tenant());
    secrets.delete(&format!("{}-crm", app.id()), &DeleteParams::default()).await.unwrap();
    install.wait_for_condition(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretNotFound").await;
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    // Earlier deliveries do not prove that current events can be delivered.
    let waiting = (ConditionType::Delivering, ConditionStatus::Unknown, "Pending");
    let message = install.wait_for_condition(&app, waiting.0, waiting.1, waiting.2).await;
    assert!(message.contains("Secret of webhook crm"), "{message}");
}

#[tokio::test]
async fn the_deletion_of_an_app_deletes_its_events_and_no_events_of_other_apps() {
    let Setup { install, server, receiver, url, .. } = &Setup::new().await;
    let _operator = install.start_operator().await;
    receiver.set_reply(Reply::status(500));
    let with_webhooks = |app: App| {
        app.webhook(&Webhook::pull("sync", install.tenant(), "fetches", CREATED))
            .webhook(&Webhook::push("crm", url, CREATED))
    };
    let deleted = with_webhooks(App::new("deleted").set("/deletionPolicy", "Delete"));
    let kept = with_webhooks(App::new("kept"));
    for app in [&deleted, &kept] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
        register_user(install, server, app, "ada").await;
        register_user(install, server, app, "grace").await;
    }
    let count = async |table: &str, app: &App| {
        query_count(install, &format!("SELECT count(*) FROM {table} WHERE app_id = '{}'", app.id())).await
    };
    // Each webhook has a row that counts its failures.
    for app in [&deleted, &kept] {
        eventually("a failure is counted", LIMIT, || async { (count("webhooks", app).await > 0).then_some(()) }).await;
        assert_eq!(count("webhook_events", app).await, 4, "two events for each webhook");
    }

    install.delete(&deleted).await.unwrap();
    let apps: Api<app::App> = Api::namespaced(install.admin(), install.tenant());
    eventually("the App is deleted", LIMIT, || async {
        apps.get_opt(deleted.id()).await.unwrap().is_none().then_some(())
    })
    .await;
    assert_eq!(count_users(install, &deleted).await, 0);
    assert_eq!((count("webhook_events", &deleted).await, count("webhooks", &deleted).await), (0, 0));
    assert_eq!(count("webhook_events", &kept).await, 4);
    install.client_of(server).get(&format!("{}/.well-known/jwks.json", kept.id())).await.expect(StatusCode::OK);
}
