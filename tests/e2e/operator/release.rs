//! Apps that go under `Retain` without having had a user leave nothing, and their appIDs are free.

use std::time::{Duration, Instant};

use http::StatusCode;
use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Cluster, Install},
    eventually,
};

use super::look::{
    LIMIT, PASSWORD, count, keys, named, own_secrets, register, rendered, rendered_name, served, told, users, values,
};

const APPS: usize = 20;

async fn nothing_is_left(install: &Install<'_>, app: &App) {
    eventually(&format!("nothing is left of {}", app.id()), LIMIT, || async {
        (keys(install, app).await.is_none() && rendered(install, app).await.is_none()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn apps_without_users_leave_no_keys_and_their_app_ids_are_free_for_anybody() {
    let install = Cluster::shared().await.builder().tenants(2).install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let apps: Vec<_> = (0..APPS).map(|number| App::new(&format!("app{number}"))).collect();
    let used = App::new("used");
    for app in apps.iter().chain([&used]) {
        install.apply(app).await.unwrap();
    }
    for app in apps.iter().chain([&used]) {
        install.ready(app).await;
    }
    register(&install, &servers[0], &used, "ada").await;
    let there = install.tenants()[1].as_str();
    install.apply_all(&named(&apps[0], "waiting", there)).await.unwrap();
    install.apply_all(&named(&used, "refused", there)).await.unwrap();
    let accepted =
        |name| told(&install, ("App", there, name), ConditionType::Accepted, ConditionStatus::False, "AppIDConflict");
    accepted("waiting").await;
    accepted("refused").await;

    for app in apps.iter().chain([&used]) {
        install.delete(app).await.unwrap();
    }
    // Who waits has it without an edit.
    told(&install, ("App", there, "waiting"), ConditionType::Ready, ConditionStatus::True, "Ready").await;
    for app in &apps[1..] {
        nothing_is_left(&install, app).await;
    }
    install.apply_all(&named(&apps[1], "next", there)).await.unwrap();
    told(&install, ("App", there, "next"), ConditionType::Ready, ConditionStatus::True, "Ready").await;
    for app in &apps[..2] {
        served(&install, &servers, app, true).await;
        register(&install, &servers[1], app, "grace").await;
    }

    // With a user it stays what it was.
    told(&install, ("App", there, "refused"), ConditionType::Accepted, ConditionStatus::False, "AppIDReserved").await;
    eventually("the servers have looked", LIMIT, || async { rendered(&install, &used).await.is_none().then_some(()) })
        .await;
    assert!(keys(&install, &used).await.is_some());
    assert_eq!(users(&install, &used).await, 1);
    install.apply(&used).await.unwrap();
    install.ready(&used).await;
    for server in &servers {
        let client = install.client_of(server);
        client.login(used.id(), "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
    told(&install, ("App", there, "refused"), ConditionType::Accepted, ConditionStatus::False, "AppIDConflict").await;
}

#[tokio::test]
async fn an_app_that_is_made_anew_at_once_can_be_used() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("again");
    for round in 0..8_u32 {
        install.apply(&app).await.unwrap();
        install.ready(&app).await;
        served(&install, &servers, &app, true).await;
        for server in &servers {
            // Until a server has claimed it, the row of the App before may refuse.
            eventually("somebody can register", LIMIT, || async {
                let email = format!("{}{round}@example.com", server.name());
                let answer = install.client_of(server).register(app.id(), "Ada", &email, PASSWORD).await;
                (answer.status == StatusCode::OK).then_some(())
            })
            .await;
        }
        let left = "DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events";
        super::look::sql_all(&install, left).await;
        install.delete(&app).await.unwrap();
        // At different moments of what follows from the deletion.
        match round % 4 {
            0 => {}
            1 => {
                eventually("its document is gone", LIMIT, || async {
                    rendered(&install, &app).await.is_none().then_some(())
                })
                .await
            }
            2 => {
                eventually("the servers are asked", LIMIT, || async {
                    let asked = rendered(&install, &app).await.is_none_or(|secret| {
                        serde_json::from_slice::<serde_json::Value>(&values(&secret)["app.json"]).unwrap()["state"]
                            == "Released"
                    });
                    asked.then_some(())
                })
                .await
            }
            _ => nothing_is_left(&install, &app).await,
        }
    }
    nothing_is_left(&install, &app).await;
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    install.delete(&app).await.unwrap();
    nothing_is_left(&install, &app).await;
    let row = format!("SELECT count(*) FROM apps WHERE app_id = '{}' AND state = 'deleted'", app.id());
    assert_eq!(count(&install, &row).await, 1);
}

#[tokio::test]
async fn keys_that_were_left_while_no_operator_ran_are_looked_at_when_one_starts() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(1).await;
    let operator = install.operator().await;
    let (unused, used) = (App::new("unused"), App::new("used"));
    for app in [&unused, &used] {
        install.apply(app).await.unwrap();
        install.ready(app).await;
    }
    register(&install, &servers[0], &used, "ada").await;
    operator.kill();
    for app in [&unused, &used] {
        install.delete(app).await.unwrap();
    }
    // One that ended between the two steps.
    own_secrets(&install).delete(&rendered_name(&unused), &Default::default()).await.unwrap();
    operator.start().unwrap();
    nothing_is_left(&install, &unused).await;
    eventually("its document is taken away", LIMIT, || async {
        rendered(&install, &used).await.is_none().then_some(())
    })
    .await;
    assert!(keys(&install, &used).await.is_some());
    assert_eq!(users(&install, &used).await, 1);
}

#[tokio::test]
async fn the_keys_of_a_deleted_app_stay_until_its_last_request_has_ended() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(1).await;
    let _operator = install.operator_as(install.operator_account(), &["--requests-end-seconds", "8"]);
    let retained = App::new("retained");
    let deleted = App::new("deleted").set("/deletionPolicy", "Delete");
    for app in [&retained, &deleted] {
        install.apply(app).await.unwrap();
        install.ready(app).await;
    }
    register(&install, &servers[0], &deleted, "ada").await;
    for app in [&retained, &deleted] {
        install.delete(app).await.unwrap();
    }
    let keys_stay = async |app: &App| {
        let row = format!("SELECT count(*) FROM apps WHERE app_id = '{}' AND state = 'deleted'", app.id());
        eventually("no user is left", LIMIT, || async { (count(&install, &row).await == 1).then_some(()) }).await;
        let since = Instant::now();
        nothing_is_left(&install, app).await;
        // Without the wait the keys go as soon as the servers have reported, which takes them two seconds.
        assert!(since.elapsed() >= Duration::from_secs(5), "{}: {:?}", app.id(), since.elapsed());
    };
    tokio::join!(keys_stay(&retained), keys_stay(&deleted));
}
