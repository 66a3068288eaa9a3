//! The accept loop: accepts connections, serves them, and drains without losing requests.

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
    task::yield_now,
    time::{Sleep, sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, info, warn};

use super::{
    budgets::ConnectionPermit,
    parked::{Parked, ParkedConnection, ParkedRefusal, finish, http1_bytes},
    pipeline::{PipelineResponse, Service},
    response::Body,
    timeouts::{ActiveRequest, ConnectionState, IncompleteRequest, TimeoutStream},
};

/// Maximum size of a header block in bytes (specification: HTTP API, Request bodies).
pub const MAX_HEADER_BYTES: usize = 32 * 1024;
/// Maximum concurrent requests on one HTTP/2 connection: the minimum that RFC 9113, 6.5.2 recommends.
const MAX_STREAMS: u32 = 100;
/// Flow-control window in bytes, per stream and per connection. It is the minimum that RFC 9113, 6.9.2 allows for a
/// connection, because the cost of each connection includes a window. Bodies are read as they arrive, so the minimum is
/// enough.
const FLOW_CONTROL_WINDOW: u32 = 65_535;
/// How often an HTTP/2 client is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// An HTTP/2 client that does not answer a ping within this time is considered gone.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a failed `accept`. Without free file descriptors, the next `accept` would fail immediately.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Controls how a listener drains. Clones share their state.
#[derive(Clone, Debug)]
pub struct Drain {
    /// Cancelled when the drain begins.
    begun: CancellationToken,
    /// Cancelled after the delay, when the listener stops accepting connections.
    closing: CancellationToken,
    /// How long the listener still accepts connections after the drain has begun.
    delay: Duration,
    /// Maximum time for which active requests can continue after the delay.
    timeout: Duration,
}

/// The body of a request. The request counts as incomplete until the body is fully received or dropped.
pub struct IncomingBody {
    body: Incoming,
    incomplete: Option<IncompleteRequest>,
}

/// A body that records when it is written or dropped.
struct TrackedBody {
    body: Body,
    request: ActiveRequest,
}

/// Serves until the drain is complete.
///
/// After the drain has begun, responses ask their clients to use another connection. The listener still accepts
/// connections during the delay, because load balancers learn late that this process is about to end. After the delay,
/// `serve` stops accepting connections, waits for running requests up to the timeout of the drain, and returns.
pub async fn serve(listener: TcpListener, service: Service, drain: Drain) {
    let builder = connection_builder();
    let connections = TaskTracker::new();
    let abandoned = CancellationToken::new();
    let mut delay_over = pin!(async {
        drain.begun.cancelled().await;
        info!(listener = service.listener(), delay_ms = drain.delay.as_millis(), "draining");
        sleep(drain.delay).await;
    });
    loop {
        // Let the tasks of running requests run first, so that a flood of connections cannot starve them.
        yield_now().await;
        let accepted = tokio::select! {
            biased;
            () = &mut delay_over => break,
            accepted = accept(&listener, &service) => accepted,
        };
        let (stream, peer, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // A connection that broke before it was accepted is no reason to pause.
                if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
                    error!(listener = service.listener(), error = %error, "a connection could not be accepted");
                    tokio::select! {
                        () = &mut delay_over => break,
                        () = sleep(ACCEPT_PAUSE) => {}
                    }
                }
                continue;
            }
        };
        let Ok(permit) = service.admit(slot, peer) else {
            debug!(listener = service.listener(), client = %peer, "a client has its maximum number of connections");
            continue;
        };
        // Send a packet before it is full: responses are small and written in one piece, so waiting would only delay
        // them.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "TCP_NODELAY could not be set");
        }
        // The future is boxed, because it is large, is moved several times, and ends before a held refusal.
        let connection =
            Box::pin(serve_connection(builder.clone(), stream, peer, permit, service.clone(), drain.clone()));
        let (abandoned, begun) = (abandoned.clone(), drain.begun());
        connections.spawn(async move {
            tokio::select! {
                () = abandoned.cancelled() => {}
                () = finish(connection, &begun) => {}
            }
        });
    }
    drop(listener);
    drain.closing.cancel();
    connections.close();
    let finished = async {
        connections.wait().await;
        service.wait_until_finished().await;
    };
    if timeout(drain.timeout, finished).await.is_err() {
        warn!(listener = service.listener(), connections = connections.len(), "some requests did not end in time");
        abandoned.cancel();
        connections.wait().await;
    }
    info!(listener = service.listener(), "drained");
}

/// Waits for a connection slot, then accepts a connection.
async fn accept(listener: &TcpListener, service: &Service) -> io::Result<(TcpStream, IpAddr, OwnedSemaphorePermit)> {
    let slot = service.acquire_slot().await;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer.ip(), slot))
}

pub(super) fn connection_builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    // `TimeoutStream`, which is below hyper, enforces the header timeout. The buffer limits the header block: a larger
    // block gets 431. A client can close its half of the connection after it has sent a request. It still gets the
    // response.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(MAX_HEADER_BYTES).half_close(true);
    // Rapid resets (CVE-2023-44487) are limited by h2's own defaults.
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEADER_BYTES as u32)
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(FLOW_CONTROL_WINDOW)
        .initial_connection_window_size(FLOW_CONTROL_WINDOW)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// Serves one connection until it ends. If its last response is held, returns what is left of the connection.
pub(super) async fn serve_connection<T>(
    builder: Builder<TokioExecutor>,
    stream: T,
    peer: IpAddr,
    permit: ConnectionPermit,
    service: Service,
    drain: Drain,
) -> Option<ParkedConnection<T>>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let _open = service.track_connection();
    let shared = ConnectionState::new();
    let open_connection = permit.add_to_open(&shared);
    let timeouts = service.timeouts();
    let slot = permit.slot_permit();
    let (stream, returned) = TimeoutStream::new(stream, Arc::clone(&shared), service.clone(), permit);
    let io = TokioIo::new(stream);
    let requests = {
        let (shared, drain, service) = (Arc::clone(&shared), drain.clone(), service.clone());
        service_fn(move |request: Request<Incoming>| {
            let mut active_request = shared.begin_request();
            let (service, drain, slot) = (service.clone(), drain.clone(), Arc::clone(&slot));
            async move {
                let version = request.version();
                let request = request.map(|body| IncomingBody::new(body, &active_request));
                let PipelineResponse { mut response, held } =
                    service.handle(request, peer, active_request.is_alone(), slot).await;
                if let Some(held) = held {
                    if held.closes_connection() {
                        active_request.park(ParkedRefusal::new(http1_bytes(response), held));
                        return Err(Parked);
                    }
                    held.wait(&drain.begun).await;
                }
                active_request.response_ready();
                // During a drain, each HTTP/1 response closes its connection. HTTP/2 uses GOAWAY instead.
                if version <= Version::HTTP_11 && drain.begun.is_cancelled() {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok(response.map(|body| TrackedBody { body, request: active_request }))
            }
        })
    };
    let served = {
        let mut connection = pin!(builder.serve_connection(io, requests));
        let mut begun = pin!(drain.begun.cancelled());
        let mut closing = pin!(drain.closing.cancelled());
        let (mut has_begun, mut is_closing, mut is_shutdown_sent) = (false, false, false);
        let mut goaway_timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            shared.register_close_waker(cx);
            loop {
                has_begun = has_begun || begun.as_mut().poll(cx).is_ready();
                is_closing = is_closing || closing.as_mut().poll(cx).is_ready();
                // An idle HTTP/1 connection stays open until the listener stops accepting connections: its client may
                // be sending a request at this moment.
                if !is_shutdown_sent && (is_closing || (has_begun && shared.is_http2() && shared.has_served())) {
                    is_shutdown_sent = true;
                    connection.as_mut().graceful_shutdown();
                }
                // An idle HTTP/2 connection is closed here. Otherwise pings would keep it open while other connections
                // wait for its slots.
                if goaway_timer.is_none() && shared.is_idle_expired() {
                    goaway_timer = Some(Box::pin(sleep(timeouts.goaway)));
                    connection.as_mut().graceful_shutdown();
                }
                let polled = connection.as_mut().poll(cx);
                let has_just_expired = goaway_timer.is_none() && shared.is_idle_expired();
                if polled.is_pending() && has_just_expired {
                    continue;
                }
                if polled.is_pending() && shared.must_close() {
                    if shared.is_waiting() {
                        service.record_waiting_closed();
                        return Poll::Ready(Ok(()));
                    }
                    // The poll above has read the rest of a request, which now gets its response.
                    open_connection.keep();
                }
                if polled.is_pending() && goaway_timer.as_mut().is_some_and(|timer| timer.as_mut().poll(cx).is_ready())
                {
                    return Poll::Ready(Ok(()));
                }
                return polled;
            }
        })
        .await
    };
    if let Some(refusal) = shared.take_parked() {
        // The connection is dropped, so it has returned its stream.
        let stream = returned.await.ok()?;
        return Some(ParkedConnection { stream, refusal, timeouts });
    }
    if let Err(error) = served {
        debug!(%error, "a connection broke");
    }
    None
}

// === impl Drain ===

impl Drain {
    pub fn new(delay: Duration, timeout: Duration) -> Self {
        Self { begun: CancellationToken::new(), closing: CancellationToken::new(), delay, timeout }
    }

    /// Begins the drain; further calls have no effect.
    pub fn begin(&self) {
        self.begun.cancel();
    }

    /// A token that is cancelled when the drain begins.
    pub(super) fn begun(&self) -> CancellationToken {
        self.begun.clone()
    }

    /// A token that is cancelled when the listener stops accepting connections. Responses without an end must end when
    /// the token is cancelled.
    pub fn closing(&self) -> CancellationToken {
        self.closing.clone()
    }
}

// === impl IncomingBody ===

impl IncomingBody {
    fn new(body: Incoming, request: &ActiveRequest) -> Self {
        let incomplete = (!body.is_end_stream()).then(|| request.incomplete());
        Self { body, incomplete }
    }
}

impl HttpBody for IncomingBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if self.body.is_end_stream() || matches!(frame, Poll::Ready(None | Some(Err(_)))) {
            self.incomplete = None;
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

// === impl TrackedBody ===

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if frame.is_ready() {
            self.request.record_write();
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
