//! The platform's bounds on what a namespace holds.

use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Cluster, Install},
    eventually,
};
use serde_json::Value;

use super::look::{LIMIT, document, keys, register, rendered, served, told};

/// A template of so many KiB, in lines.
fn text(kib: usize) -> String {
    format!("{}\n", "x".repeat(63)).repeat(kib * 16)
}

async fn refused(install: &Install<'_>, app: &App) -> String {
    install.until(app, ConditionType::Ready, ConditionStatus::False, "QuotaExceeded").await;
    install.until(app, ConditionType::Accepted, ConditionStatus::False, "QuotaExceeded").await
}

#[tokio::test]
async fn a_namespace_at_its_bound_takes_the_next_app_when_another_goes() {
    let install = Cluster::shared()
        .await
        .builder()
        .tenants(2)
        .operator_env("LATCHKEY_MAX_APPS_PER_NAMESPACE", "2")
        .install()
        .await;
    let servers = install.serve(1).await;
    let operator = install.operator().await;
    // Of one second the name decides.
    let (one, two, third, fourth) = (App::new("one"), App::new("two"), App::new("next-a"), App::new("next-b"));
    for app in [&one, &two] {
        install.apply(app).await.unwrap();
        install.ready(app).await;
    }
    register(&install, &servers[0], &two, "ada").await;
    install.apply(&third).await.unwrap();
    let said = refused(&install, &third).await;
    assert!(said.starts_with("this namespace holds 2 appIDs") && said.contains("--max-apps-per-namespace"), "{said}");
    install.apply(&fourth).await.unwrap();
    refused(&install, &fourth).await;
    for app in [&third, &fourth] {
        assert!(keys(&install, app).await.is_none() && rendered(&install, app).await.is_none());
    }
    // Another namespace has its own, and an edit of an accepted App needs nothing more.
    let elsewhere = App::new("elsewhere");
    let there = install.tenants()[1].as_str();
    install.apply_all(&elsewhere.objects(there)).await.unwrap();
    told(&install, ("App", there, elsewhere.id()), ConditionType::Ready, ConditionStatus::True, "Ready").await;
    let edited = one.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.ready(&edited).await;
    // An operator that starts anew says the same, and takes nobody's place.
    operator.kill();
    operator.start().unwrap();
    refused(&install, &third).await;
    for app in [&one, &two] {
        install.ready(app).await;
        served(&install, &servers, app, true).await;
    }

    // One without users goes: the older of those that wait comes in, and nobody edits it.
    install.delete(&one).await.unwrap();
    install.ready(&third).await;
    served(&install, &servers, &third, true).await;
    refused(&install, &fourth).await;
    // One with a user keeps its appID, so there is no room.
    install.delete(&two).await.unwrap();
    eventually("its document is taken away", LIMIT, || async {
        rendered(&install, &two).await.is_none().then_some(())
    })
    .await;
    served(&install, &servers, &two, false).await;
    refused(&install, &fourth).await;
    assert!(keys(&install, &two).await.is_some());
    install.delete(&third).await.unwrap();
    install.ready(&fourth).await;
    assert!(keys(&install, &two).await.is_some());
}

#[tokio::test]
async fn an_app_that_grows_beyond_the_bound_keeps_its_last_revision() {
    let install = Cluster::shared()
        .await
        .builder()
        .operator_env("LATCHKEY_MAX_RENDERED_BYTES_PER_NAMESPACE", "65536")
        .install()
        .await;
    let servers = install.serve(1).await;
    let _operator = install.operator().await;
    let (large, small) = (App::new("large"), App::new("small"));
    let before = large.clone().template("confirm.txt", &text(20));
    for app in [&before, &small] {
        install.apply(app).await.unwrap();
        install.ready(app).await;
    }
    let published = document(&install, &large).await;
    let revision = install.get(&large).await.unwrap().status.unwrap().revision;
    let after = large.clone().template("confirm.txt", &text(60));
    install.apply(&after).await.unwrap();
    let said = refused(&install, &after).await;
    assert!(said.contains("65536 bytes") && said.contains("--max-rendered-bytes-per-namespace"), "{said}");
    let goes_on = install.until(&after, ConditionType::Programmed, ConditionStatus::Unknown, "Pending").await;
    assert_eq!(goes_on, "the last accepted revision goes on; see Accepted");
    assert_eq!(install.get(&large).await.unwrap().status.unwrap().revision, revision);
    assert_eq!(document(&install, &large).await, published);
    served(&install, &servers, &large, true).await;
    // A new App that does not fit takes no appID; a small one fits.
    let next = App::new("next").template("confirm.txt", &text(45));
    // Its ConfigMap first: without it the App would fit, and take its appID.
    let objects: Vec<Value> = next.objects(install.tenant()).into_iter().rev().collect();
    install.apply_all(&objects).await.unwrap();
    refused(&install, &next).await;
    assert!(keys(&install, &next).await.is_none());
    let edited = small.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    install.ready(&edited).await;

    // It shrinks, and the one that waits has room.
    let shrunk = large.clone().template("confirm.txt", &text(1));
    install.apply(&shrunk).await.unwrap();
    install.ready(&shrunk).await;
    install.ready(&next).await;
    assert_ne!(install.get(&large).await.unwrap().status.unwrap().revision, revision);
    served(&install, &servers, &next, true).await;
}
