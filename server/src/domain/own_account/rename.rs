//! Rename the user.

use tracing::warn;
use uuid::Uuid;

use super::account::{OwnAccountError, load_user};
use crate::domain::{
    audit::EventKind,
    authentication::AuthenticatedSession,
    call::Call,
    ports::{OwnAccounts, Rename, Renamed, Sessions},
    user::{Name, User},
};

pub async fn rename_user<S: OwnAccounts + Sessions>(
    call: Call<'_, S>,
    signed_in: &AuthenticatedSession,
    name: &Name,
) -> Result<User, OwnAccountError> {
    loop {
        let user = load_user(call, signed_in).await?;
        let event = signed_in.event(call, EventKind::Renamed);
        let change = Rename { user: user.id, epoch: user.epoch, name: name.clone(), at: event.at, event };
        if let Some(Renamed { user, outbox_row: row }) = call.stores.rename(call.app_id(), change).await? {
            propagate_profile(call, &user, row).await;
            return Ok(user);
        }
        // The epoch has risen since the user was read: start again with the new state. The same applies below.
    }
}

/// Writes a new name to Redis before the response. If that fails, the transaction's outbox row does it.
async fn propagate_profile<S: OwnAccounts + Sessions>(call: Call<'_, S>, user: &User, row: Uuid) {
    let carried = async {
        call.stores.store_profile(call.app_id(), user.id, &user.profile()).await?;
        call.stores.remove_profile_row(call.app_id(), row).await
    };
    if let Err(error) = carried.await {
        warn!(app = %call.app_id(), error = &error as &dyn std::error::Error, "a new name is left to the outbox");
    }
}
