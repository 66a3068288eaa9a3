//! Browser sessions: open one after a login, and find the session of a request.

use futures::join;
use time::{Duration, OffsetDateTime};

use super::session_cookie::SessionCookie;
use crate::domain::{
    audit::{Detail, EventKind},
    authentication::AuthenticatedSession,
    call::Call,
    error::CommonError,
    groups::load_groups,
    ports::{AuditLog, Groups, Sessions, StoreError},
    session::{Amr, LiveSession, NewSession, OpenOutcome, Profile, SessionId, SessionKind},
    user::{Epoch, User, UserId},
};

/// How long the App's browser sessions live (`spec.pages.session`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BrowserSessionTimes {
    /// A session ends if it is not used for this long.
    pub idle_seconds: u32,
    /// A session ends this long after the login at the latest.
    pub lifetime_seconds: u32,
}

/// A successful login, for which a browser session is opened.
#[derive(Clone, Debug)]
pub struct BrowserLogin {
    pub user: UserId,
    /// The epoch that was read together with the data that authenticated the user.
    pub epoch: Epoch,
    pub profile: Profile,
    pub amr: Amr,
    pub auth_time: OffsetDateTime,
    /// The id of the session, if it was chosen before the login. `None`: a new id.
    pub session: Option<SessionId>,
}

// === impl BrowserLogin ===

impl BrowserLogin {
    /// A login of this user at this time.
    pub fn new(user: &User, amr: Amr, auth_time: OffsetDateTime) -> Self {
        Self { user: user.id, epoch: user.epoch, profile: user.profile(), amr, auth_time, session: None }
    }
}

/// Opens the browser session of a login, loads the groups of the user for clients, and records the event. Returns the
/// cookie to set, or `None` if the user's epoch has risen since the user was read, for example by a password reset.
///
/// `previous` is the valid session cookie of the request. It has an effect only if [`find_session`] finds its session.
/// If that session belongs to the same user, it is renewed and keeps its id. If it belongs to another user, it ends
/// after the new session is open, so that a failed login ends nothing.
pub async fn open_browser_session<S: Sessions + Groups + AuditLog>(
    call: Call<'_, S>,
    login: BrowserLogin,
    previous: Option<SessionCookie>,
    times: BrowserSessionTimes,
) -> Result<Option<SessionCookie>, CommonError> {
    let mut new = NewSession {
        kind: Some(SessionKind::Browser),
        id: login.session.unwrap_or_else(|| SessionId(call.env.new_uuid())),
        user: login.user,
        epoch: login.epoch,
        profile: login.profile,
        amr: login.amr,
        auth_time: login.auth_time,
        ip: call.client.ip.to_string(),
        user_agent: call.client.user_agent.clone(),
        ends_at: login.auth_time + Duration::seconds(i64::from(times.lifetime_seconds)),
        idle_seconds: times.idle_seconds,
    };
    let previous = match previous {
        Some(cookie) => find_session(call, &cookie).await?.map(|_| cookie),
        None => None,
    };
    let (same_user, other_user) = match previous {
        Some(cookie) if cookie.user == new.user => (Some(cookie), None),
        other => (None, other),
    };
    let is_renewed = match same_user {
        Some(cookie) => {
            let renewed = NewSession { id: cookie.session, ..new.clone() };
            let is_renewed = call.stores.renew_browser_session(call.app_id(), &renewed).await?;
            if is_renewed {
                new = renewed;
            }
            is_renewed
        }
        None => false,
    };
    if !is_renewed {
        match call.stores.open_session(call.app_id(), &new).await? {
            OpenOutcome::Opened => {}
            OpenOutcome::EpochRaised => return Ok(None),
        }
    }
    let event = call.event(EventKind::LoggedIn, new.user).in_session(new.id).with_detail(Detail::from_amr(new.amr));
    // These calls do not depend on each other.
    join!(call.stores.record(call.app_id(), event), load_groups_for_clients(call, new.user));
    if let Some(cookie) = other_user {
        end_session_of_other_user(call, &cookie).await?;
    }
    Ok(Some(SessionCookie::new(new.id, new.user, new.auth_time)))
}

/// Loads the groups of the user, if the App has clients. Only clients get groups.
async fn load_groups_for_clients<S: Groups>(call: Call<'_, S>, user: UserId) {
    if call.app.has_clients() {
        load_groups(call, user).await;
    }
}

/// Ends the browser session of a user, because another user has logged in in the same browser.
async fn end_session_of_other_user<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    cookie: &SessionCookie,
) -> Result<(), StoreError> {
    if call.stores.end_session(call.app_id(), cookie.user, cookie.session).await? {
        let event = call.event(EventKind::LoggedOut, cookie.user).in_session(cookie.session);
        call.stores.record_later(call.app_id(), event);
    }
    Ok(())
}

/// The live session of a valid cookie. Returns `None`, and changes nothing, if the session has ended, or if a later
/// login has replaced the cookie. To log out, call [`sessions::log_out`](crate::domain::sessions::log_out) with the
/// session.
pub async fn find_session<S: Sessions>(
    call: Call<'_, S>,
    cookie: &SessionCookie,
) -> Result<Option<AuthenticatedSession>, StoreError> {
    let latest_auth_time_ms = Some(cookie.latest_auth_time_ms());
    let live = call.stores.browser_session(call.app_id(), cookie.user, cookie.session, latest_auth_time_ms).await?;
    Ok(live.map(|LiveSession { session, profile }| AuthenticatedSession { session, profile }))
}
