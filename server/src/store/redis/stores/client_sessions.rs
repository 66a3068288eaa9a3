//! Client sessions in Redis. Their keys differ from those of other sessions, because older servers must not mistake
//! client sessions for sessions of the App.

use latchkey_crds::types::AppId;
use redis::Value;

use super::{
    super::{metrics::Operation, scripts::script_command},
    sessions::{
        ClientSessionRow, MAX_SESSIONS, USER_TTL_MILLIS, UserKeys, parse_client_row, parse_session, to_millis,
        truncated_user_agent,
    },
};
use crate::{
    domain::{
        openid::{
            claims_request::{ClaimSet, RequestedClaims},
            client_session::{ClientGrant, ClientSession, ListedClientSession, NewClientSession, SessionUse},
            scope::Scopes,
        },
        ports::{ClientSessions, StoreError},
        session::{OpenOutcome, RefreshOutcome, RefreshRules, SessionId, SessionInfo},
        token::RefreshToken,
        user::UserId,
    },
    store::stores::Stores,
};

/// The maximum number of sessions with refresh tokens that one user can have with one client (specification: OpenID
/// provider, Client sessions).
const MAX_SESSIONS_OF_CLIENT: u32 = 20;

fn flag(value: bool) -> String {
    if value { "1" } else { "" }.to_owned()
}

/// Formats the claims that the client requested for the ID token and for *userinfo*, as one field of the session.
/// Nothing else of `claims` is stored.
fn claims_field(claims: &RequestedClaims) -> String {
    format!("{} {}", claims.id_token.bits(), claims.userinfo.bits())
}

fn parse_claims(text: &str) -> Option<RequestedClaims> {
    let (id_token, userinfo) = text.split_once(' ')?;
    let claim_set = |bits: &str| bits.parse().ok().map(ClaimSet::from_bits);
    Some(RequestedClaims {
        id_token: claim_set(id_token)?,
        userinfo: claim_set(userinfo)?,
        ..RequestedClaims::default()
    })
}

/// Parses the lines that get_client_session.lua returns.
fn parse_client_session(user: UserId, id: SessionId, lines: &str) -> Option<ClientSession> {
    let lines: Vec<&str> = lines.splitn(7, '\n').collect();
    let [client_uid, client_id, scopes, claims, browser_session, bound, session] = lines[..] else { return None };
    let live = parse_session(user, id, session)?;
    let grant = ClientGrant {
        client_uid: client_uid.to_owned(),
        client_id: client_id.to_owned(),
        scopes: Scopes::parse_known(scopes),
        claims: parse_claims(claims)?,
        browser_session: browser_session.parse().ok()?,
        ends_with_browser: bound == "1",
    };
    Some(ClientSession { session: live.session, profile: live.profile, grant })
}

impl ClientSessions for Stores {
    async fn open_client_session(&self, app: &AppId, session: &NewClientSession) -> Result<OpenOutcome, StoreError> {
        let keys = UserKeys::new(app, session.user).for_client_session(session.id);
        let grant = &session.grant;
        let fields = [
            ("amr", session.amr.as_str().to_owned()),
            ("auth_time", to_millis(session.auth_time)),
            ("client_id", grant.client_id.clone()),
            ("scopes", grant.scopes.to_string()),
            ("claims", claims_field(&grant.claims)),
            ("browser", grant.browser_session.to_string()),
            ("bound", flag(grant.ends_with_browser)),
            ("ip", session.ip.clone()),
            ("user_agent", truncated_user_agent(session.user_agent.as_deref().unwrap_or("")).to_owned()),
        ];
        let mut arguments = vec![
            self.redis.offset_millis(),
            session.epoch.0.to_string(),
            session.id.to_string(),
            to_millis(session.ends_at),
            (u64::from(session.idle_seconds) * 1000).to_string(),
            USER_TTL_MILLIS.to_string(),
            session.opened().generation.to_string(),
            MAX_SESSIONS.to_string(),
            MAX_SESSIONS_OF_CLIENT.to_string(),
            grant.client_uid.clone(),
            flag(session.has_refresh_token),
        ];
        arguments.extend(fields.into_iter().flat_map(|(name, value)| [name.to_owned(), value]));
        let command = script_command(&self.redis.scripts().open_client_session, &keys, &arguments);
        // The replica's acknowledgement is ignored: if a failover loses the session, the user logs in again.
        let (opened, _) = self.redis.send_replicated(Operation::OpenClientSession, command).await?;
        match opened {
            Value::Int(1) => Ok(OpenOutcome::Opened),
            Value::Int(0) => Ok(OpenOutcome::EpochRaised),
            _ => Err(self.redis.unexpected_value()),
        }
    }

    async fn client_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
        counts: SessionUse,
    ) -> Result<Option<ClientSession>, StoreError> {
        let user_keys = UserKeys::new(app, user);
        let [user_key, client_index, client_session] = user_keys.for_client_session(session);
        let keys = [user_key, client_index, client_session, user_keys.index];
        let arguments = [
            self.redis.offset_millis(),
            session.to_string(),
            user_keys.session_prefix,
            flag(counts == SessionUse::Counted),
        ];
        let command = script_command(&self.redis.scripts().get_client_session, &keys, &arguments);
        let value = self.redis.send_one(Operation::GetClientSession, command).await?;
        let lines: Option<String> = self.redis.parse(value)?;
        let parse = |lines: String| parse_client_session(user, session, &lines);
        lines.map(|lines| parse(lines).ok_or_else(|| self.redis.unexpected_value())).transpose()
    }

    async fn refresh_client_session(
        &self,
        app: &AppId,
        token: &RefreshToken,
        grant: &ClientGrant,
        rules: &RefreshRules,
    ) -> Result<RefreshOutcome, StoreError> {
        let user_keys = UserKeys::new(app, token.user);
        let mut keys = user_keys.for_client_session(token.session).to_vec();
        if grant.ends_with_browser {
            let [_, index, browser_session] = user_keys.for_session(grant.browser_session);
            keys.extend([index, browser_session]);
        }
        self.redis.refresh(Operation::RefreshClientSession, &keys, token, rules).await
    }

    async fn client_sessions(&self, app: &AppId, user: UserId) -> Result<Vec<ListedClientSession>, StoreError> {
        let keys = UserKeys::new(app, user);
        let arguments = [self.redis.offset_millis(), keys.session_prefix];
        let keys = [keys.user, keys.client_index];
        let command = script_command(&self.redis.scripts().list_client_sessions, &keys, &arguments);
        let value = self.redis.send_one(Operation::ListClientSessions, command).await?;
        let rows: Vec<Vec<String>> = self.redis.parse(value)?;
        let listed = |row: &Vec<String>| {
            let ClientSessionRow { info, client_uid, scopes } = parse_client_row(row)?;
            let SessionInfo { id, created_at, last_used_at, client_id, .. } = info;
            Some(ListedClientSession { id, client_uid, client_id: client_id?, scopes, created_at, last_used_at })
        };
        rows.iter().map(|row| listed(row).ok_or_else(|| self.redis.unexpected_value())).collect()
    }

    async fn end_client_sessions(
        &self,
        app: &AppId,
        user: UserId,
        client_uid: &str,
    ) -> Result<Vec<SessionId>, StoreError> {
        let keys = [UserKeys::new(app, user).client_index];
        let command = script_command(&self.redis.scripts().end_client_sessions, &keys, &[client_uid.to_owned()]);
        let (ended, _) = self.redis.send_replicated(Operation::EndClientSessions, command).await?;
        let ended: Vec<String> = self.redis.parse(ended)?;
        ended.iter().map(|id| id.parse().map_err(|_| self.redis.unexpected_value())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::openid::claims_request::UserClaim;

    #[test]
    fn stored_claims_are_read_back() {
        let claims = RequestedClaims {
            id_token: ClaimSet::NONE.with(UserClaim::Email),
            userinfo: ClaimSet::NONE.with(UserClaim::Name).with(UserClaim::Groups),
            ..RequestedClaims::default()
        };
        assert_eq!(parse_claims(&claims_field(&claims)), Some(claims));
        for bad in ["", "1", "1 x", "1 256", "-1 0", "1 2 3"] {
            assert_eq!(parse_claims(bad), None, "{bad}");
        }
    }
}
