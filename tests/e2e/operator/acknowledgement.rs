//! What the servers tell, as the status says it: Programmed falls on evidence alone, and the status is not written when
//! nothing moves.

use http::StatusCode;
use latchkey_crds::conditions::{
    ConditionStatus::{False, True},
    ConditionType,
};
use latchkey_tests::{
    builders::App,
    cluster::{Cluster, Install, PodServer, Words},
    control_plane::audit::Event,
};

use crate::operator::leader;

/// The App as it is published.
async fn revision(install: &Install<'_>, app: &App) -> String {
    install.get(app).await.unwrap().status.unwrap().revision.unwrap()
}

async fn not_programmed(install: &Install<'_>, app: &App, reason: &str, named: &str) {
    let message = install.until(app, ConditionType::Programmed, False, reason).await;
    assert!(message.contains(named), "{message} does not name {named}");
    let ready = install.condition(app, ConditionType::Ready).await.unwrap();
    assert_eq!((ready.status, ready.reason.as_str()), (False, reason));
}

async fn login_goes_on(install: &Install<'_>, server: &PodServer, app: &App) {
    let client = install.client_of(server);
    let answer = client.register(app.id(), "Ada", "ada@example.com", "a quiet harbour at noon").await;
    answer.expect(StatusCode::OK);
}

#[tokio::test]
async fn a_server_that_hangs_is_named_and_the_app_is_ready_again_by_itself() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;

    servers[1].pause();
    not_programmed(&install, &app, "WaitingForServers", servers[1].name()).await;
    // The other one serves on.
    login_goes_on(&install, &servers[0], &app).await;
    servers[1].resume();
    install.ready(&app).await;
}

#[tokio::test]
async fn what_a_server_tells_decides_whether_an_app_is_programmed() {
    let install = Cluster::shared().await.install().await;
    let server = install.server().await;
    let _operator = install.operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let published = revision(&install, &app).await;

    // A revision that nobody published.
    let never = "f".repeat(64);
    let scripted = install.scripted_server(Words::serving(1, app.id(), &never)).await.unwrap();
    let name = scripted.pod().name().to_owned();
    not_programmed(&install, &app, "WaitingForServers", &name).await;

    // A server of the future honours what this operator writes.
    scripted.say(Words::serving(99, app.id(), &published));
    install.ready(&app).await;

    // A server of the past does not, and is named. The others serve.
    scripted.say(Words::serving(0, app.id(), &published));
    not_programmed(&install, &app, "ServersTooOld", &name).await;
    login_goes_on(&install, &server, &app).await;
    scripted.say(Words::serving(1, app.id(), &published));
    install.ready(&app).await;

    // It refuses an edit; what it refused before says nothing of the edit that mends it.
    let edited = app.clone().set("/displayName", "Edited");
    install.apply(&edited).await.unwrap();
    not_programmed(&install, &app, "WaitingForServers", &name).await;
    let refused = revision(&install, &app).await;
    assert_ne!(refused, published);
    scripted.say(Words::refusing(app.id(), &published, &refused, "the tests do not like it"));
    not_programmed(&install, &app, "RefusedByServer", "the tests do not like it").await;
    install.apply(&app.clone().set("/displayName", "Mended")).await.unwrap();
    not_programmed(&install, &app, "WaitingForServers", &name).await;
    scripted.say(Words::serving(1, app.id(), &revision(&install, &app).await));
    install.ready(&app).await;
}

#[tokio::test]
async fn a_server_that_says_nothing_is_named() {
    let install = Cluster::shared().await.install().await;
    let _server = install.server().await;
    let _operator = install.operator().await;
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let serving = Words::serving(1, app.id(), &revision(&install, &app).await);

    let silent = install.scripted_server(Words::none()).await.unwrap();
    not_programmed(&install, &app, "WaitingForServers", silent.pod().name()).await;
    silent.say(serving);
    install.ready(&app).await;
    silent.say(Words::none());
    not_programmed(&install, &app, "WaitingForServers", silent.pod().name()).await;
    // Who goes is not waited for.
    silent.pod().remove().await.unwrap();
    install.ready(&app).await;
}

#[tokio::test]
async fn rollouts_scaling_and_a_change_of_leader_write_nothing() {
    let cluster = Cluster::start().await.unwrap();
    let install = cluster.install().await;
    let mut servers = install.serve(3).await;
    let operators = [install.operator().await, install.operator().await];
    let app = App::new("shop");
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    let before = install.get(&app).await.unwrap();
    let mark = cluster.plane().audit_mark();

    // A rolling restart: one more, one less.
    for _ in 0..3 {
        servers.push(install.server().await);
        servers.remove(0).remove().await.unwrap();
    }
    servers.extend(install.serve(3).await);
    for server in servers.drain(3..) {
        server.remove().await.unwrap();
    }
    let [leader, standby] = leader::roles(&install, &operators).await;
    leader.terminate().await.unwrap();
    leader::acts(&install, standby).await;
    // It has looked at everything when it has come to something new.
    let other = App::new("other");
    install.apply(&other).await.unwrap();
    install.ready(&other).await;

    let events = cluster.plane().audit_since(mark).unwrap();
    let by_operators = |credential: &Option<String>| {
        operators.iter().any(|operator| credential.as_deref() == Some(operator.account().credential()))
    };
    let written: Vec<_> = events
        .iter()
        .filter(|event| event.is_write() && by_operators(&event.credential) && event.name.contains(app.id()))
        // That of the first Ready may come after it; one of something later would follow a status.
        .filter(|event| event.resource != "events")
        .collect();
    assert!(written.is_empty(), "{written:#?}");
    assert_eq!(install.get(&app).await.unwrap().metadata.resource_version, before.metadata.resource_version);
    let of_other = |event: &&Event| event.name.contains(other.id());
    assert!(events.iter().filter(of_other).any(|event| event.is_write()), "the log tells what is written");
    assert_eq!(install.condition(&app, ConditionType::Programmed).await.unwrap().status, True);
}
