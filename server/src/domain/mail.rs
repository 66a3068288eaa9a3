//! Mails: a request decides them, the outbox sends them later.

use time::OffsetDateTime;

use super::user::{Epoch, UserId};

/// The kinds of mail; the name of a kind is the name of its template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MailKind {
    Confirm,
    Reset,
    AccountExists,
    PasswordChanged,
    /// A change of the address was requested; sent to the current address.
    AddressChanging,
    /// The address has changed; sent to the former address.
    AddressChanged,
    NewSignIn,
}

/// A mail for the outbox. The deliverer reads the address and makes the code when it sends the mail.
#[derive(Clone, Debug)]
pub struct Mail {
    pub kind: MailKind,
    /// The recipient; the mail goes to the stored address. `Unbound`: the outbox row sends nothing; it exists so that
    /// known and unknown addresses cost the same.
    pub recipient: Option<UserId>,
    /// When the request arrived that caused the mail.
    pub requested_at: OffsetDateTime,
}

/// A raised epoch that Redis must learn. An outbox row of the same transaction propagates it if the request could not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochChange {
    pub user: UserId,
    pub epoch: Epoch,
    /// The session that made the change and that continues.
    pub kept_session: Option<super::session::SessionId>,
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
