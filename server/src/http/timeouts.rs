//! Timeouts of a connection: for the headers of a request, for the next request, and for writing a response.
//!
//! hyper's own header timeout is disabled: it closes the connection without a response, also covers the time between
//! requests, and does not run while hyper-util detects the HTTP version. [`TimeoutStream`] is below hyper and
//! hyper-util. It enforces the timeouts, and it limits what a connection can buffer before there is a request.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::oneshot,
    time::{Instant, Sleep, sleep_until},
};

use super::{
    budgets::{ConnectionPermit, FREE_HEAD},
    parked::ParkedRefusal,
    pipeline::Service,
    quota::Exhausted,
};

/// The timeouts of connections and requests.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Timeout for the complete headers of a request.
    pub head: Duration,
    /// Timeout for the body of a request.
    pub body: Duration,
    /// How long a connection can stay open without a request. In HTTP/2, neither pings nor a response that the client
    /// does not read extend this time.
    pub idle: Duration,
    /// How long an idle HTTP/2 connection can take to end after the GOAWAY. The client may have sent a request before
    /// it received the GOAWAY.
    pub goaway: Duration,
    /// A client that reads nothing of its response for this long is considered gone.
    pub write: Duration,
    /// How long the server still reads after the response to a request that it did not read completely. The client may
    /// still be sending. A closed socket would answer these bytes with a reset, and the client could lose the response
    /// (RFC 9112, 9.6).
    pub linger: Duration,
}

/// Maximum bytes of one read.
const MAX_READ_BYTES: usize = 4096;

/// Maximum bytes that are read after the response, if the client is still sending.
const MAX_LINGER_BYTES: usize = 256 * 1024;
/// Maximum bytes of one read after the response. Most of a refused body is in the socket's buffer already, so few reads
/// are needed.
const MAX_LINGER_READ_BYTES: usize = 32 * 1024;

/// The connection preface of HTTP/2 (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The state that the [`TimeoutStream`] of a connection (below hyper) and its requests (above hyper) share.
#[derive(Debug)]
pub struct ConnectionState {
    /// The number of requests whose response is not completely written.
    unfinished: AtomicUsize,
    /// The number of requests that have no response yet. They are also counted as unfinished.
    unanswered: AtomicUsize,
    /// The number of requests whose body is not fully received yet. They are also counted as unanswered.
    incomplete: AtomicUsize,
    /// A counter that changes when a request arrives, when it gets its response, and when a part of a response is
    /// written.
    activity: AtomicU64,
    /// When `activity` changed last, or the connection was opened.
    last_activity: Mutex<Instant>,
    is_http2: AtomicBool,
    /// Whether a request has arrived on the connection.
    has_served: AtomicBool,
    /// Whether the idle timeout of an HTTP/2 connection has expired.
    is_idle_expired: AtomicBool,
    /// Whether the connection must be closed, because other connections need its slots.
    must_close: AtomicBool,
    /// The last response of the connection, if it is held without the connection.
    parked: Mutex<Option<ParkedRefusal>>,
    /// Wakes the task of the connection when a response is ready or completely written, so that the timeouts are
    /// checked again. hyper itself waits only for bytes.
    connection_waker: AtomicWaker,
    /// Wakes the task of the connection when the connection must be closed.
    close_waker: AtomicWaker,
}

/// A request of a connection. It counts as unanswered until its response is ready, and as unfinished until this value
/// is dropped.
pub struct ActiveRequest {
    shared: Arc<ConnectionState>,
    is_alone: bool,
    is_unanswered: bool,
}

/// Counts a request as incomplete, because its body is not fully received yet, until this value is dropped.
pub struct IncompleteRequest(Arc<ConnectionState>);

/// A stream with timeouts, below hyper.
pub struct TimeoutStream<T> {
    io: ReturnedStream<T>,
    shared: Arc<ConnectionState>,
    service: Service,
    timeouts: Timeouts,
    permit: ConnectionPermit,
    http_version: HttpVersion,
    read_state: ReadState,
    /// The value of `ConnectionState::activity` at the last check.
    seen_activity: u64,
    /// The number of bytes of the current HTTP/1 header block that have been read.
    head_bytes: usize,
    read_timer: Pin<Box<Sleep>>,
    write_timer: Option<Pin<Box<Sleep>>>,
    linger: Option<Linger>,
    has_ended: bool,
}

/// The stream of a connection. When hyper drops the connection, `sender` sends the stream back.
struct ReturnedStream<T> {
    /// Present until this value is dropped.
    stream: Option<T>,
    sender: Option<oneshot::Sender<T>>,
}

/// The detected HTTP version.
#[derive(Clone, Copy)]
enum HttpVersion {
    /// Not detected yet: so far, this many bytes of the HTTP/2 preface have arrived, and nothing else.
    Preface(usize),
    Http1,
    Http2,
}

/// What the next bytes are expected to be, and the deadline for them.
#[derive(Clone, Copy)]
enum ReadState {
    /// No deadline: a request is running.
    RequestRunning,
    /// The end of the connection: the idle timeout of an HTTP/2 connection has expired.
    Ending,
    /// The first request; no byte has arrived.
    FirstRequest(Instant),
    /// A further request; no byte has arrived.
    NextRequest(Instant),
    /// The rest of a request's headers.
    Headers(Instant),
}

/// Reads and discards what a client still sends after the response.
pub struct Linger {
    until: Pin<Box<Sleep>>,
    bytes_left: usize,
    has_ended: bool,
}

// === impl Timeouts ===

impl Timeouts {
    /// The timeouts for headers and body are those of the specification (HTTP API, Request bodies). The idle timeout is
    /// longer than the time for which proxies keep idle connections to their upstreams (NGINX: 60 s). So the proxies
    /// close idle connections first, and no request is sent on a connection that the server has closed.
    pub const DEFAULT: Self = Self {
        head: Duration::from_secs(10),
        body: Duration::from_secs(30),
        idle: Duration::from_secs(75),
        // Equal to `FINISH_TIMEOUT` (`run.rs`), the time that a drain waits for running requests.
        goaway: Duration::from_secs(35),
        write: Duration::from_secs(30),
        linger: Duration::from_secs(1),
    };
}

// === impl ConnectionState ===

impl ConnectionState {
    /// The state of a connection that was just opened.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            unfinished: AtomicUsize::new(0),
            unanswered: AtomicUsize::new(0),
            incomplete: AtomicUsize::new(0),
            activity: AtomicU64::new(0),
            last_activity: Mutex::new(Instant::now()),
            is_http2: AtomicBool::new(false),
            has_served: AtomicBool::new(false),
            is_idle_expired: AtomicBool::new(false),
            must_close: AtomicBool::new(false),
            parked: Mutex::new(None),
            connection_waker: AtomicWaker::new(),
            close_waker: AtomicWaker::new(),
        })
    }

    pub fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        let others = self.unfinished.fetch_add(1, Ordering::Relaxed);
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        self.record_activity();
        self.has_served.store(true, Ordering::Relaxed);
        ActiveRequest { shared: Arc::clone(self), is_alone: others == 0, is_unanswered: true }
    }

    pub fn is_http2(&self) -> bool {
        self.is_http2.load(Ordering::Relaxed)
    }

    pub fn has_served(&self) -> bool {
        self.has_served.load(Ordering::Relaxed)
    }

    pub fn is_idle_expired(&self) -> bool {
        self.is_idle_expired.load(Ordering::Relaxed)
    }

    fn record_activity(&self) {
        self.activity.fetch_add(1, Ordering::Relaxed);
        *self.last_activity.lock() = Instant::now();
    }

    /// Whether the connection is waiting: the server can only wait until the client sends a complete request, or reads
    /// a response. Otherwise, a complete request has no response yet.
    pub fn is_waiting(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) <= self.incomplete.load(Ordering::Relaxed)
    }

    /// The time of the last activity, if the connection is waiting and was not selected to be closed.
    pub fn waiting_since(&self) -> Option<Instant> {
        (self.is_waiting() && !self.must_close()).then(|| *self.last_activity.lock())
    }

    /// Makes the task of the connection close it, if it is still waiting then.
    pub fn close(&self) {
        self.must_close.store(true, Ordering::Relaxed);
        self.close_waker.wake();
    }

    pub fn must_close(&self) -> bool {
        self.must_close.load(Ordering::Relaxed)
    }

    /// Reverts [`close`](Self::close). Returns whether the connection was selected to be closed.
    pub fn cancel_close(&self) -> bool {
        self.must_close.swap(false, Ordering::Relaxed)
    }

    /// Makes [`close`](Self::close) wake the task of `cx`.
    pub fn register_close_waker(&self, cx: &Context<'_>) {
        self.close_waker.register(cx.waker());
    }

    /// Keeps the response until the connection has ended, which must happen now.
    fn park(&self, refusal: ParkedRefusal) {
        *self.parked.lock() = Some(refusal);
    }

    /// Removes the response that is held without the connection.
    pub fn take_parked(&self) -> Option<ParkedRefusal> {
        self.parked.lock().take()
    }
}

// === impl ActiveRequest ===

impl ActiveRequest {
    /// Whether no other request of the connection was running when this request arrived.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Counts the request as incomplete until its body is fully received.
    pub fn incomplete(&self) -> IncompleteRequest {
        self.shared.incomplete.fetch_add(1, Ordering::Relaxed);
        IncompleteRequest(Arc::clone(&self.shared))
    }

    /// Records that the response is ready; it is not written yet.
    pub fn response_ready(&mut self) {
        if std::mem::take(&mut self.is_unanswered) {
            self.shared.unanswered.fetch_sub(1, Ordering::Relaxed);
            self.record_write();
            self.shared.connection_waker.wake();
        }
    }

    /// Keeps the response until the connection has ended, which must happen now.
    pub fn park(&self, refusal: ParkedRefusal) {
        self.shared.park(refusal);
    }

    /// Records that a part of the response is written.
    pub fn record_write(&self) {
        self.shared.record_activity();
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.response_ready();
        self.shared.unfinished.fetch_sub(1, Ordering::Relaxed);
        self.shared.connection_waker.wake();
    }
}

// === impl IncompleteRequest ===

impl Drop for IncompleteRequest {
    fn drop(&mut self) {
        self.0.incomplete.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl TimeoutStream ===

impl<T> TimeoutStream<T> {
    /// The receiver gets `io` when the new stream is dropped.
    pub fn new(
        io: T,
        shared: Arc<ConnectionState>,
        service: Service,
        permit: ConnectionPermit,
    ) -> (Self, oneshot::Receiver<T>) {
        let timeouts = service.timeouts();
        let deadline = Instant::now() + timeouts.head;
        let (sender, returned) = oneshot::channel();
        let stream = Self {
            io: ReturnedStream { stream: Some(io), sender: Some(sender) },
            shared,
            service,
            timeouts,
            permit,
            http_version: HttpVersion::Preface(0),
            read_state: ReadState::FirstRequest(deadline),
            seen_activity: 0,
            head_bytes: 0,
            read_timer: Box::pin(sleep_until(deadline)),
            write_timer: None,
            linger: None,
            has_ended: false,
        };
        (stream, returned)
    }

    /// Updates the read state and its deadline after requests have arrived, got their response, or ended.
    fn update_read_state(&mut self) {
        let activity = self.shared.activity.load(Ordering::Relaxed);
        // In HTTP/2, a response that the client does not read blocks no write on the connection, so the write timeout
        // does not run. Therefore only requests without a response count as running.
        let running_requests = match self.http_version {
            HttpVersion::Http2 => &self.shared.unanswered,
            HttpVersion::Preface(_) | HttpVersion::Http1 => &self.shared.unfinished,
        };
        if matches!(self.read_state, ReadState::Ending) {
        } else if running_requests.load(Ordering::Relaxed) > 0 {
            self.read_state = ReadState::RequestRunning;
            self.head_bytes = 0;
        } else if activity != self.seen_activity || matches!(self.read_state, ReadState::RequestRunning) {
            self.read_state = ReadState::NextRequest(Instant::now() + self.timeouts.idle);
            self.head_bytes = 0;
        }
        self.seen_activity = activity;
    }

    /// Records the received bytes, and acquires the connection slots or the request bytes that they need.
    fn record_read(&mut self, bytes: &[u8]) -> Result<(), Exhausted> {
        if let HttpVersion::Preface(matched) = self.http_version {
            let expected = &PREFACE[matched..];
            let common = expected.len().min(bytes.len());
            self.http_version = if bytes[..common] != expected[..common] {
                HttpVersion::Http1
            } else if common == expected.len() {
                self.shared.is_http2.store(true, Ordering::Relaxed);
                // An HTTP/2 connection has no HTTP/1 header block to wait for. The idle timeout applies until a request
                // arrives.
                self.read_state = ReadState::NextRequest(Instant::now() + self.timeouts.idle);
                self.permit.become_http2()?;
                HttpVersion::Http2
            } else {
                HttpVersion::Preface(matched + common)
            };
        }
        if matches!(self.http_version, HttpVersion::Http2) {
            return Ok(());
        }
        self.read_state = match self.read_state {
            // Keep the deadline that was set at the start of the connection, or by the first byte of this header block.
            ReadState::FirstRequest(deadline) | ReadState::Headers(deadline) => ReadState::Headers(deadline),
            ReadState::NextRequest(_) => ReadState::Headers(Instant::now() + self.timeouts.head),
            ReadState::RequestRunning => ReadState::RequestRunning,
            ReadState::Ending => ReadState::Ending,
        };
        if matches!(self.read_state, ReadState::Headers(_)) {
            self.head_bytes += bytes.len();
            if self.head_bytes > FREE_HEAD {
                self.permit.allow_large_head()?;
            }
        }
        Ok(())
    }

    /// Ends a connection that does not get the connection slots or the request bytes that it needs: over HTTP/1 with a
    /// 503, which is held if the client has returned early, and over HTTP/2 without a response.
    fn refuse(&mut self, cx: &mut Context<'_>) -> io::Error
    where
        T: AsyncWrite + Unpin,
    {
        if self.shared.is_http2() {
            self.service.record_http2_refused();
        } else if self.write_timer.is_none() {
            let answer = self.service.head_refused_response();
            let began = match self.read_state {
                ReadState::Headers(deadline) => deadline - self.timeouts.head,
                _ => Instant::now(),
            };
            match self.permit.client().and_then(|client| self.service.hold_refused_head(client, began)) {
                Some(held) => self.shared.park(ParkedRefusal::new(answer, held)),
                None => {
                    let _ = self.io.pin().poll_write(cx, &answer);
                }
            }
        }
        self.has_ended = true;
        io::Error::other(Exhausted)
    }

    /// Whether the current deadline has passed.
    fn is_timed_out(&mut self, cx: &mut Context<'_>) -> bool {
        let deadline = match self.read_state {
            ReadState::RequestRunning | ReadState::Ending => return false,
            ReadState::FirstRequest(deadline) | ReadState::NextRequest(deadline) | ReadState::Headers(deadline) => {
                deadline
            }
        };
        if self.read_timer.deadline() != deadline {
            self.read_timer.as_mut().reset(deadline);
        }
        self.read_timer.as_mut().poll(cx).is_ready()
    }

    /// Turns a write that takes too long into an error.
    fn time_out_write<R>(&mut self, cx: &mut Context<'_>, wrote: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if wrote.is_ready() {
            self.write_timer = None;
            return wrote;
        }
        let limit = self.timeouts.write;
        let timer = self.write_timer.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + limit)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for TimeoutStream<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.has_ended {
            return Poll::Ready(Ok(()));
        }
        this.update_read_state();
        // Read in steps that never fill hyper's buffer, so that hyper does not allocate a larger buffer.
        let before = buf.filled().len();
        let mut step = ReadBuf::new(buf.initialize_unfilled_to(MAX_READ_BYTES.min(buf.remaining())));
        match this.io.pin().poll_read(cx, &mut step) {
            Poll::Ready(Ok(())) => {
                let received = step.filled().len();
                buf.advance(received);
                let bytes = &buf.filled()[before..];
                if bytes.is_empty() {
                    this.has_ended = true;
                } else if let Err(Exhausted) = this.record_read(bytes) {
                    return Poll::Ready(Err(this.refuse(cx)));
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                // Usually, hyper does not read while a request of an HTTP/1 connection is running. Without this
                // condition, each response would cause a needless wake of its own task.
                if matches!(this.read_state, ReadState::RequestRunning) {
                    this.shared.connection_waker.register(cx.waker());
                }
                ready!(if this.is_timed_out(cx) { Poll::Ready(()) } else { Poll::Pending });
                if matches!(this.http_version, HttpVersion::Http2) {
                    // `serve_connection` checks `is_idle_expired`, and ends the connection with a GOAWAY.
                    this.read_state = ReadState::Ending;
                    this.shared.is_idle_expired.store(true, Ordering::Relaxed);
                    return Poll::Pending;
                }
                // No request has begun: close without a response.
                if !matches!(this.read_state, ReadState::Headers(_)) {
                    this.has_ended = true;
                    return Poll::Ready(Ok(()));
                }
                // Do not write into the middle of a response that is still being written.
                if matches!(this.http_version, HttpVersion::Http1) && this.write_timer.is_none() {
                    let answer = this.service.head_timeout_response();
                    let _ = this.io.pin().poll_write(cx, &answer);
                }
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TimeoutStream<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = this.io.pin().poll_write(cx, bytes);
        this.time_out_write(cx, wrote)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = this.io.pin().poll_write_vectored(cx, slices);
        this.time_out_write(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.get().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().io.pin().poll_flush(cx)
    }

    /// Closes the write side. Then, for a while, reads and discards what the client still sends.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.linger.is_none() {
            ready!(this.io.pin().poll_shutdown(cx))?;
            this.linger = Some(Linger { has_ended: this.has_ended, ..Linger::new(this.timeouts.linger) });
        }
        if let Some(linger) = &mut this.linger {
            ready!(linger.poll_discard(this.io.pin().get_mut(), cx));
            this.has_ended = true;
        }
        Poll::Ready(Ok(()))
    }
}

// === impl ReturnedStream ===

impl<T> ReturnedStream<T> {
    fn get(&self) -> &T {
        self.stream.as_ref().expect("the stream is present until this value is dropped")
    }
}

impl<T: Unpin> ReturnedStream<T> {
    fn pin(&mut self) -> Pin<&mut T> {
        Pin::new(self.stream.as_mut().expect("the stream is present until this value is dropped"))
    }
}

impl<T> Drop for ReturnedStream<T> {
    fn drop(&mut self) {
        if let (Some(stream), Some(sender)) = (self.stream.take(), self.sender.take()) {
            // Without a receiver, the stream is closed.
            let _ = sender.send(stream);
        }
    }
}

// === impl Linger ===

impl Linger {
    pub fn new(duration: Duration) -> Self {
        let until = Box::pin(sleep_until(Instant::now() + duration));
        Self { until, bytes_left: MAX_LINGER_BYTES, has_ended: false }
    }

    /// Reads and discards until the client has closed its side, or has sent too much, or the time is over.
    pub fn poll_discard<T: AsyncRead + Unpin>(&mut self, stream: &mut T, cx: &mut Context<'_>) -> Poll<()> {
        let mut scratch = [0; MAX_LINGER_READ_BYTES];
        while !self.has_ended && self.bytes_left > 0 && self.until.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut *stream).poll_read(cx, &mut buf) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    self.bytes_left = self.bytes_left.saturating_sub(buf.filled().len());
                }
                Poll::Ready(Ok(()) | Err(_)) => self.has_ended = true,
            }
        }
        Poll::Ready(())
    }
}
