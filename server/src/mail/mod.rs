//! Mail: the outbox worker, the templates and the relays.

use latchkey_crds::{rendered::SmtpRelay, types::Mailbox};

use crate::outbound::Reach;

mod backoff;
mod compiled;
mod delivery;
#[doc(hidden)]
pub mod fuzzing;
mod guard;
mod link;
mod metrics;
mod relay;
mod templates;
mod wire;
mod worker;

pub use metrics::MailMetrics;
pub use worker::Worker;

/// What the install sets for the mail of all Apps.
#[derive(Clone, Debug, Default)]
pub struct MailSettings {
    /// The install's own relay; none: the mail of Apps without their own waits.
    pub install: Option<InstallRelay>,
    /// Where an App's own relay may stand.
    pub reach: Reach,
}

/// The relay of the install, and who sends through it.
#[derive(Clone, Debug)]
pub struct InstallRelay {
    pub relay: SmtpRelay,
    pub from: Mailbox,
}
