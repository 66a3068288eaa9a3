//! Writes raised epochs to Redis before the response. Raising the epoch of a user ends the sessions of lower epochs.

use tracing::warn;

use super::{
    call::Call,
    mail::EpochChange,
    ports::{Outbox, Replication, Sessions},
    session::{Profile, SessionId},
    user::User,
};

/// Writes the raised epoch of a user to Redis. If that fails, or if no replica acknowledges the epoch, the outbox
/// worker writes it later: the transaction that raised the epoch has added an outbox row.
pub(super) async fn propagate_epoch<S: Sessions + Outbox>(call: Call<'_, S>, user: &User, keep: Option<SessionId>) {
    let change = EpochChange { user: user.id, epoch: user.epoch, kept_session: keep };
    propagate_epoch_change(call, &change, Some(&user.profile())).await;
}

/// Like [`propagate_epoch`], for a given epoch change. `profile` is `None` if the user was deleted.
pub(super) async fn propagate_epoch_change<S: Sessions + Outbox>(
    call: Call<'_, S>,
    change: &EpochChange,
    profile: Option<&Profile>,
) {
    let propagated = match call.stores.raise_epoch(call.app_id(), change, profile).await {
        Ok(Replication::Complete) => call.stores.remove_epoch_row(call.app_id(), change).await,
        Ok(Replication::Unconfirmed) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = propagated {
        warn!(
            app = %call.app_id(),
            error = &error as &dyn std::error::Error,
            "a raised epoch was not written to Redis now; the outbox worker writes it later"
        );
    }
}
