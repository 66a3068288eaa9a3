//! Exchanges an authorization code for tokens (specification: OpenID provider, Token endpoint).

use futures::future::try_join;
use latchkey_crds::client::ClientScope;
use time::{Duration, OffsetDateTime};
use tracing::warn;

use super::{
    claims::needed_groups,
    client::OpenIdClient,
    client_session::{ClientGrant, ClientSession, NewClientSession},
    code::{Authorization, ClientCode, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode},
    id_token::{IdTokenError, id_token_claims},
    refresh::remaining_scopes,
    tokens::{ClientTokens, issue_client_tokens},
};
use crate::domain::{
    audit::{Detail, EventKind},
    call::Call,
    error::CommonError,
    flow::CodeChallenge,
    ports::{AuditLog, ClientCodes, ClientSessions, Groups, Sessions},
    session::{OpenOutcome, SessionId},
    user::UserId,
};

/// A code, and the values that prove that the client can exchange it.
pub struct ClientExchange<'a> {
    pub code: &'a str,
    /// Must be equal to the `redirect_uri` of the authorization request.
    pub redirect_uri: &'a str,
    /// The PKCE verifier (RFC 7636).
    pub code_verifier: Option<&'a str>,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientExchangeError {
    /// The code is unknown, expired or used, belongs to another client, or one of its conditions is not met. The error
    /// does not say which.
    #[error("the code is not valid")]
    InvalidGrant,
    #[error(transparent)]
    IdToken(#[from] IdTokenError),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ClientExchangeError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Exchanges a code of this client, which has authenticated or is public. A refusal does not use up the code. A second
/// exchange is also refused, and ends the session of the first one (RFC 6749, 4.1.2).
pub async fn exchange_client_code<S: ClientCodes + ClientSessions + Sessions + Groups + AuditLog>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    exchange: ClientExchange<'_>,
) -> Result<ClientTokens, ClientExchangeError> {
    let key = ClientCode::parse(exchange.code).ok_or(ClientExchangeError::InvalidGrant)?.key();
    let found = call.stores.find_client_code(call.app_id(), &key).await?.ok_or(ClientExchangeError::InvalidGrant)?;
    let exchanged = match &found {
        StoredClientCode::New(record) => ExchangedCode::from(&record.authorization),
        StoredClientCode::Exchanged(exchanged, _) => exchanged.clone(),
    };
    let is_own = *exchanged.client_uid == *client.uid;
    if !is_own || !verifier_matches(exchanged.code_challenge.as_ref(), exchange.code_verifier) {
        return Err(ClientExchangeError::InvalidGrant);
    }
    let record = match found {
        StoredClientCode::New(record) => *record,
        StoredClientCode::Exchanged(_, first) => {
            end_first_session(call, client, exchanged.user, first).await?;
            return Err(ClientExchangeError::InvalidGrant);
        }
    };
    let ClientCodeRecord { authorization, ip, user_agent, expires_at } = record;
    let is_in_time = call.env.now().unix_timestamp() < expires_at;
    if !is_in_time || authorization.redirect_uri != exchange.redirect_uri {
        return Err(ClientExchangeError::InvalidGrant);
    }
    let (new, tokens) = prepare_session(call, client, authorization, ip, user_agent).await?;
    // The session is opened before the exchange is recorded, so that a second exchange finds a session that it can end.
    match call.stores.open_client_session(call.app_id(), &new).await? {
        OpenOutcome::Opened => {}
        OpenOutcome::EpochRaised => return Err(ClientExchangeError::InvalidGrant),
    }
    match call.stores.redeem_client_code(call.app_id(), &key, &exchanged, new.id).await {
        Ok(Redemption::First) => Ok(tokens),
        Ok(Redemption::Again(first)) => {
            let first_end = end_first_session(call, client, new.user, first).await;
            end_unused_session(call, new.user, new.id).await;
            first_end?;
            Err(ClientExchangeError::InvalidGrant)
        }
        Ok(Redemption::Unknown) => {
            end_unused_session(call, new.user, new.id).await;
            Err(ClientExchangeError::InvalidGrant)
        }
        Err(error) => {
            end_unused_session(call, new.user, new.id).await;
            Err(error.into())
        }
    }
}

/// Whether the verifier matches the challenge. A challenge without a verifier is refused, and so is a verifier without
/// a challenge (RFC 9700, 4.8.2).
fn verifier_matches(challenge: Option<&CodeChallenge>, verifier: Option<&str>) -> bool {
    match (challenge, verifier) {
        (None, None) => true,
        (Some(challenge), Some(verifier)) => challenge.is_satisfied_by(verifier),
        (None, Some(_)) | (Some(_), None) => false,
    }
}

/// Checks the conditions that can change between the login and the exchange. Also signs the tokens, so that no session
/// is opened if the signing fails.
async fn prepare_session<S: Sessions + Groups>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    authorization: Authorization,
    ip: String,
    user_agent: Option<String>,
) -> Result<(NewClientSession, ClientTokens), ClientExchangeError> {
    let Authorization { user, browser_session, epoch, amr, nonce, .. } = authorization;
    let auth_time =
        OffsetDateTime::from_unix_timestamp(authorization.auth_time).map_err(|_| ClientExchangeError::InvalidGrant)?;
    let is_offline = authorization.scopes.contains(ClientScope::OfflineAccess);
    // The client can have lost a scope since the login.
    let scopes = remaining_scopes(client, authorization.scopes).filter(|scopes| scopes.contains(ClientScope::OpenId));
    let grant = ClientGrant {
        client_uid: authorization.client_uid,
        client_id: authorization.client_id,
        scopes: scopes.ok_or(ClientExchangeError::InvalidGrant)?,
        claims: authorization.claims,
        browser_session,
        ends_with_browser: !is_offline,
    };
    let (live, groups) = try_join(
        call.stores.browser_session(call.app_id(), user, browser_session, None),
        needed_groups(call, client, user, id_token_claims(client, &grant)),
    )
    .await?;
    // A change to the account, for example a new password, can keep the browser session and raise its epoch. The code
    // has the earlier epoch, so it is no longer valid.
    let live = live.filter(|live| live.session.epoch == epoch).ok_or(ClientExchangeError::InvalidGrant)?;
    if !client.allows(&groups) {
        return Err(ClientExchangeError::InvalidGrant);
    }
    let tokens = &call.app.doc.tokens;
    let has_refresh_token = is_offline || client.is_public();
    let mut new = NewClientSession {
        id: SessionId(call.env.new_uuid()),
        user,
        epoch,
        grant,
        amr,
        auth_time,
        ip,
        user_agent,
        ends_at: call.env.now() + Duration::seconds(i64::from(tokens.session_lifetime_seconds)),
        idle_seconds: tokens.refresh_idle_seconds,
        has_refresh_token,
    };
    let session = ClientSession { session: new.opened(), profile: live.profile, grant: new.grant.clone() };
    let scope = new.grant.scopes;
    let issued = issue_client_tokens(call.app, call.env, client, &session, scope, nonce.as_deref(), &groups)?;
    if !has_refresh_token {
        // Without a refresh token, only the access token uses the session, so the session ends when that token expires.
        let lifetime = u32::try_from(issued.expires_in).unwrap_or(u32::MAX);
        new.idle_seconds = lifetime;
        new.ends_at = call.env.now() + Duration::seconds(i64::from(lifetime));
    }
    Ok((new, issued))
}

/// Ends the session of the first exchange, because the client exchanged its code again: two parties may have the code.
async fn end_first_session<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    user: UserId,
    session: SessionId,
) -> Result<(), CommonError> {
    if call.stores.end_session(call.app_id(), user, session).await? {
        warn!(
            app = %call.app_id(),
            client = %client.client_id,
            "an authorization code was exchanged twice; the session of the first exchange was ended"
        );
        let event = call.event(EventKind::ClientCodeReused, user).in_session(session);
        let detail = Detail { ended: Some(session), ..Detail::from_client(&client.client_id) };
        call.stores.record_later(call.app_id(), event.with_detail(detail));
    }
    Ok(())
}

/// Ends a session that was opened for a failed exchange. No client got its tokens.
async fn end_unused_session<S: Sessions>(call: Call<'_, S>, user: UserId, session: SessionId) {
    if let Err(error) = call.stores.end_session(call.app_id(), user, session).await {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "the session of a failed exchange was not ended"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verifier_and_a_challenge_are_accepted_only_together() {
        let verifier = "v".repeat(43);
        let challenge = CodeChallenge::of(&verifier);
        assert!(verifier_matches(None, None));
        assert!(verifier_matches(Some(&challenge), Some(&verifier)));
        assert!(!verifier_matches(Some(&challenge), None), "PKCE cannot be left out at the exchange");
        assert!(!verifier_matches(None, Some(&verifier)), "PKCE cannot be left out at the authorization request");
        for wrong in ["", "v", &"w".repeat(43), &"v".repeat(44), challenge.as_str()] {
            assert!(!verifier_matches(Some(&challenge), Some(wrong)), "{wrong}");
        }
    }
}
