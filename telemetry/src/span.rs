//! Macros that create spans.

/// The target of all exported spans. Log events and spans of libraries are not exported.
pub const TARGET: &str = "span";

/// Creates a span from its kind (`server`, `client`, `consumer`, `internal`), its name, and attributes that follow
/// OpenTelemetry's semantic conventions. The name is a literal. The attribute `otel.name` replaces it with a computed
/// name. [`record_error`] marks a span as failed.
///
/// Attributes leave the process, so a value that must not be logged cannot be an attribute (docs/logging.md).
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

/// Like [`span!`], but creates a disabled span if the current span is not exported. So background work that runs every
/// second exports no spans.
#[macro_export]
macro_rules! child_span {
    ($($span:tt)*) => {
        if $crate::is_sampled() { $crate::span!($($span)*) } else { ::tracing::Span::none() }
    };
}

/// Marks a span as failed. `kind` is the error type: one of a few fixed words, never text from outside.
pub fn record_error(span: &tracing::Span, kind: &str) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", kind);
}
