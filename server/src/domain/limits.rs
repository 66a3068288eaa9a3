//! The limits of contract 7: which apply to a request, and under what subject they count.

use std::time::Duration;

use latchkey_crds::rendered::{LimitName, Window};

use super::{
    app::App,
    client::{Caller, ClientAddress},
    email::AccountKey,
    mail::MailKind,
};

/// How much more the /48 of an IPv6 client may do than one client address.
const SITE_FACTOR: u32 = 10;

/// One limit on one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub limit: LimitName,
    /// Who or what is counted; unique among the subjects of the limit in the App. Holds no clear address of a user.
    pub subject: String,
    /// All must hold.
    pub windows: Vec<Window>,
}

/// A limit is reached; nothing was consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("limit {} is reached", .limit.as_str())]
pub struct Limited {
    pub limit: LimitName,
    pub window: Window,
    pub retry_after: Duration,
}

/// Which mails share a limit: those that a caller cannot tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailPurpose {
    /// What register and verify send, whether the address is known or not.
    Confirm,
    Reset,
}

// === impl MailPurpose ===

impl MailPurpose {
    /// None for notices, which are never limited.
    pub const fn of(kind: MailKind) -> Option<Self> {
        match kind {
            MailKind::Confirm | MailKind::AccountExists => Some(Self::Confirm),
            MailKind::Reset => Some(Self::Reset),
            MailKind::PasswordChanged | MailKind::AddressChanging | MailKind::AddressChanged | MailKind::NewSignIn => {
                None
            }
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Confirm => "confirm",
            Self::Reset => "reset",
        }
    }
}

/// A limit per client address, with that of its /48 where there is one.
fn per_client(app: &App, limit: LimitName, client: ClientAddress, suffix: &str) -> Vec<Check> {
    let windows = app.windows(limit);
    let mut checks = vec![Check { limit, subject: format!("{client}{suffix}"), windows: windows.clone() }];
    if let Some(site) = client.site() {
        let windows = windows
            .into_iter()
            .map(|window| Window { count: window.count.saturating_mul(SITE_FACTOR), ..window })
            .collect();
        checks.push(Check { limit, subject: format!("{site}{suffix}"), windows });
    }
    checks
}

/// Every call that checks a password, or sets one in a session. Taken before the work; counts whatever the outcome.
pub fn login_attempts(app: &App, caller: &Caller) -> Vec<Check> {
    per_client(app, LimitName::LoginsPerClient, caller.address(), "")
}

/// Every call that checks a password. Taken before hashing, and given back when the password was right. `exempt`: the
/// client address signed in, confirmed or reset for this account in the last 30 days.
pub fn login_failures(app: &App, caller: &Caller, account: &AccountKey, exempt: bool) -> Vec<Check> {
    let client = caller.address();
    let mut failures = per_client(app, LimitName::LoginFailuresPerClient, client, &format!(" {}", account.as_str()));
    failures.extend(per_client(app, LimitName::LoginFailuresPerClientOverall, client, ""));
    if !exempt {
        failures.push(Check {
            limit: LimitName::LoginFailuresPerAccount,
            subject: account.as_str().to_owned(),
            windows: app.windows(LimitName::LoginFailuresPerAccount),
        });
    }
    failures
}

pub fn registration(app: &App, caller: &Caller) -> Vec<Check> {
    per_client(app, LimitName::RegistrationsPerClient, caller.address(), "")
}

/// A callback, or a login with a provider's token: the provider is asked, which costs more than a look into our own
/// stores.
pub fn provider_login(app: &App, caller: &Caller) -> Vec<Check> {
    per_client(app, LimitName::LoginsPerClient, caller.address(), "")
}

/// Taken before a code is looked at or a new password is judged; given back when both were good.
pub fn codes(app: &App, caller: &Caller) -> Vec<Check> {
    per_client(app, LimitName::CodesPerClient, caller.address(), "")
}

/// `known`: the client address signed in, confirmed or reset for this account lately; such mails are counted apart, so
/// that a stranger cannot use up the owner's.
pub fn mail(app: &App, caller: &Caller, account: &AccountKey, purpose: MailPurpose, known: bool) -> Vec<Check> {
    let apart = if known { " known" } else { "" };
    let mut checks = vec![Check {
        limit: LimitName::MailsPerRecipient,
        subject: format!("{} {}{apart}", account.as_str(), purpose.as_str()),
        windows: app.windows(LimitName::MailsPerRecipient),
    }];
    checks.extend(per_client(app, LimitName::MailsPerClient, caller.address(), ""));
    checks
}
