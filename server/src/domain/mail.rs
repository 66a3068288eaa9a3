//! What is to be mailed, decided in a request and sent later from the outbox.

use time::OffsetDateTime;

use super::user::{Epoch, UserId};

/// The mails there are; the name is that of their templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MailKind {
    Confirm,
    Reset,
    AccountExists,
    PasswordChanged,
    /// A change of the address was asked for.
    AddressChanging,
    /// The address was changed; goes to the old one.
    AddressChanged,
    NewSignIn,
}

/// A row for the outbox. The address is read when the mail is sent, and the code is made then.
#[derive(Clone, Debug)]
pub struct Mail {
    pub kind: MailKind,
    /// Whose stored address it goes to; none: the row sends nothing, and is there so that known and unknown addresses
    /// cost the same.
    pub user: Option<UserId>,
    /// When the request that asked for it came.
    pub requested_at: OffsetDateTime,
}

/// A raised epoch that Redis must learn; a row of the same transaction carries it where the request could not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochNews {
    pub user: UserId,
    pub epoch: Epoch,
    /// The session that made the change, and goes on.
    pub keep: Option<super::session::SessionId>,
}

// === impl MailKind ===

impl MailKind {
    pub const ALL: [Self; 7] = [
        Self::Confirm,
        Self::Reset,
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
            Self::AccountExists => "account-exists",
            Self::PasswordChanged => "password-changed",
            Self::AddressChanging => "address-changing",
            Self::AddressChanged => "address-changed",
            Self::NewSignIn => "new-sign-in",
        }
    }
}
