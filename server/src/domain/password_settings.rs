//! The settings of an App for imported password hashes.

use latchkey_crds::rendered::{PasswordPolicy, RenderedFirebaseScrypt};
use time::Duration;

use super::foreign_hash::{FirebaseScrypt, InvalidFirebaseKey};

/// The settings of an App for password hashes from other systems.
#[derive(Debug)]
pub struct PasswordSettings {
    /// A foreign hash is deleted this long after its import, unless a login has replaced it. `None`: foreign hashes are
    /// never deleted.
    pub foreign_hash_retention: Option<Duration>,
    /// `None` if the App has no usable keys. Firebase hashes then match no password.
    pub firebase_scrypt: Option<FirebaseScrypt>,
}

// === impl PasswordSettings ===

impl PasswordSettings {
    pub fn new(policy: &PasswordPolicy) -> Result<Self, InvalidFirebaseKey> {
        Ok(Self {
            foreign_hash_retention: policy.foreign_hash_retention_days.map(|days| Duration::days(days.into())),
            firebase_scrypt: policy.firebase_scrypt.as_ref().map(parse_keys).transpose()?,
        })
    }
}

fn parse_keys(rendered: &RenderedFirebaseScrypt) -> Result<FirebaseScrypt, InvalidFirebaseKey> {
    FirebaseScrypt::parse(rendered.signer_key.expose(), rendered.salt_separator.expose())
}

#[cfg(test)]
mod tests {
    use base64::{Engine, engine::general_purpose::STANDARD};
    use latchkey_crds::rendered::SecretString;

    use super::*;
    use crate::fixtures;

    fn policy(signer_key: &str, salt_separator: &str) -> PasswordPolicy {
        let firebase_scrypt = RenderedFirebaseScrypt {
            signer_key: SecretString::new(signer_key),
            salt_separator: SecretString::new(salt_separator),
        };
        PasswordPolicy { firebase_scrypt: Some(firebase_scrypt), ..fixtures::rendered("shop").password }
    }

    #[test]
    fn an_app_without_settings_keeps_foreign_hashes_and_has_no_firebase_keys() {
        let settings = PasswordSettings::new(&fixtures::rendered("shop").password).unwrap();
        assert!(settings.foreign_hash_retention.is_none() && settings.firebase_scrypt.is_none());
    }

    #[test]
    fn the_settings_are_decoded_and_the_keys_are_not_printed() {
        let policy =
            PasswordPolicy { foreign_hash_retention_days: Some(30), ..policy("aHVzaGh1c2hodXNoaHVzaA==", "Bw==") };
        let settings = PasswordSettings::new(&policy).unwrap();
        assert_eq!(settings.foreign_hash_retention, Some(Duration::days(30)));
        assert_eq!(settings.firebase_scrypt.as_ref().unwrap().salt_separator(), [7]);
        let printed = format!("{policy:?} {settings:?}");
        assert!(!printed.contains("hush") && !printed.contains("aHVz"), "{printed}");
    }

    #[test]
    fn keys_that_are_not_base64_or_have_a_wrong_length_are_rejected() {
        let long = STANDARD.encode([0; 65]);
        let long = long.as_str();
        for (signer_key, salt_separator) in [
            ("", "Bw=="),
            ("aHVzaA==", "Bw=="),
            ("aHVzaGh1c2hodXNoaHVzaA==", ""),
            ("aHVzaGh1c2hodXNoaHVzaA==", "Bw"),
            (long, "Bw=="),
            ("aHVzaGh1c2hodXNoaHVzaA==", long),
        ] {
            let settings = PasswordSettings::new(&policy(signer_key, salt_separator));
            assert_eq!(settings.unwrap_err(), InvalidFirebaseKey, "{signer_key} {salt_separator}");
        }
    }
}
