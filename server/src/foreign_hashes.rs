//! Removes foreign password hashes at the end of their App's retention, unless a login has replaced them. Also removes
//! each class (hash function and cost) that no user's hash belongs to.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use time::OffsetDateTime;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::{
    config::Apps,
    domain::{
        app::App,
        foreign_hash::HashClass,
        ports::{PasswordHasher, StoreError},
    },
    store::{
        Stores,
        postgres::{ForeignHashExpiry, OwnershipClaim},
    },
};

/// Maximum number of hashes per transaction. A transaction locks the rows for about ten milliseconds.
const HASHES_PER_TRANSACTION: u32 = 100;
/// The time after which one run stops. The next run, an hour later, removes the remaining hashes.
const MAX_REMOVE_TIME: Duration = Duration::from_secs(60);

/// Removes expired hashes and unused classes. Returns how many hashes were removed. Apps without a retention keep their
/// hashes. The Apps take turns: each transaction removes hashes of the next App.
pub async fn apply_retention(stores: &Stores, apps: &Apps, now: OffsetDateTime) -> Result<u64, StoreError> {
    let begun = Instant::now();
    let apps = apps.all();
    let native = stores.hashing.class_of_new_hashes();
    let mut queue: VecDeque<ForeignHashExpiry> = apps.iter().filter_map(|app| expiry(app, native, now)).collect();
    let mut removed = 0;
    while let Some(expiry) = queue.pop_front() {
        match stores.postgres.remove_expired_foreign_hashes(&expiry, HASHES_PER_TRANSACTION).await {
            Ok(count) => {
                removed += count;
                if count >= u64::from(HASHES_PER_TRANSACTION) {
                    queue.push_back(expiry);
                }
            }
            // Continue with the other Apps. This App is retried an hour later.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(
                    app = %expiry.claim.app,
                    error,
                    "foreign password hashes cannot be removed now; retrying in an hour"
                );
            }
        }
        if begun.elapsed() > MAX_REMOVE_TIME {
            break;
        }
    }
    if removed > 0 {
        info!(removed, "foreign password hashes were removed because their users did not log in in time");
    }
    let classes = stores.postgres.sweep_hash_classes().await?;
    if classes > 0 {
        info!(classes, "classes of foreign password hashes were removed because no user has such a hash");
    }
    Ok(removed)
}

/// Returns which hashes of the App have expired. `None` if the App keeps its foreign hashes.
fn expiry(app: &App, native: HashClass, now: OffsetDateTime) -> Option<ForeignHashExpiry> {
    let retention = app.password.foreign_hash_retention?;
    let claim = OwnershipClaim::from(&app.doc);
    Some(ForeignHashExpiry {
        claim,
        imported_before: now.saturating_sub(retention),
        native,
        now,
        webhooks: Arc::clone(&app.webhooks),
    })
}
