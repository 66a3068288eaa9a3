//! The sessions of a user.

use super::AdministratorCall;
use crate::domain::{
    audit::{Detail, EventKind},
    epochs::propagate_epoch_change,
    ports::{Outbox, Sessions, StoreError, UserAdministration},
    session::{SessionId, SessionInfo},
    user::UserId,
};

/// Returns the live sessions of the user, the most recently used first, or `None` if there is no such user.
pub async fn user_sessions<S: UserAdministration + Sessions>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
) -> Result<Option<Vec<SessionInfo>>, StoreError> {
    if admin.stores().administered_user(admin.app_id(), user).await?.is_none() {
        return Ok(None);
    }
    admin.stores().sessions(admin.app_id(), user).await.map(Some)
}

/// Ends a session of the user. Returns false if the user has no such live session.
pub async fn end_user_session<S: UserAdministration + Sessions>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
    session: SessionId,
) -> Result<bool, StoreError> {
    // The user is read first to check that Postgres is available. Without this check, the session could end although
    // the event cannot be written.
    if admin.stores().administered_user(admin.app_id(), user).await?.is_none() {
        return Ok(false);
    }
    let was_live = admin.stores().end_session(admin.app_id(), user, session).await?;
    if was_live {
        let event = admin.event(EventKind::SessionEnded, user);
        let detail = Detail { ended: Some(session), ..event.detail.clone() };
        admin.stores().record_administration(admin.app_id(), event.with_detail(detail)).await?;
    }
    Ok(was_live)
}

/// Ends all sessions of the user and invalidates all codes that were mailed to the user. Returns false if there is no
/// such user.
pub async fn end_user_sessions<S: UserAdministration + Sessions + Outbox>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
) -> Result<bool, StoreError> {
    // The user is read for the profile: an epoch change without a profile deletes the profile in Redis, but a session
    // that is opened at the same time needs the profile.
    let Some(found) = admin.stores().administered_user(admin.app_id(), user).await? else { return Ok(false) };
    let event = admin.event(EventKind::SessionsEnded, user);
    let Some(change) = admin.stores().end_all_sessions(admin.app_id(), user, event).await? else { return Ok(false) };
    propagate_epoch_change(admin.call, &change, Some(&found.profile())).await;
    Ok(true)
}
