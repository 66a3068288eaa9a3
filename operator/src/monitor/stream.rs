//! Keeps one stream to one server pod open.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use kube::runtime::utils::Backoff;
use latchkey_crds::rendered::RevisionsMessage;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    pod::{LINE_TIMEOUT, SILENCE_TIMEOUT},
    pod_states::{PodStates, PodStream, TooManyApps},
};
use crate::backoff;

/// The time in which a server sends three heartbeats. A stream on which nothing arrives for this time is opened again,
/// so that a pod does not count as silent if only the packets of one connection are dropped.
const STREAM_TIMEOUT: Duration = Duration::from_secs(6);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const MIN_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
const MAX_LINE_BYTES: usize = 64 * 1024 * 1024;

/// How to connect to a server pod. Tests replace it.
pub(super) type Connector = Arc<dyn Fn(SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Socket>>> + Send + Sync>;

pub(super) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

/// Why a stream did not begin, or was cut.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("timed out")]
    Timeout(#[from] tokio::time::error::Elapsed),
    #[error("cannot connect: {0}")]
    Connect(#[from] io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("{0}")]
    Request(#[from] http::Error),
    #[error("responded with {0}")]
    Status(http::StatusCode),
    #[error("a line is not valid")]
    InvalidLine(#[from] serde_json::Error),
    #[error("a line is too long")]
    LineTooLong,
    #[error("{0}")]
    TooManyApps(#[from] TooManyApps),
    #[error("another pod has its address")]
    OtherPod,
    #[error("a line came before the hello")]
    NoHello,
    #[error("the stream ended")]
    Ended,
}

enum Never {}

/// Connects by TCP.
pub(super) fn tcp_connector() -> Connector {
    Arc::new(|address| {
        Box::pin(async move {
            let socket = TcpStream::connect(address).await?;
            Ok(Box::new(socket) as Box<dyn Socket>)
        })
    })
}

/// Opens the stream of a pod and reads it. Opens it again whenever it is cut or could not be opened. Never returns: the
/// caller drops this future when `pod.stop` is cancelled.
pub(super) async fn run(states: &Mutex<PodStates>, connector: &Connector, pod: &PodStream) {
    let mut backoff = backoff::between(MIN_BACKOFF, MAX_BACKOFF);
    loop {
        let began = Instant::now();
        let Err(cut) = read_stream(states, connector, pod).await;
        tracing::debug!(address = %pod.address, uid = pod.uid, %cut, "the stream of a server was cut");
        states.lock().record_disconnect(&pod.uid, &pod.stop);
        if began.elapsed() > SILENCE_TIMEOUT {
            backoff.reset();
        }
        sleep(backoff.next().unwrap_or(MAX_BACKOFF)).await;
    }
}

async fn read_stream(states: &Mutex<PodStates>, connector: &Connector, pod: &PodStream) -> Result<Never, StreamError> {
    let PodStream { uid, address, stop } = pod;
    let socket = timeout(CONNECT_TIMEOUT, connector(*address)).await??;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let request = http::Request::get("/revisions").header(http::header::HOST, address.to_string());
    let response = timeout(SILENCE_TIMEOUT, sender.send_request(request.body(Empty::<Bytes>::new())?)).await??;
    if response.status() != http::StatusCode::OK {
        return Err(StreamError::Status(response.status()));
    }
    let mut lines = Lines { body: response.into_body(), buffer: Vec::new() };
    let mut has_said_hello = false;
    loop {
        let max_silence = if has_said_hello { STREAM_TIMEOUT } else { SILENCE_TIMEOUT };
        let line =
            timeout(LINE_TIMEOUT, lines.next_line(max_silence, || states.lock().record_part(uid, stop))).await??;
        match serde_json::from_slice(&line)? {
            RevisionsMessage::Hello { hello } if hello.pod_uid == *uid => {
                states.lock().record_hello(uid, stop, hello)?;
                has_said_hello = true;
            }
            RevisionsMessage::Hello { .. } => return Err(StreamError::OtherPod),
            _ if !has_said_hello => return Err(StreamError::NoHello),
            RevisionsMessage::Change(change) => states.lock().record_change(uid, stop, change)?,
            RevisionsMessage::Provider { provider } => states.lock().record_finding(uid, stop, provider),
            RevisionsMessage::Heartbeat { .. } => states.lock().record_heartbeat(uid, stop),
        }
    }
}

/// Reads the lines of a response body.
struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
}

// === impl Lines ===

impl Lines {
    /// Returns the next line, or an error if nothing arrives for `max_silence`. Calls `on_part` for each part of the
    /// line that arrives.
    async fn next_line(&mut self, max_silence: Duration, on_part: impl Fn()) -> Result<Vec<u8>, StreamError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(searched + end + 1);
                return Ok(std::mem::replace(&mut self.buffer, rest));
            }
            searched = self.buffer.len();
            let frame = timeout(max_silence, self.body.frame()).await?.ok_or(StreamError::Ended)??;
            if let Ok(data) = frame.into_data() {
                if self.buffer.len() + data.len() > MAX_LINE_BYTES {
                    return Err(StreamError::LineTooLong);
                }
                self.buffer.extend_from_slice(&data);
                on_part();
            }
        }
    }
}
