//! Delete the account.

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
    epochs::propagate_epoch_change,
    error::CommonError,
    mail::EpochChange,
    password::Password,
    ports::{AuditLog, Outbox, OwnAccounts, PasswordHasher, RateLimits, Sessions, UserDeletion},
};

/// Deletes the account with all its data.
pub async fn delete_account<S: OwnAccounts + RateLimits + PasswordHasher + Sessions + Outbox + AuditLog>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    password: Option<&Password>,
) -> Result<(), OwnAccountError> {
    loop {
        let user = load_user(stores, app, signed_in).await?;
        require_verified_address(&user)?;
        match password {
            Some(password) => check_password(stores, app, caller, &user, password).await?,
            None if is_recent_login(env, &signed_in.session) => {}
            None => return Err(OwnAccountError::ReauthenticationRequired),
        }
        let event = event(env, caller, EventKind::UserDeleted, signed_in);
        let removal = UserDeletion { user: user.id, epoch: user.epoch, event };
        let deleted = stores.delete_user(app.id(), removal).await.map_err(CommonError::from)?;
        if let Some(epoch) = deleted {
            propagate_epoch_change(stores, app, &EpochChange { user: user.id, epoch, kept_session: None }, None).await;
            return Ok(());
        }
    }
}
