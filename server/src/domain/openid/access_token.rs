//! Access tokens of clients (RFC 9068), signed with the App's own key.

use serde::Serialize;
use uuid::Uuid;

use super::{
    ACR,
    claims::UserClaims,
    claims_request::{ClaimSet, UserClaim},
    client::OpenIdClient,
    client_session::ClientSession,
    scope::Scopes,
};
use crate::domain::{app::App, clock::Env, keys::SignError, session::SessionId, token, user::UserId};

/// An access token and its lifetime.
#[derive(Clone)]
pub struct ClientAccessToken {
    pub text: String,
    /// The lifetime in seconds.
    pub expires_in: i64,
    /// Unix seconds.
    pub expires_at: i64,
}

/// The claims of the token (specification: OpenID provider, Access tokens).
#[derive(Serialize)]
struct ClientAccessClaims<'a> {
    iss: &'a str,
    aud: Vec<&'a str>,
    sub: UserId,
    client_id: &'a str,
    scope: Scopes,
    iat: i64,
    exp: i64,
    jti: Uuid,
    /// The client session.
    sid: SessionId,
    acr: &'static str,
    auth_time: i64,
    amr: [&'static str; 1],
    #[serde(flatten)]
    user: UserClaims<'a>,
}

/// Issues an access token with these scopes. The token never contains groups, because services other than the client
/// also read it.
pub fn issue_access_token(
    app: &App,
    env: &Env,
    client: &OpenIdClient,
    session: &ClientSession,
    scope: Scopes,
) -> Result<ClientAccessToken, SignError> {
    let now = env.now().unix_timestamp();
    let expires_in = token::jittered_lifetime(app.doc.tokens.access_lifetime_seconds, env);
    let granted = ClaimSet::released(scope, client.scopes, ClaimSet::NONE).without(UserClaim::Groups);
    let mut audiences = vec![app.doc.issuer.as_str()];
    audiences.extend(client.audiences.iter().map(String::as_str));
    let claims = ClientAccessClaims {
        iss: app.doc.issuer.as_str(),
        aud: audiences,
        sub: session.session.user,
        client_id: client.client_id.as_str(),
        scope,
        iat: now,
        exp: now + expires_in,
        jti: env.new_uuid(),
        sid: session.session.id,
        acr: ACR,
        auth_time: session.session.auth_time.unix_timestamp(),
        amr: [session.session.amr.as_str()],
        user: UserClaims::new(client, &session.profile, &[], granted),
    };
    let text = app.keys.signer().sign_access_token(&claims)?;
    Ok(ClientAccessToken { text, expires_in, expires_at: now + expires_in })
}
