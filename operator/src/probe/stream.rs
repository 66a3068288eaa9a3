//! One stream to one server pod, again and again.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use latchkey_crds::rendered::RevisionsLine;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{LINE, Probe, QUIET, SILENCE, table::TooManyApps};
use crate::backoff::ShortBackoff;

const CONNECT: Duration = Duration::from_secs(3);
const BACKOFF_LEAST: Duration = Duration::from_millis(100);
const BACKOFF_MOST: Duration = Duration::from_secs(2);
const MAX_LINE: usize = 64 * 1024 * 1024;

/// How a server pod is reached. Tests have another way.
pub(super) type Dial = Arc<dyn Fn(SocketAddr) -> BoxFuture<'static, io::Result<Box<dyn Socket>>> + Send + Sync>;

pub(super) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

/// Why a stream was cut.
#[derive(Debug, thiserror::Error)]
enum Cut {
    #[error("timed out")]
    Timeout(#[from] tokio::time::error::Elapsed),
    #[error("cannot connect: {0}")]
    Connect(#[from] io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("{0}")]
    Request(#[from] http::Error),
    #[error("answered {0}")]
    Status(http::StatusCode),
    #[error("a line is not valid")]
    Line(#[from] serde_json::Error),
    #[error("a line is too long")]
    TooLong,
    #[error("{0}")]
    TooMany(#[from] TooManyApps),
    #[error("another pod answers at its address")]
    OtherPod,
    #[error("a line came before the hello")]
    NoHello,
    #[error("the stream ended")]
    End,
}

enum Never {}

/// By TCP.
pub(super) fn tcp() -> Dial {
    Arc::new(|address| {
        Box::pin(async move {
            let socket = TcpStream::connect(address).await?;
            Ok(Box::new(socket) as Box<dyn Socket>)
        })
    })
}

/// Until it is dropped.
pub(super) async fn keep(probe: &Probe, uid: &str, address: SocketAddr, stop: &CancellationToken) {
    let fresh = || ShortBackoff::between(BACKOFF_LEAST, BACKOFF_MOST);
    let mut backoff = fresh();
    loop {
        let before = Instant::now();
        let Err(cut) = listen(probe, uid, address, stop).await;
        tracing::debug!(%address, uid, %cut, "the stream of a server was cut");
        probe.table().cut(uid, stop);
        if before.elapsed() > SILENCE {
            backoff = fresh();
        }
        sleep(backoff.next().unwrap_or(BACKOFF_MOST)).await;
    }
}

async fn listen(probe: &Probe, uid: &str, address: SocketAddr, stop: &CancellationToken) -> Result<Never, Cut> {
    let socket = timeout(CONNECT, (probe.dial)(address)).await??;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let request = http::Request::get("/revisions").header(http::header::HOST, address.to_string());
    let response = timeout(SILENCE, sender.send_request(request.body(Empty::<Bytes>::new())?)).await??;
    if response.status() != http::StatusCode::OK {
        return Err(Cut::Status(response.status()));
    }
    let mut lines = Lines { body: response.into_body(), buffer: Vec::new() };
    let mut greeted = false;
    loop {
        let quiet = if greeted { QUIET } else { SILENCE };
        let line = timeout(LINE, lines.next(quiet, || probe.table().part(uid, stop))).await??;
        match serde_json::from_slice(&line)? {
            RevisionsLine::Hello { hello } if hello.pod_uid == uid => {
                probe.table().hello(uid, stop, hello)?;
                greeted = true;
            }
            RevisionsLine::Hello { .. } => return Err(Cut::OtherPod),
            _ if !greeted => return Err(Cut::NoHello),
            RevisionsLine::Change(change) => probe.table().change(uid, stop, change)?,
            RevisionsLine::Provider { provider } => probe.table().found(uid, stop, provider),
            RevisionsLine::Heartbeat { .. } => probe.table().beat(uid, stop),
        }
    }
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    buffer: Vec<u8>,
}

// === impl Lines ===

impl Lines {
    /// The next one, unless nothing comes for so long. `part` is called for each part of it.
    async fn next(&mut self, quiet: Duration, part: impl Fn()) -> Result<Vec<u8>, Cut> {
        let mut looked = 0;
        loop {
            if let Some(end) = self.buffer[looked..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(looked + end + 1);
                return Ok(std::mem::replace(&mut self.buffer, rest));
            }
            looked = self.buffer.len();
            let frame = timeout(quiet, self.body.frame()).await?.ok_or(Cut::End)??;
            if let Ok(data) = frame.into_data() {
                if self.buffer.len() + data.len() > MAX_LINE {
                    return Err(Cut::TooLong);
                }
                self.buffer.extend_from_slice(&data);
                part();
            }
        }
    }
}
