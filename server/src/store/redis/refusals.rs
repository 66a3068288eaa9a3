//! Refusals, counted for all servers together by quarters of an hour, until one of them writes them down.

use std::{collections::HashMap, sync::Weak, time::Duration};

use latchkey_crds::types::AppId;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use redis::{Pipeline, Value};
use tokio::{sync::mpsc, time::Instant};
use tracing::{info, warn};

use super::{Redis, Shared, call, metrics::Operation};
use crate::domain::{audit::Refusal, ports::StoreError};

/// refuse.lua has the same number.
pub(crate) const QUARTER_MILLIS: i64 = 15 * 60 * 1000;
/// How long refusals wait to be written where Postgres is away.
const LIFE_MILLIS: i64 = 24 * 60 * 60 * 1000;
/// Rows of an App's quarter of an hour: from so many client addresses for one user, of users, of nobody that is there.
/// What is more is counted in one row a kind, so nobody fills the table.
const CLIENTS_PER_USER: i64 = 20;
const ROWS_OF_USERS: i64 = 2000;
const ROWS_OF_NOBODY: i64 = 200;
/// Refusals that wait to be counted; more are lost.
const ROOM: usize = 4096;
/// Refusals counted in one go.
const BATCH: usize = 64;
/// How often it is said again that an App has something to write down.
const TOLD: Duration = Duration::from_secs(60);
/// All quarters that have refusals, by their end.
const DUE: &str = "lk:{:audit}:due";

/// The way to the task that counts.
pub(super) struct Counting {
    queue: mpsc::Sender<(AppId, Refusal)>,
    lost: Counter,
}

/// An App's quarter of an hour that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quarter {
    pub(crate) app: AppId,
    /// Quarters of an hour since 1970.
    pub(crate) number: i64,
}

/// What is to be one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    /// The row's name in its quarter: kind, user and client address, where there are any.
    pub(crate) name: String,
    pub(crate) count: i64,
}

/// What the counting task knows of Redis.
#[derive(Default)]
struct Known {
    /// By Redis's clock, as the last answer told.
    quarter: i64,
    told: HashMap<AppId, (i64, Instant)>,
}

fn rows_key(app: &AppId, quarter: i64) -> String {
    format!("lk:{{{app}:audit}}:refusals:{quarter}")
}

fn accounts_key(app: &AppId, quarter: i64) -> String {
    format!("lk:{{{app}:audit}}:accounts:{quarter}")
}

// === impl Counting ===

impl Counting {
    /// The task that counts ends when the last handle to Redis goes.
    pub(super) fn start(redis: Weak<Shared>, clock_offset: time::Duration) -> Self {
        let (queue, refusals) = mpsc::channel(ROOM);
        let lost = Counter::default();
        tokio::spawn(count(redis, clock_offset, refusals, lost.clone()));
        Self { queue, lost }
    }
}

async fn count(
    redis: Weak<Shared>,
    clock_offset: time::Duration,
    mut refusals: mpsc::Receiver<(AppId, Refusal)>,
    lost: Counter,
) {
    let mut batch = Vec::with_capacity(BATCH);
    let mut known = Known::default();
    let mut losing = false;
    while refusals.recv_many(&mut batch, BATCH).await > 0 {
        let Some(shared) = redis.upgrade() else { return };
        let redis = Redis { shared, clock_offset };
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

// === impl Known ===

impl Known {
    /// Apps of the batch whose quarter was not told of lately.
    fn untold(&self, batch: &[(AppId, Refusal)]) -> Vec<AppId> {
        let mut apps: Vec<AppId> = batch.iter().map(|(app, _)| app.clone()).collect();
        apps.sort();
        apps.dedup();
        apps.retain(|app| {
            !self.told.get(app).is_some_and(|(quarter, at)| *quarter == self.quarter && at.elapsed() < TOLD)
        });
        apps
    }
}

// === impl Redis ===

impl Redis {
    /// Under names without a prefix: the registry is to be one of audit's own.
    pub fn register_audit(&self, registry: &mut Registry) {
        registry.register(
            "refusals_lost",
            "Refusals that could not be counted for audit",
            self.shared.refusals.lost.clone(),
        );
    }

    pub(crate) fn refuse(&self, app: &AppId, refusal: Refusal) {
        if self.shared.refusals.queue.try_send((app.clone(), refusal)).is_err() {
            self.shared.refusals.lost.inc();
        }
    }

    /// Leaves in the batch what was not counted.
    async fn count_refusals(&self, known: &mut Known, batch: &mut Vec<(AppId, Refusal)>) -> Result<(), StoreError> {
        // Once to learn which quarter it is, once more where it ends meanwhile.
        for _ in 0..3 {
            if known.quarter > 0 {
                self.tell_due(known, batch).await?;
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
                    refusal.kind.event().as_str().to_owned(),
                    refusal.account.as_ref().map_or_else(String::new, |account| account.as_str().to_owned()),
                    refusal.user.map_or_else(String::new, |user| user.to_string()),
                    refusal.client.to_string(),
                    CLIENTS_PER_USER.to_string(),
                    ROWS_OF_USERS.to_string(),
                    ROWS_OF_NOBODY.to_string(),
                    LIFE_MILLIS.to_string(),
                ];
                commands.add_command(call(&self.scripts().refuse, &keys, &arguments));
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
                    _ => return Err(self.unreadable()),
                }
            }
            *batch = left;
            if batch.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Before the first is counted: what is counted is always found.
    async fn tell_due(&self, known: &mut Known, batch: &[(AppId, Refusal)]) -> Result<(), StoreError> {
        let untold = known.untold(batch);
        if untold.is_empty() {
            return Ok(());
        }
        let quarter = known.quarter;
        let mut add = redis::cmd("ZADD");
        add.arg(DUE).arg("NX");
        for app in &untold {
            add.arg((quarter + 1) * QUARTER_MILLIS).arg(format!("{app} {quarter}"));
        }
        let mut commands = Pipeline::new();
        commands.add_command(add);
        commands.cmd("PEXPIRE").arg(DUE).arg(LIFE_MILLIS);
        self.send(Operation::CountRefusals, &commands).await?;
        known.told.retain(|_, (told, _)| *told == quarter);
        let now = Instant::now();
        known.told.extend(untold.into_iter().map(|app| (app, (quarter, now))));
        Ok(())
    }

    /// Quarters that are over and have refusals, some of them passed over.
    pub(crate) async fn due_refusals(&self, skip: usize, most: usize) -> Result<Vec<Quarter>, StoreError> {
        let arguments = [self.offset_millis(), skip.to_string(), most.to_string(), LIFE_MILLIS.to_string()];
        let mut commands = Pipeline::new();
        commands.add_command(call(&self.scripts().due, &[DUE.to_owned()], &arguments));
        let answers = self.send(Operation::WriteRefusals, &commands).await?;
        let value = answers.into_iter().next().ok_or_else(|| self.unreadable())?;
        let members: Vec<String> = redis::from_redis_value(value).map_err(|_| self.unreadable())?;
        let parse = |member: &str| {
            let (app, number) = member.split_once(' ')?;
            Some(Quarter { app: app.parse().ok()?, number: number.parse().ok()? })
        };
        members.iter().map(|member| parse(member).ok_or_else(|| self.unreadable())).collect()
    }

    pub(crate) async fn refusals(&self, quarter: &Quarter) -> Result<Vec<Counted>, StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("HGETALL").arg(rows_key(&quarter.app, quarter.number));
        let answers = self.send(Operation::WriteRefusals, &commands).await?;
        let value = answers.into_iter().next().ok_or_else(|| self.unreadable())?;
        let fields: HashMap<String, i64> = redis::from_redis_value(value).map_err(|_| self.unreadable())?;
        let counted = fields.into_iter().filter(|(name, _)| !name.starts_with('#'));
        Ok(counted.map(|(name, count)| Counted { name, count }).collect())
    }

    /// They are written down.
    pub(crate) async fn forget_refusals(&self, quarter: &Quarter) -> Result<(), StoreError> {
        let mut commands = Pipeline::new();
        commands.cmd("UNLINK").arg(rows_key(&quarter.app, quarter.number));
        self.send(Operation::WriteRefusals, &commands).await?;
        // Second: what is still there is still found.
        let mut commands = Pipeline::new();
        commands.cmd("ZREM").arg(DUE).arg(format!("{} {}", quarter.app, quarter.number));
        self.send(Operation::WriteRefusals, &commands).await.map(drop)
    }
}
