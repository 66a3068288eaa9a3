//! Mails that an administrator requests.

use super::AdministratorCall;
use crate::domain::{
    audit::{Detail, EventKind},
    error::CommonError,
    mail::MailKind,
    ports::{MailOutcome, RateLimits, UserAdministration},
    rate_limits,
    user::UserId,
};

#[derive(Debug, thiserror::Error)]
pub enum RequestMailError {
    #[error("there is no such user")]
    NotFound,
    #[error(transparent)]
    Common(#[from] CommonError),
}

/// Queues a mail with a code. Returns false and queues nothing in these cases: the user is disabled; the user has no
/// address for the mail, or nothing to confirm; the mail is an invitation and the user has a password; a mail of this
/// kind to the user already waits in the outbox.
pub async fn request_mail<S: UserAdministration + RateLimits>(
    admin: AdministratorCall<'_, S>,
    user: UserId,
    kind: MailKind,
) -> Result<bool, RequestMailError> {
    let stores = admin.stores();
    let found = stores.administered_user(admin.app_id(), user).await.map_err(CommonError::from)?;
    let found = found.ok_or(RequestMailError::NotFound)?;
    if kind == MailKind::Invitation && found.password_hash.is_some() {
        return Ok(false);
    }
    // A confirmation code goes to the pending email address. If there is none, it goes to the email address of the
    // account, if that address is unverified.
    let unconfirmed = found.pending_email.as_ref().or(found.email.as_ref().filter(|_| !found.email_verified));
    let address = if kind == MailKind::Confirm { unconfirmed } else { found.email.as_ref() };
    let Some(address) = address.filter(|_| !found.disabled) else { return Ok(false) };
    let checks = rate_limits::administrator_mails(admin.call.app, &admin.call.account_key(address), kind);
    let permit = stores.acquire(admin.app_id(), checks).await.map_err(CommonError::from)?;
    let event = admin.event(EventKind::MailRequested, user);
    let detail = Detail { mail: Some(kind.as_str()), ..event.detail.clone() };
    let outcome = stores.queue_mail(admin.app_id(), user, kind, event.with_detail(detail)).await;
    if !matches!(outcome, Ok(MailOutcome::Queued)) {
        stores.release(admin.app_id(), permit).await;
    }
    match outcome.map_err(CommonError::from)? {
        MailOutcome::Queued => Ok(true),
        MailOutcome::Waiting | MailOutcome::NotPossible => Ok(false),
        MailOutcome::NotFound => Err(RequestMailError::NotFound),
    }
}
