//! The state that all reconciles share. It is built when the operator starts.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, runtime::events::Reporter};
use latchkey_crds::names::FIELD_MANAGER;
use time::OffsetDateTime;

use crate::{
    client::changes::AppTriggers,
    error::Failures,
    facts::Settings,
    metrics::Metrics,
    monitor::Monitor,
    rate_limiter::RateLimiter,
    release::Releases,
    report_throttle::ReportThrottle,
    watch::{ClusterState, ReconcileQueue},
    written_statuses::WrittenStatuses,
};

/// The settings, clients and shared state of every reconcile.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    /// The installation's own namespace.
    pub(crate) namespace: String,
    /// Whether the operator creates the Secrets of Clients.
    pub(crate) creates_client_secrets: bool,
    pub(crate) client: Client,
    pub(crate) objects: ClusterState,
    pub(crate) reconcile_queue: ReconcileQueue,
    pub(crate) monitor: Monitor,
    /// Limits the rate of writes of App documents, App statuses and Provider statuses.
    pub(crate) rate_limiter: RateLimiter,
    /// Limits the rate of writes of Client statuses. There can be 50,000 of them, and writes for Apps must not wait for
    /// them.
    pub(crate) client_rate_limiter: RateLimiter,
    /// The times at which Clients triggered the reconciles of their Apps.
    pub(crate) app_triggers: AppTriggers,
    pub(crate) written_statuses: WrittenStatuses,
    /// When the progress of each deletion of users was last reported.
    pub(crate) progress_throttle: ReportThrottle,
    /// The appIDs that are being released.
    pub(crate) releases: Releases,
    /// How long requests to an App can still run after the last server has stopped serving the App.
    pub(crate) request_drain: Duration,
    pub(crate) failures: Failures,
    pub(crate) reporter: Reporter,
    pub(crate) metrics: Metrics,
    /// The clock. Tests replace it.
    pub(crate) now: fn() -> OffsetDateTime,
}

// === impl Context ===

impl Context {
    /// Returns what the operator's Events name as their reporter: this replica.
    pub(crate) fn reporter(identity: &str) -> Reporter {
        Reporter { controller: FIELD_MANAGER.to_owned(), instance: Some(identity.to_owned()) }
    }

    /// Returns the API for Secrets of the installation's own namespace. These Secrets contain keys and rendered
    /// documents.
    pub(crate) fn install_secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn now(&self) -> OffsetDateTime {
        (self.now)()
    }

    pub(crate) fn shared(self) -> Arc<Self> {
        Arc::new(self)
    }
}
