//! The Lease against an API server that keeps it, on paused time.

use http::StatusCode;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::{advance, timeout};
use tower::ServiceExt;

use super::*;
use crate::app::scripted::{Script, not_found, refusal};

const NAME: &str = "operator";
const PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/latchkey/leases/operator";
const FOLDER: &str = "/apis/coordination.k8s.io/v1/namespaces/latchkey/leases";

/// Keeps one Lease as an API server does, and fails as a test wants.
#[derive(Clone, Default)]
struct Leases(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    lease: Option<Value>,
    version: u64,
    fault: Fault,
    writes: usize,
}

#[derive(Clone, Copy, Default)]
enum Fault {
    #[default]
    None,
    /// It answers 500.
    Error,
    /// It takes requests and says nothing.
    Hang,
    /// It does what it is asked, and the answer is lost.
    Deaf,
}

fn options(identity: &str) -> LeaseOptions {
    LeaseOptions::new("latchkey", NAME, identity)
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

// === impl Leases ===

impl Leases {
    /// With a Lease that somebody holds.
    fn held_by(holder: &str) -> Self {
        let leases = Self::default();
        leases.touch(holder, "2020-01-01T00:00:00.000000Z");
        leases
    }

    /// Somebody writes it, by a clock of their own.
    fn touch(&self, holder: &str, renewed: &str) {
        let mut kept = self.0.lock().unwrap();
        kept.version += 1;
        kept.lease = Some(json!({
            "metadata": { "name": NAME, "namespace": "latchkey", "resourceVersion": kept.version.to_string() },
            "spec": {
                "holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 4,
                "acquireTime": renewed, "renewTime": renewed,
            },
        }));
    }

    fn fail(&self, fault: Fault) {
        self.0.lock().unwrap().fault = fault;
    }

    fn delete(&self) {
        self.0.lock().unwrap().lease = None;
    }

    fn spec(&self) -> Value {
        self.0.lock().unwrap().lease.as_ref().map_or(Value::Null, |lease| lease["spec"].clone())
    }

    fn holder(&self) -> String {
        self.spec()["holderIdentity"].as_str().unwrap_or_default().to_owned()
    }

    fn writes(&self) -> usize {
        self.0.lock().unwrap().writes
    }

    fn client(&self) -> Client {
        let leases = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let leases = leases.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let fault = leases.0.lock().unwrap().fault;
                let (status, answer) = match fault {
                    Fault::Hang => std::future::pending().await,
                    Fault::Error => refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", NAME),
                    Fault::None | Fault::Deaf => leases.answer(&head.method, &body),
                };
                if let Fault::Deaf = fault {
                    std::future::pending::<()>().await;
                }
                let answer = Body::from(answer.to_string().into_bytes());
                Ok::<_, std::convert::Infallible>(http::Response::builder().status(status).body(answer).unwrap())
            }
        });
        Client::new(service, "latchkey")
    }

    fn answer(&self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let mut kept = self.0.lock().unwrap();
        if *method == Method::GET {
            return kept.lease.clone().map_or_else(|| not_found(NAME), |lease| (StatusCode::OK, lease));
        }
        let mut lease: Value = serde_json::from_slice(body).unwrap();
        let there = kept.lease.as_ref().map(|lease| lease["metadata"]["resourceVersion"].clone());
        let fits = match there {
            None if *method == Method::PUT => return not_found(NAME),
            None => true,
            Some(there) => *method == Method::PUT && there == lease["metadata"]["resourceVersion"],
        };
        if !fits {
            return refusal(StatusCode::CONFLICT, "Conflict", NAME);
        }
        kept.version += 1;
        kept.writes += 1;
        lease["metadata"]["resourceVersion"] = kept.version.to_string().into();
        kept.lease = Some(lease.clone());
        (StatusCode::OK, lease)
    }
}

async fn acquired(leases: &Leases, identity: &str) -> Held {
    acquire(leases.client(), options(identity)).await
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_nobody_made_is_made() {
    let script =
        Script::default()
            .expect(Method::GET, PATH, |_| not_found(NAME))
            .expect(Method::POST, FOLDER, |call| (StatusCode::CREATED, call.body.clone()));
    let held = acquire(script.client(), options("a")).await;
    assert!(held.fence().holds());
    let made = &script.calls()[1].body;
    assert_eq!(made["metadata"]["name"], NAME);
    assert_eq!(made["spec"]["holderIdentity"], "a");
    assert_eq!((&made["spec"]["leaseDurationSeconds"], &made["spec"]["leaseTransitions"]), (&json!(15), &json!(0)));
    assert_eq!(made["spec"]["acquireTime"], made["spec"]["renewTime"]);
}

#[tokio::test(start_paused = true)]
async fn who_is_second_to_make_it_waits() {
    let script = Script::default()
        .expect(Method::GET, PATH, |_| not_found(NAME))
        .expect(Method::POST, FOLDER, |_| refusal(StatusCode::CONFLICT, "AlreadyExists", NAME))
        .expect(Method::GET, PATH, |_| {
            let spec = json!({ "holderIdentity": "b", "leaseDurationSeconds": 15 });
            (StatusCode::OK, json!({ "metadata": { "name": NAME, "resourceVersion": "1" }, "spec": spec }))
        });
    assert!(timeout(seconds(3), acquire(script.client(), options("a"))).await.is_err());
    assert_eq!(script.calls().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_silent_holder_is_followed_after_a_whole_duration_of_looking() {
    // Its times are years old, which says nothing: clocks are not compared.
    let leases = Leases::held_by("gone");
    let began = Instant::now();
    let held = acquired(&leases, "a").await;
    assert!((15..20).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    assert!(held.fence().holds());
    assert_eq!((leases.holder().as_str(), &leases.spec()["leaseTransitions"]), ("a", &json!(5)));
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_renews_keeps_it_whatever_its_clock_says() {
    let leases = Leases::held_by("b");
    let waiting = tokio::spawn(acquire(leases.client(), options("a")));
    for minute in 0..20 {
        tokio::time::sleep(seconds(9)).await;
        // Backwards, and in the past.
        leases.touch("b", &format!("2001-01-01T00:{:02}:00.000000Z", 59 - minute));
    }
    assert!(!waiting.is_finished() && leases.writes() == 0);
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_given_back_is_taken_at_once() {
    let leases = Leases::default();
    let held = acquired(&leases, "a").await;
    let waiting = tokio::spawn(acquire(leases.client(), options("b")));
    tokio::time::sleep(seconds(60)).await;
    assert!(!waiting.is_finished());
    let fence = held.fence();
    held.release().await;
    assert!(!fence.holds() && leases.holder().is_empty());
    let began = Instant::now();
    assert!(waiting.await.unwrap().fence().holds());
    assert!(began.elapsed() < seconds(3), "{:?}", began.elapsed());
    assert_eq!(leases.holder(), "b");
}

#[tokio::test(start_paused = true)]
async fn it_is_given_back_though_a_renewal_comes_in_between() {
    let lease = |version: &str| {
        let spec = json!({ "holderIdentity": "a", "leaseDurationSeconds": 15 });
        (StatusCode::OK, json!({ "metadata": { "name": NAME, "resourceVersion": version }, "spec": spec }))
    };
    let script = Script::default()
        .expect(Method::GET, PATH, move |_| lease("1"))
        .expect(Method::PUT, PATH, move |_| lease("2"))
        .expect(Method::GET, PATH, move |_| lease("2"))
        .expect(Method::PUT, PATH, |_| refusal(StatusCode::CONFLICT, "Conflict", NAME))
        .expect(Method::GET, PATH, move |_| lease("3"))
        .expect(Method::PUT, PATH, |call| (StatusCode::OK, call.body.clone()));
    acquire(script.client(), options("a")).await.release().await;
    let last = script.calls().pop().unwrap().body;
    assert_eq!((&last["spec"]["holderIdentity"], &last["metadata"]["resourceVersion"]), (&json!(""), &json!("3")));
}

#[tokio::test(start_paused = true)]
async fn what_another_holds_is_not_given_back() {
    let leases = Leases::default();
    let held = acquired(&leases, "a").await;
    leases.touch("b", "2020-01-01T00:00:00.000000Z");
    held.release().await;
    assert_eq!(leases.holder(), "b");
}

#[tokio::test(start_paused = true)]
async fn the_process_before_this_one_in_the_same_pod_is_not_waited_for() {
    let leases = Leases::held_by("a");
    let began = Instant::now();
    let held = acquired(&leases, "a").await;
    assert!(held.fence().holds() && began.elapsed() < seconds(1));
    assert_eq!(leases.spec()["leaseTransitions"], 4, "it stays with its holder");
}

#[tokio::test(start_paused = true)]
async fn a_holder_renews_and_nothing_else_is_written() {
    let leases = Leases::default();
    let mut held = acquired(&leases, "a").await;
    assert!(timeout(seconds(600), held.lost()).await.is_err());
    assert!(held.fence().holds());
    assert!((290..=301).contains(&leases.writes()), "every 2 s: {}", leases.writes());
    let spec = leases.spec();
    assert_eq!(spec["leaseTransitions"], 0);
}

#[tokio::test(start_paused = true)]
async fn a_holder_whose_renewals_fail_acts_no_more_after_the_deadline() {
    for fault in [Fault::Error, Fault::Hang, Fault::Deaf] {
        let leases = Leases::default();
        let mut held = acquired(&leases, "a").await;
        tokio::time::sleep(seconds(60)).await;
        leases.fail(fault);
        let began = Instant::now();
        assert_eq!(held.lost().await, Lost::NotRenewed);
        assert!((8..=12).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        assert!(!held.fence().holds());
    }
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_passes_costs_nothing() {
    for fault in [Fault::Error, Fault::Hang, Fault::Deaf] {
        let leases = Leases::default();
        let mut held = acquired(&leases, "a").await;
        leases.fail(fault);
        tokio::time::sleep(seconds(5)).await;
        leases.fail(Fault::None);
        assert!(timeout(seconds(60), held.lost()).await.is_err());
        assert!(held.fence().holds());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_somebody_touches_or_deletes_is_kept() {
    let leases = Leases::default();
    let mut held = acquired(&leases, "a").await;
    leases.touch("a", "2020-01-01T00:00:00.000000Z");
    assert!(timeout(seconds(30), held.lost()).await.is_err());
    leases.delete();
    assert!(timeout(seconds(30), held.lost()).await.is_err());
    assert!(held.fence().holds() && leases.holder() == "a");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_another_took_is_lost_at_once() {
    let leases = Leases::default();
    let mut held = acquired(&leases, "a").await;
    leases.touch("b", "2020-01-01T00:00:00.000000Z");
    let (began, writes) = (Instant::now(), leases.writes());
    assert_eq!(held.lost().await, Lost::Taken);
    assert!(began.elapsed() <= seconds(2) && !held.fence().holds());
    assert_eq!((leases.writes(), leases.holder().as_str()), (writes, "b"));
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_was_paused_does_not_act_even_once() {
    let leases = Leases::default();
    let mut held = acquired(&leases, "a").await;
    let fence = held.fence();
    // Time passes and no task of this process runs.
    advance(seconds(11)).await;
    assert!(!fence.holds());
    assert_eq!(held.lost().await, Lost::NotRenewed);
    assert!(!fence.holds());
}

#[tokio::test(start_paused = true)]
async fn of_two_never_both_act() {
    let leases = Leases::default();
    let first = acquired(&leases, "a").await;
    let fence = first.fence();
    let waiting = tokio::spawn(acquire(leases.client(), options("b")));
    tokio::time::sleep(seconds(30)).await;
    // The first cannot renew any more; the second still reaches the API server.
    first.renewing.abort();
    let second = waiting.await.unwrap();
    assert!(second.fence().holds() && !fence.holds());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_without_the_lease_and_everything_may_be_read() {
    let leases = Leases::default();
    let held = acquired(&leases, "a").await;
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
