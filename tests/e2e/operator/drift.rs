//! What others change of the operator's Secrets: documents come back, keys are kept.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Cluster, Install, PodServer},
    eventually,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::look::{
    LIMIT, PASSWORD, jwks, keys, keys_name, own_secrets, register, rendered, rendered_name, serves, values,
};

/// A document is back within two seconds; a loaded machine takes longer.
const BACK: Duration = Duration::from_secs(20);

/// What of a Secret the operator writes.
fn written(secret: &Secret) -> Value {
    json!({ "data": secret.data, "type": secret.type_, "labels": secret.labels(), "annotations": secret.annotations() })
}

/// Waits until the rendered Secret is as it was, and every server tells so.
async fn back(install: &Install<'_>, servers: &[PodServer], app: &App, before: &Secret, what: &str) {
    let begun = Instant::now();
    eventually(&format!("after {what} the document is back"), BACK, || async {
        rendered(install, app).await.filter(|secret| written(secret) == written(before))
    })
    .await;
    println!("after {what} the document was back within {:?}", begun.elapsed());
    for server in servers {
        let client = install.client_of(server);
        eventually(&format!("after {what} {} serves it", server.name()), LIMIT, || async {
            serves(&client, app).await.then_some(())
        })
        .await;
    }
    install.ready(app).await;
    let status = install.get(app).await.unwrap().status.unwrap();
    let revision = latchkey_crds::rendered::Revision::of(&values(before)["app.json"]);
    assert_eq!(status.revision.as_deref(), Some(revision.as_str()), "after {what}");
}

async fn merge(secrets: &Api<Secret>, name: &str, patch: &Value) {
    secrets.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

#[tokio::test]
async fn a_rendered_secret_that_somebody_changes_is_back_at_once() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("drift");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let before = rendered(&install, &app).await.unwrap();
    let (secrets, name) = (own_secrets(&install), rendered_name(&app));

    merge(&secrets, &name, &json!({ "stringData": { "app.json": "{}" } })).await;
    back(&install, &servers, &app, &before, "an edit that no server takes").await;

    let mut document: Value = serde_json::from_slice(&values(&before)["app.json"]).unwrap();
    document["displayName"] = json!("Another Shop");
    merge(&secrets, &name, &json!({ "stringData": { "app.json": document.to_string() } })).await;
    back(&install, &servers, &app, &before, "an edit that servers take").await;

    merge(&secrets, &name, &json!({ "data": null })).await;
    back(&install, &servers, &app, &before, "the loss of its data").await;

    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    back(&install, &servers, &app, &before, "its deletion").await;

    // A type cannot be edited: another Secret under its name, unless the operator is faster.
    let other = Secret {
        metadata: kube::core::ObjectMeta { name: Some(name.clone()), ..Default::default() },
        string_data: Some([("app.json".to_owned(), "{}".to_owned())].into()),
        ..Secret::default()
    };
    eventually("another Secret is there under its name", LIMIT, || async {
        secrets.delete(&name, &DeleteParams::default()).await.ok()?;
        secrets.create(&PostParams::default(), &other).await.ok()
    })
    .await;
    back(&install, &servers, &app, &before, "another type").await;
}

/// Neither of whom it says that it is decides whether its App is gone: the keys do.
#[tokio::test]
async fn who_edits_the_annotations_of_a_rendered_secret_takes_no_app_away() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("annotations");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let before = rendered(&install, &app).await.unwrap();
    let (secrets, name) = (own_secrets(&install), rendered_name(&app));
    let mut watching = JoinSet::new();
    for server in &servers {
        let (client, app) = (install.client_of(server), app.clone());
        watching.spawn(async move {
            while serves(&client, &app).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    for (what, annotations) in [
        ("another name", json!({ "latchkey.dev/name": "nobody" })),
        ("another namespace", json!({ "latchkey.dev/namespace": install.tenants()[1] })),
        ("a namespace out of sight", json!({ "latchkey.dev/namespace": install.namespace() })),
        ("an empty namespace", json!({ "latchkey.dev/namespace": "" })),
        ("no annotation", json!({ "latchkey.dev/namespace": null, "latchkey.dev/name": null })),
    ] {
        merge(&secrets, &name, &json!({ "metadata": { "annotations": annotations } })).await;
        back(&install, &servers, &app, &before, what).await;
    }
    assert!(watching.try_join_next().is_none(), "a server did not serve the App for a moment");
    let after = rendered(&install, &app).await.unwrap();
    assert_eq!(after.uid(), before.uid(), "it was mended, not made anew");
}

#[tokio::test]
async fn keys_that_are_deleted_come_back_and_keys_that_are_damaged_are_left_alone() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("keys").limit("mailsPerRecipient", &[(1000, 60)]);
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    register(&install, &servers[0], &app, "ada").await;
    let session = install.client_of(&servers[0]).sign_in(app.id(), "ada@example.com", PASSWORD).await;
    let (secrets, name) = (own_secrets(&install), keys_name(&app));
    let document = |secret: &Secret| -> Value { serde_json::from_slice(&values(secret)["keys.json"]).unwrap() };
    let kept = |secret: &Secret| {
        let document = document(secret);
        let of = |sort: &str, secret: &str| -> Vec<Value> {
            let keys = document[sort].as_array().unwrap().iter();
            keys.map(|key| json!([key["id"], key["state"], key[secret]])).collect()
        };
        json!([document["incarnation"], of("signing", "privateKey"), of("hmac", "secret")])
    };
    let before = keys(&install, &app).await.unwrap();
    let (status, public) = (install.get(&app).await.unwrap().status.unwrap(), jwks(&install, &servers[0], &app).await);

    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    let rebuilt = eventually("the key Secret is back", LIMIT, || keys(&install, &app)).await;
    assert_ne!(rebuilt.uid(), before.uid());
    assert_eq!(kept(&rebuilt), kept(&before));
    assert_eq!(rebuilt.annotations(), before.annotations());
    install.ready(&app).await;
    assert_eq!(install.get(&app).await.unwrap().status.unwrap().revision, status.revision);

    // Damaged: nobody can tell what is right, so it is not written over.
    let mut broken = document(&rebuilt);
    broken["signing"][0]["privateKey"] = json!("not a key");
    for (damage, says) in [
        (json!({ "stringData": { "keys.json": "not json" } }), "its keys.json is not a key document"),
        (json!({ "stringData": { "keys.json": broken.to_string() } }), "a signing key is not a private key"),
        (json!({ "data": null }), "it has no key keys.json"),
    ] {
        merge(&secrets, &name, &damage).await;
        let damaged = keys(&install, &app).await.unwrap();
        let said = eventually("the damage is told", LIMIT, || async {
            let told = install.condition(&app, ConditionType::Accepted).await.unwrap();
            (told.status == ConditionStatus::False && told.message.contains(says)).then_some(told)
        })
        .await;
        assert_eq!(said.reason, "KeysInvalid");
        assert!(said.message.ends_with("put it back from a copy"), "{}", said.message);
        install.until(&app, ConditionType::Ready, ConditionStatus::False, "KeysInvalid").await;
        // An edit is judged and waits, what was accepted goes on.
        for server in &servers {
            assert_eq!(jwks(&install, server, &app).await, public);
        }
        let after = keys(&install, &app).await.unwrap();
        assert_eq!(after.resource_version(), damaged.resource_version());
    }
    let data = rebuilt.data.clone();
    merge(&secrets, &name, &json!({ "data": data })).await;
    install.ready(&app).await;
    for server in &servers {
        assert_eq!(jwks(&install, server, &app).await, public);
        let again = install.client_of(server).signed_in(app.id(), session.token());
        again.verify().await.expect(http::StatusCode::OK);
    }
}
