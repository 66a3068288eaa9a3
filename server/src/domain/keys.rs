//! The keys of an App, ready for use: signing keys for access tokens and ID tokens, and HMAC keys for codes, refresh
//! tokens, flows and pages.

use std::fmt;

use aws_lc_rs::{
    aead::{AES_256_GCM_SIV, LessSafeKey, UnboundKey},
    error::{KeyRejected, Unspecified},
    hkdf::{HKDF_SHA256, Salt},
    hmac,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, RSA_PKCS1_SHA256, RsaKeyPair},
};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use jsonwebtoken::{
    Algorithm, DecodingKey, EncodingKey, Header,
    errors::ErrorKind,
    jwk::{Jwk, JwkSet, KeyAlgorithm, PublicKeyUse},
};
use latchkey_crds::{
    client::IdTokenAlgorithm,
    rendered::{KeyState, RenderedApp, SigningAlgorithm},
    types::AppId,
};
use serde::Serialize;
use zeroize::Zeroizing;

/// `typ` in the header of access tokens (RFC 9068, 2.1).
pub const ACCESS_TOKEN_TYP: &str = "at+jwt";
/// `typ` in the header of ID tokens.
pub const ID_TOKEN_TYP: &str = "JWT";
/// Bytes reserved for the signature of an access token: the length of an elliptic-curve signature. An RSA signature is
/// longer and costs another allocation.
const SIGNATURE_CAPACITY: usize = 64;
/// Bytes reserved for the claims of an access token.
const CLAIMS_CAPACITY: usize = 512;

/// The keys of an App.
pub struct AppKeys {
    signing: Vec<TokenSigner>,
    /// The keys for algorithms that access tokens do not use. They sign only ID tokens.
    id_tokens: Vec<IdTokenKey>,
    hmac: Vec<DerivedHmacKeys>,
    active_signing: usize,
    active_hmac: usize,
}

/// A signing key with the header of the tokens that it signs.
pub struct TokenSigner {
    /// `kid` of the tokens that the key signs.
    pub id: String,
    pub algorithm: Algorithm,
    pub decoding: DecodingKey,
    pub jwk: Jwk,
    /// The header of access tokens, in base64url.
    header: String,
    pair: KeyPair,
}

/// A key that signs only ID tokens.
struct IdTokenKey {
    signer: TokenSigner,
    state: KeyState,
}

/// A private key. It is parsed only once, because parsing and checking a key takes as long as signing a token.
enum KeyPair {
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
    Rsa(RsaKeyPair),
}

/// A token could not be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    #[error("the claims cannot be serialized as JSON")]
    Claims(#[from] serde_json::Error),
    #[error("the key cannot sign")]
    Key(#[from] Unspecified),
}

/// The keys that are derived from one HMAC key of the App, one for each purpose (RFC 5869).
pub struct DerivedHmacKeys {
    /// The number in the id of the HMAC key: 7 for `h7`.
    pub number: u32,
    pub codes: hmac::Key,
    pub refresh: hmac::Key,
    /// The key that seals the flows of social logins. GCM-SIV (RFC 8452) allows many random nonces with one key.
    pub flows: LessSafeKey,
    pub pages: PageKeys,
    /// The bytes of the key that authenticates the refresh tokens of clients. Use [`DerivedHmacKeys::client_refresh`].
    client_refresh: Secret,
}

/// The keys of an App's pages. Each key is stored as 32 bytes and prepared for each use. A prepared key needs hundreds
/// of bytes, and every App has these keys, even an App without pages.
pub struct PageKeys {
    session_cookies: Secret,
    sealed: Secret,
    csrf: Secret,
}

type Secret = Zeroizing<[u8; 32]>;

/// Why the keys of a document cannot be used. The text can contain the id of a key, but never the key itself.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("key {id} is not usable for {algorithm:?}")]
    Signing {
        id: String,
        algorithm: Algorithm,
        #[source]
        source: jsonwebtoken::errors::Error,
    },
    #[error("key {id} is not 32 bytes in base64, or its id is not of the form h1")]
    Hmac { id: String },
    #[error("there is not exactly one active {0} key")]
    WrongActiveCount(&'static str),
}

// === impl AppKeys ===

impl AppKeys {
    pub fn new(doc: &RenderedApp) -> Result<Self, KeyError> {
        let signing = doc.keys.signing.iter().map(token_signer).collect::<Result<Vec<_>, _>>()?;
        let id_tokens = doc.keys.id_tokens.iter().map(|key| {
            let signer = token_signer(key)?;
            Ok::<_, KeyError>(IdTokenKey { signer, state: key.state })
        });
        let id_tokens = id_tokens.collect::<Result<Vec<_>, _>>()?;
        let hmac = doc.keys.hmac.iter().map(derive_hmac_keys).collect::<Result<Vec<_>, _>>()?;
        let active_signing = single_active_index(doc.keys.signing.iter().map(|key| key.state))
            .ok_or(KeyError::WrongActiveCount("signing"))?;
        let active_hmac =
            single_active_index(doc.keys.hmac.iter().map(|key| key.state)).ok_or(KeyError::WrongActiveCount("HMAC"))?;
        Ok(Self { signing, id_tokens, hmac, active_signing, active_hmac })
    }

    /// Returns the key that signs new tokens.
    pub fn signer(&self) -> &TokenSigner {
        &self.signing[self.active_signing]
    }

    pub fn signer_by_id(&self, id: &str) -> Option<&TokenSigner> {
        self.signing.iter().find(|key| key.id == id)
    }

    /// Returns the key that signs new ID tokens with this algorithm. `None` until all servers know the first key for
    /// the algorithm.
    pub fn id_token_signer(&self, algorithm: IdTokenAlgorithm) -> Option<&TokenSigner> {
        let algorithm = match algorithm {
            IdTokenAlgorithm::RS256 => Algorithm::RS256,
            IdTokenAlgorithm::ES256 => Algorithm::ES256,
        };
        let active = self.id_tokens.iter().filter(|key| key.state == KeyState::Active).map(|key| &key.signer);
        std::iter::once(self.signer()).chain(active).find(|signer| signer.algorithm == algorithm)
    }

    /// Returns the key with this id, in any state, for the verification of an ID token.
    pub fn id_token_signer_by_id(&self, id: &str) -> Option<&TokenSigner> {
        self.all_signers().find(|key| key.id == id)
    }

    fn all_signers(&self) -> impl Iterator<Item = &TokenSigner> {
        self.signing.iter().chain(self.id_tokens.iter().map(|key| &key.signer))
    }

    /// Returns the active HMAC keys: for new codes, refresh tokens and flows, and for the values of pages that are
    /// sealed or have a MAC (cookies, `csrf`).
    pub fn active_hmac(&self) -> &DerivedHmacKeys {
        &self.hmac[self.active_hmac]
    }

    pub fn hmac_by_number(&self, number: u32) -> Option<&DerivedHmacKeys> {
        self.hmac.iter().find(|key| key.number == number)
    }

    /// Returns every HMAC key that the App still has, the active key first.
    pub fn all_hmac(&self) -> impl Iterator<Item = &DerivedHmacKeys> {
        let others = self.hmac.iter().enumerate().filter(|(index, _)| *index != self.active_hmac).map(|(_, key)| key);
        std::iter::once(self.active_hmac()).chain(others)
    }

    /// Returns all public keys, including retired keys and keys that are published in advance (RFC 7517).
    pub fn jwks(&self) -> JwkSet {
        JwkSet { keys: self.all_signers().map(|key| key.jwk.clone()).collect() }
    }
}

// === impl DerivedHmacKeys ===

impl DerivedHmacKeys {
    /// The key that authenticates the refresh tokens of clients. The App's own refresh tokens have another key, so a
    /// token of one kind is never valid as a token of the other kind.
    pub fn client_refresh(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.client_refresh[..])
    }
}

// === impl PageKeys ===

impl PageKeys {
    /// The key that authenticates the cookies of browser sessions.
    pub fn session_cookies(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.session_cookies[..])
    }

    /// The key for sealing state in the cookies, forms and URLs of pages (`domain/pages/seal.rs`).
    pub fn sealed(&self) -> LessSafeKey {
        let key = UnboundKey::new(&AES_256_GCM_SIV, &self.sealed[..]).expect("a key of AES-256 has 32 bytes");
        LessSafeKey::new(key)
    }

    /// The key that authenticates the field `csrf` of forms.
    pub fn csrf(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.csrf[..])
    }
}

/// The HMAC over the appID, a newline and `body`. An appID contains no newline, so the first newline always ends the
/// appID.
pub(super) fn mac_for_app(key: &hmac::Key, app: &AppId, body: &[u8]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    context.update(app.as_str().as_bytes());
    context.update(b"\n");
    context.update(body);
    context.sign()
}

// === impl TokenSigner ===

impl TokenSigner {
    /// Signs an access token with these claims (RFC 7515, 7.1; RFC 9068).
    pub fn sign_access_token(&self, claims: &impl Serialize) -> Result<String, SignError> {
        self.sign(&self.header, claims)
    }

    /// Signs an ID token with these claims (OpenID Connect Core 1.0, 2).
    pub fn sign_id_token(&self, claims: &impl Serialize) -> Result<String, SignError> {
        self.sign(&encoded_header(ID_TOKEN_TYP, &self.id, self.algorithm)?, claims)
    }

    fn sign(&self, header: &str, claims: &impl Serialize) -> Result<String, SignError> {
        let mut claims_json = Vec::with_capacity(CLAIMS_CAPACITY);
        serde_json::to_writer(&mut claims_json, claims)?;
        let mut token = String::with_capacity(header.len() + 2 + (claims_json.len() + SIGNATURE_CAPACITY) * 4 / 3);
        token.push_str(header);
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(claims_json, &mut token);
        let signature = self.pair.sign(token.as_bytes())?;
        token.push('.');
        URL_SAFE_NO_PAD.encode_string(signature, &mut token);
        Ok(token)
    }
}

/// The header of a token, in base64url.
fn encoded_header(typ: &str, key_id: &str, algorithm: Algorithm) -> Result<String, serde_json::Error> {
    let header = Header { typ: Some(typ.to_owned()), kid: Some(key_id.to_owned()), ..Header::new(algorithm) };
    Ok(URL_SAFE_NO_PAD.encode(serde_json::to_vec(&header)?))
}

// === impl KeyPair ===

impl KeyPair {
    /// Parses the DER that `jsonwebtoken` extracts from PEM.
    fn from_der(algorithm: SigningAlgorithm, der: &[u8]) -> Result<Self, KeyRejected> {
        Ok(match algorithm {
            SigningAlgorithm::ES256 => Self::Ec(EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der)?),
            SigningAlgorithm::EdDSA => Self::Ed(Ed25519KeyPair::from_pkcs8(der)?),
            SigningAlgorithm::RS256 => Self::Rsa(RsaKeyPair::from_der(der)?),
        })
    }

    /// Signs the message. Returns the signature in the format of JWS (RFC 7518, 3).
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Unspecified> {
        match self {
            Self::Ec(pair) => Ok(pair.sign(&SystemRandom::new(), message)?.as_ref().to_vec()),
            Self::Ed(pair) => Ok(pair.sign(message).as_ref().to_vec()),
            Self::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature)?;
                Ok(signature)
            }
        }
    }
}

impl fmt::Debug for AppKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys")
            .field("signing", &self.signing.len())
            .field("id_tokens", &self.id_tokens.len())
            .field("hmac", &self.hmac.len())
            .finish_non_exhaustive()
    }
}

fn single_active_index(states: impl Iterator<Item = KeyState>) -> Option<usize> {
    let mut active = states.enumerate().filter(|(_, state)| *state == KeyState::Active).map(|(index, _)| index);
    let first = active.next()?;
    active.next().is_none().then_some(first)
}

fn token_signer(key: &latchkey_crds::rendered::SigningKey) -> Result<TokenSigner, KeyError> {
    let pem = key.private_key.expose().as_bytes();
    let (algorithm, jwk_algorithm, encoding) = match key.algorithm {
        SigningAlgorithm::ES256 => (Algorithm::ES256, KeyAlgorithm::ES256, EncodingKey::from_ec_pem(pem)),
        SigningAlgorithm::EdDSA => (Algorithm::EdDSA, KeyAlgorithm::EdDSA, EncodingKey::from_ed_pem(pem)),
        SigningAlgorithm::RS256 => (Algorithm::RS256, KeyAlgorithm::RS256, EncodingKey::from_rsa_pem(pem)),
    };
    let build = || {
        let encoding = encoding?;
        let mut jwk = Jwk::from_encoding_key(&encoding, algorithm)?;
        jwk.common.key_id = Some(key.id.clone());
        jwk.common.key_algorithm = Some(jwk_algorithm);
        jwk.common.public_key_use = Some(PublicKeyUse::Signature);
        let decoding = DecodingKey::from_jwk(&jwk)?;
        let header = encoded_header(ACCESS_TOKEN_TYP, &key.id, algorithm)?;
        let pair = KeyPair::from_der(key.algorithm, encoding.as_bytes()).map_err(|_| ErrorKind::InvalidKeyFormat)?;
        Ok(TokenSigner { id: key.id.clone(), algorithm, decoding, jwk, header, pair })
    };
    build().map_err(|source| KeyError::Signing { id: key.id.clone(), algorithm, source })
}

fn derive_hmac_keys(key: &latchkey_crds::rendered::HmacKey) -> Result<DerivedHmacKeys, KeyError> {
    let invalid_key = || KeyError::Hmac { id: key.id.clone() };
    let number = key.id.strip_prefix('h').and_then(|number| number.parse().ok()).ok_or_else(invalid_key)?;
    let secret = STANDARD.decode(key.secret.expose()).map_err(|_| invalid_key())?;
    if secret.len() != 32 {
        return Err(invalid_key());
    }
    let root = Salt::new(HKDF_SHA256, b"latchkey").extract(&secret);
    let derive =
        |label: &'static [u8]| root.expand(&[label], hmac::HMAC_SHA256).map(hmac::Key::from).map_err(|_| invalid_key());
    let derive_secret = |label: &'static [u8]| {
        let mut secret = Secret::new([0; 32]);
        let filled = root.expand(&[label], HKDF_SHA256).and_then(|okm| okm.fill(&mut secret[..]));
        filled.map(|()| secret).map_err(|_| invalid_key())
    };
    let flows = root.expand(&[b"social flows"], &AES_256_GCM_SIV).map(UnboundKey::from).map_err(|_| invalid_key())?;
    Ok(DerivedHmacKeys {
        number,
        codes: derive(b"codes")?,
        refresh: derive(b"refresh tokens")?,
        flows: LessSafeKey::new(flows),
        pages: PageKeys {
            session_cookies: derive_secret(b"browser sessions")?,
            sealed: derive_secret(b"sealed page state")?,
            csrf: derive_secret(b"page forms")?,
        },
        client_refresh: derive_secret(b"client refresh tokens")?,
    })
}
