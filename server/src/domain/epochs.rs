//! Raised epochs, which Redis must have before the response.

use tracing::warn;

use super::{
    call::Call,
    mail::EpochChange,
    ports::{Outbox, Replication, Sessions},
    session::{Profile, SessionId},
    user::User,
};

/// Writes a raised epoch to Redis before the response. If that fails, the transaction's outbox row does it.
pub(super) async fn propagate_epoch<S: Sessions + Outbox>(call: Call<'_, S>, user: &User, keep: Option<SessionId>) {
    let news = EpochChange { user: user.id, epoch: user.epoch, kept_session: keep };
    propagate_epoch_change(call, &news, Some(&user.profile())).await;
}

/// The same for a given epoch change. `profile` is `None` if the user was deleted.
pub(super) async fn propagate_epoch_change<S: Sessions + Outbox>(
    call: Call<'_, S>,
    news: &EpochChange,
    profile: Option<&Profile>,
) {
    let carried = match call.stores.raise_epoch(call.app_id(), news, profile).await {
        Ok(Replication::Complete) => call.stores.remove_epoch_row(call.app_id(), news).await,
        Ok(Replication::Unconfirmed) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = carried {
        warn!(app = %call.app_id(), error = &error as &dyn std::error::Error, "a raised epoch is left to the outbox");
    }
}
