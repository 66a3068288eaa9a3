//! What every reconcile may use, built once.

use std::{sync::Arc, time::Duration};

use kube::{Client, runtime::events::Reporter};
use latchkey_crds::names::FIELD_MANAGER;
use time::OffsetDateTime;

use crate::{
    app::status::{Told, Written},
    error::Failures,
    facts::Settings,
    metrics::Metrics,
    pace::Pace,
    probe::Probe,
    release::Releases,
    watch::{Objects, Wakes},
};

/// Handed to every reconcile.
pub(crate) struct Context {
    pub(crate) settings: Settings,
    /// The install's own namespace.
    pub(crate) namespace: String,
    pub(crate) client: Client,
    pub(crate) objects: Objects,
    pub(crate) wakes: Wakes,
    pub(crate) probe: Probe,
    pub(crate) pace: Pace,
    pub(crate) written: Written,
    /// Progress of deletions.
    pub(crate) told: Told,
    /// appIDs that are being released.
    pub(crate) releases: Releases,
    /// How long requests of an App may go on once no server serves it.
    pub(crate) requests_end: Duration,
    pub(crate) failures: Failures,
    pub(crate) reporter: Reporter,
    pub(crate) metrics: Metrics,
    /// Tests have another.
    pub(crate) now: fn() -> OffsetDateTime,
}

// === impl Context ===

impl Context {
    /// Who tells what Events tell.
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
