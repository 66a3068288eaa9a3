//! Two Apps cannot own the same appID, and Apps that the operator cannot decode are reported.

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
    client::AuthenticatedClient,
    cluster::{Installation, ServerInPod, TestCluster, apply},
    eventually, eventually_ok,
    passwords::PASSWORD,
};
use serde_json::{Value, json};

use super::helpers::{
    LIMIT, count_users, jwks, key_secret_name, objects_named, operator_secrets, query_count, register_user,
    rendered_document, rendered_secret, wait_for_condition, wait_until_served,
};

/// An App with a mail limit per recipient that no test reaches.
fn app_without_mail_limit() -> App {
    App::new("shop").limit("mailsPerRecipient", &[(1000, 60)])
}

async fn wait_until_ready(install: &Installation<'_>, namespace: &str, name: &str) {
    wait_for_condition(install, ("App", namespace, name), ConditionType::Ready, ConditionStatus::True, "Ready").await;
}

/// Waits until Accepted is False for this reason. Returns the message, which must not name another tenant.
async fn wait_until_not_accepted(install: &Installation<'_>, namespace: &str, name: &str, reason: &str) -> String {
    let message =
        wait_for_condition(install, ("App", namespace, name), ConditionType::Accepted, ConditionStatus::False, reason)
            .await;
    for tenant in install.tenants().iter().filter(|tenant| *tenant != namespace) {
        assert!(!message.contains(tenant.as_str()), "{message}");
    }
    message
}

async fn delete_app(install: &Installation<'_>, namespace: &str, name: &str) {
    let apps: Api<app::App> = Api::namespaced(install.admin(), namespace);
    apps.delete(name, &DeleteParams::default()).await.unwrap();
}

/// Registers a user, logs in, and returns the session.
async fn register_and_log_in(install: &Installation<'_>, server: &ServerInPod, app: &App) -> AuthenticatedClient {
    register_user(install, server, app, "ada").await;
    install.client_of(server).authenticate(app.id(), "ada@example.com", PASSWORD).await
}

/// Asserts that every server still accepts the session and a login.
async fn assert_session_and_login_work(
    install: &Installation<'_>,
    servers: &[ServerInPod],
    app: &App,
    session: &AuthenticatedClient,
) {
    for server in servers {
        let client = install.client_of(server);
        client.with_token(app.id(), session.token()).verify().await.expect(StatusCode::OK);
        client.login(app.id(), "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
}

#[tokio::test]
async fn an_app_keeps_its_appid_and_only_apps_in_its_namespace_inherit_it() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let (ours, theirs) = (install.tenants()[0].as_str(), install.tenants()[1].as_str());
    let app = app_without_mail_limit();
    // The App `older` is created before `holder`, but it is invalid when `holder` is created.
    let oversized_template = format!("{{#{}#}}", format!("{}\n", "\u{1}".repeat(1023)).repeat(100));
    let oversized = app.clone().template("confirm.txt", &oversized_template);
    let oversized: Vec<Value> = objects_named(&oversized, "older", theirs).into_iter().rev().collect();
    install.apply_all(&oversized).await.unwrap();
    wait_until_not_accepted(&install, theirs, "older", "TooLarge").await;
    install.apply_all(&objects_named(&app, "holder", ours)).await.unwrap();
    wait_until_ready(&install, ours, "holder").await;
    let session = register_and_log_in(&install, &servers[0], &app).await;
    let (jwks_before, document_before) =
        (jwks(&install, &servers[0], &app).await, rendered_document(&install, &app).await);

    install.apply_all(&objects_named(&app, "older", theirs)).await.unwrap();
    install.apply_all(&objects_named(&app, "second", ours)).await.unwrap();
    for (namespace, name) in [(theirs, "older"), (ours, "second")] {
        let message = wait_until_not_accepted(&install, namespace, name, "AppIDConflict").await;
        let expected = format!("spec.appID: another App owns the appID {}; set another spec.appID", app.id());
        assert_eq!(message, expected);
        let status = wait_for_condition(
            &install,
            ("App", namespace, name),
            ConditionType::Programmed,
            ConditionStatus::Unknown,
            "Pending",
        );
        assert_eq!(status.await, "nothing is served; see Accepted");
    }
    wait_until_ready(&install, ours, "holder").await;
    assert_eq!(rendered_document(&install, &app).await, document_before);

    // When the App `holder` is deleted, an App in its namespace inherits the keys and users. The App `older` does not,
    // because it is in another namespace.
    delete_app(&install, ours, "second").await;
    delete_app(&install, ours, "holder").await;
    let message = wait_until_not_accepted(&install, theirs, "older", "AppIDReserved").await;
    assert!(message.contains("ask the platform team to hand it over"), "{message}");
    eventually("the document is deleted", LIMIT, || async {
        rendered_secret(&install, &app).await.is_none().then_some(())
    })
    .await;
    wait_until_served(&install, &servers, &app, false).await;
    install.apply_all(&objects_named(&app, "heir", ours)).await.unwrap();
    wait_until_ready(&install, ours, "heir").await;
    wait_until_not_accepted(&install, theirs, "older", "AppIDConflict").await;
    for server in &servers {
        assert_eq!(jwks(&install, server, &app).await, jwks_before);
    }
    assert_session_and_login_work(&install, &servers, &app, &session).await;
    assert_eq!(count_users(&install, &app).await, 1);
}

#[tokio::test]
async fn the_platform_team_can_hand_over_an_appid_with_its_users() {
    let install = TestCluster::shared().await.builder().tenants(3).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let (from, to, third) =
        (install.tenants()[0].as_str(), install.tenants()[1].as_str(), install.tenants()[2].as_str());
    let app = app_without_mail_limit();
    install.apply_all(&objects_named(&app, "before", from)).await.unwrap();
    wait_until_ready(&install, from, "before").await;
    let session = register_and_log_in(&install, &servers[0], &app).await;
    let jwks_before = jwks(&install, &servers[0], &app).await;
    for namespace in [to, third] {
        install.apply_all(&objects_named(&app, "after", namespace)).await.unwrap();
        wait_until_not_accepted(&install, namespace, "after", "AppIDConflict").await;
    }
    let hand_over = async |namespace: &str| {
        let annotations = json!({ "metadata": { "annotations": { "latchkey.dev/namespace": namespace } } });
        let secrets = operator_secrets(&install);
        secrets.patch(&key_secret_name(&app), &PatchParams::default(), &Patch::Merge(&annotations)).await.unwrap();
    };
    let assert_owned_by = async |namespace: &str| {
        let row = format!(
            "SELECT count(*) FROM apps WHERE app_id = '{}' AND namespace = '{namespace}' AND state = 'active'",
            app.id()
        );
        eventually("the database has the owner namespace", LIMIT, || async {
            (query_count(&install, &row).await == 1).then_some(())
        })
        .await;
        assert_eq!(rendered_document(&install, &app).await["namespace"], namespace);
        for server in &servers {
            assert_eq!(jwks(&install, server, &app).await, jwks_before);
        }
        assert_session_and_login_work(&install, &servers, &app, &session).await;
        assert_eq!(count_users(&install, &app).await, 1);
    };
    assert_owned_by(from).await;

    // Hands the appID over twice: first while the previous App exists, then after its deletion.
    hand_over(to).await;
    wait_until_ready(&install, to, "after").await;
    wait_until_not_accepted(&install, from, "before", "AppIDConflict").await;
    wait_until_not_accepted(&install, third, "after", "AppIDConflict").await;
    assert_owned_by(to).await;
    delete_app(&install, to, "after").await;
    wait_until_not_accepted(&install, from, "before", "AppIDReserved").await;
    wait_until_not_accepted(&install, third, "after", "AppIDReserved").await;
    hand_over(third).await;
    wait_until_ready(&install, third, "after").await;
    assert_owned_by(third).await;
    // The first App is no longer served, so its status no longer shows revision, issuer and keys.
    wait_until_not_accepted(&install, from, "before", "AppIDConflict").await;
    let apps: Api<app::App> = Api::namespaced(install.admin(), from);
    let status = apps.get("before").await.unwrap().status.unwrap();
    assert_eq!((status.revision, status.issuer), (None, None));
    assert!(status.signing_keys.is_empty() && status.hmac_keys.is_empty());
}

/// Changes the CRDs so that they accept any spec. After an upgrade or a downgrade, a cluster can contain objects with
/// an invalid spec.
async fn accept_any_spec(install: &Installation<'_>) {
    let api: Api<CustomResourceDefinition> = Api::all(install.admin());
    for name in ["apps.latchkey.dev", "providers.latchkey.dev", "clients.latchkey.dev"] {
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

fn with_edited_spec(app: &App, namespace: &str, edit: impl FnOnce(&mut Value)) -> Value {
    let mut object = app.objects(namespace).swap_remove(0);
    edit(&mut object["spec"]);
    object
}

#[tokio::test]
async fn an_unreadable_app_is_reported_and_other_apps_are_still_reconciled() {
    let cluster = TestCluster::start().await.unwrap();
    let install = cluster.install().await;
    let servers = install.start_servers(2).await;
    let operator = install.start_operator().await;
    let (good, served_before, never_served) = (App::new("good"), App::new("before"), App::new("never"));
    for app in [&good, &served_before] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
    }
    let before = install.get(&served_before).await.unwrap().status.unwrap();
    accept_any_spec(&install).await;
    let (namespace, client) = (install.tenant(), install.admin());
    let unreadable = |app: &App| with_edited_spec(app, namespace, |spec| spec["tokens"] = json!("often"));
    let provider = json!({
        "apiVersion": "latchkey.dev/v1alpha1",
        "kind": "Provider",
        "metadata": { "name": "wrong", "namespace": namespace },
        "spec": { "github": { "clientID": 5 } },
    });
    for object in [unreadable(&served_before), unreadable(&never_served), provider] {
        // The API server needs a moment to use the changed CRD.
        eventually_ok("the API server accepts it", LIMIT, || apply(&client, &object)).await;
    }
    let wait_until_unreadable = async || {
        let objects = [
            ("App", served_before.id(), "spec.tokens"),
            ("App", never_served.id(), "spec.tokens"),
            ("Provider", "wrong", "spec"),
        ];
        for (kind, name, field) in objects {
            let object = (kind, namespace, name);
            let message =
                wait_for_condition(&install, object, ConditionType::Accepted, ConditionStatus::False, "InvalidSpec")
                    .await;
            let begin = format!("this operator cannot read the object: {field}: ");
            assert!(message.starts_with(&begin), "{message}");
            wait_for_condition(&install, object, ConditionType::Ready, ConditionStatus::False, "InvalidSpec").await;
        }
    };
    wait_until_unreadable().await;
    wait_until_served(&install, &servers, &served_before, true).await;
    wait_until_served(&install, &servers, &never_served, false).await;
    let status =
        &super::helpers::get_object(&install, "App", namespace, served_before.id()).await.unwrap().data["status"];
    assert_eq!(status["revision"], json!(before.revision));
    assert_eq!(status["signingKeys"], json!(before.signing_keys));

    // The other Apps are still reconciled, also by an operator that starts while unreadable objects exist.
    let edited = good.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.wait_until_ready(&edited).await;
    operator.kill();
    operator.start().unwrap();
    let edited = edited.provider(&Provider::new("wrong", "github"));
    install.apply(&edited).await.unwrap();
    let message = install
        .wait_for_condition(&edited, ConditionType::ResolvedRefs, ConditionStatus::False, "ProviderInvalid")
        .await;
    assert!(message.contains("Provider wrong is not valid"), "{message}");
    install.wait_for_condition(&edited, ConditionType::Programmed, ConditionStatus::True, "Programmed").await;
    wait_until_unreadable().await;
    wait_until_served(&install, &servers, &served_before, true).await;

    // The operator itself also rejects what the schema would have rejected.
    let duplicate_refs = with_edited_spec(&good, namespace, |spec| {
        spec["providerRefs"] = json!([{ "name": "same" }, { "name": "same" }]);
    });
    apply(&client, &duplicate_refs).await.unwrap();
    let message =
        install.wait_for_condition(&good, ConditionType::Accepted, ConditionStatus::False, "InvalidSpec").await;
    assert_eq!(message, "spec.providerRefs[1]: same is already the name of an earlier entry; set another alias");
    wait_until_served(&install, &servers, &good, true).await;
    assert_eq!(rendered_document(&install, &good).await["displayName"], "Edited");

    for app in [&good, &served_before, &never_served] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
    }
    wait_until_served(&install, &servers, &never_served, true).await;
}
