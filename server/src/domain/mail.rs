//! Mails. A use case queues them in the outbox, from which they are sent later.

use time::OffsetDateTime;

use super::user::{Epoch, UserId};

/// The kinds of mail. The name of a kind is also the name of its template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MailKind {
    Confirm,
    Reset,
    /// Contains a reset code, for a user that an administrator created without a password.
    Invitation,
    AccountExists,
    PasswordChanged,
    /// Reports that a change of the email address was requested. Goes to the current email address.
    AddressChanging,
    /// Reports that the email address has changed. Goes to the previous email address.
    AddressChanged,
    NewSignIn,
}

/// A mail for the outbox. The outbox worker reads the email address and makes the code when it sends the mail.
#[derive(Clone, Debug)]
pub struct Mail {
    pub kind: MailKind,
    /// The user who gets the mail, at the stored email address. `None` if the outbox row sends nothing: such a row only
    /// makes requests for known and unknown email addresses cost the same.
    pub recipient: Option<UserId>,
    /// The time of the request that caused the mail.
    pub requested_at: OffsetDateTime,
}

/// A raised epoch to propagate to Redis. If the request cannot propagate the epoch, the outbox worker does: the
/// transaction that raised the epoch has added an outbox row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochChange {
    pub user: UserId,
    pub epoch: Epoch,
    /// The session that made the change and that continues. If it is `None`, all sessions end.
    pub kept_session: Option<super::session::SessionId>,
}

// === impl MailKind ===

impl MailKind {
    pub const ALL: [Self; 8] = [
        Self::Confirm,
        Self::Reset,
        Self::Invitation,
        Self::AccountExists,
        Self::PasswordChanged,
        Self::AddressChanging,
        Self::AddressChanged,
        Self::NewSignIn,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confirm => "confirm",
            Self::Reset => "reset",
            Self::Invitation => "invitation",
            Self::AccountExists => "account-exists",
            Self::PasswordChanged => "password-changed",
            Self::AddressChanging => "address-changing",
            Self::AddressChanged => "address-changed",
            Self::NewSignIn => "new-sign-in",
        }
    }
}
