//! *forgot-password*.

use crate::domain::{
    app::App,
    audit::{Event, EventKind},
    client::ClientInfo,
    clock::Env,
    email::Email,
    error::CommonError,
    mail::{Mail, MailKind},
    mail_limits::{acquire_mail_limit, release_mail_limit},
    ports::{AuditLog, Outbox, RateLimits, Users},
    rate_limits::MailPurpose,
};

/// Queues a reset mail. For an unknown address it writes an outbox row that sends nothing.
pub async fn forgot_password<S: Users + RateLimits + Outbox + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    email: &Email,
) -> Result<(), CommonError> {
    let mailing = acquire_mail_limit(stores, app, caller, email, MailPurpose::Reset).await?;
    let queued = async {
        let user = stores.user_by_email(app.id(), email).await?;
        let (id, disabled) = user.map(|user| (user.id, user.disabled)).unzip();
        if mailing.is_some() {
            let to = id.filter(|_| disabled != Some(true));
            stores.enqueue(app.id(), Mail { kind: MailKind::Reset, recipient: to, requested_at: env.now() }).await?;
            // Does not wait: an unknown address has no event to write, which takes less time. Only together with a
            // mail, so that the mail limits bound the events too.
            stores.record_later(app.id(), Event::new(env, caller, EventKind::PasswordResetRequested, id));
        }
        Ok(())
    };
    if let Err(error) = queued.await {
        release_mail_limit(stores, app, mailing).await;
        return Err(CommonError::Store(error));
    }
    Ok(())
}
