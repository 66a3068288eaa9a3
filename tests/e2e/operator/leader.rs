//! Two operators and one Lease: one acts, the other takes over, and never both.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Api;
use latchkey_tests::{
    builders::App,
    cluster::{Cluster, Install, Operator},
    control_plane::audit::{Event, Mark},
    eventually,
    proxy::Proxy,
};

/// A Lease runs 15 s, and who waits for it asks every two; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(90);

async fn lease(install: &Install<'_>) -> LeaseSpec {
    let leases: Api<Lease> = Api::namespaced(install.admin(), install.namespace());
    leases.get_opt(install.lease()).await.unwrap().and_then(|lease| lease.spec).unwrap_or_default()
}

/// Waits until it holds the Lease.
pub(super) async fn acts(install: &Install<'_>, operator: &Operator) {
    eventually(&format!("{} acts", operator.identity()), LIMIT, || async {
        (lease(install).await.holder_identity.as_deref() == Some(operator.identity())).then_some(())
    })
    .await;
}

/// Who acts, and who waits.
pub(super) async fn roles<'a>(install: &Install<'_>, [one, other]: &'a [Operator; 2]) -> [&'a Operator; 2] {
    eventually("an operator acts", LIMIT, || async {
        let holder = lease(install).await.holder_identity?;
        if holder == one.identity() {
            Some([one, other])
        } else if holder == other.identity() {
            Some([other, one])
        } else {
            None
        }
    })
    .await
}

fn wrote(operator: &Operator, event: &Event) -> bool {
    event.is_write() && event.credential.as_deref() == Some(operator.account().credential())
}

/// What it has written, or tried to, since then.
fn written(install: &Install<'_>, operator: &Operator, since: Mark) -> Vec<Event> {
    let mut events = install.cluster().plane().audit_since(since).unwrap();
    events.retain(|event| wrote(operator, event));
    events
}

/// Whether the Lease was asked for and refused.
fn refused_the_lease(event: &Event) -> bool {
    event.resource == "leases" && event.status >= 400
}

async fn applied(install: &Install<'_>, name: &str) -> App {
    let app = App::new(name);
    install.apply(&app).await.unwrap();
    install.ready(&app).await;
    app
}

#[tokio::test]
async fn of_two_operators_one_writes() {
    let install = Cluster::shared().await.install().await;
    let _server = install.server().await;
    let mark = install.cluster().plane().audit_mark();
    let operators = [install.operator().await, install.operator().await];
    for name in ["one", "two", "three"] {
        applied(&install, name).await;
    }
    let [leader, standby] = roles(&install, &operators).await;
    assert!(!written(&install, leader, mark).is_empty());
    let tried = written(&install, standby, mark);
    assert!(tried.iter().all(|event| event.resource == "leases" && event.status == 409), "{tried:#?}");
}

#[tokio::test]
async fn when_the_leader_is_killed_the_other_acts() {
    let install = Cluster::shared().await.install().await;
    let _server = install.server().await;
    let operators = [install.operator().await, install.operator().await];
    let app = applied(&install, "shop").await;
    let [leader, standby] = roles(&install, &operators).await;
    let mark = install.cluster().plane().audit_mark();
    leader.kill();
    install.apply(&app.clone().set("/displayName", "Edited")).await.unwrap();
    acts(&install, standby).await;
    install.ready(&app).await;
    // What it had sent when it was killed is done before the other acts, and nothing after it.
    let events = install.cluster().plane().audit_since(mark).unwrap();
    let taken = events.iter().position(|event| wrote(standby, event)).expect("the other took the Lease");
    assert_eq!((events[taken].resource.as_str(), events[taken].status), ("leases", 200));
    let late: Vec<_> = events[taken..].iter().filter(|event| wrote(leader, event)).collect();
    assert!(late.is_empty(), "{late:#?}");
    assert_eq!(lease(&install).await.lease_transitions, Some(1));
    // It comes back, as a pod does, and waits.
    leader.start().unwrap();
    applied(&install, "another").await;
    acts(&install, standby).await;
}

#[tokio::test]
async fn a_leader_that_is_asked_to_end_hands_over_at_once() {
    let install = Cluster::shared().await.install().await;
    let _server = install.server().await;
    let operators = [install.operator().await, install.operator().await];
    applied(&install, "shop").await;
    let [leader, standby] = roles(&install, &operators).await;
    let duration = u64::try_from(lease(&install).await.lease_duration_seconds.unwrap()).unwrap();
    assert!(leader.terminate().await.unwrap().success());
    let ended = Instant::now();
    acts(&install, standby).await;
    // It does not wait until the Lease has run out.
    assert!(ended.elapsed() < Duration::from_secs(duration), "{:?}", ended.elapsed());
    applied(&install, "another").await;
}

#[tokio::test]
async fn a_leader_that_was_paused_for_long_writes_nothing_more_and_ends() {
    let install = Cluster::shared().await.install().await;
    let _server = install.server().await;
    let operators = [install.operator().await, install.operator().await];
    let app = applied(&install, "shop").await;
    let [leader, standby] = roles(&install, &operators).await;
    leader.pause();
    // It would have much to do when it wakes up.
    let late = App::new("late");
    install.apply(&late).await.unwrap();
    install.apply(&app.clone().set("/displayName", "Edited")).await.unwrap();
    acts(&install, standby).await;
    install.ready(&app).await;
    install.ready(&late).await;

    let mark = install.cluster().plane().audit_mark();
    leader.resume();
    let status = eventually("the former leader ends", LIMIT, || async { leader.ended() }).await;
    assert!(!status.success(), "its end is no wish of anybody's: {status}");
    assert!(leader.logged().contains("the Lease is lost"));
    let mut late = written(&install, leader, mark);
    // That of what it did before may have been on its way, as a renewal may, which comes too late.
    late.retain(|event| event.resource != "events" && !refused_the_lease(event));
    assert_eq!(late, []);
    acts(&install, standby).await;
    install.ready(&app).await;
}

#[tokio::test]
async fn a_leader_that_is_cut_off_ends_before_the_other_acts() {
    let install = Cluster::shared().await.install().await;
    let plane = install.cluster().plane();
    let _server = install.server().await;
    let proxy = Proxy::start(plane.addr()).unwrap();
    let account = plane.account(install.namespace(), install.operator_account().name()).await.unwrap();
    let leader = install.operator_as(&plane.account_at(&account, proxy.addr()).unwrap(), &[]);
    let app = applied(&install, "shop").await;
    acts(&install, &leader).await;
    let standby = install.operator().await;

    // Nothing is refused: it is just not answered any more.
    proxy.stall();
    install.apply(&app.clone().set("/displayName", "Edited")).await.unwrap();
    let status = eventually("the former leader ends", LIMIT, || async { leader.ended() }).await;
    assert!(!status.success());
    assert_eq!(lease(&install).await.holder_identity.as_deref(), Some(leader.identity()), "the other does not act yet");
    acts(&install, &standby).await;
    install.ready(&app).await;

    // What it sent arrives late, and is refused.
    let mark = plane.audit_mark();
    proxy.restore().unwrap();
    install.apply(&app.clone().set("/displayName", "Edited again")).await.unwrap();
    install.ready(&app).await;
    let late = written(&install, &leader, mark);
    assert!(late.iter().all(refused_the_lease), "{late:#?}");
    acts(&install, &standby).await;
}
