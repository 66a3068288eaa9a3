//! The hourly sweep of the queues of webhooks. Removes the events of removed webhooks, old events, and the oldest
//! events of queues that are too long.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;
use tracing::{info, warn};

use super::metrics::{DeliveryOutcome, WebhookMetrics};
use crate::{
    config::Apps,
    domain::{
        ports::{StoreError, WebhookKey},
        webhook::Delivery,
    },
    store::{Stores, postgres::PostgresStore},
};

/// How long one run deletes events. The next run, an hour later, deletes the rest.
const MAX_DELETE_TIME: Duration = Duration::from_secs(60);

/// How the sweep treats a webhook.
enum Sweep {
    /// There is no document of the App.
    WithoutApp,
    Removed,
    Push,
    Pull,
}

/// Removes events of removed webhooks, old dead letters, events that consumers did not acknowledge in time, and the
/// oldest events of queues that are too long. Turns old events that could not be delivered into dead letters. Returns
/// how many events were removed or became dead letters. Events of an App without a document stay until the App's users
/// are deleted. The server that deletes the users also deletes the events, unless its version is too old to know
/// webhook events. This sweep deletes the events that a server of such a version has left behind. The webhooks take
/// turns, one batch each.
pub async fn remove_old_events(stores: &Stores, apps: &Apps, metrics: &WebhookMetrics) -> Result<u64, StoreError> {
    let postgres = &stores.postgres;
    let end = Instant::now() + MAX_DELETE_TIME;
    let stored = postgres.stored_webhooks().await?;
    let mut queue: VecDeque<(WebhookKey, Sweep)> = stored
        .into_iter()
        .map(|key| {
            let Some(app) = apps.get(key.app.as_str()) else { return (key, Sweep::WithoutApp) };
            let sweep = match app.webhook(key.webhook.as_str()).map(|webhook| &webhook.delivery) {
                None => Sweep::Removed,
                Some(Delivery::Pull(_)) => Sweep::Pull,
                Some(Delivery::Push(_)) => Sweep::Push,
            };
            (key, sweep)
        })
        .collect();
    let mut removed = 0;
    while let Some((key, sweep)) = queue.pop_front() {
        match sweep_batch(postgres, &key, &sweep, metrics).await {
            Ok(0) => {}
            Ok(count) => {
                removed += count;
                queue.push_back((key, sweep));
            }
            // The sweep continues with the other webhooks. The next sweep, an hour later, includes this webhook again.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(
                    app = %key.app,
                    webhook = %key.webhook,
                    error,
                    "webhook events cannot be swept now; retrying in an hour"
                );
            }
        }
        if Instant::now() > end {
            break;
        }
    }
    if removed > 0 {
        info!(removed, "old webhook events were removed or given up");
    }
    Ok(removed)
}

/// Sweeps one webhook: each statement removes up to 5,000 events or makes them dead letters. Returns how many events
/// were removed or became dead letters.
async fn sweep_batch(
    postgres: &PostgresStore,
    key: &WebhookKey,
    sweep: &Sweep,
    metrics: &WebhookMetrics,
) -> Result<u64, StoreError> {
    let swept = match sweep {
        Sweep::WithoutApp => return postgres.delete_events_of_deleted_app(key).await,
        Sweep::Removed => return postgres.delete_events_of_removed_webhook(key).await,
        Sweep::Pull => {
            postgres.delete_old_pulled_events(key).await? + postgres.delete_old_dead_events(key, true).await?
        }
        Sweep::Push => {
            let given_up = postgres.give_up_old_events(key).await?;
            metrics.count(DeliveryOutcome::Dead, given_up);
            given_up + postgres.delete_old_dead_events(key, false).await?
        }
    };
    let excess = postgres.excess_events(key).await?;
    if excess == 0 {
        return Ok(swept);
    }
    let dropped = postgres.drop_events(key, excess).await?;
    metrics.count(DeliveryOutcome::Dropped, dropped);
    warn!(
        app = %key.app,
        webhook = %key.webhook,
        dropped,
        "events of a webhook were dropped: it has more than 1,000,000"
    );
    Ok(swept + dropped)
}
