//! What is measured of the rendered Apps and of where they come from.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::Reason;
use crate::domain::clock::{Clock, SystemClock};

/// Handles to the metrics; clones count together.
#[derive(Clone, Debug, Default)]
pub struct ConfigMetrics {
    apps: Gauge,
    refused: Family<RefusedLabels, Counter>,
    listed: Gauge<f64, AtomicU64>,
    heard: Gauge<f64, AtomicU64>,
    failures: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusedLabels {
    reason: Reason,
}

// === impl ConfigMetrics ===

impl ConfigMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        // A series that is there from the start: its first increase is seen.
        for reason in Reason::ALL {
            drop(metrics.refused.get_or_create(&RefusedLabels { reason }));
        }
        registry.register("config_apps", "Apps being served", metrics.apps.clone());
        registry.register("config_refused", "Documents that were refused, by why", metrics.refused.clone());
        registry.register(
            "config_list_timestamp_seconds",
            "When the whole set of documents was last read",
            metrics.listed.clone(),
        );
        registry.register(
            "config_event_timestamp_seconds",
            "When a change of a document was last heard of",
            metrics.heard.clone(),
        );
        registry.register(
            "config_source_failures",
            "Lists and watches of documents that failed",
            metrics.failures.clone(),
        );
        metrics
    }

    pub(super) fn apps(&self, count: usize) {
        self.apps.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn refused(&self, reason: Reason) {
        self.refused.get_or_create(&RefusedLabels { reason }).inc();
    }

    pub(super) fn listed(&self) {
        self.listed.set(now());
    }

    pub(super) fn heard(&self) {
        self.heard.set(now());
    }

    pub(super) fn failed(&self) {
        self.failures.inc();
    }
}

fn now() -> f64 {
    (SystemClock.now() - time::OffsetDateTime::UNIX_EPOCH).as_seconds_f64()
}

// === impl Reason ===

impl EncodeLabelValue for Reason {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        use std::fmt::Write;
        encoder.write_str(self.as_str())
    }
}
