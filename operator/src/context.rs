//! The state that all reconciles share, built once.

use std::{sync::Arc, time::Duration};

use kube::{Client, runtime::events::Reporter};
use latchkey_crds::names::FIELD_MANAGER;
use time::OffsetDateTime;

use crate::{
    app::status::{ReportThrottle, WrittenStatuses},
    error::Failures,
    facts::Settings,
    metrics::Metrics,
    monitor::Monitor,
    rate_limiter::RateLimiter,
    release::Releases,
    watch::{ClusterState, ReconcileQueue},
};

/// Passed to every reconcile.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    /// The install's own namespace.
    pub(crate) namespace: String,
    pub(crate) client: Client,
    pub(crate) objects: ClusterState,
    pub(crate) reconcile_queue: ReconcileQueue,
    pub(crate) monitor: Monitor,
    pub(crate) rate_limiter: RateLimiter,
    pub(crate) written_statuses: WrittenStatuses,
    /// When the progress of deletions was last reported.
    pub(crate) progress_throttle: ReportThrottle,
    /// The appIDs that are being released.
    pub(crate) releases: Releases,
    /// How long requests of an App can still run after no server serves it any more.
    pub(crate) request_drain: Duration,
    pub(crate) failures: Failures,
    pub(crate) reporter: Reporter,
    pub(crate) metrics: Metrics,
    /// The clock; tests use another.
    pub(crate) now: fn() -> OffsetDateTime,
}

// === impl Context ===

impl Context {
    /// The source that Events name.
    pub(crate) fn reporter(identity: &str) -> Reporter {
        Reporter { controller: FIELD_MANAGER.to_owned(), instance: Some(identity.to_owned()) }
    }

    pub(crate) fn now(&self) -> OffsetDateTime {
        (self.now)()
    }

    pub(crate) fn shared(self) -> Arc<Self> {
        Arc::new(self)
    }
}
