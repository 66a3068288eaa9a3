//! The user's own sessions: list them, end one or all others, log out. Events are recorded after the response, because
//! these calls also work without Postgres.

use crate::domain::{
    audit::{Detail, EventKind},
    authentication::AuthenticatedSession,
    call::Call,
    ports::{AuditLog, Sessions, StoreError},
    session::{SessionId, SessionInfo},
};

/// Returns the live sessions of the user, the most recently used first. Leaves out sessions of clients that the App no
/// longer has: their tokens do not work.
pub async fn list_sessions<S: Sessions>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<Vec<SessionInfo>, StoreError> {
    call.stores.sessions(call.app_id(), signed_in.user_id()).await
}

/// Ends a session of the user. Returns false if the user has no such live session.
pub async fn end_session<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    session: SessionId,
) -> Result<bool, StoreError> {
    let was_live = call.stores.end_session(call.app_id(), signed_in.user_id(), session).await?;
    if was_live {
        record_later(call, signed_in, EventKind::SessionEnded, Detail::from_ended_session(session));
    }
    Ok(was_live)
}

/// Ends all sessions of the user except the session of the request.
pub async fn end_other_sessions<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<(), StoreError> {
    let ended = call.stores.end_other_sessions(call.app_id(), signed_in.user_id(), signed_in.session.id).await?;
    if !ended.is_empty() {
        record_later(call, signed_in, EventKind::SessionsEnded, Detail::from_session_count(ended.len()));
    }
    Ok(())
}

/// Ends the session of the request.
pub async fn log_out<S: Sessions + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<(), StoreError> {
    if call.stores.end_session(call.app_id(), signed_in.user_id(), signed_in.session.id).await? {
        record_later(call, signed_in, EventKind::LoggedOut, Detail::default());
    }
    Ok(())
}

fn record_later<S: AuditLog>(call: Call<'_, S>, signed_in: &AuthenticatedSession, kind: EventKind, detail: Detail) {
    call.stores.record_later(call.app_id(), signed_in.event(call, kind).with_detail(detail));
}
