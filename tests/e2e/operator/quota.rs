//! The quotas of a namespace limit its number of Apps and the bytes of their rendered documents.

use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, TestCluster},
    eventually,
};
use serde_json::Value;

use super::helpers::{
    LIMIT, key_secret, register_user, rendered_document, rendered_secret, wait_for_condition, wait_until_served,
};

/// A template of this size in KiB, with many lines.
fn template_of_size(kib: usize) -> String {
    format!("{}\n", "x".repeat(63)).repeat(kib * 16)
}

async fn wait_until_quota_exceeded(install: &Installation<'_>, app: &App) -> String {
    install.wait_for_condition(app, ConditionType::Ready, ConditionStatus::False, "QuotaExceeded").await;
    install.wait_for_condition(app, ConditionType::Accepted, ConditionStatus::False, "QuotaExceeded").await
}

#[tokio::test]
async fn a_namespace_at_its_quota_accepts_the_next_app_when_another_is_deleted() {
    let install = TestCluster::shared()
        .await
        .builder()
        .tenants(2)
        .operator_env("LATCHKEY_MAX_APPS_PER_NAMESPACE", "2")
        .install()
        .await;
    let servers = install.start_servers(1).await;
    let operator = install.start_operator().await;
    // If two Apps were created in the same second, their names decide which one is accepted first.
    let (one, two, third, fourth) = (App::new("one"), App::new("two"), App::new("next-a"), App::new("next-b"));
    for app in [&one, &two] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
    }
    register_user(&install, &servers[0], &two, "ada").await;
    install.apply(&third).await.unwrap();
    let message = wait_until_quota_exceeded(&install, &third).await;
    assert!(
        message.starts_with("this namespace has 2 appIDs") && message.contains("--max-apps-per-namespace"),
        "{message}"
    );
    install.apply(&fourth).await.unwrap();
    wait_until_quota_exceeded(&install, &fourth).await;
    for app in [&third, &fourth] {
        assert!(key_secret(&install, app).await.is_none() && rendered_secret(&install, app).await.is_none());
    }
    // Another namespace has its own quota. An edit of an accepted App does not count as a further App.
    let other_app = App::new("elsewhere");
    let other_namespace = install.tenants()[1].as_str();
    install.apply_all(&other_app.objects(other_namespace)).await.unwrap();
    wait_for_condition(
        &install,
        ("App", other_namespace, other_app.id()),
        ConditionType::Ready,
        ConditionStatus::True,
        "Ready",
    )
    .await;
    let edited = one.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.wait_until_ready(&edited).await;
    // A restarted operator makes the same decisions, and accepted Apps keep their appIDs.
    operator.kill();
    operator.start().unwrap();
    wait_until_quota_exceeded(&install, &third).await;
    for app in [&one, &two] {
        install.wait_until_ready(app).await;
        wait_until_served(&install, &servers, app, true).await;
    }

    // When an App without users is deleted, the older waiting App is accepted without an edit.
    install.delete(&one).await.unwrap();
    install.wait_until_ready(&third).await;
    wait_until_served(&install, &servers, &third, true).await;
    wait_until_quota_exceeded(&install, &fourth).await;
    // A deleted App with a user keeps its appID, so the quota is still used up.
    install.delete(&two).await.unwrap();
    eventually("its document is deleted", LIMIT, || async {
        rendered_secret(&install, &two).await.is_none().then_some(())
    })
    .await;
    wait_until_served(&install, &servers, &two, false).await;
    wait_until_quota_exceeded(&install, &fourth).await;
    assert!(key_secret(&install, &two).await.is_some());
    install.delete(&third).await.unwrap();
    install.wait_until_ready(&fourth).await;
    assert!(key_secret(&install, &two).await.is_some());
}

#[tokio::test]
async fn an_app_that_exceeds_the_quota_keeps_its_last_revision() {
    let install = TestCluster::shared()
        .await
        .builder()
        .operator_env("LATCHKEY_MAX_RENDERED_BYTES_PER_NAMESPACE", "65536")
        .install()
        .await;
    let servers = install.start_servers(1).await;
    let _operator = install.start_operator().await;
    let (large, small) = (App::new("large"), App::new("small"));
    let within_quota = large.clone().template("confirm.txt", &template_of_size(20));
    for app in [&within_quota, &small] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
    }
    let published = rendered_document(&install, &large).await;
    let revision = install.get(&large).await.unwrap().status.unwrap().revision;
    let over_quota = large.clone().template("confirm.txt", &template_of_size(60));
    install.apply(&over_quota).await.unwrap();
    let message = wait_until_quota_exceeded(&install, &over_quota).await;
    assert!(message.contains("65536 bytes") && message.contains("--max-rendered-bytes-per-namespace"), "{message}");
    let message =
        install.wait_for_condition(&over_quota, ConditionType::Programmed, ConditionStatus::Unknown, "Pending").await;
    assert_eq!(message, "the last accepted revision is still served; see Accepted");
    assert_eq!(install.get(&large).await.unwrap().status.unwrap().revision, revision);
    assert_eq!(rendered_document(&install, &large).await, published);
    wait_until_served(&install, &servers, &large, true).await;
    // A new App that exceeds the quota gets no appID. An edit of a small App is still accepted.
    let next = App::new("next").template("confirm.txt", &template_of_size(45));
    // Creates the ConfigMap before the App, because without its templates the App would be within the quota.
    let objects: Vec<Value> = next.objects(install.tenant()).into_iter().rev().collect();
    install.apply_all(&objects).await.unwrap();
    wait_until_quota_exceeded(&install, &next).await;
    assert!(key_secret(&install, &next).await.is_none());
    let edited = small.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.wait_until_ready(&edited).await;

    // After the large App has become smaller, the waiting App is within the quota.
    let shrunk = large.clone().template("confirm.txt", &template_of_size(1));
    install.apply(&shrunk).await.unwrap();
    install.wait_until_ready(&shrunk).await;
    install.wait_until_ready(&next).await;
    assert_ne!(install.get(&large).await.unwrap().status.unwrap().revision, revision);
    wait_until_served(&install, &servers, &next, true).await;
}
