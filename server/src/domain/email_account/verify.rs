//! The use case of *verify* (specification: Accounts, Verify).

use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
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
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for VerifyError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

/// Queues a mail with a new confirmation code for the user of the session. Returns the email address of the mail, or
/// the verified email address if there is nothing to verify.
pub async fn verify<S: OwnAccounts + RateLimits + Outbox + Sessions + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
) -> Result<Email, VerifyError> {
    let user = signed_in.load_user(call).await?.ok_or(VerifyError::InvalidToken)?;
    let unverified_address = user.pending_email.as_ref().or(user.email.as_ref().filter(|_| !user.email_verified));
    let Some(address) = unverified_address else {
        return user.email.ok_or(VerifyError::InvalidToken);
    };
    let account = call.account_key(address);
    let is_known = call.stores.is_known_client(call.app_id(), &account, call.client_address()).await?;
    let checks = rate_limits::mails(call.app, call.client_address(), &account, MailPurpose::Confirm, is_known);
    let permit = call.stores.acquire(call.app_id(), checks).await?;
    let mail = Mail { kind: MailKind::Confirm, recipient: Some(user.id), requested_at: call.env.now() };
    if let Err(error) = call.stores.enqueue(call.app_id(), mail).await {
        call.stores.release(call.app_id(), permit).await;
        return Err(error.into());
    }
    call.stores.record(call.app_id(), signed_in.event(call, EventKind::ConfirmationRequested)).await;
    Ok(address.clone())
}
