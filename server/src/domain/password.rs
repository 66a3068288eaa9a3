//! Passwords: their length, and the words that make a password easy to guess. `PasswordHasher` hashes and scores
//! passwords.

use std::{fmt, time::Duration};

use latchkey_crds::rendered::PasswordPolicy;
use unicode_normalization::UnicodeNormalization;
use zeroize::Zeroizing;

use super::{email::Email, name::Name};

/// The longest password that can be set, in characters after NFC.
pub const MAX_PASSWORD_CHARS: usize = 128;

/// A password in clear text, in NFC; erased when dropped, never printed.
#[derive(Clone)]
pub struct Password(Zeroizing<String>);

/// The hash of a password: a PHC string. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash(Box<str>);

/// Why a password cannot be set (`weak_password`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeakPassword {
    #[error("is shorter than {minimum} characters")]
    TooShort { minimum: u32 },
    #[error("is longer than {MAX_PASSWORD_CHARS} characters")]
    TooLong,
    #[error("is too easy to guess; use a longer or less common one")]
    Guessable,
}

/// The hashing queue was full, or the job did not run in time (`temporarily_unavailable`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("password hashing is at capacity")]
pub struct Overloaded {
    pub retry_after: Duration,
}

// === impl Password ===

impl Password {
    pub fn new(input: &str) -> Self {
        Self(Zeroizing::new(input.nfc().collect()))
    }

    /// The password itself, only for hashing and scoring.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Checks the length. `PasswordHasher` checks the strength.
    pub fn check_length(&self, policy: &PasswordPolicy) -> Result<(), WeakPassword> {
        let chars = self.0.chars().count();
        if chars < policy.minimum_length as usize {
            return Err(WeakPassword::TooShort { minimum: policy.minimum_length });
        }
        if chars > MAX_PASSWORD_CHARS {
            return Err(WeakPassword::TooLong);
        }
        Ok(())
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(…)")
    }
}

/// The words that an attacker would try first for this user: the email address, its parts, the name and its words.
pub fn likely_guesses(email: Option<&Email>, name: Option<&Name>) -> Vec<String> {
    let mut words = Vec::new();
    if let Some(email) = email {
        words.extend([email.canonical(), email.local_part(), email.domain()].map(str::to_owned));
        words.extend(email.local_part().split(['.', '-', '_', '+']).map(str::to_owned));
        words.extend(email.domain().split('.').map(str::to_owned));
    }
    if let Some(name) = name {
        words.push(name.as_str().to_owned());
        words.extend(name.as_str().split_whitespace().map(str::to_owned));
    }
    words.retain(|word| word.chars().count() >= 2);
    words
}

// === impl PasswordHash ===

impl PasswordHash {
    pub fn new(phc: impl Into<Box<str>>) -> Self {
        Self(phc.into())
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordHash(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: PasswordPolicy = PasswordPolicy {
        minimum_length: 8,
        minimum_strength: 2,
        foreign_hash_retention_days: None,
        firebase_scrypt: None,
    };

    #[test]
    fn length_is_counted_in_characters_after_nfc() {
        let check = |text: &str| Password::new(text).check_length(&POLICY);
        assert_eq!(check(&"é".repeat(8)), Ok(()));
        assert_eq!(check(&"e\u{301}".repeat(7)), Err(WeakPassword::TooShort { minimum: 8 }));
        assert_eq!(check(&"x".repeat(128)), Ok(()));
        assert_eq!(check(&"x".repeat(129)), Err(WeakPassword::TooLong));
        assert_eq!(check(" a b c d "), Ok(()), "never trimmed");
    }
}
