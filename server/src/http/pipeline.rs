//! The request pipeline of every listener: request id, route, log line, response headers, and handling of panics.

use std::{future::Future, net::IpAddr, panic::AssertUnwindSafe, pin::Pin, sync::Arc, time::Duration};

use futures::FutureExt;
use http::{
    HeaderMap, HeaderValue, Method, Request, StatusCode, Version,
    header::{CONNECTION, CONTENT_LENGTH, USER_AGENT, X_CONTENT_TYPE_OPTIONS},
    request::Parts,
};
use hyper::body::Body as _;
use latchkey_crds::types::AppId;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span, debug, error, info, info_span, warn};

use super::{
    budgets::{Budgets, ConnectionPermit, ConnectionSlots, SlotPermit},
    cors::Cors,
    error::{ErrorChain, OVER_BUDGET_RETRY_AFTER, Problem, ReportedProblem},
    metrics::{HttpMetrics, method_label},
    parked::http1_bytes,
    quota::Exhausted,
    refusals::{HeldRefusal, HoldPlace},
    request::InboundRequest,
    request_span,
    response::{Body, Response, X_REQUEST_ID, full_body},
    routes::RouteTable,
    serve::IncomingBody,
    timeouts::Timeouts,
};
use crate::{
    config::Apps,
    domain::{
        app::App,
        client::{ClientAddress, ClientInfo},
    },
    state::State,
};

/// Maximum number of characters of `User-Agent` that a request keeps. The session store cuts this text to 512 bytes.
const MAX_USER_AGENT_CHARS: usize = 512;
/// The maximum length of an incoming request id. A longer id is replaced (specification: HTTP API, Conventions).
const MAX_REQUEST_ID_CHARS: usize = 128;

/// The endpoints of a listener with everything they need to serve connections.
#[derive(Clone)]
pub struct Service {
    pipeline: Arc<dyn DynPipeline>,
    slots: Arc<ConnectionSlots>,
    /// The requests that are being handled. They continue when their client disconnects, so that they finish what they
    /// started.
    running: TaskTracker,
    timeouts: Timeouts,
}

/// The result of routing.
pub enum Lookup<R> {
    Route {
        route: R,
        app: Option<Arc<App>>,
        /// The texts at the placeholders of the path except `{APPID}`, in their order.
        path_parameters: Vec<String>,
    },
    /// The route does not support the method.
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
    /// The path belongs to an endpoint, but no App has the appID in the path.
    AppNotFound {
        route: R,
    },
    NotFound,
}

/// The endpoints of one listener.
pub trait Endpoints: Send + Sync + 'static {
    type Route: Copy + Send + Sync + 'static;

    /// The name of the listener in metrics and logs.
    const LISTENER: &'static str;
    /// Whether the requests of the listener get spans, if spans are exported.
    const TRACED: bool = true;
    /// Whether every client of the listener can decide which traces are sampled. If false, the settings decide which
    /// clients can.
    const TRUSTS_SAMPLING: bool = false;
    /// Whether refusals of large header blocks can be held. Their route is not known.
    const HOLDS_REFUSED_HEADS: bool = false;

    fn find(&self, method: &Method, path: &str) -> Lookup<Self::Route>;

    fn name(route: Self::Route) -> &'static str;

    /// The path of the route with its placeholders.
    fn path_template(_: Self::Route) -> Option<&'static str> {
        None
    }

    /// Whether the platform (a probe, a scrape or the ingress) calls the route so often that its requests are logged
    /// only at level debug.
    fn is_logged_at_debug(route: Self::Route) -> bool;

    /// Whether refusals on the route can be held (delayed). A held refusal occupies a connection, and only the public
    /// listener has enough connections.
    fn can_hold_refusal(_: Self::Route) -> bool {
        false
    }

    /// Whether responses of the route carry CORS headers.
    fn has_cors(_: Self::Route) -> bool {
        true
    }

    /// Whether web pages of OpenID Connect clients call the route.
    fn is_for_clients(_: Self::Route) -> bool {
        false
    }

    /// Handles a request; `app` is set if the route has an App.
    fn call(
        &self,
        route: Self::Route,
        app: Option<Arc<App>>,
        request: InboundRequest,
    ) -> impl Future<Output = Result<Response, Problem>> + Send;
}

/// The request pipeline without its type parameters.
trait DynPipeline: Send + Sync {
    fn handle(
        self: Arc<Self>,
        request: Request<IncomingBody>,
        peer: IpAddr,
        is_alone: bool,
        body_timeout: Duration,
    ) -> Pin<Box<dyn Future<Output = PipelineResponse> + Send>>;

    /// The bytes of the response to a request whose headers are not received in time.
    fn head_timeout_response(&self) -> Vec<u8>;

    /// The bytes of the response to a request whose headers do not fit the memory budget.
    fn head_refused_response(&self) -> Vec<u8>;

    /// Decides until when that response is held. `began`: when the header block began.
    fn hold_refused_head(&self, client: ClientAddress, began: Instant) -> Option<HeldRefusal>;

    fn budgets(&self) -> &Budgets;

    fn is_proxy(&self, peer: IpAddr) -> bool;

    /// The metrics and the name of the listener.
    fn metrics(&self) -> (&HttpMetrics, &'static str);
}

/// A response, and how long it is held before it is sent.
pub(super) struct PipelineResponse {
    pub(super) response: Response,
    pub(super) held: Option<HeldRefusal>,
}

/// A handler panicked; the panic hook has logged the location.
#[derive(Debug, thiserror::Error)]
#[error("the handler panicked")]
struct HandlerPanicked;

/// What the response, the log, the metrics and the spans need to know about a request.
struct RequestContext<R> {
    id: String,
    started: Instant,
    method: Method,
    version: Version,
    client_ip: IpAddr,
    client_address: ClientAddress,
    /// `None` if nothing is at the path.
    route: Option<R>,
    route_name: &'static str,
    app_id: Option<AppId>,
    cors: Cors,
    /// The span that is exported.
    trace_span: Span,
    /// The span of log lines.
    log_span: Span,
}

struct Pipeline<E, S> {
    endpoints: E,
    state: Arc<State<S>>,
    metrics: HttpMetrics,
    budgets: Arc<Budgets>,
}

// === impl Lookup ===

impl<R> Lookup<R> {
    /// Converts the route.
    pub(super) fn map<T>(self, convert: impl FnOnce(R) -> T) -> Lookup<T> {
        match self {
            Self::Route { route, app, path_parameters } => {
                Lookup::Route { route: convert(route), app, path_parameters }
            }
            Self::WrongMethod { route, app, allow } => Lookup::WrongMethod { route: convert(route), app, allow },
            Self::Options { route, app, allow } => Lookup::Options { route: convert(route), app, allow },
            Self::AppNotFound { route } => Lookup::AppNotFound { route: convert(route) },
            Self::NotFound => Lookup::NotFound,
        }
    }
}

impl<R: RouteTable> Lookup<R> {
    /// Finds the route and the App of a request.
    pub(super) fn find(apps: &Apps, method: &Method, path: &str) -> Self {
        let Some(matched) = R::find(path) else { return Self::NotFound };
        let route = matched.route_for(method);
        let app = match matched.app.map(|id| apps.get(id)) {
            Some(None) => return Self::AppNotFound { route: route.unwrap_or(matched.any_route()) },
            Some(Some(app)) => Some(app),
            None => None,
        };
        let allow = matched.allow();
        match route {
            Some(route) => {
                let path_parameters = matched.path_parameters.into_iter().map(str::to_owned).collect();
                Self::Route { route, app, path_parameters }
            }
            None if R::ACCEPTS_OPTIONS && method == Method::OPTIONS => {
                Self::Options { route: matched.any_route(), app, allow }
            }
            None => Self::WrongMethod { route: matched.any_route(), app, allow },
        }
    }
}

// === impl Service ===

impl Service {
    pub(super) fn new<E: Endpoints, S: Send + Sync + 'static>(
        endpoints: E,
        state: Arc<State<S>>,
        metrics: HttpMetrics,
        budgets: Arc<Budgets>,
        slots: Arc<ConnectionSlots>,
    ) -> Self {
        let pipeline = Arc::new(Pipeline { endpoints, state, metrics, budgets });
        Self { pipeline, slots, running: TaskTracker::new(), timeouts: Timeouts::DEFAULT }
    }

    /// Handles a request in its own task. The task keeps the slot of the connection. `is_alone`: no other request of
    /// the connection was running when this request arrived.
    pub(super) async fn handle(
        &self,
        request: Request<IncomingBody>,
        peer: IpAddr,
        is_alone: bool,
        slot: Arc<SlotPermit>,
    ) -> PipelineResponse {
        let response = Arc::clone(&self.pipeline).handle(request, peer, is_alone, self.timeouts.body);
        let response = response.inspect(move |_| drop(slot));
        // The pipeline catches panics of handlers. The task ends without a response only when the runtime shuts down.
        let no_response = |_| PipelineResponse { response: Problem::server_error().to_response(""), held: None };
        self.running.spawn(response).await.unwrap_or_else(no_response)
    }

    /// Waits for a connection slot.
    pub(super) async fn acquire_slot(&self) -> OwnedSemaphorePermit {
        self.slots.acquire_slot().await
    }

    /// Gives a free slot to a connection of the peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if the peer has its maximum number of connections.
    pub(super) fn admit(&self, slot: OwnedSemaphorePermit, peer: IpAddr) -> Result<ConnectionPermit, Exhausted> {
        let admitted = self.slots.admit(slot, peer, self.pipeline.is_proxy(peer), self.pipeline.budgets());
        if admitted.is_err() {
            let (metrics, listener) = self.pipeline.metrics();
            metrics.record_connection_refused(listener, "client");
        }
        admitted
    }

    pub(super) fn head_refused_response(&self) -> Vec<u8> {
        self.pipeline.head_refused_response()
    }

    pub(super) fn hold_refused_head(&self, client: ClientAddress, began: Instant) -> Option<HeldRefusal> {
        self.pipeline.hold_refused_head(client, began)
    }

    pub(super) fn record_http2_refused(&self) {
        let (metrics, listener) = self.pipeline.metrics();
        metrics.record_connection_refused(listener, "http2");
    }

    /// Records that a waiting connection was closed because other connections needed its slots.
    pub(super) fn record_waiting_closed(&self) {
        let (metrics, listener) = self.pipeline.metrics();
        metrics.record_connection_refused(listener, "waiting");
    }

    pub(super) fn head_timeout_response(&self) -> Vec<u8> {
        self.pipeline.head_timeout_response()
    }

    pub(super) fn track_connection(&self) -> super::metrics::GaugeGuard {
        let (metrics, listener) = self.pipeline.metrics();
        metrics.track_connection(listener)
    }

    /// Replaces the timeouts of the specification, for tests that wait for them.
    #[cfg(test)]
    pub(super) fn with_timeouts(self, timeouts: Timeouts) -> Self {
        Self { timeouts, ..self }
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    pub(super) fn listener(&self) -> &'static str {
        self.pipeline.metrics().1
    }

    /// Waits until all running requests have ended.
    pub(super) async fn wait_until_finished(&self) {
        self.running.close();
        self.running.wait().await;
    }
}

// === impl Pipeline ===

impl<E: Endpoints, S: Send + Sync + 'static> DynPipeline for Pipeline<E, S> {
    fn handle(
        self: Arc<Self>,
        request: Request<IncomingBody>,
        peer: IpAddr,
        is_alone: bool,
        body_timeout: Duration,
    ) -> Pin<Box<dyn Future<Output = PipelineResponse> + Send>> {
        Box::pin(async move { self.handle_request(request, peer, is_alone, body_timeout).await })
    }

    fn head_timeout_response(&self) -> Vec<u8> {
        self.metrics.record_head_timeout(E::LISTENER);
        let problem = Problem::invalid_request("the headers were not received in time");
        self.raw_response(&problem.with_status(StatusCode::REQUEST_TIMEOUT))
    }

    fn head_refused_response(&self) -> Vec<u8> {
        self.metrics.record_over_budget(E::LISTENER, "head");
        self.raw_response(&Problem::over_budget())
    }

    fn hold_refused_head(&self, client: ClientAddress, began: Instant) -> Option<HeldRefusal> {
        let refusals = self.budgets.refusals();
        let hold = || refusals.hold(client, began, Instant::now(), OVER_BUDGET_RETRY_AFTER, HoldPlace::Socket);
        E::HOLDS_REFUSED_HEADS.then(hold).flatten()
    }

    fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    fn is_proxy(&self, peer: IpAddr) -> bool {
        self.state.settings.is_trusted_proxy(peer)
    }

    fn metrics(&self) -> (&HttpMetrics, &'static str) {
        (&self.metrics, E::LISTENER)
    }
}

impl<E: Endpoints, S: Send + Sync + 'static> Pipeline<E, S> {
    /// The bytes of the response to an HTTP/1 client whose header block was not read completely.
    fn raw_response(&self, problem: &Problem) -> Vec<u8> {
        let id = self.state.env.new_uuid().to_string();
        let mut response = problem.to_response(&id);
        set_common_headers(&mut response, &Method::GET, Version::HTTP_11, true, &id);
        http1_bytes(response)
    }

    async fn handle_request(
        &self,
        request: Request<IncomingBody>,
        peer: IpAddr,
        is_alone: bool,
        body_timeout: Duration,
    ) -> PipelineResponse {
        let started = Instant::now();
        let _in_flight = self.metrics.track_request(E::LISTENER);
        self.budgets.refusals().log_omitted(started);
        let (parts, body) = request.into_parts();
        let client = self.client(&parts.headers, peer);
        let memory = self.budgets.begin_request(client.client_address(), is_alone, &parts);
        let lookup = self.endpoints.find(&parts.method, parts.uri.path());
        let context = self.request_context(started, &parts, peer, &client, &lookup);

        let result = match memory.map(|memory| (lookup, memory)) {
            Err(Exhausted) => Err(Problem::over_budget()),
            Ok((Lookup::Route { route, app, path_parameters }, memory)) => {
                let (method, headers, uri, id) = (parts.method, parts.headers, parts.uri, context.id.clone());
                let inbound =
                    InboundRequest { method, headers, uri, id, path_parameters, body, memory, body_timeout, client };
                let call = AssertUnwindSafe(self.endpoints.call(route, app, inbound)).catch_unwind();
                let call = call.instrument(context.log_span.clone()).instrument(context.trace_span.clone());
                call.await.unwrap_or_else(|_| Err(Problem::server_error().with_cause(HandlerPanicked)))
            }
            Ok((Lookup::WrongMethod { allow, .. }, _)) => Err(Problem::method_not_allowed(allow)),
            Ok((Lookup::Options { allow, .. }, _)) => Ok(context.cors.options(&parts.headers, allow)),
            Ok((Lookup::AppNotFound { .. }, _)) => Err(Problem::app_not_found()),
            Ok((Lookup::NotFound, _)) => Err(Problem::not_found()),
        };
        self.complete(&context, result)
    }

    fn request_context(
        &self,
        started: Instant,
        parts: &Parts,
        peer: IpAddr,
        client: &ClientInfo,
        lookup: &Lookup<E::Route>,
    ) -> RequestContext<E::Route> {
        let (route, app) = match lookup {
            Lookup::Route { route, app, .. }
            | Lookup::WrongMethod { route, app, .. }
            | Lookup::Options { route, app, .. } => (Some(*route), app.as_deref()),
            Lookup::AppNotFound { route } => (Some(*route), None),
            Lookup::NotFound => (None, None),
        };
        let id = request_id(&parts.headers).unwrap_or_else(|| self.state.env.new_uuid().to_string());
        let route_name = route.map_or("none", E::name);
        let trace_span = if E::TRACED {
            let trusted = E::TRUSTS_SAMPLING || self.state.settings.trusts_sampling(peer);
            let template = route.and_then(E::path_template);
            request_span::start_span(&parts.method, parts.version, &parts.headers, trusted, template, app)
        } else {
            Span::none()
        };
        let trace_id = latchkey_telemetry::trace_id(&trace_span).map(tracing::field::display);
        let log_span = info_span!("request", request_id = %id, route = route_name, trace_id);
        let cors = app
            .filter(|_| route.is_none_or(E::has_cors))
            .map_or(Cors::NoApp, |app| Cors::from_request(&parts.headers, app, route.is_some_and(E::is_for_clients)));
        RequestContext {
            id,
            started,
            method: parts.method.clone(),
            version: parts.version,
            client_ip: client.ip,
            client_address: client.client_address(),
            route,
            route_name,
            app_id: app.map(|app| app.id().clone()),
            cors,
            trace_span,
            log_span,
        }
    }

    /// Adds the headers that every response has, and records the response in spans, metrics and log.
    fn complete(&self, context: &RequestContext<E::Route>, result: Result<Response, Problem>) -> PipelineResponse {
        let (mut response, problem) = match result {
            Ok(mut response) => {
                let reported = response.extensions_mut().remove::<ReportedProblem>();
                (response, reported.map(|ReportedProblem(problem)| problem))
            }
            Err(problem) => (problem.to_response(&context.id), Some(Arc::new(problem))),
        };
        let closes_connection = problem.as_ref().is_some_and(|problem| problem.closes_connection);
        let (held, is_logged) = match problem {
            Some(problem) => self.record_problem(context, &problem, response.status()),
            None => (None, true),
        };
        context.cors.apply(response.headers_mut());
        set_common_headers(&mut response, &context.method, context.version, closes_connection, &context.id);

        let (status, duration) = (response.status(), context.started.elapsed());
        request_span::record_status(&context.trace_span, status);
        self.metrics.record_response(E::LISTENER, context.route_name, &context.method, status, duration);
        if is_logged {
            log_response::<E>(context, status, duration);
        }
        PipelineResponse { response, held }
    }

    /// Records an error in log and metrics. Returns how long the response is held, and whether the request is logged.
    fn record_problem(
        &self,
        context: &RequestContext<E::Route>,
        problem: &Problem,
        status: StatusCode,
    ) -> (Option<HeldRefusal>, bool) {
        let (mut held, mut is_logged) = (None, true);
        if let Some(retry_after) = problem.refusal_retry_after {
            let refusals = self.budgets.refusals();
            let now = Instant::now();
            is_logged = refusals.count_for_log(context.route_name, status, now);
            let place = match problem.closes_connection {
                false => Some(HoldPlace::Connection),
                true if context.version <= Version::HTTP_11 => Some(HoldPlace::Socket),
                // The unread body of the request would occupy the window that all requests of the connection share.
                true => None,
            };
            if let Some(place) = place.filter(|_| context.route.is_some_and(E::can_hold_refusal)) {
                held = refusals.hold(context.client_address, context.started, now, retry_after, place);
            }
        }
        if problem.closes_connection {
            self.metrics.record_over_budget(E::LISTENER, "request");
        }
        if is_logged {
            context.log_span.in_scope(|| log_problem(problem));
        }
        (held, is_logged)
    }

    fn client(&self, headers: &HeaderMap, peer: IpAddr) -> ClientInfo {
        // A field that is not text is replaced by an empty field. `client_ip` ends its search at an empty field.
        let forwarded = headers.get_all("x-forwarded-for").iter().map(|field| field.to_str().unwrap_or(""));
        let user_agent = headers.get(USER_AGENT).map(|agent| {
            String::from_utf8_lossy(agent.as_bytes()).chars().take(MAX_USER_AGENT_CHARS).collect::<String>()
        });
        ClientInfo {
            ip: self.state.settings.client_ip(peer, forwarded),
            user_agent: user_agent.filter(|agent| !agent.is_empty()),
        }
    }
}

/// The incoming request id if it is well-formed (specification: HTTP API, Conventions).
fn request_id(headers: &HeaderMap) -> Option<String> {
    let mut ids = headers.get_all(&X_REQUEST_ID).iter();
    let (Some(only), None) = (ids.next(), ids.next()) else { return None };
    let well_formed = |id: &str| {
        (1..=MAX_REQUEST_ID_CHARS).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    };
    only.to_str().ok().filter(|id| well_formed(id)).map(str::to_owned)
}

/// Logs an error with its cause: at level error or warn if its status is 5xx. Any other error is logged at level debug,
/// and only if it has a cause.
fn log_problem(problem: &Problem) {
    let cause = problem.cause.as_deref().map(|cause| ErrorChain(cause).to_string());
    let code = problem.code.as_str();
    if problem.status == StatusCode::INTERNAL_SERVER_ERROR {
        error!(code, cause, "a request failed");
    } else if problem.status.is_server_error() {
        warn!(code, cause, "a request could not be served now");
    } else if cause.is_some() {
        debug!(code, cause, "a request was refused");
    }
}

/// Writes the log line of a request.
fn log_response<E: Endpoints>(context: &RequestContext<E::Route>, status: StatusCode, duration: Duration) {
    macro_rules! line {
        ($level:ident) => {
            $level!(
                target: "access",
                request_id = %context.id,
                listener = E::LISTENER,
                route = context.route_name,
                method = method_label(&context.method),
                status = status.as_u16(),
                duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
                app = context.app_id.as_ref().map(tracing::field::display),
                client = %context.client_ip,
                trace_id = latchkey_telemetry::trace_id(&context.trace_span).map(tracing::field::display),
                "answered"
            )
        };
    }
    if context.route.is_some_and(E::is_logged_at_debug) { line!(debug) } else { line!(info) }
}

/// Adds the headers that every response has, and applies what HEAD and the version of HTTP require.
fn set_common_headers(response: &mut Response, method: &Method, version: Version, closes_connection: bool, id: &str) {
    let exact = response.body().size_hint().exact();
    let closes_connection =
        closes_connection || matches!(response.status(), StatusCode::REQUEST_TIMEOUT | StatusCode::PAYLOAD_TOO_LARGE);
    let headers = response.headers_mut();
    headers.insert(X_REQUEST_ID, HeaderValue::try_from(id).expect("a request id is ASCII"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // The rest of the request is not read, so the connection must close (RFC 9112, 9.3). HTTP/2 has no `Connection`
    // header.
    if closes_connection && version <= Version::HTTP_11 {
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
    full_body(bytes::Bytes::new())
}
