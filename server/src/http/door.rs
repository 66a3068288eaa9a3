//! What every request of every listener passes: its id, its route, its log line, its headers, and no panic.

use std::{future::Future, net::IpAddr, panic::AssertUnwindSafe, pin::Pin, sync::Arc, time::Duration};

use futures::FutureExt;
use http::{
    HeaderMap, HeaderValue, Method, Request, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, USER_AGENT, X_CONTENT_TYPE_OPTIONS},
};
use hyper::body::{Body as _, Incoming};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span, debug, error, info, info_span, warn};

use super::{
    budgets::{Budgets, ConnectionPlace, ConnectionPlaces, Place},
    cors::Cors,
    error::{Chain, Problem, RedirectedProblem},
    metrics::{HttpMetrics, method_name},
    patience::Times,
    quota::Exhausted,
    refusals::HeldRefusal,
    request::Inbound,
    response::{Body, Response, X_REQUEST_ID, full},
    traced,
};
use crate::{
    domain::{app::App, client::Caller},
    state::State,
};

/// How much of `User-Agent` is kept.
const USER_AGENT_CHARS: usize = 512;
/// The longest request id that is kept (contract, 1).
const REQUEST_ID_CHARS: usize = 128;

/// What a listener serves.
#[derive(Clone)]
pub struct Service {
    door: Arc<dyn Answer>,
    places: Arc<ConnectionPlaces>,
    /// Requests go on when their client hangs up: what they began, they finish.
    running: TaskTracker,
    times: Times,
}

/// Where a request leads.
pub enum Lookup<R> {
    Route {
        route: R,
        app: Option<Arc<App>>,
        /// What of the path says what it is about, beside the App.
        item: Option<String>,
    },
    /// The route does not take the method.
    WrongMethod {
        route: R,
        app: Option<Arc<App>>,
        allow: &'static str,
    },
    /// OPTIONS on a route of the public listener.
    Options {
        route: R,
        app: Option<Arc<App>>,
        allow: &'static str,
    },
    /// The path is that of an endpoint, but there is no such App.
    NoApp {
        route: R,
    },
    Nothing,
}

/// The endpoints of one listener.
pub trait Endpoints: Send + Sync + 'static {
    type Route: Copy + Send + Sync + 'static;

    /// The listener, in metrics and logs.
    const LISTENER: &'static str;
    /// Whether its requests have spans, where they are exported.
    const TRACED: bool = true;
    /// Whether its callers decide whether a trace is sampled.
    const TRUSTS_SAMPLING: bool = false;

    fn find(&self, method: &Method, path: &str) -> Lookup<Self::Route>;

    fn name(route: Self::Route) -> &'static str;

    /// Its path with placeholders.
    fn template(_: Self::Route) -> Option<&'static str> {
        None
    }

    /// Asked for every few seconds by the platform: logged only for debugging.
    fn is_noise(route: Self::Route) -> bool;

    /// Whether a refusal of the route can be held. It keeps its connection, of which only the public listener has enough.
    fn can_hold_refusal(_: Self::Route) -> bool {
        false
    }

    /// Whether answers of the route carry CORS headers.
    fn has_cors(_: Self::Route) -> bool {
        true
    }

    /// Answers; an App is given where the route has one.
    fn call(
        &self,
        route: Self::Route,
        app: Option<Arc<App>>,
        request: Inbound,
    ) -> impl Future<Output = Result<Response, Problem>> + Send;
}

/// A service as connections see it.
trait Answer: Send + Sync {
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        peer: IpAddr,
        alone: bool,
        body_time: Duration,
    ) -> Pin<Box<dyn Future<Output = Answered> + Send>>;

    /// What is written to a client whose headers did not come in time.
    fn head_timed_out(&self) -> Vec<u8>;

    /// What is written to a client whose headers do not fit the budget.
    fn head_refused(&self) -> Vec<u8>;

    fn budgets(&self) -> &Budgets;

    fn is_proxy(&self, peer: IpAddr) -> bool;

    fn metrics(&self) -> (&HttpMetrics, &'static str);
}

/// An answer, and whether it is held before it is sent.
pub(super) struct Answered {
    pub(super) response: Response,
    pub(super) held: Option<HeldRefusal>,
}

/// A handler broke; the panic hook has told where.
#[derive(Debug, thiserror::Error)]
#[error("the handler panicked")]
struct Panicked;

struct Door<E, S> {
    endpoints: E,
    state: Arc<State<S>>,
    metrics: HttpMetrics,
    budgets: Arc<Budgets>,
}

// === impl Service ===

impl Service {
    pub(super) fn new<E: Endpoints, S: Send + Sync + 'static>(
        endpoints: E,
        state: Arc<State<S>>,
        metrics: HttpMetrics,
        budgets: Arc<Budgets>,
        places: Arc<ConnectionPlaces>,
    ) -> Self {
        let door = Arc::new(Door { endpoints, state, metrics, budgets });
        Self { door, places, running: TaskTracker::new(), times: Times::DEFAULT }
    }

    /// Answers one request, in a task of its own, which keeps the place of its connection. `alone`: it is the only one of
    /// its connection.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        peer: IpAddr,
        alone: bool,
        place: Arc<Place>,
    ) -> Answered {
        let answer = Arc::clone(&self.door).answer(request, peer, alone, self.times.body);
        let answer = answer.inspect(move |_| drop(place));
        // Panics are caught inside; a task ends without an answer only when the runtime goes down.
        let broken = |_| Answered { response: Problem::server_error().respond(""), held: None };
        self.running.spawn(answer).await.unwrap_or_else(broken)
    }

    /// Waits until there is a place for a connection.
    pub(super) async fn free_place(&self) -> OwnedSemaphorePermit {
        self.places.free_place().await
    }

    /// Gives the place to a connection of that peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the peer has its number of connections.
    pub(super) fn admit(&self, free: OwnedSemaphorePermit, peer: IpAddr) -> Result<ConnectionPlace, Exhausted> {
        let admitted = self.places.admit(free, peer, self.door.is_proxy(peer), self.door.budgets());
        if admitted.is_err() {
            let (metrics, listener) = self.door.metrics();
            metrics.connection_refused(listener, "client");
        }
        admitted
    }

    pub(super) fn head_refused(&self) -> Vec<u8> {
        self.door.head_refused()
    }

    pub(super) fn http2_refused(&self) {
        let (metrics, listener) = self.door.metrics();
        metrics.connection_refused(listener, "http2");
    }

    pub(super) fn head_timed_out(&self) -> Vec<u8> {
        self.door.head_timed_out()
    }

    pub(super) fn connection(&self) -> super::metrics::Held {
        let (metrics, listener) = self.door.metrics();
        metrics.connection(listener)
    }

    /// With other times than the contract's, for tests that wait for them.
    #[cfg(test)]
    pub(super) fn with_times(self, times: Times) -> Self {
        Self { times, ..self }
    }

    pub(super) fn times(&self) -> Times {
        self.times
    }

    pub(super) fn listener(&self) -> &'static str {
        self.door.metrics().1
    }

    /// Resolves when every request that began has ended.
    pub(super) async fn finished(&self) {
        self.running.close();
        self.running.wait().await;
    }
}

// === impl Door ===

impl<E: Endpoints, S: Send + Sync + 'static> Answer for Door<E, S> {
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        peer: IpAddr,
        alone: bool,
        body_time: Duration,
    ) -> Pin<Box<dyn Future<Output = Answered> + Send>> {
        Box::pin(async move { self.pass(request, peer, alone, body_time).await })
    }

    fn head_timed_out(&self) -> Vec<u8> {
        self.metrics.head_timed_out(E::LISTENER);
        let problem = Problem::invalid_request("the headers did not come in time");
        self.without_request(&problem.with_status(StatusCode::REQUEST_TIMEOUT))
    }

    fn head_refused(&self) -> Vec<u8> {
        self.metrics.over_budget(E::LISTENER, "head");
        self.without_request(&Problem::over_budget())
    }

    fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    fn is_proxy(&self, peer: IpAddr) -> bool {
        self.state.settings.is_proxy(peer)
    }

    fn metrics(&self) -> (&HttpMetrics, &'static str) {
        (&self.metrics, E::LISTENER)
    }
}

impl<E: Endpoints, S: Send + Sync + 'static> Door<E, S> {
    /// The bytes of an answer to an HTTP/1 client when its request was not read.
    fn without_request(&self, problem: &Problem) -> Vec<u8> {
        let id = self.state.env.uuid().to_string();
        let body = problem.json(&id);
        let status = problem.status;
        let mut head = format!(
            "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncache-control: no-store\r\n\
             x-content-type-options: nosniff\r\nx-request-id: {id}\r\nconnection: close\r\ncontent-length: {}\r\n",
            status.as_str(),
            status.canonical_reason().unwrap_or_default(),
            body.len()
        )
        .into_bytes();
        for (name, value) in &problem.headers {
            head.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
        }
        [head, b"\r\n".to_vec(), body].concat()
    }

    async fn pass(&self, request: Request<Incoming>, peer: IpAddr, alone: bool, body_time: Duration) -> Answered {
        let began = Instant::now();
        let _in_flight = self.metrics.request_in_flight(E::LISTENER);
        self.budgets.refusals().report(began);
        let (parts, body) = request.into_parts();
        let id = request_id(&parts.headers).unwrap_or_else(|| self.state.env.uuid().to_string());
        let caller = self.caller(&parts.headers, peer);
        let (client, address) = (caller.ip, caller.address());
        let memory = self.budgets.request(address, alone, &parts);

        let lookup = self.endpoints.find(&parts.method, parts.uri.path());
        let (route, app) = match &lookup {
            Lookup::Route { route, app, .. }
            | Lookup::WrongMethod { route, app, .. }
            | Lookup::Options { route, app, .. } => (Some(*route), app.clone()),
            Lookup::NoApp { route } => (Some(*route), None),
            Lookup::Nothing => (None, None),
        };
        let name = route.map_or("none", E::name);
        let app_id = app.as_ref().map(|app| app.id().clone());
        let traced = if E::TRACED {
            let trusted = E::TRUSTS_SAMPLING || self.state.settings.trusts_sampling(peer);
            let template = route.and_then(E::template);
            traced::begin(&parts.method, parts.version, &parts.headers, trusted, template, app.as_deref())
        } else {
            Span::none()
        };
        let trace_id = latchkey_trace::trace_id(&traced).map(tracing::field::display);
        let span = info_span!("request", request_id = %id, route = name, trace_id);
        let cors = app
            .as_ref()
            .filter(|_| route.is_none_or(E::has_cors))
            .map_or(Cors::NoApp, |app| Cors::of(&parts.headers, &app.doc.allowed_origins));

        let method = parts.method;
        let version = parts.version;
        let answered = match memory.map(|memory| (lookup, memory)) {
            Err(Exhausted) => Err(Problem::over_budget()),
            Ok((Lookup::Route { route, app, item }, memory)) => {
                let (headers, uri) = (parts.headers, parts.uri);
                let inbound = Inbound { headers, uri, item, body, memory, body_time, caller };
                let call = AssertUnwindSafe(self.endpoints.call(route, app, inbound)).catch_unwind();
                let call = call.instrument(span.clone()).instrument(traced.clone());
                call.await.unwrap_or_else(|_| Err(Problem::server_error().because(Panicked)))
            }
            Ok((Lookup::WrongMethod { allow, .. }, _)) => Err(Problem::method_not_allowed(allow)),
            Ok((Lookup::Options { allow, .. }, _)) => Ok(cors.options(&parts.headers, allow)),
            Ok((Lookup::NoApp { .. }, _)) => Err(Problem::app_not_found()),
            Ok((Lookup::Nothing, _)) => Err(Problem::not_found()),
        };
        let (mut held, mut is_logged, mut closes) = (None, true, false);
        let (mut response, problem) = match answered {
            Ok(mut response) => {
                let redirected = response.extensions_mut().remove::<RedirectedProblem>();
                (response, redirected.map(|RedirectedProblem(problem)| problem))
            }
            Err(problem) => (problem.respond(&id), Some(Arc::new(problem))),
        };
        if let Some(problem) = problem {
            if let Some(retry_after) = problem.refused_for {
                let refusals = self.budgets.refusals();
                let now = Instant::now();
                is_logged = refusals.is_logged(name, response.status(), now);
                // One that ends its connection has slowed its client down already.
                if route.is_some_and(E::can_hold_refusal) && !problem.closes {
                    held = refusals.hold(address, began, now, retry_after);
                }
            }
            if problem.closes {
                closes = true;
                self.metrics.over_budget(E::LISTENER, "request");
            }
            if is_logged {
                span.in_scope(|| tell(&problem));
            }
        }
        cors.apply(response.headers_mut());
        finish(&mut response, &method, version, closes, &id);

        let status = response.status();
        traced::answered(&traced, status);
        let took = began.elapsed();
        self.metrics.answered(E::LISTENER, name, &method, status, took);
        let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        macro_rules! line {
            ($level:ident) => {
                $level!(
                    target: "access",
                    request_id = %id,
                    listener = E::LISTENER,
                    route = name,
                    method = method_name(&method),
                    status = status.as_u16(),
                    duration_ms,
                    app = app_id.as_ref().map(tracing::field::display),
                    client = %client,
                    trace_id,
                    "answered"
                )
            };
        }
        if is_logged {
            if route.is_some_and(E::is_noise) { line!(debug) } else { line!(info) }
        }
        Answered { response, held }
    }

    fn caller(&self, headers: &HeaderMap, peer: IpAddr) -> Caller {
        // A field that is not text ends the walk like any other that cannot be read.
        let forwarded = headers.get_all("x-forwarded-for").iter().map(|field| field.to_str().unwrap_or(""));
        let user_agent = headers
            .get(USER_AGENT)
            .map(|agent| String::from_utf8_lossy(agent.as_bytes()).chars().take(USER_AGENT_CHARS).collect::<String>());
        Caller {
            ip: self.state.settings.client_ip(peer, forwarded),
            user_agent: user_agent.filter(|agent| !agent.is_empty()),
        }
    }
}

/// An incoming id that has the form of one (contract, 1).
fn request_id(headers: &HeaderMap) -> Option<String> {
    let mut ids = headers.get_all(&X_REQUEST_ID).iter();
    let (Some(only), None) = (ids.next(), ids.next()) else { return None };
    let well_formed = |id: &str| {
        (1..=REQUEST_ID_CHARS).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    };
    only.to_str().ok().filter(|id| well_formed(id)).map(str::to_owned)
}

/// Logs what led to an error, once, where the fault is ours or of what we depend on.
fn tell(problem: &Problem) {
    let cause = problem.cause.as_deref().map(|cause| Chain(cause).to_string());
    let code = problem.code.as_str();
    if problem.status == StatusCode::INTERNAL_SERVER_ERROR {
        error!(code, cause, "a request failed");
    } else if problem.status.is_server_error() {
        warn!(code, cause, "a request could not be served now");
    } else if cause.is_some() {
        debug!(code, cause, "a request was refused");
    }
}

/// The headers that every answer carries, and what the method and the protocol want.
fn finish(response: &mut Response, method: &Method, version: Version, closes: bool, id: &str) {
    let exact = response.body().size_hint().exact();
    let closes = closes || matches!(response.status(), StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE);
    let headers = response.headers_mut();
    headers.insert(X_REQUEST_ID, HeaderValue::try_from(id).expect("a request id is ASCII"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // The rest of the body is not read (RFC 9112, 9.3). HTTP/2 has no such header.
    if closes && version <= Version::HTTP_11 {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if method == Method::HEAD {
        if let Some(length) = exact {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        *response.body_mut() = empty_body();
    }
}

fn empty_body() -> Body {
    full(bytes::Bytes::new())
}
