//! Servers serve an App without its missing or invalid references, and the App recovers without an edit.

use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::{Installation, ServerInPod, TestCluster},
    eventually,
};
use serde_json::{Value, json};

use super::{
    helpers::{
        LIMIT, key_secret, objects_named, query_count, register_user, rendered_document, rendered_secret,
        secret_object, wait_for_condition, wait_until_served,
    },
    leader::wait_until_leader,
};
use crate::{bombs::bombs, template_bombs::with_bombs};

const MIB: usize = 1024 * 1024;

/// A broken Provider, the condition that it must cause, and the correction.
struct BrokenProvider {
    name: &'static str,
    objects: Vec<Value>,
    reason: &'static str,
    message: &'static str,
    /// Whether the Provider exists. If it does, its own conditions must report the error too.
    has_provider: bool,
    correction: Vec<Value>,
}

fn github_provider(namespace: &str, name: &str) -> Value {
    Provider::new(name, "github").object(namespace)
}

fn client_secret_object(namespace: &str, name: &str, value: &str) -> Value {
    secret_object(namespace, name, &[("client-secret", value)])
}

/// A P-256 key in Apple's format.
fn apple_key() -> String {
    rcgen::KeyPair::generate().unwrap().serialize_pem()
}

fn broken_providers(namespace: &str, other_namespace: &str) -> Vec<BrokenProvider> {
    let apple = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Provider",
        "metadata": { "name": "invalid-pem", "namespace": namespace },
        "spec": { "apple": {
            "clientID": "com.example.shop",
            "teamID": "TEAM123456",
            "keyID": "KEY1234567",
            "privateKeyRef": { "name": "invalid-pem", "key": "AuthKey.p8" },
        }},
    });
    let pem = |value: &str| secret_object(namespace, "invalid-pem", &[("AuthKey.p8", value)]);
    vec![
        BrokenProvider {
            name: "no-secret",
            objects: vec![github_provider(namespace, "no-secret")],
            reason: "SecretNotFound",
            message: "Secret no-secret does not exist in this namespace; create it, with the key client-secret",
            has_provider: true,
            correction: vec![client_secret_object(namespace, "no-secret", "mended")],
        },
        BrokenProvider {
            name: "no-key",
            objects: vec![github_provider(namespace, "no-key"), secret_object(namespace, "no-key", &[("secret", "x")])],
            reason: "SecretKeyNotFound",
            message: "Secret no-key has no key client-secret; add it",
            has_provider: true,
            correction: vec![client_secret_object(namespace, "no-key", "mended")],
        },
        BrokenProvider {
            name: "empty",
            objects: vec![github_provider(namespace, "empty"), client_secret_object(namespace, "empty", "\n")],
            reason: "SecretKeyInvalid",
            message: "Secret empty, key client-secret: is empty",
            has_provider: true,
            correction: vec![client_secret_object(namespace, "empty", "mended")],
        },
        BrokenProvider {
            name: "invalid-pem",
            objects: vec![apple, pem("-----BEGIN PRIVATE KEY-----\nbm90IGEga2V5\n-----END PRIVATE KEY-----\n")],
            reason: "SecretKeyInvalid",
            message: "Secret invalid-pem, key AuthKey.p8: is not a private key as issued by Apple",
            has_provider: true,
            correction: vec![pem(&apple_key())],
        },
        BrokenProvider {
            name: "a-mebibyte",
            objects: vec![
                github_provider(namespace, "a-mebibyte"),
                client_secret_object(namespace, "a-mebibyte", &"x".repeat(MIB)),
            ],
            reason: "SecretKeyInvalid",
            message: "Secret a-mebibyte, key client-secret: is over 4 KiB",
            has_provider: true,
            correction: vec![client_secret_object(namespace, "a-mebibyte", "mended")],
        },
        BrokenProvider {
            name: "no-provider",
            objects: Vec::new(),
            reason: "ProviderNotFound",
            message: "spec.providerRefs[0]: Provider no-provider does not exist in this namespace; create it",
            has_provider: false,
            correction: vec![
                client_secret_object(namespace, "no-provider", "mended"),
                github_provider(namespace, "no-provider"),
            ],
        },
        BrokenProvider {
            name: "elsewhere",
            objects: vec![
                client_secret_object(other_namespace, "elsewhere", "theirs"),
                github_provider(other_namespace, "elsewhere"),
            ],
            reason: "ProviderNotFound",
            message: "spec.providerRefs[0]: Provider elsewhere does not exist in this namespace; create it",
            has_provider: false,
            correction: vec![
                client_secret_object(namespace, "elsewhere", "ours"),
                github_provider(namespace, "elsewhere"),
            ],
        },
    ]
}

async fn check_report_and_correction(install: &Installation<'_>, servers: &[ServerInPod], broken: BrokenProvider) {
    let app = App::new("broken").provider(&Provider::new(broken.name, "github"));
    install.apply_all(&broken.objects).await.unwrap();
    install.apply(&app).await.unwrap();
    let message =
        install.wait_for_condition(&app, ConditionType::ResolvedRefs, ConditionStatus::False, broken.reason).await;
    assert!(message.contains(broken.message), "{message}");
    let ready = install.wait_for_condition(&app, ConditionType::Ready, ConditionStatus::False, broken.reason).await;
    assert_eq!(ready, message);
    // The App is served without this provider.
    install.wait_for_condition(&app, ConditionType::Accepted, ConditionStatus::True, "Accepted").await;
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    wait_until_served(install, servers, &app, true).await;
    let provider = ("Provider", install.tenant(), broken.name);
    let settings = rendered_document(install, &app).await["providers"][0]["settings"].clone();
    if broken.has_provider {
        let provider_message =
            wait_for_condition(install, provider, ConditionType::ResolvedRefs, ConditionStatus::False, broken.reason)
                .await;
        assert!(
            broken.message.ends_with(&provider_message) || provider_message.contains(broken.message),
            "{provider_message}"
        );
        assert!(
            settings.is_object() && settings["secret"].is_null(),
            "there are settings without a secret: {settings}"
        );
    } else {
        assert!(settings.is_null(), "{settings}");
    }

    install.apply_all(&broken.correction).await.unwrap();
    install.wait_until_ready(&app).await;
    wait_for_condition(install, provider, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    let settings = rendered_document(install, &app).await["providers"][0]["settings"].clone();
    assert!(settings["secret"].is_string(), "{}", broken.name);
}

#[tokio::test]
async fn an_unresolved_provider_is_reported_and_is_used_after_its_correction() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (namespace, other_namespace) = (install.tenant(), install.tenants()[1].as_str());
    let checks = broken_providers(namespace, other_namespace)
        .into_iter()
        .map(|broken| check_report_and_correction(&install, &servers, broken));
    futures::future::join_all(checks).await;
}

#[tokio::test]
async fn an_app_recovers_from_missing_and_invalid_references() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    tokio::join!(
        mail_waits_for_a_deleted_secret(&install, &servers[0]),
        an_invalid_template_is_replaced_by_the_default(&install, &servers[1]),
        a_large_relay_secret_works_unless_its_password_is_too_long(&install, &servers[1]),
        a_redirect_url_can_be_removed_while_a_provider_is_missing(&install),
    );
}

async fn mail_waits_for_a_deleted_secret(install: &Installation<'_>, server: &ServerInPod) {
    let app = App::new("mail").relay(Relay::of(&install.smtp));
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> =
        kube::Api::namespaced(install.admin(), install.tenant());
    secrets.delete(&format!("{}-smtp", app.id()), &kube::api::DeleteParams::default()).await.unwrap();
    let message =
        install.wait_for_condition(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretNotFound").await;
    assert!(
        message.starts_with("spec.mail.smtpSecretRef: Secret ") && message.ends_with("Mail waits until then"),
        "{message}"
    );
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;

    let email = "waiting@example.com";
    register_user(install, server, &app, "waiting").await;
    let attempts = format!("SELECT coalesce(sum(attempts), 0)::bigint FROM outbox WHERE app_id = '{}'", app.id());
    let waiting = format!("SELECT count(*) FROM outbox WHERE app_id = '{}' AND kind <> 'epoch'", app.id());
    assert_eq!(query_count(install, &waiting).await, 1);
    assert_eq!(query_count(install, &attempts).await, 0);
    assert!(install.smtp.mails().to(email).is_empty());

    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    install.smtp.mails().wait_for(|mail| mail.is_to(email), LIMIT).await;
    eventually("the outbox is empty", LIMIT, || async { (query_count(install, &waiting).await == 0).then_some(()) })
        .await;
}

async fn an_invalid_template_is_replaced_by_the_default(install: &Installation<'_>, server: &ServerInPod) {
    let app = App::new("templates").relay(Relay::of(&install.smtp));
    let valid = app.clone().template("confirm.txt", "Hallo!\nIhr Code: {{ code }}\n");
    let invalid =
        valid.clone().template("confirm.txt", "Hallo!\n{{ code \n").template("reset.subject", "Neues Passwort");
    install.apply(&invalid).await.unwrap();
    let message = install
        .wait_for_condition(&invalid, ConditionType::ResolvedRefs, ConditionStatus::False, "TemplatesInvalid")
        .await;
    assert!(message.starts_with(&format!("spec.mail.templatesRef: {}-mail/confirm.txt:2: ", app.id())), "{message}");
    install.wait_for_condition(&invalid, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    let templates = rendered_document(install, &invalid).await["mail"]["templates"].clone();
    assert_eq!(templates, json!({ "reset.subject": "Neues Passwort" }), "valid templates are still used");
    let mail_text = async |name: &str| {
        register_user(install, server, &app, name).await;
        let email = format!("{name}@example.com");
        let mail = install.smtp.mails().wait_for(|mail| mail.is_to(&email), LIMIT).await;
        mail.text.clone()
    };
    assert!(!mail_text("first").await.contains("Ihr Code"));

    install.apply(&valid).await.unwrap();
    install.wait_until_ready(&valid).await;
    assert!(mail_text("second").await.contains("Ihr Code"));

    let maps: kube::Api<k8s_openapi::api::core::v1::ConfigMap> =
        kube::Api::namespaced(install.admin(), install.tenant());
    maps.delete(&format!("{}-mail", app.id()), &kube::api::DeleteParams::default()).await.unwrap();
    let message = install
        .wait_for_condition(&valid, ConditionType::ResolvedRefs, ConditionStatus::False, "ConfigMapNotFound")
        .await;
    assert!(message.contains("does not exist in this namespace; create it"), "{message}");
    install.wait_for_condition(&valid, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    assert!(!mail_text("third").await.contains("Ihr Code"));

    install.apply(&valid).await.unwrap();
    install.wait_for_condition(&valid, ConditionType::ResolvedRefs, ConditionStatus::True, "Resolved").await;
    install.wait_until_ready(&valid).await;
    assert!(mail_text("fourth").await.contains("Ihr Code"));
}

#[tokio::test]
async fn an_expensive_template_is_reported_and_the_operator_continues() {
    let install = TestCluster::shared().await.install().await;
    let _servers = install.start_servers(1).await;
    let operator = install.start_operator().await;
    let pid = operator.pid();
    let apps = [App::new("bomb"), App::new("bomb")];
    let other = App::new("other");
    let mut bombs = bombs();
    bombs.retain(|bomb| {
        let names = ["minus signs", "nots", "filters", "elifs", "conditional expressions", "comment marks in one line"];
        names.contains(&bomb.name)
    });
    assert_eq!(bombs.len(), 6);
    // Each App gets three of the expensive templates (bombs), because the ConfigMap of an App can have only 256 KiB.
    for (app, bombs) in apps.iter().zip(bombs.chunks(3)) {
        let app = with_bombs(app, bombs);
        install.apply(&app).await.unwrap();
        let message = install
            .wait_for_condition(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "TemplatesInvalid")
            .await;
        for bomb in bombs {
            assert!(message.contains(bomb.refusal.unwrap()), "{}: {message}", bomb.name);
        }
        // Servers use the default templates.
        install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
        assert_eq!(rendered_document(&install, &app).await["mail"]["templates"], json!({}));
    }
    install.apply(&other).await.unwrap();
    install.wait_until_ready(&other).await;
    let mended = apps[0].clone().template("confirm.txt", "{{ code }}");
    install.apply(&mended).await.unwrap();
    install.wait_until_ready(&mended).await;
    wait_until_leader(&install, &operator).await;
    assert_eq!((operator.pid(), operator.exit_status()), (pid, None), "still the process of the start");
    assert!(!operator.read_log().contains("panic"));
}

async fn a_large_relay_secret_works_unless_its_password_is_too_long(install: &Installation<'_>, server: &ServerInPod) {
    let app = App::new("large").set("/mail/smtpSecretRef", json!({ "name": "relay" }));
    let relay = Relay::of(&install.smtp);
    let port = relay.port.to_string();
    let relay = [("host", relay.host.as_str()), ("port", &port), ("tls", relay.tls)];
    let filler = "x".repeat(MIB - relay.iter().map(|(_, value)| value.len()).sum::<usize>());
    let apply_secret = async |more_values: &[(&str, &str)]| {
        let secret = secret_object(install.tenant(), "relay", &[relay.as_slice(), more_values].concat());
        install.apply_all(&[secret]).await.unwrap();
    };
    // The Secret has the maximum size.
    apply_secret(&[("rest", &filler)]).await;
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;

    apply_secret(&[("username", "a"), ("password", &filler[1..])]).await;
    let message =
        install.wait_for_condition(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretKeyInvalid").await;
    assert!(message.contains("Secret relay, key password: must have at most 1024 bytes"), "{message}");
    install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    register_user(install, server, &app, "large").await;

    apply_secret(&[("rest", &filler)]).await;
    install.wait_until_ready(&app).await;
    install.smtp.mails().wait_for(|mail| mail.is_to("large@example.com"), LIMIT).await;
}

async fn a_redirect_url_can_be_removed_while_a_provider_is_missing(install: &Installation<'_>) {
    let (good, leaked) = ("https://shop.example.com/done", "https://leaked.example.com/done");
    let app = App::new("leaked").provider(&Provider::new("nobody", "github"));
    let with_leaked_url = app.clone().set("/redirectURLs", json!([good, leaked]));
    install.apply(&with_leaked_url).await.unwrap();
    install
        .wait_for_condition(&with_leaked_url, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderNotFound")
        .await;
    install.wait_for_condition(&with_leaked_url, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    assert_eq!(rendered_document(install, &with_leaked_url).await["redirectURLs"], json!([good, leaked]));

    let without_leaked_url = app.set("/redirectURLs", json!([good]));
    install.apply(&without_leaked_url).await.unwrap();
    install
        .wait_for_condition(&without_leaked_url, ConditionType::Programmed, ConditionStatus::True, "Programmed")
        .await;
    assert_eq!(rendered_document(install, &without_leaked_url).await["redirectURLs"], json!([good]));
    install
        .wait_for_condition(
            &without_leaked_url,
            ConditionType::ResolvedRefs,
            ConditionStatus::False,
            "ProviderNotFound",
        )
        .await;
}

/// The App with a template that makes its document too large: a comment of characters that take six bytes each in JSON.
fn with_enormous_template(app: &App) -> App {
    let line = format!("{}\n", "\u{1}".repeat(1023));
    app.clone().template("confirm.txt", &format!("{{#{}#}}{{{{ code }}}}", line.repeat(100)))
}

#[tokio::test]
async fn an_app_with_a_document_over_the_limit_is_rejected_and_gets_no_appid() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("large").relay(Relay::of(&install.smtp));
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let before = install.get(&app).await.unwrap().status.unwrap();

    let too_large = with_enormous_template(&app);
    install.apply(&too_large).await.unwrap();
    let message =
        install.wait_for_condition(&too_large, ConditionType::Accepted, ConditionStatus::False, "TooLarge").await;
    assert!(message.contains("over 512 KiB; shorten the templates"), "{message}");
    let message =
        install.wait_for_condition(&too_large, ConditionType::Programmed, ConditionStatus::Unknown, "Pending").await;
    assert!(message.contains("the last accepted revision is still served"), "{message}");
    install.wait_for_condition(&too_large, ConditionType::Ready, ConditionStatus::False, "TooLarge").await;
    let after = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!((&after.revision, &after.issuer), (&before.revision, &before.issuer));
    assert_eq!(after.signing_keys, before.signing_keys);
    for server in &servers {
        register_user(&install, server, &app, server.name()).await;
    }

    // A new App that is too large does not get its appID, so another App can take the appID.
    let (namespace, other_namespace) = (install.tenant(), install.tenants()[1].as_str());
    let new_app = App::new("new");
    // The ConfigMap with the templates is created before the App. Without the ConfigMap, the App would be small enough.
    let too_large: Vec<_> = with_enormous_template(&new_app).objects(namespace).into_iter().rev().collect();
    install.apply_all(&too_large).await.unwrap();
    install.wait_for_condition(&new_app, ConditionType::Accepted, ConditionStatus::False, "TooLarge").await;
    assert!(key_secret(&install, &new_app).await.is_none() && rendered_secret(&install, &new_app).await.is_none());
    install.apply_all(&objects_named(&new_app, "another", other_namespace)).await.unwrap();
    wait_for_condition(
        &install,
        ("App", other_namespace, "another"),
        ConditionType::Ready,
        ConditionStatus::True,
        "Ready",
    )
    .await;

    // Both Apps are corrected. `large` is Ready again. `new_app` is not, because another App has its appID now.
    install.apply(&app).await.unwrap();
    install.apply_all(&new_app.objects(namespace)).await.unwrap();
    install.wait_until_ready(&app).await;
    install.wait_for_condition(&new_app, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
}
