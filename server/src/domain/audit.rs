//! What is written down of accounts: events, one row each, and refusals, counted together.

use std::net::IpAddr;

use latchkey_crds::types::ProviderName;
use serde::Serialize;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    client::{Caller, ClientAddress},
    clock::Env,
    email::AccountKey,
    session::{Amr, SessionId},
    user::UserId,
};

/// What happened. The name is a row's kind; docs/audit.md has a line for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    Registered,
    /// Somebody registered the address of the account again.
    RegisteredAgain,
    /// The signed-in user asked for the confirmation code again.
    ConfirmationRequested,
    Confirmed,
    /// A session was opened; the detail says how the user showed who they are.
    LoggedIn,
    LoggedOut,
    PasswordResetRequested,
    PasswordReset,
    PasswordChanged,
    AddressChangeRequested,
    AddressChanged,
    Renamed,
    /// One session was ended from a list, or its token was revoked; the detail names it.
    SessionEnded,
    /// All others were ended at once.
    SessionsEnded,
    /// A refresh token came once more, long after its grace time.
    RefreshLate,
    /// A refresh token came that only a thief or a victim can have; the session was ended.
    RefreshStolen,
    IdentityLinked,
    IdentityUnlinked,
    UserDeleted,
    /// The account was deleted by the upkeep: its address was not verified in time.
    UserExpired,
    LogInRefused,
    LogInLimited,
    PasswordCheckRefused,
    PasswordResetRefused,
}

/// What was refused to somebody who named an account. Written as one row per account, client address and quarter of an
/// hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefusalKind {
    /// The password was wrong, or its user may not log in.
    LogIn,
    /// A limit was reached before the password was looked at.
    LogInLimit,
    /// A signed-in user's password was wrong where it is asked for again.
    PasswordCheck,
    /// The code of a reset was wrong.
    PasswordReset,
}

/// One event of an account.
#[derive(Clone, Debug)]
pub struct Event {
    pub id: Uuid,
    pub kind: EventKind,
    /// None: nothing is written. So an address without an account costs what one with an account does.
    pub user: Option<UserId>,
    /// By which session it was done, or the one that it opened.
    pub session: Option<SessionId>,
    pub ip: Option<IpAddr>,
    pub at: OffsetDateTime,
    pub detail: Detail,
}

/// What else there is to say of an event. Closed: nothing that a caller wrote, no address, no secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Detail {
    /// How the user showed who they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amr: Option<Amr>,
    /// The Provider's name in the App.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderName>,
    /// The session that was ended, where another ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<SessionId>,
    /// How many were ended at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions: Option<usize>,
}

/// One refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub kind: RefusalKind,
    /// The account that was named, whether there is one or not.
    pub account: Option<AccountKey>,
    /// Where the account was looked up, and is there.
    pub user: Option<UserId>,
    pub client: ClientAddress,
}

/// An event as its user may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    pub at: OffsetDateTime,
    pub kind: EventKind,
    /// Of refusals an IPv6 client address is its /64.
    pub ip: Option<String>,
    pub session: Option<SessionId>,
    /// How many refusals the row tells of; 1 for what is no refusal.
    pub count: u64,
}

// === impl EventKind ===

impl EventKind {
    pub const ALL: [Self; 24] = [
        Self::Registered,
        Self::RegisteredAgain,
        Self::ConfirmationRequested,
        Self::Confirmed,
        Self::LoggedIn,
        Self::LoggedOut,
        Self::PasswordResetRequested,
        Self::PasswordReset,
        Self::PasswordChanged,
        Self::AddressChangeRequested,
        Self::AddressChanged,
        Self::Renamed,
        Self::SessionEnded,
        Self::SessionsEnded,
        Self::RefreshLate,
        Self::RefreshStolen,
        Self::IdentityLinked,
        Self::IdentityUnlinked,
        Self::UserDeleted,
        Self::UserExpired,
        Self::LogInRefused,
        Self::LogInLimited,
        Self::PasswordCheckRefused,
        Self::PasswordResetRefused,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::RegisteredAgain => "registered_again",
            Self::ConfirmationRequested => "confirmation_requested",
            Self::Confirmed => "confirmed",
            Self::LoggedIn => "logged_in",
            Self::LoggedOut => "logged_out",
            Self::PasswordResetRequested => "password_reset_requested",
            Self::PasswordReset => "password_reset",
            Self::PasswordChanged => "password_changed",
            Self::AddressChangeRequested => "address_change_requested",
            Self::AddressChanged => "address_changed",
            Self::Renamed => "renamed",
            Self::SessionEnded => "session_ended",
            Self::SessionsEnded => "sessions_ended",
            Self::RefreshLate => "refresh_late",
            Self::RefreshStolen => "refresh_stolen",
            Self::IdentityLinked => "identity_linked",
            Self::IdentityUnlinked => "identity_unlinked",
            Self::UserDeleted => "user_deleted",
            Self::UserExpired => "user_expired",
            Self::LogInRefused => "login_refused",
            Self::LogInLimited => "login_limited",
            Self::PasswordCheckRefused => "password_check_refused",
            Self::PasswordResetRefused => "password_reset_refused",
        }
    }

    /// The kind of that name; none where a newer server wrote it.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

// === impl RefusalKind ===

impl RefusalKind {
    pub const ALL: [Self; 4] = [Self::LogIn, Self::LogInLimit, Self::PasswordCheck, Self::PasswordReset];

    /// As what it is written down.
    pub const fn event(self) -> EventKind {
        match self {
            Self::LogIn => EventKind::LogInRefused,
            Self::LogInLimit => EventKind::LogInLimited,
            Self::PasswordCheck => EventKind::PasswordCheckRefused,
            Self::PasswordReset => EventKind::PasswordResetRefused,
        }
    }
}

// === impl Event ===

impl Event {
    /// An event of this moment, at the request of this caller. Without a user it costs the same and leaves no row.
    pub fn new(env: &Env, caller: &Caller, kind: EventKind, user: impl Into<Option<UserId>>) -> Self {
        Self {
            id: env.uuid(),
            kind,
            user: user.into(),
            session: None,
            ip: Some(caller.ip.to_canonical()),
            at: env.now(),
            detail: Detail::default(),
        }
    }

    #[must_use]
    pub fn in_session(self, session: SessionId) -> Self {
        Self { session: Some(session), ..self }
    }

    #[must_use]
    pub fn with(self, detail: Detail) -> Self {
        Self { detail, ..self }
    }
}

// === impl Refusal ===

impl Refusal {
    pub fn new(kind: RefusalKind, caller: &Caller, account: Option<AccountKey>, user: Option<UserId>) -> Self {
        Self { kind, account, user, client: caller.address() }
    }
}

// === impl Detail ===

impl Detail {
    pub fn amr(amr: Amr) -> Self {
        Self { amr: Some(amr), ..Self::default() }
    }

    pub fn ended(session: SessionId) -> Self {
        Self { ended: Some(session), ..Self::default() }
    }

    pub fn sessions(ended: usize) -> Self {
        Self { sessions: Some(ended), ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_line_in_the_docs() {
        let page = include_str!("../../../docs/audit.md");
        for kind in EventKind::ALL {
            let name = kind.as_str();
            assert_eq!(page.lines().filter(|line| line.starts_with(&format!("| `{name}` |"))).count(), 1, "{name}");
            assert_eq!(EventKind::named(name), Some(kind));
        }
        assert_eq!(EventKind::named("of_tomorrow"), None);
    }

    #[test]
    fn a_detail_says_only_what_there_is() {
        let text = |detail: Detail| serde_json::to_string(&detail).unwrap();
        assert_eq!(text(Detail::amr(Amr::Federated)), r#"{"amr":"fed"}"#);
        assert_eq!(text(Detail::sessions(3)), r#"{"sessions":3}"#);
        assert!(Detail::default().is_empty() && !Detail::sessions(0).is_empty());
    }
}
