//! Deletes accounts whose address was not verified within their App's time.

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
        postgres::{Claim, Position, Unverified},
    },
};

/// Accounts of one transaction. Their rows are locked meanwhile, for some ten milliseconds.
const BATCH: u32 = 100;
/// Apps that are looked at in one statement.
const APPS: usize = 500;
/// For how long accounts are looked at before others have their turn; the rest is done an hour later.
const TURN: Duration = Duration::from_secs(60);

/// What is measured of it; clones count together.
#[derive(Clone, Debug, Default)]
pub struct RetentionMetrics {
    deleted: Counter,
}

// === impl RetentionMetrics ===

impl RetentionMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let help = "Accounts that were deleted because their address was not verified in time";
        registry.register("unverified_accounts_deleted", help, this.deleted.clone());
        this
    }
}

/// Deletes the accounts that are past their time, and returns how many that were. Apps take turns, a batch each.
pub async fn sweep(
    stores: &Stores,
    apps: &Apps,
    now: OffsetDateTime,
    metrics: &RetentionMetrics,
) -> Result<u64, StoreError> {
    let begun = Instant::now();
    let mut waiting: VecDeque<(Unverified, Option<Position>)> = VecDeque::new();
    for apps in apps.all().chunks(APPS) {
        let rules: Vec<Unverified> = apps.iter().map(|app| rule(app, now)).collect();
        let ids: Vec<String> = rules.iter().map(|rule| rule.claim.app.to_string()).collect();
        let before: Vec<OffsetDateTime> = rules.iter().map(|rule| rule.created_before).collect();
        let concerned = stores.postgres.apps_with_unverified(&ids, &before).await?;
        let rules = rules.into_iter().filter(|rule| concerned.contains(rule.claim.app.as_str()));
        waiting.extend(rules.map(|rule| (rule, None)));
    }
    let mut deleted = 0;
    while let Some((rule, after)) = waiting.pop_front() {
        match stores.delete_unverified(&rule, after, BATCH).await {
            Ok(batch) => {
                deleted += batch.deleted;
                metrics.deleted.inc_by(batch.deleted);
                if batch.next.is_some() {
                    waiting.push_back((rule, batch.next));
                }
            }
            // The others still have their turn. This one has its next an hour later.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(app = %rule.claim.app, error, "accounts that were not verified in time are left for now");
            }
        }
        if begun.elapsed() > TURN {
            break;
        }
    }
    if deleted > 0 {
        info!(deleted, "accounts were deleted because their address was not verified in time");
    }
    Ok(deleted)
}

fn rule(app: &Arc<App>, now: OffsetDateTime) -> Unverified {
    let days = time::Duration::days(i64::from(app.doc.unverified_retention_days));
    let code = app.doc.mail.confirm_code_lifetime_seconds.max(app.doc.mail.reset_code_lifetime_seconds);
    // A mail is sent for as long as its code would live, and the code begins to live when it is sent.
    let code = time::Duration::seconds(2 * i64::from(code));
    Unverified {
        claim: Claim::from(&app.doc),
        created_before: now.saturating_sub(days),
        asked_before: now.saturating_sub(code),
        now,
    }
}
