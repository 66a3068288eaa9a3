//! The accept loop: connections in, answers out, and an end without loss.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    io,
    net::IpAddr,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Version, header::CONNECTION};
use hyper::{
    body::{Body as HttpBody, Frame, Incoming, SizeHint},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::OwnedSemaphorePermit,
    time::{Sleep, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, info, warn};

use super::{
    budgets::ConnectionPlace,
    door::{Answered, Service},
    patience::{Answering, Patient, Shared},
    response::Body,
};

/// The largest header block, in octets (contract, 1).
pub const MAX_HEAD: usize = 32 * 1024;
/// Requests at a time in one HTTP/2 connection: as many as RFC 9113, 6.5.2 finds reasonable.
const MAX_STREAMS: u32 = 100;
/// What an HTTP/2 client can send ahead of our reading, for a stream and for all together: the least that RFC 9113, 6.9.2
/// allows for a connection, since each connection pays for it. Bodies are read as they come, so that one window is enough.
const WINDOW: u32 = 65_535;
/// An HTTP/2 client that does not answer a ping is gone.
const PING_EVERY: Duration = Duration::from_secs(20);
const PING_WAIT: Duration = Duration::from_secs(10);
/// Without file descriptors accepting fails at once, again and again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How a listener ends. Clones are one and the same.
#[derive(Clone, Debug)]
pub struct Drain {
    begun: CancellationToken,
    closing: CancellationToken,
    delay: Duration,
    limit: Duration,
}

/// A body that says when it has been written, or given up.
struct Tracked {
    body: Body,
    answering: Answering,
}

/// Serves until the drain is over.
///
/// Once it has begun, answers tell their clients to use another connection, while the listener goes on accepting for
/// the delay, since load balancers learn late that this process is about to end. Then it accepts no more, finishes
/// what runs, at most for the limit, and returns.
pub async fn serve(listener: TcpListener, service: Service, drain: Drain) {
    let builder = builder();
    let connections = TaskTracker::new();
    let abandoned = CancellationToken::new();
    let mut over = pin!(async {
        drain.begun.cancelled().await;
        info!(listener = service.listener(), delay_ms = drain.delay.as_millis(), "draining");
        sleep(drain.delay).await;
    });
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut over => break,
            accepted = accept(&listener, &service) => accepted,
        };
        let (stream, peer, free) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // A connection that broke before it was taken is no reason to wait.
                if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
                    error!(listener = service.listener(), error = %error, "a connection could not be accepted");
                    tokio::select! {
                        () = &mut over => break,
                        () = sleep(ACCEPT_PAUSE) => {}
                    }
                }
                continue;
            }
        };
        let Ok(place) = service.admit(free, peer) else {
            debug!(listener = service.listener(), client = %peer, "a client has its number of connections");
            continue;
        };
        // Answers are small and go out whole: waiting to fill a packet only delays them.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "TCP_NODELAY could not be set");
        }
        let connection = connection(builder.clone(), stream, peer, place, service.clone(), drain.clone());
        let abandoned = abandoned.clone();
        connections.spawn(async move {
            tokio::select! {
                () = abandoned.cancelled() => {}
                () = connection => {}
            }
        });
    }
    drop(listener);
    drain.closing.cancel();
    connections.close();
    let finished = async {
        connections.wait().await;
        service.finished().await;
    };
    if timeout(drain.limit, finished).await.is_err() {
        warn!(listener = service.listener(), connections = connections.len(), "some requests did not end in time");
        abandoned.cancel();
        connections.wait().await;
    }
    info!(listener = service.listener(), "drained");
}

/// Takes a connection once there is a place for one.
async fn accept(listener: &TcpListener, service: &Service) -> io::Result<(TcpStream, IpAddr, OwnedSemaphorePermit)> {
    let place = service.free_place().await;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer.ip(), place))
}

pub(super) fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    // The time for headers is kept by `patience`. The buffer bounds the header block: what does not fit is 431.
    // A client may close its half once it has sent all: a request that has begun is finished anyway.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(MAX_HEAD).half_close(true);
    // Rapid resets (CVE-2023-44487) are bounded by h2's own defaults.
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEAD as u32)
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_WAIT);
    builder
}

/// Serves one connection to its end.
pub(super) async fn connection<T>(
    builder: Builder<TokioExecutor>,
    stream: T,
    peer: IpAddr,
    place: ConnectionPlace,
    service: Service,
    drain: Drain,
) where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let _open = service.connection();
    let shared = Arc::new(Shared::default());
    let goaway = service.times().goaway;
    let running = place.place();
    let io = TokioIo::new(Patient::new(stream, Arc::clone(&shared), service.clone(), place));
    let requests = {
        let (shared, drain) = (Arc::clone(&shared), drain.clone());
        service_fn(move |request: Request<Incoming>| {
            let mut answering = shared.begin();
            let (service, drain, running) = (service.clone(), drain.clone(), Arc::clone(&running));
            async move {
                let version = request.version();
                let Answered { mut response, held } =
                    service.answer(request, peer, answering.is_alone(), running).await;
                if let Some(held) = held {
                    held.wait(&drain.begun).await;
                }
                answering.answered();
                // HTTP/2 says it with GOAWAY instead.
                if version <= Version::HTTP_11 && drain.begun.is_cancelled() {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(response.map(|body| Tracked { body, answering }))
            }
        })
    };
    let mut connection = pin!(builder.serve_connection(io, requests));
    let mut begun = pin!(drain.begun.cancelled());
    let mut closing = pin!(drain.closing.cancelled());
    let (mut has_begun, mut is_closing, mut told) = (false, false, false);
    let mut last: Option<Pin<Box<Sleep>>> = None;
    let served = poll_fn(|cx| {
        loop {
            has_begun = has_begun || begun.as_mut().poll(cx).is_ready();
            is_closing = is_closing || closing.as_mut().poll(cx).is_ready();
            // An idle HTTP/1 connection stays open until the end: its client may be sending a request at this moment.
            if !told && (is_closing || (has_begun && shared.is_http2() && shared.has_served())) {
                told = true;
                connection.as_mut().graceful_shutdown();
            }
            // Pings would keep an idle HTTP/2 connection open, while others can be waiting for its place.
            if last.is_none() && shared.is_idle_over() {
                last = Some(Box::pin(sleep(goaway)));
                connection.as_mut().graceful_shutdown();
            }
            let polled = connection.as_mut().poll(cx);
            let ends_now = last.is_none() && shared.is_idle_over();
            if polled.is_pending() && ends_now {
                continue;
            }
            if polled.is_pending() && last.as_mut().is_some_and(|last| last.as_mut().poll(cx).is_ready()) {
                return Poll::Ready(Ok(()));
            }
            return polled;
        }
    });
    if let Err(error) = served.await {
        debug!(%error, "a connection broke");
    }
}

// === impl Drain ===

impl Drain {
    pub fn new(delay: Duration, limit: Duration) -> Self {
        Self { begun: CancellationToken::new(), closing: CancellationToken::new(), delay, limit }
    }

    /// Begins; once is enough.
    pub fn begin(&self) {
        self.begun.cancel();
    }

    /// Cancelled when no more connections are accepted: what has no end of its own must end then.
    pub fn closing(&self) -> CancellationToken {
        self.closing.clone()
    }
}

// === impl Tracked ===

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if frame.is_ready() {
            self.answering.wrote();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
