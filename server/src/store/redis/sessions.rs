//! Sessions and epochs: a hash for each session, an index of them and a hash for each user, all in one slot.

use std::time::Duration;

use latchkey_crds::{rendered::Window, types::AppId};
use redis::{Pipeline, Value};
use time::OffsetDateTime;

use super::{Redis, call, limits, metrics::Operation};
use crate::{
    domain::{
        mail::EpochNews,
        ports::{Carried, Sessions, StoreError},
        session::{
            Amr, LiveSession, NewSession, Opening, Profile, RefreshRules, Refreshed, Renewal, Session, SessionId,
            SessionInfo,
        },
        token::RefreshToken,
        user::{Epoch, UserId},
    },
    store::Stores,
};

/// At most so many sessions a user (contract, 4).
const MOST: u32 = 100;
/// How long an epoch is kept: longer than any session, which an App may let live for 730 days.
const USER_LIFE_MILLIS: u64 = 800 * 24 * 60 * 60 * 1000;
/// Later than any; the largest number that scripts keep exactly.
const LAST_EPOCH: i64 = (1 << 53) - 1;
/// How long a user who is being deleted cannot log in: longer than any request that read the user before. If the deletion
/// fails, they can after that. It is short, since everybody can make accounts that are never verified.
const RETIRED_MILLIS: u64 = 5 * 60 * 1000;
/// How many late answers a session gets in how long; then a late token is a stolen one (contract, 4).
const LATE_ANSWERS: u32 = 5;
const LATE_MILLIS: u32 = 24 * 60 * 60 * 1000;
/// What a late answer adds to a session's lateness, of which each new generation takes one away; with more than the
/// maximum the token is a stolen one. Two who take turns cause one late answer for each generation, so their fourteenth
/// ends the session; docs/decisions/0026-late-refreshes.md derives both numbers.
const LATENESS_STEP: u32 = 2;
const MAX_LATENESS: u32 = 14;
/// What is kept of a user agent, in octets.
const MAX_USER_AGENT: usize = 512;

/// The keys of a user.
struct Keys {
    /// Epoch and profile.
    user: String,
    index: String,
    /// Of a session, without its id.
    session: String,
}

// === impl Keys ===

impl Keys {
    fn of(app: &AppId, user: UserId) -> Self {
        let user = format!("lk:{{{app}:{user}}}");
        Self { user: format!("{user}:user"), index: format!("{user}:sessions"), session: format!("{user}:session:") }
    }

    /// User, index and session, in the order that scripts want them.
    fn of_session(&self, session: SessionId) -> [String; 3] {
        [self.user.clone(), self.index.clone(), format!("{}{session}", self.session)]
    }
}

fn millis(time: OffsetDateTime) -> String {
    (time.unix_timestamp_nanos() / 1_000_000).to_string()
}

/// At most `MAX_USER_AGENT` octets, cut between characters.
fn bounded(user_agent: &str) -> &str {
    let end = (0..=MAX_USER_AGENT.min(user_agent.len())).rev().find(|end| user_agent.is_char_boundary(*end));
    &user_agent[..end.unwrap_or(0)]
}

fn amr(text: &str) -> Option<Amr> {
    [Amr::Password, Amr::Code, Amr::Federated].into_iter().find(|amr| amr.as_str() == text)
}

/// What `told` of session.lua says.
fn read(user: UserId, id: SessionId, told: &str) -> Option<LiveSession> {
    let lines: Vec<&str> = told.splitn(8, '\n').collect();
    let [epoch, generation, means, auth_time, version, email, verified, name] = lines[..] else { return None };
    let session = Session {
        id,
        user,
        epoch: Epoch(epoch.parse().ok()?),
        generation: generation.parse().ok()?,
        amr: amr(means)?,
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

fn from_millis(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(text.parse::<i128>().ok()? * 1_000_000).ok()
}

fn listed(fields: &[String]) -> Option<SessionInfo> {
    let [id, created, used, ip, user_agent, means] = fields else { return None };
    Some(SessionInfo {
        id: id.parse().ok()?,
        created_at: from_millis(created)?,
        last_used_at: from_millis(used)?,
        ip: ip.clone(),
        user_agent: Some(user_agent.clone()).filter(|agent| !agent.is_empty()),
        amr: amr(means)?,
    })
}

/// What refresh.lua says.
fn refreshed(token: &RefreshToken, windows: &[Window], answer: &str) -> Option<Refreshed> {
    let (how, rest) = answer.split_once('\n').unwrap_or((answer, ""));
    let renewal = match how {
        "next" => Renewal::Next,
        "again" => Renewal::Again,
        "late" => Renewal::Late,
        "adopted" => Renewal::Adopted,
        "gone" => return Some(Refreshed::Gone),
        "stolen" => return Some(Refreshed::Stolen),
        "limited" => {
            let (window, wait) = rest.split_once('\n')?;
            let window = *windows.get(window.parse::<usize>().ok()?.checked_sub(1)?)?;
            let retry_after = Duration::from_millis(wait.parse().ok()?).max(Duration::from_secs(1));
            return Some(Refreshed::Limited { window, retry_after });
        }
        _ => return None,
    };
    Some(Refreshed::Live(renewal, read(token.user, token.session, rest)?))
}

/// A profile as scripts want it: version, address, whether it is verified, name.
fn arguments_of(profile: &Profile) -> [String; 4] {
    let verified = if profile.email_verified { "1" } else { "0" };
    let email = profile.email.clone().unwrap_or_default();
    [profile.version.to_string(), email, verified.to_owned(), profile.name.clone()]
}

// === impl Redis ===

impl Redis {
    /// Ends every session of users who are being deleted, and forgets their epochs: ids are never used again.
    pub(in crate::store) async fn forget_users(&self, app: &AppId, users: &[UserId]) -> Result<(), StoreError> {
        if users.is_empty() {
            return Ok(());
        }
        let mut commands = Pipeline::new();
        for user in users {
            let keys = Keys::of(app, *user);
            let arguments = [LAST_EPOCH.to_string(), USER_LIFE_MILLIS.to_string(), String::new(), keys.session.clone()];
            let names = [keys.user.clone(), keys.index.clone()];
            commands.add_command(call(&self.scripts().raise, &names, &arguments));
            commands.cmd("DEL").arg(&names);
        }
        self.send(Operation::RaiseEpoch, &commands).await.map(drop)
    }

    /// Keeps sessions of these users below these epochs from being opened, and returns those users. One with a live session is
    /// left as it is.
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
            let keys = Keys::of(app, *user);
            let life = RETIRED_MILLIS.to_string();
            let arguments = [self.offset_millis(), keys.session, epoch.0.to_string(), life];
            commands.add_command(call(&self.scripts().retire, &[keys.user, keys.index], &arguments));
        }
        let answers = self.send(Operation::RetireUsers, &commands).await?;
        if answers.len() != users.len() {
            return Err(self.unreadable());
        }
        let mut retired = Vec::new();
        for ((user, _), answer) in users.iter().zip(answers) {
            match answer {
                Value::Int(1) => retired.push(*user),
                Value::Int(0) => {}
                _ => return Err(self.unreadable()),
            }
        }
        Ok(retired)
    }
}

impl Sessions for Stores {
    async fn open_session(&self, app: &AppId, session: &NewSession) -> Result<Opening, StoreError> {
        let keys = Keys::of(app, session.user);
        let names = keys.of_session(session.id);
        let [version, email, verified, name] = arguments_of(&session.profile);
        let arguments = [
            self.redis.offset_millis(),
            session.epoch.0.to_string(),
            session.id.to_string(),
            millis(session.ends_at),
            (u64::from(session.idle_seconds) * 1000).to_string(),
            USER_LIFE_MILLIS.to_string(),
            MOST.to_string(),
            keys.session,
            version,
            email,
            verified,
            name,
            "amr".to_owned(),
            session.amr.as_str().to_owned(),
            "auth_time".to_owned(),
            millis(session.auth_time),
            "ip".to_owned(),
            session.ip.clone(),
            "user_agent".to_owned(),
            bounded(session.user_agent.as_deref().unwrap_or("")).to_owned(),
        ];
        let command = call(&self.redis.scripts().open, &names, &arguments);
        // Whether a replica has it is not told: a session that a fail-over loses is opened by the next login.
        let (opened, _) = self.redis.send_replicated(Operation::OpenSession, command).await?;
        match opened {
            Value::Int(1) => Ok(Opening::Opened),
            Value::Int(0) => Ok(Opening::Stale),
            _ => Err(self.redis.unreadable()),
        }
    }

    async fn session(&self, app: &AppId, user: UserId, session: SessionId) -> Result<Option<LiveSession>, StoreError> {
        let names = Keys::of(app, user).of_session(session);
        let arguments = [self.redis.offset_millis(), session.to_string()];
        let answer = self.redis.ask(Operation::GetSession, call(&self.redis.scripts().get, &names, &arguments)).await?;
        let told: Option<String> = redis::from_redis_value(answer).map_err(|_| self.redis.unreadable())?;
        told.map(|told| read(user, session, &told).ok_or_else(|| self.redis.unreadable())).transpose()
    }

    async fn sessions(&self, app: &AppId, user: UserId) -> Result<Vec<SessionInfo>, StoreError> {
        let keys = Keys::of(app, user);
        let arguments = [self.redis.offset_millis(), keys.session];
        let command = call(&self.redis.scripts().list, &[keys.user, keys.index], &arguments);
        let answer = self.redis.ask(Operation::ListSessions, command).await?;
        let rows: Vec<Vec<String>> = redis::from_redis_value(answer).map_err(|_| self.redis.unreadable())?;
        rows.iter().map(|row| listed(row).ok_or_else(|| self.redis.unreadable())).collect()
    }

    async fn refresh(&self, app: &AppId, token: &RefreshToken, rules: &RefreshRules) -> Result<Refreshed, StoreError> {
        let keys = Keys::of(app, token.user);
        let windows = limits::distinct(&rules.windows);
        let names = keys.of_session(token.session);
        let mut arguments = vec![
            self.redis.offset_millis(),
            token.session.to_string(),
            token.generation.to_string(),
            (u64::from(rules.grace_seconds) * 1000).to_string(),
            LATE_ANSWERS.to_string(),
            LATE_MILLIS.to_string(),
            LATENESS_STEP.to_string(),
            MAX_LATENESS.to_string(),
        ];
        for window in &windows {
            arguments.push(window.count.to_string());
            arguments.push(limits::part_millis(window).to_string());
        }
        let answer =
            self.redis.ask(Operation::Refresh, call(&self.redis.scripts().refresh, &names, &arguments)).await?;
        let answer: String = redis::from_redis_value(answer).map_err(|_| self.redis.unreadable())?;
        refreshed(token, &windows, &answer).ok_or_else(|| self.redis.unreadable())
    }

    async fn end_session(&self, app: &AppId, user: UserId, session: SessionId) -> Result<bool, StoreError> {
        let names = Keys::of(app, user).of_session(session);
        let arguments = [self.redis.offset_millis(), session.to_string()];
        let command = call(&self.redis.scripts().end, &names, &arguments);
        let (ended, _) = self.redis.send_replicated(Operation::EndSession, command).await?;
        match ended {
            Value::Int(ended) => Ok(ended > 0),
            _ => Err(self.redis.unreadable()),
        }
    }

    async fn end_other_sessions(
        &self,
        app: &AppId,
        user: UserId,
        keep: SessionId,
    ) -> Result<Vec<SessionId>, StoreError> {
        let keys = Keys::of(app, user);
        let command = call(&self.redis.scripts().end_others, &[keys.index], &[keep.to_string(), keys.session]);
        let (ended, _) = self.redis.send_replicated(Operation::EndOtherSessions, command).await?;
        let ended: Vec<String> = redis::from_redis_value(ended).map_err(|_| self.redis.unreadable())?;
        ended.iter().map(|id| id.parse().map_err(|_| self.redis.unreadable())).collect()
    }

    async fn raise_epoch(
        &self,
        app: &AppId,
        news: &EpochNews,
        profile: Option<&Profile>,
    ) -> Result<Carried, StoreError> {
        let keys = Keys::of(app, news.user);
        let mut arguments = vec![
            news.epoch.0.to_string(),
            USER_LIFE_MILLIS.to_string(),
            news.keep.map(|session| session.to_string()).unwrap_or_default(),
            keys.session,
        ];
        arguments.extend(profile.into_iter().flat_map(arguments_of));
        let command = call(&self.redis.scripts().raise, &[keys.user, keys.index], &arguments);
        self.redis.send_replicated(Operation::RaiseEpoch, command).await.map(|(_, carried)| carried)
    }

    async fn put_profile(&self, app: &AppId, user: UserId, profile: &Profile) -> Result<(), StoreError> {
        let command = call(&self.redis.scripts().profile, &[Keys::of(app, user).user], &arguments_of(profile));
        self.redis.ask(Operation::PutProfile, command).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_agent_is_cut_between_characters() {
        let long = "é".repeat(MAX_USER_AGENT);
        assert_eq!(bounded(&long).len(), MAX_USER_AGENT);
        let odd = format!("a{long}");
        assert_eq!(bounded(&odd).len(), MAX_USER_AGENT - 1);
        assert_eq!(bounded("curl/8"), "curl/8");
        assert_eq!(bounded(""), "");
    }
}
