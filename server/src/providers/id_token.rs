//! ID tokens, in full (OpenID Connect Core 1.0, 3.1.3.7): signature, issuer, audience, times, nonce.

use aws_lc_rs::digest::{self, SHA256, SHA384, SHA512, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, DecodingKey, jwk::Jwk};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value};
use time::OffsetDateTime;

use super::{
    client::Client,
    discovery::{Issuers, MAX_ADDRESS},
    profile::Statement,
    shelf::Footprint,
};
use crate::domain::identity::{BadToken, Fault};

/// What clocks may differ by, in seconds.
const LEEWAY: f64 = 60.0;
/// Keys of one set that are looked at; Microsoft has a dozen.
const MAX_KEYS: usize = 64;
/// The longest name of a key, and the longest name of an algorithm that a key is kept with.
const MAX_KEY_ID: usize = 255;
/// The longest text of one number of a key: RSA with 8,192 bits, the most that can be verified here, in base64url.
const MAX_KEY_NUMBER: usize = 1366;
/// The longest token, ID token or access token. Microsoft's have some 4 KiB, with 200 groups some 12 KiB.
pub(super) const MAX_TOKEN: usize = 32 * 1024;
/// The longest header of a token as it is written. Most have 100 bytes; one with a chain of certificates some 4 KiB.
const MAX_HEADER: usize = 8 * 1024;
/// What key and key set take beside their texts, in bytes.
const KEY_OVERHEAD: usize = 256;
/// The longest subject (OpenID Connect Core 1.0, 2).
pub(super) const MAX_SUBJECT: usize = 255;

/// Every algorithm that can be checked here. `none` and those of a shared secret are not among them, whatever a provider
/// says that it supports.
const ALGORITHMS: [Known; 9] = [
    ("RS256", Algorithm::RS256, &SHA256),
    ("RS384", Algorithm::RS384, &SHA384),
    ("RS512", Algorithm::RS512, &SHA512),
    ("PS256", Algorithm::PS256, &SHA256),
    ("PS384", Algorithm::PS384, &SHA384),
    ("PS512", Algorithm::PS512, &SHA512),
    ("ES256", Algorithm::ES256, &SHA256),
    ("ES384", Algorithm::ES384, &SHA384),
    // Ed25519 hashes with SHA-512.
    ("EdDSA", Algorithm::EdDSA, &SHA512),
];

/// An algorithm's name, itself and what it hashes with.
type Known = (&'static str, Algorithm, &'static digest::Algorithm);

/// The claims of a token, as they stand in it.
#[derive(Debug)]
pub struct Claims(Map<String, Value>);

/// The keys that a provider signs with (RFC 7517).
#[derive(Debug)]
pub struct KeySet(Vec<Key>);

#[derive(Debug)]
struct Key {
    id: Option<String>,
    /// The one algorithm that it is for, where it says so.
    algorithm: Option<String>,
    decoding: DecodingKey,
    /// Microsoft: for whose tokens it is.
    issuer: Option<String>,
    footprint: usize,
}

/// A token with a valid signature; its claims are not judged yet.
#[derive(Debug)]
pub struct Signed<'a> {
    pub claims: Claims,
    hash: &'static digest::Algorithm,
    key: &'a Key,
}

/// The parts of a token (RFC 7515, 7.1).
struct Parts<'a> {
    header: Header,
    /// What the signature is of.
    message: &'a str,
    claims: &'a str,
    signature: &'a str,
}

/// A token that is what it says.
#[derive(Debug)]
pub(super) struct IdToken {
    pub(super) authority: String,
    pub(super) subject: String,
    pub(super) statement: Statement,
    /// `at_hash`, if it is there; `None` inside if it is no text.
    access_token_hash: Option<Option<String>>,
    hash: &'static digest::Algorithm,
}

/// How a token came here, and what must be in it therefore.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expected<'a> {
    /// From the token endpoint, for our own client; with the flow's nonce, where the provider repeats it.
    Flow { nonce: Option<&'a str> },
    /// From somebody who wants to log in with it: for any of our clients; with the nonce that came beside it, plain or
    /// as lower-case hexadecimal SHA-256 (as apps hand it to Apple).
    Login { nonce: Option<&'a str> },
}

/// The part before the claims (RFC 7515, 4).
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    typ: Option<String>,
    crit: Option<IgnoredAny>,
}

/// Of the algorithms that a provider says it uses those that can be checked here; RS256 where it says none.
pub(super) fn allowed_algorithms(supported: &[String]) -> Vec<Algorithm> {
    if supported.is_empty() {
        return vec![Algorithm::RS256];
    }
    let known = ALGORITHMS.into_iter();
    known.filter(|(name, ..)| supported.iter().any(|one| one == name)).map(|(_, algorithm, _)| algorithm).collect()
}

// === impl KeySet ===

impl KeySet {
    /// Reads a key set within [`super::BOUNDS`]. What is no key for signatures, or of a kind that is not known here, is
    /// passed over.
    pub fn parse(body: &[u8]) -> Result<Self, Fault> {
        Self::of(&super::parse(body)?).ok_or(Fault::Incomplete)
    }

    fn of(document: &Value) -> Option<Self> {
        let keys = document.get("keys")?.as_array()?;
        Some(Self(keys.iter().take(MAX_KEYS).filter_map(Key::parse).collect()))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a signature over any bytes holds under one of the keys that this algorithm can be used with.
    pub(super) fn verifies(&self, algorithm: &str, message: &[u8], signature: &[u8]) -> bool {
        let Some((name, algorithm, _)) = ALGORITHMS.into_iter().find(|(name, ..)| *name == algorithm) else {
            return false;
        };
        let header = Header { alg: name.to_owned(), kid: None, typ: None, crit: None };
        let signature = URL_SAFE_NO_PAD.encode(signature);
        self.0
            .iter()
            .filter(|key| key.fits(&header, algorithm))
            .any(|key| jsonwebtoken::crypto::verify(&signature, message, &key.decoding, algorithm).unwrap_or(false))
    }
}

impl Footprint for KeySet {
    fn footprint(&self) -> usize {
        self.0.iter().map(|key| key.footprint).sum()
    }
}

// === impl Key ===

impl Key {
    fn parse(value: &Value) -> Option<Self> {
        let text = |name: &str| value.get(name).and_then(Value::as_str);
        let is_secret = text("kty") == Some("oct");
        if is_secret || text("use").is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        let kept = [("kid", MAX_KEY_ID), ("alg", MAX_KEY_ID), ("issuer", MAX_ADDRESS)];
        let numbers = ["n", "e", "x", "y"].map(|name| (name, MAX_KEY_NUMBER));
        let mut footprint = KEY_OVERHEAD;
        for (name, max) in kept.into_iter().chain(numbers) {
            let length = text(name).map_or(0, str::len);
            if length > max {
                return None;
            }
            footprint += length;
        }
        let decoding = DecodingKey::from_jwk(&Jwk::deserialize(value).ok()?).ok()?;
        let text = |name| text(name).map(str::to_owned);
        Some(Self { id: text("kid"), algorithm: text("alg"), decoding, issuer: text("issuer"), footprint })
    }

    fn fits(&self, header: &Header, algorithm: Algorithm) -> bool {
        self.decoding.family() == algorithm.family()
            && self.algorithm.as_ref().is_none_or(|own| *own == header.alg)
            && header.kid.as_ref().is_none_or(|kid| self.id.as_ref() == Some(kid))
    }
}

// === impl IdToken ===

impl IdToken {
    /// Judges a token. [`BadToken::UnknownKey`] may mean that the key set is too old.
    pub(super) fn verify(
        token: &str,
        keys: &KeySet,
        algorithms: &[Algorithm],
        issuers: &Issuers,
        client: &Client<'_>,
        expected: Expected<'_>,
        now: OffsetDateTime,
    ) -> Result<Self, BadToken> {
        let Signed { claims, hash, key } = verify_signature(token, keys, algorithms)?;
        let iss = claims.get("iss").and_then(Value::as_str).ok_or(BadToken::Issuer)?;
        let tenant = claims.get("tid").and_then(Value::as_str);
        let authority = issuers.authority(iss, tenant).ok_or(BadToken::Issuer)?;
        if let (Issuers::Tenants { .. }, Some(of)) = (issuers, &key.issuer) {
            // Microsoft's keys for one tenant do not sign for another.
            let of = tenant.map_or_else(|| of.clone(), |tenant| of.replace("{tenantid}", tenant));
            if of != iss {
                return Err(BadToken::UnknownKey);
            }
        }
        judge_audience(&claims, client, expected)?;
        judge_times(&claims, now)?;
        judge_nonce(&claims, expected)?;
        let subject = claims.get("sub").and_then(Value::as_str).unwrap_or_default();
        if subject.is_empty() || subject.len() > MAX_SUBJECT {
            return Err(BadToken::Malformed);
        }
        let subject = subject.to_owned();
        let access_token_hash = claims.get("at_hash").map(|hash| hash.as_str().map(str::to_owned));
        let statement = client.mapping.read(&Value::Object(claims.0));
        Ok(Self { authority, subject, statement, access_token_hash, hash })
    }

    /// Whether the access token that came beside it is the one it was made with, where it says so (3.1.3.8).
    pub(super) fn judge_access_token(&self, access_token: &str) -> Result<(), BadToken> {
        let Some(stated) = &self.access_token_hash else { return Ok(()) };
        let hash = digest(self.hash, access_token.as_bytes());
        let half = URL_SAFE_NO_PAD.encode(&hash.as_ref()[..hash.as_ref().len() / 2]);
        if stated.as_ref() == Some(&half) { Ok(()) } else { Err(BadToken::AccessTokenHash) }
    }
}

// === impl Claims ===

impl Claims {
    /// Reads the middle part of a token, an object in base64url, within [`super::BOUNDS`].
    pub fn parse(part: &str) -> Result<Self, BadToken> {
        let bytes = URL_SAFE_NO_PAD.decode(part).map_err(|_| BadToken::Malformed)?;
        match super::parse(&bytes) {
            Ok(Value::Object(claims)) => Ok(Self(claims)),
            Ok(_) | Err(_) => Err(BadToken::Malformed),
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }
}

// === impl Parts ===

impl<'a> Parts<'a> {
    /// Reads the header; looks at nothing else.
    fn of(token: &'a str) -> Result<Self, BadToken> {
        if token.len() > MAX_TOKEN {
            return Err(BadToken::Malformed);
        }
        let mut parts = token.split('.');
        let (Some(header), Some(claims), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(BadToken::Malformed);
        };
        if header.len() > MAX_HEADER {
            return Err(BadToken::Malformed);
        }
        let message = &token[..header.len() + 1 + claims.len()];
        let header = URL_SAFE_NO_PAD.decode(header).map_err(|_| BadToken::Malformed)?;
        let header: Header = serde_json::from_slice(&header).map_err(|_| BadToken::Malformed)?;
        if header.kid.as_ref().is_some_and(|kid| kid.len() > MAX_KEY_ID) {
            return Err(BadToken::Malformed);
        }
        Ok(Self { header, message, claims, signature })
    }
}

/// Whether this is a signed token at all, whoever signed it: three parts, a header and claims.
pub fn is_well_formed(token: &str) -> bool {
    Parts::of(token).and_then(|parts| Claims::parse(parts.claims)).is_ok()
}

/// Looks for the key that signed a token, and reads its claims. They are not judged.
pub fn verify_signature<'a>(token: &str, keys: &'a KeySet, algorithms: &[Algorithm]) -> Result<Signed<'a>, BadToken> {
    let Parts { header, message, claims, signature } = Parts::of(token)?;
    // RFC 7515, 4.1.11: what must be understood is not. RFC 9068, 2.1: an access token is no ID token.
    let is_access_token = header.typ.as_deref().is_some_and(|typ| {
        let typ = typ.to_ascii_lowercase();
        typ == "at+jwt" || typ == "application/at+jwt"
    });
    if header.crit.is_some() || is_access_token {
        return Err(BadToken::Malformed);
    }
    let named = ALGORITHMS.into_iter().find(|(name, ..)| *name == header.alg);
    let (_, algorithm, hash) =
        named.filter(|(_, algorithm, _)| algorithms.contains(algorithm)).ok_or(BadToken::Algorithm)?;
    let mut bad = BadToken::UnknownKey;
    for key in keys.0.iter().filter(|key| key.fits(&header, algorithm)) {
        match jsonwebtoken::crypto::verify(signature, message.as_bytes(), &key.decoding, algorithm) {
            Ok(true) => return Ok(Signed { claims: Claims::parse(claims)?, hash, key }),
            Ok(false) | Err(_) => bad = BadToken::Signature,
        }
    }
    Err(bad)
}

fn judge_audience(claims: &Claims, client: &Client<'_>, expected: Expected<'_>) -> Result<(), BadToken> {
    let is_for_us = |id: &str| match expected {
        Expected::Flow { .. } => id == client.settings.client_id,
        Expected::Login { .. } => client.is_ours(id),
    };
    let audiences: Vec<&str> = match claims.get("aud") {
        Some(Value::String(audience)) => vec![audience],
        Some(Value::Array(audiences)) => {
            audiences.iter().map(Value::as_str).collect::<Option<_>>().ok_or(BadToken::Audience)?
        }
        _ => return Err(BadToken::Audience),
    };
    if !audiences.iter().any(|id| is_for_us(id)) || !audiences.iter().all(|id| client.is_ours(id)) {
        return Err(BadToken::Audience);
    }
    // `client_id` is an access token's word for the same (RFC 9068, 2.2).
    for name in ["azp", "client_id"] {
        if claims.get(name).is_some_and(|party| !party.as_str().is_some_and(is_for_us)) {
            return Err(BadToken::AuthorizedParty);
        }
    }
    Ok(())
}

fn judge_times(claims: &Claims, now: OffsetDateTime) -> Result<(), BadToken> {
    #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 are exact in an f64 for a while")]
    let now = now.unix_timestamp() as f64;
    // A NumericDate may have a fraction (RFC 7519, 2).
    let time = |name: &str| match claims.get(name) {
        None => Ok(None),
        Some(time) => time.as_f64().map(Some).ok_or(BadToken::Malformed),
    };
    let expires = time("exp")?.ok_or(BadToken::Malformed)?;
    let issued = time("iat")?.ok_or(BadToken::Malformed)?;
    if now >= expires + LEEWAY {
        return Err(BadToken::Expired);
    }
    if issued > now + LEEWAY || time("nbf")?.is_some_and(|begins| begins > now + LEEWAY) {
        return Err(BadToken::NotYetValid);
    }
    Ok(())
}

fn judge_nonce(claims: &Claims, expected: Expected<'_>) -> Result<(), BadToken> {
    let (nonce, may_be_hashed) = match expected {
        Expected::Flow { nonce } => (nonce, false),
        Expected::Login { nonce } => (nonce, true),
    };
    let Some(nonce) = nonce else { return Ok(()) };
    let told = claims.get("nonce").and_then(Value::as_str).ok_or(BadToken::Nonce)?;
    let hashed =
        || digest(&SHA256, nonce.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    if told == nonce || may_be_hashed && told == hashed() { Ok(()) } else { Err(BadToken::Nonce) }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header as Jose, jwk::Jwk};
    use latchkey_crds::rendered::{KeyState, SigningAlgorithm};
    use serde_json::json;
    use time::macros::datetime;

    use super::*;
    use crate::{
        fixtures,
        providers::client::tests::{client_of, settings},
    };

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);
    const ISSUER: &str = "https://accounts.google.com";

    /// A provider's key, as it signs and as it is published.
    struct Signer {
        key: EncodingKey,
        algorithm: Algorithm,
        jwk: Value,
    }

    impl Signer {
        fn new(kid: &str, algorithm: SigningAlgorithm) -> Self {
            let pem = fixtures::signing_key(kid, algorithm, KeyState::Active).private_key;
            let pem = pem.expose().as_bytes();
            let (key, algorithm) = match algorithm {
                SigningAlgorithm::ES256 => (EncodingKey::from_ec_pem(pem), Algorithm::ES256),
                SigningAlgorithm::EdDSA => (EncodingKey::from_ed_pem(pem), Algorithm::EdDSA),
                SigningAlgorithm::RS256 => (EncodingKey::from_rsa_pem(pem), Algorithm::RS256),
            };
            let key = key.unwrap();
            let mut jwk = serde_json::to_value(Jwk::from_encoding_key(&key, algorithm).unwrap()).unwrap();
            jwk["kid"] = json!(kid);
            jwk["use"] = json!("sig");
            Self { key, algorithm, jwk }
        }

        fn header(&self) -> Jose {
            Jose { kid: self.jwk["kid"].as_str().map(str::to_owned), ..Jose::new(self.algorithm) }
        }

        fn sign(&self, claims: &Value) -> String {
            jsonwebtoken::encode(&self.header(), claims, &self.key).unwrap()
        }
    }

    fn es256() -> Signer {
        Signer::new("k1", SigningAlgorithm::ES256)
    }

    fn set(signers: &[&Signer]) -> KeySet {
        KeySet::of(&json!({ "keys": signers.iter().map(|signer| &signer.jwk).collect::<Vec<_>>() })).unwrap()
    }

    fn claims(change: Value) -> Value {
        let now = NOW.unix_timestamp();
        let mut claims =
            json!({ "iss": ISSUER, "aud": "ours", "sub": "1", "iat": now, "exp": now + 300, "nonce": "n" });
        for (name, value) in change.as_object().unwrap() {
            if value.is_null() {
                claims.as_object_mut().unwrap().remove(name);
            } else {
                claims[name] = value.clone();
            }
        }
        claims
    }

    const FLOW: Expected<'_> = Expected::Flow { nonce: Some("n") };

    fn verify_with(token: &str, keys: &KeySet, algorithms: &[Algorithm], expected: Expected<'_>) -> Option<BadToken> {
        let settings = settings("google", json!({}));
        let client = client_of(&settings).unwrap();
        let issuers = Issuers::Known { issuer: ISSUER.to_owned(), also: &["accounts.google.com"] };
        IdToken::verify(token, keys, algorithms, &issuers, &client, expected, NOW).err()
    }

    fn judge(change: Value, expected: Expected<'_>) -> Option<BadToken> {
        let signer = es256();
        verify_with(&signer.sign(&claims(change)), &set(&[&signer]), &[Algorithm::ES256], expected)
    }

    #[test]
    fn a_good_token_is_taken_under_every_sort_of_key() {
        for algorithm in [SigningAlgorithm::ES256, SigningAlgorithm::EdDSA, SigningAlgorithm::RS256] {
            let (signer, other) = (Signer::new("k1", algorithm), Signer::new("k2", algorithm));
            let keys = set(&[&other, &signer]);
            let token = signer.sign(&claims(json!({})));
            assert_eq!(verify_with(&token, &keys, &[signer.algorithm], FLOW), None);
            let unnamed = Jose { kid: None, ..signer.header() };
            let unnamed = jsonwebtoken::encode(&unnamed, &claims(json!({})), &signer.key).unwrap();
            assert_eq!(verify_with(&unnamed, &keys, &[signer.algorithm], FLOW), None, "every key is tried");
        }
    }

    #[test]
    fn a_token_without_a_signature_is_refused() {
        let body = URL_SAFE_NO_PAD.encode(claims(json!({})).to_string());
        let signer = es256();
        for alg in ["none", "None", "NONE", "nOnE", ""] {
            let header = URL_SAFE_NO_PAD.encode(json!({ "alg": alg, "kid": "k1" }).to_string());
            for token in [format!("{header}.{body}."), format!("{header}.{body}.AAAA")] {
                let bad = verify_with(&token, &set(&[&signer]), &[Algorithm::ES256], FLOW);
                assert_eq!(bad, Some(BadToken::Algorithm), "{alg}");
            }
        }
        let good = signer.sign(&claims(json!({})));
        let unsigned = &good[..=good.rfind('.').unwrap()];
        assert_eq!(verify_with(unsigned, &set(&[&signer]), &[Algorithm::ES256], FLOW), Some(BadToken::Signature));
    }

    #[test]
    fn the_public_key_is_no_shared_secret() {
        let signer = Signer::new("k1", SigningAlgorithm::RS256);
        let keys = set(&[&signer]);
        for secret in [signer.jwk["n"].as_str().unwrap().to_owned(), signer.jwk.to_string()] {
            let key = EncodingKey::from_secret(secret.as_bytes());
            let header = Jose { kid: Some("k1".to_owned()), ..Jose::new(Algorithm::HS256) };
            let token = jsonwebtoken::encode(&header, &claims(json!({})), &key).unwrap();
            let supported = ["HS256", "none", "RS256"].map(str::to_owned);
            assert_eq!(
                verify_with(&token, &keys, &allowed_algorithms(&supported), FLOW),
                Some(BadToken::Algorithm),
                "whatever the provider says that it supports"
            );
        }
    }

    #[test]
    fn a_key_that_is_a_secret_is_no_key() {
        let key = json!({ "kty": "oct", "kid": "k1", "k": URL_SAFE_NO_PAD.encode([7; 32]), "alg": "HS256" });
        assert_eq!(KeySet::of(&json!({ "keys": [key] })).unwrap().0.len(), 0);
    }

    #[test]
    fn only_algorithms_that_the_provider_names_are_taken() {
        assert_eq!(allowed_algorithms(&[]), [Algorithm::RS256]);
        let named = ["ES256", "HS256", "none", "ES512", "RS256"].map(str::to_owned);
        assert_eq!(allowed_algorithms(&named), [Algorithm::RS256, Algorithm::ES256]);
        let signer = es256();
        let token = signer.sign(&claims(json!({})));
        assert_eq!(verify_with(&token, &set(&[&signer]), &[Algorithm::RS256], FLOW), Some(BadToken::Algorithm));
        assert_eq!(verify_with(&token, &set(&[&signer]), &[], FLOW), Some(BadToken::Algorithm));
    }

    #[test]
    fn another_key_or_a_changed_token_is_refused() {
        let (signer, other, unknown) = (es256(), es256(), Signer::new("k2", SigningAlgorithm::ES256));
        let token = signer.sign(&claims(json!({})));
        let under = |keys: &KeySet| verify_with(&token, keys, &[Algorithm::ES256], FLOW);
        assert_eq!(under(&set(&[&other])), Some(BadToken::Signature), "the same name, another key");
        assert_eq!(under(&set(&[&unknown])), Some(BadToken::UnknownKey));
        assert_eq!(under(&set(&[])), Some(BadToken::UnknownKey));
        let mut for_encryption = signer.jwk.clone();
        for_encryption["use"] = json!("enc");
        assert_eq!(under(&KeySet::of(&json!({ "keys": [for_encryption] })).unwrap()), Some(BadToken::UnknownKey));
        let mut for_another = signer.jwk.clone();
        for_another["alg"] = json!("ES384");
        assert_eq!(under(&KeySet::of(&json!({ "keys": [for_another] })).unwrap()), Some(BadToken::UnknownKey));
        let parts: Vec<&str> = token.split('.').collect();
        let body = URL_SAFE_NO_PAD.encode(claims(json!({ "sub": "2" })).to_string());
        let changed = format!("{}.{body}.{}", parts[0], parts[2]);
        assert_eq!(verify_with(&changed, &set(&[&signer]), &[Algorithm::ES256], FLOW), Some(BadToken::Signature));
    }

    #[test]
    fn what_is_no_id_token_is_refused() {
        let signer = es256();
        let keys = set(&[&signer]);
        let bad = |token: &str| verify_with(token, &keys, &[Algorithm::ES256], FLOW);
        for token in ["", ".", "..", "a.b.c", "a.b", "a.b.c.d", "gho_16C7e42F292c6912E7710c838347Ae178B4a"] {
            assert_eq!(bad(token), Some(BadToken::Malformed), "{token}");
        }
        for typ in ["at+jwt", "AT+JWT", "application/at+jwt"] {
            let header = Jose { typ: Some(typ.to_owned()), ..signer.header() };
            let token = jsonwebtoken::encode(&header, &claims(json!({})), &signer.key).unwrap();
            assert_eq!(bad(&token), Some(BadToken::Malformed), "{typ}");
        }
        let header = URL_SAFE_NO_PAD.encode(json!({ "alg": "ES256", "kid": "k1", "crit": ["b64"] }).to_string());
        let good = signer.sign(&claims(json!({})));
        assert_eq!(bad(&format!("{header}{}", &good[good.find('.').unwrap()..])), Some(BadToken::Malformed));
        assert_eq!(judge(json!({ "sub": null }), FLOW), Some(BadToken::Malformed));
        assert_eq!(judge(json!({ "sub": "" }), FLOW), Some(BadToken::Malformed));
        assert_eq!(judge(json!({ "sub": 7 }), FLOW), Some(BadToken::Malformed));
        assert_eq!(judge(json!({ "sub": "x".repeat(256) }), FLOW), Some(BadToken::Malformed));
    }

    #[test]
    fn the_issuer_is_compared_whole() {
        assert_eq!(judge(json!({ "iss": "accounts.google.com" }), FLOW), None);
        for iss in [
            json!(null),
            json!(""),
            json!("https://accounts.google.com/"),
            json!("https://ACCOUNTS.google.com"),
            json!("https://accounts.google.com.evil.example"),
            json!([ISSUER]),
        ] {
            assert_eq!(judge(json!({ "iss": iss }), FLOW), Some(BadToken::Issuer), "{iss}");
        }
    }

    #[test]
    fn in_a_flow_the_token_is_for_our_one_client() {
        let flow = |aud: Value| judge(json!({ "aud": aud }), FLOW);
        assert_eq!(flow(json!("ours")), None);
        assert_eq!(flow(json!(["ours"])), None);
        assert_eq!(flow(json!(["ours", "ours-too"])), None);
        for aud in [
            json!(null),
            json!("theirs"),
            json!("ours-too"),
            json!(["ours-too"]),
            json!(["ours", "theirs"]),
            json!([]),
            json!(["ours", 7]),
            json!("OURS"),
            json!({ "ours": true }),
        ] {
            assert_eq!(flow(aud.clone()), Some(BadToken::Audience), "{aud}");
        }
    }

    #[test]
    fn at_login_the_token_may_be_for_any_client_of_ours() {
        let login = |change| judge(change, Expected::Login { nonce: None });
        for aud in [json!("ours"), json!("ours-too"), json!(["ours", "ours-too"])] {
            assert_eq!(login(json!({ "aud": aud })), None);
        }
        for aud in [json!("theirs"), json!(["ours", "theirs"]), json!([]), json!("")] {
            assert_eq!(login(json!({ "aud": aud })), Some(BadToken::Audience), "{aud}");
        }
        assert_eq!(login(json!({ "azp": "ours-too" })), None);
        assert_eq!(login(json!({ "azp": "theirs" })), Some(BadToken::AuthorizedParty));
    }

    #[test]
    fn the_party_that_it_was_issued_to_is_us() {
        assert_eq!(judge(json!({ "azp": "ours" }), FLOW), None);
        for azp in [json!("theirs"), json!(""), json!(7), json!("ours-too")] {
            assert_eq!(judge(json!({ "azp": azp }), FLOW), Some(BadToken::AuthorizedParty), "{azp}");
            assert_eq!(judge(json!({ "client_id": azp }), FLOW), Some(BadToken::AuthorizedParty), "{azp}");
        }
    }

    #[test]
    fn times_are_judged_with_a_minutes_leeway() {
        let now = NOW.unix_timestamp();
        for (change, bad) in [
            (json!({ "exp": now - 59 }), None),
            (json!({ "exp": now - 60 }), Some(BadToken::Expired)),
            (json!({ "exp": 0 }), Some(BadToken::Expired)),
            (json!({ "exp": -1 }), Some(BadToken::Expired)),
            (json!({ "exp": null }), Some(BadToken::Malformed)),
            (json!({ "exp": "never" }), Some(BadToken::Malformed)),
            (json!({ "exp": 1e300 }), None),
            (json!({ "iat": now + 60 }), None),
            (json!({ "iat": now + 61 }), Some(BadToken::NotYetValid)),
            (json!({ "iat": null }), Some(BadToken::Malformed)),
            (json!({ "nbf": now + 60 }), None),
            (json!({ "nbf": now + 61 }), Some(BadToken::NotYetValid)),
            (json!({ "nbf": [] }), Some(BadToken::Malformed)),
            (json!({ "iat": now as f64 - 0.5 }), None),
        ] {
            assert_eq!(judge(change.clone(), FLOW), bad, "{change}");
        }
    }

    #[test]
    fn the_nonce_is_the_flows() {
        for nonce in [json!(null), json!("other"), json!(""), json!(7), json!("N")] {
            assert_eq!(judge(json!({ "nonce": nonce }), FLOW), Some(BadToken::Nonce), "{nonce}");
        }
        let hashed = "1b16b1df538ba12dc3f97edbb85caa7050d46c148134290feba80f8236c83db9";
        let login = Expected::Login { nonce: Some("n") };
        assert_eq!(judge(json!({ "nonce": hashed }), FLOW), Some(BadToken::Nonce), "a flow's is plain");
        assert_eq!(judge(json!({ "nonce": hashed }), login), None);
        assert_eq!(judge(json!({ "nonce": "n" }), login), None);
        assert_eq!(judge(json!({ "nonce": hashed.to_uppercase() }), login), Some(BadToken::Nonce));
        assert_eq!(judge(json!({ "nonce": null }), login), Some(BadToken::Nonce));
        assert_eq!(judge(json!({ "nonce": "whatever" }), Expected::Login { nonce: None }), None);
    }

    #[test]
    fn the_access_token_beside_it_is_its_own() {
        let signer = es256();
        let judge = |at_hash: Value| {
            let token = signer.sign(&claims(json!({ "at_hash": at_hash })));
            let settings = settings("google", json!({}));
            let client = client_of(&settings).unwrap();
            let issuers = Issuers::Known { issuer: ISSUER.to_owned(), also: &[] };
            let token =
                IdToken::verify(&token, &set(&[&signer]), &[Algorithm::ES256], &issuers, &client, FLOW, NOW).unwrap();
            // OpenID Connect Core 1.0, A.3.
            token.judge_access_token("jHkWEdUXMU1BwAsC4vtUsZwnNvTIxEl0z9K3vx5KF0Y")
        };
        assert_eq!(judge(json!("77QmUPtjPfzWtF2AnpK9RQ")), Ok(()));
        assert_eq!(judge(json!(null)), Ok(()));
        for bad in [json!("77QmUPtjPfzWtF2AnpK9RR"), json!(""), json!(7)] {
            assert_eq!(judge(bad), Err(BadToken::AccessTokenHash));
        }
    }

    #[test]
    fn microsofts_keys_of_one_tenant_do_not_sign_for_another() {
        let [ours, theirs] = ["72f988bf-86f1-41af-91ab-2d7cd011db47", "9188040d-6c67-4c5b-b112-36a304b66dad"];
        let iss = |tenant: &str| format!("https://login.microsoftonline.com/{tenant}/v2.0");
        let issuers = Issuers::Tenants { template: iss("{tenantid}"), consumers: true };
        let settings = settings("microsoft", json!({ "tenant": "common" }));
        let client = client_of(&settings).unwrap();
        let judge = |key_issuer: Value| {
            let mut signer = es256();
            signer.jwk["issuer"] = key_issuer;
            let token = signer.sign(&claims(json!({ "iss": iss(ours), "tid": ours })));
            let keys = set(&[&signer]);
            IdToken::verify(&token, &keys, &[Algorithm::ES256], &issuers, &client, FLOW, NOW)
                .map(|token| token.authority)
                .map_err(|bad| bad == BadToken::UnknownKey)
        };
        assert_eq!(judge(json!(iss("{tenantid}"))), Ok(iss(ours)));
        assert_eq!(judge(json!(iss(ours))), Ok(iss(ours)));
        assert_eq!(judge(json!(iss(theirs))), Err(true));
    }
}
