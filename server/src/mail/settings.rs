//! Settings of the install for the mail of all Apps.

use latchkey_crds::{rendered::SmtpRelay, types::Mailbox};

use crate::outbound::OutboundPolicy;

/// Settings of the install for the mail of all Apps.
#[derive(Clone, Debug, Default)]
pub struct MailSettings {
    /// The relay of the install. Without it, mail of Apps without their own relay waits.
    pub install: Option<InstallRelay>,
    /// The IP addresses that an App's own relay can have.
    pub reach: OutboundPolicy,
}

/// The relay of the install, and the sender of its mails.
#[derive(Clone, Debug)]
pub struct InstallRelay {
    pub relay: SmtpRelay,
    pub from: Mailbox,
}
