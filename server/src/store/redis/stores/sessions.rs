//! Sessions and epochs in Redis. Each session has a hash. Each user has an index of the sessions, and a hash with
//! epoch, profile and groups. All keys of a user are in one cluster slot.

use std::time::Duration;

use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};
use time::OffsetDateTime;

use super::{
    super::{handle::RedisStore, metrics::Operation, scripts::script_command},
    windows::{distinct_windows, window_arguments},
};
use crate::{
    domain::{
        mail::EpochChange,
        openid::scope::Scopes,
        ports::{Replication, Sessions, StoreError},
        session::{
            Amr, LiveSession, NO_REFRESH_TOKEN, NewSession, OpenOutcome, Profile, RefreshKind, RefreshOutcome,
            RefreshRules, Session, SessionId, SessionInfo, SessionKind,
        },
        token::RefreshToken,
        user::{Epoch, UserId},
    },
    store::stores::Stores,
};

/// The maximum number of sessions per user (specification: Sessions and tokens, Session list).
pub(super) const MAX_SESSIONS: u32 = 100;
/// The lifetime of a user's hash, which contains the epoch. It is longer than any session: an App can allow sessions of
/// 730 days.
pub(super) const USER_TTL_MILLIS: u64 = 800 * 24 * 60 * 60 * 1000;
/// The epoch that ends every session of a deleted user. It is higher than any other epoch: the largest integer that a
/// Lua number represents exactly.
const MAX_EPOCH: i64 = (1 << 53) - 1;
/// How long an unverified user cannot log in after the deletion of the user has begun. No request that has already read
/// the user lasts this long. If the deletion fails, the user can log in after this time. The time is short, because
/// anybody can create unverified accounts, and each of these users needs a key in Redis during this time.
const RETIRED_TTL_MILLIS: u64 = 5 * 60 * 1000;
/// Maximum number of late responses (responses to the previous refresh token after its grace period) that a session
/// gets in `LATE_WINDOW_MILLIS`. A further late token is treated as stolen (specification: Sessions and tokens, Reuse
/// detection).
const MAX_LATE_RESPONSES: u32 = 5;
const LATE_WINDOW_MILLIS: u32 = 24 * 60 * 60 * 1000;
/// By how much a late response raises the lateness of a session (a count that reveals stolen refresh tokens). Each new
/// generation lowers the lateness by one. docs/decisions/0026-late-refreshes.md derives this number and `MAX_LATENESS`.
const LATENESS_STEP: u32 = 2;
/// If a late response would raise the lateness above this maximum, the token is treated as stolen. If a user and a
/// thief take turns, each new generation needs a late response, so the fourteenth late token ends the session.
const MAX_LATENESS: u32 = 14;
/// The maximum length of a stored user agent, in bytes.
const MAX_USER_AGENT_BYTES: usize = 512;

/// The Redis keys of a user.
pub(super) struct UserKeys {
    /// The key of the hash with epoch, profile and groups.
    pub(super) user: String,
    /// The key of the index, which contains the ids of the user's sessions except client sessions.
    pub(super) index: String,
    /// The key prefix of a session; the session's id follows.
    pub(super) session_prefix: String,
    /// The key of the index of the user's client sessions that have a refresh token: `…:client-sessions`. The key of a
    /// client session is `…:client-session:ID`. Scripts (`client_prefix` in lib/client_sessions.lua) and
    /// `for_client_session` derive it from the key of the index.
    pub(super) client_index: String,
}

/// A row of the reply of list_client_sessions.lua.
pub(super) struct ClientSessionRow {
    pub(super) info: SessionInfo,
    pub(super) client_uid: String,
    pub(super) scopes: Scopes,
}

// === impl UserKeys ===

impl UserKeys {
    pub(super) fn new(app: &AppId, user: UserId) -> Self {
        let user = format!("lk:{{{app}:{user}}}");
        Self {
            user: format!("{user}:user"),
            index: format!("{user}:sessions"),
            session_prefix: format!("{user}:session:"),
            client_index: format!("{user}:client-sessions"),
        }
    }

    /// Returns the keys of user, index of client sessions and client session, in the order that scripts expect.
    pub(super) fn for_client_session(&self, session: SessionId) -> [String; 3] {
        let index = &self.client_index;
        let stem = index.strip_suffix('s').unwrap_or(index);
        [self.user.clone(), index.clone(), format!("{stem}:{session}")]
    }

    /// Returns the keys of user, index and session, in the order that scripts expect.
    pub(super) fn for_session(&self, session: SessionId) -> [String; 3] {
        [self.user.clone(), self.index.clone(), format!("{}{session}", self.session_prefix)]
    }
}

/// The key of the hash of a user: epoch, profile and groups.
pub(super) fn user_key(app: &AppId, user: UserId) -> String {
    UserKeys::new(app, user).user
}

pub(super) fn to_millis(time: OffsetDateTime) -> String {
    (time.unix_timestamp_nanos() / 1_000_000).to_string()
}

/// Cuts the user agent to at most `MAX_USER_AGENT_BYTES` bytes. Never cuts inside a character.
pub(super) fn truncated_user_agent(user_agent: &str) -> &str {
    let end = (0..=MAX_USER_AGENT_BYTES.min(user_agent.len())).rev().find(|end| user_agent.is_char_boundary(*end));
    &user_agent[..end.unwrap_or(0)]
}

fn parse_amr(text: &str) -> Option<Amr> {
    [Amr::Password, Amr::Code, Amr::Federated].into_iter().find(|amr| amr.as_str() == text)
}

/// Parses the kind of a session. Returns `None` for a session of the App, and for a kind that only newer servers know.
fn parse_kind(text: &str) -> Option<SessionKind> {
    [SessionKind::Browser].into_iter().find(|kind| kind.as_str() == text)
}

/// The fields of a session that depend on its kind, with their values.
fn kind_fields(kind: Option<SessionKind>) -> Vec<String> {
    match kind {
        None => Vec::new(),
        Some(kind @ SessionKind::Browser) => {
            // The command sets the field `n` (the generation) twice. This second value replaces the first one, which is
            // 1.
            let generation = NO_REFRESH_TOKEN.to_string();
            vec!["kind".to_owned(), kind.as_str().to_owned(), "n".to_owned(), generation]
        }
    }
}

fn from_millis(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(text.parse::<i128>().ok()? * 1_000_000).ok()
}

/// Parses the lines that `session_lines` of lib/session.lua returns.
pub(super) fn parse_session(user: UserId, id: SessionId, lines: &str) -> Option<LiveSession> {
    let lines: Vec<&str> = lines.splitn(8, '\n').collect();
    let [epoch, generation, amr, auth_time, version, email, verified, name] = lines[..] else { return None };
    let session = Session {
        id,
        user,
        epoch: Epoch(epoch.parse().ok()?),
        generation: generation.parse().ok()?,
        amr: parse_amr(amr)?,
        auth_time: from_millis(auth_time)?,
    };
    let profile = Profile {
        version: version.parse().ok()?,
        email: Some(email).filter(|email| !email.is_empty()).map(str::to_owned),
        email_verified: verified == "1",
        name: name.to_owned(),
    };
    Some(LiveSession { session, profile })
}

/// Parses a row of the reply of list_sessions.lua.
fn parse_session_info(row: &[String]) -> Option<SessionInfo> {
    let (common, rest) = row.split_first_chunk::<6>()?;
    let [kind] = rest else { return None };
    Some(SessionInfo { kind: parse_kind(kind), ..parse_common_columns(common)? })
}

/// Parses the first columns, which the rows of list_sessions.lua and list_client_sessions.lua have in common. The
/// caller adds the kind or the client.
fn parse_common_columns([id, created, used, ip, user_agent, amr]: &[String; 6]) -> Option<SessionInfo> {
    Some(SessionInfo {
        kind: None,
        id: id.parse().ok()?,
        created_at: from_millis(created)?,
        last_used_at: from_millis(used)?,
        ip: ip.clone(),
        user_agent: Some(user_agent.clone()).filter(|agent| !agent.is_empty()),
        amr: parse_amr(amr)?,
        client_id: None,
    })
}

/// Parses a row of the reply of list_client_sessions.lua.
pub(super) fn parse_client_row(row: &[String]) -> Option<ClientSessionRow> {
    let (common, rest) = row.split_first_chunk::<6>()?;
    let [client_uid, client_id, scopes] = rest else { return None };
    let info = SessionInfo { client_id: Some(client_id.clone()), ..parse_common_columns(common)? };
    Some(ClientSessionRow { info, client_uid: client_uid.clone(), scopes: Scopes::parse_known(scopes) })
}

/// Parses the reply of refresh.lua.
fn parse_refresh(token: &RefreshToken, windows: &[Window], reply: &str) -> Option<RefreshOutcome> {
    let (outcome, rest) = reply.split_once('\n').unwrap_or((reply, ""));
    let kind = match outcome {
        "rotated" => RefreshKind::Rotated,
        "repeated" => RefreshKind::Repeated,
        "late" => RefreshKind::Late,
        "adopted" => RefreshKind::Adopted,
        "not_found" => return Some(RefreshOutcome::NotFound),
        "reuse_detected" => return Some(RefreshOutcome::ReuseDetected),
        "limited" => {
            let (window, wait) = rest.split_once('\n')?;
            let window = *windows.get(window.parse::<usize>().ok()?.checked_sub(1)?)?;
            let retry_after = Duration::from_millis(wait.parse().ok()?).max(Duration::from_secs(1));
            return Some(RefreshOutcome::Limited { window, retry_after });
        }
        _ => return None,
    };
    Some(RefreshOutcome::Renewed(kind, parse_session(token.user, token.session, rest)?))
}

/// Returns a profile as scripts expect it: version, email address, whether the address is verified, name.
fn profile_arguments(profile: &Profile) -> [String; 4] {
    let verified = if profile.email_verified { "1" } else { "0" };
    let email = profile.email.clone().unwrap_or_default();
    [profile.version.to_string(), email, verified.to_owned(), profile.name.clone()]
}

// === impl RedisStore ===

impl RedisStore {
    /// Returns a live session of this kind. The kind is read from the generation in the reply, so that the script does
    /// not have to read another field. A session with an `auth_time` after `latest_auth_time_ms` is not returned, and
    /// its use is not recorded.
    async fn live_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
        kind: Option<SessionKind>,
        latest_auth_time_ms: Option<u64>,
    ) -> Result<Option<LiveSession>, StoreError> {
        let keys = UserKeys::new(app, user).for_session(session);
        let latest_auth_time = latest_auth_time_ms.map(|time| time.to_string()).unwrap_or_default();
        let arguments = [self.offset_millis(), session.to_string(), latest_auth_time];
        let command = script_command(&self.scripts().get_session, &keys, &arguments);
        let value = self.send_one(Operation::GetSession, command).await?;
        let lines: Option<String> = self.parse(value)?;
        let Some(lines) = lines else { return Ok(None) };
        let live = parse_session(user, session, &lines).ok_or_else(|| self.unexpected_value())?;
        Ok(Some(live).filter(|live| live.session.kind() == kind))
    }

    /// Runs refresh.lua for a session of the App or of a client.
    pub(super) async fn refresh(
        &self,
        operation: Operation,
        keys: &[String],
        token: &RefreshToken,
        rules: &RefreshRules,
    ) -> Result<RefreshOutcome, StoreError> {
        let windows = distinct_windows(&rules.windows);
        let mut arguments = vec![
            self.offset_millis(),
            token.session.to_string(),
            token.generation.to_string(),
            (u64::from(rules.grace_seconds) * 1000).to_string(),
            MAX_LATE_RESPONSES.to_string(),
            LATE_WINDOW_MILLIS.to_string(),
            LATENESS_STEP.to_string(),
            MAX_LATENESS.to_string(),
        ];
        arguments.extend(window_arguments(&windows));
        let command = script_command(&self.scripts().refresh, keys, &arguments);
        let value = self.send_one(operation, command).await?;
        let reply: String = self.parse(value)?;
        parse_refresh(token, &windows, &reply).ok_or_else(|| self.unexpected_value())
    }

    /// Ends every session of users who are being deleted. Also deletes the epochs of these users: nothing needs them
    /// any more, because user ids are never reused.
    pub(in crate::store) async fn purge_users(&self, app: &AppId, users: &[UserId]) -> Result<(), StoreError> {
        if users.is_empty() {
            return Ok(());
        }
        let mut commands = Pipeline::new();
        for user in users {
            let keys = UserKeys::new(app, *user);
            let arguments = [MAX_EPOCH.to_string(), USER_TTL_MILLIS.to_string(), String::new(), keys.session_prefix];
            let keys = [keys.user, keys.index, keys.client_index];
            commands.add_command(script_command(&self.scripts().raise_epoch, &keys, &arguments));
            commands.cmd("DEL").arg(&keys);
        }
        self.send(Operation::RaiseEpoch, &commands).await.map(drop)
    }

    /// Blocks logins of those users who have no live session: for `RETIRED_TTL_MILLIS`, no session below the given
    /// epoch can be opened for them. Returns the blocked users.
    pub(in crate::store) async fn retire_users(
        &self,
        app: &AppId,
        users: &[(UserId, Epoch)],
    ) -> Result<Vec<UserId>, StoreError> {
        if users.is_empty() {
            return Ok(Vec::new());
        }
        let mut commands = Pipeline::new();
        for (user, epoch) in users {
            let keys = UserKeys::new(app, *user);
            let ttl = RETIRED_TTL_MILLIS.to_string();
            let arguments = [self.offset_millis(), keys.session_prefix, epoch.0.to_string(), ttl];
            let keys = [keys.user, keys.index, keys.client_index];
            commands.add_command(script_command(&self.scripts().retire_user, &keys, &arguments));
        }
        let values = self.send(Operation::RetireUsers, &commands).await?;
        if values.len() != users.len() {
            return Err(self.unexpected_value());
        }
        let mut retired = Vec::new();
        for ((user, _), value) in users.iter().zip(values) {
            match value {
                Value::Int(1) => retired.push(*user),
                Value::Int(0) => {}
                _ => return Err(self.unexpected_value()),
            }
        }
        Ok(retired)
    }
}

impl Sessions for Stores {
    async fn open_session(&self, app: &AppId, session: &NewSession) -> Result<OpenOutcome, StoreError> {
        let user_keys = UserKeys::new(app, session.user);
        let keys = user_keys.for_session(session.id);
        let [version, email, verified, name] = profile_arguments(&session.profile);
        let mut arguments = vec![
            self.redis.offset_millis(),
            session.epoch.0.to_string(),
            session.id.to_string(),
            to_millis(session.ends_at),
            (u64::from(session.idle_seconds) * 1000).to_string(),
            USER_TTL_MILLIS.to_string(),
            MAX_SESSIONS.to_string(),
            user_keys.session_prefix,
            version,
            email,
            verified,
            name,
            "amr".to_owned(),
            session.amr.as_str().to_owned(),
            "auth_time".to_owned(),
            to_millis(session.auth_time),
            "ip".to_owned(),
            session.ip.clone(),
            "user_agent".to_owned(),
            truncated_user_agent(session.user_agent.as_deref().unwrap_or("")).to_owned(),
        ];
        arguments.extend(kind_fields(session.kind));
        let command = script_command(&self.redis.scripts().open_session, &keys, &arguments);
        // The replica's acknowledgement is ignored: if a failover loses the session, the user logs in again.
        let (opened, _) = self.redis.send_replicated(Operation::OpenSession, command).await?;
        match opened {
            Value::Int(1) => Ok(OpenOutcome::Opened),
            Value::Int(0) => Ok(OpenOutcome::EpochRaised),
            _ => Err(self.redis.unexpected_value()),
        }
    }

    async fn session(&self, app: &AppId, user: UserId, session: SessionId) -> Result<Option<LiveSession>, StoreError> {
        self.redis.live_session(app, user, session, None, None).await
    }

    async fn browser_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
        latest_auth_time_ms: Option<u64>,
    ) -> Result<Option<LiveSession>, StoreError> {
        self.redis.live_session(app, user, session, Some(SessionKind::Browser), latest_auth_time_ms).await
    }

    async fn renew_browser_session(&self, app: &AppId, session: &NewSession) -> Result<bool, StoreError> {
        let keys = UserKeys::new(app, session.user).for_session(session.id);
        let [version, email, verified, name] = profile_arguments(&session.profile);
        let arguments = [
            self.redis.offset_millis(),
            session.id.to_string(),
            session.epoch.0.to_string(),
            to_millis(session.ends_at),
            (u64::from(session.idle_seconds) * 1000).to_string(),
            USER_TTL_MILLIS.to_string(),
            version,
            email,
            verified,
            name,
            session.amr.as_str().to_owned(),
            to_millis(session.auth_time),
        ];
        let command = script_command(&self.redis.scripts().renew_browser_session, &keys, &arguments);
        let (renewed, _) = self.redis.send_replicated(Operation::RenewSession, command).await?;
        match renewed {
            Value::Int(renewed) => Ok(renewed > 0),
            _ => Err(self.redis.unexpected_value()),
        }
    }

    async fn sessions(&self, app: &AppId, user: UserId) -> Result<Vec<SessionInfo>, StoreError> {
        let redis = &self.redis;
        let keys = UserKeys::new(app, user);
        let arguments = [redis.offset_millis(), keys.session_prefix];
        let mut commands = Pipeline::new();
        commands.add_command(script_command(
            &redis.scripts().list_sessions,
            &[keys.user.clone(), keys.index],
            &arguments,
        ));
        commands.add_command(script_command(
            &redis.scripts().list_client_sessions,
            &[keys.user, keys.client_index],
            &arguments,
        ));
        let mut values = redis.send(Operation::ListSessions, &commands).await?.into_iter();
        let mut rows = || -> Result<Vec<Vec<String>>, StoreError> {
            redis.parse(values.next().ok_or_else(|| redis.unexpected_value())?)
        };
        let (own, of_clients) = (rows()?, rows()?);
        let own = own.iter().map(|row| parse_session_info(row));
        let of_clients = of_clients.iter().map(|row| parse_client_row(row).map(|row| row.info));
        let listed: Option<Vec<SessionInfo>> = own.chain(of_clients).collect();
        let mut listed = listed.ok_or_else(|| redis.unexpected_value())?;
        listed.sort_by_key(|info| std::cmp::Reverse(info.last_used_at));
        Ok(listed)
    }

    async fn refresh(
        &self,
        app: &AppId,
        token: &RefreshToken,
        rules: &RefreshRules,
    ) -> Result<RefreshOutcome, StoreError> {
        let keys = UserKeys::new(app, token.user).for_session(token.session);
        self.redis.refresh(Operation::Refresh, &keys, token, rules).await
    }

    async fn end_session(&self, app: &AppId, user: UserId, session: SessionId) -> Result<bool, StoreError> {
        let user_keys = UserKeys::new(app, user);
        let [_, client_index, client_session] = user_keys.for_client_session(session);
        let [user, index, session_key] = user_keys.for_session(session);
        let keys = [user, index, session_key, client_index, client_session];
        let arguments = [self.redis.offset_millis(), session.to_string()];
        let command = script_command(&self.redis.scripts().end_session, &keys, &arguments);
        let (ended, _) = self.redis.send_replicated(Operation::EndSession, command).await?;
        match ended {
            Value::Int(ended) => Ok(ended > 0),
            _ => Err(self.redis.unexpected_value()),
        }
    }

    async fn end_other_sessions(
        &self,
        app: &AppId,
        user: UserId,
        keep: SessionId,
    ) -> Result<Vec<SessionId>, StoreError> {
        let keys = UserKeys::new(app, user);
        let arguments = [keep.to_string(), keys.session_prefix];
        let keys = [keys.index, keys.client_index];
        let command = script_command(&self.redis.scripts().end_other_sessions, &keys, &arguments);
        let (ended, _) = self.redis.send_replicated(Operation::EndOtherSessions, command).await?;
        let ended: Vec<String> = self.redis.parse(ended)?;
        ended.iter().map(|id| id.parse().map_err(|_| self.redis.unexpected_value())).collect()
    }

    async fn raise_epoch(
        &self,
        app: &AppId,
        change: &EpochChange,
        profile: Option<&Profile>,
    ) -> Result<Replication, StoreError> {
        let keys = UserKeys::new(app, change.user);
        let mut arguments = vec![
            change.epoch.0.to_string(),
            USER_TTL_MILLIS.to_string(),
            change.kept_session.map(|session| session.to_string()).unwrap_or_default(),
            keys.session_prefix,
        ];
        arguments.extend(profile.into_iter().flat_map(profile_arguments));
        let keys = [keys.user, keys.index, keys.client_index];
        let command = script_command(&self.redis.scripts().raise_epoch, &keys, &arguments);
        self.redis.send_replicated(Operation::RaiseEpoch, command).await.map(|(_, replication)| replication)
    }

    async fn store_profile(&self, app: &AppId, user: UserId, profile: &Profile) -> Result<(), StoreError> {
        let keys = [UserKeys::new(app, user).user];
        let command = script_command(&self.redis.scripts().store_profile, &keys, &profile_arguments(profile));
        self.redis.send_one(Operation::StoreProfile, command).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_a_client_session_follows_from_the_index() {
        let user = UserId("00000000-0000-0000-0000-000000000007".parse().unwrap());
        let session: SessionId = "00000000-0000-0000-0000-000000000009".parse().unwrap();
        let [_, index, key] = UserKeys::new(&"shop".parse().unwrap(), user).for_client_session(session);
        let prefix = "lk:{shop:00000000-0000-0000-0000-000000000007}:client-session";
        assert_eq!((index, key), (format!("{prefix}s"), format!("{prefix}:{session}")));
    }

    #[test]
    fn a_user_agent_is_cut_between_characters() {
        let long = "é".repeat(MAX_USER_AGENT_BYTES);
        assert_eq!(truncated_user_agent(&long).len(), MAX_USER_AGENT_BYTES);
        let shifted = format!("a{long}");
        assert_eq!(truncated_user_agent(&shifted).len(), MAX_USER_AGENT_BYTES - 1);
        assert_eq!(truncated_user_agent("curl/8"), "curl/8");
        assert_eq!(truncated_user_agent(""), "");
    }
}
