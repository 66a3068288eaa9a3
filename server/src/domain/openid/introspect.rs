//! Introspection of the tokens of clients (RFC 7662).

use super::{
    claims_request::{ClaimSet, UserClaim},
    client::OpenIdClient,
    client_session::{ClientSession, SessionUse, find_client_session},
    scope::Scopes,
};
use crate::domain::{
    call::Call,
    ports::ClientSessions,
    sessions::IntrospectError,
    token::{AccessClaims, CLIENT_REFRESH_PREFIX, RefreshToken, RefreshTokenError, verify_any_access_token},
};

/// A valid client token that no newer token has replaced, with its live session and its client.
#[derive(Clone, Debug)]
pub struct ActiveClientToken<'a> {
    pub client: &'a OpenIdClient,
    pub session: ClientSession,
    pub kind: ClientTokenKind,
    /// Those scopes of the token that the client still has.
    pub scopes: Scopes,
}

#[derive(Clone, Debug)]
pub enum ClientTokenKind {
    Access(AccessClaims),
    Refresh,
}

/// For introspection by ServiceAccounts. Returns the access token of a client only if forward auth also admits it,
/// because a service that checks only `active` must not accept tokens for other services.
pub async fn introspect_admitted<'a, S: ClientSessions>(
    call: Call<'a, S>,
    token: &str,
) -> Result<Option<ActiveClientToken<'a>>, IntrospectError> {
    let claims = verify_any_access_token(call.app, call.env.now(), token);
    match claims.filter(|claims| claims.is_of_client(call.app) && claims.is_admitted(call.app)) {
        Some(claims) => active_access_token(call, claims).await,
        None => Ok(None),
    }
}

/// Returns the access token or refresh token if it is active and belongs to this client, which has authenticated.
pub async fn introspect_own<'a, S: ClientSessions>(
    call: Call<'a, S>,
    client: &OpenIdClient,
    token: &str,
) -> Result<Option<ActiveClientToken<'a>>, IntrospectError> {
    let found = if token.starts_with(CLIENT_REFRESH_PREFIX) {
        active_refresh_token(call, client, token).await?
    } else {
        let claims = verify_any_access_token(call.app, call.env.now(), token);
        match claims.filter(|claims| claims.client_id == client.client_id.as_str()) {
            Some(claims) => active_access_token(call, claims).await?,
            None => None,
        }
    };
    Ok(found.filter(|found| found.client.uid == client.uid))
}

async fn active_access_token<'a, S: ClientSessions>(
    call: Call<'a, S>,
    claims: AccessClaims,
) -> Result<Option<ActiveClientToken<'a>>, IntrospectError> {
    let found = find_client_session(call, claims.sub, claims.sid, SessionUse::Counted).await?;
    let found = found.filter(|(client, _)| client.client_id.as_str() == claims.client_id);
    Ok(found.map(|(client, session)| {
        let scopes = claims.scope.intersection(client.scopes);
        ActiveClientToken { client, session, kind: ClientTokenKind::Access(claims), scopes }
    }))
}

async fn active_refresh_token<'a, S: ClientSessions>(
    call: Call<'a, S>,
    client: &OpenIdClient,
    token: &str,
) -> Result<Option<ActiveClientToken<'a>>, IntrospectError> {
    let token = match RefreshToken::decode_for_client(call.app, token) {
        Ok(token) => token,
        Err(RefreshTokenError::Invalid) => return Ok(None),
        Err(RefreshTokenError::UnknownKey) => return Err(IntrospectError::UnknownKey),
    };
    // A replaced token is not active, just like a replaced token of the App itself.
    let is_active = |(found, session): &(&OpenIdClient, ClientSession)| {
        found.uid == client.uid && token.generation >= session.session.generation
    };
    let found = find_client_session(call, token.user, token.session, SessionUse::NotCounted).await?;
    if !found.as_ref().is_some_and(is_active) {
        return Ok(None);
    }
    // Only this second read counts as a use, so that no other client and no replaced token extends the session.
    let found = find_client_session(call, token.user, token.session, SessionUse::Counted).await?.filter(is_active);
    Ok(found.map(|(client, session)| {
        let scopes = session.grant.scopes.intersection(client.scopes);
        ActiveClientToken { client, session, kind: ClientTokenKind::Refresh, scopes }
    }))
}

// === impl ActiveClientToken ===

impl ActiveClientToken<'_> {
    /// The claims about the user for the scopes of the token, without groups, because the access token has no groups
    /// either.
    pub fn claims(&self) -> ClaimSet {
        ClaimSet::released(self.scopes, self.client.scopes, ClaimSet::NONE).without(UserClaim::Groups)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use latchkey_crds::types::AppId;
    use parking_lot::Mutex;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::{
        domain::{
            client::ClientInfo,
            clock::Env,
            openid::{
                claims_request::RequestedClaims,
                client_session::{ClientGrant, ListedClientSession, NewClientSession},
            },
            ports::StoreError,
            session::{Amr, OpenOutcome, Profile, RefreshOutcome, RefreshRules, Session, SessionId},
            user::{Epoch, UserId},
        },
        fixtures,
    };

    const USER: UserId = UserId(Uuid::from_u128(7));
    const SESSION: SessionId = SessionId(Uuid::from_u128(9));

    /// One session of the client `grafana`, and how often a read counted as a use.
    #[derive(Default)]
    struct FakeSessions {
        uses: Mutex<u32>,
    }

    impl ClientSessions for FakeSessions {
        async fn open_client_session(&self, _: &AppId, _: &NewClientSession) -> Result<OpenOutcome, StoreError> {
            unreachable!("introspection opens nothing")
        }

        async fn client_session(
            &self,
            _: &AppId,
            user: UserId,
            id: SessionId,
            counts: SessionUse,
        ) -> Result<Option<ClientSession>, StoreError> {
            if counts == SessionUse::Counted {
                *self.uses.lock() += 1;
            }
            Ok(Some(ClientSession {
                session: Session {
                    id,
                    user,
                    epoch: Epoch(1),
                    generation: 2,
                    amr: Amr::Password,
                    auth_time: OffsetDateTime::UNIX_EPOCH,
                },
                profile: Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() },
                grant: ClientGrant {
                    client_uid: "uid-grafana".to_owned(),
                    client_id: "grafana".to_owned(),
                    scopes: Scopes::parse_known("openid"),
                    claims: RequestedClaims::default(),
                    browser_session: SessionId(Uuid::from_u128(5)),
                    ends_with_browser: true,
                },
            }))
        }

        async fn refresh_client_session(
            &self,
            _: &AppId,
            _: &RefreshToken,
            _: &ClientGrant,
            _: &RefreshRules,
        ) -> Result<RefreshOutcome, StoreError> {
            unreachable!("introspection refreshes nothing")
        }

        async fn client_sessions(&self, _: &AppId, _: UserId) -> Result<Vec<ListedClientSession>, StoreError> {
            unreachable!("introspection lists nothing")
        }

        async fn end_client_sessions(&self, _: &AppId, _: UserId, _: &str) -> Result<Vec<SessionId>, StoreError> {
            unreachable!("introspection ends nothing")
        }
    }

    #[test]
    fn only_the_clients_own_current_refresh_token_is_active_and_counts_as_a_use() {
        let app = fixtures::provider(["grafana", "other"].map(fixtures::client).into());
        let (stores, env) = (FakeSessions::default(), Env::system());
        let info = ClientInfo { ip: [192, 0, 2, 1].into(), user_agent: None };
        let call = Call { stores: &stores, env: &env, app: &app, client: &info };
        let is_active = |client: &str, generation| {
            let token = RefreshToken { user: USER, session: SESSION, generation }.encode_for_client(&app);
            let found = introspect_own(call, app.client(client).unwrap(), &token).now_or_never().unwrap();
            found.unwrap().is_some()
        };
        assert!(!is_active("other", 2));
        assert!(!is_active("grafana", 1), "replaced");
        assert_eq!(*stores.uses.lock(), 0);
        assert!(is_active("grafana", 2));
        assert_eq!(*stores.uses.lock(), 1);
    }
}
