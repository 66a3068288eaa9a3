//! Rename the user.

use tracing::warn;
use uuid::Uuid;

use super::account::{OwnAccountError, event, load_user};
use crate::domain::{
    app::App,
    audit::EventKind,
    authentication::AuthenticatedSession,
    client::ClientInfo,
    clock::Env,
    error::CommonError,
    ports::{OwnAccounts, Rename, Renamed, Sessions},
    user::{Name, User},
};

pub async fn rename_user<S: OwnAccounts + Sessions>(
    stores: &S,
    env: &Env,
    app: &App,
    caller: &ClientInfo,
    signed_in: &AuthenticatedSession,
    name: &Name,
) -> Result<User, OwnAccountError> {
    loop {
        let user = load_user(stores, app, signed_in).await?;
        let event = event(env, caller, EventKind::Renamed, signed_in);
        let change = Rename { user: user.id, epoch: user.epoch, name: name.clone(), at: event.at, event };
        if let Some(Renamed { user, outbox_row: row }) =
            stores.rename(app.id(), change).await.map_err(CommonError::from)?
        {
            propagate_profile(stores, app, &user, row).await;
            return Ok(user);
        }
        // The epoch has risen since the user was read: start again with the new state. The same applies below.
    }
}

/// Writes a new name to Redis before the response. If that fails, the transaction's outbox row does it.
async fn propagate_profile<S: OwnAccounts + Sessions>(stores: &S, app: &App, user: &User, row: Uuid) {
    let carried = async {
        stores.store_profile(app.id(), user.id, &user.profile()).await?;
        stores.remove_profile_row(app.id(), row).await
    };
    if let Err(error) = carried.await {
        warn!(app = %app.id(), error = &error as &dyn std::error::Error, "a new name is left to the outbox");
    }
}
