//! The operator's spans: one for each reconcile, and inside of it one for each request to the API server, which is told of
//! the trace (W3C Trace Context) and can go on with it.

use std::task::{Context as TaskContext, Poll};

use futures::future::BoxFuture;
use http::{Request, Response};
use kube::{api::ObjectMeta, runtime::controller::Action};
use tower::{Layer, Service};
use tracing::{Instrument, Span, field::Empty};

use crate::error::Error;

/// Begins the span of a reconcile. None where spans are not exported.
pub(crate) fn reconcile(controller: &'static str, object: &ObjectMeta) -> Span {
    latchkey_trace::span!(
        "internal",
        "reconcile",
        otel.name = match controller {
            "app" => "reconcile App",
            _ => "reconcile Provider",
        },
        k8s.namespace.name = object.namespace,
        latchkey.object.name = object.name,
        latchkey.object.generation = object.generation,
        latchkey.outcome = Empty,
    )
}

/// Says how it ended, as the metric does.
pub(crate) fn reconciled(span: &Span, result: &Result<Action, Error>) {
    let outcome = result.as_ref().map_or_else(|error| error.kind().as_str(), |_| "success");
    span.record("latchkey.outcome", outcome);
    if result.is_err() {
        latchkey_trace::fail(span, outcome);
    }
}

/// Gives each request of a reconcile a span.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TracedLayer;

#[derive(Clone)]
pub(crate) struct Traced<S>(S);

/// What a request is about. Never its query, and never its body.
#[derive(Debug, PartialEq, Eq)]
struct Target<'a> {
    /// With the subresource.
    resource: String,
    namespace: Option<&'a str>,
    name: Option<&'a str>,
}

impl<S> Layer<S> for TracedLayer {
    type Service = Traced<S>;

    fn layer(&self, inner: S) -> Traced<S> {
        Traced(inner)
    }
}

impl<S, B, A> Service<Request<B>> for Traced<S>
where
    S: Service<Request<B>, Response = Response<A>, Future: Send + 'static>,
    S::Error: 'static,
    A: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let span = latchkey_trace::child!(
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
        if let Some(target) = Target::of(request.uri().path()) {
            span.record("otel.name", format!("{} {}", request.method(), target.resource));
            span.record("k8s.namespace.name", target.namespace);
            span.record("latchkey.object.name", target.name);
        }
        span.in_scope(|| latchkey_trace::inject(request.headers_mut()));
        let answer = self.0.call(request).instrument(span.clone());
        Box::pin(async move {
            let answer = answer.await;
            match &answer {
                Ok(answer) => {
                    span.record("http.response.status_code", answer.status().as_u16());
                    // That an object is not there is an answer like any other.
                    if answer.status().is_server_error() {
                        latchkey_trace::fail(&span, answer.status().as_str());
                    }
                }
                Err(_) => latchkey_trace::fail(&span, "no_answer"),
            }
            answer
        })
    }
}

// === impl Target ===

impl<'a> Target<'a> {
    /// Of the paths that the API server has (API Concepts, Resource URIs).
    fn of(path: &'a str) -> Option<Self> {
        let mut segments: Vec<&str> = path.trim_matches('/').split('/').collect();
        let prefix = match segments.first() {
            Some(&"api") => 2,
            Some(&"apis") => 3,
            Some(_) | None => return None,
        };
        segments.drain(..prefix.min(segments.len()));
        let (namespace, of_it) = match segments.as_slice() {
            ["namespaces", namespace, of_it @ ..] if !of_it.is_empty() => (Some(*namespace), of_it),
            all => (None, all),
        };
        match of_it {
            [resource] => Some(Self { resource: (*resource).to_owned(), namespace, name: None }),
            [resource, name] => Some(Self { resource: (*resource).to_owned(), namespace, name: Some(name) }),
            [resource, name, of_it] => {
                Some(Self { resource: format!("{resource}/{of_it}"), namespace, name: Some(name) })
            }
            [] | [_, _, _, ..] => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_about_what_its_path_says() {
        let target = |path| Target::of(path).map(|target| (target.resource, target.namespace, target.name));
        let found = |resource: &str, namespace, name| Some((resource.to_owned(), namespace, name));
        assert_eq!(target("/api/v1/namespaces/shop/secrets/login"), found("secrets", Some("shop"), Some("login")));
        assert_eq!(
            target("/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/shop/status"),
            found("apps/status", Some("shop"), Some("shop"))
        );
        assert_eq!(target("/apis/latchkey.dev/v1alpha1/apps"), found("apps", None, None));
        assert_eq!(target("/api/v1/namespaces/shop"), found("namespaces", None, Some("shop")));
        for other in ["/version", "/", "/api", "/api/v1", "/apis/latchkey.dev"] {
            assert_eq!(target(other), None, "{other}");
        }
    }
}
