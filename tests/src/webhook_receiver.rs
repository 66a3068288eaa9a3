//! A receiver of webhooks: it records the requests, and sends the replies that the test sets.

use std::{
    collections::{HashSet, VecDeque},
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use anyhow::Result;
use aws_lc_rs::hmac;
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::{
    body::{Body, Frame, Incoming, SizeHint},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};

use crate::{eventually, process, smtp::listen};

/// Time limit for events to arrive. An event takes less than a second, longer on a loaded machine. The limit also
/// covers the retry of a failed delivery after five seconds.
const EVENT_LIMIT: Duration = Duration::from_secs(60);

/// The announced length of a body that never comes.
const STALLED_BODY: u64 = 10;
/// A part of a body that never ends.
const ENDLESS_PART: &[u8] = &[b'x'; 4096];

/// How the receiver responds to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Respond(StatusCode, HeaderMap),
    /// Announces a body, sends nothing of it, and keeps the connection open.
    Stall(StatusCode),
    /// Sends a body that never ends.
    Flood(StatusCode),
    /// Reads the request, and does not respond until the client closes the connection.
    Hang,
    /// Reads the request, and closes the connection without a response.
    Disconnect,
}

/// A request that arrived completely.
#[derive(Clone, Debug)]
pub struct ReceivedEvent {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub text: String,
    /// The body if it is JSON, otherwise null.
    pub body: Value,
    pub at: Instant,
    /// When the request arrived, in Unix seconds.
    pub unix_time: u64,
}

/// A running receiver. It ends, with all its connections, when this value is dropped.
pub struct WebhookReceiver {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    state: Mutex<State>,
}

struct State {
    events: Vec<ReceivedEvent>,
    /// The replies to the next requests.
    script: VecDeque<Reply>,
    /// The reply to each request after all replies of the script have been sent.
    default: Reply,
    in_flight: usize,
    max_in_flight: usize,
}

/// The body of a response.
enum ReplyBody {
    Empty,
    Stalled,
    Endless,
}

/// A request in flight. Dropping this value counts the request as ended, even if the client has disconnected.
struct InFlight<'a>(&'a Shared);

// === impl Reply ===

impl Reply {
    /// A response without headers and body.
    pub fn status(status: u16) -> Self {
        Self::Respond(StatusCode::from_u16(status).expect("a status"), HeaderMap::new())
    }

    /// Adds a header to a response.
    pub fn with_header(self, name: &'static str, value: &str) -> Self {
        match self {
            Self::Respond(status, mut headers) => {
                headers.insert(HeaderName::from_static(name), HeaderValue::from_str(value).expect("a header value"));
                Self::Respond(status, headers)
            }
            other => panic!("{other:?} has no headers"),
        }
    }
}

// === impl ReplyBody ===

impl ReplyBody {
    fn with_status(self, status: StatusCode) -> Response<Self> {
        let mut response = Response::new(self);
        *response.status_mut() = status;
        response
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match *self {
            Self::Empty => Poll::Ready(None),
            Self::Stalled => Poll::Pending,
            Self::Endless => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(ENDLESS_PART))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Empty)
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Stalled => SizeHint::with_exact(STALLED_BODY),
            Self::Endless => SizeHint::default(),
        }
    }
}

// === impl ReceivedEvent ===

impl ReceivedEvent {
    /// The id of the event, which is the same for each attempt.
    #[track_caller]
    pub fn id(&self) -> &str {
        self.header("webhook-id")
    }

    /// When the attempt was made according to the server, in Unix seconds.
    #[track_caller]
    pub fn timestamp(&self) -> u64 {
        self.header("webhook-timestamp").parse().expect("a Unix time")
    }

    /// The type of the event, for example `user.created`.
    #[track_caller]
    pub fn event_type(&self) -> &str {
        self.body["type"].as_str().unwrap_or_else(|| panic!("no type in {}", self.text))
    }

    /// The number of signatures.
    #[track_caller]
    pub fn signature_count(&self) -> usize {
        self.header("webhook-signature").split(' ').count()
    }

    /// Whether one of the signatures was made with this key (`whsec_…`), as Standard Webhooks defines it.
    #[track_caller]
    pub fn is_signed_with(&self, key: &str) -> bool {
        let key = key.strip_prefix("whsec_").and_then(|key| BASE64_STANDARD.decode(key).ok()).expect("a webhook key");
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let content = format!("{}.{}.{}", self.id(), self.header("webhook-timestamp"), self.text);
        self.header("webhook-signature").split(' ').any(|signature| {
            let signature = signature.strip_prefix("v1,").and_then(|signature| BASE64_STANDARD.decode(signature).ok());
            signature.is_some_and(|signature| hmac::verify(&key, content.as_bytes(), &signature).is_ok())
        })
    }

    #[track_caller]
    fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.headers));
        value.to_str().expect("ASCII text")
    }
}

// === impl WebhookReceiver ===

impl WebhookReceiver {
    /// Starts a receiver that accepts each event with 204.
    pub fn start() -> Result<Self> {
        Self::start_at(process::free_addr())
    }

    /// As [`Self::start`], at this address.
    pub fn start_at(addr: SocketAddr) -> Result<Self> {
        let listener = listen(addr)?;
        let state = State {
            events: Vec::new(),
            script: VecDeque::new(),
            default: Reply::status(204),
            in_flight: 0,
            max_in_flight: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state) });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self { addr, shared, accepting })
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn url(&self) -> String {
        format!("http://{}/hook", self.addr)
    }

    /// Sets the reply to each request from now on. Removes the script.
    pub fn set_reply(&self, reply: Reply) {
        let mut state = process::lock(&self.shared.state);
        state.script.clear();
        state.default = reply;
    }

    /// Sets the replies to the next requests. Later requests get the reply of [`Self::set_reply`].
    pub fn script(&self, replies: impl IntoIterator<Item = Reply>) {
        process::lock(&self.shared.state).script = replies.into_iter().collect();
    }

    /// The requests so far, in the order of their arrival.
    pub fn events(&self) -> Vec<ReceivedEvent> {
        process::lock(&self.shared.state).events.clone()
    }

    /// Removes the events that have arrived so far and returns them, in the order of their arrival. With this method, a
    /// test of very many events does not keep all of them in memory.
    pub fn take_events(&self) -> Vec<ReceivedEvent> {
        std::mem::take(&mut process::lock(&self.shared.state).events)
    }

    /// The number of different events so far.
    pub fn distinct_count(&self) -> usize {
        self.events().iter().map(|event| event.id().to_owned()).collect::<HashSet<_>>().len()
    }

    /// Waits until this number of requests have arrived. Returns all that have arrived.
    pub async fn wait_for(&self, requests: usize) -> Vec<ReceivedEvent> {
        let arrived = || async {
            let events = self.events();
            (events.len() >= requests).then_some(events)
        };
        eventually(&format!("{requests} requests with events"), EVENT_LIMIT, arrived).await
    }

    /// Waits until this number of different events have arrived.
    pub async fn wait_for_distinct(&self, events: usize) {
        let arrived = || async { (self.distinct_count() >= events).then_some(()) };
        eventually(&format!("{events} different events"), EVENT_LIMIT, arrived).await;
    }

    /// The highest number of requests in flight at the same time since the start or since
    /// [`Self::reset_max_in_flight`].
    pub fn max_in_flight(&self) -> usize {
        process::lock(&self.shared.state).max_in_flight
    }

    pub fn reset_max_in_flight(&self) {
        let mut state = process::lock(&self.shared.state);
        state.max_in_flight = state.in_flight;
    }
}

impl Drop for WebhookReceiver {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // When this task is aborted, the set is dropped, which ends the open connections.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        }
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let service = service_fn(|request| respond(&shared, request));
    drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
}

async fn respond(shared: &Shared, request: Request<Incoming>) -> io::Result<Response<ReplyBody>> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    let event = ReceivedEvent {
        method: head.method,
        path: head.uri.path().to_owned(),
        headers: head.headers,
        body: serde_json::from_str(&text).unwrap_or_default(),
        text,
        at: Instant::now(),
        unix_time: jsonwebtoken::get_current_timestamp(),
    };
    let (reply, _in_flight) = shared.record(event);
    match reply {
        Reply::Respond(status, headers) => {
            let mut response = ReplyBody::Empty.with_status(status);
            *response.headers_mut() = headers;
            Ok(response)
        }
        Reply::Stall(status) => Ok(ReplyBody::Stalled.with_status(status)),
        Reply::Flood(status) => Ok(ReplyBody::Endless.with_status(status)),
        // hyper drops this future when the client closes the connection.
        Reply::Hang => std::future::pending().await,
        Reply::Disconnect => Err(io::Error::other("the test closes the connection")),
    }
}

// === impl Shared ===

impl Shared {
    fn record(&self, event: ReceivedEvent) -> (Reply, InFlight<'_>) {
        let mut state = process::lock(&self.state);
        state.events.push(event);
        state.in_flight += 1;
        state.max_in_flight = state.max_in_flight.max(state.in_flight);
        let reply = state.script.pop_front().unwrap_or_else(|| state.default.clone());
        (reply, InFlight(self))
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        process::lock(&self.0.state).in_flight -= 1;
    }
}
