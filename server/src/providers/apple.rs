//! Apple's client secret: a JWT under the team's key, made here and renewed before it ends.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use aws_lc_rs::digest::{SHA256, digest};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use latchkey_crds::rendered::SecretString;
use serde::Serialize;
use time::{Duration, OffsetDateTime};

use super::client::Client;
use crate::domain::identity::Unusable;

/// Apple takes up to six months; a short life costs nothing, since it is made here.
const LIFE: Duration = Duration::HOUR;
/// The clock there may be behind, and a request is under way for a while.
const SPARE: Duration = Duration::minutes(10);
/// Secrets that are remembered; what is more is made again.
const MOST: usize = 1024;

const AUDIENCE: &str = "https://appleid.apple.com";

/// The secrets that were made, by what they were made of.
#[derive(Default)]
pub(super) struct Secrets(Mutex<HashMap<[u8; 32], Made>>);

#[derive(Clone)]
struct Made {
    secret: SecretString,
    until: OffsetDateTime,
}

/// https://developer.apple.com/documentation/accountorganizationaldatasharing/creating-a-client-secret
#[derive(Serialize)]
struct Claims<'a> {
    iss: &'a str,
    iat: i64,
    exp: i64,
    aud: &'a str,
    sub: &'a str,
}

// === impl Secrets ===

impl Secrets {
    pub(super) fn get(&self, client: &Client<'_>, now: OffsetDateTime) -> Result<SecretString, Unusable> {
        let (team, key_id) = (client.needed("teamID")?, client.needed("keyID")?);
        let (pem, id) = (client.secret()?.expose(), client.settings.client_id.as_str());
        let made_of = digest(&SHA256, [team, key_id, id, pem].join("\n").as_bytes());
        let made_of: [u8; 32] = made_of.as_ref().try_into().map_err(|_| Unusable::BadKey)?;
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = made.get(&made_of).filter(|made| now < made.until - SPARE) {
            return Ok(made.secret.clone());
        }
        if made.len() >= MOST {
            made.clear();
        }
        let until = now + LIFE;
        let claims =
            Claims { iss: team, iat: now.unix_timestamp(), exp: until.unix_timestamp(), aud: AUDIENCE, sub: id };
        let header = Header { kid: Some(key_id.to_owned()), ..Header::new(Algorithm::ES256) };
        let key = EncodingKey::from_ec_pem(pem.as_bytes()).map_err(|_| Unusable::BadKey)?;
        let secret = jsonwebtoken::encode(&header, &claims, &key).map_err(|_| Unusable::BadKey)?;
        let secret = SecretString::new(secret);
        made.insert(made_of, Made { secret: secret.clone(), until });
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
        providers::client::tests::{client_of, settings},
    };

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);

    fn apple() -> ProviderSettings {
        let key = fixtures::signing_key("s1", SigningAlgorithm::ES256, KeyState::Active).private_key;
        let mut settings = settings("apple", json!({ "teamID": "ABCDE12345", "keyID": "12345ABCDE" }));
        settings.secret = Some(key);
        settings
    }

    fn client(settings: &ProviderSettings) -> Client<'_> {
        client_of(settings).unwrap()
    }

    #[test]
    fn a_secret_says_what_apple_wants() {
        let settings = apple();
        let secret = Secrets::default().get(&client(&settings), NOW).unwrap();
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
    fn a_secret_is_made_once_and_renewed_before_it_ends() {
        let (secrets, settings) = (Secrets::default(), apple());
        let get = |at| secrets.get(&client(&settings), at).unwrap();
        let first = get(NOW);
        assert_eq!(get(NOW + LIFE - SPARE - Duration::SECOND), first);
        assert_ne!(get(NOW + LIFE - SPARE), first);
    }

    #[test]
    fn another_key_makes_another_secret_and_what_is_no_key_makes_none() {
        let (secrets, one, other) = (Secrets::default(), apple(), apple());
        assert_ne!(secrets.get(&client(&one), NOW), secrets.get(&client(&other), NOW));
        let mut broken = apple();
        broken.secret = Some(SecretString::new("hush"));
        assert_eq!(secrets.get(&client(&broken), NOW), Err(Unusable::BadKey));
        broken.secret = None;
        assert_eq!(secrets.get(&client(&broken), NOW), Err(Unusable::NoSecret));
    }

    #[test]
    fn the_secrets_that_are_remembered_have_an_end() {
        let (secrets, mut settings) = (Secrets::default(), apple());
        for number in 0..MOST + 2 {
            settings.client_id = number.to_string();
            secrets.get(&client(&settings), NOW).unwrap();
        }
        assert!(secrets.0.lock().unwrap().len() <= MOST);
    }
}
