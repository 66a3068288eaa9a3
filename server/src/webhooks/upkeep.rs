//! The hourly sweep of the queue: events of removed webhooks, old events, and the oldest events of too long queues.

use std::time::Duration;

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

/// Removes events that nobody will get, and returns how many. Events of Apps without a document stay: the deletion of
/// an App deletes its events.
pub async fn remove_old_events(stores: &Stores, apps: &Apps, metrics: &WebhookMetrics) -> Result<u64, StoreError> {
    let postgres = &stores.postgres;
    let end = Instant::now() + MAX_DELETE_TIME;
    let mut removed = 0;
    let mut current = Vec::new();
    for key in postgres.stored_webhooks().await? {
        let Some(app) = apps.get(key.app.as_str()) else { continue };
        match app.webhook(key.webhook.as_str()).map(|webhook| &webhook.delivery) {
            None => removed += repeat(end, || postgres.delete_events_of_removed_webhook(&key)).await?,
            Some(Delivery::Pull(_)) => {
                removed += repeat(end, || postgres.delete_old_pulled_events(&key)).await?;
                current.push(key);
            }
            Some(Delivery::Push(_)) => current.push(key),
        }
    }
    removed += repeat(end, || postgres.delete_old_dead_events(&current)).await?;
    for key in &current {
        drop_excess(postgres, key, end, metrics).await?;
    }
    if removed > 0 {
        info!(removed, "old webhook events were removed");
    }
    Ok(removed)
}

/// Repeats the deletion of a batch until nothing is left, or until the time is over. Returns the sum.
async fn repeat<F: Future<Output = Result<u64, StoreError>>>(
    end: Instant,
    delete: impl Fn() -> F,
) -> Result<u64, StoreError> {
    let mut sum = 0;
    loop {
        let deleted = delete().await?;
        sum += deleted;
        if deleted == 0 || Instant::now() > end {
            return Ok(sum);
        }
    }
}

async fn drop_excess(
    postgres: &PostgresStore,
    key: &WebhookKey,
    end: Instant,
    metrics: &WebhookMetrics,
) -> Result<(), StoreError> {
    let excess = postgres.excess_events(key).await?;
    let mut dropped = 0;
    while dropped < excess && Instant::now() < end {
        let now = postgres.drop_events(key, excess - dropped).await?;
        if now == 0 {
            break;
        }
        dropped += now;
    }
    if dropped > 0 {
        metrics.count(DeliveryOutcome::Dropped, dropped);
        warn!(app = %key.app, webhook = %key.webhook, dropped, "the oldest events of a webhook were dropped: too many wait");
    }
    Ok(())
}
