//! Metrics of webhooks.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use crate::domain::ports::{EventBacklog, EventOutcome};

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug)]
pub struct WebhookMetrics {
    deliveries: Family<DeliveryLabels, Counter>,
    due: Gauge,
    oldest_due_seconds: Gauge<f64, AtomicU64>,
    dead: Gauge,
}

/// The outcome of an attempt. It is the value of the metric label `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum DeliveryOutcome {
    Sent,
    Retried,
    /// The event stays in the queue, because no attempt was possible.
    Waited,
    /// The event became a dead letter.
    Dead,
    /// The event was deleted, because the webhook had more events than a queue can hold.
    Dropped,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeliveryLabels {
    outcome: DeliveryOutcome,
}

// === impl WebhookMetrics ===

impl WebhookMetrics {
    /// Registers the metrics. `registry` must add the prefix `webhook`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            deliveries: Family::default(),
            due: Gauge::default(),
            oldest_due_seconds: Gauge::default(),
            dead: Gauge::default(),
        };
        // Create all series at the start, so that the first increase of each is visible.
        for outcome in DeliveryOutcome::ALL {
            drop(metrics.deliveries.get_or_create(&DeliveryLabels { outcome }));
        }
        let help = "Attempts to send an event to a receiver, by outcome";
        registry.register("deliveries", help, metrics.deliveries.clone());
        registry.register("due", "Events that are due", metrics.due.clone());
        let help = "How long the oldest due event has been due";
        registry.register("oldest_due_seconds", help, metrics.oldest_due_seconds.clone());
        registry.register("dead", "Events whose delivery was given up", metrics.dead.clone());
        metrics
    }

    pub(super) fn count(&self, outcome: DeliveryOutcome, events: u64) {
        self.deliveries.get_or_create(&DeliveryLabels { outcome }).inc_by(events);
    }

    pub(super) fn set_backlog(&self, backlog: EventBacklog) {
        self.due.set(i64::try_from(backlog.due).unwrap_or(i64::MAX));
        self.oldest_due_seconds.set(backlog.oldest_due_seconds);
        self.dead.set(i64::try_from(backlog.dead).unwrap_or(i64::MAX));
    }
}

// === impl DeliveryOutcome ===

impl DeliveryOutcome {
    const ALL: [Self; 5] = [Self::Sent, Self::Retried, Self::Waited, Self::Dead, Self::Dropped];

    pub(super) const fn of(outcome: &EventOutcome) -> Self {
        match outcome {
            EventOutcome::Sent => Self::Sent,
            EventOutcome::Failed { .. } => Self::Retried,
            EventOutcome::Wait { .. } => Self::Waited,
            EventOutcome::GivenUp { .. } | EventOutcome::Gone { .. } | EventOutcome::Stopped { .. } => Self::Dead,
        }
    }
}

impl EncodeLabelValue for DeliveryOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        use std::fmt::Write;
        encoder.write_str(match self {
            Self::Sent => "sent",
            Self::Retried => "retried",
            Self::Waited => "waited",
            Self::Dead => "dead",
            Self::Dropped => "dropped",
        })
    }
}
