//! Renames the user.

use tracing::warn;
use uuid::Uuid;

use super::account::{OwnAccountError, load_user};
use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
    ports::{OwnAccounts, RateLimits, Rename, Renamed, Sessions},
    rate_limits,
    user::{Name, User},
};

/// Sets the name of the user. The call counts towards the rate limit of logins.
pub async fn rename_user<S: OwnAccounts + Sessions + RateLimits>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    name: &Name,
) -> Result<User, OwnAccountError> {
    call.stores.acquire(call.app_id(), rate_limits::logins(call.app, call.client_address())).await?;
    loop {
        let user = load_user(call, signed_in).await?;
        let event = signed_in.event(call, EventKind::Renamed);
        let change = Rename { user: user.id, epoch: user.epoch, name: name.clone(), at: event.at, event };
        if let Some(Renamed { user, outbox_row }) = call.stores.rename(call.app_id(), change).await? {
            propagate_profile(call, &user, outbox_row).await;
            return Ok(user);
        }
        // Another change has raised the user's epoch since the user was read. The loop reads the user again.
    }
}

/// Writes the profile with the new name to Redis before the response. If that fails, the outbox worker writes the
/// profile later, because the transaction that renamed the user has added an outbox row.
async fn propagate_profile<S: OwnAccounts + Sessions>(call: Call<'_, S>, user: &User, outbox_row: Uuid) {
    let propagated = async {
        call.stores.store_profile(call.app_id(), user.id, &user.profile()).await?;
        call.stores.remove_profile_row(call.app_id(), outbox_row).await
    };
    if let Err(error) = propagated.await {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "a new name was not written to Redis now; the outbox worker writes it later"
        );
    }
}
