//! If an App that never had a user is deleted with `Retain`, nothing is left of it and its appID is free.

use std::time::{Duration, Instant};

use http::StatusCode;
use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, TestCluster},
    eventually,
    passwords::PASSWORD,
};

use super::helpers::{
    LIMIT, count_users, key_secret, objects_named, operator_secrets, query_count, register_user, rendered_secret,
    rendered_secret_name, secret_values, wait_for_condition, wait_until_served,
};

const APP_COUNT: usize = 20;

async fn wait_until_nothing_is_left(install: &Installation<'_>, app: &App) {
    eventually(&format!("nothing is left of {}", app.id()), LIMIT, || async {
        (key_secret(install, app).await.is_none() && rendered_secret(install, app).await.is_none()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn apps_without_users_leave_no_keys_and_free_their_app_ids() {
    let install = TestCluster::shared().await.builder().tenants(2).install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let apps: Vec<_> = (0..APP_COUNT).map(|number| App::new(&format!("app{number}"))).collect();
    let used = App::new("used");
    for app in apps.iter().chain([&used]) {
        install.apply(app).await.unwrap();
    }
    for app in apps.iter().chain([&used]) {
        install.wait_until_ready(app).await;
    }
    register_user(&install, &servers[0], &used, "ada").await;
    let other_namespace = install.tenants()[1].as_str();
    install.apply_all(&objects_named(&apps[0], "waiting", other_namespace)).await.unwrap();
    install.apply_all(&objects_named(&used, "refused", other_namespace)).await.unwrap();
    let wait_for_conflict = |name| {
        wait_for_condition(
            &install,
            ("App", other_namespace, name),
            ConditionType::Accepted,
            ConditionStatus::False,
            "AppIDConflict",
        )
    };
    wait_for_conflict("waiting").await;
    wait_for_conflict("refused").await;

    for app in apps.iter().chain([&used]) {
        install.delete(app).await.unwrap();
    }
    // The waiting App gets the appID without an edit.
    wait_for_condition(
        &install,
        ("App", other_namespace, "waiting"),
        ConditionType::Ready,
        ConditionStatus::True,
        "Ready",
    )
    .await;
    for app in &apps[1..] {
        wait_until_nothing_is_left(&install, app).await;
    }
    install.apply_all(&objects_named(&apps[1], "next", other_namespace)).await.unwrap();
    wait_for_condition(
        &install,
        ("App", other_namespace, "next"),
        ConditionType::Ready,
        ConditionStatus::True,
        "Ready",
    )
    .await;
    for app in &apps[..2] {
        wait_until_served(&install, &servers, app, true).await;
        register_user(&install, &servers[1], app, "grace").await;
    }

    // The appID of an App with a user stays reserved.
    wait_for_condition(
        &install,
        ("App", other_namespace, "refused"),
        ConditionType::Accepted,
        ConditionStatus::False,
        "AppIDReserved",
    )
    .await;
    eventually("the servers have reported that the App has users", LIMIT, || async {
        rendered_secret(&install, &used).await.is_none().then_some(())
    })
    .await;
    assert!(key_secret(&install, &used).await.is_some());
    assert_eq!(count_users(&install, &used).await, 1);
    install.apply(&used).await.unwrap();
    install.wait_until_ready(&used).await;
    for server in &servers {
        let client = install.client_of(server);
        client.login(used.id(), "ada@example.com", PASSWORD).await.expect(StatusCode::OK);
    }
    wait_for_condition(
        &install,
        ("App", other_namespace, "refused"),
        ConditionType::Accepted,
        ConditionStatus::False,
        "AppIDConflict",
    )
    .await;
}

#[tokio::test]
async fn an_app_that_is_recreated_immediately_can_be_used() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("again");
    for round in 0..8_u32 {
        install.apply(&app).await.unwrap();
        install.wait_until_ready(&app).await;
        wait_until_served(&install, &servers, &app, true).await;
        for server in &servers {
            // A server rejects registrations until it has claimed the appID for the recreated App.
            eventually("a user can register", LIMIT, || async {
                let email = format!("{}{round}@example.com", server.name());
                let response = install.client_of(server).register(app.id(), "Ada", &email, PASSWORD).await;
                (response.status == StatusCode::OK).then_some(())
            })
            .await;
        }
        let delete_users = "DELETE FROM users; DELETE FROM outbox; DELETE FROM audit_events";
        super::helpers::execute_statements(&install, delete_users).await;
        install.delete(&app).await.unwrap();
        // Waits for a step of the deletion, which differs between the rounds. The next round recreates the App at this
        // step.
        match round % 4 {
            0 => {}
            1 => {
                eventually("its document is deleted", LIMIT, || async {
                    rendered_secret(&install, &app).await.is_none().then_some(())
                })
                .await
            }
            2 => {
                eventually("the servers are asked to release the App", LIMIT, || async {
                    let is_asked = rendered_secret(&install, &app).await.is_none_or(|secret| {
                    serde_json::from_slice::<serde_json::Value>(&secret_values(&secret)["app.json"]).unwrap()["state"]
                        == "Released"
                });
                    is_asked.then_some(())
                })
                .await
            }
            _ => wait_until_nothing_is_left(&install, &app).await,
        }
    }
    wait_until_nothing_is_left(&install, &app).await;
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    install.delete(&app).await.unwrap();
    wait_until_nothing_is_left(&install, &app).await;
    let row = format!("SELECT count(*) FROM apps WHERE app_id = '{}' AND state = 'deleted'", app.id());
    assert_eq!(query_count(&install, &row).await, 1);
}

#[tokio::test]
async fn deletions_while_no_operator_runs_are_handled_when_an_operator_starts() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(1).await;
    let operator = install.start_operator().await;
    let (unused, used) = (App::new("unused"), App::new("used"));
    for app in [&unused, &used] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
    }
    register_user(&install, &servers[0], &used, "ada").await;
    operator.kill();
    for app in [&unused, &used] {
        install.delete(app).await.unwrap();
    }
    // Deletes only the rendered Secret and not the key Secret, like an operator that ends in the middle of a deletion.
    operator_secrets(&install).delete(&rendered_secret_name(&unused), &Default::default()).await.unwrap();
    operator.start().unwrap();
    wait_until_nothing_is_left(&install, &unused).await;
    eventually("its document is deleted", LIMIT, || async {
        rendered_secret(&install, &used).await.is_none().then_some(())
    })
    .await;
    assert!(key_secret(&install, &used).await.is_some());
    assert_eq!(count_users(&install, &used).await, 1);
}

#[tokio::test]
async fn the_keys_of_a_deleted_app_stay_until_its_last_request_has_ended() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(1).await;
    let _operator = install.start_operator_as(install.operator_account(), &["--requests-end-seconds", "8"]);
    let retained = App::new("retained");
    let deleted = App::new("deleted").set("/deletionPolicy", "Delete");
    for app in [&retained, &deleted] {
        install.apply(app).await.unwrap();
        install.wait_until_ready(app).await;
    }
    register_user(&install, &servers[0], &deleted, "ada").await;
    for app in [&retained, &deleted] {
        install.delete(app).await.unwrap();
    }
    let keys_stay = async |app: &App| {
        let row = format!("SELECT count(*) FROM apps WHERE app_id = '{}' AND state = 'deleted'", app.id());
        eventually("the users are deleted", LIMIT, || async { (query_count(&install, &row).await == 1).then_some(()) })
            .await;
        let users_deleted_at = Instant::now();
        wait_until_nothing_is_left(&install, app).await;
        // If the operator did not wait for requests, it would delete the keys about two seconds after the users.
        assert!(users_deleted_at.elapsed() >= Duration::from_secs(5), "{}: {:?}", app.id(), users_deleted_at.elapsed());
    };
    tokio::join!(keys_stay(&retained), keys_stay(&deleted));
}
