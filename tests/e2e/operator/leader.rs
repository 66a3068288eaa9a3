//! One of two operators is the leader, and the other can take over. Two never lead at the same time.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::Api;
use latchkey_tests::{
    builders::App,
    cluster::{Installation, OperatorProcess, TestCluster},
    control_plane::audit::{AuditEvent, Mark},
    eventually,
    proxy::Proxy,
};

/// A Lease lasts 15 s, and the standby tries to take it every two seconds; a loaded machine takes longer.
const LIMIT: Duration = Duration::from_secs(90);

async fn lease(install: &Installation<'_>) -> LeaseSpec {
    let leases: Api<Lease> = Api::namespaced(install.admin(), install.namespace());
    leases.get_opt(install.lease()).await.unwrap().and_then(|lease| lease.spec).unwrap_or_default()
}

/// Waits until the operator holds the Lease.
pub(super) async fn wait_until_leader(install: &Installation<'_>, operator: &OperatorProcess) {
    eventually(&format!("{} is the leader", operator.identity()), LIMIT, || async {
        (lease(install).await.holder_identity.as_deref() == Some(operator.identity())).then_some(())
    })
    .await;
}

/// Returns the leader and the standby.
pub(super) async fn leader_and_standby<'a>(
    install: &Installation<'_>,
    [one, other]: &'a [OperatorProcess; 2],
) -> [&'a OperatorProcess; 2] {
    eventually("an operator is the leader", LIMIT, || async {
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

fn is_write_by(operator: &OperatorProcess, event: &AuditEvent) -> bool {
    event.is_write() && event.credential.as_deref() == Some(operator.account().credential())
}

/// The operator's writes since this mark in the audit log, including failed writes.
fn writes_since(install: &Installation<'_>, operator: &OperatorProcess, since: Mark) -> Vec<AuditEvent> {
    let mut events = install.cluster().plane().audit_since(since).unwrap();
    events.retain(|event| is_write_by(operator, event));
    events
}

/// Whether the event is a rejected request for the Lease.
fn is_rejected_lease_request(event: &AuditEvent) -> bool {
    event.resource == "leases" && event.status >= 400
}

async fn apply_app(install: &Installation<'_>, name: &str) -> App {
    let app = App::new(name);
    install.apply(&app).await.unwrap();
    install.wait_until_ready(&app).await;
    app
}

#[tokio::test]
async fn only_one_of_two_operators_writes() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let mark = install.cluster().plane().audit_mark();
    let operators = [install.start_operator().await, install.start_operator().await];
    for name in ["one", "two", "three"] {
        apply_app(&install, name).await;
    }
    let [leader, standby] = leader_and_standby(&install, &operators).await;
    assert!(!writes_since(&install, leader, mark).is_empty());
    let writes = writes_since(&install, standby, mark);
    assert!(writes.iter().all(|event| event.resource == "leases" && event.status == 409), "{writes:#?}");
}

#[tokio::test]
async fn the_standby_takes_over_when_the_leader_is_killed() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let operators = [install.start_operator().await, install.start_operator().await];
    let app = apply_app(&install, "shop").await;
    let [leader, standby] = leader_and_standby(&install, &operators).await;
    let mark = install.cluster().plane().audit_mark();
    leader.kill();
    install.apply(&app.clone().set("/displayName", "Edited")).await.unwrap();
    wait_until_leader(&install, standby).await;
    install.wait_until_ready(&app).await;
    // After the standby has taken the Lease, the API server processes no write from the killed leader.
    let events = install.cluster().plane().audit_since(mark).unwrap();
    let takeover = events.iter().position(|event| is_write_by(standby, event)).expect("the standby took the Lease");
    assert_eq!((events[takeover].resource.as_str(), events[takeover].status), ("leases", 200));
    let late_writes: Vec<_> = events[takeover..].iter().filter(|event| is_write_by(leader, event)).collect();
    assert!(late_writes.is_empty(), "{late_writes:#?}");
    assert_eq!(lease(&install).await.lease_transitions, Some(1));
    // The killed operator starts again, as a kubelet would restart its container, and is the standby.
    leader.start().unwrap();
    apply_app(&install, "another").await;
    wait_until_leader(&install, standby).await;
}

#[tokio::test]
async fn a_terminated_leader_hands_over_immediately() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let operators = [install.start_operator().await, install.start_operator().await];
    apply_app(&install, "shop").await;
    let [leader, standby] = leader_and_standby(&install, &operators).await;
    let duration = u64::try_from(lease(&install).await.lease_duration_seconds.unwrap()).unwrap();
    assert!(leader.terminate().await.unwrap().success());
    let ended = Instant::now();
    wait_until_leader(&install, standby).await;
    // The standby takes over before the Lease would expire.
    assert!(ended.elapsed() < Duration::from_secs(duration), "{:?}", ended.elapsed());
    apply_app(&install, "another").await;
}

#[tokio::test]
async fn a_leader_that_was_paused_for_long_ends_without_writing() {
    let install = TestCluster::shared().await.install().await;
    let _server = install.start_server().await;
    let operators = [install.start_operator().await, install.start_operator().await];
    let app = apply_app(&install, "shop").await;
    let [leader, standby] = leader_and_standby(&install, &operators).await;
    leader.pause();
    // Makes changes, so that the leader would have something to write when it resumes.
    let late_app = App::new("late");
    install.apply(&late_app).await.unwrap();
    install.apply(&app.clone().set("/displayName", "Edited")).await.unwrap();
    wait_until_leader(&install, standby).await;
    install.wait_until_ready(&app).await;
    install.wait_until_ready(&late_app).await;

    let mark = install.cluster().plane().audit_mark();
    leader.resume();
    let status = eventually("the former leader ends", LIMIT, || async { leader.exit_status() }).await;
    assert!(!status.success(), "it ends with a failure: {status}");
    assert!(leader.read_log().contains("the Lease is lost"));
    let mut late_writes = writes_since(&install, leader, mark);
    // Before the pause, the leader may have been about to send an Event or a renewal of the Lease. The API server now
    // rejects the renewal.
    late_writes.retain(|event| event.resource != "events" && !is_rejected_lease_request(event));
    assert_eq!(late_writes, []);
    wait_until_leader(&install, standby).await;
    install.wait_until_ready(&app).await;
}

#[tokio::test]
async fn a_leader_that_is_cut_off_ends_before_the_standby_takes_over() {
    let install = TestCluster::shared().await.install().await;
    let plane = install.cluster().plane();
    let _server = install.start_server().await;
    let proxy = Proxy::start(plane.addr()).unwrap();
    let account = plane.account(install.namespace(), install.operator_account().name()).await.unwrap();
    let leader = install.start_operator_as(&plane.account_at(&account, proxy.addr()).unwrap(), &[]);
    let app = apply_app(&install, "shop").await;
    wait_until_leader(&install, &leader).await;
    let standby = install.start_operator().await;

    // The leader's requests get no response at all.
    proxy.stall();
    install.apply(&app.clone().set("/displayName", "Edited")).await.unwrap();
    let status = eventually("the former leader ends", LIMIT, || async { leader.exit_status() }).await;
    assert!(!status.success());
    assert_eq!(lease(&install).await.holder_identity.as_deref(), Some(leader.identity()), "the standby still waits");
    wait_until_leader(&install, &standby).await;
    install.wait_until_ready(&app).await;

    // The requests of the former leader arrive late, and are rejected.
    let mark = plane.audit_mark();
    proxy.restore().unwrap();
    install.apply(&app.clone().set("/displayName", "Edited again")).await.unwrap();
    install.wait_until_ready(&app).await;
    let late_writes = writes_since(&install, &leader, mark);
    assert!(late_writes.iter().all(is_rejected_lease_request), "{late_writes:#?}");
    wait_until_leader(&install, &standby).await;
}
