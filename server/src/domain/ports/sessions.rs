//! Sessions and epochs, in Redis.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::StoreResult;
use crate::domain::{
    mail::EpochChange,
    session::{LiveSession, NewSession, OpenOutcome, Profile, RefreshOutcome, RefreshRules, SessionId, SessionInfo},
    token::RefreshToken,
    user::UserId,
};

/// Whether a replica of Redis has the written data, if there are replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    /// A replica has the data, or there are no replicas.
    Complete,
    /// No replica acknowledged the data in time.
    Unconfirmed,
}

/// Sessions and epochs, in Redis. A session has ended if its epoch is lower than the epoch of its user.
pub trait Sessions: Sync {
    /// Opens a session unless Redis has a later epoch. A user has at most 100 sessions: if there are more, the least
    /// recently used one ends.
    fn open_session(&self, app: &AppId, session: &NewSession) -> impl Future<Output = StoreResult<OpenOutcome>> + Send;

    /// Returns a live session of the App. Returns `None` if the session has ended, has expired or has an older epoch.
    /// Also returns `None` for a session of another kind, because an access token must not work for a browser session.
    fn session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<Option<LiveSession>>> + Send;

    /// Returns a live browser session. Returns `None` if the session has ended, has expired, has an older epoch or is
    /// of another kind. Also returns `None` if the `auth_time` of the session is later than `latest_auth_time_ms` (Unix
    /// milliseconds): the call then does not count as a use of the session.
    fn browser_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
        latest_auth_time_ms: Option<u64>,
    ) -> impl Future<Output = StoreResult<Option<LiveSession>>> + Send;

    /// Records that the user of a live browser session has logged in again: changes the `auth_time`, the `amr`, the end
    /// and the idle time of the session, and stores the profile. Returns false, and changes nothing, if there is no
    /// live browser session with this id at exactly this epoch.
    fn renew_browser_session(
        &self,
        app: &AppId,
        session: &NewSession,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Returns the live sessions of a user, of all kinds and of clients, the most recently used first.
    fn sessions(&self, app: &AppId, user: UserId) -> impl Future<Output = StoreResult<Vec<SessionInfo>>> + Send;

    /// Decides the outcome of a refresh. The HMAC of the token must be valid. Always takes one round trip to Redis.
    fn refresh(
        &self,
        app: &AppId,
        token: &RefreshToken,
        rules: &RefreshRules,
    ) -> impl Future<Output = StoreResult<RefreshOutcome>> + Send;

    /// Ends a session, which can be a session of a client. Returns whether the session was live.
    fn end_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
    ) -> impl Future<Output = StoreResult<bool>> + Send;

    /// Ends every session of the user except `keep`, and every client session that has a refresh token. Returns the
    /// ended sessions that were live.
    fn end_other_sessions(
        &self,
        app: &AppId,
        user: UserId,
        keep: SessionId,
    ) -> impl Future<Output = StoreResult<Vec<SessionId>>> + Send;

    /// Raises the epoch. Does nothing if Redis has a later epoch. Every session with a lower epoch ends, including
    /// client sessions. Only `kept_session` continues, at the new epoch. Also writes the profile. The profile is `None`
    /// if the user was deleted: then the stored profile and groups are removed.
    fn raise_epoch(
        &self,
        app: &AppId,
        change: &EpochChange,
        profile: Option<&Profile>,
    ) -> impl Future<Output = StoreResult<Replication>> + Send;

    /// Writes the profile that tokens contain from now on. Does nothing if the stored profile is newer.
    fn store_profile(
        &self,
        app: &AppId,
        user: UserId,
        profile: &Profile,
    ) -> impl Future<Output = StoreResult<()>> + Send;
}
