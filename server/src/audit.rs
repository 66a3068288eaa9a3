//! Writes refusals down when their quarter of an hour is over, and keeps events and unverified accounts within their Apps'
//! times.

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
    retention::{self, RetentionMetrics},
    store::Stores,
};

/// How often each server looks for refusals to write, so that of several one is soon there.
const LOOK: Duration = Duration::from_secs(30);
/// How often one of all servers keeps the table.
const UPKEEP: Duration = Duration::from_secs(60 * 60);
/// Months that are made ahead.
const MONTHS_AHEAD: i32 = 3;
/// Apps of one statement, and events of each of them that it deletes at most.
const APPS: usize = 100;
const EVENTS: i64 = 100;
/// For how long events are deleted before others have their turn.
const TURN: Duration = Duration::from_secs(60);

/// From when on an App's events are kept, by how long each is to be kept.
struct Retention {
    /// The beginning of the first month of which any App keeps events.
    month: OffsetDateTime,
    apps: Vec<String>,
    before: Vec<OffsetDateTime>,
}

/// Runs until it is dropped. `current` says that the whole set of documents was read: for how long an App keeps events and
/// unverified accounts, its document alone says.
pub async fn run(
    apps: Arc<Apps>,
    stores: Stores,
    env: Env,
    metrics: RetentionMetrics,
    mut current: watch::Receiver<bool>,
) {
    if current.wait_for(|current| *current).await.is_err() {
        return;
    }
    let mut away = false;
    let mut may_make = true;
    loop {
        let done = async {
            let written = stores.write_refusals(|app| apps.get(app.as_str()).is_some()).await?;
            debug!(written, "refusals of quarters of an hour");
            if stores.postgres.audit_turn(UPKEEP).await? {
                // Neither waits for the other to succeed.
                let swept = retention::sweep(&stores, &apps, env.now(), &metrics).await;
                may_make = keep(&stores, &apps, env.now(), may_make).await?;
                swept?;
            }
            Ok::<_, StoreError>(())
        };
        match done.await {
            Ok(()) => away = false,
            Err(error) => {
                if !std::mem::replace(&mut away, true) {
                    warn!(error = &error as &dyn std::error::Error, "audit waits for the stores");
                }
            }
        }
        sleep(LOOK.mul_f64(0.5 + env.unit())).await;
    }
}

/// Makes months ahead, and lets go of what is older than its App keeps it. Whether this server may make months.
pub async fn keep(stores: &Stores, apps: &Apps, now: OffsetDateTime, may_make: bool) -> Result<bool, StoreError> {
    let made = stores.postgres.make_audit_months(MONTHS_AHEAD).await?;
    if made.is_none() && may_make {
        warn!("this server's role may not make partitions of audit_events: run `latchkey-server migrate` once a year");
    }
    let kept: HashMap<_, _> =
        apps.all().iter().map(|app| (app.id().to_string(), app.doc.audit_retention_days)).collect();
    if let Some(retention) = Retention::of(&kept, now) {
        let dropped = stores.postgres.drop_audit_months(retention.month, &retention.apps).await?;
        let mut deleted = 0;
        let begun = Instant::now();
        for (apps, before) in retention.apps.chunks(APPS).zip(retention.before.chunks(APPS)) {
            loop {
                let some = stores.postgres.delete_audit_events(apps, before, EVENTS).await?;
                deleted += some;
                if some == 0 || begun.elapsed() > TURN {
                    break;
                }
            }
        }
        if dropped.unwrap_or(0) > 0 || deleted > 0 {
            info!(months = dropped, deleted, "audit events are past their time");
        }
    }
    Ok(made.is_some())
}

// === impl Retention ===

impl Retention {
    /// None where there is no App. What the App with the longest time keeps goes by whole months; what the others keep
    /// goes on its day.
    fn of(kept: &HashMap<String, u32>, now: OffsetDateTime) -> Option<Self> {
        let ago = |days: u32| now.saturating_sub(time::Duration::days(i64::from(days)));
        let longest = *kept.values().max()?;
        let month = ago(longest).replace_day(1).ok()?.replace_time(Time::MIDNIGHT);
        let before = |days: u32| if days == longest { month } else { ago(days) };
        let (apps, before) = kept.iter().map(|(app, days)| (app.clone(), before(*days))).unzip();
        Some(Self { month, apps, before })
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn the_longest_goes_by_months_and_the_others_by_days() {
        let kept = HashMap::from([("long".to_owned(), 365), ("short".to_owned(), 30)]);
        let retention = Retention::of(&kept, datetime!(2026-11-21 15:00 UTC)).unwrap();
        assert_eq!(retention.month, datetime!(2025-11-01 00:00 UTC));
        let before: HashMap<_, _> = retention.apps.into_iter().zip(retention.before).collect();
        assert_eq!(before["long"], datetime!(2025-11-01 00:00 UTC));
        assert_eq!(before["short"], datetime!(2026-10-22 15:00 UTC));
        assert!(Retention::of(&HashMap::new(), datetime!(2026-11-21 15:00 UTC)).is_none());
    }
}
