//! Refusals, counted by all servers together per quarter of an hour, until one server writes them to Postgres.

use std::{collections::HashMap, sync::Weak, time::Duration};

use latchkey_crds::types::AppId;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use redis::{Pipeline, Value};
use tokio::{sync::mpsc, time::Instant};
use tracing::{info, warn};

use super::super::{RedisStore, Shared, metrics::Operation, script_command};
use crate::domain::{audit::Refusal, ports::StoreError};

/// The length of a quarter of an hour. count_refusal.lua contains the same number.
pub(crate) const QUARTER_MILLIS: i64 = 15 * 60 * 1000;
/// How long refusals are kept if Postgres is unavailable.
const TTL_MILLIS: i64 = 24 * 60 * 60 * 1000;
/// Maximum numbers of rows in an App's quarter of an hour: client addresses per user, rows with a user, rows without
/// one. Refusals beyond them are counted in one row per kind, so that nobody can fill the table.
const MAX_CLIENTS_PER_USER: i64 = 20;
const MAX_USER_ROWS: i64 = 2000;
const MAX_ANONYMOUS_ROWS: i64 = 200;
/// Refusals that can wait to be counted. Further ones are lost.
const QUEUE_CAPACITY: usize = 4096;
/// Refusals counted in one call.
const BATCH_SIZE: usize = 64;
/// How often a server adds an App's quarter to `DUE_KEY` again.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(60);
/// The key of all quarters with refusals, scored by their end.
const DUE_KEY: &str = "lk:{:audit}:due";

/// A handle to the task that counts.
pub(in crate::store::redis) struct RefusalCounter {
    queue: mpsc::Sender<(AppId, Refusal)>,
    lost: Counter,
}

/// A finished quarter of an hour of an App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QuarterHour {
    pub(crate) app: AppId,
    /// Quarters of an hour since 1970.
    pub(crate) number: i64,
}

/// The content of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CountedRefusal {
    /// The row's name in its quarter: kind, user and client address, separated by spaces. The last two can be empty.
    pub(crate) name: String,
    pub(crate) count: i64,
}

/// What the counting task knows about Redis.
#[derive(Default)]
struct CounterState {
    /// The quarter by Redis's clock in the last reply; 0 before the first one.
    quarter: i64,
    announced: HashMap<AppId, (i64, Instant)>,
}

fn rows_key(app: &AppId, quarter: i64) -> String {
    format!("lk:{{{app}:audit}}:refusals:{quarter}")
}

fn accounts_key(app: &AppId, quarter: i64) -> String {
    format!("lk:{{{app}:audit}}:accounts:{quarter}")
}

// === impl RefusalCounter ===

impl RefusalCounter {
    /// Starts the task that counts. It ends when the last handle to Redis is dropped.
    pub(in crate::store::redis) fn start(redis: Weak<Shared>, clock_offset: time::Duration) -> Self {
        let (queue, refusals) = mpsc::channel(QUEUE_CAPACITY);
        let lost = Counter::default();
        tokio::spawn(run_counter(redis, clock_offset, refusals, lost.clone()));
        Self { queue, lost }
    }
}

async fn run_counter(
    redis: Weak<Shared>,
    clock_offset: time::Duration,
    mut refusals: mpsc::Receiver<(AppId, Refusal)>,
    lost: Counter,
) {
    let mut batch = Vec::with_capacity(BATCH_SIZE);
    let mut known = CounterState::default();
    let mut losing = false;
    while refusals.recv_many(&mut batch, BATCH_SIZE).await > 0 {
        let Some(shared) = redis.upgrade() else { return };
        let redis = RedisStore { shared, clock_offset };
        match redis.count_refusals(&mut known, &mut batch).await {
            Ok(()) => {
                if std::mem::take(&mut losing) {
                    info!("refusals are counted again");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut losing, true) {
                    warn!(error = &error as &dyn std::error::Error, "refusals cannot be counted; they are lost");
                }
            }
        }
        lost.inc_by(batch.len() as u64);
        batch.clear();
    }
}

// === impl CounterState ===

impl CounterState {
    /// Apps of the batch that were not added to `DUE_KEY` for this quarter recently.
    fn unannounced(&self, batch: &[(AppId, Refusal)]) -> Vec<AppId> {
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
}

// === impl RedisStore ===

impl RedisStore {
    /// Registers metrics under names without a prefix; the caller passes the registry of audit, which has the prefix.
    pub fn register_audit_metrics(&self, registry: &mut Registry) {
        registry.register(
            "refusals_lost",
            "Refusals that could not be counted for audit",
            self.shared.refusal_counter.lost.clone(),
        );
    }

    pub(crate) fn enqueue_refusal(&self, app: &AppId, refusal: Refusal) {
        if self.shared.refusal_counter.queue.try_send((app.clone(), refusal)).is_err() {
            self.shared.refusal_counter.lost.inc();
        }
    }

    /// Counts a batch. Refusals that were not counted stay in it.
    async fn count_refusals(
        &self,
        known: &mut CounterState,
        batch: &mut Vec<(AppId, Refusal)>,
    ) -> Result<(), StoreError> {
        // One attempt can be needed to learn the quarter, one more if the quarter ends meanwhile.
        for _ in 0..3 {
            if known.quarter > 0 {
                self.announce_due(known, batch).await?;
            }
            let mut commands = Pipeline::new();
            for (app, refusal) in batch.iter() {
                let keys = [
                    rows_key(app, known.quarter),
                    accounts_key(app, known.quarter),
                    accounts_key(app, known.quarter - 1),
                ];
                let arguments = [
                    self.offset_millis(),
                    known.quarter.to_string(),
                    refusal.kind.event_kind().as_str().to_owned(),
                    refusal.account.as_ref().map_or_else(String::new, |account| account.as_str().to_owned()),
                    refusal.user.map_or_else(String::new, |user| user.to_string()),
                    refusal.client.to_string(),
                    MAX_CLIENTS_PER_USER.to_string(),
                    MAX_USER_ROWS.to_string(),
                    MAX_ANONYMOUS_ROWS.to_string(),
                    TTL_MILLIS.to_string(),
                ];
                commands.add_command(script_command(&self.scripts().count_refusal, &keys, &arguments));
            }
            let answers = self.send(Operation::CountRefusals, &commands).await?;
            let mut left = Vec::new();
            for (refusal, answer) in batch.drain(..).zip(answers) {
                match answer {
                    Value::Int(0) => {}
                    Value::Int(quarter) => {
                        known.quarter = quarter;
                        left.push(refusal);
                    }
                    _ => return Err(self.unexpected_value()),
                }
            }
            *batch = left;
            if batch.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Adds the quarter to `DUE_KEY` before anything is counted in it, so that counted refusals are always found.
    async fn announce_due(&self, known: &mut CounterState, batch: &[(AppId, Refusal)]) -> Result<(), StoreError> {
        let unannounced = known.unannounced(batch);
        if unannounced.is_empty() {
            return Ok(());
        }
        let quarter = known.quarter;
        let mut add = redis::cmd("ZADD");
        add.arg(DUE_KEY).arg("NX");
        for app in &unannounced {
            add.arg((quarter + 1) * QUARTER_MILLIS).arg(format!("{app} {quarter}"));
        }
        let mut commands = Pipeline::new();
        commands.add_command(add);
        commands.cmd("PEXPIRE").arg(DUE_KEY).arg(TTL_MILLIS);
        self.send(Operation::CountRefusals, &commands).await?;
        known.announced.retain(|_, (told, _)| *told == quarter);
        let now = Instant::now();
        known.announced.extend(unannounced.into_iter().map(|app| (app, (quarter, now))));
        Ok(())
    }

    /// Finished quarters with refusals, oldest first, without the first `skip`.
    pub(crate) async fn due_quarters(&self, skip: usize, most: usize) -> Result<Vec<QuarterHour>, StoreError> {
        let arguments = [self.offset_millis(), skip.to_string(), most.to_string(), TTL_MILLIS.to_string()];
        let mut commands = Pipeline::new();
        commands.add_command(script_command(&self.scripts().due_quarters, &[DUE_KEY.to_owned()], &arguments));
        let answers = self.send(Operation::WriteRefusals, &commands).await?;
        let value = answers.into_iter().next().ok_or_else(|| self.unexpected_value())?;
        let members: Vec<String> = redis::from_redis_value(value).map_err(|_| self.unexpected_value())?;
        let parse = |member: &str| {
            let (app, number) = member.split_once(' ')?;
            Some(QuarterHour { app: app.parse().ok()?, number: number.parse().ok()? })
        };
        members.iter().map(|member| parse(member).ok_or_else(|| self.unexpected_value())).collect()
    }

    pub(crate) async fn quarter_refusals(&self, quarter: &QuarterHour) -> Result<Vec<CountedRefusal>, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("HGETALL").arg(rows_key(&quarter.app, quarter.number));
        let answers = self.send(Operation::WriteRefusals, &commands).await?;
        let value = answers.into_iter().next().ok_or_else(|| self.unexpected_value())?;
        let fields: HashMap<String, i64> = redis::from_redis_value(value).map_err(|_| self.unexpected_value())?;
        let counted = fields.into_iter().filter(|(name, _)| !name.starts_with('#'));
        Ok(counted.map(|(name, count)| CountedRefusal { name, count }).collect())
    }

    /// Deletes the counts of a quarter that is written to Postgres.
    pub(crate) async fn delete_refusals(&self, quarter: &QuarterHour) -> Result<(), StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("UNLINK").arg(rows_key(&quarter.app, quarter.number));
        self.send(Operation::WriteRefusals, &commands).await?;
        // Last: if the deletion above fails, the quarter is still found.
        let mut commands = Pipeline::new();
        commands.cmd("ZREM").arg(DUE_KEY).arg(format!("{} {}", quarter.app, quarter.number));
        self.send(Operation::WriteRefusals, &commands).await.map(drop)
    }
}
