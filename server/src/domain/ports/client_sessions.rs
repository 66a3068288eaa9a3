//! Sessions of clients, in Redis. [`Sessions`](super::Sessions) lists and ends them together with the other sessions of
//! a user.

use std::future::Future;

use latchkey_crds::types::AppId;

use super::error::StoreResult;
use crate::domain::{
    openid::client_session::{ClientGrant, ClientSession, ListedClientSession, NewClientSession, SessionUse},
    session::{OpenOutcome, RefreshOutcome, RefreshRules, SessionId},
    token::RefreshToken,
    user::UserId,
};

/// Sessions of clients, in Redis. A session has ended if its epoch is lower than the epoch of its user. A session that
/// ends with its browser session has also ended if that browser session has ended.
pub trait ClientSessions: Sync {
    /// Opens a session unless Redis has a later epoch. A user has at most 100 sessions with a refresh token, and at
    /// most 20 of them with one client. Beyond a limit, the least recently used session ends.
    fn open_client_session(
        &self,
        app: &AppId,
        session: &NewClientSession,
    ) -> impl Future<Output = StoreResult<OpenOutcome>> + Send;

    /// Returns a live client session.
    fn client_session(
        &self,
        app: &AppId,
        user: UserId,
        session: SessionId,
        counts: SessionUse,
    ) -> impl Future<Output = StoreResult<Option<ClientSession>>> + Send;

    /// Decides the outcome of a refresh, as [`Sessions::refresh`](super::Sessions::refresh) does. A successful refresh
    /// also counts as a use of the browser session, if the client session ends with it. `grant` is the grant of the
    /// session.
    fn refresh_client_session(
        &self,
        app: &AppId,
        token: &RefreshToken,
        grant: &ClientGrant,
        rules: &RefreshRules,
    ) -> impl Future<Output = StoreResult<RefreshOutcome>> + Send;

    /// Returns the live client sessions of a user that have a refresh token, the most recently used first.
    fn client_sessions(
        &self,
        app: &AppId,
        user: UserId,
    ) -> impl Future<Output = StoreResult<Vec<ListedClientSession>>> + Send;

    /// Ends those sessions of the user with this client that have a refresh token. Returns the ended sessions.
    fn end_client_sessions(
        &self,
        app: &AppId,
        user: UserId,
        client_uid: &str,
    ) -> impl Future<Output = StoreResult<Vec<SessionId>>> + Send;
}
