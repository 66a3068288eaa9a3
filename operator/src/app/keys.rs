//! The signing and HMAC keys of an App: what they are, and how they are made. Pure but for randomness.

use aws_lc_rs::{
    encoding::AsDer,
    rand::{SecureRandom, SystemRandom},
    rsa::{KeyPair as RsaKeyPair, KeySize},
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use latchkey_crds::{
    rendered::{HmacKey, KeyState, RenderedApp, SecretString, SigningAlgorithm, SigningKey},
    types::AppId,
};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

pub(crate) mod lifecycle;
pub(crate) mod secret;

/// All keys of an App, as they are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeyDocument {
    #[serde(rename = "appID")]
    pub(crate) app_id: AppId,
    /// Made with the first keys of an App in a cluster: tells it from an App of the same appID before it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) incarnation: Option<String>,
    /// The namespace that they were written for last: where the Secret names another one, they were handed over.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) namespace: Option<String>,
    /// Grows where these keys come to hold users that servers know as those of another namespace or incarnation: the
    /// greater number is right.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub(crate) handover: u32,
    pub(crate) signing: Vec<KeptSigningKey>,
    pub(crate) hmac: Vec<KeptHmacKey>,
    /// The highest numbers that were given; those that are there may be higher in documents without them.
    #[serde(default)]
    pub(crate) last: LastNumbers,
    /// The value of the annotation that asks for a rotation which was handled last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) rotation: Option<String>,
    /// The value of the annotation that asks for new keys which was handled last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) new_keys: Option<String>,
    /// The ids that were revoked last. A key of that id never comes back, from a copy neither.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) revoked: Vec<String>,
}

/// The highest number of each sort of key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LastNumbers {
    pub(crate) signing: u32,
    pub(crate) hmac: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeptSigningKey {
    #[serde(flatten)]
    pub(crate) key: SigningKey,
    #[serde(with = "time::serde::rfc3339")]
    pub(crate) created_at: OffsetDateTime,
    #[serde(flatten)]
    pub(crate) life: Life,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeptHmacKey {
    #[serde(flatten)]
    pub(crate) key: HmacKey,
    #[serde(with = "time::serde::rfc3339")]
    pub(crate) created_at: OffsetDateTime,
    #[serde(flatten)]
    pub(crate) life: Life,
}

/// How far a key is on its way. Nothing of it is there in documents for servers that acknowledge nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Life {
    /// Since when every counting pod knows it. None: not yet.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) published_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) activated_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) retired_at: Option<OffsetDateTime>,
    /// When the last that was made under it has ended. None: some pod may still make more.
    #[serde(with = "time::serde::rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub(crate) not_after: Option<OffsetDateTime>,
    /// The longest that anything made under it lives. None: not known, so as long as the schema lets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) longest_seconds: Option<u32>,
    /// Somebody asked for it: it need not wait a day.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) asked: bool,
}

/// Why keys that are there cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InvalidKeys {
    #[error("they are another App's")]
    OtherApp,
    #[error("an id is there twice or is not a letter and a number")]
    Id,
    #[error("there is not exactly one Active key of each sort")]
    Active,
    #[error("a signing key is not a private key of its algorithm in PEM")]
    SigningKey,
    #[error("an HMAC key is not 32 octets in base64")]
    HmacKey,
}

/// The system gave no random octets, or no key could be made of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no key could be made")]
pub(crate) struct KeyNotMade;

impl From<aws_lc_rs::error::Unspecified> for KeyNotMade {
    fn from(_: aws_lc_rs::error::Unspecified) -> Self {
        Self
    }
}

// === impl KeyDocument ===

impl KeyDocument {
    /// The first keys of an App. Active at once: nothing was made under others.
    pub(crate) fn first(app_id: &AppId, algorithm: SigningAlgorithm, now: OffsetDateTime) -> Result<Self, KeyNotMade> {
        Self::with_keys(app_id, LastNumbers { signing: 1, hmac: 1 }, algorithm, now)
    }

    /// One Active key of each sort, of these numbers.
    fn with_keys(
        app_id: &AppId,
        numbers: LastNumbers,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<Self, KeyNotMade> {
        Ok(Self {
            app_id: app_id.clone(),
            incarnation: None,
            namespace: None,
            handover: 0,
            signing: vec![new_signing_key(numbers.signing, algorithm, now)?],
            hmac: vec![new_hmac_key(numbers.hmac, now)?],
            last: numbers,
            rotation: None,
            new_keys: None,
            revoked: Vec::new(),
        })
    }

    /// The keys once tokens are to be signed with another algorithm; none where they are already. Where no server has
    /// to acknowledge it first, the new key is Active at once.
    pub(crate) fn with_algorithm(
        &self,
        algorithm: SigningAlgorithm,
        now: OffsetDateTime,
    ) -> Result<Option<Self>, KeyNotMade> {
        let active = self.signing.iter().find(|kept| kept.key.state == KeyState::Active);
        if active.is_some_and(|kept| kept.key.algorithm == algorithm) {
            return Ok(None);
        }
        let mut changed = self.clone();
        for kept in &mut changed.signing {
            if kept.key.state != KeyState::Retired {
                kept.key.state = KeyState::Retired;
                kept.life.retired_at = Some(now);
            }
        }
        changed.last.signing = self.last().signing + 1;
        changed.signing.push(new_signing_key(changed.last.signing, algorithm, now)?);
        Ok(Some(changed))
    }

    /// The keys of a document that is served, for where the keys themselves are lost.
    pub(crate) fn of_document(document: RenderedApp, now: OffsetDateTime) -> Self {
        let life = Life::default;
        let keys = document.keys;
        let mut kept = Self {
            app_id: document.app_id,
            incarnation: document.incarnation,
            namespace: Some(document.namespace),
            handover: document.handover.unwrap_or(0),
            signing: keys
                .signing
                .into_iter()
                .map(|key| KeptSigningKey { key, created_at: now, life: life() })
                .collect(),
            hmac: keys.hmac.into_iter().map(|key| KeptHmacKey { key, created_at: now, life: life() }).collect(),
            last: LastNumbers::default(),
            rotation: None,
            new_keys: None,
            revoked: Vec::new(),
        };
        kept.last = kept.last();
        kept
    }

    /// These, as they are written for a holder.
    fn held_by(&self, namespace: &str) -> Self {
        let mut keys = self.clone();
        let before = keys.namespace.replace(namespace.to_owned());
        if before.is_some_and(|before| before != namespace) {
            keys.handover = keys.handover.saturating_add(1);
        }
        keys
    }

    /// The highest numbers that are known to have been given.
    pub(crate) fn last(&self) -> LastNumbers {
        let signing = self.signing.iter().filter_map(|kept| number(&kept.key.id, 's')).max().unwrap_or(0);
        let hmac = self.hmac.iter().filter_map(|kept| number(&kept.key.id, 'h')).max().unwrap_or(0);
        LastNumbers { signing: self.last.signing.max(signing), hmac: self.last.hmac.max(hmac) }
    }

    /// Whether these can be the keys of an App. Keys that cannot be used are never written over.
    pub(crate) fn check(&self, app_id: &AppId) -> Result<(), InvalidKeys> {
        if self.app_id != *app_id {
            return Err(InvalidKeys::OtherApp);
        }
        let signing = self.signing.iter().map(|kept| (&kept.key.id, kept.key.state, 's'));
        let hmac = self.hmac.iter().map(|kept| (&kept.key.id, kept.key.state, 'h'));
        for keys in [signing.collect::<Vec<_>>(), hmac.collect()] {
            let mut numbers = Vec::new();
            for (id, _, letter) in &keys {
                let number = number(id, *letter).ok_or(InvalidKeys::Id)?;
                if numbers.contains(&number) {
                    return Err(InvalidKeys::Id);
                }
                numbers.push(number);
            }
            if keys.iter().filter(|(_, state, _)| *state == KeyState::Active).count() != 1 {
                return Err(InvalidKeys::Active);
            }
        }
        if !self.signing.iter().all(|kept| is_signing_key(&kept.key)) {
            return Err(InvalidKeys::SigningKey);
        }
        let is_hmac = |kept: &KeptHmacKey| STANDARD.decode(kept.key.secret.expose()).is_ok_and(|key| key.len() == 32);
        if !self.hmac.iter().all(is_hmac) {
            return Err(InvalidKeys::HmacKey);
        }
        Ok(())
    }
}

impl KeptSigningKey {
    pub(crate) fn rendered(&self) -> SigningKey {
        self.key.clone()
    }
}

impl KeptHmacKey {
    pub(crate) fn rendered(&self) -> HmacKey {
        self.key.clone()
    }
}

// === impl Life ===

impl Life {
    fn active(now: OffsetDateTime) -> Self {
        Self { activated_at: Some(now), ..Self::default() }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it over so")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The number in an id such as `s1`.
fn number(id: &str, letter: char) -> Option<u32> {
    let digits = id.strip_prefix(letter)?;
    let number = digits.parse().ok()?;
    // "s01" and "s+1" would be other names of the same key.
    (number > 0 && digits == u32::to_string(&number)).then_some(number)
}

fn new_signing_key(
    number: u32,
    algorithm: SigningAlgorithm,
    now: OffsetDateTime,
) -> Result<KeptSigningKey, KeyNotMade> {
    let random = SystemRandom::new();
    let der = match algorithm {
        SigningAlgorithm::ES256 => {
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)?.as_ref().to_vec()
        }
        // Version 1 of PKCS#8, which every library reads.
        SigningAlgorithm::EdDSA => Ed25519KeyPair::generate_pkcs8v1(&random)?.as_ref().to_vec(),
        SigningAlgorithm::RS256 => RsaKeyPair::generate(KeySize::Rsa2048)?.as_der()?.as_ref().to_vec(),
    };
    let key = SigningKey {
        id: format!("s{number}"),
        state: KeyState::Active,
        algorithm,
        private_key: SecretString::new(pem(&der)),
    };
    Ok(KeptSigningKey { key, created_at: now, life: Life::active(now) })
}

fn new_hmac_key(number: u32, now: OffsetDateTime) -> Result<KeptHmacKey, KeyNotMade> {
    let mut secret = [0; 32];
    SystemRandom::new().fill(&mut secret)?;
    let secret = SecretString::new(STANDARD.encode(secret));
    let key = HmacKey { id: format!("h{number}"), state: KeyState::Active, secret };
    Ok(KeptHmacKey { key, created_at: now, life: Life::active(now) })
}

/// A name for an App's first keys that no other keys have.
fn new_incarnation() -> Result<String, KeyNotMade> {
    let mut random = [0; 16];
    SystemRandom::new().fill(&mut random)?;
    Ok(uuid::Builder::from_random_bytes(random).into_uuid().to_string())
}

const PEM_BEGIN: &str = "-----BEGIN PRIVATE KEY-----";
const PEM_END: &str = "-----END PRIVATE KEY-----";

/// PKCS#8 as PEM: base64 in lines of 64 (RFC 7468).
fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut pem = format!("{PEM_BEGIN}\n");
    for (index, symbol) in text.chars().enumerate() {
        if index > 0 && index % 64 == 0 {
            pem.push('\n');
        }
        pem.push(symbol);
    }
    pem.push_str(&format!("\n{PEM_END}\n"));
    pem
}

/// What is between the lines of a PEM text.
pub(crate) fn from_pem(pem: &str) -> Option<Vec<u8>> {
    let body = pem.trim().strip_prefix(PEM_BEGIN)?.strip_suffix(PEM_END)?;
    STANDARD.decode(body.split_ascii_whitespace().collect::<String>()).ok()
}

fn is_signing_key(key: &SigningKey) -> bool {
    let Some(der) = from_pem(key.private_key.expose()) else { return false };
    match key.algorithm {
        SigningAlgorithm::ES256 => EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &der).is_ok(),
        SigningAlgorithm::EdDSA => Ed25519KeyPair::from_pkcs8(&der).is_ok(),
        SigningAlgorithm::RS256 => RsaKeyPair::from_pkcs8(&der).is_ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn shop() -> AppId {
        "shop".parse().unwrap()
    }

    fn first(algorithm: SigningAlgorithm) -> KeyDocument {
        KeyDocument::first(&shop(), algorithm, NOW).unwrap()
    }

    #[test]
    fn first_keys_are_active_and_usable_with_every_algorithm() {
        for algorithm in [SigningAlgorithm::ES256, SigningAlgorithm::EdDSA, SigningAlgorithm::RS256] {
            let keys = first(algorithm);
            assert_eq!(keys.check(&shop()), Ok(()));
            let key = &keys.signing[0].key;
            assert_eq!((key.id.as_str(), key.state, key.algorithm), ("s1", KeyState::Active, algorithm));
            assert!(key.private_key.expose().lines().all(|line| line.len() <= 64));
            assert_eq!((keys.hmac[0].key.id.as_str(), keys.hmac[0].key.state), ("h1", KeyState::Active));
        }
    }

    #[test]
    fn keys_differ_each_time() {
        let (one, other) = (first(SigningAlgorithm::ES256), first(SigningAlgorithm::ES256));
        assert_ne!(one.signing[0].key.private_key, other.signing[0].key.private_key);
        assert_ne!(one.hmac[0].key.secret, other.hmac[0].key.secret);
    }

    #[test]
    fn another_algorithm_brings_another_key_and_retires_the_old() {
        let keys = first(SigningAlgorithm::ES256);
        assert_eq!(keys.with_algorithm(SigningAlgorithm::ES256, NOW), Ok(None));
        let changed = keys.with_algorithm(SigningAlgorithm::EdDSA, NOW).unwrap().unwrap();
        assert_eq!(changed.check(&shop()), Ok(()));
        let states = changed.signing.iter().map(|kept| (kept.key.id.as_str(), kept.key.state)).collect::<Vec<_>>();
        assert_eq!(states, [("s1", KeyState::Retired), ("s2", KeyState::Active)]);
        assert_eq!(changed.hmac, keys.hmac);
        // Ids are never used again, also on the way back.
        let back = changed.with_algorithm(SigningAlgorithm::ES256, NOW).unwrap().unwrap();
        assert_eq!(back.signing.last().unwrap().key.id, "s3");
        assert_eq!(back.check(&shop()), Ok(()));
    }

    #[test]
    fn keys_that_cannot_be_used_are_told_apart() {
        let refused = |change: fn(&mut KeyDocument)| {
            let mut keys = first(SigningAlgorithm::ES256);
            change(&mut keys);
            keys.check(&shop()).unwrap_err()
        };
        assert_eq!(refused(|keys| keys.app_id = "other".parse().unwrap()), InvalidKeys::OtherApp);
        for id in ["s0", "s01", "s+1", "h1", "s", "1"] {
            let mut keys = first(SigningAlgorithm::ES256);
            keys.signing[0].key.id = id.into();
            assert_eq!(keys.check(&shop()), Err(InvalidKeys::Id), "{id}");
        }
        assert_eq!(refused(|keys| keys.hmac.push(keys.hmac[0].clone())), InvalidKeys::Id);
        assert_eq!(refused(|keys| keys.hmac[0].key.state = KeyState::Retired), InvalidKeys::Active);
        assert_eq!(refused(|keys| keys.signing.clear()), InvalidKeys::Active);
        assert_eq!(refused(|keys| keys.signing[0].key.algorithm = SigningAlgorithm::RS256), InvalidKeys::SigningKey);
        assert_eq!(refused(|keys| keys.signing[0].key.private_key = SecretString::new("x")), InvalidKeys::SigningKey);
        assert_eq!(refused(|keys| keys.hmac[0].key.secret = SecretString::new("aaaa")), InvalidKeys::HmacKey);
    }

    #[test]
    fn keys_survive_being_written_and_are_not_printed() {
        let keys = first(SigningAlgorithm::ES256);
        let text = serde_json::to_string(&keys).unwrap();
        assert_eq!(serde_json::from_str::<KeyDocument>(&text).unwrap(), keys);
        let printed = format!("{keys:?}");
        assert!(!printed.contains("PRIVATE KEY") && !printed.contains(keys.hmac[0].key.secret.expose()));
    }
}
