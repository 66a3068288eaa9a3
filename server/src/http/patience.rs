//! How long a connection is waited for: for a request's headers, for the next request, for a reader of answers.
//!
//! hyper's own header timeout just closes, covers the time between requests too, and does not run while hyper-util
//! reads which version of HTTP it is. So the time is kept here, below both, and so is what a connection can buffer before
//! there is a request.

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
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::{
    budgets::{ConnectionPlace, FREE_HEAD},
    door::Service,
    quota::Exhausted,
};

/// How long clients are waited for.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// A request's headers must be whole in this time.
    pub head: Duration,
    /// And its body in this.
    pub body: Duration,
    /// How long a connection can stay without a request. In HTTP/2 pings do not count, nor does an answer that the
    /// client does not take.
    pub idle: Duration,
    /// How long an HTTP/2 connection that was idle can take to end: a request may have crossed the GOAWAY.
    pub goaway: Duration,
    /// A client that takes nothing of its answer for so long is gone.
    pub write: Duration,
    /// After an answer to a request that was not read whole the client may still be sending; a closed socket would
    /// answer that with a reset, which can destroy the answer on its way (RFC 9112, 9.6).
    pub linger: Duration,
}

/// What is read at once.
const READ_STEP: usize = 4096;

/// What is taken of a client that is still sending after its answer.
const LINGER_OCTETS: usize = 256 * 1024;
/// And of that at once, on the stack: a body that is refused mostly lies in the socket's buffer already.
const LINGER_STEP: usize = 32 * 1024;

/// What an HTTP/2 connection begins with (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What a connection's two ends know of each other: the octets below, the requests above.
#[derive(Default)]
pub struct Shared {
    /// Requests whose answer is not written.
    busy: AtomicUsize,
    /// Those of them that have no answer yet.
    working: AtomicUsize,
    /// Changes whenever a request comes, is answered, or a part of its answer is written.
    activity: AtomicU64,
    http2: AtomicBool,
    has_served: AtomicBool,
    /// The idle time of an HTTP/2 connection is over.
    idle_over: AtomicBool,
    /// The connection, which must look again when the last answer is out: hyper itself waits for octets alone.
    below: AtomicWaker,
}

/// Says, while it lives, that a request is being answered.
pub struct Answering {
    shared: Arc<Shared>,
    alone: bool,
    working: bool,
}

/// A stream that does not wait for ever.
pub struct Patient<T> {
    io: T,
    shared: Arc<Shared>,
    service: Service,
    times: Times,
    place: ConnectionPlace,
    version: Reading,
    waiting: Waiting,
    /// The activity when `waiting` began.
    activity: u64,
    /// Bytes of the HTTP/1 header block that is being read.
    head: usize,
    timer: Pin<Box<Sleep>>,
    stalled: Option<Pin<Box<Sleep>>>,
    linger: Option<Linger>,
    ended: bool,
}

/// Which HTTP it is.
#[derive(Clone, Copy)]
enum Reading {
    /// So many octets of the preface have come, and nothing else.
    Preface(usize),
    Http1,
    Http2,
}

/// What the next octets are waited for.
#[derive(Clone, Copy)]
enum Waiting {
    /// A request is being answered.
    Nothing,
    /// The end: the idle time of an HTTP/2 connection is over.
    End,
    /// The first request; nothing has come.
    First(Instant),
    /// A further request; nothing has come.
    Next(Instant),
    /// The rest of a request's headers.
    Head(Instant),
}

struct Linger {
    until: Pin<Box<Sleep>>,
    left: usize,
}

// === impl Times ===

impl Times {
    /// Headers and body by contract 1. The idle time is longer than proxies keep connections to their upstreams
    /// (NGINX: 60 s), so that they close first and no request meets a closed connection.
    pub const DEFAULT: Self = Self {
        head: Duration::from_secs(10),
        body: Duration::from_secs(30),
        idle: Duration::from_secs(75),
        // As long as a drain waits for requests that run.
        goaway: Duration::from_secs(35),
        write: Duration::from_secs(30),
        linger: Duration::from_secs(1),
    };
}

// === impl Shared ===

impl Shared {
    pub fn begin(self: &Arc<Self>) -> Answering {
        let others = self.busy.fetch_add(1, Ordering::Relaxed);
        self.working.fetch_add(1, Ordering::Relaxed);
        self.activity.fetch_add(1, Ordering::Relaxed);
        self.has_served.store(true, Ordering::Relaxed);
        Answering { shared: Arc::clone(self), alone: others == 0, working: true }
    }

    pub fn is_http2(&self) -> bool {
        self.http2.load(Ordering::Relaxed)
    }

    pub fn has_served(&self) -> bool {
        self.has_served.load(Ordering::Relaxed)
    }

    pub fn is_idle_over(&self) -> bool {
        self.idle_over.load(Ordering::Relaxed)
    }
}

// === impl Answering ===

impl Answering {
    /// Whether no other request of the connection was being answered when this one came.
    pub fn is_alone(&self) -> bool {
        self.alone
    }

    /// The answer is there; it is not written yet.
    pub fn answered(&mut self) {
        if std::mem::take(&mut self.working) {
            self.shared.working.fetch_sub(1, Ordering::Relaxed);
            self.wrote();
            self.shared.below.wake();
        }
    }

    /// A part of the answer is being written.
    pub fn wrote(&self) {
        self.shared.activity.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.answered();
        self.shared.busy.fetch_sub(1, Ordering::Relaxed);
        self.shared.below.wake();
    }
}

// === impl Patient ===

impl<T> Patient<T> {
    pub fn new(io: T, shared: Arc<Shared>, service: Service, place: ConnectionPlace) -> Self {
        let times = service.times();
        let deadline = Instant::now() + times.head;
        Self {
            io,
            shared,
            service,
            times,
            place,
            version: Reading::Preface(0),
            waiting: Waiting::First(deadline),
            activity: 0,
            head: 0,
            timer: Box::pin(sleep_until(deadline)),
            stalled: None,
            linger: None,
            ended: false,
        }
    }

    /// Brings `waiting` up to what has happened above.
    fn look(&mut self) {
        let activity = self.shared.activity.load(Ordering::Relaxed);
        // An answer that an HTTP/2 client does not take blocks its stream alone, which nothing here would notice.
        let busy = match self.version {
            Reading::Http2 => &self.shared.working,
            Reading::Preface(_) | Reading::Http1 => &self.shared.busy,
        };
        if matches!(self.waiting, Waiting::End) {
        } else if busy.load(Ordering::Relaxed) > 0 {
            self.waiting = Waiting::Nothing;
            self.head = 0;
        } else if activity != self.activity || matches!(self.waiting, Waiting::Nothing) {
            self.waiting = Waiting::Next(Instant::now() + self.times.idle);
            self.head = 0;
        }
        self.activity = activity;
    }

    /// Takes note of what came, and of what it costs.
    fn saw(&mut self, octets: &[u8]) -> Result<(), Exhausted> {
        if let Reading::Preface(matched) = self.version {
            let expected = &PREFACE[matched..];
            let common = expected.len().min(octets.len());
            self.version = if octets[..common] != expected[..common] {
                Reading::Http1
            } else if common == expected.len() {
                self.shared.http2.store(true, Ordering::Relaxed);
                // From now on any request counts, and no header block of HTTP/1 is waited for.
                self.waiting = Waiting::Next(Instant::now() + self.times.idle);
                self.place.become_http2()?;
                Reading::Http2
            } else {
                Reading::Preface(matched + common)
            };
        }
        if matches!(self.version, Reading::Http2) {
            return Ok(());
        }
        self.waiting = match self.waiting {
            // From the connection's beginning on.
            Waiting::First(deadline) | Waiting::Head(deadline) => Waiting::Head(deadline),
            Waiting::Next(_) => Waiting::Head(Instant::now() + self.times.head),
            Waiting::Nothing => Waiting::Nothing,
            Waiting::End => Waiting::End,
        };
        if matches!(self.waiting, Waiting::Head(_)) {
            self.head += octets.len();
            if self.head > FREE_HEAD {
                self.place.allow_large_head()?;
            }
        }
        Ok(())
    }

    /// Ends the connection; over HTTP/1 with a 503, over HTTP/2 without an answer.
    fn refuse(&mut self, cx: &mut Context<'_>) -> io::Error
    where
        T: AsyncWrite + Unpin,
    {
        if self.shared.is_http2() {
            self.service.http2_refused();
        } else if self.stalled.is_none() {
            let answer = self.service.head_refused();
            let _ = Pin::new(&mut self.io).poll_write(cx, &answer);
        }
        self.ended = true;
        io::Error::other(Exhausted)
    }

    /// Whether what is waited for did not come in time.
    fn late(&mut self, cx: &mut Context<'_>) -> bool {
        let deadline = match self.waiting {
            Waiting::Nothing | Waiting::End => return false,
            Waiting::First(deadline) | Waiting::Next(deadline) | Waiting::Head(deadline) => deadline,
        };
        if self.timer.deadline() != deadline {
            self.timer.as_mut().reset(deadline);
        }
        self.timer.as_mut().poll(cx).is_ready()
    }

    /// Turns a write that waits for too long into an error.
    fn written<R>(&mut self, cx: &mut Context<'_>, wrote: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if wrote.is_ready() {
            self.stalled = None;
            return wrote;
        }
        let limit = self.times.write;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + limit)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Patient<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(Ok(()));
        }
        this.look();
        // In steps that never fill hyper's buffer, which would make it take a larger one.
        let before = buf.filled().len();
        let mut step = ReadBuf::new(buf.initialize_unfilled_to(READ_STEP.min(buf.remaining())));
        match Pin::new(&mut this.io).poll_read(cx, &mut step) {
            Poll::Ready(Ok(())) => {
                let came = step.filled().len();
                buf.advance(came);
                let octets = &buf.filled()[before..];
                if octets.is_empty() {
                    this.ended = true;
                } else if let Err(Exhausted) = this.saw(octets) {
                    return Poll::Ready(Err(this.refuse(cx)));
                }
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                if matches!(this.waiting, Waiting::Nothing) {
                    this.shared.below.register(cx.waker());
                }
                ready!(if this.late(cx) { Poll::Ready(()) } else { Poll::Pending });
                if matches!(this.version, Reading::Http2) {
                    // The connection's task begins its end, with a GOAWAY.
                    this.waiting = Waiting::End;
                    this.shared.idle_over.store(true, Ordering::Relaxed);
                    return Poll::Pending;
                }
                // Nothing was asked: closing quietly is all there is to say.
                if !matches!(this.waiting, Waiting::Head(_)) {
                    this.ended = true;
                    return Poll::Ready(Ok(()));
                }
                // Not into the middle of an answer that is still being written.
                if matches!(this.version, Reading::Http1) && this.stalled.is_none() {
                    let answer = this.service.head_timed_out();
                    let _ = Pin::new(&mut this.io).poll_write(cx, &answer);
                }
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Patient<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, octets: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write(cx, octets);
        this.written(cx, wrote)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write_vectored(cx, slices);
        this.written(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    /// Says that nothing more comes, then takes what the client is still sending, for a while.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
            let until = Box::pin(sleep_until(Instant::now() + this.times.linger));
            this.linger = Some(Linger { until, left: LINGER_OCTETS });
        }
        let Some(linger) = &mut this.linger else { return Poll::Ready(Ok(())) };
        let mut scratch = [0; LINGER_STEP];
        while !this.ended && linger.left > 0 && linger.until.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut this.io).poll_read(cx, &mut buf) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {
                    linger.left = linger.left.saturating_sub(buf.filled().len());
                }
                Poll::Ready(Ok(()) | Err(_)) => this.ended = true,
            }
        }
        Poll::Ready(Ok(()))
    }
}
