//! Settings of the installation for the mail of all Apps.

use latchkey_crds::{rendered::SmtpRelay, types::Mailbox};

use crate::outbound::OutboundPolicy;

/// Settings of the installation for the mail of all Apps.
#[derive(Clone, Debug, Default)]
pub struct MailSettings {
    /// The relay of the installation. Without it, the mails of an App wait unless the App has both its own relay and
    /// `from`.
    pub install: Option<InstallRelay>,
    /// The IP addresses that an App's own relay can have.
    pub reach: OutboundPolicy,
}

/// The relay of the installation, and the sender of the mails that go through it. The sender is also used for Apps that
/// have their own relay but no `from`.
#[derive(Clone, Debug)]
pub struct InstallRelay {
    pub relay: SmtpRelay,
    pub from: Mailbox,
}
