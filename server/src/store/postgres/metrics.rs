//! Metrics of the connection pool, and of the errors of calls.

use std::time::Duration;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::ConstGauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use sqlx::PgPool;

use super::errors::CallErrorKind;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone)]
pub(super) struct Metrics {
    pool: PgPool,
    waits: Histogram,
    errors: Family<KindLabel, Counter>,
}

/// Reads the state of the pool on each scrape.
#[derive(Debug)]
struct PoolCollector(PgPool);

// === impl Metrics ===

impl Metrics {
    pub(super) fn new(pool: &PgPool) -> Self {
        let errors = Family::<KindLabel, Counter>::default();
        for kind in CallErrorKind::ALL {
            drop(errors.get_or_create(&KindLabel { kind: kind.as_str() }));
        }
        // Buckets from 50 µs to 3.3 s.
        Self { pool: pool.clone(), waits: Histogram::new(exponential_buckets(0.000_05, 4.0, 9)), errors }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(PoolCollector(self.pool.clone())));
        registry.register("acquire_seconds", "Time that calls waited for a connection to Postgres", self.waits.clone());
        registry.register("errors", "Calls to Postgres that failed, by kind", self.errors.clone());
    }

    pub(super) fn observe_wait(&self, time: Duration) {
        self.waits.observe(time.as_secs_f64());
    }

    pub(super) fn count_error(&self, kind: CallErrorKind) {
        self.errors.get_or_create(&KindLabel { kind: kind.as_str() }).inc();
    }
}

// === impl PoolCollector ===

impl Collector for PoolCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let idle = self.0.num_idle();
        let size = self.0.size();
        for (name, help, value) in [
            ("connections", "Connections to Postgres", i64::from(size)),
            ("connections_idle", "Idle connections to Postgres", i64::try_from(idle).unwrap_or(0)),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}
