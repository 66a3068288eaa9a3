//! Metrics of the rendered Apps, and of their source (the API server or a directory).

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::RejectReason;
use crate::domain::clock::{Clock, SystemClock};

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct ConfigMetrics {
    apps: Gauge,
    rejected: Family<RejectedLabels, Counter>,
    last_list: Gauge<f64, AtomicU64>,
    last_event: Gauge<f64, AtomicU64>,
    failures: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RejectedLabels {
    reason: RejectReason,
}

// === impl ConfigMetrics ===

impl ConfigMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        // Create all series at the start, so that the first increase of each is visible.
        for reason in RejectReason::ALL {
            drop(metrics.rejected.get_or_create(&RejectedLabels { reason }));
        }
        registry.register("config_apps", "Apps being served", metrics.apps.clone());
        registry.register("config_refused", "Documents that were rejected, by reason", metrics.rejected.clone());
        registry.register(
            "config_list_timestamp_seconds",
            "When the full set of documents was last read",
            metrics.last_list.clone(),
        );
        registry.register(
            "config_event_timestamp_seconds",
            "When a change of a document was last received",
            metrics.last_event.clone(),
        );
        registry.register(
            "config_source_failures",
            "Lists and watches of documents that failed",
            metrics.failures.clone(),
        );
        metrics
    }

    pub(super) fn set_apps(&self, count: usize) {
        self.apps.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn count_rejected(&self, reason: RejectReason) {
        self.rejected.get_or_create(&RejectedLabels { reason }).inc();
    }

    pub(super) fn record_list(&self) {
        self.last_list.set(now());
    }

    pub(super) fn record_event(&self) {
        self.last_event.set(now());
    }

    pub(super) fn count_failure(&self) {
        self.failures.inc();
    }
}

fn now() -> f64 {
    (SystemClock.now() - time::OffsetDateTime::UNIX_EPOCH).as_seconds_f64()
}

// === impl RejectReason ===

impl EncodeLabelValue for RejectReason {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        use std::fmt::Write;
        encoder.write_str(self.as_str())
    }
}
