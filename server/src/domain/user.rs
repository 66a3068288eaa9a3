//! A user of an App, and the values that users have.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    email::Email,
    password::PasswordHash,
    session::{Profile, SessionId},
};

/// `local_id` and `id` of the interface: one value, UUIDv7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UserId(pub Uuid);

/// Counts the changes that end sessions and codes (contract, 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub i64);

/// A display name: trimmed, 1–200 characters, no control characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Name(Box<str>);

/// Why a string is not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAName {
    #[error("is empty")]
    Empty,
    #[error("is longer than 200 characters")]
    TooLong,
    #[error("has a control character")]
    ControlCharacter,
}

/// A user as Postgres has it at one moment.
#[derive(Clone, Debug)]
pub struct User {
    pub id: UserId,
    /// The address; none where the App allows users without one, or while the only one is pending.
    pub email: Option<Email>,
    pub email_verified: bool,
    /// The address that waits for its code, after a change was asked for.
    pub pending_email: Option<Email>,
    pub name: String,
    pub password_hash: Option<PasswordHash>,
    /// May set a password without the old one: *confirm* took that from a contested account and answered this session.
    pub password_session: Option<SessionId>,
    /// Somebody registered again with another password before the address was confirmed.
    pub contested: bool,
    pub disabled: bool,
    pub epoch: Epoch,
    /// Counts the changes of name, address and epoch.
    pub version: i64,
    pub created_at: OffsetDateTime,
    pub updated_at: OffsetDateTime,
}

// === impl User ===

impl User {
    /// What tokens say of the user.
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

    pub fn parse(input: &str) -> Result<Self, NotAName> {
        let trimmed = input.trim();
        if trimmed.is_empty() {
            return Err(NotAName::Empty);
        }
        if trimmed.chars().any(char::is_control) {
            return Err(NotAName::ControlCharacter);
        }
        if trimmed.chars().count() > Self::MAX_CHARS {
            return Err(NotAName::TooLong);
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
        assert_eq!(Name::parse(&"é".repeat(201)), Err(NotAName::TooLong));
        assert_eq!(Name::parse(" \t "), Err(NotAName::Empty));
        assert_eq!(Name::parse("a\u{0}b"), Err(NotAName::ControlCharacter));
        assert_eq!(Name::parse("a\u{85}b"), Err(NotAName::ControlCharacter));
    }
}
