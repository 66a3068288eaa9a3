//! The parameters of Firebase password hashes, from the Secret that the App references.

use std::ops::RangeInclusive;

use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::rendered::{RenderedFirebaseScrypt, SecretString};

use super::secrets::{SecretError, SecretReference, require_values, required_text};
use crate::{
    app::resolve::AppFacts,
    facts::{FieldError, Lookup, SecretValues},
};

/// The accepted lengths of signer keys. A Firebase hash is the encrypted signer key, so both have the same length.
const SIGNER_KEY_BYTES: RangeInclusive<usize> = 16..=64;
const SALT_SEPARATOR_BYTES: RangeInclusive<usize> = 1..=64;

/// Returns the parameters if the App references a Secret with them. If the Secret cannot be used, an error is added to
/// `field_errors`.
pub(super) fn firebase_scrypt(facts: &AppFacts, field_errors: &mut Vec<FieldError>) -> Option<RenderedFirebaseScrypt> {
    let reference = facts.app.spec.password.firebase_scrypt_ref.as_ref()?;
    match parse(facts.firebase_scrypt.as_ref()?) {
        Ok(parameters) => Some(parameters),
        Err(error) => {
            field_errors.push(error.to_field_error(&SecretReference {
                field: "spec.password.firebaseScryptRef".to_owned(),
                name: &reference.name,
                consequence: "Every password of a user with a Firebase hash counts as wrong until then",
            }));
            None
        }
    }
}

fn parse(secret: &Lookup<SecretValues>) -> Result<RenderedFirebaseScrypt, SecretError> {
    let values = require_values(secret)?;
    let parameter = |key, bytes: &RangeInclusive<usize>, expected| {
        let text = required_text(values, key)?;
        if has_length(&text, bytes) { Ok(text) } else { Err(SecretError::InvalidKey(key, expected)) }
    };
    Ok(RenderedFirebaseScrypt {
        signer_key: parameter(
            "signer-key",
            &SIGNER_KEY_BYTES,
            "must be 16 to 64 bytes in base64, as Firebase shows it (base64_signer_key)",
        )?,
        salt_separator: parameter(
            "salt-separator",
            &SALT_SEPARATOR_BYTES,
            "must be 1 to 64 bytes in base64, as Firebase shows it (base64_salt_separator)",
        )?,
    })
}

fn has_length(base64: &SecretString, bytes: &RangeInclusive<usize>) -> bool {
    STANDARD.decode(base64.expose()).is_ok_and(|decoded| bytes.contains(&decoded.len()))
}
