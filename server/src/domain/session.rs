//! Sessions: what Redis keeps of them.

use std::{fmt, str::FromStr};

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
