//! The runtime of the attackers, and functions that several attackers use.

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

/// Nice value of the attackers' thread. Nice value 19 is the lowest priority.
const NICE: i32 = 10;
/// Printed description of the attackers' priority.
pub(super) const PRIORITY: &str = "one thread at nice 10, so that it uses mostly CPU time that is left over";
/// Timeout of a request; every response of the service arrives earlier.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause before a new connection. Thousands of connection attempts per second would not be a stronger attack.
const RECONNECT_PAUSE: Duration = Duration::from_millis(10);

/// A runtime with one thread of low priority. Its tasks end when this value is dropped.
pub(super) struct AttackerRuntime(Option<Runtime>);

/// Counts of the responses that attackers got, for the printed report.
#[derive(Clone, Default)]
pub(super) struct ResponseCounts(Arc<Mutex<BTreeMap<String, u64>>>);

// === impl AttackerRuntime ===

impl AttackerRuntime {
    pub(super) fn start() -> Result<Self> {
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("attackers")
            .on_thread_start(|| {
                // On Linux each thread has its own priority.
                setpriority_process(None, NICE).expect("a thread can lower its priority");
            })
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    pub(super) fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.0.as_ref().expect("the runtime exists until it is dropped").spawn(task)
    }
}

impl Drop for AttackerRuntime {
    fn drop(&mut self) {
        // Dropping a runtime blocks, which is not allowed on a thread of another runtime.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

// === impl ResponseCounts ===

impl ResponseCounts {
    pub(super) fn count(&self, what: impl fmt::Display) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what.to_string()).or_default() += 1;
    }
}

impl fmt::Display for ResponseCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.is_empty() {
            return f.write_str("no response");
        }
        let counts: Vec<_> = counts.iter().map(|(what, count)| format!("{count} × {what}")).collect();
        f.write_str(&counts.join(", "))
    }
}

/// The client address of an attacker with this number. Ordinary users have addresses in 127.100.0.0/16.
pub(super) fn address(number: u32) -> IpAddr {
    // In 127.130.0.0/15, without the first and the last IP address of each /24.
    let [.., second, third, fourth] = ((number / 254) << 8 | (number % 254 + 1)).to_be_bytes();
    Ipv4Addr::new(127, 130 + second % 2, third, fourth).into()
}

/// Sends requests forever, each immediately after the response to the previous one. Uses one connection at a time, and
/// opens the next one when a connection ends.
pub(super) async fn flood(
    server: SocketAddr,
    from: IpAddr,
    counts: ResponseCounts,
    mut request: impl FnMut() -> Request<Full<Bytes>>,
) -> Infallible {
    loop {
        let Ok(mut connection) = connect(server, from).await else {
            counts.count("no connection");
            sleep(RECONNECT_PAUSE).await;
            continue;
        };
        while let Some(status) = send(&mut connection, request()).await {
            counts.count(status);
        }
        counts.count("connection ended");
        sleep(RECONNECT_PAUSE).await;
    }
}

/// Sends a request and returns the status of the response. `None`: the connection ended, or the request timed out.
pub(super) async fn send(connection: &mut Connection, request: Request<Full<Bytes>>) -> Option<u16> {
    let exchange = async {
        connection.ready().await.ok()?;
        let response = connection.send_request(request).await.ok()?;
        let status = response.status().as_u16();
        response.into_body().collect().await.ok()?;
        Some(status)
    };
    timeout(RESPONSE_TIMEOUT, exchange).await.ok().flatten()
}

/// A POST request with JSON.
pub(super) fn post_request(server: SocketAddr, path: &str, body: &serde_json::Value) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("host", server.to_string())
        .header("content-type", "application/json")
        .body(Full::from(body.to_string()))
        .expect("a request of fixed parts")
}

/// Raises the limit of open files of this process and its children to the maximum.
pub(super) fn raise_file_limit() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}

/// The wanted number of connections, or fewer if the limit of open files is lower.
pub(super) fn cap_connections(wanted: u32) -> u32 {
    // The number of open files that the benchmark needs in addition to these connections.
    const OTHER_FILES: u64 = 500;
    let available = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |files| files.saturating_sub(OTHER_FILES));
    let connections = wanted.min(u32::try_from(available).unwrap_or(u32::MAX));
    if connections < wanted {
        println!("  only {connections} of {wanted} connections, because of the limit of open files (ulimit -n)");
    }
    connections
}
