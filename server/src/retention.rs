//! Deletes an account if its email address was not verified within the retention period of the account's App.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use prometheus_client::{metrics::counter::Counter, registry::Registry};
use time::OffsetDateTime;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::{
    config::Apps,
    domain::{app::App, ports::StoreError},
    store::{
        Stores,
        postgres::{OwnershipClaim, UnverifiedExpiry, UnverifiedPosition},
    },
};

/// Maximum number of accounts per transaction. A transaction locks the rows for about ten milliseconds.
const ACCOUNTS_PER_TRANSACTION: u32 = 100;
const APPS_PER_STATEMENT: usize = 500;
/// The time after which one run stops. The next run, an hour later, deletes the remaining accounts.
const MAX_DELETE_TIME: Duration = Duration::from_secs(60);

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct RetentionMetrics {
    deleted: Counter,
}

// === impl RetentionMetrics ===

impl RetentionMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Accounts deleted because their address was not verified in time";
        registry.register("unverified_accounts_deleted", help, metrics.deleted.clone());
        metrics
    }
}

/// Deletes the accounts that are past the retention period, and returns how many were deleted. The Apps take turns:
/// each transaction deletes accounts of the next App.
pub async fn delete_unverified(
    stores: &Stores,
    apps: &Apps,
    now: OffsetDateTime,
    metrics: &RetentionMetrics,
) -> Result<u64, StoreError> {
    let begun = Instant::now();
    let mut queue: VecDeque<(UnverifiedExpiry, Option<UnverifiedPosition>)> = VecDeque::new();
    for apps in apps.all().chunks(APPS_PER_STATEMENT) {
        let rules: Vec<UnverifiedExpiry> = apps.iter().map(|app| retention_rule(app, now)).collect();
        let ids: Vec<String> = rules.iter().map(|rule| rule.claim.app.to_string()).collect();
        let created_before: Vec<OffsetDateTime> = rules.iter().map(|rule| rule.created_before).collect();
        let with_unverified = stores.postgres.apps_with_unverified(&ids, &created_before).await?;
        let rules = rules.into_iter().filter(|rule| with_unverified.contains(rule.claim.app.as_str()));
        queue.extend(rules.map(|rule| (rule, None)));
    }
    let mut deleted = 0;
    while let Some((rule, after)) = queue.pop_front() {
        match stores.delete_unverified(&rule, after, ACCOUNTS_PER_TRANSACTION).await {
            Ok(batch) => {
                deleted += batch.deleted;
                metrics.deleted.inc_by(batch.deleted);
                if batch.next.is_some() {
                    queue.push_back((rule, batch.next));
                }
            }
            // Continue with the other Apps. This App is retried an hour later.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(app = %rule.claim.app, error, "unverified accounts cannot be deleted now; retrying in an hour");
            }
        }
        if begun.elapsed() > MAX_DELETE_TIME {
            break;
        }
    }
    if deleted > 0 {
        info!(deleted, "accounts were deleted because their address was not verified in time");
    }
    Ok(deleted)
}

fn retention_rule(app: &Arc<App>, now: OffsetDateTime) -> UnverifiedExpiry {
    let days = time::Duration::days(i64::from(app.doc.unverified_retention_days));
    let code_lifetime = app.doc.mail.confirm_code_lifetime_seconds.max(app.doc.mail.reset_code_lifetime_seconds);
    // Twice the lifetime: the mail with the code is retried for up to one lifetime, and the code stays valid for one
    // lifetime after the mail is sent.
    let max_code_age = time::Duration::seconds(2 * i64::from(code_lifetime));
    UnverifiedExpiry {
        claim: OwnershipClaim::from(&app.doc),
        created_before: now.saturating_sub(days),
        code_sent_before: now.saturating_sub(max_code_age),
        now,
        webhooks: Arc::clone(&app.webhooks),
    }
}
