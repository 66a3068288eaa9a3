//! Counts refusals in Redis. All servers together count the refusals of an App in a quarter of an hour, until one
//! server writes the counts to Postgres.

use std::{collections::HashMap, time::Duration};

use latchkey_crds::types::AppId;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use redis::{Cmd, Pipeline, Value};
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    super::{
        handle::{RedisStore, WeakRedisStore},
        metrics::Operation,
        scripts::script_command,
    },
    refusal_queue::QueuedRefusals,
};
use crate::domain::{audit::Refusal, ports::StoreError};

/// The length of a quarter of an hour. count_refusal.lua contains the same number.
pub(crate) const QUARTER_MILLIS: i64 = 15 * 60 * 1000;
/// How long Redis stores refusals that no server has written to Postgres.
const TTL_MILLIS: i64 = 24 * 60 * 60 * 1000;
/// Maximum number of rows of one user in a quarter of an hour. Further refusals of the user are counted in one row per
/// kind, without the client address. This maximum and the next two maxima prevent somebody from filling the table of
/// audit events.
const MAX_ROWS_PER_USER: i64 = 20;
/// Maximum number of rows with a user that an App can have in a quarter of an hour. Further refusals are counted in one
/// row per kind, without user and client address.
const MAX_USER_ROWS: i64 = 2000;
/// Maximum number of rows without a user that an App can have in a quarter of an hour. Further refusals are counted in
/// one row per kind, without the client address.
const MAX_ANONYMOUS_ROWS: i64 = 200;
/// Maximum number of queued refusals that are sent to Redis together.
const BATCH_SIZE: usize = 64;
/// How often a server adds the current quarter of an hour of an App to `DUE_KEY` again.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(60);
/// The key of the sorted set of all quarters of an hour with refusals, scored by their end.
const DUE_KEY: &str = "lk:{:audit}:due";

/// A finished quarter of an hour of an App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuarterHour {
    pub(crate) app: AppId,
    /// The number of quarters of an hour from 1970 to this one.
    pub(crate) number: i64,
}

/// One row of a quarter of an hour: the number of refusals of one kind, user and client address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CountedRefusal {
    /// The row's name in its quarter: kind, user and client address, separated by spaces. User and client address can
    /// be empty.
    pub(crate) name: String,
    pub(crate) count: i64,
}

/// The state that the counting task keeps between batches.
#[derive(Default)]
struct CountingState {
    /// The number of the current quarter of an hour, as Redis last reported it; 0 before the first report.
    quarter: i64,
    /// For each App, the last quarter that was added to `DUE_KEY`, and when it was last added.
    announced: HashMap<AppId, (i64, Instant)>,
}

fn rows_key(app: &AppId, quarter: i64) -> String {
    format!("lk:{{{app}:audit}}:refusals:{quarter}")
}

fn accounts_key(app: &AppId, quarter: i64) -> String {
    format!("lk:{{{app}:audit}}:accounts:{quarter}")
}

/// Counts queued refusals. Ends when the last handle to Redis is dropped.
pub(in crate::store::redis) async fn count_queued_refusals(
    redis: WeakRedisStore,
    mut queue: QueuedRefusals,
    lost: Counter,
) {
    let mut batch = Vec::with_capacity(BATCH_SIZE);
    let mut state = CountingState::default();
    let mut is_losing = false;
    while queue.recv_many(&mut batch, BATCH_SIZE).await > 0 {
        let Some(redis) = redis.upgrade() else { return };
        match redis.count_refusals(&mut state, &mut batch).await {
            Ok(()) => {
                if std::mem::take(&mut is_losing) {
                    info!("refusals are counted again");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut is_losing, true) {
                    warn!(error = &error as &dyn std::error::Error, "refusals cannot be counted; they are lost");
                }
            }
        }
        lost.inc_by(batch.len() as u64);
        batch.clear();
    }
}

// === impl CountingState ===

impl CountingState {
    /// Returns the Apps in the batch for which the current quarter was not recently added to `DUE_KEY`.
    fn apps_to_announce(&self, batch: &[(AppId, Refusal)]) -> Vec<AppId> {
        let mut apps: Vec<AppId> = batch.iter().map(|(app, _)| app.clone()).collect();
        apps.sort();
        apps.dedup();
        apps.retain(|app| {
            !self
                .announced
                .get(app)
                .is_some_and(|(quarter, at)| *quarter == self.quarter && at.elapsed() < ANNOUNCE_INTERVAL)
        });
        apps
    }

    /// Removes the counted refusals from the batch. `values` are the values that Redis returned, in the order of the
    /// batch. Returns false if one of them is unexpected.
    fn remove_counted(&mut self, batch: &mut Vec<(AppId, Refusal)>, values: Vec<Value>) -> bool {
        let mut values = values.into_iter();
        let mut are_valid = true;
        batch.retain(|_| match values.next() {
            Some(Value::Int(0)) => false,
            Some(Value::Int(quarter)) => {
                self.quarter = quarter;
                true
            }
            _ => {
                are_valid = false;
                true
            }
        });
        are_valid
    }
}

// === impl RedisStore ===

impl RedisStore {
    /// Registers the metrics under names without a prefix. `registry` must add the prefix `audit`.
    pub fn register_audit_metrics(&self, registry: &mut Registry) {
        let lost = self.refusal_queue().lost().clone();
        registry.register("refusals_lost", "Refusals that could not be counted for audit", lost);
    }

    pub(crate) fn enqueue_refusal(&self, app: &AppId, refusal: Refusal) {
        self.refusal_queue().enqueue(app, refusal);
    }

    /// Counts a batch. Refusals that were not counted stay in the batch.
    async fn count_refusals(
        &self,
        state: &mut CountingState,
        batch: &mut Vec<(AppId, Refusal)>,
    ) -> Result<(), StoreError> {
        // The first attempt can fail because this server does not know the current quarter, the second attempt because
        // a new quarter begins.
        for _ in 0..3 {
            if state.quarter > 0 {
                self.announce_due(state, batch).await?;
            }
            let mut commands = Pipeline::new();
            for (app, refusal) in batch.iter() {
                commands.add_command(self.count_command(app, refusal, state.quarter));
            }
            let values = self.send(Operation::CountRefusals, &commands).await?;
            if !state.remove_counted(batch, values) {
                return Err(self.unexpected_value());
            }
            if batch.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn count_command(&self, app: &AppId, refusal: &Refusal, quarter: i64) -> Cmd {
        let keys = [rows_key(app, quarter), accounts_key(app, quarter), accounts_key(app, quarter - 1)];
        let arguments = [
            self.offset_millis(),
            quarter.to_string(),
            refusal.kind.event_kind().as_str().to_owned(),
            refusal.account.as_ref().map_or_else(String::new, |account| account.as_str().to_owned()),
            refusal.user.map_or_else(String::new, |user| user.to_string()),
            refusal.client.to_string(),
            MAX_ROWS_PER_USER.to_string(),
            MAX_USER_ROWS.to_string(),
            MAX_ANONYMOUS_ROWS.to_string(),
            TTL_MILLIS.to_string(),
        ];
        script_command(&self.scripts().count_refusal, &keys, &arguments)
    }

    /// Adds the current quarter of the batch's Apps to `DUE_KEY`. This must happen before refusals are counted, so that
    /// `due_quarters` always finds the counts.
    async fn announce_due(&self, state: &mut CountingState, batch: &[(AppId, Refusal)]) -> Result<(), StoreError> {
        let apps_to_announce = state.apps_to_announce(batch);
        if apps_to_announce.is_empty() {
            return Ok(());
        }
        let quarter = state.quarter;
        let mut add = redis::cmd("ZADD");
        add.arg(DUE_KEY).arg("NX");
        for app in &apps_to_announce {
            add.arg((quarter + 1) * QUARTER_MILLIS).arg(format!("{app} {quarter}"));
        }
        let mut commands = Pipeline::new();
        commands.add_command(add);
        commands.cmd("PEXPIRE").arg(DUE_KEY).arg(TTL_MILLIS);
        self.send(Operation::CountRefusals, &commands).await?;
        state.announced.retain(|_, (announced, _)| *announced == quarter);
        let now = Instant::now();
        state.announced.extend(apps_to_announce.into_iter().map(|app| (app, (quarter, now))));
        Ok(())
    }

    /// Returns the finished quarters with refusals, oldest first. Skips `skip` quarters and returns at most `limit`.
    pub(crate) async fn due_quarters(&self, skip: usize, limit: usize) -> Result<Vec<QuarterHour>, StoreError> {
        let arguments = [self.offset_millis(), skip.to_string(), limit.to_string(), TTL_MILLIS.to_string()];
        let command = script_command(&self.scripts().due_quarters, &[DUE_KEY.to_owned()], &arguments);
        let value = self.send_one(Operation::WriteRefusals, command).await?;
        let members: Vec<String> = self.parse(value)?;
        let parse = |member: &str| {
            let (app, number) = member.split_once(' ')?;
            Some(QuarterHour { app: app.parse().ok()?, number: number.parse().ok()? })
        };
        members.iter().map(|member| parse(member).ok_or_else(|| self.unexpected_value())).collect()
    }

    pub(crate) async fn quarter_refusals(&self, quarter: &QuarterHour) -> Result<Vec<CountedRefusal>, StoreError> {
        let mut command = redis::cmd("HGETALL");
        command.arg(rows_key(&quarter.app, quarter.number));
        let value = self.send_one(Operation::WriteRefusals, command).await?;
        let fields: HashMap<String, i64> = self.parse(value)?;
        let counted = fields.into_iter().filter(|(name, _)| !name.starts_with('#'));
        Ok(counted.map(|(name, count)| CountedRefusal { name, count }).collect())
    }

    /// Deletes the counts of a quarter of an hour that were written to Postgres.
    pub(crate) async fn delete_refusals(&self, quarter: &QuarterHour) -> Result<(), StoreError> {
        let mut delete = redis::cmd("UNLINK");
        delete.arg(rows_key(&quarter.app, quarter.number));
        self.send_one(Operation::WriteRefusals, delete).await?;
        // This is the last step: if the deletion of the counts fails, `due_quarters` still returns the quarter.
        let mut remove = redis::cmd("ZREM");
        remove.arg(DUE_KEY).arg(format!("{} {}", quarter.app, quarter.number));
        self.send_one(Operation::WriteRefusals, remove).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{audit::RefusalKind, client::ClientAddress};

    #[test]
    fn refusals_that_were_not_counted_stay_in_the_batch() {
        let app: AppId = "shop".parse().unwrap();
        let refusal = |ip: &str| {
            let client = ClientAddress::from_ip(ip.parse().unwrap());
            (app.clone(), Refusal { kind: RefusalKind::Login, account: None, user: None, client })
        };
        let mut batch = vec![refusal("192.0.2.1"), refusal("192.0.2.2"), refusal("192.0.2.3"), refusal("192.0.2.4")];
        let mut state = CountingState::default();
        let values = vec![Value::Int(0), Value::Int(7), Value::Nil, Value::Int(0)];
        assert!(!state.remove_counted(&mut batch, values), "Nil is unexpected");
        let kept: Vec<_> = batch.iter().map(|(_, refusal)| refusal.client.to_string()).collect();
        assert_eq!(kept, ["192.0.2.2", "192.0.2.3"]);
        assert_eq!(state.quarter, 7);
        assert!(state.remove_counted(&mut batch, vec![Value::Int(0), Value::Int(0)]));
        assert!(batch.is_empty());
    }
}
