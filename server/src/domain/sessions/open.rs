//! Opens a session for an authenticated user.

use time::Duration;

use crate::domain::{
    audit::{Detail, EventKind},
    call::Call,
    error::CommonError,
    ports::{AuditLog, Sessions},
    session::{Amr, NewSession, OpenOutcome, Session, SessionId},
    token::{self, Tokens},
    user::User,
};

/// Opens a session at the epoch of `user` and records the event. Returns `None` if the user's epoch has risen since the
/// user was read, for example by a password reset.
pub(in crate::domain) async fn open_session<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    user: &User,
    amr: Amr,
) -> Result<Option<Tokens>, CommonError> {
    open_session_with_id(call, user, SessionId(call.env.new_uuid()), amr).await
}

/// Like [`open_session`], with a session id that was generated earlier.
pub(in crate::domain) async fn open_session_with_id<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    user: &User,
    id: SessionId,
    amr: Amr,
) -> Result<Option<Tokens>, CommonError> {
    let now = call.env.now();
    let new = NewSession {
        kind: None,
        id,
        user: user.id,
        epoch: user.epoch,
        profile: user.profile(),
        amr,
        auth_time: now,
        ip: call.client.ip.to_string(),
        user_agent: call.client.user_agent.clone(),
        ends_at: now + Duration::seconds(i64::from(call.app.doc.tokens.session_lifetime_seconds)),
        idle_seconds: call.app.doc.tokens.refresh_idle_seconds,
    };
    open_prepared_session(call, &new).await
}

/// Like [`open_session`], for a session that was prepared, for example in an earlier request.
pub(in crate::domain) async fn open_prepared_session<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    new: &NewSession,
) -> Result<Option<Tokens>, CommonError> {
    // The tokens are signed before the session is opened: if the signing fails, no session is opened.
    let tokens = token::issue_tokens(call.app, call.env, &new.profile, &Session::opened(new))?;
    match call.stores.open_session(call.app_id(), new).await? {
        OpenOutcome::Opened => {}
        OpenOutcome::EpochRaised => return Ok(None),
    }
    let event = call.event(EventKind::LoggedIn, new.user);
    let event = event.in_session(new.id).with_detail(Detail::from_amr(new.amr));
    call.stores.record(call.app_id(), event).await;
    Ok(Some(tokens))
}
