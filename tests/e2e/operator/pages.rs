//! Hosted pages of an App: the rendered document, the ConfigMaps that it needs, the host that only this App uses, and
//! servers of an earlier version.

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::DeleteParams};
use latchkey_crds::{
    app,
    conditions::{ConditionStatus, ConditionType},
    names::PAGES_HOST_ANNOTATION,
    pages::{Language, texts::default_texts},
};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, RevisionScript, TestCluster},
    eventually, eventually_ok,
};
use serde_json::{Value, json};

use super::helpers::{
    LIMIT, objects_named, operator_secrets, register_user, rendered_document, rendered_secret, rendered_secret_name,
    wait_for_condition,
};

const HOST: &str = "login.shop.example.com";
const SVG: &str = r#"<svg xmlns="http://www.w3.org/2000/svg"><path d="M0 0h9v9z"/></svg>"#;
const HOSTILE_SVG: &str = r#"<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>"#;

fn with_pages(app: App) -> App {
    app.set("/pages/mode", "Enabled")
}

fn with_host(app: App) -> App {
    with_pages(app).set("/pages/host", HOST)
}

fn config_map(install: &Installation<'_>, name: &str, field: &str, values: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": install.tenant() },
        field: values,
    })
}

/// The host for the App's pages in the annotation of the rendered Secret.
async fn published_host(install: &Installation<'_>, app: &App) -> Option<String> {
    let secret = rendered_secret(install, app).await?;
    secret.metadata.annotations.unwrap_or_default().remove(PAGES_HOST_ANNOTATION)
}

/// Waits until the host belongs to the App: it is in the App's document and in the annotation.
async fn wait_until_host_is_held(install: &Installation<'_>, app: &App) {
    eventually(&format!("{} holds the host", app.id()), LIMIT, || async {
        (published_host(install, app).await.as_deref() == Some(HOST)).then_some(())
    })
    .await;
    assert_eq!(rendered_document(install, app).await["pages"]["host"], HOST);
}

/// Waits until the App reports that the host belongs to another App. The pages of this App are published without the
/// host.
async fn wait_for_host_conflict(install: &Installation<'_>, app: &App, namespace: &str) {
    let message = wait_for_condition(
        install,
        ("App", namespace, app.id()),
        ConditionType::ResolvedRefs,
        ConditionStatus::False,
        "HostConflict",
    )
    .await;
    assert!(message.starts_with(&format!("spec.pages.host: another App has the host {HOST}")), "{message}");
    for tenant in install.tenants().iter().filter(|tenant| *tenant != namespace) {
        assert!(!message.contains(tenant.as_str()), "{message}");
    }
    assert_eq!(published_host(install, app).await, None);
    let pages = rendered_document(install, app).await["pages"].clone();
    assert!(pages.is_object() && pages["host"].is_null(), "{pages}");
}

#[tokio::test]
async fn an_app_with_disabled_pages_has_the_same_document_as_an_app_without_pages() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let before = rendered_secret(&install, &app).await.unwrap();
    assert!(rendered_document(&install, &app).await["pages"].is_null());

    let disabled = with_host(app).set("/pages/mode", "Disabled").set("/pages/textsRef", json!({ "name": "gone" }));
    install.apply(&disabled).await.unwrap();
    install.wait_until_ready(&disabled).await;
    let after = rendered_secret(&install, &disabled).await.unwrap();
    assert_eq!(after.metadata.resource_version, before.metadata.resource_version, "nothing was written");
}

#[tokio::test]
async fn logo_and_texts_follow_their_config_maps() {
    let install = TestCluster::shared().await.install().await;
    let server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = with_pages(App::new("shop"))
        .set("/pages/languages", json!(["de", "en"]))
        .set("/pages/theme/logoRef", json!({ "name": "brand", "key": "logo" }))
        .set("/pages/textsRef", json!({ "name": "texts" }));
    install.apply(&app).await.unwrap();
    let wait_for = async |reason: &str| {
        let type_ = ConditionType::ResolvedRefs;
        let message = install.wait_for_condition(&app, type_, ConditionStatus::False, reason).await;
        // The rest of the document is published.
        install.wait_for_condition(&app, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
        message
    };
    let message = wait_for("ConfigMapNotFound").await;
    assert!(message.contains("spec.pages.theme.logoRef: ConfigMap brand") && message.contains("ConfigMap texts"));
    let pages = rendered_document(&install, &app).await["pages"].clone();
    assert_eq!((&pages["languages"], &pages["theme"]["logo"]), (&json!(["de", "en"]), &Value::Null));
    register_user(&install, &server, &app, "ada").await;

    let id = default_texts(Language::De).keys().next().unwrap().as_str();
    let broken = format!("{id} = Willkommen\nno-such-text = x\n");
    let hostile = config_map(&install, "brand", "data", json!({ "logo": HOSTILE_SVG }));
    let texts = |file: &str| config_map(&install, "texts", "data", json!({ "de.ftl": file }));
    // Applies the texts before the logo, so that the message about the logo also contains the errors of the texts.
    install.apply_all(&[texts(&broken), hostile]).await.unwrap();
    let message = wait_for("LogoInvalid").await;
    assert!(message.contains("brand/logo: has the event handler onload"), "{message}");
    assert!(message.contains("texts/de.ftl:2: no-such-text: there is no text with this ID"), "{message}");
    let pages = rendered_document(&install, &app).await["pages"].clone();
    assert_eq!((&pages["theme"]["logo"], &pages["texts"]["de"][id]), (&Value::Null, &json!("Willkommen")));

    let svg = config_map(&install, "brand", "data", json!({ "logo": SVG }));
    install.apply_all(&[svg]).await.unwrap();
    wait_for("TextsInvalid").await;
    install.apply_all(&[texts(&format!("{id} = Hallo\n"))]).await.unwrap();
    install.wait_until_ready(&app).await;
    let pages = rendered_document(&install, &app).await["pages"].clone();
    assert_eq!(pages["theme"]["logo"], json!({ "contentType": "image/svg+xml", "data": STANDARD.encode(SVG) }));
    assert_eq!(pages["texts"], json!({ "de": { id: "Hallo" } }));

    // A PNG image is binary, so it is in `binaryData`. The first eight bytes (the signature) are enough for this test.
    let png = STANDARD.encode(b"\x89PNG\r\n\x1a\n");
    let maps: Api<ConfigMap> = Api::namespaced(install.admin(), install.tenant());
    maps.delete("brand", &DeleteParams::default()).await.unwrap();
    wait_for("ConfigMapNotFound").await;
    install.apply_all(&[config_map(&install, "brand", "binaryData", json!({ "logo": png }))]).await.unwrap();
    install.wait_until_ready(&app).await;
    let logo = rendered_document(&install, &app).await["pages"]["theme"]["logo"].clone();
    assert_eq!(logo, json!({ "contentType": "image/png", "data": png }));
}

#[tokio::test]
async fn pages_without_enough_contrast_are_not_accepted() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = with_pages(App::new("shop"));
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let before = rendered_document(&install, &app).await;
    let accent = app.clone().set("/pages/theme/light/accent", "#eeeeee");
    install.apply(&accent).await.unwrap();
    let (type_, status) = (ConditionType::Accepted, ConditionStatus::False);
    let message = install.wait_for_condition(&accent, type_, status, "InvalidSpec").await;
    assert!(message.starts_with("spec.pages.theme.light.accent: has a contrast of 1.16:1"), "{message}");
    assert_eq!(rendered_document(&install, &app).await, before, "the last accepted revision is served");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
}

#[tokio::test]
async fn one_of_two_racing_apps_gets_the_host_and_the_other_gets_it_after_the_first_is_deleted() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let namespaces = [install.tenants()[0].as_str(), install.tenants()[1].as_str()];
    let apps = [with_host(App::new("one")), with_host(App::new("two"))];
    let objects = [0, 1].map(|index| objects_named(&apps[index], apps[index].id(), namespaces[index]));
    let (one, two) = tokio::join!(install.apply_all(&objects[0]), install.apply_all(&objects[1]));
    one.unwrap();
    two.unwrap();
    let holder = eventually("one App holds the host", LIMIT, || async {
        let hosts = [published_host(&install, &apps[0]).await, published_host(&install, &apps[1]).await];
        hosts.iter().position(Option::is_some)
    })
    .await;
    let other = 1 - holder;
    wait_until_host_is_held(&install, &apps[holder]).await;
    wait_for_host_conflict(&install, &apps[other], namespaces[other]).await;

    let holders: Api<app::App> = Api::namespaced(install.admin(), namespaces[holder]);
    holders.delete(apps[holder].id(), &DeleteParams::default()).await.unwrap();
    wait_until_host_is_held(&install, &apps[other]).await;
    let ready = ("App", namespaces[other], apps[other].id());
    wait_for_condition(&install, ready, ConditionType::Ready, ConditionStatus::True, "Ready").await;
}

#[tokio::test]
async fn an_app_keeps_its_host_until_it_gives_the_host_up() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let (older, holder) = (with_pages(App::new("older")), with_host(App::new("holder")));
    install.apply(&older).await.unwrap();
    install.wait_until_ready(&older).await;
    install.apply(&holder).await.unwrap();
    install.wait_until_ready(&holder).await;
    wait_until_host_is_held(&install, &holder).await;

    // The operator restores the annotation.
    let edited = json!({ "metadata": { "annotations": { PAGES_HOST_ANNOTATION: "other.example.com" } } });
    let secrets = operator_secrets(&install);
    let patch = kube::api::Patch::Merge(&edited);
    secrets.patch(&rendered_secret_name(&holder), &kube::api::PatchParams::default(), &patch).await.unwrap();
    wait_until_host_is_held(&install, &holder).await;

    let asking = with_host(older);
    install.apply(&asking).await.unwrap();
    wait_for_host_conflict(&install, &asking, install.tenant()).await;
    install.apply(&holder.clone().set("/pages/host", "id.shop.example.com")).await.unwrap();
    wait_until_host_is_held(&install, &asking).await;
    install.wait_until_ready(&asking).await;
    install.apply(&holder).await.unwrap();
    wait_for_host_conflict(&install, &holder, install.tenant()).await;
    install.apply(&asking.set("/pages/mode", "Disabled")).await.unwrap();
    wait_until_host_is_held(&install, &holder).await;
}

#[tokio::test]
async fn a_server_that_does_not_know_pages_serves_the_app_without_them() {
    let install = TestCluster::shared().await.install().await;
    let server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let revision = async || install.get(&app).await.unwrap().status.unwrap().revision.unwrap();
    let published = revision().await;
    let scripted = install.scripted_server(RevisionScript::serving(2, app.id(), &published)).await.unwrap();
    install.wait_until_ready(&app).await;
    assert_eq!(revision().await, published);

    install.apply(&with_pages(app.clone())).await.unwrap();
    let (type_, status) = (ConditionType::Programmed, ConditionStatus::False);
    install.wait_for_condition(&app, type_, status, "ServersTooOld").await;
    let with_pages = eventually_ok("the document is published all the same", LIMIT, || async {
        let now = revision().await;
        anyhow::ensure!(now != published, "{now}");
        Ok(now)
    })
    .await;
    scripted.set_script(RevisionScript::serving(2, app.id(), &with_pages));
    let message = install.wait_for_condition(&app, type_, status, "ServersTooOld").await;
    assert!(message.contains("spec.pages needs format 3") && message.contains(scripted.pod().name()), "{message}");
    register_user(&install, &server, &app, "ada").await;

    // Upgrading the server changes no document.
    scripted.set_script(RevisionScript::serving(3, app.id(), &with_pages));
    install.wait_until_ready(&app).await;
    assert_eq!(revision().await, with_pages);
}
