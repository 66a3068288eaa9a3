//! Whose an appID is, and Apps that cannot be read.

use http::StatusCode;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use latchkey_crds::{
    app,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::{
    builders::{App, Provider},
    client::SignedIn,
    cluster::{Cluster, Install, PodServer, apply},
    eventually, eventually_ok,
};
use serde_json::{Value, json};

use super::look::{
    LIMIT, PASSWORD, count, document, jwks, keys_name, named, own_secrets, register, rendered, served, told, users,
};

/// An App whose user may ask for mail after mail.
fn shop() -> App {
    App::new("shop").limit("mailsPerRecipient", &[(1000, 60)])
}

async fn ready(install: &Install<'_>, namespace: &str, name: &str) {
    told(install, ("App", namespace, name), ConditionType::Ready, ConditionStatus::True, "Ready").await;
}

/// Waits until the App is refused for that reason, and gives what is said of it. It names no other tenant.
async fn refused(install: &Install<'_>, namespace: &str, name: &str, reason: &str) -> String {
    let said = told(install, ("App", namespace, name), ConditionType::Accepted, ConditionStatus::False, reason).await;
    for tenant in install.tenants().iter().filter(|tenant| *tenant != namespace) {
        assert!(!said.contains(tenant.as_str()), "{said}");
    }
    said
}

async fn delete(install: &Install<'_>, namespace: &str, name: &str) {
    let apps: Api<app::App> = Api::namespaced(install.admin(), namespace);
    apps.delete(name, &DeleteParams::default()).await.unwrap();
}

/// Somebody who registered, and the session of who logged in.
async fn user(install: &Install<'_>, server: &PodServer, app: &App) -> SignedIn {
    register(install, server, app, "ada").await;
    install.client_of(server).sign_in(app.id(), "ada@example.com", PASSWORD).await
}

/// Every server still takes the session, and a login.
async fn still_in(install: &Install<'_>, servers: &[PodServer], app: &App, session: &SignedIn) {
    for server in servers {
        let client = install.client_of(server);
        client.signed_in(app.id(), session.token()).verify().await.expect(StatusCode::OK);
        client.login(app.id(), "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn who_holds_an_appid_keeps_it_and_only_its_own_namespace_inherits_it() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let (ours, theirs) = (install.tenants()[0].as_str(), install.tenants()[1].as_str());
    let shop = shop();
    // Older, but broken while the other comes.
    let enormous = format!("{{#{}#}}", format!("{}\n", "\u{1}".repeat(1023)).repeat(100));
    let broken = shop.clone().template("confirm.txt", &enormous);
    let broken: Vec<Value> = named(&broken, "older", theirs).into_iter().rev().collect();
    install.apply_all(&broken).await.unwrap();
    refused(&install, theirs, "older", "TooLarge").await;
    install.apply_all(&named(&shop, "holder", ours)).await.unwrap();
    ready(&install, ours, "holder").await;
    let session = user(&install, &servers[0], &shop).await;
    let (public, before) = (jwks(&install, &servers[0], &shop).await, document(&install, &shop).await);

    install.apply_all(&named(&shop, "older", theirs)).await.unwrap();
    install.apply_all(&named(&shop, "second", ours)).await.unwrap();
    for (namespace, name) in [(theirs, "older"), (ours, "second")] {
        let said = refused(&install, namespace, name, "AppIDConflict").await;
        let wanted = format!("spec.appID: another App holds the appID {}; set another spec.appID", shop.id());
        assert_eq!(said, wanted);
        let status =
            told(&install, ("App", namespace, name), ConditionType::Programmed, ConditionStatus::Unknown, "Pending");
        assert_eq!(status.await, "nothing is served; see Accepted");
    }
    ready(&install, ours, "holder").await;
    assert_eq!(document(&install, &shop).await, before);

    // The holder goes: the one of its namespace inherits keys and users, the older one does not.
    delete(&install, ours, "second").await;
    delete(&install, ours, "holder").await;
    let said = refused(&install, theirs, "older", "AppIDReserved").await;
    assert!(said.contains("ask the platform team to hand it over"), "{said}");
    eventually("the document is taken away", LIMIT, || async {
        rendered(&install, &shop).await.is_none().then_some(())
    })
    .await;
    served(&install, &servers, &shop, false).await;
    install.apply_all(&named(&shop, "heir", ours)).await.unwrap();
    ready(&install, ours, "heir").await;
    refused(&install, theirs, "older", "AppIDConflict").await;
    for server in &servers {
        assert_eq!(jwks(&install, server, &shop).await, public);
    }
    still_in(&install, &servers, &shop, &session).await;
    assert_eq!(users(&install, &shop).await, 1);
}

#[tokio::test]
async fn the_platform_team_hands_an_appid_with_its_users_to_another_namespace() {
    let install = Cluster::shared().await.builder().tenants(3).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let (from, to, third) =
        (install.tenants()[0].as_str(), install.tenants()[1].as_str(), install.tenants()[2].as_str());
    let shop = shop();
    install.apply_all(&named(&shop, "before", from)).await.unwrap();
    ready(&install, from, "before").await;
    let session = user(&install, &servers[0], &shop).await;
    let public = jwks(&install, &servers[0], &shop).await;
    for namespace in [to, third] {
        install.apply_all(&named(&shop, "after", namespace)).await.unwrap();
        refused(&install, namespace, "after", "AppIDConflict").await;
    }
    let hand = async |namespace: &str| {
        let annotations = json!({ "metadata": { "annotations": { "latchkey.dev/namespace": namespace } } });
        let secrets = own_secrets(&install);
        secrets.patch(&keys_name(&shop), &PatchParams::default(), &Patch::Merge(&annotations)).await.unwrap();
    };
    let is_of = async |namespace: &str| {
        let row = format!(
            "SELECT count(*) FROM apps WHERE app_id = '{}' AND namespace = '{namespace}' AND state = 'active'",
            shop.id()
        );
        eventually("the database knows whose it is", LIMIT, || async {
            (count(&install, &row).await == 1).then_some(())
        })
        .await;
        assert_eq!(document(&install, &shop).await["namespace"], namespace);
        for server in &servers {
            assert_eq!(jwks(&install, server, &shop).await, public);
        }
        still_in(&install, &servers, &shop, &session).await;
        assert_eq!(users(&install, &shop).await, 1);
    };
    is_of(from).await;

    // While the App before is still there, and once it is gone.
    hand(to).await;
    ready(&install, to, "after").await;
    refused(&install, from, "before", "AppIDConflict").await;
    refused(&install, third, "after", "AppIDConflict").await;
    is_of(to).await;
    delete(&install, to, "after").await;
    refused(&install, from, "before", "AppIDReserved").await;
    refused(&install, third, "after", "AppIDReserved").await;
    hand(third).await;
    ready(&install, third, "after").await;
    is_of(third).await;
    // What is not served shows nothing of what was.
    refused(&install, from, "before", "AppIDConflict").await;
    let apps: Api<app::App> = Api::namespaced(install.admin(), from);
    let status = apps.get("before").await.unwrap().status.unwrap();
    assert_eq!((status.revision, status.issuer), (None, None));
    assert!(status.signing_keys.is_empty() && status.hmac_keys.is_empty());
}

/// Definitions as an older or a newer version may have them: anything is taken for a spec.
async fn loosen(install: &Install<'_>) {
    let api: Api<CustomResourceDefinition> = Api::all(install.admin());
    for name in ["apps.latchkey.dev", "providers.latchkey.dev"] {
        eventually_ok("the definition is changed", LIMIT, || async {
            let mut definition = serde_json::to_value(api.get(name).await?).expect("an object is JSON");
            let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            schema["properties"]["spec"] = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
            schema.as_object_mut().expect("a schema is an object").remove("x-kubernetes-validations");
            let definition = serde_json::from_value(definition).expect("a definition");
            api.replace(name, &Default::default(), &definition).await
        })
        .await;
    }
}

fn with_spec(app: &App, namespace: &str, edit: impl FnOnce(&mut Value)) -> Value {
    let mut object = app.objects(namespace).swap_remove(0);
    edit(&mut object["spec"]);
    object
}

#[tokio::test]
async fn an_app_that_cannot_be_read_says_so_and_the_others_go_on() {
    let cluster = Cluster::start().await.unwrap();
    let install = cluster.install().await;
    let servers = install.serve(2).await;
    let operator = install.operator().await;
    let (good, served_before, never) = (App::new("good"), App::new("before"), App::new("never"));
    for app in [&good, &served_before] {
        install.apply(app).await.unwrap();
        install.ready(app).await;
    }
    let before = install.get(&served_before).await.unwrap().status.unwrap();
    loosen(&install).await;
    let (here, client) = (install.tenant(), install.admin());
    let wrong = |app: &App| with_spec(app, here, |spec| spec["tokens"] = json!("often"));
    let provider = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Provider",
        "metadata": { "name": "wrong", "namespace": here },
        "spec": { "github": { "clientID": 5 } },
    });
    for object in [wrong(&served_before), wrong(&never), provider] {
        // An API server takes a moment to know the new definition.
        eventually_ok("the API server takes it", LIMIT, || apply(&client, &object)).await;
    }
    let unreadable = async || {
        for (kind, name) in [("App", served_before.id()), ("App", never.id()), ("Provider", "wrong")] {
            let object = (kind, here, name);
            let said = told(&install, object, ConditionType::Accepted, ConditionStatus::False, "InvalidSpec").await;
            assert!(said.starts_with("the object cannot be read by this operator: "), "{said}");
            told(&install, object, ConditionType::Ready, ConditionStatus::False, "InvalidSpec").await;
        }
    };
    unreadable().await;
    served(&install, &servers, &served_before, true).await;
    served(&install, &servers, &never, false).await;
    let status = &super::look::object(&install, "App", here, served_before.id()).await.unwrap().data["status"];
    assert_eq!(status["revision"], json!(before.revision));
    assert_eq!(status["signingKeys"], json!(before.signing_keys));

    // The others go on, also with an operator that starts among what it cannot read.
    let edited = good.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.ready(&edited).await;
    operator.kill();
    operator.start().unwrap();
    let edited = edited.provider(&Provider::new("wrong", "github"));
    install.apply(&edited).await.unwrap();
    let said = install.until(&edited, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderInvalid").await;
    assert!(said.contains("Provider wrong is not valid"), "{said}");
    install.until(&edited, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    unreadable().await;
    served(&install, &servers, &served_before, true).await;

    // What the schema would have refused is refused by the operator too.
    let twice = with_spec(&good, here, |spec| spec["providerRefs"] = json!([{ "name": "same" }, { "name": "same" }]));
    apply(&client, &twice).await.unwrap();
    let said = install.until(&good, ConditionType::Accepted, ConditionStatus::False, "InvalidSpec").await;
    assert_eq!(said, "spec.providerRefs[1]: same is the name of an entry before it; set another alias");
    served(&install, &servers, &good, true).await;
    assert_eq!(document(&install, &good).await["displayName"], "Edited");

    for app in [&good, &served_before, &never] {
        install.apply(app).await.unwrap();
        install.ready(app).await;
    }
    served(&install, &servers, &never, true).await;
}
