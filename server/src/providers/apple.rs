//! Apple's client secret: a JWT signed with the team's key, renewed before it expires.

use std::collections::HashMap;

use aws_lc_rs::digest::{SHA256, digest};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use latchkey_crds::rendered::SecretString;
use parking_lot::Mutex;
use serde::Serialize;
use time::{Duration, OffsetDateTime};

use super::client::ProviderConfig;
use crate::domain::identity::UnusableReason;

/// Lifetime of a client secret. Apple accepts up to six months, but a short lifetime costs nothing, because the server
/// signs the secret itself.
const SECRET_LIFETIME: Duration = Duration::HOUR;
/// A secret is renewed this long before it expires. This allows for clock differences and for the duration of a
/// request.
const RENEWAL_MARGIN: Duration = Duration::minutes(10);
/// Maximum number of cached secrets. When it is reached, the cache is cleared.
const MAX_CACHED_SECRETS: usize = 1024;

const AUDIENCE: &str = "https://appleid.apple.com";

/// Cached client secrets, by the SHA-256 of the team ID, key ID, client ID and private key.
#[derive(Default)]
pub(super) struct ClientSecrets(Mutex<HashMap<[u8; 32], CachedSecret>>);

#[derive(Clone)]
struct CachedSecret {
    secret: SecretString,
    expires_at: OffsetDateTime,
}

/// The claims of a client secret:
/// https://developer.apple.com/documentation/accountorganizationaldatasharing/creating-a-client-secret
#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    iat: i64,
    exp: i64,
    aud: &'a str,
    sub: &'a str,
}

// === impl ClientSecrets ===

impl ClientSecrets {
    pub(super) fn get(&self, client: &ProviderConfig<'_>, now: OffsetDateTime) -> Result<SecretString, UnusableReason> {
        let (team, key_id) = (client.required_option("teamID")?, client.required_option("keyID")?);
        let (pem, client_id) = (client.secret()?.expose(), client.settings.client_id.as_str());
        let inputs_hash = digest(&SHA256, [team, key_id, client_id, pem].join("\n").as_bytes());
        let inputs_hash: [u8; 32] = inputs_hash.as_ref().try_into().map_err(|_| UnusableReason::InvalidKey)?;
        let mut cached = self.0.lock();
        if let Some(cached) = cached.get(&inputs_hash).filter(|cached| now < cached.expires_at - RENEWAL_MARGIN) {
            return Ok(cached.secret.clone());
        }
        if cached.len() >= MAX_CACHED_SECRETS {
            cached.clear();
        }
        let expires_at = now + SECRET_LIFETIME;
        let (iat, exp) = (now.unix_timestamp(), expires_at.unix_timestamp());
        let claims = Claims { iss: team, iat, exp, aud: AUDIENCE, sub: client_id };
        let header = Header { kid: Some(key_id.to_owned()), ..Header::new(Algorithm::ES256) };
        let key = EncodingKey::from_ec_pem(pem.as_bytes()).map_err(|_| UnusableReason::InvalidKey)?;
        let secret = jsonwebtoken::encode(&header, &claims, &key).map_err(|_| UnusableReason::InvalidKey)?;
        let secret = SecretString::new(secret);
        cached.insert(inputs_hash, CachedSecret { secret: secret.clone(), expires_at });
        Ok(secret)
    }
}

#[cfg(test)]
mod tests {
    use latchkey_crds::rendered::{KeyState, ProviderSettings, SigningAlgorithm};
    use serde_json::{Value, json};
    use time::macros::datetime;

    use super::*;
    use crate::{
        fixtures,
        providers::client::tests::{test_client, test_settings},
    };

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);

    fn apple() -> ProviderSettings {
        let key = fixtures::signing_key("s1", SigningAlgorithm::ES256, KeyState::Active).private_key;
        let mut settings = test_settings("apple", json!({ "teamID": "ABCDE12345", "keyID": "12345ABCDE" }));
        settings.secret = Some(key);
        settings
    }

    fn client(settings: &ProviderSettings) -> ProviderConfig<'_> {
        test_client(settings).unwrap()
    }

    #[test]
    fn a_secret_has_the_claims_that_apple_requires() {
        let settings = apple();
        let secret = ClientSecrets::default().get(&client(&settings), NOW).unwrap();
        let header = jsonwebtoken::decode_header(secret.expose()).unwrap();
        assert_eq!((header.alg, header.kid.as_deref()), (Algorithm::ES256, Some("12345ABCDE")));
        let claims: Value = jsonwebtoken::dangerous::insecure_decode_claims(secret.expose()).unwrap();
        let now = NOW.unix_timestamp();
        assert_eq!(
            claims,
            json!({
                "iss": "ABCDE12345", "iat": now, "exp": now + 3600, "aud": "https://appleid.apple.com", "sub": "ours",
            })
        );
    }

    #[test]
    fn a_secret_is_cached_and_renewed_before_it_expires() {
        let (secrets, settings) = (ClientSecrets::default(), apple());
        let get = |at| secrets.get(&client(&settings), at).unwrap();
        let first = get(NOW);
        assert_eq!(get(NOW + SECRET_LIFETIME - RENEWAL_MARGIN - Duration::SECOND), first);
        assert_ne!(get(NOW + SECRET_LIFETIME - RENEWAL_MARGIN), first);
    }

    #[test]
    fn another_key_gives_another_secret_and_an_invalid_key_gives_none() {
        let (secrets, first_key, second_key) = (ClientSecrets::default(), apple(), apple());
        assert_ne!(secrets.get(&client(&first_key), NOW), secrets.get(&client(&second_key), NOW));
        let mut broken = apple();
        broken.secret = Some(SecretString::new("hush"));
        assert_eq!(secrets.get(&client(&broken), NOW), Err(UnusableReason::InvalidKey));
        broken.secret = None;
        assert_eq!(secrets.get(&client(&broken), NOW), Err(UnusableReason::MissingSecret));
    }

    #[test]
    fn the_number_of_cached_secrets_is_bounded() {
        let (secrets, mut settings) = (ClientSecrets::default(), apple());
        for number in 0..MAX_CACHED_SECRETS + 2 {
            settings.client_id = number.to_string();
            secrets.get(&client(&settings), NOW).unwrap();
        }
        assert!(secrets.0.lock().len() <= MAX_CACHED_SECRETS);
    }
}
