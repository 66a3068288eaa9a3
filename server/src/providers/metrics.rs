//! Metrics of provider calls. They are labelled with the preset, never with the name of a Provider or App.

use std::time::Duration;

use http::StatusCode;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::{
    http::{CallTarget, HttpCallError},
    preset::PRESETS,
};
use crate::domain::identity::{InvalidResponse, ProviderEndpoint, ProviderError, ProviderOperation, UnavailableReason};

/// The buckets of the call duration, in seconds. The last bucket ends at [`super::http::CALL_TIMEOUT`].
const BUCKETS: [f64; 9] = [0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Handles to the metrics. Clones share their counters.
#[derive(Clone)]
pub(super) struct Metrics {
    calls: Family<CallLabels, Counter>,
    duration: Family<EndpointLabels, Histogram, fn() -> Histogram>,
    operations: Family<OperationLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    preset: &'static str,
    place: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabels {
    preset: &'static str,
    place: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    preset: &'static str,
    operation: &'static str,
    outcome: &'static str,
}

// === impl Metrics ===

impl Metrics {
    pub(super) fn new() -> Self {
        let metrics = Self {
            calls: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            operations: Family::default(),
        };
        // All series of operations exist from the start, so that `rate()` sees their first increase.
        for preset in PRESETS.iter().map(|preset| preset.name) {
            for operation in ProviderOperation::ALL.map(ProviderOperation::as_str) {
                for outcome in OUTCOMES {
                    drop(metrics.operations.get_or_create(&OperationLabels { preset, operation, outcome }));
                }
            }
        }
        metrics
    }

    /// Registers the metrics under names without a prefix. `registry` must add the prefix `provider`.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("calls", "Calls to providers, by outcome", self.calls.clone());
        registry.register_with_unit(
            "call_duration",
            "Time from a call to a provider to the end of its response or to its failure",
            Unit::Seconds,
            self.duration.clone(),
        );
        registry.register(
            "operations",
            "Operations of logins at providers, each of one or more calls, by outcome",
            self.operations.clone(),
        );
    }

    /// Counts one finished call.
    pub(super) fn record_call(&self, target: CallTarget, result: Result<StatusCode, HttpCallError>, took: Duration) {
        let CallTarget { preset, endpoint } = target;
        let place = endpoint_label(endpoint);
        self.calls.get_or_create(&CallLabels { preset, place, outcome: call_outcome(result) }).inc();
        self.duration.get_or_create(&EndpointLabels { preset, place }).observe(took.as_secs_f64());
    }

    /// Counts one finished operation.
    pub(super) fn record_operation(
        &self,
        preset: &'static str,
        operation: ProviderOperation,
        error: Option<&ProviderError>,
    ) {
        let outcome = operation_outcome(error);
        self.operations.get_or_create(&OperationLabels { preset, operation: operation.as_str(), outcome }).inc();
    }
}

const fn endpoint_label(endpoint: ProviderEndpoint) -> &'static str {
    match endpoint {
        ProviderEndpoint::Discovery => "discovery",
        ProviderEndpoint::Keys => "keys",
        ProviderEndpoint::Token => "token",
        ProviderEndpoint::UserInfo => "userinfo",
        ProviderEndpoint::Emails => "emails",
        ProviderEndpoint::TokenCheck => "token_check",
    }
}

fn call_outcome(result: Result<StatusCode, HttpCallError>) -> &'static str {
    match result {
        Ok(status) if status.is_success() => "ok",
        Ok(_) => "refused",
        Err(HttpCallError::Unavailable(reason)) => match reason {
            UnavailableReason::TooManyCalls => "busy",
            UnavailableReason::NameUnknown => "name_unknown",
            UnavailableReason::AddressNotAllowed => "address_refused",
            UnavailableReason::Unreachable => "unreachable",
            UnavailableReason::Proxy => "proxy",
            UnavailableReason::Tls => "tls",
            UnavailableReason::ConnectionClosed => "broken",
            UnavailableReason::Timeout => "too_slow",
            UnavailableReason::Status(_) => "unavailable",
        },
        Err(HttpCallError::InvalidResponse(InvalidResponse::TooLarge)) => "too_large",
        Err(HttpCallError::InvalidResponse(InvalidResponse::NotHttps)) => "not_https",
        // All other invalid responses of a call are redirects.
        Err(HttpCallError::InvalidResponse(_)) => "redirect",
    }
}

/// Every outcome of an operation.
const OUTCOMES: [&str; 8] = ["ok", "busy", "away", "bad_answer", "bad_callback", "bad_token", "no_check", "unusable"];

const fn operation_outcome(error: Option<&ProviderError>) -> &'static str {
    match error {
        None => "ok",
        Some(ProviderError::Unavailable(UnavailableReason::TooManyCalls)) => "busy",
        Some(ProviderError::Unavailable(_)) => "away",
        Some(ProviderError::InvalidResponse { .. }) => "bad_answer",
        Some(ProviderError::InvalidCallback(_)) => "bad_callback",
        Some(ProviderError::InvalidToken(_)) => "bad_token",
        Some(ProviderError::NoTokenCheck) => "no_check",
        Some(ProviderError::Unusable(_)) => "unusable",
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;
    use crate::domain::identity::{InvalidCallback, InvalidProviderToken, UnusableReason};

    fn encoded(metrics: &Metrics) -> String {
        let mut registry = Registry::with_prefix("latchkey");
        metrics.register(registry.sub_registry_with_prefix("provider"));
        let mut encoded = String::new();
        text::encode(&mut encoded, &registry).unwrap();
        encoded
    }

    #[test]
    fn a_call_is_counted_by_preset_endpoint_and_outcome() {
        let metrics = Metrics::new();
        let target = CallTarget { preset: "github", endpoint: ProviderEndpoint::Token };
        for result in [
            Ok(StatusCode::OK),
            Ok(StatusCode::UNAUTHORIZED),
            Err(HttpCallError::Unavailable(UnavailableReason::Status(503))),
            Err(HttpCallError::InvalidResponse(InvalidResponse::Status(302))),
        ] {
            metrics.record_call(target, result, Duration::from_millis(30));
        }
        let text = encoded(&metrics);
        for outcome in ["ok", "refused", "unavailable", "redirect"] {
            let line =
                format!("latchkey_provider_calls_total{{preset=\"github\",place=\"token\",outcome=\"{outcome}\"}} 1\n");
            assert!(text.contains(&line), "{text}");
        }
        assert!(
            text.contains("latchkey_provider_call_duration_seconds_count{preset=\"github\",place=\"token\"} 4\n"),
            "{text}"
        );
    }

    #[test]
    fn every_operation_has_its_series_from_the_start() {
        let metrics = Metrics::new();
        let errors = [
            ProviderError::Unavailable(UnavailableReason::TooManyCalls),
            ProviderError::Unavailable(UnavailableReason::Tls),
            ProviderError::InvalidResponse { endpoint: ProviderEndpoint::Token, reason: InvalidResponse::NotJson },
            ProviderError::InvalidCallback(InvalidCallback::MissingIssuer),
            ProviderError::InvalidToken(InvalidProviderToken::Expired),
            ProviderError::NoTokenCheck,
            ProviderError::Unusable(UnusableReason::InvalidKey),
        ];
        let outcomes: Vec<_> = std::iter::once(None).chain(errors.iter().map(Some)).map(operation_outcome).collect();
        assert_eq!(outcomes, OUTCOMES);
        let before = encoded(&metrics).lines().count();
        assert!(before > PRESETS.len() * ProviderOperation::ALL.len() * OUTCOMES.len());
        for error in &errors {
            metrics.record_operation("google", ProviderOperation::Callback, Some(error));
        }
        assert_eq!(encoded(&metrics).lines().count(), before);
    }
}
