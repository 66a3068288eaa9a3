//! Tokens: access tokens as JWTs (RFC 9068), and refresh tokens that carry an HMAC. `domain/openid/access_token.rs`
//! issues the access tokens of clients.

use aws_lc_rs::hmac;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::Validation;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    app::App,
    clock::Env,
    keys::{ACCESS_TOKEN_TYP, DerivedHmacKeys, SignError, mac_for_app},
    openid::scope::Scopes,
    session::{NO_REFRESH_TOKEN, Profile, Session, SessionId},
    user::UserId,
};

/// The prefix of refresh tokens. Secret scanners recognize leaked tokens by it.
pub const REFRESH_PREFIX: &str = "lkr_";
/// The prefix of the refresh tokens of clients.
pub const CLIENT_REFRESH_PREFIX: &str = "lkrc_";
/// Length of the truncated HMAC-SHA-256 in bytes (specification: Sessions and tokens, Refresh tokens).
const MAC_BYTES: usize = 16;
/// Total length of the key number, user id, session id and generation, in bytes.
const BODY_BYTES: usize = 4 + 16 + 16 + 8;

/// The claims that the server reads from an access token.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct AccessClaims {
    pub sub: UserId,
    pub sid: SessionId,
    pub exp: i64,
    pub iat: i64,
    pub auth_time: i64,
    pub jti: Uuid,
    pub aud: Audiences,
    /// The appID, or the client to which the token was issued.
    pub client_id: String,
    /// Only in the token of a client.
    #[serde(default)]
    pub scope: Scopes,
}

/// One audience is a string, several are a list (RFC 7519, 4.1.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Audiences {
    One(String),
    Several(Vec<String>),
}

/// The claims that the server writes into an access token (specification: Sessions and tokens, Access tokens).
#[derive(Serialize)]
struct IssuedClaims<'a> {
    iss: &'a str,
    aud: AudienceRef<'a>,
    sub: UserId,
    client_id: &'a str,
    iat: i64,
    exp: i64,
    jti: Uuid,
    sid: SessionId,
    #[serde(skip_serializing_if = "Option::is_none")]
    email: Option<&'a str>,
    email_verified: bool,
    name: &'a str,
    auth_time: i64,
    amr: [&'static str; 1],
}

/// Like [`Audiences`], but with borrowed strings.
#[derive(Serialize)]
#[serde(untagged)]
enum AudienceRef<'a> {
    One(&'a str),
    Several(&'a [String]),
}

/// The kind of a refresh token: for a session of the App, or for a session of a client. The prefix and the key of the
/// HMAC differ, so a token of one kind is never valid as a token of the other kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RefreshTokenKind {
    App,
    Client,
}

/// What an application gets for a session.
#[derive(Clone)]
pub struct Tokens {
    pub access_token: String,
    pub refresh_token: String,
    pub session_id: SessionId,
    /// The lifetime of the access token in seconds.
    pub expires_in: i64,
    /// The time at which the access token expires, in Unix seconds.
    pub expires_at: i64,
}

/// The content of a refresh token with a valid HMAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefreshToken {
    pub user: UserId,
    pub session: SessionId,
    pub generation: u64,
}

/// Why a refresh token cannot be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefreshTokenError {
    #[error("is not a refresh token of this App")]
    Invalid,
    /// The key of the token is newer than the keys of this server: the client must try again after a short time.
    #[error("was made with a newer key than this server has")]
    UnknownKey,
}

/// Issues the tokens of a session for its current generation.
pub fn issue_tokens(app: &App, env: &Env, profile: &Profile, session: &Session) -> Result<Tokens, SignError> {
    let now = env.now().unix_timestamp();
    let expires_in = jittered_lifetime(app.doc.tokens.access_lifetime_seconds, env);
    let audiences = &app.doc.tokens.audiences;
    let claims = IssuedClaims {
        iss: app.doc.issuer.as_str(),
        aud: match audiences.as_slice() {
            [] => AudienceRef::One(app.id().as_str()),
            [one] => AudienceRef::One(one),
            several => AudienceRef::Several(several),
        },
        sub: session.user,
        client_id: app.id().as_str(),
        iat: now,
        exp: now + expires_in,
        jti: env.new_uuid(),
        sid: session.id,
        email: profile.verified_email(),
        email_verified: profile.email_verified,
        name: &profile.name,
        auth_time: session.auth_time.unix_timestamp(),
        amr: [session.amr.as_str()],
    };
    Ok(Tokens {
        access_token: app.keys.signer().sign_access_token(&claims)?,
        refresh_token: RefreshToken::for_session(session).encode(app),
        session_id: session.id,
        expires_in,
        expires_at: now + expires_in,
    })
}

/// Subtracts up to 5 % at random from a lifetime, so that many clients do not refresh at the same time.
pub(super) fn jittered_lifetime(seconds: u32, env: &Env) -> i64 {
    let max_jitter = seconds / 20;
    let jitter = u32::from_be_bytes(env.random_bytes()) % (max_jitter + 1);
    i64::from(seconds - jitter)
}

/// Parses an access token that this App issued for itself, and checks signature, type, issuer, audience and expiry.
/// Returns `None` if a check fails, and for the token of a client.
pub fn verify_access_token(app: &App, now: OffsetDateTime, token: &str) -> Option<AccessClaims> {
    verify_any_access_token(app, now, token).filter(|claims| !claims.is_of_client(app))
}

/// Like [`verify_access_token`], but also accepts the tokens of clients. Does not check whether the App still has the
/// client.
pub fn verify_any_access_token(app: &App, now: OffsetDateTime, token: &str) -> Option<AccessClaims> {
    let header = jsonwebtoken::decode_header(token).ok()?;
    let key = app.keys.signer_by_id(header.kid.as_deref()?)?;
    if header.alg != key.algorithm || !header.typ.is_some_and(|typ| typ.eq_ignore_ascii_case(ACCESS_TOKEN_TYP)) {
        return None;
    }
    let mut validation = Validation::new(key.algorithm);
    validation.set_issuer(&[app.doc.issuer.as_str()]);
    validation.set_required_spec_claims(&["iss", "aud", "sub", "exp"]);
    // The audience and the expiry are checked below: the accepted audience depends on whether the token is of a client,
    // and the expiry is compared with `now`, not with the clock of the machine.
    validation.validate_aud = false;
    validation.validate_exp = false;
    let claims = jsonwebtoken::decode::<AccessClaims>(token, &key.decoding, &validation).ok()?.claims;
    let has_audience =
        if claims.is_of_client(app) { claims.aud.contains(app.doc.issuer.as_str()) } else { claims.is_for_app(app) };
    (has_audience && now.unix_timestamp() < claims.exp).then_some(claims)
}

// === impl AccessClaims ===

impl AccessClaims {
    /// Whether the token was issued to a client, and not to the App itself.
    pub fn is_of_client(&self, app: &App) -> bool {
        self.client_id != app.id().as_str()
    }

    /// Whether forward auth admits the token: it has an audience of the App. The token of a client always has the
    /// issuer as an audience, so that the client can call *userinfo*. In such a token, the issuer does not count, even
    /// if it is an audience of the App.
    pub fn is_admitted(&self, app: &App) -> bool {
        let issuer = app.doc.issuer.as_str();
        !self.is_of_client(app) || self.has_audience_of(app, |audience| audience != issuer)
    }

    fn is_for_app(&self, app: &App) -> bool {
        self.has_audience_of(app, |_| true)
    }

    fn has_audience_of(&self, app: &App, counts: impl Fn(&str) -> bool) -> bool {
        match app.doc.tokens.audiences.as_slice() {
            [] => self.aud.contains(app.id().as_str()),
            audiences => audiences.iter().any(|audience| counts(audience) && self.aud.contains(audience)),
        }
    }
}

// === impl Audiences ===

impl Audiences {
    pub fn contains(&self, audience: &str) -> bool {
        match self {
            Self::One(one) => one == audience,
            Self::Several(several) => several.iter().any(|one| one == audience),
        }
    }
}

// === impl RefreshTokenKind ===

impl RefreshTokenKind {
    const fn prefix(self) -> &'static str {
        match self {
            Self::App => REFRESH_PREFIX,
            Self::Client => CLIENT_REFRESH_PREFIX,
        }
    }

    fn mac(self, key: &DerivedHmacKeys, app: &App, body: &[u8]) -> hmac::Tag {
        match self {
            Self::App => mac_for_app(&key.refresh, app.id(), body),
            Self::Client => mac_for_app(&key.client_refresh(), app.id(), body),
        }
    }
}

// === impl RefreshToken ===

impl RefreshToken {
    pub fn for_session(session: &Session) -> Self {
        Self { user: session.user, session: session.id, generation: session.generation }
    }

    /// Encodes the token as text. The same content and key always give the same text.
    pub fn encode(&self, app: &App) -> String {
        self.encode_as(RefreshTokenKind::App, app)
    }

    /// Like [`Self::encode`], for the session of a client.
    pub fn encode_for_client(&self, app: &App) -> String {
        self.encode_as(RefreshTokenKind::Client, app)
    }

    fn encode_as(&self, kind: RefreshTokenKind, app: &App) -> String {
        let key = app.keys.active_hmac();
        let body = self.body(key.number);
        let mut bytes = body.to_vec();
        bytes.extend_from_slice(&kind.mac(key, app, &body).as_ref()[..MAC_BYTES]);
        format!("{}{}", kind.prefix(), URL_SAFE_NO_PAD.encode(bytes))
    }

    /// Parses a token of this App and checks its HMAC. Does not look up the session.
    pub fn decode(app: &App, text: &str) -> Result<Self, RefreshTokenError> {
        Self::decode_as(RefreshTokenKind::App, app, text)
    }

    /// Like [`Self::decode`], for the token of a client.
    pub fn decode_for_client(app: &App, text: &str) -> Result<Self, RefreshTokenError> {
        Self::decode_as(RefreshTokenKind::Client, app, text)
    }

    fn decode_as(kind: RefreshTokenKind, app: &App, text: &str) -> Result<Self, RefreshTokenError> {
        let encoded = text.strip_prefix(kind.prefix()).ok_or(RefreshTokenError::Invalid)?;
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| RefreshTokenError::Invalid)?;
        let bytes: [u8; BODY_BYTES + MAC_BYTES] = bytes.try_into().map_err(|_| RefreshTokenError::Invalid)?;
        let (body, tag) = bytes.split_at(BODY_BYTES);
        let uuid_at = |from: usize| <[u8; 16]>::try_from(&body[from..from + 16]).map(Uuid::from_bytes);
        let number = u32::from_be_bytes(body[..4].try_into().map_err(|_| RefreshTokenError::Invalid)?);
        let Some(key) = app.keys.hmac_by_number(number) else {
            let newest = app.keys.all_hmac().map(|key| key.number).max().unwrap_or(0);
            return Err(if number > newest { RefreshTokenError::UnknownKey } else { RefreshTokenError::Invalid });
        };
        let expected = kind.mac(key, app, body);
        aws_lc_rs::constant_time::verify_slices_are_equal(&expected.as_ref()[..MAC_BYTES], tag)
            .map_err(|_| RefreshTokenError::Invalid)?;
        let generation = u64::from_be_bytes(body[36..].try_into().map_err(|_| RefreshTokenError::Invalid)?);
        // A session accepts the token of its own generation and, within limits, the token of the generation before.
        // Therefore no token can have the generation of a browser session or the generation before that.
        if generation >= NO_REFRESH_TOKEN - 1 {
            return Err(RefreshTokenError::Invalid);
        }
        Ok(Self {
            user: UserId(uuid_at(4).map_err(|_| RefreshTokenError::Invalid)?),
            session: SessionId(uuid_at(20).map_err(|_| RefreshTokenError::Invalid)?),
            generation,
        })
    }

    fn body(&self, key: u32) -> [u8; BODY_BYTES] {
        let mut body = [0; BODY_BYTES];
        body[..4].copy_from_slice(&key.to_be_bytes());
        body[4..20].copy_from_slice(self.user.0.as_bytes());
        body[20..36].copy_from_slice(self.session.0.as_bytes());
        body[36..].copy_from_slice(&self.generation.to_be_bytes());
        body
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header};
    use latchkey_crds::rendered::{KeyState, RenderedApp, SigningAlgorithm};
    use serde_json::Value;
    use time::macros::datetime;

    use super::*;
    use crate::{
        domain::{clock::Clock, session::Amr, user::Epoch},
        fixtures,
    };

    const NOW: OffsetDateTime = datetime!(2030-01-02 03:04:05 UTC);

    struct FixedClock(OffsetDateTime);

    impl Clock for FixedClock {
        fn now(&self) -> OffsetDateTime {
            self.0
        }
    }

    fn env() -> Env {
        Env { clock: Box::new(FixedClock(NOW)), ..Env::system() }
    }

    fn user() -> UserId {
        UserId(Uuid::from_u128(7))
    }

    fn profile(email_verified: bool) -> Profile {
        Profile { version: 1, email: Some("ada@example.com".to_owned()), email_verified, name: "Ada".to_owned() }
    }

    fn session() -> Session {
        let id = SessionId(Uuid::from_u128(9));
        Session { id, user: user(), epoch: Epoch(3), generation: 1, amr: Amr::Password, auth_time: NOW }
    }

    fn claims(token: &str) -> Value {
        let body = token.split('.').nth(1).unwrap();
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body).unwrap()).unwrap()
    }

    #[test]
    fn an_access_token_is_valid_until_it_expires_and_only_for_its_app() {
        for algorithm in [SigningAlgorithm::ES256, SigningAlgorithm::EdDSA, SigningAlgorithm::RS256] {
            let mut doc = fixtures::rendered("shop");
            doc.keys.signing = vec![fixtures::signing_key("s4", algorithm, KeyState::Active)];
            let app = fixtures::app(doc);
            let tokens = issue_tokens(&app, &env(), &profile(true), &session()).unwrap();
            let header = jsonwebtoken::decode_header(&tokens.access_token).unwrap();
            assert_eq!((header.typ.as_deref(), header.kid.as_deref()), (Some("at+jwt"), Some("s4")));

            let verified = verify_access_token(&app, NOW, &tokens.access_token).unwrap();
            assert_eq!((verified.sub, verified.sid), (user(), session().id));
            let expiry = NOW + time::Duration::seconds(tokens.expires_in);
            assert!(verify_access_token(&app, expiry - time::Duration::SECOND, &tokens.access_token).is_some());
            assert!(verify_access_token(&app, expiry, &tokens.access_token).is_none());
            let other_app = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
            assert!(
                verify_access_token(&other_app, NOW, &tokens.access_token).is_none(),
                "another issuer and audience"
            );
            let with_other_keys = fixtures::app(fixtures::rendered("shop"));
            assert!(verify_access_token(&with_other_keys, NOW, &tokens.access_token).is_none(), "other keys");
        }
    }

    #[test]
    fn an_access_token_contains_the_specified_claims() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let tokens = issue_tokens(&app, &env(), &profile(true), &session()).unwrap();
        let claims = claims(&tokens.access_token);
        assert_eq!(claims["iss"], "https://auth.example.com/shop");
        assert_eq!(claims["aud"], "shop");
        assert_eq!(claims["client_id"], "shop");
        assert_eq!(claims["sub"], user().to_string());
        assert_eq!(claims["sid"], session().id.to_string());
        assert_eq!(claims["iat"], NOW.unix_timestamp());
        assert_eq!(claims["exp"], tokens.expires_at);
        assert_eq!(claims["email"], "ada@example.com");
        assert_eq!(claims["email_verified"], true);
        assert_eq!(claims["name"], "Ada");
        assert_eq!(claims["auth_time"], NOW.unix_timestamp());
        assert_eq!(claims["amr"], serde_json::json!(["pwd"]));
        assert!((855..=900).contains(&tokens.expires_in), "up to 5 % off");
    }

    #[test]
    fn an_unverified_address_is_not_in_the_token() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let claims = claims(&issue_tokens(&app, &env(), &profile(false), &session()).unwrap().access_token);
        assert_eq!(claims.get("email"), None);
        assert_eq!(claims["email_verified"], false);
    }

    #[test]
    fn other_kinds_of_tokens_are_rejected() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let good = issue_tokens(&app, &env(), &profile(true), &session()).unwrap().access_token;
        let claims = claims(&good);
        let key = app.keys.signer();
        let typed =
            |typ: &str| Header { typ: Some(typ.to_owned()), kid: Some(key.id.clone()), ..Header::new(key.algorithm) };
        let pem = app.doc.keys.signing[0].private_key.expose();
        let private = EncodingKey::from_ec_pem(pem.as_bytes()).unwrap();
        let encode = |header: &Header| jsonwebtoken::encode(header, &claims, &private).unwrap();
        assert!(verify_access_token(&app, NOW, &encode(&typed("AT+JWT"))).is_some());
        assert!(verify_access_token(&app, NOW, &encode(&typed("JWT"))).is_none(), "an ID token is no access token");
        let without_kid = Header { kid: None, ..typed(ACCESS_TOKEN_TYP) };
        assert!(verify_access_token(&app, NOW, &encode(&without_kid)).is_none());
        let secret = EncodingKey::from_secret(app.id().as_str().as_bytes());
        let hmac = Header {
            typ: Some(ACCESS_TOKEN_TYP.to_owned()),
            kid: Some(key.id.clone()),
            ..Header::new(jsonwebtoken::Algorithm::HS256)
        };
        assert!(verify_access_token(&app, NOW, &jsonwebtoken::encode(&hmac, &claims, &secret).unwrap()).is_none());
        for bad in ["", "x", "a.b.c", &good[..good.len() - 2]] {
            assert!(verify_access_token(&app, NOW, bad).is_none());
        }
    }

    #[test]
    fn a_refresh_token_is_valid_only_for_its_app() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let token = RefreshToken::for_session(&session());
        let text = token.encode(&app);
        assert!(text.starts_with(REFRESH_PREFIX));
        assert_eq!(token.encode(&app), text, "the text depends only on content and key");
        assert_eq!(RefreshToken::decode(&app, &text), Ok(token));
        let other_app = fixtures::app(RenderedApp { keys: app.doc.keys.clone(), ..fixtures::rendered("other") });
        assert_eq!(RefreshToken::decode(&other_app, &text), Err(RefreshTokenError::Invalid));
        for at in 4..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(RefreshToken::decode(&app, std::str::from_utf8(&changed).unwrap()).is_err(), "character {at}");
        }
    }

    #[test]
    fn a_token_for_a_browser_session_is_no_refresh_token() {
        let app = fixtures::app(fixtures::rendered("shop"));
        for generation in [NO_REFRESH_TOKEN - 1, NO_REFRESH_TOKEN, NO_REFRESH_TOKEN + 1, u64::MAX] {
            let token = RefreshToken::for_session(&Session { generation, ..session() });
            assert_eq!(RefreshToken::decode(&app, &token.encode(&app)), Err(RefreshTokenError::Invalid));
        }
        let token = RefreshToken::for_session(&Session { generation: NO_REFRESH_TOKEN - 2, ..session() });
        assert_eq!(RefreshToken::decode(&app, &token.encode(&app)), Ok(token));
    }

    #[test]
    fn a_refresh_token_of_a_client_is_no_refresh_token_of_the_app() {
        let app = fixtures::app(fixtures::rendered("shop"));
        let token = RefreshToken::for_session(&session());
        let (own, of_client) = (token.encode(&app), token.encode_for_client(&app));
        assert!(of_client.starts_with(CLIENT_REFRESH_PREFIX));
        assert_eq!(RefreshToken::decode_for_client(&app, &of_client), Ok(token));
        let swapped = of_client.replace(CLIENT_REFRESH_PREFIX, REFRESH_PREFIX);
        for other in [of_client.as_str(), &swapped] {
            assert_eq!(RefreshToken::decode(&app, other), Err(RefreshTokenError::Invalid), "{other}");
        }
        let swapped = own.replace(REFRESH_PREFIX, CLIENT_REFRESH_PREFIX);
        for other in [own.as_str(), &swapped] {
            assert_eq!(RefreshToken::decode_for_client(&app, other), Err(RefreshTokenError::Invalid), "{other}");
        }
    }

    #[test]
    fn a_refresh_token_survives_a_rotation_and_a_newer_key_is_reported_as_unknown() {
        let old = fixtures::rendered("shop");
        let mut new = old.clone();
        new.keys.hmac =
            vec![fixtures::hmac_key("h1", 1, KeyState::Retired), fixtures::hmac_key("h2", 2, KeyState::Active)];
        let (old, new) = (fixtures::app(old), fixtures::app(new));
        let token = RefreshToken::for_session(&session());
        assert_eq!(RefreshToken::decode(&new, &token.encode(&old)), Ok(token));
        assert_eq!(RefreshToken::decode(&old, &token.encode(&new)), Err(RefreshTokenError::UnknownKey));
    }
}
