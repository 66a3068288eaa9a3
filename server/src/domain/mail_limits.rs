//! The rate limits on mails.

use super::{
    call::Call,
    email::Email,
    error::CommonError,
    ports::{AcquireError, RateLimitPermit, RateLimits},
    rate_limits::{self, MailPurpose},
};

/// Acquires the rate limits of one mail. Returns `None` if a limit is reached: the mail is then not sent, but the
/// response is the same as for a sent mail.
pub(super) async fn acquire_mail_limit<S: RateLimits>(
    call: Call<'_, S>,
    email: &Email,
    purpose: MailPurpose,
) -> Result<Option<RateLimitPermit>, CommonError> {
    let account = call.account_key(email);
    let is_known = call.stores.is_known_client(call.app_id(), &account, call.client_address()).await?;
    let checks = rate_limits::mails(call.app, call.client_address(), &account, purpose, is_known);
    match call.stores.acquire(call.app_id(), checks).await {
        Ok(permit) => Ok(Some(permit)),
        Err(AcquireError::RateLimited(_)) => Ok(None),
        Err(AcquireError::Store(error)) => Err(error.into()),
    }
}

/// Releases the rate limits of a mail that was not queued, so that a retry can send it.
pub(super) async fn release_mail_limit<S: RateLimits>(call: Call<'_, S>, permit: Option<RateLimitPermit>) {
    if let Some(permit) = permit {
        call.stores.release(call.app_id(), permit).await;
    }
}
