//! Changes the password, or sets the first one (specification: Accounts, Change of password).

use super::{
    account::{OwnAccountError, load_user, require_verified_address},
    check_password::{account_key, verify_password},
};
use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
    epochs::propagate_epoch,
    login_limits::{acquire_login_attempt_limit, acquire_login_failure_limits},
    password::{self, Password, WeakPassword},
    password_policy::{PasswordPolicyError, check_password_policy},
    ports::{AuditLog, Outbox, OwnAccounts, PasswordChange, PasswordHasher, RateLimits, Sessions},
    session::SessionId,
    user::{Name, User},
};

pub struct ChangePasswordInput {
    pub password: Password,
    pub current: Option<Password>,
}

#[derive(Debug, thiserror::Error)]
pub enum ChangePasswordError {
    #[error(transparent)]
    Weak(#[from] WeakPassword),
    #[error(transparent)]
    Account(OwnAccountError),
}

impl<E: Into<OwnAccountError>> From<E> for ChangePasswordError {
    fn from(error: E) -> Self {
        Self::Account(error.into())
    }
}

impl From<PasswordPolicyError> for ChangePasswordError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(error) => Self::Account(error.into()),
        }
    }
}

/// Sets the password. Ends all other sessions of the user and invalidates all codes. The session of the request
/// continues.
pub async fn change_password<S: OwnAccounts + RateLimits + PasswordHasher + Sessions + Outbox + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    request: &ChangePasswordInput,
) -> Result<(), ChangePasswordError> {
    let session = signed_in.session.id;
    let mut is_limit_acquired = false;
    loop {
        let user = load_user(call, signed_in).await?;
        require_verified_address(&user)?;
        let is_authenticated =
            request.current.is_some() || signed_in.is_recent(call.env) || can_set_first_password(&user, session);
        if !is_authenticated {
            return Err(OwnAccountError::ReauthenticationRequired.into());
        }
        if !is_limit_acquired {
            // The limit also applies to a request without a current password, because its new password is scored and
            // hashed.
            acquire_login_attempt_limit(call, &account_key(call, &user), Some(user.id)).await?;
            is_limit_acquired = true;
        }
        check_password_policy(call, &request.password, likely_guesses(&user)).await?;
        if let Some(current) = &request.current {
            let failure_permit = acquire_login_failure_limits(call, &account_key(call, &user), Some(user.id)).await?;
            verify_password(call, &user, current, failure_permit).await?;
        }
        let password_hash = call.stores.hash(call.app, call.client_address(), &request.password).await?;
        let event = signed_in.event(call, EventKind::PasswordChanged);
        let change = PasswordChange {
            user: user.id,
            epoch: user.epoch,
            password_hash,
            kept_session: session,
            at: event.at,
            event,
        };
        if let Some(user) = call.stores.set_password(call.app_id(), change).await? {
            propagate_epoch(call, &user, Some(session)).await;
            return Ok(());
        }
        // Another change has raised the user's epoch since the user was read. The loop reads the user and checks
        // everything again.
    }
}

/// Whether *confirm* removed the password of a contested account and allowed this session to set one.
fn can_set_first_password(user: &User, session: SessionId) -> bool {
    user.password_hash.is_none() && user.password_session == Some(session)
}

fn likely_guesses(user: &User) -> Vec<String> {
    let name = Name::parse(&user.name).ok();
    password::likely_guesses(user.email.as_ref().or(user.pending_email.as_ref()), name.as_ref())
}
