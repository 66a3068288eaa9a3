//! The signer key and the salt separator of a Firebase project. A check of a Firebase hash needs both values in
//! addition to the salt and the parameters of the hash.

use std::{fmt, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use zeroize::Zeroizing;

/// The signer key and the salt separator of a Firebase project. `Debug` shows neither.
#[derive(Clone)]
pub struct FirebaseScrypt {
    signer_key: Arc<Zeroizing<Vec<u8>>>,
    salt_separator: Arc<Zeroizing<Vec<u8>>>,
}

/// A value is not base64, or has a wrong length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the Firebase signer key or salt separator is not base64 of a valid length")]
pub struct InvalidFirebaseKey;

// === impl FirebaseScrypt ===

impl FirebaseScrypt {
    /// Parses both values from base64 with padding, as Firebase shows them.
    ///
    /// # Errors
    ///
    /// A value is not base64, the signer key does not have 16 to 64 bytes, or the separator does not have 1 to 64
    /// bytes.
    pub fn parse(signer_key: &str, salt_separator: &str) -> Result<Self, InvalidFirebaseKey> {
        let decode = |text: &str| STANDARD.decode(text).map(Zeroizing::new).map_err(|_| InvalidFirebaseKey);
        let (signer_key, salt_separator) = (decode(signer_key)?, decode(salt_separator)?);
        // A Firebase hash is as long as the signer key, and a stored hash must have 16 to 64 bytes.
        if !(16..=64).contains(&signer_key.len()) || !(1..=64).contains(&salt_separator.len()) {
            return Err(InvalidFirebaseKey);
        }
        Ok(Self { signer_key: Arc::new(signer_key), salt_separator: Arc::new(salt_separator) })
    }

    pub fn signer_key(&self) -> &[u8] {
        &self.signer_key
    }

    pub fn salt_separator(&self) -> &[u8] {
        &self.salt_separator
    }
}

impl fmt::Debug for FirebaseScrypt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FirebaseScrypt(…)")
    }
}
