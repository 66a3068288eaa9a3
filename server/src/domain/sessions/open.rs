//! Opens a session after a login.

use time::Duration;

use crate::domain::{
    app::App,
    audit::{Detail, Event, EventKind},
    client::ClientInfo,
    clock::Env,
    error::CommonError,
    ports::{AuditLog, Sessions},
    session::{Amr, NewSession, OpenOutcome, Session, SessionId},
    token::{self, Tokens},
    user::User,
};

/// Opens a session at the user's epoch and records the event. `None` if the epoch has risen since the user was read.
pub(in crate::domain) async fn open_session<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    amr: Amr,
) -> Result<Option<Tokens>, CommonError> {
    open_session_with_id(stores, env, app, caller, user, SessionId(env.new_uuid()), amr).await
}

/// The same with an id that was used before.
pub(in crate::domain) async fn open_session_with_id<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    user: &User,
    id: SessionId,
    amr: Amr,
) -> Result<Option<Tokens>, CommonError> {
    let now = env.now();
    let new = NewSession {
        id,
        user: user.id,
        epoch: user.epoch,
        profile: user.profile(),
        amr,
        auth_time: now,
        ip: caller.ip.to_string(),
        user_agent: caller.user_agent.clone(),
        ends_at: now + Duration::seconds(i64::from(app.doc.tokens.session_lifetime_seconds)),
        idle_seconds: app.doc.tokens.refresh_idle_seconds,
    };
    open_prepared_session(stores, env, app, caller, &new).await
}

/// The same for a prepared session: its login was an earlier request.
pub(in crate::domain) async fn open_prepared_session<S: Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    new: &NewSession,
) -> Result<Option<Tokens>, CommonError> {
    // Signed first: if the tokens cannot be returned, no session is opened.
    let tokens = token::issue_tokens(app, env, &new.profile, &Session::opened(new))?;
    match stores.open_session(app.id(), new).await? {
        OpenOutcome::Opened => {}
        OpenOutcome::EpochRaised => return Ok(None),
    }
    let event = Event::new(env, caller, EventKind::LoggedIn, new.user);
    let event = event.in_session(new.id).with_detail(Detail::from_amr(new.amr));
    stores.record(app.id(), event).await;
    Ok(Some(tokens))
}
