//! Requests a change of the email address (specification: Accounts, Change of address).

use latchkey_crds::rendered::EnumerationProtection;

use super::{
    account::{OwnAccountError, load_user, require_verified_address},
    check_password::check_password,
};
use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
    email::Email,
    mail_limits::{acquire_mail_limit, release_mail_limit},
    password::Password,
    ports::{AddressChangeRequest, AuditLog, OwnAccounts, PasswordHasher, RateLimits, Sessions, Users},
    rate_limits::{self, MailPurpose},
    user::User,
};

pub struct ChangeAddressInput {
    pub email: Email,
    pub password: Option<Password>,
}

pub struct PendingAddressChange {
    pub user: User,
    /// Minimum lifetime of the confirmation code in seconds, as in the response of *register*.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangeAddressError {
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    /// Returned only without enumeration protection.
    #[error("the email address belongs to another account")]
    EmailTaken,
    #[error(transparent)]
    Account(OwnAccountError),
}

impl<E: Into<OwnAccountError>> From<E> for ChangeAddressError {
    fn from(error: E) -> Self {
        Self::Account(error.into())
    }
}

/// Makes an email address pending until it is confirmed with its code. With enumeration protection, the function does
/// not check whether the email address has an account, so that known and unknown email addresses cost the same. The
/// outbox worker decides on the content of the mail when it sends the mail.
pub async fn request_address_change<S: Users + OwnAccounts + RateLimits + PasswordHasher + Sessions + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    request: &ChangeAddressInput,
) -> Result<PendingAddressChange, ChangeAddressError> {
    let mut is_limit_acquired = false;
    loop {
        let user = load_user(call, signed_in).await?;
        require_verified_address(&user)?;
        if !call.app.allows_email_domain(&request.email) {
            return Err(ChangeAddressError::DomainNotAllowed);
        }
        match &request.password {
            Some(password) => check_password(call, &user, password, is_limit_acquired).await?,
            // A recent login is enough only if the account has no password.
            None if user.password_hash.is_none() && signed_in.is_recent(call.env) => {
                if !is_limit_acquired {
                    let checks = rate_limits::logins(call.app, call.client_address());
                    call.stores.acquire(call.app_id(), checks).await?;
                }
            }
            None => return Err(OwnAccountError::ReauthenticationRequired.into()),
        }
        is_limit_acquired = true;
        if is_reported_as_taken(call, &user, &request.email).await? {
            return Err(ChangeAddressError::EmailTaken);
        }
        let mail_permit = acquire_mail_limit(call, &request.email, MailPurpose::Confirm).await?;
        let now = call.env.now();
        let change = AddressChangeRequest {
            user: user.id,
            epoch: user.epoch,
            address: request.email.clone(),
            is_mailed: mail_permit.is_some(),
            at: now,
            event: signed_in.event(call, EventKind::AddressChangeRequested),
        };
        let requested = call.stores.request_address_change(call.app_id(), change).await;
        if let Ok(Some(user)) = requested {
            let expires_in = i64::from(call.app.doc.mail.confirm_code_lifetime_seconds);
            return Ok(PendingAddressChange { user, expires_in, expires_at: now.unix_timestamp() + expires_in });
        }
        // No mail was queued, so the request must not count towards the limits on mails.
        release_mail_limit(call, mail_permit).await;
        requested?;
        // Another change has raised the user's epoch since the user was read. The loop reads the user and checks
        // everything again.
    }
}

/// Whether another account has verified the email address. Always false with enumeration protection.
async fn is_reported_as_taken<S: Users>(
    call: Call<'_, S>,
    user: &User,
    email: &Email,
) -> Result<bool, OwnAccountError> {
    match call.app.doc.enumeration_protection {
        EnumerationProtection::Strict => Ok(false),
        EnumerationProtection::Disabled => {
            let owner = call.stores.user_by_email(call.app_id(), email).await?;
            Ok(owner.is_some_and(|owner| owner.id != user.id && owner.email_verified))
        }
    }
}
