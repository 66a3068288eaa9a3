//! The standard samplers, which untrusted clients cannot override.

use opentelemetry::{
    Context, KeyValue,
    trace::{Link, SpanKind, TraceContextExt, TraceId},
};
use opentelemetry_sdk::trace::{
    IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, SamplingResult, ShouldSample,
};

/// The sampler `always_on` (a ratio of 1), `always_off` (0) or `traceidratio`, with or without `parentbased_`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EnvSampler {
    pub(crate) ratio: f64,
    pub(crate) is_parent_based: bool,
}

/// Marks a parent context from an untrusted client, which cannot decide the sampling.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UntrustedParent;

// === impl EnvSampler ===

impl ShouldSample for EnvSampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace_id: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let root = Sampler::TraceIdRatioBased(self.ratio);
        let by_ratio = |trace_id| root.should_sample(parent, trace_id, name, kind, attributes, links);
        let Some(parent) = parent.filter(|parent| parent.has_active_span()) else { return by_ratio(trace_id) };
        let span = parent.span();
        let context = span.span_context();
        if context.is_remote() && parent.get::<UntrustedParent>().is_some() {
            // The ratio sampler decides by the trace ID, but the client has chosen this trace ID. Therefore a random ID
            // is used for the decision.
            return by_ratio(RandomIdGenerator::default().new_trace_id());
        }
        if context.is_remote() && !self.is_parent_based {
            return by_ratio(trace_id);
        }
        let decision = if context.is_sampled() { SamplingDecision::RecordAndSample } else { SamplingDecision::Drop };
        SamplingResult { decision, attributes: Vec::new(), trace_state: context.trace_state().clone() }
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceState};

    use super::*;

    // The ratio sampler reads the last 8 bytes of a trace ID as a number and samples small numbers. So every ratio
    // above 0 samples the ID that ends with zeros, and only the ratio 1 samples the ID of ones.
    const SAMPLED_TRACE: TraceId =
        TraceId::from_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    const UNSAMPLED_TRACE: TraceId = TraceId::from_bytes([0xff; 16]);

    fn parent(trace_id: TraceId, flags: TraceFlags, remote: bool) -> Context {
        let span = SpanId::from_bytes([1; 8]);
        Context::new().with_remote_span_context(SpanContext::new(trace_id, span, flags, remote, TraceState::NONE))
    }

    fn is_sampled(ratio: f64, is_parent_based: bool, parent: &Context) -> bool {
        let trace_id = parent.span().span_context().trace_id();
        let sampler = EnvSampler { ratio, is_parent_based };
        let result = sampler.should_sample(Some(parent), trace_id, "a", &SpanKind::Server, &[], &[]);
        result.decision == SamplingDecision::RecordAndSample
    }

    #[test]
    fn an_untrusted_client_cannot_override_the_sampler() {
        for is_parent_based in [true, false] {
            let sampled = parent(SAMPLED_TRACE, TraceFlags::SAMPLED, true).with_value(UntrustedParent);
            assert!(!is_sampled(0.0, is_parent_based, &sampled));
            // The expected value is 1 % of 10,000, which is 100. 200 is 10 standard deviations away.
            let exported = (0..10_000).filter(|_| is_sampled(0.01, is_parent_based, &sampled)).count();
            assert!((1..200).contains(&exported), "{exported} of 10,000");
            let unsampled = parent(UNSAMPLED_TRACE, TraceFlags::NOT_SAMPLED, true).with_value(UntrustedParent);
            assert!(is_sampled(1.0, is_parent_based, &unsampled));
        }
    }

    #[test]
    fn a_trusted_client_decides_if_the_sampler_is_parent_based() {
        assert!(is_sampled(0.0, true, &parent(UNSAMPLED_TRACE, TraceFlags::SAMPLED, true)));
        assert!(!is_sampled(1.0, true, &parent(SAMPLED_TRACE, TraceFlags::NOT_SAMPLED, true)));
        assert!(!is_sampled(0.5, false, &parent(UNSAMPLED_TRACE, TraceFlags::SAMPLED, true)));
        assert!(is_sampled(0.5, false, &parent(SAMPLED_TRACE, TraceFlags::NOT_SAMPLED, true)));
    }

    #[test]
    fn a_child_span_is_sampled_like_its_parent() {
        for is_parent_based in [true, false] {
            // Child contexts inherit `UntrustedParent`.
            let local_parent = |flags| parent(UNSAMPLED_TRACE, flags, false).with_value(UntrustedParent);
            assert!(is_sampled(0.0, is_parent_based, &local_parent(TraceFlags::SAMPLED)));
            assert!(!is_sampled(1.0, is_parent_based, &local_parent(TraceFlags::NOT_SAMPLED)));
        }
    }
}
