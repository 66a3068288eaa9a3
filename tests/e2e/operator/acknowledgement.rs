//! The condition Programmed of an App follows the reports of the servers.
//!
//! It is False while a server rejects the published revision, does not report it, or is too old for it. The operator
//! writes the status only if something changes.

use http::StatusCode;
use latchkey_crds::conditions::{
    ConditionStatus::{False, True},
    ConditionType,
};
use latchkey_tests::{
    builders::App,
    cluster::{Installation, RevisionScript, ServerInPod, TestCluster},
    control_plane::audit::AuditEvent,
    passwords::PASSWORD,
};
use serde_json::json;

use crate::operator::leader;

/// The published revision of the App.
async fn published_revision(install: &Installation<'_>, app: &App) -> String {
    install.get(app).await.unwrap().status.unwrap().revision.unwrap()
}

async fn wait_until_not_programmed(install: &Installation<'_>, app: &App, reason: &str, expected_text: &str) {
    let message = install.wait_for_condition(app, ConditionType::Programmed, False, reason).await;
    assert!(message.contains(expected_text), "{message} does not name {expected_text}");
    let ready = install.condition(app, ConditionType::Ready).await.unwrap();
    assert_eq!((ready.status, ready.reason.as_str()), (False, reason));
}

async fn assert_registration_works(install: &Installation<'_>, server: &ServerInPod, app: &App) {
    let client = install.client_of(server);
    let response = client.register(app.id(), "Ada", "ada@example.com", PASSWORD).await;
    response.expect(StatusCode::OK);
}

#[tokio::test]
async fn the_status_names_a_paused_server_and_recovers_when_the_server_resumes() {
    let install = TestCluster::shared().await.install().await;
    let servers = install.start_servers(2).await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;

    servers[1].pause();
    wait_until_not_programmed(&install, &app, "WaitingForServers", servers[1].name()).await;
    // The other server still serves the App.
    assert_registration_works(&install, &servers[0], &app).await;
    servers[1].resume();
    install.wait_until_ready(&app).await;
}

#[tokio::test]
async fn server_reports_decide_whether_an_app_is_programmed() {
    let install = TestCluster::shared().await.install().await;
    let server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let published = published_revision(&install, &app).await;

    // The scripted server reports a revision that was never published.
    let unpublished = "f".repeat(64);
    let scripted = install.scripted_server(RevisionScript::serving(1, app.id(), &unpublished)).await.unwrap();
    let name = scripted.pod().name().to_owned();
    wait_until_not_programmed(&install, &app, "WaitingForServers", &name).await;

    // The scripted server is newer than the operator. It supports the operator's format and later formats.
    scripted.set_script(RevisionScript::serving(99, app.id(), &published));
    install.wait_until_ready(&app).await;

    // The scripted server is older than the operator, and does not support the operator's format. The message names
    // this server. The other server still serves the App.
    scripted.set_script(RevisionScript::serving(0, app.id(), &published));
    wait_until_not_programmed(&install, &app, "ServersTooOld", &name).await;
    assert_registration_works(&install, &server, &app).await;
    scripted.set_script(RevisionScript::serving(1, app.id(), &published));
    install.wait_until_ready(&app).await;

    // The scripted server rejects an edit. For the next edit, the operator waits for a new report.
    let edited = app.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    wait_until_not_programmed(&install, &app, "WaitingForServers", &name).await;
    let refused_revision = published_revision(&install, &app).await;
    assert_ne!(refused_revision, published);
    scripted.set_script(RevisionScript::rejecting(app.id(), &published, &refused_revision, "the tests do not like it"));
    wait_until_not_programmed(&install, &app, "RefusedByServer", "the tests do not like it").await;
    install.apply(&app.clone().set("/displayName", "Mended")).await.unwrap();
    wait_until_not_programmed(&install, &app, "WaitingForServers", &name).await;
    scripted.set_script(RevisionScript::serving(1, app.id(), &published_revision(&install, &app).await));
    install.wait_until_ready(&app).await;
}

#[tokio::test]
async fn an_app_that_needs_a_newer_format_than_a_server_knows_is_served_but_not_programmed() {
    let install = TestCluster::shared().await.install().await;
    let server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let published = published_revision(&install, &app).await;

    // The scripted server knows only format 1, which is enough for an App that uses nothing newer.
    let scripted = install.scripted_server(RevisionScript::serving(1, app.id(), &published)).await.unwrap();
    let name = scripted.pod().name().to_owned();
    install.wait_until_ready(&app).await;
    assert_eq!(published_revision(&install, &app).await, published);

    let importer = json!([{ "serviceAccount": { "namespace": "shop", "name": "loader" }, "role": "Importer" }]);
    install.apply(&app.clone().set("/administrators", importer)).await.unwrap();
    wait_until_not_programmed(&install, &app, "ServersTooOld", &name).await;
    // The operator publishes the new document anyway.
    let with_importer = published_revision(&install, &app).await;
    assert_ne!(with_importer, published);
    scripted.set_script(RevisionScript::serving(1, app.id(), &with_importer));
    wait_until_not_programmed(&install, &app, "ServersTooOld", "needs format 2").await;
    assert_registration_works(&install, &server, &app).await;

    // Upgrading the server changes no document.
    scripted.set_script(RevisionScript::serving(2, app.id(), &with_importer));
    install.wait_until_ready(&app).await;
    assert_eq!(published_revision(&install, &app).await, with_importer);
}

#[tokio::test]
async fn the_status_names_a_server_that_reports_nothing() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let _operator = install.start_operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let serving_script = RevisionScript::serving(1, app.id(), &published_revision(&install, &app).await);

    let silent = install.scripted_server(RevisionScript::hanging()).await.unwrap();
    wait_until_not_programmed(&install, &app, "WaitingForServers", silent.pod().name()).await;
    silent.set_script(serving_script);
    install.wait_until_ready(&app).await;
    silent.set_script(RevisionScript::hanging());
    wait_until_not_programmed(&install, &app, "WaitingForServers", silent.pod().name()).await;
    // The operator does not wait for a removed pod.
    silent.pod().remove().await.unwrap();
    install.wait_until_ready(&app).await;
}

#[tokio::test]
async fn rollouts_scaling_and_a_change_of_leader_cause_no_writes() {
    let cluster = TestCluster::start().await.unwrap();
    let install = cluster.install().await;
    let mut servers = install.start_servers(3).await;
    let operators = [install.start_operator().await, install.start_operator().await];
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    let before = install.get(&app).await.unwrap();
    let mark = cluster.plane().audit_mark();

    // A rolling restart: one server starts, then one ends.
    for _ in 0..3 {
        servers.push(install.start_server().await);
        servers.remove(0).remove().await.unwrap();
    }
    servers.extend(install.start_servers(3).await);
    for server in servers.drain(3..) {
        server.remove().await.unwrap();
    }
    let [leader, standby] = leader::leader_and_standby(&install, &operators).await;
    leader.terminate().await.unwrap();
    leader::wait_until_leader(&install, standby).await;
    // When the new leader has reconciled a new App, it has also reconciled all earlier Apps.
    let other = App::new("other");
    install.apply(&other).await.unwrap();
    install.wait_until_ready(&other).await;

    let events = cluster.plane().audit_since(mark).unwrap();
    let by_operators = |credential: &Option<String>| {
        operators.iter().any(|operator| credential.as_deref() == Some(operator.account().credential()))
    };
    let written: Vec<_> = events
        .iter()
        .filter(|event| event.is_write() && by_operators(&event.credential) && event.name.contains(app.id()))
        // Ignores Events, because the operator can write the Event that the App is Ready after `mark`. This hides
        // nothing: before any other Event, the operator writes the status, and that write would be in the list.
        .filter(|event| event.resource != "events")
        .collect();
    assert!(written.is_empty(), "{written:#?}");
    assert_eq!(install.get(&app).await.unwrap().metadata.resource_version, before.metadata.resource_version);
    let is_about_other = |event: &&AuditEvent| event.name.contains(other.id());
    assert!(events.iter().filter(is_about_other).any(|event| event.is_write()), "the audit log contains the writes");
    assert_eq!(install.condition(&app, ConditionType::Programmed).await.unwrap().status, True);
}
