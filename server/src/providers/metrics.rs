//! What is measured of providers. Labels are names of presets, never of Providers or Apps.

use std::time::Duration;

use http::StatusCode;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::{
    http::{NoAnswer, Purpose},
    preset::PRESETS,
};
use crate::domain::identity::{Away, Fault, Operation, Place, ProviderError};

/// From a provider next door to the ten seconds that it may take.
const BUCKETS: [f64; 9] = [0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Handles to the metrics; clones count together.
#[derive(Clone)]
pub(super) struct Metrics {
    calls: Family<CallLabels, Counter>,
    duration: Family<PlaceLabels, Histogram, fn() -> Histogram>,
    operations: Family<OperationLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    preset: &'static str,
    place: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaceLabels {
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
        // Series that are there from the start: their first increase is seen.
        for preset in PRESETS.iter().map(|preset| preset.name) {
            for operation in Operation::ALL.map(Operation::as_str) {
                for outcome in OUTCOMES {
                    drop(metrics.operations.get_or_create(&OperationLabels { preset, operation, outcome }));
                }
            }
        }
        metrics
    }

    /// Under names without a prefix: the registry is to be one of providers' own.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("calls", "Calls to providers, by what came of them", self.calls.clone());
        registry.register_with_unit(
            "call_duration",
            "From a call to a provider to the end of its answer, or to giving up",
            Unit::Seconds,
            self.duration.clone(),
        );
        registry.register(
            "operations",
            "What log-ins asked providers for, each by some calls, by what came of it",
            self.operations.clone(),
        );
    }

    /// One call is over.
    pub(super) fn called(&self, purpose: Purpose, answer: Result<StatusCode, NoAnswer>, took: Duration) {
        let Purpose { preset, place } = purpose;
        let place = place_name(place);
        self.calls.get_or_create(&CallLabels { preset, place, outcome: call_outcome(answer) }).inc();
        self.duration.get_or_create(&PlaceLabels { preset, place }).observe(took.as_secs_f64());
    }

    /// All the calls of an operation are over.
    pub(super) fn done(&self, preset: &'static str, operation: Operation, error: Option<&ProviderError>) {
        let outcome = operation_outcome(error);
        self.operations.get_or_create(&OperationLabels { preset, operation: operation.as_str(), outcome }).inc();
    }
}

const fn place_name(place: Place) -> &'static str {
    match place {
        Place::Discovery => "discovery",
        Place::Keys => "keys",
        Place::Token => "token",
        Place::UserInfo => "userinfo",
        Place::Emails => "emails",
        Place::TokenCheck => "token_check",
    }
}

fn call_outcome(answer: Result<StatusCode, NoAnswer>) -> &'static str {
    match answer {
        Ok(status) if status.is_success() => "ok",
        Ok(_) => "refused",
        Err(NoAnswer::Away(away)) => match away {
            Away::TooMany => "busy",
            Away::NameUnknown => "name_unknown",
            Away::AddressRefused => "address_refused",
            Away::Unreachable => "unreachable",
            Away::Proxy => "proxy",
            Away::Tls => "tls",
            Away::Broken => "broken",
            Away::TooSlow => "too_slow",
            Away::Status(_) => "unavailable",
        },
        Err(NoAnswer::Fault(Fault::TooLarge)) => "too_large",
        Err(NoAnswer::Fault(Fault::NotHttps)) => "not_https",
        // What is left is a redirect.
        Err(NoAnswer::Fault(_)) => "redirect",
    }
}

/// Every outcome of an operation.
const OUTCOMES: [&str; 8] = ["ok", "busy", "away", "bad_answer", "bad_callback", "bad_token", "no_check", "unusable"];

const fn operation_outcome(error: Option<&ProviderError>) -> &'static str {
    match error {
        None => "ok",
        Some(ProviderError::Away(Away::TooMany)) => "busy",
        Some(ProviderError::Away(_)) => "away",
        Some(ProviderError::Answer { .. }) => "bad_answer",
        Some(ProviderError::Callback(_)) => "bad_callback",
        Some(ProviderError::Token(_)) => "bad_token",
        Some(ProviderError::NoTokenCheck) => "no_check",
        Some(ProviderError::Unusable(_)) => "unusable",
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;
    use crate::domain::identity::{BadCallback, BadToken, Unusable};

    fn told(metrics: &Metrics) -> String {
        let mut registry = Registry::with_prefix("latchkey");
        metrics.register(registry.sub_registry_with_prefix("provider"));
        let mut told = String::new();
        text::encode(&mut told, &registry).unwrap();
        told
    }

    #[test]
    fn a_call_is_counted_by_preset_place_and_outcome() {
        let metrics = Metrics::new();
        let purpose = Purpose { preset: "github", place: Place::Token };
        for answer in [
            Ok(StatusCode::OK),
            Ok(StatusCode::UNAUTHORIZED),
            Err(NoAnswer::Away(Away::Status(503))),
            Err(NoAnswer::Fault(Fault::Status(302))),
        ] {
            metrics.called(purpose, answer, Duration::from_millis(30));
        }
        let told = told(&metrics);
        for outcome in ["ok", "refused", "unavailable", "redirect"] {
            let line =
                format!("latchkey_provider_calls_total{{preset=\"github\",place=\"token\",outcome=\"{outcome}\"}} 1\n");
            assert!(told.contains(&line), "{told}");
        }
        assert!(
            told.contains("latchkey_provider_call_duration_seconds_count{preset=\"github\",place=\"token\"} 4\n"),
            "{told}"
        );
    }

    #[test]
    fn every_operation_has_its_series_from_the_start() {
        let metrics = Metrics::new();
        let errors = [
            ProviderError::Away(Away::TooMany),
            ProviderError::Away(Away::Tls),
            ProviderError::Answer { place: Place::Token, fault: Fault::NotJson },
            ProviderError::Callback(BadCallback::NoIssuer),
            ProviderError::Token(BadToken::Expired),
            ProviderError::NoTokenCheck,
            ProviderError::Unusable(Unusable::BadKey),
        ];
        let outcomes: Vec<_> = std::iter::once(None).chain(errors.iter().map(Some)).map(operation_outcome).collect();
        assert_eq!(outcomes, OUTCOMES);
        let before = told(&metrics).lines().count();
        assert!(before > PRESETS.len() * Operation::ALL.len() * OUTCOMES.len());
        for error in &errors {
            metrics.done("google", Operation::Callback, Some(error));
        }
        assert_eq!(told(&metrics).lines().count(), before);
    }
}
