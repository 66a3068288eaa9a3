//! Change the password, or set the first one.

use super::{
    account::{OwnAccountError, event, load_user, require_verified_address},
    check_password::{account_key, verify_password},
};
use crate::domain::{
    app::App,
    audit::EventKind,
    authentication::{AuthenticatedSession, is_recent_login},
    client::ClientInfo,
    clock::Env,
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
    Refused(#[from] OwnAccountError),
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
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    request: &ChangePasswordInput,
) -> Result<(), ChangePasswordError> {
    let session = signed_in.session.id;
    let mut is_counted = false;
    loop {
        let user = load_user(stores, app, signed_in).await?;
        require_verified_address(&user)?;
        let proven = request.current.is_some()
            || is_recent_login(env, &signed_in.session)
            || can_set_first_password(&user, session);
        if !proven {
            return Err(OwnAccountError::ReauthenticationRequired.into());
        }
        if !is_counted {
            // Scoring and hashing are work even if no old password was sent.
            let attempt = acquire_login_attempt(stores, app, caller, &account_key(app, &user), Some(user.id)).await;
            attempt.map_err(OwnAccountError::Common)?;
            is_counted = true;
        }
        check_password_policy(stores, app, caller, &request.password, guess_words(&user)).await?;
        if let Some(current) = &request.current {
            let failure = acquire_login_failure(stores, app, caller, &account_key(app, &user), Some(user.id)).await;
            verify_password(stores, app, caller, &user, current, failure.map_err(OwnAccountError::Common)?).await?;
        }
        let hashed = stores.hash(app, caller.client_address(), &request.password).await;
        let password_hash = hashed.map_err(|busy| OwnAccountError::Common(busy.into()))?;
        let event = event(env, caller, EventKind::PasswordChanged, signed_in);
        let change = PasswordChange {
            user: user.id,
            epoch: user.epoch,
            password_hash,
            kept_session: session,
            at: event.at,
            event,
        };
        let changed = stores.set_password(app.id(), change).await;
        if let Some(user) = changed.map_err(|error| OwnAccountError::Common(error.into()))? {
            propagate_epoch(stores, app, &user, Some(session)).await;
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
