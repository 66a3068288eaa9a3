//! A login storm of one App does not delay the users of another App.

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
use latchkey_tests::{
    client::unique_client_address, eventually, passwords::PASSWORD, raw_connection::RawConnection, stack::Stack,
};

use crate::{fault_support::unlimited_app, support::NAME};

const EMAIL: &str = "ada@example.com";
/// The number of connections of the storm: more than the hashing queue has slots on two cores.
const STORM_CONNECTIONS: u16 = 200;
/// Number of measured logins of the quiet App.
const QUIET_LOGINS: usize = 60;
/// Time limit until the storm has filled the hashing queue.
const FULL_QUEUE_LIMIT: Duration = Duration::from_secs(30);

/// The responses to the logins of the storm.
#[derive(Default)]
struct StormResponses {
    /// The durations of the successful logins.
    served: Vec<Duration>,
    /// The number of 503 responses.
    refused: usize,
}

/// Logs in repeatedly, on one connection, until `stop` is set. Sets `refused` when the server refuses a login.
fn log_in_repeatedly(
    mut connection: RawConnection,
    path: &str,
    body: &str,
    stop: &AtomicBool,
    refused: &AtomicBool,
) -> StormResponses {
    let mut responses = StormResponses::default();
    while !stop.load(Ordering::Relaxed) {
        let reply = connection.post(path, body).expect("the server responds");
        match reply.status {
            200 => responses.served.push(reply.took),
            503 => {
                let after = reply.header("retry-after").and_then(|after| after.parse::<u32>().ok());
                assert!(after.is_some_and(|after| after >= 1), "Retry-After in {}", reply.head);
                assert!(reply.body.contains("temporarily_unavailable"), "{}", reply.body);
                responses.refused += 1;
                refused.store(true, Ordering::Relaxed);
                // Retries earlier than `Retry-After` says, but pauses a little: the server shares two cores with
                // the test.
                thread::sleep(Duration::from_millis(50));
            }
            other => panic!("a login got {other}: {}", reply.body),
        }
    }
    responses
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Returns a client address of the storm. Other clients have random client addresses. If two addresses are equal by
/// chance, the two clients only share rate limits, which no test reaches.
fn storm_client_address(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, 77, high, low.max(1)))
}

async fn connect(server: SocketAddr, from: IpAddr) -> RawConnection {
    RawConnection::connect(server, from).await.expect("the server accepts")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_storm_of_one_app_does_not_delay_another_app() {
    let (storming, quiet) = (unlimited_app("loud"), unlimited_app("quiet"));
    let stack = Stack::builder().app(&storming).app(&quiet).start().await;
    let server = stack.server().public;
    for app in [&storming, &quiet] {
        stack.client().register(app.id(), NAME, EMAIL, PASSWORD).await.expect(StatusCode::OK);
    }
    let path = |app: &str| format!("v1/{app}/email/login");
    let body = serde_json::json!({ "email": EMAIL, "password": PASSWORD }).to_string();

    let (stop, refused) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let mut storm = Vec::new();
    for number in 0..STORM_CONNECTIONS {
        let connection = connect(server, storm_client_address(number)).await;
        let (stop, refused) = (Arc::clone(&stop), Arc::clone(&refused));
        let (path, body) = (path(storming.id()), body.clone());
        storm.push(thread::spawn(move || log_in_repeatedly(connection, &path, &body, &stop, &refused)));
    }
    eventually("the storm fills the queue", FULL_QUEUE_LIMIT, || async {
        refused.load(Ordering::Relaxed).then_some(())
    })
    .await;

    // Logs in at the quiet App, each time from a new client address.
    let mut durations = Vec::new();
    let mut refusals = Vec::new();
    for _ in 0..QUIET_LOGINS {
        let mut connection = connect(server, unique_client_address()).await;
        let (path, body) = (path(quiet.id()), body.clone());
        let reply = tokio::task::spawn_blocking(move || connection.post(&path, &body));
        let reply = reply.await.expect("no call panics").expect("the server responds");
        if reply.status == 200 {
            durations.push(reply.took);
        } else {
            refusals.push(format!("{}: {}", reply.head, reply.body));
        }
    }
    stop.store(true, Ordering::Relaxed);
    let mut responses = StormResponses::default();
    for thread in storm {
        let of_thread = thread.join().expect("the storm gets the expected responses");
        responses.served.extend(of_thread.served);
        responses.refused += of_thread.refused;
    }

    assert!(refusals.is_empty(), "{} of {QUIET_LOGINS} quiet logins were refused: {}", refusals.len(), refusals[0]);
    assert!(responses.refused > 0, "the storm exceeded the server's capacity");
    assert!(!responses.served.is_empty(), "the storm is served too");
    // A client of the storming App waits for the App's whole queue. A client of the quiet App waits only for the
    // running hash and for one hash of the storming App. If the Apps did not take turns, both clients would wait
    // equally long. The rest of a login takes the same time for both; on a busy machine, it can take longer than the
    // hashes.
    let (storming, quiet) = (median(responses.served), median(durations));
    assert!(
        quiet * 2 < storming,
        "the median of the quiet App's logins was {quiet:?}, that of the storm's {storming:?}"
    );
}
