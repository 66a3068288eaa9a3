//! Refreshes the tokens of a client. The generations of refresh tokens work as in the App's own sessions
//! (specification: Sessions and tokens, Refresh).

use latchkey_crds::{client::ClientScope, rendered::LimitName};
use tracing::warn;

use super::{
    claims::needed_groups,
    client::OpenIdClient,
    client_session::{ClientSession, SessionUse},
    id_token::{IdTokenError, NoIdTokenKey, id_token_claims},
    scope::Scopes,
    tokens::{ClientTokens, issue_client_tokens},
};
use crate::domain::{
    audit::{Detail, EventKind},
    call::Call,
    error::CommonError,
    ports::{AuditLog, ClientSessions, Groups, Sessions},
    rate_limits::RateLimited,
    session::{LiveSession, RefreshKind, RefreshOutcome, RefreshRules},
    token::{RefreshToken, RefreshTokenError},
};

#[derive(Debug, thiserror::Error)]
pub enum ClientRefreshError {
    /// The token is unknown, expired, revoked or reused, or belongs to another client, or the user can no longer sign
    /// in at the client. The error does not say which.
    #[error("the refresh token is not valid")]
    InvalidGrant,
    /// The client requested a scope that the session does not have.
    #[error("the requested scope is not a part of the granted scope")]
    InvalidScope,
    /// A server with a newer key made the token. The token may be valid, so the client must try again.
    #[error("the refresh token was made with a newer key than this server has")]
    UnknownKey,
    #[error(transparent)]
    IdToken(#[from] IdTokenError),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ClientRefreshError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

impl From<RefreshTokenError> for ClientRefreshError {
    fn from(error: RefreshTokenError) -> Self {
        match error {
            RefreshTokenError::Invalid => Self::InvalidGrant,
            RefreshTokenError::UnknownKey => Self::UnknownKey,
        }
    }
}

/// Refreshes the tokens of a client, which has authenticated or is public. `scope` narrows the access token; the next
/// refresh can have the full scope again (RFC 6749, 6). A refusal changes nothing, except that a reused token ends the
/// session.
pub async fn refresh_client<S: ClientSessions + Sessions + Groups + AuditLog>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    token: &str,
    scope: Option<&str>,
) -> Result<ClientTokens, ClientRefreshError> {
    let token = RefreshToken::decode_for_client(call.app, token)?;
    // Everything that can refuse the request is checked before the token is used up.
    let found = call.stores.client_session(call.app_id(), token.user, token.session, SessionUse::NotCounted).await?;
    let mut session =
        found.filter(|found| *found.grant.client_uid == *client.uid).ok_or(ClientRefreshError::InvalidGrant)?;
    session.grant.scopes = remaining_scopes(client, session.grant.scopes).ok_or(ClientRefreshError::InvalidGrant)?;
    let narrowed = match scope {
        None => session.grant.scopes,
        Some(scope) => narrowed_scopes(session.grant.scopes, scope).ok_or(ClientRefreshError::InvalidScope)?,
    };
    let groups = needed_groups(call, client, token.user, id_token_claims(client, &session.grant)).await?;
    if !client.allows(&groups) {
        return Err(ClientRefreshError::InvalidGrant);
    }
    if call.app.keys.id_token_signer(client.id_token_algorithm).is_none() {
        return Err(IdTokenError::NoKey(NoIdTokenKey).into());
    }
    let LiveSession { session: renewed, profile } = renew(call, client, &token, &session).await?;
    let session = ClientSession { session: renewed, profile, ..session };
    Ok(issue_client_tokens(call.app, call.env, client, &session, narrowed, None, &groups)?)
}

/// Those granted scopes that the client still has. `None` if `openid` or `offline_access` was granted and the client
/// has lost it.
pub(super) fn remaining_scopes(client: &OpenIdClient, granted: Scopes) -> Option<Scopes> {
    let remaining = granted.intersection(client.scopes);
    let is_kept = |scope| !granted.contains(scope) || remaining.contains(scope);
    (is_kept(ClientScope::OpenId) && is_kept(ClientScope::OfflineAccess)).then_some(remaining)
}

/// The requested scopes. `None` if one of them was not granted, or if no scope is requested. A request can leave out
/// `openid` and `offline_access`: the session keeps them.
fn narrowed_scopes(granted: Scopes, requested: &str) -> Option<Scopes> {
    let is_granted = |name: &str| {
        let scope = Scopes::parse_known(name);
        !scope.is_empty() && scope.is_subset_of(granted)
    };
    let mut names = requested.split(' ').filter(|name| !name.is_empty());
    names.all(is_granted).then(|| Scopes::parse_known(requested)).filter(|scopes| !scopes.is_empty())
}

/// Uses up the token. Returns the session with its new generation.
async fn renew<S: ClientSessions + Sessions + AuditLog>(
    call: Call<'_, S>,
    client: &OpenIdClient,
    token: &RefreshToken,
    session: &ClientSession,
) -> Result<LiveSession, ClientRefreshError> {
    let rules = RefreshRules {
        grace_seconds: call.app.doc.tokens.refresh_grace_seconds,
        windows: call.app.windows(LimitName::RefreshesPerSession),
    };
    let event = |kind| {
        let event = call.event(kind, token.user).in_session(token.session);
        event.with_detail(Detail::from_client(&client.client_id))
    };
    match call.stores.refresh_client_session(call.app_id(), token, &session.grant, &rules).await? {
        RefreshOutcome::Renewed(renewal, live) => {
            match renewal {
                RefreshKind::Rotated | RefreshKind::Repeated => {}
                RefreshKind::Late => {
                    warn!(
                        app = %call.app_id(),
                        session = %token.session,
                        "a refresh token of a client was used after its grace period; the response with the next \
                         token was lost, or two programs use the token"
                    );
                    call.stores.record_later(call.app_id(), event(EventKind::RefreshLate));
                }
                RefreshKind::Adopted => {
                    warn!(
                        app = %call.app_id(),
                        session = %token.session,
                        "Redis lost data: a newer refresh token of a client was adopted"
                    );
                }
            }
            Ok(live)
        }
        RefreshOutcome::Limited { window, retry_after } => {
            Err(RateLimited { limit: LimitName::RefreshesPerSession.into(), window, retry_after }.into())
        }
        RefreshOutcome::ReuseDetected => {
            warn!(
                app = %call.app_id(),
                session = %token.session,
                "a replaced refresh token of a client was used; the session was ended"
            );
            call.stores.record_later(call.app_id(), event(EventKind::RefreshStolen));
            // The session has already ended. This call waits for a replica to acknowledge the end, so that a failover
            // does not restore the session. The future is boxed because it is large and rarely needed.
            if let Err(error) = Box::pin(call.stores.end_session(call.app_id(), token.user, token.session)).await {
                warn!(
                    app = %call.app_id(),
                    error = &error as &dyn std::error::Error,
                    "the end of a session was not replicated; a failover can restore it"
                );
            }
            Err(ClientRefreshError::InvalidGrant)
        }
        RefreshOutcome::NotFound => Err(ClientRefreshError::InvalidGrant),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn scopes_can_be_narrowed_but_not_widened() {
        let granted = Scopes::parse_known("openid profile offline_access");
        let narrowed = |requested: &str| narrowed_scopes(granted, requested).map(|scopes| scopes.to_string());
        assert_eq!(narrowed("openid").as_deref(), Some("openid"));
        assert_eq!(narrowed("profile openid").as_deref(), Some("openid profile"));
        assert_eq!(narrowed("openid profile offline_access").as_deref(), Some("openid profile offline_access"));
        for beyond in ["email", "openid email", "openid roles", " ", "OPENID"] {
            assert_eq!(narrowed(beyond), None, "{beyond}");
        }
    }

    #[test]
    fn lost_scopes_are_removed_and_none_remain_if_openid_or_offline_access_is_lost() {
        let client_with = |scopes: &[ClientScope]| {
            let client =
                latchkey_crds::rendered::RenderedClient { scopes: scopes.to_vec(), ..fixtures::client("grafana") };
            fixtures::provider(vec![client])
        };
        let granted = Scopes::parse_known("openid profile offline_access");
        let remaining = |scopes: &[ClientScope]| {
            let app = client_with(scopes);
            remaining_scopes(app.client("grafana").unwrap(), granted).map(|scopes| scopes.to_string())
        };
        use ClientScope::{Email, OfflineAccess, OpenId, Profile};
        assert_eq!(remaining(&[OpenId, OfflineAccess, Email]).as_deref(), Some("openid offline_access"));
        assert_eq!(remaining(&[OpenId, Profile]), None);
        assert_eq!(remaining(&[Profile, OfflineAccess]), None);
    }
}
