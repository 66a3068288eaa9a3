//! Full ID token validation (OpenID Connect Core 1.0, 3.1.3.7): signature, issuer, audience, times, nonce.

use aws_lc_rs::digest::{self, SHA256, SHA384, SHA512, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, DecodingKey, jwk::Jwk};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value};
use time::OffsetDateTime;

use super::{
    cache::MemorySize,
    client::ProviderConfig,
    discovery::{AcceptedIssuers, MAX_URL_LENGTH},
    profile::SourceClaims,
};
use crate::domain::identity::{InvalidProviderToken, InvalidResponse};

/// Tolerated clock difference, in seconds.
const CLOCK_LEEWAY: f64 = 60.0;
/// Maximum number of keys that are read from one set. Microsoft's set has about a dozen keys.
const MAX_KEYS: usize = 64;
/// Maximum length of a key ID and of the name of a key's algorithm, in bytes.
const MAX_KEY_ID_LENGTH: usize = 255;
/// Maximum length of one number of a key, in bytes: 8,192 bits in base64url, the largest RSA modulus that is supported.
const MAX_KEY_NUMBER_LENGTH: usize = 1366;
/// Maximum length of an ID token or access token, in bytes. Microsoft's tokens have about 4 KiB, or 12 KiB with 200
/// groups.
pub(super) const MAX_TOKEN_LENGTH: usize = 32 * 1024;
/// Maximum length of a token's encoded header, in bytes. Most headers have about 100 bytes, headers with a certificate
/// chain about 4 KiB.
const MAX_HEADER_LENGTH: usize = 8 * 1024;
/// Estimated memory that a key in a set takes in addition to the key's texts (ID, algorithm, issuer and numbers), in
/// bytes.
const KEY_OVERHEAD: usize = 256;
/// Maximum length of a subject, in bytes (OpenID Connect Core 1.0, 2).
pub(super) const MAX_SUBJECT_LENGTH: usize = 255;

/// All supported algorithms. `none` and the algorithms with a shared secret are excluded, even if a provider lists
/// them.
const ALGORITHMS: [SupportedAlgorithm; 9] = [
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

/// The name of an algorithm, the algorithm, and its hash function.
type SupportedAlgorithm = (&'static str, Algorithm, &'static digest::Algorithm);

/// The claims of a token, not validated.
#[derive(Debug)]
pub struct UnvalidatedClaims(Map<String, Value>);

/// A provider's signing keys (RFC 7517).
#[derive(Debug)]
pub struct KeySet(Vec<VerificationKey>);

#[derive(Debug)]
struct VerificationKey {
    id: Option<String>,
    /// The algorithm that the key names. If it names one, the key verifies no signature of another algorithm.
    algorithm: Option<String>,
    decoding: DecodingKey,
    /// Microsoft: the issuer for which the key signs.
    issuer: Option<String>,
    /// The memory that the key takes, in bytes.
    footprint: usize,
}

/// A token with a valid signature. Its claims are not validated.
#[derive(Debug)]
pub struct VerifiedSignature<'a> {
    pub claims: UnvalidatedClaims,
    /// The hash function of the signing algorithm.
    hash: &'static digest::Algorithm,
    key: &'a VerificationKey,
}

/// The parts of a token (RFC 7515, 7.1).
struct TokenParts<'a> {
    header: Header,
    /// The text that is signed: the encoded header and claims.
    message: &'a str,
    claims: &'a str,
    signature: &'a str,
}

/// A validated ID token.
#[derive(Debug)]
pub(super) struct IdToken {
    pub(super) authority: String,
    pub(super) subject: String,
    pub(super) statement: SourceClaims,
    /// The claim `at_hash`. `None` if it is missing, `Some(None)` if it is not text.
    access_token_hash: Option<Option<String>>,
    /// The hash function of the signing algorithm. `at_hash` uses the same function.
    hash: &'static digest::Algorithm,
}

/// Where a token comes from. This determines the audience and the nonce that the token must have.
#[derive(Clone, Copy, Debug)]
pub(super) enum TokenOrigin<'a> {
    /// From the token endpoint: the audience is `clientID`. `nonce` is the nonce of the flow, if the provider supports
    /// nonces.
    Flow { nonce: Option<&'a str> },
    /// From a request to *login*: the audience is `clientID` or one of `additionalClientIDs`. `nonce` is the nonce of
    /// the request, if it has one. The token contains either the nonce itself or its SHA-256 in lower-case hexadecimal
    /// (the form that apps pass to Apple).
    Login { nonce: Option<&'a str> },
}

/// The header of a token (RFC 7515, 4).
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    typ: Option<String>,
    crit: Option<IgnoredAny>,
}

/// Returns the algorithms in a provider's list that this server supports, or RS256 if the list is empty.
pub(super) fn allowed_algorithms(listed: &[String]) -> Vec<Algorithm> {
    if listed.is_empty() {
        return vec![Algorithm::RS256];
    }
    let supported = ALGORITHMS.into_iter();
    supported.filter(|(name, ..)| listed.iter().any(|other| other == name)).map(|(_, algorithm, _)| algorithm).collect()
}

// === impl KeySet ===

impl KeySet {
    /// Parses a key set within [`super::RESPONSE_BOUNDS`]. Skips shared secrets, keys that are not for signatures, keys
    /// of an unknown type, and keys with members that are too long.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidResponse> {
        Self::from_document(&super::parse(body)?).ok_or(InvalidResponse::Incomplete)
    }

    fn from_document(document: &Value) -> Option<Self> {
        let keys = document.get("keys")?.as_array()?;
        Some(Self(keys.iter().take(MAX_KEYS).filter_map(VerificationKey::parse).collect()))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of the keys for this algorithm verifies the signature over `message`.
    pub(super) fn verifies_with_any_key(&self, algorithm: &str, message: &[u8], signature: &[u8]) -> bool {
        let Some((name, algorithm, _)) = ALGORITHMS.into_iter().find(|(name, ..)| *name == algorithm) else {
            return false;
        };
        let header = Header { alg: name.to_owned(), kid: None, typ: None, crit: None };
        let signature = URL_SAFE_NO_PAD.encode(signature);
        self.0
            .iter()
            .filter(|key| key.can_verify(&header, algorithm))
            .any(|key| jsonwebtoken::crypto::verify(&signature, message, &key.decoding, algorithm).unwrap_or(false))
    }
}

impl MemorySize for KeySet {
    fn memory_size(&self) -> usize {
        self.0.iter().map(|key| key.footprint).sum()
    }
}

// === impl VerificationKey ===

impl VerificationKey {
    fn parse(value: &Value) -> Option<Self> {
        let text = |name: &str| value.get(name).and_then(Value::as_str);
        let is_secret = text("kty") == Some("oct");
        if is_secret || text("use").is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        let texts = [("kid", MAX_KEY_ID_LENGTH), ("alg", MAX_KEY_ID_LENGTH), ("issuer", MAX_URL_LENGTH)];
        let numbers = ["n", "e", "x", "y"].map(|name| (name, MAX_KEY_NUMBER_LENGTH));
        let mut footprint = KEY_OVERHEAD;
        for (name, max) in texts.into_iter().chain(numbers) {
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

    fn can_verify(&self, header: &Header, algorithm: Algorithm) -> bool {
        self.decoding.family() == algorithm.family()
            && self.algorithm.as_ref().is_none_or(|own| *own == header.alg)
            && header.kid.as_ref().is_none_or(|kid| self.id.as_ref() == Some(kid))
    }
}

// === impl IdToken ===

impl IdToken {
    /// Validates a token. [`InvalidProviderToken::UnknownKey`] can mean that the key set is outdated.
    pub(super) fn verify(
        token: &str,
        keys: &KeySet,
        algorithms: &[Algorithm],
        issuers: &AcceptedIssuers,
        client: &ProviderConfig<'_>,
        expected: TokenOrigin<'_>,
        now: OffsetDateTime,
    ) -> Result<Self, InvalidProviderToken> {
        let VerifiedSignature { claims, hash, key } = verify_signature(token, keys, algorithms)?;
        let iss = claims.get("iss").and_then(Value::as_str).ok_or(InvalidProviderToken::Issuer)?;
        let tenant = claims.get("tid").and_then(Value::as_str);
        let authority = issuers.authority(iss, tenant).ok_or(InvalidProviderToken::Issuer)?;
        if let (AcceptedIssuers::MicrosoftTenants { .. }, Some(key_issuer)) = (issuers, &key.issuer) {
            // Some of Microsoft's keys sign for only one tenant.
            let key_issuer =
                tenant.map_or_else(|| key_issuer.clone(), |tenant| key_issuer.replace("{tenantid}", tenant));
            if key_issuer != iss {
                return Err(InvalidProviderToken::UnknownKey);
            }
        }
        validate_audience(&claims, client, expected)?;
        validate_times(&claims, now)?;
        validate_nonce(&claims, expected)?;
        let subject = claims.get("sub").and_then(Value::as_str).unwrap_or_default();
        if subject.is_empty() || subject.len() > MAX_SUBJECT_LENGTH {
            return Err(InvalidProviderToken::Malformed);
        }
        let subject = subject.to_owned();
        let access_token_hash = claims.get("at_hash").map(|hash| hash.as_str().map(str::to_owned));
        let statement = client.mapping.read_claims(&Value::Object(claims.0));
        Ok(Self { authority, subject, statement, access_token_hash, hash })
    }

    /// Checks that the hash of the access token, which came with this ID token, matches the claim `at_hash`. Accepts
    /// any access token if the claim is missing (OpenID Connect Core 1.0, 3.1.3.8).
    pub(super) fn validate_access_token_hash(&self, access_token: &str) -> Result<(), InvalidProviderToken> {
        let Some(at_hash) = &self.access_token_hash else { return Ok(()) };
        let hash = digest(self.hash, access_token.as_bytes());
        let half = URL_SAFE_NO_PAD.encode(&hash.as_ref()[..hash.as_ref().len() / 2]);
        if at_hash.as_ref() == Some(&half) { Ok(()) } else { Err(InvalidProviderToken::AccessTokenHash) }
    }
}

// === impl UnvalidatedClaims ===

impl UnvalidatedClaims {
    /// Parses the middle part of a token, a JSON object in base64url, within [`super::RESPONSE_BOUNDS`].
    pub fn parse(part: &str) -> Result<Self, InvalidProviderToken> {
        let bytes = URL_SAFE_NO_PAD.decode(part).map_err(|_| InvalidProviderToken::Malformed)?;
        match super::parse(&bytes) {
            Ok(Value::Object(claims)) => Ok(Self(claims)),
            Ok(_) | Err(_) => Err(InvalidProviderToken::Malformed),
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }
}

// === impl TokenParts ===

impl<'a> TokenParts<'a> {
    /// Splits a token, and parses only its header.
    fn parse(token: &'a str) -> Result<Self, InvalidProviderToken> {
        if token.len() > MAX_TOKEN_LENGTH {
            return Err(InvalidProviderToken::Malformed);
        }
        let mut parts = token.split('.');
        let (Some(header), Some(claims), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(InvalidProviderToken::Malformed);
        };
        if header.len() > MAX_HEADER_LENGTH {
            return Err(InvalidProviderToken::Malformed);
        }
        let message = &token[..header.len() + 1 + claims.len()];
        let header = URL_SAFE_NO_PAD.decode(header).map_err(|_| InvalidProviderToken::Malformed)?;
        let header: Header = serde_json::from_slice(&header).map_err(|_| InvalidProviderToken::Malformed)?;
        if header.kid.as_ref().is_some_and(|kid| kid.len() > MAX_KEY_ID_LENGTH) {
            return Err(InvalidProviderToken::Malformed);
        }
        Ok(Self { header, message, claims, signature })
    }
}

/// Whether `token` has the form of a signed token: three parts, and its header and claims can be parsed. Does not
/// verify the signature.
pub fn is_well_formed(token: &str) -> bool {
    TokenParts::parse(token).and_then(|parts| UnvalidatedClaims::parse(parts.claims)).is_ok()
}

/// Verifies a token's signature and parses its claims. Does not validate the claims.
pub fn verify_signature<'a>(
    token: &str,
    keys: &'a KeySet,
    algorithms: &[Algorithm],
) -> Result<VerifiedSignature<'a>, InvalidProviderToken> {
    let TokenParts { header, message, claims, signature } = TokenParts::parse(token)?;
    // A header with `crit` must be rejected, because no extension is supported (RFC 7515, 4.1.11). The type `at+jwt`
    // marks an access token (RFC 9068, 2.1), which is not accepted as an ID token.
    let is_access_token = header.typ.as_deref().is_some_and(|typ| {
        let typ = typ.to_ascii_lowercase();
        typ == "at+jwt" || typ == "application/at+jwt"
    });
    if header.crit.is_some() || is_access_token {
        return Err(InvalidProviderToken::Malformed);
    }
    let supported = ALGORITHMS.into_iter().find(|(name, ..)| *name == header.alg);
    let (_, algorithm, hash) =
        supported.filter(|(_, algorithm, _)| algorithms.contains(algorithm)).ok_or(InvalidProviderToken::Algorithm)?;
    let mut error = InvalidProviderToken::UnknownKey;
    for key in keys.0.iter().filter(|key| key.can_verify(&header, algorithm)) {
        match jsonwebtoken::crypto::verify(signature, message.as_bytes(), &key.decoding, algorithm) {
            Ok(true) => return Ok(VerifiedSignature { claims: UnvalidatedClaims::parse(claims)?, hash, key }),
            Ok(false) | Err(_) => error = InvalidProviderToken::Signature,
        }
    }
    Err(error)
}

fn validate_audience(
    claims: &UnvalidatedClaims,
    client: &ProviderConfig<'_>,
    expected: TokenOrigin<'_>,
) -> Result<(), InvalidProviderToken> {
    let is_for_us = |id: &str| match expected {
        TokenOrigin::Flow { .. } => id == client.settings.client_id,
        TokenOrigin::Login { .. } => client.is_accepted_client(id),
    };
    let audiences: Vec<&str> = match claims.get("aud") {
        Some(Value::String(audience)) => vec![audience],
        Some(Value::Array(audiences)) => {
            audiences.iter().map(Value::as_str).collect::<Option<_>>().ok_or(InvalidProviderToken::Audience)?
        }
        _ => return Err(InvalidProviderToken::Audience),
    };
    if !audiences.iter().any(|id| is_for_us(id)) || !audiences.iter().all(|id| client.is_accepted_client(id)) {
        return Err(InvalidProviderToken::Audience);
    }
    // In an access token, `client_id` has the meaning of `azp` (RFC 9068, 2.2).
    for name in ["azp", "client_id"] {
        if claims.get(name).is_some_and(|party| !party.as_str().is_some_and(is_for_us)) {
            return Err(InvalidProviderToken::AuthorizedParty);
        }
    }
    Ok(())
}

fn validate_times(claims: &UnvalidatedClaims, now: OffsetDateTime) -> Result<(), InvalidProviderToken> {
    #[expect(clippy::cast_precision_loss, reason = "an f64 represents seconds since 1970 exactly up to 2^53")]
    let now = now.unix_timestamp() as f64;
    // A NumericDate can have a fraction (RFC 7519, 2).
    let time = |name: &str| match claims.get(name) {
        None => Ok(None),
        Some(time) => time.as_f64().map(Some).ok_or(InvalidProviderToken::Malformed),
    };
    let expires = time("exp")?.ok_or(InvalidProviderToken::Malformed)?;
    let issued = time("iat")?.ok_or(InvalidProviderToken::Malformed)?;
    if now >= expires + CLOCK_LEEWAY {
        return Err(InvalidProviderToken::Expired);
    }
    if issued > now + CLOCK_LEEWAY || time("nbf")?.is_some_and(|begins| begins > now + CLOCK_LEEWAY) {
        return Err(InvalidProviderToken::NotYetValid);
    }
    Ok(())
}

fn validate_nonce(claims: &UnvalidatedClaims, expected: TokenOrigin<'_>) -> Result<(), InvalidProviderToken> {
    let (nonce, can_be_hashed) = match expected {
        TokenOrigin::Flow { nonce } => (nonce, false),
        TokenOrigin::Login { nonce } => (nonce, true),
    };
    let Some(nonce) = nonce else { return Ok(()) };
    let claimed_nonce = claims.get("nonce").and_then(Value::as_str).ok_or(InvalidProviderToken::Nonce)?;
    let hashed =
        || digest(&SHA256, nonce.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    if claimed_nonce == nonce || can_be_hashed && claimed_nonce == hashed() {
        Ok(())
    } else {
        Err(InvalidProviderToken::Nonce)
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header as JwtHeader, jwk::Jwk};
    use latchkey_crds::rendered::{KeyState, SigningAlgorithm};
    use serde_json::json;
    use time::macros::datetime;

    use super::*;
    use crate::{
        fixtures,
        providers::client::tests::{test_client, test_settings},
    };

    const NOW: OffsetDateTime = datetime!(2026-02-01 09:30 UTC);
    const ISSUER: &str = "https://accounts.google.com";

    /// A provider's key: the private key and the published JWK.
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

        fn header(&self) -> JwtHeader {
            JwtHeader { kid: self.jwk["kid"].as_str().map(str::to_owned), ..JwtHeader::new(self.algorithm) }
        }

        fn sign(&self, claims: &Value) -> String {
            jsonwebtoken::encode(&self.header(), claims, &self.key).unwrap()
        }
    }

    fn es256_signer() -> Signer {
        Signer::new("k1", SigningAlgorithm::ES256)
    }

    fn key_set(signers: &[&Signer]) -> KeySet {
        KeySet::from_document(&json!({ "keys": signers.iter().map(|signer| &signer.jwk).collect::<Vec<_>>() })).unwrap()
    }

    /// The claims of a valid token with this change. The value null removes a claim.
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

    const FLOW: TokenOrigin<'_> = TokenOrigin::Flow { nonce: Some("n") };

    fn verify_with(
        token: &str,
        keys: &KeySet,
        algorithms: &[Algorithm],
        expected: TokenOrigin<'_>,
    ) -> Option<InvalidProviderToken> {
        let settings = test_settings("google", json!({}));
        let client = test_client(&settings).unwrap();
        let issuers = AcceptedIssuers::Known { issuer: ISSUER.to_owned(), aliases: &["accounts.google.com"] };
        IdToken::verify(token, keys, algorithms, &issuers, &client, expected, NOW).err()
    }

    fn validate(change: Value, expected: TokenOrigin<'_>) -> Option<InvalidProviderToken> {
        let signer = es256_signer();
        verify_with(&signer.sign(&claims(change)), &key_set(&[&signer]), &[Algorithm::ES256], expected)
    }

    #[test]
    fn a_valid_token_is_accepted_for_every_kind_of_key() {
        for algorithm in [SigningAlgorithm::ES256, SigningAlgorithm::EdDSA, SigningAlgorithm::RS256] {
            let (signer, other) = (Signer::new("k1", algorithm), Signer::new("k2", algorithm));
            let keys = key_set(&[&other, &signer]);
            let token = signer.sign(&claims(json!({})));
            assert_eq!(verify_with(&token, &keys, &[signer.algorithm], FLOW), None);
            let header = JwtHeader { kid: None, ..signer.header() };
            let token_without_kid = jsonwebtoken::encode(&header, &claims(json!({})), &signer.key).unwrap();
            assert_eq!(
                verify_with(&token_without_kid, &keys, &[signer.algorithm], FLOW),
                None,
                "without a key ID every key is tried"
            );
        }
    }

    #[test]
    fn a_token_with_algorithm_none_or_without_a_signature_is_rejected() {
        let body = URL_SAFE_NO_PAD.encode(claims(json!({})).to_string());
        let signer = es256_signer();
        for alg in ["none", "None", "NONE", "nOnE", ""] {
            let header = URL_SAFE_NO_PAD.encode(json!({ "alg": alg, "kid": "k1" }).to_string());
            for token in [format!("{header}.{body}."), format!("{header}.{body}.AAAA")] {
                let error = verify_with(&token, &key_set(&[&signer]), &[Algorithm::ES256], FLOW);
                assert_eq!(error, Some(InvalidProviderToken::Algorithm), "{alg}");
            }
        }
        let good = signer.sign(&claims(json!({})));
        let unsigned = &good[..=good.rfind('.').unwrap()];
        assert_eq!(
            verify_with(unsigned, &key_set(&[&signer]), &[Algorithm::ES256], FLOW),
            Some(InvalidProviderToken::Signature)
        );
    }

    #[test]
    fn a_public_key_is_not_accepted_as_a_shared_secret() {
        let signer = Signer::new("k1", SigningAlgorithm::RS256);
        let keys = key_set(&[&signer]);
        for secret in [signer.jwk["n"].as_str().unwrap().to_owned(), signer.jwk.to_string()] {
            let key = EncodingKey::from_secret(secret.as_bytes());
            let header = JwtHeader { kid: Some("k1".to_owned()), ..JwtHeader::new(Algorithm::HS256) };
            let token = jsonwebtoken::encode(&header, &claims(json!({})), &key).unwrap();
            let supported = ["HS256", "none", "RS256"].map(str::to_owned);
            assert_eq!(
                verify_with(&token, &keys, &allowed_algorithms(&supported), FLOW),
                Some(InvalidProviderToken::Algorithm),
                "even if the provider lists HS256"
            );
        }
    }

    #[test]
    fn symmetric_keys_are_skipped() {
        let key = json!({ "kty": "oct", "kid": "k1", "k": URL_SAFE_NO_PAD.encode([7; 32]), "alg": "HS256" });
        assert_eq!(KeySet::from_document(&json!({ "keys": [key] })).unwrap().0.len(), 0);
    }

    #[test]
    fn only_algorithms_that_the_provider_lists_are_accepted() {
        assert_eq!(allowed_algorithms(&[]), [Algorithm::RS256]);
        let named = ["ES256", "HS256", "none", "ES512", "RS256"].map(str::to_owned);
        assert_eq!(allowed_algorithms(&named), [Algorithm::RS256, Algorithm::ES256]);
        let signer = es256_signer();
        let token = signer.sign(&claims(json!({})));
        assert_eq!(
            verify_with(&token, &key_set(&[&signer]), &[Algorithm::RS256], FLOW),
            Some(InvalidProviderToken::Algorithm)
        );
        assert_eq!(verify_with(&token, &key_set(&[&signer]), &[], FLOW), Some(InvalidProviderToken::Algorithm));
    }

    #[test]
    fn another_key_or_a_changed_token_is_rejected() {
        let (signer, other, unknown) = (es256_signer(), es256_signer(), Signer::new("k2", SigningAlgorithm::ES256));
        let token = signer.sign(&claims(json!({})));
        let error_with = |keys: &KeySet| verify_with(&token, keys, &[Algorithm::ES256], FLOW);
        assert_eq!(
            error_with(&key_set(&[&other])),
            Some(InvalidProviderToken::Signature),
            "the same key ID, another key"
        );
        assert_eq!(error_with(&key_set(&[&unknown])), Some(InvalidProviderToken::UnknownKey));
        assert_eq!(error_with(&key_set(&[])), Some(InvalidProviderToken::UnknownKey));
        let mut for_encryption = signer.jwk.clone();
        for_encryption["use"] = json!("enc");
        assert_eq!(
            error_with(&KeySet::from_document(&json!({ "keys": [for_encryption] })).unwrap()),
            Some(InvalidProviderToken::UnknownKey)
        );
        let mut for_another_algorithm = signer.jwk.clone();
        for_another_algorithm["alg"] = json!("ES384");
        assert_eq!(
            error_with(&KeySet::from_document(&json!({ "keys": [for_another_algorithm] })).unwrap()),
            Some(InvalidProviderToken::UnknownKey)
        );
        let parts: Vec<&str> = token.split('.').collect();
        let body = URL_SAFE_NO_PAD.encode(claims(json!({ "sub": "2" })).to_string());
        let changed = format!("{}.{body}.{}", parts[0], parts[2]);
        assert_eq!(
            verify_with(&changed, &key_set(&[&signer]), &[Algorithm::ES256], FLOW),
            Some(InvalidProviderToken::Signature)
        );
    }

    #[test]
    fn text_that_is_not_an_id_token_is_rejected() {
        let signer = es256_signer();
        let keys = key_set(&[&signer]);
        let error_of = |token: &str| verify_with(token, &keys, &[Algorithm::ES256], FLOW);
        for token in ["", ".", "..", "a.b.c", "a.b", "a.b.c.d", "gho_16C7e42F292c6912E7710c838347Ae178B4a"] {
            assert_eq!(error_of(token), Some(InvalidProviderToken::Malformed), "{token}");
        }
        for typ in ["at+jwt", "AT+JWT", "application/at+jwt"] {
            let header = JwtHeader { typ: Some(typ.to_owned()), ..signer.header() };
            let token = jsonwebtoken::encode(&header, &claims(json!({})), &signer.key).unwrap();
            assert_eq!(error_of(&token), Some(InvalidProviderToken::Malformed), "{typ}");
        }
        let header = URL_SAFE_NO_PAD.encode(json!({ "alg": "ES256", "kid": "k1", "crit": ["b64"] }).to_string());
        let good = signer.sign(&claims(json!({})));
        assert_eq!(
            error_of(&format!("{header}{}", &good[good.find('.').unwrap()..])),
            Some(InvalidProviderToken::Malformed)
        );
        assert_eq!(validate(json!({ "sub": null }), FLOW), Some(InvalidProviderToken::Malformed));
        assert_eq!(validate(json!({ "sub": "" }), FLOW), Some(InvalidProviderToken::Malformed));
        assert_eq!(validate(json!({ "sub": 7 }), FLOW), Some(InvalidProviderToken::Malformed));
        assert_eq!(validate(json!({ "sub": "x".repeat(256) }), FLOW), Some(InvalidProviderToken::Malformed));
    }

    #[test]
    fn the_issuer_is_compared_exactly() {
        assert_eq!(validate(json!({ "iss": "accounts.google.com" }), FLOW), None);
        for iss in [
            json!(null),
            json!(""),
            json!("https://accounts.google.com/"),
            json!("https://ACCOUNTS.google.com"),
            json!("https://accounts.google.com.evil.example"),
            json!([ISSUER]),
        ] {
            assert_eq!(validate(json!({ "iss": iss }), FLOW), Some(InvalidProviderToken::Issuer), "{iss}");
        }
    }

    #[test]
    fn in_a_flow_the_audience_must_be_the_client_of_the_flow() {
        let flow = |aud: Value| validate(json!({ "aud": aud }), FLOW);
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
            assert_eq!(flow(aud.clone()), Some(InvalidProviderToken::Audience), "{aud}");
        }
    }

    #[test]
    fn at_login_the_audience_can_be_any_accepted_client() {
        let login = |change| validate(change, TokenOrigin::Login { nonce: None });
        for aud in [json!("ours"), json!("ours-too"), json!(["ours", "ours-too"])] {
            assert_eq!(login(json!({ "aud": aud })), None);
        }
        for aud in [json!("theirs"), json!(["ours", "theirs"]), json!([]), json!("")] {
            assert_eq!(login(json!({ "aud": aud })), Some(InvalidProviderToken::Audience), "{aud}");
        }
        assert_eq!(login(json!({ "azp": "ours-too" })), None);
        assert_eq!(login(json!({ "azp": "theirs" })), Some(InvalidProviderToken::AuthorizedParty));
    }

    #[test]
    fn the_authorized_party_must_be_our_client() {
        assert_eq!(validate(json!({ "azp": "ours" }), FLOW), None);
        for azp in [json!("theirs"), json!(""), json!(7), json!("ours-too")] {
            assert_eq!(validate(json!({ "azp": azp }), FLOW), Some(InvalidProviderToken::AuthorizedParty), "{azp}");
            assert_eq!(
                validate(json!({ "client_id": azp }), FLOW),
                Some(InvalidProviderToken::AuthorizedParty),
                "{azp}"
            );
        }
    }

    #[test]
    fn times_are_validated_with_a_leeway_of_one_minute() {
        let now = NOW.unix_timestamp();
        for (change, error) in [
            (json!({ "exp": now - 59 }), None),
            (json!({ "exp": now - 60 }), Some(InvalidProviderToken::Expired)),
            (json!({ "exp": 0 }), Some(InvalidProviderToken::Expired)),
            (json!({ "exp": -1 }), Some(InvalidProviderToken::Expired)),
            (json!({ "exp": null }), Some(InvalidProviderToken::Malformed)),
            (json!({ "exp": "never" }), Some(InvalidProviderToken::Malformed)),
            (json!({ "exp": 1e300 }), None),
            (json!({ "iat": now + 60 }), None),
            (json!({ "iat": now + 61 }), Some(InvalidProviderToken::NotYetValid)),
            (json!({ "iat": null }), Some(InvalidProviderToken::Malformed)),
            (json!({ "nbf": now + 60 }), None),
            (json!({ "nbf": now + 61 }), Some(InvalidProviderToken::NotYetValid)),
            (json!({ "nbf": [] }), Some(InvalidProviderToken::Malformed)),
            (json!({ "iat": now as f64 - 0.5 }), None),
        ] {
            assert_eq!(validate(change.clone(), FLOW), error, "{change}");
        }
    }

    #[test]
    fn the_nonce_must_match_the_flow_or_the_login_request() {
        for nonce in [json!(null), json!("other"), json!(""), json!(7), json!("N")] {
            assert_eq!(validate(json!({ "nonce": nonce }), FLOW), Some(InvalidProviderToken::Nonce), "{nonce}");
        }
        let hashed = "1b16b1df538ba12dc3f97edbb85caa7050d46c148134290feba80f8236c83db9";
        let login = TokenOrigin::Login { nonce: Some("n") };
        assert_eq!(
            validate(json!({ "nonce": hashed }), FLOW),
            Some(InvalidProviderToken::Nonce),
            "the nonce of a flow is plain"
        );
        assert_eq!(validate(json!({ "nonce": hashed }), login), None);
        assert_eq!(validate(json!({ "nonce": "n" }), login), None);
        assert_eq!(validate(json!({ "nonce": hashed.to_uppercase() }), login), Some(InvalidProviderToken::Nonce));
        assert_eq!(validate(json!({ "nonce": null }), login), Some(InvalidProviderToken::Nonce));
        assert_eq!(validate(json!({ "nonce": "whatever" }), TokenOrigin::Login { nonce: None }), None);
    }

    #[test]
    fn at_hash_must_match_the_access_token() {
        let signer = es256_signer();
        let validate_hash = |at_hash: Value| {
            let token = signer.sign(&claims(json!({ "at_hash": at_hash })));
            let settings = test_settings("google", json!({}));
            let client = test_client(&settings).unwrap();
            let issuers = AcceptedIssuers::Known { issuer: ISSUER.to_owned(), aliases: &[] };
            let token =
                IdToken::verify(&token, &key_set(&[&signer]), &[Algorithm::ES256], &issuers, &client, FLOW, NOW)
                    .unwrap();
            // The example of OpenID Connect Core 1.0, A.3.
            token.validate_access_token_hash("jHkWEdUXMU1BwAsC4vtUsZwnNvTIxEl0z9K3vx5KF0Y")
        };
        assert_eq!(validate_hash(json!("77QmUPtjPfzWtF2AnpK9RQ")), Ok(()));
        assert_eq!(validate_hash(json!(null)), Ok(()));
        for bad in [json!("77QmUPtjPfzWtF2AnpK9RR"), json!(""), json!(7)] {
            assert_eq!(validate_hash(bad), Err(InvalidProviderToken::AccessTokenHash));
        }
    }

    #[test]
    fn microsofts_keys_of_one_tenant_do_not_sign_for_another_tenant() {
        let [tenant, other_tenant] = ["72f988bf-86f1-41af-91ab-2d7cd011db47", "9188040d-6c67-4c5b-b112-36a304b66dad"];
        let iss = |tenant: &str| format!("https://login.microsoftonline.com/{tenant}/v2.0");
        let issuers = AcceptedIssuers::MicrosoftTenants { template: iss("{tenantid}"), allows_consumers: true };
        let settings = test_settings("microsoft", json!({ "tenant": "common" }));
        let client = test_client(&settings).unwrap();
        let verify_with_issuer = |key_issuer: Value| {
            let mut signer = es256_signer();
            signer.jwk["issuer"] = key_issuer;
            let token = signer.sign(&claims(json!({ "iss": iss(tenant), "tid": tenant })));
            let keys = key_set(&[&signer]);
            IdToken::verify(&token, &keys, &[Algorithm::ES256], &issuers, &client, FLOW, NOW)
                .map(|token| token.authority)
                .map_err(|error| error == InvalidProviderToken::UnknownKey)
        };
        assert_eq!(verify_with_issuer(json!(iss("{tenantid}"))), Ok(iss(tenant)));
        assert_eq!(verify_with_issuer(json!(iss(tenant))), Ok(iss(tenant)));
        assert_eq!(verify_with_issuer(json!(iss(other_tenant))), Err(true));
    }
}
