//! Deletes the account (specification: Accounts, Deletion of an account).

use super::{
    account::{OwnAccountError, load_user, require_verified_address},
    check_password::check_password,
};
use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
    epochs::propagate_epoch_change,
    mail::EpochChange,
    password::Password,
    ports::{AuditLog, Outbox, OwnAccounts, PasswordHasher, RateLimits, Sessions, UserDeletion},
};

/// Deletes the account. Only its audit events stay, until their retention ends.
pub async fn delete_account<S: OwnAccounts + RateLimits + PasswordHasher + Sessions + Outbox + AuditLog>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    password: Option<&Password>,
) -> Result<(), OwnAccountError> {
    let mut is_limit_acquired = false;
    loop {
        let user = load_user(call, signed_in).await?;
        require_verified_address(&user)?;
        match password {
            Some(password) => {
                check_password(call, &user, password, is_limit_acquired).await?;
                is_limit_acquired = true;
            }
            None if signed_in.is_recent(call.env) => {}
            None => return Err(OwnAccountError::ReauthenticationRequired),
        }
        let event = signed_in.event(call, EventKind::UserDeleted);
        let deletion = UserDeletion { user: user.id, epoch: user.epoch, event };
        if let Some(epoch) = call.stores.delete_user(call.app_id(), deletion).await? {
            propagate_epoch_change(call, &EpochChange { user: user.id, epoch, kept_session: None }, None).await;
            return Ok(());
        }
        // Another change has raised the user's epoch since the user was read. The loop reads the user and checks
        // everything again.
    }
}
