//! The users of an App, their ids and their epochs.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

pub use super::name::{InvalidName, Name};
use super::{
    email::Email,
    password::PasswordHash,
    session::{Profile, SessionId},
};

/// The id of a user, a UUIDv7. The API calls it `local_id` or `id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UserId(pub Uuid);

/// A counter of the changes that end sessions and codes (specification: Sessions and tokens, Epochs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub i64);

/// A user, as read from Postgres.
#[derive(Clone, Debug)]
pub struct User {
    pub id: UserId,
    /// `None` while the only email address is pending. Also `None` for a user without an email address, if the App
    /// allows such users.
    pub email: Option<Email>,
    pub email_verified: bool,
    /// An email address that is not confirmed yet. The user has requested a change to it, or a provider has sent it.
    pub pending_email: Option<Email>,
    pub name: String,
    pub password_hash: Option<PasswordHash>,
    /// The session that can set a password without the old one: *confirm* removed the password of a contested account
    /// and returned this session.
    pub password_session: Option<SessionId>,
    /// Somebody registered the email address again, with another password, before it was confirmed.
    pub contested: bool,
    pub disabled: bool,
    pub epoch: Epoch,
    /// Rises with every change to the user, except a login, a new hash of the same password, and a change of identities
    /// or groups.
    pub version: i64,
    pub created_at: OffsetDateTime,
    pub updated_at: OffsetDateTime,
}

// === impl User ===

impl User {
    /// Returns the claims about the user that tokens contain.
    pub fn profile(&self) -> Profile {
        Profile {
            version: self.version,
            email: self.email.as_ref().map(|email| email.as_str().to_owned()),
            email_verified: self.email_verified,
            name: self.name.clone(),
        }
    }
}

// === impl UserId ===

impl fmt::Display for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
