//! The display name of a user.

use std::fmt;

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
    fn a_name_is_trimmed_and_has_1_to_200_characters_without_control_characters() {
        assert_eq!(Name::parse("  Ada Lovelace ").unwrap().as_str(), "Ada Lovelace");
        assert!(Name::parse(&"é".repeat(200)).is_ok());
        assert_eq!(Name::parse(&"é".repeat(201)), Err(InvalidName::TooLong));
        assert_eq!(Name::parse(" \t "), Err(InvalidName::Empty));
        assert_eq!(Name::parse("a\u{0}b"), Err(InvalidName::ControlCharacter));
        assert_eq!(Name::parse("a\u{85}b"), Err(InvalidName::ControlCharacter));
    }
}
