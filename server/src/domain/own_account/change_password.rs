//! Change the password, or set the first one.

use super::{
    account::{OwnAccountError, load_user, require_verified_address},
    check_password::{account_key, verify_password},
};
use crate::domain::{
    audit::EventKind,
    authentication::{AuthenticatedSession, is_recent_login},
    call::Call,
    epochs::propagate_epoch,
    login_limits::{acquire_login_attempt, acquire_login_failure},
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
    Refused(OwnAccountError),
}

impl<E: Into<OwnAccountError>> From<E> for ChangePasswordError {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

impl From<PasswordPolicyError> for ChangePasswordError {
    fn from(error: PasswordPolicyError) -> Self {
        match error {
            PasswordPolicyError::Weak(weak) => Self::Weak(weak),
            PasswordPolicyError::Common(trouble) => Self::Refused(trouble.into()),
        }
    }
}

/// Ends all other sessions and all codes. The caller's session continues.
pub async fn change_password<S: OwnAccounts + RateLimits + PasswordHasher + Sessions + Outbox + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    request: &ChangePasswordInput,
) -> Result<(), ChangePasswordError> {
    let session = signed_in.session.id;
    let mut is_counted = false;
    loop {
        let user = load_user(call, signed_in).await?;
        require_verified_address(&user)?;
        let proven = request.current.is_some()
            || is_recent_login(call.env, &signed_in.session)
            || can_set_first_password(&user, session);
        if !proven {
            return Err(OwnAccountError::ReauthenticationRequired.into());
        }
        if !is_counted {
            // Scoring and hashing are work even if no old password was sent.
            acquire_login_attempt(call, &account_key(call, &user), Some(user.id)).await?;
            is_counted = true;
        }
        check_password_policy(call, &request.password, guess_words(&user)).await?;
        if let Some(current) = &request.current {
            let failure = acquire_login_failure(call, &account_key(call, &user), Some(user.id)).await?;
            verify_password(call, &user, current, failure).await?;
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
    }
}

/// *Confirm* removed the password of a contested account and allowed this session to set one.
fn can_set_first_password(user: &User, session: SessionId) -> bool {
    user.password_hash.is_none() && user.password_session == Some(session)
}

/// The words that an attacker would try first.
fn guess_words(user: &User) -> Vec<String> {
    let name = Name::parse(&user.name).ok();
    password::guess_words(user.email.as_ref().or(user.pending_email.as_ref()), name.as_ref())
}
