//! The span of a request, by the HTTP semantic conventions of OpenTelemetry. What stands in it: docs/operations.md.

use http::{HeaderMap, Method, StatusCode, Version};
use tracing::Span;

use super::metrics::method_name;
use crate::domain::app::App;

/// Begins a request's span, a child of the caller's where the headers name one. None where spans are not exported.
///
/// `trusted`: the caller decides whether the trace is sampled; otherwise the sampler does, as if the trace began here.
/// `template` is the route's, with its placeholders: a path could hold what nobody may know.
pub(super) fn begin(
    method: &Method,
    version: Version,
    headers: &HeaderMap,
    trusted: bool,
    template: Option<&'static str>,
    app: Option<&App>,
) -> Span {
    let span = latchkey_trace::span!(
        "server",
        "request",
        otel.name = tracing::field::Empty,
        http.request.method = tracing::field::Empty,
        http.route = template,
        http.response.status_code = tracing::field::Empty,
        url.scheme = "http",
        url.path = template,
        network.protocol.version = tracing::field::Empty,
        latchkey.app = app.map(|app| app.id().as_str()),
    );
    if span.is_disabled() {
        return span;
    }
    latchkey_trace::continue_from(&span, headers, trusted);
    // As the conventions name what is none of the usual ones.
    let method = match method_name(method) {
        "other" => "_OTHER",
        known => known,
    };
    span.record("http.request.method", method);
    let name = if method == "_OTHER" { "HTTP" } else { method };
    span.record("otel.name", template.map_or_else(|| name.to_owned(), |template| format!("{name} {template}")));
    span.record("network.protocol.version", if version == Version::HTTP_2 { "2" } else { "1.1" });
    span
}

/// Says how it was answered. What a client got wrong is no failure of ours.
pub(super) fn answered(span: &Span, status: StatusCode) {
    if span.is_disabled() {
        return;
    }
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        latchkey_trace::fail(span, status.as_str());
    }
}
