//! Metrics of mail.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::domain::{mail::MailKind, ports::OutboxBacklog};

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug)]
pub struct MailMetrics {
    mails: Family<MailLabels, Counter>,
    propagations: Family<PropagationLabels, Counter>,
    send_seconds: Histogram,
    in_flight: Gauge,
    due_rows: Gauge,
    oldest_due_seconds: Gauge<f64, AtomicU64>,
    dead_letters: Gauge,
}

/// The outcome of an attempt to deliver a row of the outbox. It is the value of the metric label `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum AttemptOutcome {
    /// The relay accepted the mail, or Redis stored the epoch, the profile or the groups.
    Sent,
    /// There was nothing to send.
    Skipped,
    Retried,
    Waited,
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MailLabels {
    mail: KindLabel,
    outcome: AttemptOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PropagationLabels {
    outcome: AttemptOutcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct KindLabel(MailKind);

// === impl MailMetrics ===

impl MailMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            mails: Family::default(),
            propagations: Family::default(),
            // The buckets range from the response time of a relay in the same network to the timeout of ten seconds.
            send_seconds: Histogram::new([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]),
            in_flight: Gauge::default(),
            due_rows: Gauge::default(),
            oldest_due_seconds: Gauge::default(),
            dead_letters: Gauge::default(),
        };
        // Create all series at the start, so that the first increase of each is visible.
        for outcome in AttemptOutcome::ALL {
            for kind in MailKind::ALL {
                drop(metrics.mails.get_or_create(&MailLabels { mail: KindLabel(kind), outcome }));
            }
        }
        for outcome in [AttemptOutcome::Sent, AttemptOutcome::Retried] {
            drop(metrics.propagations.get_or_create(&PropagationLabels { outcome }));
        }
        registry.register("mails", "Attempts to send a mail, by outcome", metrics.mails.clone());
        registry.register(
            "carried_epochs",
            "Attempts to write an epoch or a profile to Redis that a request could not write, by outcome",
            metrics.propagations.clone(),
        );
        registry.register(
            "mail_send_duration_seconds",
            "Time from connecting to a relay to its answer, successful or not",
            metrics.send_seconds.clone(),
        );
        registry.register("mail_in_flight", "Rows of the outbox being delivered", metrics.in_flight.clone());
        registry.register("outbox_due", "Rows of the outbox that are due", metrics.due_rows.clone());
        registry.register(
            "outbox_oldest_due_seconds",
            "How long the oldest due row has waited",
            metrics.oldest_due_seconds.clone(),
        );
        registry.register("outbox_dead", "Dead letters in the outbox", metrics.dead_letters.clone());
        metrics
    }

    pub(super) fn count_mail(&self, kind: MailKind, outcome: AttemptOutcome) {
        self.mails.get_or_create(&MailLabels { mail: KindLabel(kind), outcome }).inc();
    }

    pub(super) fn count_propagation(&self, outcome: AttemptOutcome) {
        self.propagations.get_or_create(&PropagationLabels { outcome }).inc();
    }

    pub(super) fn observe_send(&self, duration: std::time::Duration) {
        self.send_seconds.observe(duration.as_secs_f64());
    }

    pub(super) fn set_in_flight(&self, count: usize) {
        self.in_flight.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn set_backlog(&self, backlog: OutboxBacklog) {
        self.due_rows.set(i64::try_from(backlog.due).unwrap_or(i64::MAX));
        self.oldest_due_seconds.set(backlog.oldest_due_seconds);
        self.dead_letters.set(i64::try_from(backlog.dead).unwrap_or(i64::MAX));
    }
}

// === impl AttemptOutcome ===

impl AttemptOutcome {
    const ALL: [Self; 5] = [Self::Sent, Self::Skipped, Self::Retried, Self::Waited, Self::Dead];
}

impl prometheus_client::encoding::EncodeLabelValue for AttemptOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        use std::fmt::Write;
        encoder.write_str(match self {
            Self::Sent => "sent",
            Self::Skipped => "skipped",
            Self::Retried => "retried",
            Self::Waited => "waited",
            Self::Dead => "dead",
        })
    }
}

// === impl KindLabel ===

impl prometheus_client::encoding::EncodeLabelValue for KindLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        use std::fmt::Write;
        encoder.write_str(self.0.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_outcomes_are_exported() {
        let mut registry = Registry::default();
        let metrics = MailMetrics::register(&mut registry);
        metrics.count_mail(MailKind::AccountExists, AttemptOutcome::Sent);
        metrics.count_mail(MailKind::AccountExists, AttemptOutcome::Sent);
        metrics.count_propagation(AttemptOutcome::Retried);
        metrics.set_backlog(OutboxBacklog { due: 3, oldest_due_seconds: 1.5, dead: 2 });
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            r#"mails_total{mail="account-exists",outcome="sent"} 2"#,
            r#"carried_epochs_total{outcome="retried"} 1"#,
            "outbox_due 3",
            "outbox_oldest_due_seconds 1.5",
            "outbox_dead 2",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
