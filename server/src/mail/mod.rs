//! Mail: the outbox worker, the templates and the connections to relays.

use latchkey_crds::{rendered::SmtpRelay, types::Mailbox};

use crate::outbound::OutboundPolicy;

mod backoff;
mod delivery;
#[doc(hidden)]
pub mod fuzzing;
mod link;
mod metrics;
mod relay;
mod relay_ports;
mod relay_stream;
mod template_cache;
mod templates;
mod worker;

pub use metrics::MailMetrics;
pub use worker::Worker;

/// Settings of the install for the mail of all Apps.
#[derive(Clone, Debug, Default)]
pub struct MailSettings {
    /// The relay of the install. Without it, mail of Apps without their own relay waits.
    pub install: Option<InstallRelay>,
    /// The addresses that an App's own relay can have.
    pub reach: OutboundPolicy,
}

/// The relay of the install, and its sender address.
#[derive(Clone, Debug)]
pub struct InstallRelay {
    pub relay: SmtpRelay,
    pub from: Mailbox,
}
