//! *verify*.

use crate::domain::{
    app::App,
    audit::{Event, EventKind},
    authentication::AuthenticatedSession,
    client::ClientInfo,
    clock::Env,
    email::Email,
    error::CommonError,
    mail::{Mail, MailKind},
    ports::{AuditLog, Outbox, OwnAccounts, RateLimits, Sessions},
    rate_limits::{self, MailPurpose},
};

#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error("there is no valid access token of a live session")]
    InvalidToken,
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Sends the confirmation code again to the user of the session. Returns the address.
pub async fn verify<S: OwnAccounts + RateLimits + Outbox + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
) -> Result<Email, VerifyError> {
    let user = signed_in.load_user(stores, app).await.map_err(CommonError::from)?.ok_or(VerifyError::InvalidToken)?;
    let waiting = user.pending_email.as_ref().or(user.email.as_ref().filter(|_| !user.email_verified));
    let Some(address) = waiting else {
        return user.email.ok_or(VerifyError::InvalidToken);
    };
    let account = address.account_key(app.id());
    let known = stores.is_known_client(app.id(), &account, caller.client_address()).await.map_err(CommonError::from)?;
    let checks = rate_limits::mails(app, caller, &account, MailPurpose::Confirm, known);
    let taken = stores.acquire(app.id(), checks).await.map_err(CommonError::from)?;
    let mail = Mail { kind: MailKind::Confirm, recipient: Some(user.id), requested_at: env.now() };
    if let Err(error) = stores.enqueue(app.id(), mail).await {
        stores.release(app.id(), taken).await;
        return Err(CommonError::from(error).into());
    }
    let event = Event::new(env, caller, EventKind::ConfirmationRequested, user.id).in_session(signed_in.session.id);
    stores.record(app.id(), event).await;
    Ok(address.clone())
}
