//! What is measured of mail.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::domain::{mail::MailKind, ports::Backlog};

/// Handles to the metrics; clones count together.
#[derive(Clone, Debug)]
pub struct MailMetrics {
    mails: Family<MailLabels, Counter>,
    epochs: Family<EpochLabels, Counter>,
    send_seconds: Histogram,
    in_flight: Gauge,
    due: Gauge,
    oldest_due_seconds: Gauge<f64, AtomicU64>,
    dead: Gauge,
}

/// What became of one try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fate {
    /// The relay took it.
    Sent,
    /// There was nothing to send any more.
    Skipped,
    Retried,
    Waited,
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MailLabels {
    mail: Kind,
    outcome: Fate,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EpochLabels {
    outcome: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind(MailKind);

// === impl MailMetrics ===

impl MailMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            mails: Family::default(),
            epochs: Family::default(),
            // From a relay next door to the limit of ten seconds.
            send_seconds: Histogram::new([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]),
            in_flight: Gauge::default(),
            due: Gauge::default(),
            oldest_due_seconds: Gauge::default(),
            dead: Gauge::default(),
        };
        // Series that are there from the start: their first increase is seen.
        for outcome in Fate::ALL {
            for kind in MailKind::ALL {
                drop(metrics.mails.get_or_create(&MailLabels { mail: Kind(kind), outcome }));
            }
        }
        for outcome in [Fate::Sent, Fate::Retried] {
            drop(metrics.epochs.get_or_create(&EpochLabels { outcome }));
        }
        registry.register("mails", "Mails by what became of the try", metrics.mails.clone());
        registry.register(
            "carried_epochs",
            "Epochs that a request could not carry to Redis, by what became of the try",
            metrics.epochs.clone(),
        );
        registry.register(
            "mail_send_duration_seconds",
            "From connecting to a relay to its answer, whatever that was",
            metrics.send_seconds.clone(),
        );
        registry.register("mail_in_flight", "Rows of the outbox in hand", metrics.in_flight.clone());
        registry.register("outbox_due", "Rows of the outbox that are due", metrics.due.clone());
        registry.register(
            "outbox_oldest_due_seconds",
            "How long the oldest due row has waited",
            metrics.oldest_due_seconds.clone(),
        );
        registry.register("outbox_dead", "Rows that are kept for people to look at", metrics.dead.clone());
        metrics
    }

    pub(super) fn mail(&self, kind: MailKind, outcome: Fate) {
        self.mails.get_or_create(&MailLabels { mail: Kind(kind), outcome }).inc();
    }

    pub(super) fn epoch(&self, outcome: Fate) {
        self.epochs.get_or_create(&EpochLabels { outcome }).inc();
    }

    pub(super) fn sent_in(&self, duration: std::time::Duration) {
        self.send_seconds.observe(duration.as_secs_f64());
    }

    pub(super) fn in_flight(&self, count: usize) {
        self.in_flight.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn backlog(&self, backlog: Backlog) {
        self.due.set(i64::try_from(backlog.due).unwrap_or(i64::MAX));
        self.oldest_due_seconds.set(backlog.oldest_due_seconds);
        self.dead.set(i64::try_from(backlog.dead).unwrap_or(i64::MAX));
    }
}

// === impl Fate ===

impl Fate {
    const ALL: [Self; 5] = [Self::Sent, Self::Skipped, Self::Retried, Self::Waited, Self::Dead];
}

impl prometheus_client::encoding::EncodeLabelValue for Fate {
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

// === impl Kind ===

impl prometheus_client::encoding::EncodeLabelValue for Kind {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        use std::fmt::Write;
        encoder.write_str(self.0.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_what_is_shown() {
        let mut registry = Registry::default();
        let metrics = MailMetrics::register(&mut registry);
        metrics.mail(MailKind::AccountExists, Fate::Sent);
        metrics.mail(MailKind::AccountExists, Fate::Sent);
        metrics.epoch(Fate::Retried);
        metrics.backlog(Backlog { due: 3, oldest_due_seconds: 1.5, dead: 2 });
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
