//! After each quarter of an hour, copies the counts of refusals from Redis to the audit table. Also applies the
//! retention of audit events, unverified accounts, foreign password hashes and webhook events.

use std::{collections::HashMap, sync::Arc, time::Duration};

use time::{OffsetDateTime, Time};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{debug, info, warn};

use crate::{
    config::Apps,
    domain::{clock::Env, ports::StoreError},
    foreign_hashes,
    retention::{self, RetentionMetrics},
    store::Stores,
    webhooks::{self, WebhookMetrics},
};

/// How often, on average, each server looks for counted refusals that are not in the audit table yet.
const WRITE_INTERVAL: Duration = Duration::from_secs(30);
/// How often one of the servers applies the retention.
const RETENTION_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// The number of monthly partitions that are created in advance, after the partition of the current month.
const MONTHS_AHEAD: i32 = 3;
const APPS_PER_STATEMENT: usize = 100;
/// The maximum number of events that one statement deletes per App.
const MAX_EVENTS_PER_APP: i64 = 100;
/// After a run has deleted events for this time, it deletes at most one more batch of events per App. The next run
/// deletes the rest.
const MAX_DELETE_TIME: Duration = Duration::from_secs(60);

/// Which events are deleted.
struct Retention {
    /// The start of the earliest month from which any App still retains events. Earlier partitions can be dropped.
    month: OffsetDateTime,
    apps: Vec<String>,
    /// For each App in `apps`, at the same index: the time before which its events are deleted.
    delete_before: Vec<OffsetDateTime>,
}

/// Runs until the future is dropped. First waits until `has_all_documents` is true, because only the document of an App
/// states its retention.
pub async fn run(
    apps: Arc<Apps>,
    stores: Stores,
    env: Env,
    metrics: RetentionMetrics,
    webhook_metrics: WebhookMetrics,
    mut has_all_documents: watch::Receiver<bool>,
) {
    if has_all_documents.wait_for(|has_all| *has_all).await.is_err() {
        return;
    }
    let mut is_unavailable = false;
    let mut can_create_partitions = true;
    loop {
        let run = async {
            let written = stores.write_refusals(|app| apps.get(app.as_str()).is_some()).await?;
            debug!(written, "aggregated refusals were written");
            if stores.postgres.try_start_audit_upkeep(RETENTION_INTERVAL).await? {
                // The errors of the next three steps are returned later, so that the retention of audit events is
                // applied even if one of the steps fails.
                let accounts_deleted = retention::delete_unverified(&stores, &apps, env.now(), &metrics).await;
                let hashes_removed = foreign_hashes::apply_retention(&stores, &apps, env.now()).await;
                let events_removed = webhooks::remove_old_events(&stores, &apps, &webhook_metrics).await;
                can_create_partitions = apply_retention(&stores, &apps, env.now(), can_create_partitions).await?;
                accounts_deleted?;
                hashes_removed?;
                events_removed?;
            }
            Ok::<_, StoreError>(())
        };
        match run.await {
            Ok(()) => is_unavailable = false,
            Err(error) => {
                if !std::mem::replace(&mut is_unavailable, true) {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        "audit tasks are retried later: a store is unavailable"
                    );
                }
            }
        }
        sleep(WRITE_INTERVAL.mul_f64(0.5 + env.random_unit())).await;
    }
}

/// Creates the next monthly partitions, and deletes events that are older than the retention of their App. Returns
/// whether the database role of this server can create partitions. `can_create_partitions` is the result of the
/// previous run: a warning is logged only when the result changes to false.
pub async fn apply_retention(
    stores: &Stores,
    apps: &Apps,
    now: OffsetDateTime,
    can_create_partitions: bool,
) -> Result<bool, StoreError> {
    let created = stores.postgres.create_audit_partitions(MONTHS_AHEAD).await?;
    if created.is_none() && can_create_partitions {
        warn!("the database role cannot create partitions of audit_events: run `latchkey-server migrate` once a year");
    }
    let retention_days: HashMap<_, _> =
        apps.all().iter().map(|app| (app.id().to_string(), app.doc.audit_retention_days)).collect();
    if let Some(retention) = Retention::new(&retention_days, now) {
        let dropped = stores.postgres.drop_audit_partitions(retention.month, &retention.apps).await?;
        let mut deleted = 0;
        let begun = Instant::now();
        for (apps, before) in
            retention.apps.chunks(APPS_PER_STATEMENT).zip(retention.delete_before.chunks(APPS_PER_STATEMENT))
        {
            loop {
                let deleted_now = stores.postgres.delete_audit_events(apps, before, MAX_EVENTS_PER_APP).await?;
                deleted += deleted_now;
                if deleted_now == 0 || begun.elapsed() > MAX_DELETE_TIME {
                    break;
                }
            }
        }
        if dropped.unwrap_or(0) > 0 || deleted > 0 {
            info!(months = dropped, deleted, "audit events past their retention were deleted");
        }
    }
    Ok(created.is_some())
}

// === impl Retention ===

impl Retention {
    /// Computes which events are deleted. Returns `None` if there is no App. The longest retention is extended to the
    /// start of a month, so that whole partitions can be dropped. The events of Apps with a shorter retention are
    /// deleted when their retention is over.
    fn new(retention_days: &HashMap<String, u32>, now: OffsetDateTime) -> Option<Self> {
        let ago = |days: u32| now.saturating_sub(time::Duration::days(i64::from(days)));
        let longest = *retention_days.values().max()?;
        let month = ago(longest).replace_day(1).ok()?.replace_time(Time::MIDNIGHT);
        let before = |days: u32| if days == longest { month } else { ago(days) };
        let (apps, delete_before) = retention_days.iter().map(|(app, days)| (app.clone(), before(*days))).unzip();
        Some(Self { month, apps, delete_before })
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn the_longest_retention_is_extended_to_the_start_of_a_month_and_shorter_ones_are_exact() {
        let retention_days = HashMap::from([("long".to_owned(), 365), ("short".to_owned(), 30)]);
        let retention = Retention::new(&retention_days, datetime!(2026-11-21 15:00 UTC)).unwrap();
        assert_eq!(retention.month, datetime!(2025-11-01 00:00 UTC));
        let before: HashMap<_, _> = retention.apps.into_iter().zip(retention.delete_before).collect();
        assert_eq!(before["long"], datetime!(2025-11-01 00:00 UTC));
        assert_eq!(before["short"], datetime!(2026-10-22 15:00 UTC));
        assert!(Retention::new(&HashMap::new(), datetime!(2026-11-21 15:00 UTC)).is_none());
    }
}
