//! The use case of *confirm-password* (specification: Accounts, Confirm password).

use crate::domain::{
    audit::{EventKind, RefusalKind},
    call::Call,
    code::CodePurpose,
    email::Email,
    epochs::propagate_epoch,
    error::CommonError,
    login_limits::remember_client,
    password::{self, Password, WeakPassword},
    password_policy::{PasswordPolicyError, check_password_policy},
    ports::{AuditLog, Codes, Outbox, PasswordHasher, PasswordReset, RateLimits, Sessions, Users},
    rate_limits,
    stored_codes::{find_code, restore_code},
    user::Name,
};

pub struct ResetPasswordInput {
    pub email: Email,
    pub code: String,
    pub password: Password,
}

#[derive(Debug, thiserror::Error)]
pub enum ResetPasswordError {
    /// The code is wrong, used or expired, or the email address is unknown. The error does not say which.
    #[error("the code is not valid")]
    InvalidCode,
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    #[error(transparent)]
    Common(CommonError),
}

impl<E: Into<CommonError>> From<E> for ResetPasswordError {
    fn from(error: E) -> Self {
        Self::Common(error.into())
    }
}

impl From<PasswordPolicyError> for ResetPasswordError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(error) => Self::Common(error),
        }
    }
}

/// Sets a password with the code of a mail. All sessions of the user end.
pub async fn reset_password<S: Users + Outbox + RateLimits + Codes + Sessions + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    request: ResetPasswordInput,
) -> Result<(), ResetPasswordError> {
    let permit = call.stores.acquire(call.app_id(), rate_limits::codes(call.app, call.client_address())).await?;
    let email = request.email.clone();
    let outcome = apply_reset_code(call, request).await;
    // For a weak password the permit is not released: scoring costs CPU time, and the code may not have been checked
    // yet.
    if matches!(outcome, Ok(()) | Err(ResetPasswordError::Common(_))) {
        call.stores.release(call.app_id(), permit).await;
    }
    if matches!(outcome, Err(ResetPasswordError::InvalidCode)) {
        // The audit log counts the wrong code for the user with this email address. The lookup is done for every email
        // address, known or not. If the lookup itself fails, the response is the same.
        let user = call.stores.user_by_email(call.app_id(), &email).await.ok().flatten();
        let account = Some(call.account_key(&email));
        let refusal = call.refusal(RefusalKind::PasswordReset, account, user.map(|user| user.id));
        call.stores.count_refusal(call.app_id(), refusal);
    }
    outcome
}

async fn apply_reset_code<S: Users + Outbox + RateLimits + Codes + Sessions + PasswordHasher + AuditLog>(
    call: Call<'_, S>,
    request: ResetPasswordInput,
) -> Result<(), ResetPasswordError> {
    // The first check of the password uses the email address, but not the name, which is known only after the code was
    // found. So a weak password gets the same response with a right and with a wrong code.
    check_password_policy(call, &request.password, password::likely_guesses(Some(&request.email), None)).await?;
    let found = find_code(call, &request.code, &[CodePurpose::Reset]).await?;
    let (key, record) = found.ok_or(ResetPasswordError::InvalidCode)?;
    if record.address != request.email.canonical() {
        return Err(ResetPasswordError::InvalidCode);
    }
    let user = call.stores.user(call.app_id(), record.user).await?.ok_or(ResetPasswordError::InvalidCode)?;
    // The code is right, so the second check can use the name too. If the password is rejected here, the code is not
    // consumed.
    let name = Name::parse(&user.name).ok();
    check_password_policy(call, &request.password, password::likely_guesses(Some(&request.email), name.as_ref()))
        .await?;
    let password_hash = call.stores.hash(call.app, call.client_address(), &request.password).await?;
    let record = call.stores.consume_code(call.app_id(), &key).await?.ok_or(ResetPasswordError::InvalidCode)?;
    let event = call.event(EventKind::PasswordReset, record.user);
    let change = PasswordReset {
        user: record.user,
        epoch: record.epoch,
        address: record.address.clone(),
        password_hash,
        at: event.at,
        event,
    };
    let changed = match call.stores.reset_password(call.app_id(), change).await {
        Ok(changed) => changed.ok_or(ResetPasswordError::InvalidCode)?,
        Err(error) => {
            restore_code(call, &key, &record).await;
            return Err(error.into());
        }
    };
    let user = changed.user;
    propagate_epoch(call, &user, None).await;
    remember_client(call, &user).await;
    Ok(())
}
