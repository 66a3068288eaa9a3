//! Rate limits: which limits apply to a request, and what each limit counts (specification: Limits, Rate limits).

use std::time::Duration;

use latchkey_crds::rendered::{ClientLimitName, LimitName, Window};
use serde::Deserialize;

use super::{app::App, client::ClientAddress, email::AccountKey, mail::MailKind, openid::client::OpenIdClient};

/// The factor by which the limits of an IPv6 /48 are higher than the limits of one client address.
const IPV6_SITE_FACTOR: u32 = 10;

/// The name of any rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(untagged)]
pub enum Limit {
    Account(LimitName),
    Client(ClientLimitName),
}

/// One rate limit on one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitCheck {
    pub limit: Limit,
    /// The subject for which uses are counted, for example a client address. Unique among the subjects of the limit in
    /// the App. Contains no email address in clear text.
    pub subject: String,
    /// A use must fit into every window.
    pub windows: Vec<Window>,
}

/// A rate limit is reached. No use was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("limit {} is reached", .limit.as_str())]
pub struct RateLimited {
    pub limit: Limit,
    pub window: Window,
    pub retry_after: Duration,
}

/// The purpose of a mail. Mails of one purpose share a rate limit, so that the limit does not reveal which of them was
/// sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailPurpose {
    /// Mails with a code that confirms an email address, and the notice that the owner of a known email address gets
    /// instead.
    Confirm,
    Reset,
}

// === impl Limit ===

impl Limit {
    /// The name in manifests, responses and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Account(limit) => limit.as_str(),
            Self::Client(limit) => limit.as_str(),
        }
    }

    fn windows(self, app: &App) -> Vec<Window> {
        match self {
            Self::Account(limit) => app.windows(limit),
            Self::Client(limit) => app.client_windows(limit),
        }
    }
}

impl From<LimitName> for Limit {
    fn from(limit: LimitName) -> Self {
        Self::Account(limit)
    }
}

impl From<ClientLimitName> for Limit {
    fn from(limit: ClientLimitName) -> Self {
        Self::Client(limit)
    }
}

// === impl MailPurpose ===

impl MailPurpose {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Confirm => "confirm",
            Self::Reset => "reset",
        }
    }
}

/// Returns the checks of a limit per client address. An IPv6 address is also checked by its /48.
fn per_client(app: &App, limit: impl Into<Limit>, client: ClientAddress, suffix: &str) -> Vec<RateLimitCheck> {
    let limit = limit.into();
    let windows = limit.windows(app);
    let mut checks = vec![RateLimitCheck { limit, subject: format!("{client}{suffix}"), windows: windows.clone() }];
    if let Some(site) = client.ipv6_site() {
        let windows = windows
            .into_iter()
            .map(|window| Window { count: window.count.saturating_mul(IPV6_SITE_FACTOR), ..window })
            .collect();
        checks.push(RateLimitCheck { limit, subject: format!("{site}{suffix}"), windows });
    }
    checks
}

/// Returns the rate limits for every call that checks a password, sets a password in a session, calls the provider for
/// a login, or changes an account in another way. They are acquired before any of these actions, and are not released
/// after the action has started.
pub fn logins(app: &App, client: ClientAddress) -> Vec<RateLimitCheck> {
    per_client(app, LimitName::LoginsPerClient, client, "")
}

/// Returns the rate limits on wrong passwords, for every call that checks a password. They are acquired before hashing,
/// and released if the password was right or was not checked. `is_known`: whether the client address is known to the
/// account ([`RateLimits::is_known_client`](crate::domain::ports::RateLimits::is_known_client)).
pub fn login_failures(app: &App, client: ClientAddress, account: &AccountKey, is_known: bool) -> Vec<RateLimitCheck> {
    let mut failures = per_client(app, LimitName::LoginFailuresPerClient, client, &format!(" {}", account.as_str()));
    failures.extend(per_client(app, LimitName::LoginFailuresPerClientOverall, client, ""));
    if !is_known {
        failures.push(RateLimitCheck {
            limit: LimitName::LoginFailuresPerAccount.into(),
            subject: account.as_str().to_owned(),
            windows: app.windows(LimitName::LoginFailuresPerAccount),
        });
    }
    failures
}

pub fn registrations(app: &App, client: ClientAddress) -> Vec<RateLimitCheck> {
    per_client(app, LimitName::RegistrationsPerClient, client, "")
}

/// Returns the rate limits for every call with a code, or with a code and a new password. They are acquired before the
/// code is checked, and released unless the code is invalid or the password is weak.
pub fn codes(app: &App, client: ClientAddress) -> Vec<RateLimitCheck> {
    per_client(app, LimitName::CodesPerClient, client, "")
}

/// Returns the rate limit for a mail that an administrator requests. These mails and the mails that users request are
/// counted separately, so that neither kind uses up the limit of the other.
pub fn administrator_mails(app: &App, account: &AccountKey, kind: MailKind) -> Vec<RateLimitCheck> {
    let limit = LimitName::MailsPerRecipient;
    let subject = format!("{} administrator {}", account.as_str(), kind.as_str());
    vec![RateLimitCheck { limit: limit.into(), subject, windows: app.windows(limit) }]
}

/// Returns the rate limits for a mail to an email address. `is_known`: whether the client address is known to the
/// account ([`RateLimits::is_known_client`](crate::domain::ports::RateLimits::is_known_client)). Mails that are
/// requested from a known client address are counted separately, so that a stranger cannot use up the owner's limit.
pub fn mails(
    app: &App,
    client: ClientAddress,
    account: &AccountKey,
    purpose: MailPurpose,
    is_known: bool,
) -> Vec<RateLimitCheck> {
    let suffix = if is_known { " known" } else { "" };
    let mut checks = vec![RateLimitCheck {
        limit: LimitName::MailsPerRecipient.into(),
        subject: format!("{} {}{suffix}", account.as_str(), purpose.as_str()),
        windows: app.windows(LimitName::MailsPerRecipient),
    }];
    checks.extend(per_client(app, LimitName::MailsPerClient, client, ""));
    checks
}

/// Returns the rate limit on authorization codes from one client address.
pub fn authorizations(app: &App, client: ClientAddress) -> Vec<RateLimitCheck> {
    per_client(app, ClientLimitName::AuthorizationsPerClientAddress, client, "")
}

/// Returns the rate limit on the requests of a client, which are counted after its authentication. A public client does
/// not authenticate, so the requests of each client address are counted separately: no client address can use up the
/// limit for the others.
pub fn token_requests(app: &App, openid_client: &OpenIdClient, client: ClientAddress) -> Vec<RateLimitCheck> {
    let limit = ClientLimitName::TokenRequestsPerClientId;
    if openid_client.is_public() {
        return per_client(app, limit, client, &format!(" {}", openid_client.uid));
    }
    vec![RateLimitCheck {
        limit: limit.into(),
        subject: openid_client.uid.to_string(),
        windows: app.client_windows(limit),
    }]
}

/// Returns the rate limit on failed authentications of a client from one client address. Checked before the
/// credentials, and acquired after a failure. All unknown clients are counted together, so that invented ids need no
/// memory in Redis.
pub fn client_failures(app: &App, openid_client: Option<&OpenIdClient>, client: ClientAddress) -> Vec<RateLimitCheck> {
    let suffix = openid_client.map_or_else(String::new, |openid_client| format!(" {}", openid_client.uid));
    per_client(app, ClientLimitName::ClientFailuresPerClientAddress, client, &suffix)
}
