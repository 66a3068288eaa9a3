//! Trace context between processes (W3C Trace Context), in headers and in rows of the outbox.

use std::collections::HashMap;

use http::HeaderMap;
use opentelemetry::{
    Context, global,
    trace::{TraceContextExt, TraceId},
};
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::sampler::UntrustedParent;

/// Sets the parent of a new span to the span in the header `traceparent`. Ignores a malformed header.
///
/// If the client is trusted, a parent-based sampler uses the sampled flag of the header. If the client is not trusted,
/// the sampler decides as for a new trace.
pub fn set_parent(span: &Span, headers: &HeaderMap, is_trusted: bool) {
    let parent = global::get_text_map_propagator(|propagator| propagator.extract(&HeaderExtractor(headers)));
    if parent.span().span_context().is_valid() {
        let parent = if is_trusted { parent } else { parent.with_value(UntrustedParent) };
        // This fails if the span is already in use or not exported.
        let _ = span.set_parent(parent);
    }
}

/// Writes the current span to the headers of a request.
pub fn inject_context(headers: &mut HeaderMap) {
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&Context::current(), &mut HeaderInjector(headers));
    });
}

/// Whether the current span is exported.
pub fn is_sampled() -> bool {
    Context::map_current(|context| context.span().span_context().is_sampled())
}

/// The trace ID of a span. `None` if the span is disabled.
pub fn trace_id(span: &Span) -> Option<TraceId> {
    if span.is_disabled() {
        return None;
    }
    let id = span.context().span().span_context().trace_id();
    (id != TraceId::INVALID).then_some(id)
}

/// The current span as a `traceparent`, for later work that can run in another process. `None` if the current span is
/// not exported.
pub fn current_traceparent() -> Option<String> {
    if !is_sampled() {
        return None;
    }
    let mut fields = HashMap::new();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&Context::current(), &mut fields));
    fields.remove("traceparent")
}

/// Links a span to the span in a `traceparent` from [`current_traceparent`].
pub fn add_link(span: &Span, traceparent: &str) {
    let fields = HashMap::from([("traceparent".to_owned(), traceparent.to_owned())]);
    let linked = global::get_text_map_propagator(|propagator| propagator.extract(&fields));
    // An invalid link is ignored.
    span.add_link(linked.span().span_context().clone());
}
