//! The use case of *forgot-password* (specification: Accounts, Forgot password).

use crate::domain::{
    audit::EventKind,
    call::Call,
    email::Email,
    error::CommonError,
    mail::{Mail, MailKind},
    mail_limits::{acquire_mail_limit, release_mail_limit},
    ports::{AuditLog, Outbox, RateLimits, Users},
    rate_limits::MailPurpose,
};

/// Queues a reset mail. For an unknown email address or a disabled user, writes an outbox row that sends nothing. If a
/// mail limit is reached, queues nothing.
pub async fn forgot_password<S: Users + RateLimits + Outbox + AuditLog>(
    call: Call<'_, S>,
    email: &Email,
) -> Result<(), CommonError> {
    let mail_permit = acquire_mail_limit(call, email, MailPurpose::Reset).await?;
    let queued = async {
        let user = call.stores.user_by_email(call.app_id(), email).await?;
        let (id, disabled) = user.map(|user| (user.id, user.disabled)).unzip();
        if mail_permit.is_some() {
            let recipient = id.filter(|_| disabled != Some(true));
            call.stores
                .enqueue(call.app_id(), Mail { kind: MailKind::Reset, recipient, requested_at: call.env.now() })
                .await?;
            // The request does not wait for the event. For an unknown email address no event is written, so waiting
            // would reveal that an email address is known. If a mail limit is reached, no event is recorded either, so
            // the mail limits also limit the events.
            call.stores.record_later(call.app_id(), call.event(EventKind::PasswordResetRequested, id));
        }
        Ok(())
    };
    if let Err(error) = queued.await {
        release_mail_limit(call, mail_permit).await;
        return Err(CommonError::Store(error));
    }
    Ok(())
}
