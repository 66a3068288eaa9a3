//! Sessions, as Redis stores them.

use std::{fmt, str::FromStr, time::Duration};

use latchkey_crds::rendered::Window;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::user::{Epoch, UserId};

/// The id of a session: `session_id` in the API, `sid` in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(pub Uuid);

/// The generation of a browser session, which has no refresh token: the largest integer that a Lua number represents
/// exactly. Every refresh token has a lower generation, so no refresh token matches a browser session, on servers of
/// any version. A lookup recognizes a browser session by this value alone.
pub const NO_REFRESH_TOKEN: u64 = (1 << 53) - 1;

/// The kind of a session in the store. Sessions of the App and of clients have no kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SessionKind {
    /// A browser that is logged in to the pages (specification: Browser sessions, Session).
    Browser,
}

/// The kind of a client session, as lists show it.
const CLIENT_KIND: &str = "client";

/// How a user authenticated (RFC 8176).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Amr {
    /// A password.
    #[serde(rename = "pwd")]
    Password,
    /// A code that was sent by email.
    #[serde(rename = "otp")]
    Code,
    /// Another service authenticated the user.
    #[serde(rename = "fed")]
    Federated,
}

/// A session to open.
#[derive(Clone, Debug)]
pub struct NewSession {
    pub kind: Option<SessionKind>,
    pub id: SessionId,
    pub user: UserId,
    /// The epoch that was read together with the data that authenticated the user, for example the password hash.
    pub epoch: Epoch,
    pub profile: Profile,
    pub amr: Amr,
    pub auth_time: OffsetDateTime,
    pub ip: String,
    pub user_agent: Option<String>,
    /// The session ends at this time at the latest.
    pub ends_at: OffsetDateTime,
    /// The session ends if it is not used for this long.
    pub idle_seconds: u32,
}

/// A live session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub id: SessionId,
    pub user: UserId,
    pub epoch: Epoch,
    /// The generation of the current refresh token. [`NO_REFRESH_TOKEN`] for a browser session.
    pub generation: u64,
    pub amr: Amr,
    pub auth_time: OffsetDateTime,
}

/// The claims about a user. Redis stores them together with the sessions, so that a refresh does not need Postgres.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// The version of the user ([`User::version`](super::user::User::version)). An older profile never replaces a newer
    /// one.
    pub version: i64,
    pub email: Option<String>,
    pub email_verified: bool,
    pub name: String,
}

/// A live session and the profile of its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSession {
    pub session: Session,
    pub profile: Profile,
}

/// A session in the user's list of sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// `None` for a session of the App, and for a kind that only newer servers know.
    pub kind: Option<SessionKind>,
    pub id: SessionId,
    pub created_at: OffsetDateTime,
    /// Updated by each rotation of the refresh token, and by other uses at most once a minute.
    pub last_used_at: OffsetDateTime,
    /// The IP address of the client that opened the session.
    pub ip: String,
    pub user_agent: Option<String>,
    pub amr: Amr,
    /// Set for a session of a client (`domain/openid/client_session.rs`), which has no [`SessionKind`].
    pub client_id: Option<String>,
}

/// The App's settings for a refresh.
#[derive(Clone, Debug)]
pub struct RefreshRules {
    /// The grace period: how long the previous refresh token is still accepted and not counted as late.
    pub grace_seconds: u32,
    /// The windows of the rate limit on new generations; all apply.
    pub windows: Vec<Window>,
}

/// The outcome of a refresh (specification: Sessions and tokens, Refresh).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefreshOutcome {
    /// The session continues. Its generation is the generation of the refresh token to return.
    Renewed(RefreshKind, LiveSession),
    /// The rate limit on new generations is reached; nothing was changed.
    Limited { window: Window, retry_after: Duration },
    /// The token is older than the previous token of the session, or the previous token was used late too often: two
    /// clients have tokens of the session. The session has ended.
    ReuseDetected,
    /// There is no such live session.
    NotFound,
}

/// Why the session continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RefreshKind {
    /// The token was the current one.
    Rotated,
    /// The token was the previous one, within the grace period. The response has the current token again.
    Repeated,
    /// The token was the previous one, after the grace period, but the current token was never used: the response with
    /// the current token may have been lost. The response has the current token again.
    Late,
    /// The generation of the token was newer than the stored generation: Redis has lost data.
    Adopted,
}

/// The outcome of opening a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenOutcome {
    Opened,
    /// The epoch has risen since it was read: a concurrent change to the user, for example a password reset, came
    /// first.
    EpochRaised,
}

// === impl Session ===

impl Session {
    /// Returns the session as it is directly after it was opened.
    pub fn opened(new: &NewSession) -> Self {
        let generation = match new.kind {
            None => 1,
            Some(SessionKind::Browser) => NO_REFRESH_TOKEN,
        };
        Self { id: new.id, user: new.user, epoch: new.epoch, generation, amr: new.amr, auth_time: new.auth_time }
    }

    /// The kind of the session. `None` for a session of the App.
    pub fn kind(&self) -> Option<SessionKind> {
        (self.generation == NO_REFRESH_TOKEN).then_some(SessionKind::Browser)
    }
}

// === impl SessionKind ===

impl SessionKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Browser => "browser",
        }
    }
}

// === impl SessionInfo ===

impl SessionInfo {
    /// The kind as lists show it. `None` for a session of the App.
    pub fn kind_name(&self) -> Option<&'static str> {
        if self.client_id.is_some() { Some(CLIENT_KIND) } else { self.kind.map(SessionKind::as_str) }
    }
}

// === impl Profile ===

impl Profile {
    /// Returns the email address, if it is verified.
    pub fn verified_email(&self) -> Option<&str> {
        self.email.as_deref().filter(|_| self.email_verified)
    }
}

// === impl SessionId ===

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for SessionId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, uuid::Error> {
        text.parse().map(Self)
    }
}

// === impl Amr ===

impl Amr {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Password => "pwd",
            Self::Code => "otp",
            Self::Federated => "fed",
        }
    }
}
