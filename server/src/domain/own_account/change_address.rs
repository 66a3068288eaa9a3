//! Request a change of the email address.

use latchkey_crds::rendered::EnumerationProtection;

use super::{
    account::{OwnAccountError, event, load_user, require_verified_address},
    check_password::check_password,
};
use crate::domain::{
    app::App,
    audit::EventKind,
    authentication::{AuthenticatedSession, is_recent_login},
    client::ClientInfo,
    clock::Env,
    email::Email,
    error::CommonError,
    mail_limits::{acquire_mail_limit, release_mail_limit},
    password::Password,
    ports::{AddressChangeRequest, AuditLog, OwnAccounts, PasswordHasher, RateLimits, Sessions, Users},
    rate_limits::MailPurpose,
    user::User,
};

pub struct ChangeAddressInput {
    pub email: Email,
    pub password: Option<Password>,
}

pub struct PendingAddressChange {
    pub user: User,
    /// Lifetime of the confirmation code, as in the response of *register*.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangeAddressError {
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    /// Only without enumeration protection.
    #[error("the address belongs to another account")]
    EmailTaken,
    #[error(transparent)]
    Refused(#[from] OwnAccountError),
}

/// Makes an address pending until its code is confirmed. Whether the address has an account is not checked here, unless
/// enumeration protection is off: the content of the mail is decided when it is sent. So known and unknown addresses
/// cost the same.
pub async fn request_address_change<S: Users + OwnAccounts + RateLimits + PasswordHasher + Sessions + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    request: &ChangeAddressInput,
) -> Result<PendingAddressChange, ChangeAddressError> {
    loop {
        let user = load_user(stores, app, signed_in).await?;
        require_verified_address(&user)?;
        if !app.allows_email_domain(&request.email) {
            return Err(ChangeAddressError::DomainNotAllowed);
        }
        match &request.password {
            Some(password) => check_password(stores, app, caller, &user, password).await?,
            // A recent login is enough only if the account has no password.
            None if user.password_hash.is_none() && is_recent_login(env, &signed_in.session) => {}
            None => return Err(OwnAccountError::ReauthenticationRequired.into()),
        }
        if is_reported_as_taken(stores, app, &user, &request.email).await? {
            return Err(ChangeAddressError::EmailTaken);
        }
        let mailing = acquire_mail_limit(stores, app, caller, &request.email, MailPurpose::Confirm).await;
        let mailing = mailing.map_err(OwnAccountError::from)?;
        let now = env.now();
        let address = AddressChangeRequest {
            user: user.id,
            epoch: user.epoch,
            address: request.email.clone(),
            is_mailed: mailing.is_some(),
            at: now,
            event: event(env, caller, EventKind::AddressChangeRequested, signed_in),
        };
        let waiting = match stores.request_address_change(app.id(), address).await {
            Ok(Some(user)) => {
                let expires_in = i64::from(app.doc.mail.confirm_code_lifetime_seconds);
                return Ok(PendingAddressChange { user, expires_in, expires_at: now.unix_timestamp() + expires_in });
            }
            Ok(None) => Ok(()),
            Err(error) => Err(OwnAccountError::Common(error.into())),
        };
        release_mail_limit(stores, app, mailing).await;
        waiting?;
    }
}

/// Whether another account has the address verified, if the App permits that to be reported.
async fn is_reported_as_taken<S: Users>(
    stores: &S,
    app: &App,
    user: &User,
    email: &Email,
) -> Result<bool, OwnAccountError> {
    match app.doc.enumeration_protection {
        EnumerationProtection::Strict => Ok(false),
        EnumerationProtection::Disabled => {
            let known = stores.user_by_email(app.id(), email).await.map_err(CommonError::from)?;
            Ok(known.is_some_and(|known| known.id != user.id && known.email_verified))
        }
    }
}
