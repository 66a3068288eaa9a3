//! One App's login storm while another App's users log in: they do not notice.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use http::StatusCode;
use latchkey_tests::{client::own_address, eventually, stack::Stack, wire::Wire};

use crate::{
    support::{NAME, PASSWORD},
    trouble::loose,
};

const EMAIL: &str = "ada@example.com";
/// More than the hashing queue has places for on two cores.
const STORMING: u16 = 200;
/// The quiet App's log-ins that are looked at.
const QUIET: usize = 60;
const SOON: Duration = Duration::from_secs(30);

/// What one storming connection saw.
#[derive(Default)]
struct Seen {
    served: Vec<Duration>,
    refused: usize,
}

/// Logs in again and again until it is told to stop.
fn storm(mut wire: Wire, path: &str, body: &str, stop: &AtomicBool, hit: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    while !stop.load(Ordering::Relaxed) {
        let reply = wire.post(path, body).expect("the server answers");
        match reply.status {
            200 => seen.served.push(reply.took),
            503 => {
                let after = reply.header("retry-after").and_then(|after| after.parse::<u32>().ok());
                assert!(after.is_some_and(|after| after >= 1), "Retry-After in {}", reply.head);
                assert!(reply.body.contains("temporarily_unavailable"), "{}", reply.body);
                seen.refused += 1;
                hit.store(true, Ordering::Relaxed);
                // Sooner than it was told, but the test's own two cores are the server's too.
                thread::sleep(Duration::from_millis(50));
            }
            other => panic!("a log-in was answered {other}: {}", reply.body),
        }
    }
    seen
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Client addresses of the storm; those of other callers are random, and meet them at worst in a limit that is loose.
fn address(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, 77, high, low.max(1)))
}

async fn connect(server: SocketAddr, from: IpAddr) -> Wire {
    Wire::connect(server, from).await.expect("the server accepts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_storm_of_one_app_is_not_felt_in_another() {
    let (loud, quiet) = (loose("loud"), loose("quiet"));
    let stack = Stack::builder().app(&loud).app(&quiet).start().await;
    let server = stack.server().public;
    for app in [&loud, &quiet] {
        stack.client().register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    let path = |app: &str| format!("v1/{app}/email/login");
    let body = serde_json::json!({ "email": EMAIL, "password": PASSWORD }).to_string();

    let (stop, hit) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let mut storming = Vec::new();
    for number in 0..STORMING {
        let wire = connect(server, address(number)).await;
        let (stop, hit) = (Arc::clone(&stop), Arc::clone(&hit));
        let (path, body) = (path(loud.id()), body.clone());
        storming.push(thread::spawn(move || storm(wire, &path, &body, &stop, &hit)));
    }
    eventually("the storm fills the queue", SOON, || async { hit.load(Ordering::Relaxed).then_some(()) }).await;

    // The quiet App's users, each from a place of their own.
    let mut took = Vec::new();
    let mut refusals = Vec::new();
    for _ in 0..QUIET {
        let mut wire = connect(server, own_address()).await;
        let (path, body) = (path(quiet.id()), body.clone());
        let reply = tokio::task::spawn_blocking(move || wire.post(&path, &body));
        let reply = reply.await.expect("a call does not panic").expect("the server answers");
        if reply.status == 200 {
            took.push(reply.took);
        } else {
            refusals.push(format!("{}: {}", reply.head, reply.body));
        }
    }
    stop.store(true, Ordering::Relaxed);
    let mut seen = Seen::default();
    for one in storming {
        let one = one.join().expect("the storm is answered as it should be");
        seen.served.extend(one.served);
        seen.refused += one.refused;
    }

    assert!(refusals.is_empty(), "{} of {QUIET} quiet log-ins were refused: {}", refusals.len(), refusals[0]);
    assert!(seen.refused > 0, "the storm was more than the server takes");
    assert!(!seen.served.is_empty(), "the storm is served too");
    // Whoever storms waits for a whole queue, whoever does not for the job that runs and for one turn.
    let (loud, quiet) = (median(seen.served), median(took));
    assert!(quiet * 4 < loud, "the median of the quiet App's log-ins was {quiet:?}, that of the storm's {loud:?}");
}
