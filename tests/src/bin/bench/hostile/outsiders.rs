//! Where attackers run, and what they have in common.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fmt,
    future::Future,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};
use tokio::{
    runtime::{self, Runtime},
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::logins::{Connection, connect};

/// The least priority is 19; the server's hashing threads have 5.
const NICE: i32 = 10;
/// What is said of the attackers' CPU.
pub(super) const PRIORITY: &str = "one thread at nice 10, so that what they cost themselves is taken from what is left";
/// Longer than the service answers anything.
const LIMIT: Duration = Duration::from_secs(60);
/// After a connection that could not be made: so many of them a second tell nothing more.
const RETRY: Duration = Duration::from_millis(10);

/// A runtime with one thread of low priority. What runs there ends when this value is dropped.
pub(super) struct Outsiders(Option<Runtime>);

/// What attackers got, for people to read.
#[derive(Clone, Default)]
pub(super) struct Tally(Arc<Mutex<BTreeMap<String, u64>>>);

// === impl Outsiders ===

impl Outsiders {
    pub(super) fn start() -> Result<Self> {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("outsiders")
            .on_thread_start(|| {
                // On Linux a thread has a priority of its own.
                setpriority_process(None, NICE).expect("a thread may give up priority");
            })
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    pub(super) fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.0.as_ref().expect("it ends when it is dropped").spawn(work)
    }
}

impl Drop for Outsiders {
    fn drop(&mut self) {
        // Dropping a runtime waits, which a thread of another runtime must not.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

// === impl Tally ===

impl Tally {
    pub(super) fn count(&self, what: impl fmt::Display) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what.to_string()).or_default() += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.is_empty() {
            return f.write_str("no answer");
        }
        let counts: Vec<_> = counts.iter().map(|(what, count)| format!("{count} × {what}")).collect();
        f.write_str(&counts.join(", "))
    }
}

/// Client addresses of attackers. Ordinary users have 127.100.0.0/16.
pub(super) fn address(number: u32) -> IpAddr {
    // A /15, each /24 of it without its first and last address.
    let [.., second, third, fourth] = ((number / 254) << 8 | (number % 254 + 1)).to_be_bytes();
    Ipv4Addr::new(127, 130 + second % 2, third, fourth).into()
}

/// Sends one request after the other over one connection, at once after each answer, whatever it is.
pub(super) async fn storm(
    server: SocketAddr,
    from: IpAddr,
    tally: Tally,
    mut request: impl FnMut() -> Request<Full<Bytes>>,
) -> Infallible {
    loop {
        let Ok(mut connection) = connect(server, from).await else {
            tally.count("no connection");
            sleep(RETRY).await;
            continue;
        };
        while let Some(status) = ask(&mut connection, request()).await {
            tally.count(status);
        }
        tally.count("connection ended");
        sleep(RETRY).await;
    }
}

/// The status of the answer; none where the connection ended.
pub(super) async fn ask(connection: &mut Connection, request: Request<Full<Bytes>>) -> Option<u16> {
    let asking = async {
        connection.ready().await.ok()?;
        let response = connection.send_request(request).await.ok()?;
        let status = response.status().as_u16();
        response.into_body().collect().await.ok()?;
        Some(status)
    };
    timeout(LIMIT, asking).await.ok().flatten()
}

/// A POST of JSON.
pub(super) fn post(server: SocketAddr, path: &str, body: &serde_json::Value) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", server.to_string())
        .header("content-type", "application/json")
        .body(Full::from(body.to_string()))
        .expect("a request of fixed parts")
}

/// Lets this process and its children have as many open files as the system allows.
pub(super) fn raise_file_limit() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}

/// So many connections, or what the limit of open files leaves.
pub(super) fn connections(wanted: u32) -> u32 {
    // What everything else needs.
    const OTHER: u64 = 500;
    let most = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |files| files.saturating_sub(OTHER));
    let connections = wanted.min(u32::try_from(most).unwrap_or(u32::MAX));
    if connections < wanted {
        println!("  only {connections} connections in place of {wanted}: the limit of open files (ulimit -n)");
    }
    connections
}
