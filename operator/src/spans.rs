//! The operator's spans: one for each reconcile, and inside it one for each request to the API server. The headers of
//! each request contain the trace context (W3C Trace Context), so that the API server can continue the trace.

use std::task::{Context as TaskContext, Poll};

use futures::future::BoxFuture;
use http::{Request, Response};
use kube::api::ObjectMeta;
use tower::{Layer, Service};
use tracing::{Instrument, Span, field::Empty};

use crate::{controller::Action, error::Error};

/// Creates the span of a reconcile. The span is disabled if spans are not exported.
pub(crate) fn reconcile_span(controller: &'static str, object: &ObjectMeta) -> Span {
    latchkey_telemetry::span!(
        "internal",
        "reconcile",
        otel.name = match controller {
            "app" => "reconcile App",
            "client" => "reconcile Client",
            _ => "reconcile Provider",
        },
        k8s.namespace.name = object.namespace,
        latchkey.object.name = object.name,
        latchkey.object.generation = object.generation,
        latchkey.outcome = Empty,
    )
}

/// Records the result of a reconcile, with the same values as the metric.
pub(crate) fn record_outcome(span: &Span, result: &Result<Action, Error>) {
    let outcome = result.as_ref().map_or_else(|error| error.kind().as_str(), |_| "success");
    span.record("latchkey.outcome", outcome);
    if result.is_err() {
        latchkey_telemetry::record_error(span, outcome);
    }
}

/// Creates a span for each request to the API server inside a reconcile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TraceLayer;

#[derive(Clone)]
pub(crate) struct TraceService<S>(S);

/// The object or list that a request reads or writes. It is taken only from the path, never from the query or the body.
#[derive(Debug, PartialEq, Eq)]
struct RequestTarget<'a> {
    /// The resource type, with the subresource if there is one: `apps` or `apps/status`.
    resource: String,
    namespace: Option<&'a str>,
    name: Option<&'a str>,
}

impl<S> Layer<S> for TraceLayer {
    type Service = TraceService<S>;

    fn layer(&self, inner: S) -> TraceService<S> {
        TraceService(inner)
    }
}

impl<S, RequestBody, ResponseBody> Service<Request<RequestBody>> for TraceService<S>
where
    S: Service<Request<RequestBody>, Response = Response<ResponseBody>, Future: Send + 'static>,
    S::Error: 'static,
    ResponseBody: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<RequestBody>) -> Self::Future {
        let span = latchkey_telemetry::child_span!(
            "client",
            "request",
            otel.name = Empty,
            http.request.method = request.method().as_str(),
            http.response.status_code = Empty,
            k8s.namespace.name = Empty,
            latchkey.object.name = Empty,
        );
        if span.is_disabled() {
            return Box::pin(self.0.call(request));
        }
        if let Some(target) = RequestTarget::from_path(request.uri().path()) {
            span.record("otel.name", format!("{} {}", request.method(), target.resource));
            span.record("k8s.namespace.name", target.namespace);
            span.record("latchkey.object.name", target.name);
        }
        span.in_scope(|| latchkey_telemetry::inject_context(request.headers_mut()));
        let response = self.0.call(request).instrument(span.clone());
        Box::pin(async move {
            let result = response.await;
            match &result {
                Ok(response) => {
                    span.record("http.response.status_code", response.status().as_u16());
                    // Only server errors are recorded, because a reconcile expects client errors such as 404.
                    if response.status().is_server_error() {
                        latchkey_telemetry::record_error(&span, response.status().as_str());
                    }
                }
                Err(_) => latchkey_telemetry::record_error(&span, "no_answer"),
            }
            result
        })
    }
}

// === impl RequestTarget ===

impl<'a> RequestTarget<'a> {
    /// Parses a path of the API server (Kubernetes API Concepts, Resource URIs).
    fn from_path(path: &'a str) -> Option<Self> {
        let mut segments: Vec<&str> = path.trim_matches('/').split('/').collect();
        let prefix = match segments.first() {
            Some(&"api") => 2,
            Some(&"apis") => 3,
            Some(_) | None => return None,
        };
        segments.drain(..prefix.min(segments.len()));
        let (namespace, segments) = match segments.as_slice() {
            ["namespaces", namespace, inside @ ..] if !inside.is_empty() => (Some(*namespace), inside),
            all => (None, all),
        };
        match segments {
            [resource] => Some(Self { resource: (*resource).to_owned(), namespace, name: None }),
            [resource, name] => Some(Self { resource: (*resource).to_owned(), namespace, name: Some(name) }),
            [resource, name, subresource] => {
                Some(Self { resource: format!("{resource}/{subresource}"), namespace, name: Some(name) })
            }
            [] | [_, _, _, ..] => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_of_a_request_comes_from_its_path() {
        let target =
            |path| RequestTarget::from_path(path).map(|target| (target.resource, target.namespace, target.name));
        let expected = |resource: &str, namespace, name| Some((resource.to_owned(), namespace, name));
        assert_eq!(target("/api/v1/namespaces/shop/secrets/login"), expected("secrets", Some("shop"), Some("login")));
        assert_eq!(
            target("/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/shop/status"),
            expected("apps/status", Some("shop"), Some("shop"))
        );
        assert_eq!(target("/apis/latchkey.dev/v1alpha1/apps"), expected("apps", None, None));
        assert_eq!(target("/api/v1/namespaces/shop"), expected("namespaces", None, Some("shop")));
        for other in ["/version", "/", "/api", "/api/v1", "/apis/latchkey.dev"] {
            assert_eq!(target(other), None, "{other}");
        }
    }
}
