//! Spans of both programs: made with `tracing`, exported over OTLP where the standard `OTEL_*` variables name a collector.
//!
//! Where they name none, nothing is installed, and a span of ours is never enabled: it costs a look at one static.

mod export;
mod link;
mod sampler;
mod settings;

pub use export::{Export, Unusable};
pub use link::{continue_from, follow, inject, is_traced, remember, trace_id};
pub use settings::BadSetting;

/// The target of all spans that are exported. Nothing else is: no log line, no span of a library.
pub const TARGET: &str = "span";

/// A span of ours: its kind (`server`, `client`, `consumer`, `internal`), its name, and attributes by the semantic
/// conventions of OpenTelemetry. See [`fail`]. The name must stand in the code; `otel.name` may be put together.
///
/// Attributes leave the process. None holds what must not reach a log line: see docs/logging.md.
#[macro_export]
macro_rules! span {
    ($kind:literal, $name:literal $(, $($attributes:tt)*)?) => {
        ::tracing::info_span!(
            target: $crate::TARGET,
            $name,
            otel.kind = $kind,
            otel.status_code = ::tracing::field::Empty,
            error.type = ::tracing::field::Empty,
            $($($attributes)*)?
        )
    };
}

/// A span inside of another one that is exported; none where there is none. What runs in the background, every second,
/// has no spans.
#[macro_export]
macro_rules! child {
    ($($span:tt)*) => {
        if $crate::is_traced() { $crate::span!($($span)*) } else { ::tracing::Span::none() }
    };
}

/// Says that what the span stands for failed; `kind` is one of few, and our own word.
pub fn fail(span: &tracing::Span, kind: &str) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", kind);
}
