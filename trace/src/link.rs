//! How spans hang together over process borders: W3C trace context, in headers and in rows of the outbox.

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

/// Makes a new span the child of the caller's, which `traceparent` names. One that is malformed names none.
///
/// `trusted`: the caller's sampled flag counts as the sampler's name says. Otherwise the sampler decides as for a trace
/// that begins here.
pub fn continue_from(span: &Span, headers: &HeaderMap, trusted: bool) {
    let parent = global::get_text_map_propagator(|propagator| propagator.extract(&HeaderExtractor(headers)));
    if parent.span().span_context().is_valid() {
        let parent = if trusted { parent } else { parent.with_value(UntrustedParent) };
        // Fails where the span has begun to be used, or is none of ours.
        let _ = span.set_parent(parent);
    }
}

/// Names the span that runs here as the parent of what a request leads to.
pub fn inject(headers: &mut HeaderMap) {
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&Context::current(), &mut HeaderInjector(headers));
    });
}

/// Whether a span of ours that is exported runs here.
pub fn is_traced() -> bool {
    Context::map_current(|context| context.span().span_context().is_sampled())
}

/// The trace that a span is of.
pub fn trace_id(span: &Span) -> Option<TraceId> {
    if span.is_disabled() {
        return None;
    }
    let id = span.context().span().span_context().trace_id();
    (id != TraceId::INVALID).then_some(id)
}

/// The span that runs here, where it is exported, as a `traceparent`: for what is done later, perhaps elsewhere.
pub fn remember() -> Option<String> {
    if !is_traced() {
        return None;
    }
    let mut fields = HashMap::new();
    global::get_text_map_propagator(|propagator| propagator.inject_context(&Context::current(), &mut fields));
    fields.remove("traceparent")
}

/// Links a span to one that was remembered.
pub fn follow(span: &Span, remembered: &str) {
    let fields = HashMap::from([("traceparent".to_owned(), remembered.to_owned())]);
    let from = global::get_text_map_propagator(|propagator| propagator.extract(&fields));
    // A link that is not valid is none.
    span.add_link(from.span().span_context().clone());
}
