//! Audit events in Postgres: written in the transaction of the change that they record, or in batches; read by users;
//! deleted when they are old.

use prometheus_client::{metrics::counter::Counter, registry::Registry};

mod activity;
mod insert;
mod refusals;
mod upkeep;
mod writer;

pub(super) use insert::{BatchEvent, EventColumns, insert, insert_deletion, insert_for_memberships, insert_for_users};
pub(crate) use refusals::RefusalColumns;
pub(super) use writer::EventWriter;

/// Metrics of audit events. Clones share their counters.
#[derive(Clone, Debug)]
pub struct AuditMetrics {
    events: Counter,
    lost: Counter,
}

// === impl AuditMetrics ===

impl AuditMetrics {
    fn new() -> Self {
        Self { events: Counter::default(), lost: Counter::default() }
    }

    /// Registers the metrics under names without a prefix. `registry` must add the prefix `audit`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("events", "Audit events that were written", self.events.clone());
        registry.register("lost", "Audit events that could not be written", self.lost.clone());
    }

    fn count_lost(&self, count: usize) {
        self.lost.inc_by(count as u64);
    }
}
