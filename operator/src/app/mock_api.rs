//! A mock API server with a script of expected calls: it panics on every call that is not the next in the script.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{Method, Request, Response, StatusCode};
use kube::{
    Client,
    client::Body,
    core::DeserializeGuard,
    runtime::reflector::store::{self, Writer},
};
use latchkey_crds::app::App;
use serde_json::{Value, json};
use time::OffsetDateTime;

use crate::{
    client::changes::AppTriggers,
    context::Context,
    error::Failures,
    facts::Settings,
    metrics::Metrics,
    monitor::Monitor,
    quota::QuotaLimits,
    rate_limiter::RateLimiter,
    release::{REQUEST_DRAIN_SECONDS, Releases},
    report_throttle::ReportThrottle,
    watch::{ClusterState, Namespaces, ReconcileQueue},
    written_statuses::WrittenStatuses,
};

/// A call that the mock API server received.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedCall {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Value,
}

type MockResponse = Box<dyn FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send>;

/// The script (the expected calls in order, with their responses), and the received calls.
#[derive(Clone, Default)]
pub(crate) struct MockApi {
    expected: Arc<Mutex<VecDeque<(Method, String, MockResponse)>>>,
    calls: Arc<Mutex<Vec<ReceivedCall>>>,
}

impl MockApi {
    pub(crate) fn expect(
        self,
        method: Method,
        path: &str,
        response: impl FnOnce(&ReceivedCall) -> (StatusCode, Value) + Send + 'static,
    ) -> Self {
        self.expected.lock().unwrap().push_back((method, path.to_owned(), Box::new(response)));
        self
    }

    pub(crate) fn client(&self) -> Client {
        let script = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let script = script.clone();
            async move { Ok::<_, Infallible>(script.respond(request).await) }
        });
        Client::new(service, "latchkey")
    }

    /// Returns the received calls. Panics if the script expects more calls.
    #[track_caller]
    pub(crate) fn finish(&self) -> Vec<ReceivedCall> {
        let left = self
            .expected
            .lock()
            .unwrap()
            .iter()
            .map(|(method, path, _)| format!("{method} {path}"))
            .collect::<Vec<_>>();
        assert!(left.is_empty(), "these were never called: {left:?}");
        self.calls.lock().unwrap().clone()
    }

    async fn respond(&self, request: Request<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let bytes = body.collect_bytes().await.unwrap();
        let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
        let call = ReceivedCall { method: head.method, path: head.uri.path().to_owned(), body };
        self.calls.lock().unwrap().push(call.clone());
        let next = self.expected.lock().unwrap().pop_front();
        let (status, body) = match next {
            Some((method, path, response)) if (&method, &path) == (&call.method, &call.path) => response(&call),
            other => {
                let expected = other.map(|(method, path, _)| format!("{method} {path}"));
                panic!("{} {} is not what was expected: {expected:?}", call.method, call.path);
            }
        };
        Response::builder().status(status).body(Body::from(body.to_string().into_bytes())).unwrap()
    }
}

/// Returns an error response of the API server.
pub(crate) fn api_error(status: StatusCode, reason: &str, name: &str) -> (StatusCode, Value) {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status.as_u16(), "reason": reason,
        "message": format!("{name}: {reason}"), "details": { "name": name },
    });
    (status, body)
}

pub(crate) fn not_found(name: &str) -> (StatusCode, Value) {
    api_error(StatusCode::NOT_FOUND, "NotFound", name)
}

/// Returns the context of an installation in the namespace `latchkey`, without servers, and the writer with which a
/// test adds Apps to the store of the context.
pub(crate) fn context(client: Client) -> (Context, Writer<DeserializeGuard<App>>) {
    let (apps, writer) = store::store();
    let (providers, _) = store::store();
    let context = Context {
        settings: Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false },
        namespace: "latchkey".to_owned(),
        creates_client_secrets: true,
        reporter: Context::reporter("operator-0"),
        client,
        objects: ClusterState::new(apps, providers, Namespaces::default(), QuotaLimits::default()),
        reconcile_queue: ReconcileQueue::new().0,
        monitor: Monitor::without_pods(),
        rate_limiter: RateLimiter::new(),
        client_rate_limiter: RateLimiter::new(),
        app_triggers: AppTriggers::default(),
        written_statuses: WrittenStatuses::default(),
        progress_throttle: ReportThrottle::default(),
        releases: Releases::default(),
        request_drain: Duration::from_secs(REQUEST_DRAIN_SECONDS),
        failures: Failures::default(),
        metrics: Metrics::default(),
        now: || OffsetDateTime::UNIX_EPOCH,
    };
    (context, writer)
}
