//! If others change the operator's Secrets, the operator restores rendered documents but never overwrites keys.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, ServerInPod, TestCluster},
    eventually,
    passwords::PASSWORD,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::helpers::{
    LIMIT, is_served, jwks, key_secret, key_secret_name, operator_secrets, register_user, rendered_secret,
    rendered_secret_name, secret_values,
};

/// A rendered document is restored within two seconds; a loaded machine takes longer.
const RESTORE_LIMIT: Duration = Duration::from_secs(20);

/// The fields that the operator writes to a Secret.
fn written_fields(secret: &Secret) -> Value {
    json!({ "data": secret.data, "type": secret.type_, "labels": secret.labels(), "annotations": secret.annotations() })
}

/// Waits until the rendered Secret is as before, and every server serves the document.
async fn wait_until_restored(
    install: &Installation<'_>,
    servers: &[ServerInPod],
    app: &App,
    before: &Secret,
    what: &str,
) {
    let begun = Instant::now();
    eventually(&format!("after {what} the document is restored"), RESTORE_LIMIT, || async {
        rendered_secret(install, app).await.filter(|secret| written_fields(secret) == written_fields(before))
    })
    .await;
    println!("after {what} the document was restored within {:?}", begun.elapsed());
    for server in servers {
        let client = install.client_of(server);
        eventually(&format!("after {what} {} serves it", server.name()), LIMIT, || async {
            is_served(&client, app).await.then_some(())
        })
        .await;
    }
    install.wait_until_ready(app).await;
    let status = install.get(app).await.unwrap().status.unwrap();
    let revision = latchkey_crds::rendered::Revision::of(&secret_values(before)["app.json"]);
    assert_eq!(status.revision.as_deref(), Some(revision.as_str()), "after {what}");
}

async fn merge_patch(secrets: &Api<Secret>, name: &str, patch: &Value) {
    secrets.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

#[tokio::test]
async fn a_changed_rendered_secret_is_restored_immediately() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("drift");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let before = rendered_secret(&install, &app).await.unwrap();
    let (secrets, name) = (operator_secrets(&install), rendered_secret_name(&app));

    merge_patch(&secrets, &name, &json!({ "stringData": { "app.json": "{}" } })).await;
    wait_until_restored(&install, &servers, &app, &before, "an edit that every server rejects").await;

    let mut document: Value = serde_json::from_slice(&secret_values(&before)["app.json"]).unwrap();
    document["displayName"] = json!("Another Shop");
    merge_patch(&secrets, &name, &json!({ "stringData": { "app.json": document.to_string() } })).await;
    wait_until_restored(&install, &servers, &app, &before, "an edit that servers accept").await;

    merge_patch(&secrets, &name, &json!({ "data": null })).await;
    wait_until_restored(&install, &servers, &app, &before, "the loss of its data").await;

    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    wait_until_restored(&install, &servers, &app, &before, "its deletion").await;

    // The type of a Secret cannot be edited. So the test deletes the Secret and creates it with another type. It
    // retries if the operator has created the Secret first.
    let other = Secret {
        metadata: kube::core::ObjectMeta { name: Some(name.clone()), ..Default::default() },
        string_data: Some([("app.json".to_owned(), "{}".to_owned())].into()),
        ..Secret::default()
    };
    eventually("another Secret of that name exists", LIMIT, || async {
        secrets.delete(&name, &DeleteParams::default()).await.ok()?;
        secrets.create(&PostParams::default(), &other).await.ok()
    })
    .await;
    wait_until_restored(&install, &servers, &app, &before, "another type").await;
}

/// To decide whether an App exists, the operator reads the key Secret and not the annotations of the rendered Secret.
#[tokio::test]
async fn editing_the_annotations_of_a_rendered_secret_removes_no_app() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("annotations");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let before = rendered_secret(&install, &app).await.unwrap();
    let (secrets, name) = (operator_secrets(&install), rendered_secret_name(&app));
    let mut watchers = JoinSet::new();
    for server in &servers {
        let (client, app) = (install.client_of(server), app.clone());
        watchers.spawn(async move {
            while is_served(&client, &app).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    for (what, annotations) in [
        ("another name", json!({ "latchkey.dev/name": "nobody" })),
        ("another namespace", json!({ "latchkey.dev/namespace": install.tenants()[1] })),
        ("a namespace that is not watched", json!({ "latchkey.dev/namespace": install.namespace() })),
        ("an empty namespace", json!({ "latchkey.dev/namespace": "" })),
        ("no annotation", json!({ "latchkey.dev/namespace": null, "latchkey.dev/name": null })),
    ] {
        merge_patch(&secrets, &name, &json!({ "metadata": { "annotations": annotations } })).await;
        wait_until_restored(&install, &servers, &app, &before, what).await;
    }
    assert!(watchers.try_join_next().is_none(), "a server stopped serving the App for a moment");
    let after = rendered_secret(&install, &app).await.unwrap();
    assert_eq!(after.uid(), before.uid(), "the operator corrected the Secret and did not create it again");
}

#[tokio::test]
async fn deleted_keys_are_restored_and_damaged_keys_are_left_alone() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("keys").limit("mailsPerRecipient", &[(1000, 60)]);
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    register_user(&install, &servers[0], &app, "ada").await;
    let session = install.client_of(&servers[0]).authenticate(app.id(), "ada@example.com", PASSWORD).await;
    let (secrets, name) = (operator_secrets(&install), key_secret_name(&app));
    let document = |secret: &Secret| -> Value { serde_json::from_slice(&secret_values(secret)["keys.json"]).unwrap() };
    let key_material = |secret: &Secret| {
        let document = document(secret);
        let keys_of = |kind: &str, secret: &str| -> Vec<Value> {
            let keys = document[kind].as_array().unwrap().iter();
            keys.map(|key| json!([key["id"], key["state"], key[secret]])).collect()
        };
        json!([document["incarnation"], keys_of("signing", "privateKey"), keys_of("hmac", "secret")])
    };
    let before = key_secret(&install, &app).await.unwrap();
    let (status, public) = (install.get(&app).await.unwrap().status.unwrap(), jwks(&install, &servers[0], &app).await);

    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    let restored = eventually("the key Secret is restored", LIMIT, || key_secret(&install, &app)).await;
    assert_ne!(restored.uid(), before.uid());
    assert_eq!(key_material(&restored), key_material(&before));
    assert_eq!(restored.annotations(), before.annotations());
    install.wait_until_ready(&app).await;
    assert_eq!(install.get(&app).await.unwrap().status.unwrap().revision, status.revision);

    // The operator cannot know the right content of damaged keys, so it does not overwrite the Secret.
    let mut broken = document(&restored);
    broken["signing"][0]["privateKey"] = json!("not a key");
    for (damage, text) in [
        (json!({ "stringData": { "keys.json": "not json" } }), "its keys.json is not a key document"),
        (json!({ "stringData": { "keys.json": broken.to_string() } }), "a signing key is not a private key"),
        (json!({ "data": null }), "it has no key keys.json"),
    ] {
        merge_patch(&secrets, &name, &damage).await;
        let damaged = key_secret(&install, &app).await.unwrap();
        let condition = eventually("the condition reports the damage", LIMIT, || async {
            let condition = install.condition(&app, ConditionType::Accepted).await.unwrap();
            (condition.status == ConditionStatus::False && condition.message.contains(text)).then_some(condition)
        })
        .await;
        assert_eq!(condition.reason, "KeysInvalid");
        assert!(condition.message.ends_with("restore it from a backup"), "{}", condition.message);
        install.wait_for_condition(&app, ConditionType::Ready, ConditionStatus::False, "KeysInvalid").await;
        // The servers still serve the accepted revision.
        for server in &servers {
            assert_eq!(jwks(&install, server, &app).await, public);
        }
        let after = key_secret(&install, &app).await.unwrap();
        assert_eq!(after.resource_version(), damaged.resource_version());
    }
    let data = restored.data.clone();
    merge_patch(&secrets, &name, &json!({ "data": data })).await;
    install.wait_until_ready(&app).await;
    for server in &servers {
        assert_eq!(jwks(&install, server, &app).await, public);
        let client = install.client_of(server).with_token(app.id(), session.token());
        client.verify().await.expect(http::StatusCode::OK);
    }
}
