//! The use case of *register* (specification: Accounts, Register).

use latchkey_crds::rendered::{EnumerationProtection, SignUp};

use crate::domain::{
    audit::{Event, EventKind},
    call::Call,
    email::Email,
    error::CommonError,
    mail::{Mail, MailKind},
    mail_limits::{acquire_mail_limit, release_mail_limit},
    password::{self, Password, WeakPassword},
    password_policy::{PasswordPolicyError, check_password_policy},
    ports::{CreateUserOutcome, NewUser, PasswordHasher, RateLimits, Users},
    rate_limits::{self, MailPurpose},
    user::{Name, User, UserId},
};

pub struct RegisterInput {
    pub email: Email,
    pub name: Name,
    pub password: Password,
}

pub struct Registered {
    /// The id of the new user. For a known email address, a new id that belongs to no user. Therefore clients must
    /// store the id that *confirm* or *login* returns, not this id.
    pub local_id: UserId,
    /// Minimum lifetime of the confirmation code in seconds. The lifetime starts when the mail is sent.
    pub expires_in: i64,
    pub expires_at: i64,
}

#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("sign-up is closed")]
    Closed,
    #[error("email addresses of this domain are not allowed")]
    DomainNotAllowed,
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    /// Returned only without enumeration protection.
    #[error("the email address has an account")]
    EmailTaken,
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for RegisterError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

impl From<PasswordPolicyError> for RegisterError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(error) => Self::Common(error),
        }
    }
}

/// Registers a user. For a known email address, queues a mail to its owner instead.
pub async fn register<S: Users + RateLimits + PasswordHasher>(
    call: Call<'_, S>,
    request: RegisterInput,
) -> Result<Registered, RegisterError> {
    if call.app.doc.sign_up == SignUp::Closed {
        return Err(RegisterError::Closed);
    }
    if !call.app.allows_email_domain(&request.email) {
        return Err(RegisterError::DomainNotAllowed);
    }
    call.stores.acquire(call.app_id(), rate_limits::registrations(call.app, call.client_address())).await?;
    let guesses = password::likely_guesses(Some(&request.email), Some(&request.name));
    check_password_policy(call, &request.password, guesses).await?;

    let now = call.env.now();
    let known_user = call.stores.user_by_email(call.app_id(), &request.email).await?;
    let is_taken =
        |user: &User| user.email_verified && call.app.doc.enumeration_protection == EnumerationProtection::Disabled;
    if known_user.as_ref().is_some_and(is_taken) {
        return Err(RegisterError::EmailTaken);
    }
    let mail_permit = acquire_mail_limit(call, &request.email, MailPurpose::Confirm).await?;
    let new_id = UserId(call.env.new_uuid());
    let event = Event { at: now, ..call.event(EventKind::Registered, new_id) };
    if let Err(error) = create_or_contest_user(call, &request, known_user, new_id, mail_permit.is_some(), event).await {
        release_mail_limit(call, mail_permit).await;
        return Err(error.into());
    }

    let expires_in = i64::from(call.app.doc.mail.confirm_code_lifetime_seconds);
    Ok(Registered { local_id: new_id, expires_in, expires_at: now.unix_timestamp() + expires_in })
}

/// Creates the user, or does work of the same cost if the email address is known. Either way one password is hashed:
/// for a known email address to check the password, for an unknown one to store it.
async fn create_or_contest_user<S: Users + PasswordHasher>(
    call: Call<'_, S>,
    request: &RegisterInput,
    known_user: Option<User>,
    new_id: UserId,
    is_mailed: bool,
    event: Event,
) -> Result<(), CommonError> {
    let known_user = match known_user {
        Some(user) => Some(user),
        None => {
            let password_hash = call.stores.hash(call.app, call.client_address(), &request.password).await?;
            let user = NewUser {
                id: new_id,
                email: request.email.clone(),
                name: request.name.clone(),
                password_hash,
                created_at: event.at,
                event: event.clone(),
            };
            let mail =
                is_mailed.then_some(Mail { kind: MailKind::Confirm, recipient: Some(new_id), requested_at: event.at });
            match call.stores.create_user(call.app_id(), user, mail).await? {
                CreateUserOutcome::Created => None,
                // A concurrent request has created the user: continue as for a known email address.
                CreateUserOutcome::AddressTaken => call.stores.user_by_email(call.app_id(), &request.email).await?,
            }
        }
    };
    match known_user {
        Some(user) => register_known_address(call, request, &user, is_mailed, event).await,
        None => Ok(()),
    }
}

/// Queues a mail to the owner of a known email address. An unverified account becomes contested if its password is not
/// the password of the request, or if its password hash has another function or other parameters than new hashes.
async fn register_known_address<S: Users + PasswordHasher>(
    call: Call<'_, S>,
    request: &RegisterInput,
    user: &User,
    is_mailed: bool,
    event: Event,
) -> Result<(), CommonError> {
    // A hash with another function or other parameters is not checked: its check would not take the same time as the
    // new hash that is made for an unknown email address.
    let native = call.stores.class_of_new_hashes();
    let hash = user.password_hash.as_ref().filter(|hash| hash.is_native(native));
    let is_same_password = call.stores.verify(call.app, call.client_address(), &request.password, hash).await?;
    let kind = if user.email_verified { MailKind::AccountExists } else { MailKind::Confirm };
    // The owner of a disabled account gets no mail: the outbox row is written, but sends nothing.
    let recipient = (!user.disabled).then_some(user.id);
    let mail = is_mailed.then_some(Mail { kind, recipient, requested_at: event.at });
    let becomes_contested = !user.email_verified && !is_same_password;
    let event = Event { kind: EventKind::RegisteredAgain, user: Some(user.id), ..event };
    Ok(call
        .stores
        .record_repeated_registration(call.app_id(), user.id, user.epoch, becomes_contested, mail, event)
        .await?)
}
