//! The rate limits of mails.

use super::{
    app::App,
    client::ClientInfo,
    email::Email,
    error::CommonError,
    ports::{AcquireError, RateLimitPermit, RateLimits},
    rate_limits::{self, MailPurpose},
};

/// Acquires the rate limits of one mail. `None`: a limit is reached, which drops the mail but not the response.
pub(super) async fn acquire_mail_limit<S: RateLimits>(
    stores: &S,
    app: &App,
    caller: &ClientInfo,
    email: &Email,
    purpose: MailPurpose,
) -> Result<Option<RateLimitPermit>, CommonError> {
    let account = email.account_key(app.id());
    let known = stores.is_known_client(app.id(), &account, caller.client_address()).await?;
    match stores.acquire(app.id(), rate_limits::mails(app, caller, &account, purpose, known)).await {
        Ok(taken) => Ok(Some(taken)),
        Err(AcquireError::RateLimited(_)) => Ok(None),
        Err(AcquireError::Store(error)) => Err(error.into()),
    }
}

/// Releases the rate limits of a mail that was not queued, so that a retry can send it.
pub(super) async fn release_mail_limit<S: RateLimits>(stores: &S, app: &App, mailing: Option<RateLimitPermit>) {
    if let Some(taken) = mailing {
        stores.release(app.id(), taken).await;
    }
}
