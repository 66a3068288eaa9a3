//! Sessions: what Redis keeps of them.

use std::{fmt, str::FromStr, time::Duration};

use latchkey_crds::rendered::Window;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::user::{Epoch, UserId};

/// `session_id` of the interface and `sid` of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(pub Uuid);

/// How a user showed who they are (RFC 8176).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Amr {
    /// A password.
    #[serde(rename = "pwd")]
    Password,
    /// A code that was mailed.
    #[serde(rename = "otp")]
    Code,
    /// Another service vouched.
    #[serde(rename = "fed")]
    Federated,
}

/// A session to be opened.
#[derive(Clone, Debug)]
pub struct NewSession {
    pub id: SessionId,
    pub user: UserId,
    /// Read together with what the login was judged on.
    pub epoch: Epoch,
    pub profile: Profile,
    pub amr: Amr,
    pub auth_time: OffsetDateTime,
    pub ip: String,
    pub user_agent: Option<String>,
    /// Ends at this time whatever happens.
    pub ends_at: OffsetDateTime,
    /// Ends when not used for so long.
    pub idle_seconds: u32,
}

/// A live session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub id: SessionId,
    pub user: UserId,
    pub epoch: Epoch,
    /// The number of the refresh token that is current.
    pub generation: u64,
    pub amr: Amr,
    pub auth_time: OffsetDateTime,
}

/// What tokens say of a user. Kept beside the sessions, so that a refresh asks no other store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Counts the changes of the user: an older profile never replaces a newer one.
    pub version: i64,
    pub email: Option<String>,
    pub email_verified: bool,
    pub name: String,
}

/// A live session, and what tokens say of its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSession {
    pub session: Session,
    pub profile: Profile,
}

/// A session as its user sees it in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    pub id: SessionId,
    pub created_at: OffsetDateTime,
    /// Noted at most once a minute.
    pub last_used_at: OffsetDateTime,
    /// Where it was opened from.
    pub ip: String,
    pub user_agent: Option<String>,
    pub amr: Amr,
}

/// What a refresh is judged by.
#[derive(Clone, Debug)]
pub struct RefreshRules {
    /// For how long a token that was just replaced gives the same answer again.
    pub grace_seconds: u32,
    /// Of the limit on new generations; all must hold.
    pub windows: Vec<Window>,
}

/// What became of a refresh (contract, 4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refreshed {
    /// The session goes on, at the generation of the token to answer.
    Live(Renewal, LiveSession),
    /// Too many new generations; nothing was consumed.
    Limited { window: Window, retry_after: Duration },
    /// The token is older than the last: two hold tokens of the session, which has ended.
    Stolen,
    /// There is no such session.
    Gone,
}

/// How a session went on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Renewal {
    /// The token was the current one.
    Next,
    /// It was the one before, within the grace time: the same answer again.
    Again,
    /// It was the one before, after the grace time, and the current one was never used: its answer may have been lost.
    Late,
    /// It was newer than what the store knew, which has gone back in time.
    Adopted,
}

/// What became of opening a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    Opened,
    /// The epoch has moved since it was read: the login raced a reset or a disabling, and lost.
    Stale,
}

// === impl Session ===

impl Session {
    /// As it is right after it was opened.
    pub fn opened(new: &NewSession) -> Self {
        Self { id: new.id, user: new.user, epoch: new.epoch, generation: 1, amr: new.amr, auth_time: new.auth_time }
    }
}

// === impl Profile ===

impl Profile {
    /// The address, where it may be told as the user's.
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
