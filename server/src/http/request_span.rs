//! The span of a request, according to the HTTP semantic conventions of OpenTelemetry. docs/operations.md lists its
//! attributes.

use http::{HeaderMap, Method, StatusCode, Version};
use tracing::Span;

use super::metrics::method_label;
use crate::domain::app::App;

/// Starts the span of a request, as a child of the client's span if the headers name such a span. Returns a disabled
/// span if spans are not exported.
///
/// `trusted`: the client can decide whether the trace is sampled. If `trusted` is false, the sampler decides as for a
/// new trace. `template` is the path of the route with its placeholders, because the path of the request can contain
/// secrets.
pub(super) fn start_span(
    method: &Method,
    version: Version,
    headers: &HeaderMap,
    trusted: bool,
    template: Option<&'static str>,
    app: Option<&App>,
) -> Span {
    let span = latchkey_telemetry::span!(
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
    latchkey_telemetry::set_parent(&span, headers, trusted);
    // In the semantic conventions, the name for an unknown method is `_OTHER`.
    let method = match method_label(method) {
        "other" => "_OTHER",
        known => known,
    };
    span.record("http.request.method", method);
    let name = if method == "_OTHER" { "HTTP" } else { method };
    span.record("otel.name", template.map_or_else(|| name.to_owned(), |template| format!("{name} {template}")));
    span.record("network.protocol.version", if version == Version::HTTP_2 { "2" } else { "1.1" });
    span
}

/// Records the status. A 4xx status is not an error of a server span.
pub(super) fn record_status(span: &Span, status: StatusCode) {
    if span.is_disabled() {
        return;
    }
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        latchkey_telemetry::record_error(span, status.as_str());
    }
}
