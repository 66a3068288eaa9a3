//! Leader election against a mock API server, on paused time.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::{advance, timeout};
use tower::{BoxError, Layer, ServiceExt};

use super::{fence::NotLeader, *};
use crate::app::mock_api::{MockApi, api_error, not_found};

const NAME: &str = "operator";
const PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/latchkey/leases/operator";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/latchkey/leases";

/// Stores one Lease as an API server does. A test can set a fault.
#[derive(Clone, Default)]
struct MockLeaseApi(Arc<Mutex<LeaseState>>);

#[derive(Default)]
struct LeaseState {
    lease: Option<Value>,
    version: u64,
    fault: Fault,
    writes: usize,
}

#[derive(Clone, Copy, Default)]
enum Fault {
    #[default]
    None,
    /// The API responds with 500.
    Error,
    /// The API accepts requests and never responds.
    Hang,
    /// The API does what is requested, but the response is lost.
    ResponseLost,
}

fn options(identity: &str) -> LeaseOptions {
    LeaseOptions::new("latchkey", NAME, identity)
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

// === impl MockLeaseApi ===

impl MockLeaseApi {
    /// Returns a mock API with a Lease that `holder` holds.
    fn held_by(holder: &str) -> Self {
        let leases = Self::default();
        leases.write_as(holder, "2020-01-01T00:00:00.000000Z");
        leases
    }

    /// Changes the Lease as if `holder` renewed it. `renewed` is the time on the clock of `holder`.
    fn write_as(&self, holder: &str, renewed: &str) {
        let mut state = self.0.lock();
        state.version += 1;
        state.lease = Some(json!({
            "metadata": { "name": NAME, "namespace": "latchkey", "resourceVersion": state.version.to_string() },
            "spec": {
                "holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 4,
                "acquireTime": renewed, "renewTime": renewed,
            },
        }));
    }

    fn set_fault(&self, fault: Fault) {
        self.0.lock().fault = fault;
    }

    fn delete(&self) {
        self.0.lock().lease = None;
    }

    fn spec(&self) -> Value {
        self.0.lock().lease.as_ref().map_or(Value::Null, |lease| lease["spec"].clone())
    }

    fn holder(&self) -> String {
        self.spec()["holderIdentity"].as_str().unwrap_or_default().to_owned()
    }

    fn writes(&self) -> usize {
        self.0.lock().writes
    }

    fn client(&self) -> Client {
        let leases = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let leases = leases.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let fault = leases.0.lock().fault;
                let (status, answer) = match fault {
                    Fault::Hang => std::future::pending().await,
                    Fault::Error => api_error(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", NAME),
                    Fault::None | Fault::ResponseLost => leases.respond(&head.method, &body),
                };
                if let Fault::ResponseLost = fault {
                    std::future::pending::<()>().await;
                }
                let answer = Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(http::Response::builder().status(status).body(answer).unwrap())
            }
        });
        Client::new(service, "latchkey")
    }

    fn respond(&self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let mut state = self.0.lock();
        if *method == Method::GET {
            return state.lease.clone().map_or_else(|| not_found(NAME), |lease| (StatusCode::OK, lease));
        }
        let mut lease: Value = serde_json::from_slice(body).unwrap();
        let stored_version = state.lease.as_ref().map(|lease| lease["metadata"]["resourceVersion"].clone());
        let is_accepted = match stored_version {
            None if *method == Method::PUT => return not_found(NAME),
            None => true,
            Some(stored_version) => *method == Method::PUT && stored_version == lease["metadata"]["resourceVersion"],
        };
        if !is_accepted {
            return api_error(StatusCode::CONFLICT, "Conflict", NAME);
        }
        state.version += 1;
        state.writes += 1;
        lease["metadata"]["resourceVersion"] = state.version.to_string().into();
        state.lease = Some(lease.clone());
        (StatusCode::OK, lease)
    }
}

async fn acquire_as(leases: &MockLeaseApi, identity: &str) -> HeldLease {
    acquire(leases.client(), options(identity)).await
}

#[tokio::test(start_paused = true)]
async fn a_missing_lease_is_created() {
    let script =
        MockApi::default()
            .expect(Method::GET, PATH, |_| not_found(NAME))
            .expect(Method::POST, LEASES, |call| (StatusCode::CREATED, call.body.clone()));
    let held = acquire(script.client(), options("a")).await;
    assert!(held.fence().is_open());
    let created = &script.finish()[1].body;
    assert_eq!(created["metadata"]["name"], NAME);
    assert_eq!(created["spec"]["holderIdentity"], "a");
    assert_eq!(
        (&created["spec"]["leaseDurationSeconds"], &created["spec"]["leaseTransitions"]),
        (&json!(15), &json!(0))
    );
    assert_eq!(created["spec"]["acquireTime"], created["spec"]["renewTime"]);
}

#[tokio::test(start_paused = true)]
async fn the_second_candidate_that_creates_the_lease_waits() {
    let script = MockApi::default()
        .expect(Method::GET, PATH, |_| not_found(NAME))
        .expect(Method::POST, LEASES, |_| api_error(StatusCode::CONFLICT, "AlreadyExists", NAME))
        .expect(Method::GET, PATH, |_| {
            let spec = json!({ "holderIdentity": "b", "leaseDurationSeconds": 15 });
            (StatusCode::OK, json!({ "metadata": { "name": NAME, "resourceVersion": "1" }, "spec": spec }))
        });
    assert!(timeout(seconds(3), acquire(script.client(), options("a"))).await.is_err());
    assert_eq!(script.finish().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_silent_holder_can_be_taken_after_its_duration() {
    // The times in the Lease are years old. This has no effect, because clocks are not compared.
    let leases = MockLeaseApi::held_by("gone");
    let began = Instant::now();
    let held = acquire_as(&leases, "a").await;
    assert!((15..20).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    assert!(held.fence().is_open());
    assert_eq!((leases.holder().as_str(), &leases.spec()["leaseTransitions"]), ("a", &json!(5)));
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_renews_keeps_the_lease_whatever_its_clock_says() {
    let leases = MockLeaseApi::held_by("b");
    let waiting = tokio::spawn(acquire(leases.client(), options("a")));
    for minute in 0..20 {
        tokio::time::sleep(seconds(9)).await;
        // The times that the holder writes are in the past, and each is earlier than the one before.
        leases.write_as("b", &format!("2001-01-01T00:{:02}:00.000000Z", 59 - minute));
    }
    assert!(!waiting.is_finished() && leases.writes() == 0);
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn a_released_lease_is_taken_within_three_seconds() {
    let leases = MockLeaseApi::default();
    let held = acquire_as(&leases, "a").await;
    let waiting = tokio::spawn(acquire(leases.client(), options("b")));
    tokio::time::sleep(seconds(60)).await;
    assert!(!waiting.is_finished());
    let fence = held.fence();
    held.release().await;
    assert!(!fence.is_open() && leases.holder().is_empty());
    let began = Instant::now();
    assert!(waiting.await.unwrap().fence().is_open());
    assert!(began.elapsed() < seconds(3), "{:?}", began.elapsed());
    assert_eq!(leases.holder(), "b");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_released_despite_a_concurrent_renewal() {
    let lease = |version: &str| {
        let spec = json!({ "holderIdentity": "a", "leaseDurationSeconds": 15 });
        (StatusCode::OK, json!({ "metadata": { "name": NAME, "resourceVersion": version }, "spec": spec }))
    };
    let script = MockApi::default()
        .expect(Method::GET, PATH, move |_| lease("1"))
        .expect(Method::PUT, PATH, move |_| lease("2"))
        .expect(Method::GET, PATH, move |_| lease("2"))
        .expect(Method::PUT, PATH, |_| api_error(StatusCode::CONFLICT, "Conflict", NAME))
        .expect(Method::GET, PATH, move |_| lease("3"))
        .expect(Method::PUT, PATH, |call| (StatusCode::OK, call.body.clone()));
    acquire(script.client(), options("a")).await.release().await;
    let last = script.finish().pop().unwrap().body;
    assert_eq!((&last["spec"]["holderIdentity"], &last["metadata"]["resourceVersion"]), (&json!(""), &json!("3")));
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_another_holder_is_not_released() {
    let leases = MockLeaseApi::default();
    let held = acquire_as(&leases, "a").await;
    leases.write_as("b", "2020-01-01T00:00:00.000000Z");
    held.release().await;
    assert_eq!(leases.holder(), "b");
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_the_previous_process_in_the_same_pod_is_taken_immediately() {
    let leases = MockLeaseApi::held_by("a");
    let began = Instant::now();
    let held = acquire_as(&leases, "a").await;
    assert!(held.fence().is_open() && began.elapsed() < seconds(1));
    assert_eq!(leases.spec()["leaseTransitions"], 4, "it stays with its holder");
}

#[tokio::test(start_paused = true)]
async fn a_holder_renews_and_nothing_else_is_written() {
    let leases = MockLeaseApi::default();
    let mut held = acquire_as(&leases, "a").await;
    assert!(timeout(seconds(600), held.lost()).await.is_err());
    assert!(held.fence().is_open());
    assert!((290..=301).contains(&leases.writes()), "every 2 s: {}", leases.writes());
    let spec = leases.spec();
    assert_eq!(spec["leaseTransitions"], 0);
}

#[tokio::test(start_paused = true)]
async fn a_holder_without_renewals_stops_writing_after_the_deadline() {
    for fault in [Fault::Error, Fault::Hang, Fault::ResponseLost] {
        let leases = MockLeaseApi::default();
        let mut held = acquire_as(&leases, "a").await;
        tokio::time::sleep(seconds(60)).await;
        leases.set_fault(fault);
        let began = Instant::now();
        assert_eq!(held.lost().await, LostReason::NotRenewed);
        assert!((8..=12).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        assert!(!held.fence().is_open());
    }
}

#[tokio::test(start_paused = true)]
async fn a_temporary_fault_does_not_lose_the_lease() {
    for fault in [Fault::Error, Fault::Hang, Fault::ResponseLost] {
        let leases = MockLeaseApi::default();
        let mut held = acquire_as(&leases, "a").await;
        leases.set_fault(fault);
        tokio::time::sleep(seconds(5)).await;
        leases.set_fault(Fault::None);
        assert!(timeout(seconds(60), held.lost()).await.is_err());
        assert!(held.fence().is_open());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_somebody_edits_or_deletes_is_kept() {
    let leases = MockLeaseApi::default();
    let mut held = acquire_as(&leases, "a").await;
    leases.write_as("a", "2020-01-01T00:00:00.000000Z");
    assert!(timeout(seconds(30), held.lost()).await.is_err());
    leases.delete();
    assert!(timeout(seconds(30), held.lost()).await.is_err());
    assert!(held.fence().is_open() && leases.holder() == "a");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_another_replica_takes_is_lost_at_the_next_renewal() {
    let leases = MockLeaseApi::default();
    let mut held = acquire_as(&leases, "a").await;
    leases.write_as("b", "2020-01-01T00:00:00.000000Z");
    let (began, writes) = (Instant::now(), leases.writes());
    assert_eq!(held.lost().await, LostReason::Taken);
    assert!(began.elapsed() <= seconds(2) && !held.fence().is_open());
    assert_eq!((leases.writes(), leases.holder().as_str()), (writes, "b"));
}

#[tokio::test(start_paused = true)]
async fn a_paused_holder_writes_nothing() {
    let leases = MockLeaseApi::default();
    let mut held = acquire_as(&leases, "a").await;
    let fence = held.fence();
    // Time passes while no task of this process runs.
    advance(seconds(11)).await;
    assert!(!fence.is_open());
    assert_eq!(held.lost().await, LostReason::NotRenewed);
    assert!(!fence.is_open());
}

#[tokio::test(start_paused = true)]
async fn two_replicas_never_write_at_the_same_time() {
    let leases = MockLeaseApi::default();
    let first = acquire_as(&leases, "a").await;
    let fence = first.fence();
    let waiting = tokio::spawn(acquire(leases.client(), options("b")));
    tokio::time::sleep(seconds(30)).await;
    // The first replica can no longer renew the Lease. The second still reaches the API server.
    first.renewal_task.abort();
    let second = waiting.await.unwrap();
    assert!(second.fence().is_open() && !fence.is_open());
}

#[tokio::test(start_paused = true)]
async fn only_reads_are_sent_without_the_lease() {
    let leases = MockLeaseApi::default();
    let held = acquire_as(&leases, "a").await;
    let sent = tower::service_fn(|request: Request<()>| async move { Ok::<_, BoxError>(request.method().clone()) });
    let service = FenceLayer::new(held.fence()).layer(sent);
    let send = |method: &Method| {
        let request = Request::builder().method(method).body(()).unwrap();
        service.clone().oneshot(request)
    };
    let writes = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    for method in writes.iter().chain([&Method::GET]) {
        assert_eq!(send(method).await.unwrap(), *method);
    }
    advance(seconds(11)).await;
    for method in &writes {
        assert!(send(method).await.unwrap_err().is::<NotLeader>());
    }
    assert_eq!(send(&Method::GET).await.unwrap(), Method::GET);
}
