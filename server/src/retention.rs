//! Deletes accounts whose email address was not verified within the retention of their App.

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

/// Accounts per transaction. A transaction locks their rows for about ten milliseconds.
const ACCOUNTS_PER_TRANSACTION: u32 = 100;
const APPS_PER_STATEMENT: usize = 500;
/// How long one run deletes accounts. The next run, an hour later, deletes the rest.
const MAX_DELETE_TIME: Duration = Duration::from_secs(60);

/// Handles to the metrics; clones share the values.
#[derive(Clone, Debug, Default)]
pub struct RetentionMetrics {
    deleted: Counter,
}

// === impl RetentionMetrics ===

impl RetentionMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "Accounts deleted because their address was not verified in time";
        registry.register("unverified_accounts_deleted", help, this.deleted.clone());
        this
    }
}

/// Deletes the accounts past their retention, and returns their number. Apps take turns, one batch each.
pub async fn delete_unverified(
    stores: &Stores,
    apps: &Apps,
    now: OffsetDateTime,
    metrics: &RetentionMetrics,
) -> Result<u64, StoreError> {
    let begun = Instant::now();
    let mut waiting: VecDeque<(UnverifiedExpiry, Option<UnverifiedPosition>)> = VecDeque::new();
    for apps in apps.all().chunks(APPS_PER_STATEMENT) {
        let rules: Vec<UnverifiedExpiry> = apps.iter().map(|app| retention_rule(app, now)).collect();
        let ids: Vec<String> = rules.iter().map(|rule| rule.claim.app.to_string()).collect();
        let before: Vec<OffsetDateTime> = rules.iter().map(|rule| rule.created_before).collect();
        let concerned = stores.postgres.apps_with_unverified(&ids, &before).await?;
        let rules = rules.into_iter().filter(|rule| concerned.contains(rule.claim.app.as_str()));
        waiting.extend(rules.map(|rule| (rule, None)));
    }
    let mut deleted = 0;
    while let Some((rule, after)) = waiting.pop_front() {
        match stores.delete_unverified(&rule, after, ACCOUNTS_PER_TRANSACTION).await {
            Ok(batch) => {
                deleted += batch.deleted;
                metrics.deleted.inc_by(batch.deleted);
                if batch.next.is_some() {
                    waiting.push_back((rule, batch.next));
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
    let code = app.doc.mail.confirm_code_lifetime_seconds.max(app.doc.mail.reset_code_lifetime_seconds);
    // Twice the lifetime: a mail is retried for up to the lifetime of its code, and that lifetime starts when the mail
    // is sent.
    let code = time::Duration::seconds(2 * i64::from(code));
    UnverifiedExpiry {
        claim: OwnershipClaim::from(&app.doc),
        created_before: now.saturating_sub(days),
        code_sent_before: now.saturating_sub(code),
        now,
    }
}
