//! References that do not resolve: the App is served without them, says which and what to do, and is whole again by
//! itself.

use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::{Cluster, Install, PodServer},
    eventually,
};
use serde_json::{Value, json};

use super::{
    leader::acts,
    look::{LIMIT, count, document, keys, named, register, rendered, secret_object, served, told},
};
use crate::{bombs::bombs, template_bombs::with_bombs};

const MIB: usize = 1024 * 1024;

/// What is wrong with a Provider, what is said of it, and what mends it.
struct Broken {
    name: &'static str,
    objects: Vec<Value>,
    reason: &'static str,
    says: &'static str,
    /// What the Provider itself says; none: there is none.
    provider: bool,
    mend: Vec<Value>,
}

fn github(namespace: &str, name: &str) -> Value {
    Provider::new(name, "github").object(namespace)
}

fn client_secret(namespace: &str, name: &str, value: &str) -> Value {
    secret_object(namespace, name, &[("client-secret", value)])
}

/// A P-256 key as Apple gives it.
fn apple_key() -> String {
    rcgen::KeyPair::generate().unwrap().serialize_pem()
}

fn broken(here: &str, elsewhere: &str) -> Vec<Broken> {
    let apple = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Provider",
        "metadata": { "name": "invalid-pem", "namespace": here },
        "spec": { "apple": {
            "clientID": "com.example.shop",
            "teamID": "TEAM123456",
            "keyID": "KEY1234567",
            "privateKeyRef": { "name": "invalid-pem", "key": "AuthKey.p8" },
        }},
    });
    let pem = |value: &str| secret_object(here, "invalid-pem", &[("AuthKey.p8", value)]);
    vec![
        Broken {
            name: "no-secret",
            objects: vec![github(here, "no-secret")],
            reason: "SecretNotFound",
            says: "Secret no-secret does not exist in this namespace; make it, with the key client-secret",
            provider: true,
            mend: vec![client_secret(here, "no-secret", "mended")],
        },
        Broken {
            name: "no-key",
            objects: vec![github(here, "no-key"), secret_object(here, "no-key", &[("secret", "x")])],
            reason: "SecretKeyNotFound",
            says: "Secret no-key has no key client-secret; add it",
            provider: true,
            mend: vec![client_secret(here, "no-key", "mended")],
        },
        Broken {
            name: "empty",
            objects: vec![github(here, "empty"), client_secret(here, "empty", "\n")],
            reason: "SecretKeyInvalid",
            says: "Secret empty, key client-secret: is empty",
            provider: true,
            mend: vec![client_secret(here, "empty", "mended")],
        },
        Broken {
            name: "invalid-pem",
            objects: vec![apple, pem("-----BEGIN PRIVATE KEY-----\nbm90IGEga2V5\n-----END PRIVATE KEY-----\n")],
            reason: "SecretKeyInvalid",
            says: "Secret invalid-pem, key AuthKey.p8: is not a private key as Apple gives it",
            provider: true,
            mend: vec![pem(&apple_key())],
        },
        Broken {
            name: "a-mebibyte",
            objects: vec![github(here, "a-mebibyte"), client_secret(here, "a-mebibyte", &"x".repeat(MIB))],
            reason: "SecretKeyInvalid",
            says: "Secret a-mebibyte, key client-secret: is over 4 KiB",
            provider: true,
            mend: vec![client_secret(here, "a-mebibyte", "mended")],
        },
        Broken {
            name: "no-provider",
            objects: Vec::new(),
            reason: "ProviderNotFound",
            says: "spec.providerRefs[0]: Provider no-provider does not exist in this namespace; make it",
            provider: false,
            mend: vec![client_secret(here, "no-provider", "mended"), github(here, "no-provider")],
        },
        Broken {
            name: "elsewhere",
            objects: vec![client_secret(elsewhere, "elsewhere", "theirs"), github(elsewhere, "elsewhere")],
            reason: "ProviderNotFound",
            says: "spec.providerRefs[0]: Provider elsewhere does not exist in this namespace; make it",
            provider: false,
            mend: vec![client_secret(here, "elsewhere", "ours"), github(here, "elsewhere")],
        },
    ]
}

async fn is_told_and_mended(install: &Install<'_>, servers: &[PodServer], broken: Broken) {
    let app = App::new("broken").provider(&Provider::new(broken.name, "github"));
    install.apply_all(&broken.objects).await.unwrap();
    install.apply(&app).await.unwrap();
    let said = install.until(&app, ConditionType::ResolvedRefs, ConditionStatus::False, broken.reason).await;
    assert!(said.contains(broken.says), "{said}");
    let ready = install.until(&app, ConditionType::Ready, ConditionStatus::False, broken.reason).await;
    assert_eq!(ready, said);
    // The rest is served.
    install.until(&app, ConditionType::Accepted, ConditionStatus::True, "Accepted").await;
    install.until(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    served(install, servers, &app, true).await;
    let provider = ("Provider", install.tenant(), broken.name);
    let settings = document(install, &app).await["providers"][0]["settings"].clone();
    if broken.provider {
        let own = told(install, provider, ConditionType::ResolvedRefs, ConditionStatus::False, broken.reason).await;
        assert!(broken.says.ends_with(&own) || own.contains(broken.says), "{own}");
        assert!(settings.is_object() && settings["secret"].is_null(), "without its secret it is there: {settings}");
    } else {
        assert!(settings.is_null(), "{settings}");
    }

    install.apply_all(&broken.mend).await.unwrap();
    install.ready(&app).await;
    told(install, provider, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    let settings = document(install, &app).await["providers"][0]["settings"].clone();
    assert!(settings["secret"].is_string(), "{}", broken.name);
}

#[tokio::test]
async fn a_provider_that_does_not_resolve_is_told_left_out_and_followed_when_it_is_mended() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(1).await;
    let _operator = install.operator().await;
    let (here, elsewhere) = (install.tenant(), install.tenants()[1].as_str());
    let all = broken(here, elsewhere).into_iter().map(|broken| is_told_and_mended(&install, &servers, broken));
    futures::future::join_all(all).await;
}

#[tokio::test]
async fn what_mail_needs_may_come_and_go() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    tokio::join!(
        mail_waits_for_a_secret_that_is_gone(&install, &servers[0]),
        a_broken_template_gives_way_to_the_default(&install, &servers[1]),
        a_secret_of_a_mebibyte_is_no_harm_to_mail(&install, &servers[1]),
        a_leaked_address_can_be_taken_away(&install),
    );
}

async fn mail_waits_for_a_secret_that_is_gone(install: &Install<'_>, server: &PodServer) {
    let app = App::new("mail").relay(Relay::to(&install.smtp));
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> =
        kube::Api::namespaced(install.admin(), install.tenant());
    secrets.delete(&format!("{}-smtp", app.id()), &kube::api::DeleteParams::default()).await.unwrap();
    let said = install.until(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretNotFound").await;
    assert!(said.starts_with("spec.mail.smtpSecretRef: Secret ") && said.ends_with("Mail waits until then"), "{said}");
    install.until(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;

    let email = "waiting@example.com";
    register(install, server, &app, "waiting").await;
    let attempts = format!("SELECT coalesce(sum(attempts), 0)::bigint FROM outbox WHERE app_id = '{}'", app.id());
    let waiting = format!("SELECT count(*) FROM outbox WHERE app_id = '{}' AND kind <> 'epoch'", app.id());
    assert_eq!(count(install, &waiting).await, 1);
    assert_eq!(count(install, &attempts).await, 0);
    assert!(install.smtp.mails().to(email).is_empty());

    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    install.smtp.mails().wait_for(|mail| mail.is_to(email), LIMIT).await;
    eventually("the outbox is empty", LIMIT, || async { (count(install, &waiting).await == 0).then_some(()) }).await;
}

async fn a_broken_template_gives_way_to_the_default(install: &Install<'_>, server: &PodServer) {
    let app = App::new("templates").relay(Relay::to(&install.smtp));
    let own = app.clone().template("confirm.txt", "Hallo!\nIhr Code: {{ code }}\n");
    let broken = own.clone().template("confirm.txt", "Hallo!\n{{ code \n").template("reset.subject", "Neues Passwort");
    install.apply(&broken).await.unwrap();
    let said = install.until(&broken, ConditionType::ResolvedRefs, ConditionStatus::False, "TemplatesInvalid").await;
    assert!(said.starts_with(&format!("spec.mail.templatesRef: {}-mail/confirm.txt:2: ", app.id())), "{said}");
    install.until(&broken, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    let templates = document(install, &broken).await["mail"]["templates"].clone();
    assert_eq!(templates, json!({ "reset.subject": "Neues Passwort" }), "what is good goes on");
    let text = async |name: &str| {
        register(install, server, &app, name).await;
        let email = format!("{name}@example.com");
        let mail = install.smtp.mails().wait_for(|mail| mail.is_to(&email), LIMIT).await;
        mail.text.clone()
    };
    assert!(!text("first").await.contains("Ihr Code"));

    install.apply(&own).await.unwrap();
    install.ready(&own).await;
    assert!(text("second").await.contains("Ihr Code"));

    let maps: kube::Api<k8s_openapi::api::core::v1::ConfigMap> =
        kube::Api::namespaced(install.admin(), install.tenant());
    maps.delete(&format!("{}-mail", app.id()), &kube::api::DeleteParams::default()).await.unwrap();
    let said = install.until(&own, ConditionType::ResolvedRefs, ConditionStatus::False, "ConfigMapNotFound").await;
    assert!(said.contains("does not exist in this namespace; make it"), "{said}");
    install.until(&own, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    assert!(!text("third").await.contains("Ihr Code"));
}

#[tokio::test]
async fn a_template_made_to_cost_too_much_is_told_and_the_operator_goes_on() {
    let install = Cluster::shared().await.install().await;
    let _servers = install.serve(1).await;
    let operator = install.operator().await;
    let pid = operator.pid();
    let whole = [App::new("bomb"), App::new("bomb")];
    let other = App::new("other");
    let mut bombs = bombs();
    bombs.retain(|bomb| {
        let classes =
            ["minus signs", "nots", "filters", "elifs", "conditional expressions", "comment marks in one line"];
        classes.contains(&bomb.what)
    });
    assert_eq!(bombs.len(), 6);
    // A ConfigMap of an App may have 256 KiB.
    for (whole, bombs) in whole.iter().zip(bombs.chunks(3)) {
        let app = with_bombs(whole, bombs);
        install.apply(&app).await.unwrap();
        let said = install.until(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "TemplatesInvalid").await;
        for bomb in bombs {
            assert!(said.contains(bomb.refusal.unwrap()), "{}: {said}", bomb.what);
        }
        // The defaults are served.
        install.until(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
        assert_eq!(document(&install, &app).await["mail"]["templates"], json!({}));
    }
    install.apply(&other).await.unwrap();
    install.ready(&other).await;
    let mended = whole[0].clone().template("confirm.txt", "{{ code }}");
    install.apply(&mended).await.unwrap();
    install.ready(&mended).await;
    acts(&install, &operator).await;
    assert_eq!((operator.pid(), operator.ended()), (pid, None), "the process that was there at the start");
    assert!(!operator.logged().contains("panic"));
}

async fn a_secret_of_a_mebibyte_is_no_harm_to_mail(install: &Install<'_>, server: &PodServer) {
    let app = App::new("large").set("/mail/smtpSecretRef", json!({ "name": "relay" }));
    let relay = Relay::to(&install.smtp);
    let port = relay.port.to_string();
    let relay = [("host", relay.host.as_str()), ("port", &port), ("tls", relay.tls)];
    let full = "x".repeat(MIB - relay.iter().map(|(_, value)| value.len()).sum::<usize>());
    let with = async |more: &[(&str, &str)]| {
        let secret = secret_object(install.tenant(), "relay", &[relay.as_slice(), more].concat());
        install.apply_all(&[secret]).await.unwrap();
    };
    // As much as a Secret may hold.
    with(&[("rest", &full)]).await;
    install.apply(&app).await.unwrap();
    install.ready(&app).await;

    with(&[("username", "a"), ("password", &full[1..])]).await;
    let said = install.until(&app, ConditionType::ResolvedRefs, ConditionStatus::False, "SecretKeyInvalid").await;
    assert!(said.contains("Secret relay, key password: must have 1024 characters or fewer"), "{said}");
    install.until(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    register(install, server, &app, "large").await;

    with(&[("rest", &full)]).await;
    install.ready(&app).await;
    install.smtp.mails().wait_for(|mail| mail.is_to("large@example.com"), LIMIT).await;
}

async fn a_leaked_address_can_be_taken_away(install: &Install<'_>) {
    let (good, leaked) = ("https://shop.example.com/done", "https://leaked.example.com/done");
    let app = App::new("leaked").provider(&Provider::new("nobody", "github"));
    let both = app.clone().set("/redirectURLs", json!([good, leaked]));
    install.apply(&both).await.unwrap();
    install.until(&both, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderNotFound").await;
    install.until(&both, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    assert_eq!(document(install, &both).await["redirectURLs"], json!([good, leaked]));

    let one = app.set("/redirectURLs", json!([good]));
    install.apply(&one).await.unwrap();
    install.until(&one, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    assert_eq!(document(install, &one).await["redirectURLs"], json!([good]));
    install.until(&one, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderNotFound").await;
}

/// A template that is a comment: of its kind the largest, since most of its characters take six in a document.
fn enormous(app: &App) -> App {
    let line = format!("{}\n", "\u{1}".repeat(1023));
    app.clone().template("confirm.txt", &format!("{{#{}#}}{{{{ code }}}}", line.repeat(100)))
}

#[tokio::test]
async fn a_document_over_the_limit_is_refused_and_takes_no_appid() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("large").relay(Relay::to(&install.smtp));
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let before = install.get(&app).await.unwrap().status.unwrap();

    let too_large = enormous(&app);
    install.apply(&too_large).await.unwrap();
    let said = install.until(&too_large, ConditionType::Accepted, ConditionStatus::False, "TooLarge").await;
    assert!(said.contains("over 512 KiB; shorten the templates"), "{said}");
    let said = install.until(&too_large, ConditionType::Programmed, ConditionStatus::Unknown, "Pending").await;
    assert!(said.contains("the last accepted revision goes on"), "{said}");
    install.until(&too_large, ConditionType::Ready, ConditionStatus::False, "TooLarge").await;
    let after = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!((&after.revision, &after.issuer), (&before.revision, &before.issuer));
    assert_eq!(after.signing_keys, before.signing_keys);
    for server in &servers {
        register(&install, server, &app, server.name()).await;
    }

    // A new one takes nothing, so that its appID is free for another.
    let (here, there) = (install.tenant(), install.tenants()[1].as_str());
    let new = App::new("new");
    // Its templates first: without them it would be small enough.
    let too_large: Vec<_> = enormous(&new).objects(here).into_iter().rev().collect();
    install.apply_all(&too_large).await.unwrap();
    install.until(&new, ConditionType::Accepted, ConditionStatus::False, "TooLarge").await;
    assert!(keys(&install, &new).await.is_none() && rendered(&install, &new).await.is_none());
    install.apply_all(&named(&new, "another", there)).await.unwrap();
    told(&install, ("App", there, "another"), ConditionType::Ready, ConditionStatus::True, "Ready").await;

    // What is mended is too late for the one, and goes on for the other.
    install.apply(&app).await.unwrap();
    install.apply_all(&new.objects(here)).await.unwrap();
    install.ready(&app).await;
    install.until(&new, ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
}
