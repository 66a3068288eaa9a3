//! Reads the values of a Secret that an App references.

use latchkey_crds::{conditions::Reason, rendered::SecretString};

use crate::facts::{FieldError, Lookup, SecretValues};

/// Why a Secret cannot be used. The error names keys of the Secret, but never contains their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SecretError {
    NoSecret,
    InvalidSecret,
    NoKey(&'static str),
    /// The key, and what is wrong with its value.
    InvalidKey(&'static str, &'static str),
}

/// A reference to a Secret, for error messages.
pub(super) struct SecretReference<'a> {
    /// The path of the App's field that references the Secret.
    pub(super) field: String,
    /// The name of the Secret.
    pub(super) name: &'a str,
    /// What happens until the Secret can be used: a sentence without its full stop.
    pub(super) consequence: &'static str,
}

/// Returns the values of a Secret that was looked up.
pub(super) fn require_values(lookup: &Lookup<SecretValues>) -> Result<&SecretValues, SecretError> {
    match lookup {
        Lookup::Missing => Err(SecretError::NoSecret),
        Lookup::Invalid => Err(SecretError::InvalidSecret),
        Lookup::Found(values) => Ok(values),
    }
}

/// Returns the value of a key, without white space at its ends.
pub(super) fn required_text(values: &SecretValues, key: &'static str) -> Result<SecretString, SecretError> {
    optional_text(values, key)?.ok_or(SecretError::NoKey(key))
}

/// Returns the value of a key, without white space at its ends, or `None` if there is no such key.
pub(super) fn optional_text(values: &SecretValues, key: &'static str) -> Result<Option<SecretString>, SecretError> {
    let Some(value) = values.get(key) else { return Ok(None) };
    let text = value.to_trimmed_utf8().ok_or(SecretError::InvalidKey(key, "is not text"))?;
    Ok(Some(SecretString::new(text.expose().trim())))
}

// === impl SecretError ===

impl SecretError {
    fn reason(self) -> Reason {
        match self {
            Self::NoSecret => Reason::SecretNotFound,
            Self::NoKey(_) => Reason::SecretKeyNotFound,
            Self::InvalidSecret | Self::InvalidKey(..) => Reason::SecretKeyInvalid,
        }
    }

    /// Returns the error for the status of the App.
    pub(super) fn to_field_error(self, reference: &SecretReference<'_>) -> FieldError {
        let SecretReference { field, name, consequence } = reference;
        let what = match self {
            Self::NoSecret => format!("Secret {name} does not exist in this namespace; create it"),
            Self::InvalidSecret => format!("Secret {name} is not valid; see the message about it"),
            Self::NoKey(key) => format!("Secret {name} has no key {key}; add it"),
            Self::InvalidKey(key, what) => format!("Secret {name}, key {key}: {what}"),
        };
        FieldError::new(self.reason(), field, format!("{what}. {consequence}"))
    }
}
