//! An API server that follows a script: it refuses every call that is not the next one of it.

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
    runtime::reflector::store::{self, Writer},
};
use latchkey_crds::app::App;
use serde_json::{Value, json};
use time::OffsetDateTime;

use crate::{
    app::status::{Told, Written},
    context::Context,
    error::Failures,
    facts::Settings,
    metrics::Metrics,
    pace::Pace,
    probe::Probe,
    quota::Limits,
    release::{REQUESTS_END_SECONDS, Releases},
    watch::{Guarded, Objects, Wakes},
};

/// A call that came.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) body: Value,
}

type Answer = Box<dyn FnOnce(&Call) -> (StatusCode, Value) + Send>;

/// The calls that are expected, in their order, with what is answered.
#[derive(Clone, Default)]
pub(crate) struct Script {
    expected: Arc<Mutex<VecDeque<(Method, String, Answer)>>>,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Script {
    pub(crate) fn expect(
        self,
        method: Method,
        path: &str,
        answer: impl FnOnce(&Call) -> (StatusCode, Value) + Send + 'static,
    ) -> Self {
        self.expected.lock().unwrap().push_back((method, path.to_owned(), Box::new(answer)));
        self
    }

    pub(crate) fn client(&self) -> Client {
        let script = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let script = script.clone();
            async move { Ok::<_, Infallible>(script.answer(request).await) }
        });
        Client::new(service, "latchkey")
    }

    /// What was called. Fails where the script has more.
    #[track_caller]
    pub(crate) fn calls(&self) -> Vec<Call> {
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

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let octets = body.collect_bytes().await.unwrap();
        let body = if octets.is_empty() { Value::Null } else { serde_json::from_slice(&octets).unwrap() };
        let call = Call { method: head.method, path: head.uri.path().to_owned(), body };
        self.calls.lock().unwrap().push(call.clone());
        let next = self.expected.lock().unwrap().pop_front();
        let (status, answer) = match next {
            Some((method, path, answer)) if (&method, &path) == (&call.method, &call.path) => answer(&call),
            other => {
                let expected = other.map(|(method, path, _)| format!("{method} {path}"));
                panic!("{} {} is not what was expected: {expected:?}", call.method, call.path);
            }
        };
        Response::builder().status(status).body(Body::from(answer.to_string().into_bytes())).unwrap()
    }
}

/// A refusal as the API server writes it.
pub(crate) fn refusal(status: StatusCode, reason: &str, name: &str) -> (StatusCode, Value) {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status.as_u16(), "reason": reason,
        "message": format!("{name}: {reason}"), "details": { "name": name },
    });
    (status, body)
}

pub(crate) fn not_found(name: &str) -> (StatusCode, Value) {
    refusal(StatusCode::NOT_FOUND, "NotFound", name)
}

/// A context of an install in `latchkey` with no server, and what writes its store of Apps.
pub(crate) fn context(client: Client) -> (Context, Writer<Guarded<App>>) {
    let (apps, writer) = store::store();
    let (providers, _) = store::store();
    let context = Context {
        settings: Settings { base_url: "https://auth.example.com".parse().unwrap(), allow_insecure: false },
        namespace: "latchkey".to_owned(),
        reporter: Context::reporter("operator-0"),
        client,
        objects: Objects::new(apps, providers, Limits::default()),
        wakes: Wakes::new().0,
        probe: Probe::deaf(),
        pace: Pace::new(),
        written: Written::default(),
        told: Told::default(),
        releases: Releases::default(),
        requests_end: Duration::from_secs(REQUESTS_END_SECONDS),
        failures: Failures::default(),
        metrics: Metrics::default(),
        now: || OffsetDateTime::UNIX_EPOCH,
    };
    (context, writer)
}
