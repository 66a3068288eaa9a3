//! ID tokens (OpenID Connect Core 1.0, 2), and hints: ID tokens that a client sends in `id_token_hint`.

use aws_lc_rs::digest::{SHA256, digest};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::Validation;
use latchkey_crds::types::GroupName;
use serde::{Deserialize, Serialize};

use super::{
    ACR,
    claims::UserClaims,
    claims_request::ClaimSet,
    client::OpenIdClient,
    client_session::{ClientGrant, ClientSession},
};
use crate::domain::{app::App, clock::Env, error::CommonError, keys::ID_TOKEN_TYP, session::SessionId, user::UserId};

/// The maximum length of an `id_token_hint`, in bytes. With 500 groups, an ID token has about 90 KiB, but a URL has at
/// most 32 KiB.
const MAX_HINT_BYTES: usize = 32 * 1024;

/// The claims of an ID token (specification: OpenID provider, ID tokens).
#[derive(Serialize)]
struct IdTokenClaims<'a> {
    iss: &'a str,
    aud: &'a str,
    sub: UserId,
    iat: i64,
    exp: i64,
    auth_time: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    nonce: Option<&'a str>,
    acr: &'static str,
    amr: [&'static str; 1],
    at_hash: String,
    /// The browser session.
    sid: SessionId,
    #[serde(flatten)]
    user: UserClaims<'a>,
}

/// No key for the algorithm of the client is Active yet, so the client must try again later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no key for the ID tokens of the client is active yet")]
pub struct NoIdTokenKey;

/// Why no ID token was issued.
#[derive(Debug, thiserror::Error)]
pub enum IdTokenError {
    #[error(transparent)]
    NoKey(#[from] NoIdTokenKey),
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// The verified content of an `id_token_hint`. The signature, the issuer and the type are checked, but not the expiry,
/// because a hint is often old.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint {
    pub sub: UserId,
    /// The browser session in which the token was issued.
    pub sid: SessionId,
    /// The client to which the token was issued. The App may no longer have it.
    pub client_id: String,
}

/// Why an `id_token_hint` is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HintError {
    /// It is not an ID token of this App.
    #[error("id_token_hint is not an ID token of this App")]
    Invalid,
    /// The hint cannot be verified: its key was dropped, or has not reached this server yet.
    #[error("id_token_hint was signed with a key that this server does not have")]
    UnknownKey,
}

/// The claims that are read from an `id_token_hint`.
#[derive(Deserialize)]
struct HintClaims {
    sub: UserId,
    sid: SessionId,
    aud: String,
}

/// The claims about the user in the ID tokens of a client.
pub fn id_token_claims(client: &OpenIdClient, grant: &ClientGrant) -> ClaimSet {
    ClaimSet::released(grant.scopes, client.scopes, grant.claims.id_token)
}

/// Whether ID tokens of the client can be signed now.
pub fn has_key(app: &App, client: &OpenIdClient) -> bool {
    app.keys.id_token_signer(client.id_token_algorithm).is_some()
}

/// Issues an ID token together with an access token. `nonce` is the nonce of the authorization request. It is `None` at
/// a refresh (OpenID Connect Core 1.0, 12.2).
pub fn issue_id_token(
    app: &App,
    env: &Env,
    client: &OpenIdClient,
    session: &ClientSession,
    access_token: &str,
    nonce: Option<&str>,
    groups: &[GroupName],
) -> Result<String, IdTokenError> {
    let signer = app.keys.id_token_signer(client.id_token_algorithm).ok_or(NoIdTokenKey)?;
    let granted = id_token_claims(client, &session.grant);
    let now = env.now().unix_timestamp();
    let claims = IdTokenClaims {
        iss: app.doc.issuer.as_str(),
        aud: client.client_id.as_str(),
        sub: session.session.user,
        iat: now,
        exp: now + i64::from(client.id_token_lifetime_seconds),
        auth_time: session.session.auth_time.unix_timestamp(),
        nonce,
        acr: ACR,
        amr: [session.session.amr.as_str()],
        at_hash: access_token_hash(access_token),
        sid: session.grant.browser_session,
        user: UserClaims::new(client, &session.profile, groups, granted),
    };
    signer.sign_id_token(&claims).map_err(|error| IdTokenError::Common(error.into()))
}

/// The left half of the SHA-256 of the access token (OpenID Connect Core 1.0, 3.1.3.6). SHA-256 is the hash function of
/// both RS256 and ES256.
fn access_token_hash(access_token: &str) -> String {
    let hash = digest(&SHA256, access_token.as_bytes());
    URL_SAFE_NO_PAD.encode(&hash.as_ref()[..hash.as_ref().len() / 2])
}

/// Checks the signature, type and issuer of an `id_token_hint`.
pub fn verify_hint(app: &App, text: &str) -> Result<Hint, HintError> {
    if text.len() > MAX_HINT_BYTES {
        return Err(HintError::Invalid);
    }
    let header = jsonwebtoken::decode_header(text).map_err(|_| HintError::Invalid)?;
    let is_id_token = header.typ.as_deref().is_some_and(|typ| typ.eq_ignore_ascii_case(ID_TOKEN_TYP));
    let key_id = header.kid.as_deref().filter(|_| is_id_token).ok_or(HintError::Invalid)?;
    let key = app.keys.id_token_signer_by_id(key_id).ok_or(HintError::UnknownKey)?;
    if header.alg != key.algorithm {
        return Err(HintError::Invalid);
    }
    let mut validation = Validation::new(key.algorithm);
    validation.set_issuer(&[app.doc.issuer.as_str()]);
    validation.set_required_spec_claims(&["iss", "aud", "sub"]);
    validation.validate_aud = false;
    validation.validate_exp = false;
    let decoded = jsonwebtoken::decode::<HintClaims>(text, &key.decoding, &validation);
    let HintClaims { sub, sid, aud } = decoded.map_err(|_| HintError::Invalid)?.claims;
    Ok(Hint { sub, sid, client_id: aud })
}
