//! Passwords: their length, and the words that make a password easy to guess. `PasswordHasher` hashes and scores
//! passwords.

use std::{fmt, time::Duration};

use latchkey_crds::rendered::PasswordPolicy;
use unicode_normalization::UnicodeNormalization;
use zeroize::Zeroizing;

use super::{
    email::Email,
    foreign_hash::{HashClass, ParsedHash},
    name::Name,
};

/// The longest password that can be set, in characters after NFC.
pub const MAX_PASSWORD_CHARS: usize = 128;

/// A password in clear text, in NFC and as it was sent; erased when dropped, never printed.
#[derive(Clone)]
pub struct Password {
    nfc: Zeroizing<String>,
    /// `None` if it is the same as `nfc`.
    as_sent: Option<Zeroizing<String>>,
}

/// The hash of a password in PHC or MCF form, made by the servers or imported from another service (foreign). Erased
/// when dropped, never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash(Zeroizing<String>);

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
        let nfc: Zeroizing<String> = Zeroizing::new(input.nfc().collect());
        let as_sent = (*nfc != input).then(|| Zeroizing::new(input.to_owned()));
        Self { nfc, as_sent }
    }

    /// Returns the password in NFC, only for hashing and scoring.
    pub fn expose(&self) -> &str {
        &self.nfc
    }

    /// Returns the password as it was sent, without NFC. Only for checks of foreign hashes: other services hashed what
    /// the client sent.
    pub fn expose_as_sent(&self) -> &str {
        self.as_sent.as_ref().unwrap_or(&self.nfc)
    }

    /// Checks the length. `PasswordHasher` checks the strength.
    pub fn check_length(&self, policy: &PasswordPolicy) -> Result<(), WeakPassword> {
        let chars = self.nfc.chars().count();
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

/// Returns the words that an attacker would try first for this user: the email address, its parts, the name and its
/// words.
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
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// Returns the name of the hash function, which comes before the parameters of a PHC string, for example
    /// `argon2id`. For `$2…`, returns `bcrypt`.
    pub fn algorithm(&self) -> &str {
        let kind = self.0.trim_start_matches('$').split('$').next().unwrap_or_default();
        if kind.starts_with('2') { "bcrypt" } else { kind }
    }

    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Parses the hash. Returns `None` if this service cannot check it.
    pub fn parse(&self) -> Option<ParsedHash> {
        ParsedHash::parse(self.expose()).ok()
    }

    /// Returns the class of the hash. `None` if the class is `native` (the class of the hashes that the servers make
    /// now), or if this service cannot check the hash.
    pub fn foreign_class(&self, native: HashClass) -> Option<HashClass> {
        self.parse()?.foreign_class(native)
    }

    /// Whether the hash has the function and the parameters of new hashes. `native` is the class of new hashes.
    pub fn is_native(&self, native: HashClass) -> bool {
        self.parse().is_some_and(|hash| hash.class() == native)
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

    #[test]
    fn a_password_keeps_the_form_in_which_it_was_sent() {
        let password = Password::new("e\u{301}");
        assert_eq!((password.expose(), password.expose_as_sent()), ("é", "e\u{301}"));
        assert_eq!(Password::new("é").expose_as_sent(), "é");
    }
}
