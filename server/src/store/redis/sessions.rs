//! Sessions and epochs: a hash for each session, an index of them and an epoch for each user, all in one slot.

use latchkey_crds::types::AppId;
use redis::{Pipeline, Value};
use time::OffsetDateTime;

use super::{Redis, call, metrics::Operation};
use crate::{
    domain::{
        mail::EpochNews,
        ports::{Carried, Sessions, StoreError},
        session::{Amr, NewSession, Opening, Session, SessionId},
        user::{Epoch, UserId},
    },
    store::Stores,
};

/// At most so many sessions a user (contract, 4).
const MOST: u32 = 100;
/// How long an epoch is kept: longer than any session, which an App may let live for 730 days.
const EPOCH_LIFE_MILLIS: u64 = 800 * 24 * 60 * 60 * 1000;
/// Later than any; the largest number that scripts keep exactly.
const LAST_EPOCH: i64 = (1 << 53) - 1;
/// A use is noted at most so often: reading a session is no write.
const NOTED_EVERY_MILLIS: u32 = 60_000;
/// What is kept of a user agent, in octets.
const MAX_USER_AGENT: usize = 512;

/// The keys of a user.
struct Keys {
    epoch: String,
    index: String,
    /// Of a session, without its id.
    session: String,
}

// === impl Keys ===

impl Keys {
    fn of(app: &AppId, user: UserId) -> Self {
        let user = format!("lk:{{{app}:{user}}}");
        Self { epoch: format!("{user}:epoch"), index: format!("{user}:sessions"), session: format!("{user}:session:") }
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

fn read(user: UserId, id: SessionId, fields: &[String]) -> Option<Session> {
    let [epoch, generation, means, auth_time] = fields else { return None };
    Some(Session {
        id,
        user,
        epoch: Epoch(epoch.parse().ok()?),
        generation: generation.parse().ok()?,
        amr: amr(means)?,
        auth_time: OffsetDateTime::from_unix_timestamp_nanos(auth_time.parse::<i128>().ok()? * 1_000_000).ok()?,
    })
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
            let arguments =
                [LAST_EPOCH.to_string(), EPOCH_LIFE_MILLIS.to_string(), String::new(), keys.session.clone()];
            let names = [keys.epoch.clone(), keys.index.clone()];
            commands.add_command(call(&self.scripts().raise, &names, &arguments));
            commands.cmd("DEL").arg(&names);
        }
        self.send(Operation::RaiseEpoch, &commands).await.map(drop)
    }
}

impl Sessions for Stores {
    async fn open_session(&self, app: &AppId, session: &NewSession) -> Result<Opening, StoreError> {
        let keys = Keys::of(app, session.user);
        let key = format!("{}{}", keys.session, session.id);
        let arguments = [
            self.redis.offset_millis(),
            session.epoch.0.to_string(),
            session.id.to_string(),
            millis(session.ends_at),
            (u64::from(session.idle_seconds) * 1000).to_string(),
            EPOCH_LIFE_MILLIS.to_string(),
            MOST.to_string(),
            keys.session,
            "amr".to_owned(),
            session.amr.as_str().to_owned(),
            "auth_time".to_owned(),
            millis(session.auth_time),
            "ip".to_owned(),
            session.ip.clone(),
            "user_agent".to_owned(),
            bounded(session.user_agent.as_deref().unwrap_or("")).to_owned(),
        ];
        let command = call(&self.redis.scripts().open, &[keys.epoch, keys.index, key], &arguments);
        // Whether a replica has it is not told: a session that a fail-over loses is opened by the next login.
        let (opened, _) = self.redis.send_replicated(Operation::OpenSession, command).await?;
        match opened {
            Value::Int(1) => Ok(Opening::Opened),
            Value::Int(0) => Ok(Opening::Stale),
            _ => Err(self.redis.unreadable()),
        }
    }

    async fn session(&self, app: &AppId, user: UserId, session: SessionId) -> Result<Option<Session>, StoreError> {
        let keys = Keys::of(app, user);
        let key = format!("{}{session}", keys.session);
        let arguments = [self.redis.offset_millis(), session.to_string(), NOTED_EVERY_MILLIS.to_string()];
        let mut commands = Pipeline::new();
        commands.add_command(call(&self.redis.scripts().get, &[keys.epoch, keys.index, key], &arguments));
        let values = self.redis.send(Operation::GetSession, &commands).await?;
        let value = values.into_iter().next().ok_or_else(|| self.redis.unreadable())?;
        let fields: Option<Vec<String>> = redis::from_redis_value(value).map_err(|_| self.redis.unreadable())?;
        fields.map(|fields| read(user, session, &fields).ok_or_else(|| self.redis.unreadable())).transpose()
    }

    async fn raise_epoch(&self, app: &AppId, news: &EpochNews) -> Result<Carried, StoreError> {
        let keys = Keys::of(app, news.user);
        let arguments = [
            news.epoch.0.to_string(),
            EPOCH_LIFE_MILLIS.to_string(),
            news.keep.map(|session| session.to_string()).unwrap_or_default(),
            keys.session,
        ];
        let command = call(&self.redis.scripts().raise, &[keys.epoch, keys.index], &arguments);
        self.redis.send_replicated(Operation::RaiseEpoch, command).await.map(|(_, carried)| carried)
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
