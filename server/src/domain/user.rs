//! A user of an App, and the values that a user has.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    email::Email,
    password::PasswordHash,
    session::{Profile, SessionId},
};

/// `local_id` and `id` of the API: one value, a UUIDv7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UserId(pub Uuid);

/// A counter of the changes that end sessions and codes (specification: Sessions and tokens, Epochs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub i64);

/// A display name: trimmed, 1–200 characters, no control characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Name(Box<str>);

/// Why a string is not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    #[error("is empty")]
    Empty,
    #[error("is longer than 200 characters")]
    TooLong,
    #[error("has a control character")]
    ControlCharacter,
}

/// A user, as read from Postgres.
#[derive(Clone, Debug)]
pub struct User {
    pub id: UserId,
    /// `None` while the only email address is pending, or for a user without one, if the App allows that.
    pub email: Option<Email>,
    pub email_verified: bool,
    /// The email address of a requested change, until its code is confirmed.
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
    /// Counts the changes of the name, the email address and the epoch.
    pub version: i64,
    pub created_at: OffsetDateTime,
    pub updated_at: OffsetDateTime,
}

// === impl User ===

impl User {
    /// The claims about the user that tokens contain.
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

// === impl Name ===

impl Name {
    pub const MAX_CHARS: usize = 200;

    pub fn parse(input: &str) -> Result<Self, InvalidName> {
        let trimmed = input.trim();
        if trimmed.is_empty() {
            return Err(InvalidName::Empty);
        }
        if trimmed.chars().any(char::is_control) {
            return Err(InvalidName::ControlCharacter);
        }
        if trimmed.chars().count() > Self::MAX_CHARS {
            return Err(InvalidName::TooLong);
        }
        Ok(Self(trimmed.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Name(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_trimmed_and_bounded() {
        assert_eq!(Name::parse("  Ada Lovelace ").unwrap().as_str(), "Ada Lovelace");
        assert!(Name::parse(&"é".repeat(200)).is_ok());
        assert_eq!(Name::parse(&"é".repeat(201)), Err(InvalidName::TooLong));
        assert_eq!(Name::parse(" \t "), Err(InvalidName::Empty));
        assert_eq!(Name::parse("a\u{0}b"), Err(InvalidName::ControlCharacter));
        assert_eq!(Name::parse("a\u{85}b"), Err(InvalidName::ControlCharacter));
    }
}
