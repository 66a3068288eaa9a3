//! Audit events: one task per server writes them in batches, so that many simultaneous logins need few transactions.
//! Also maintains their table.

use std::{sync::Weak, time::Duration};

use latchkey_crds::types::AppId;
use prometheus_client::{metrics::counter::Counter, registry::Registry};
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tracing::{error, info};
use uuid::Uuid;

use super::{PostgresStore, Shared, errors::CallError};
use crate::domain::{
    audit::{ActivityEntry, Event, EventKind},
    ports::StoreError,
    session::SessionId,
    user::UserId,
};

/// Events that can wait for the writer, about half a megabyte. Further ones are lost.
const QUEUE_CAPACITY: usize = 4096;
/// Events that one statement writes.
const BATCH_SIZE: usize = 256;
/// The minimum time between the starts of two batches: a single event is written at once, many simultaneous logins
/// share a transaction.
const BATCH_INTERVAL: Duration = Duration::from_millis(15);
/// How long a request waits until its event is written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a batch is retried; the first retry is immediate. A restart of Postgres loses no events. Later batches
/// wait.
const RETRY_TIME: Duration = Duration::from_secs(6);
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// The time limit for writing the last events at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// How many events a user sees (specification: Accounts, Audit events).
const MAX_ACTIVITY: i64 = 100;

/// Metrics of audit. Clones share their counters.
#[derive(Clone, Debug)]
pub struct AuditMetrics {
    events: Counter,
    lost: Counter,
}

/// A handle to the task that writes events.
pub(super) struct EventWriter {
    queue: mpsc::Sender<Job>,
    metrics: AuditMetrics,
}

enum Job {
    Write {
        app: AppId,
        event: Box<Event>,
        written: Option<oneshot::Sender<()>>,
    },
    /// Completed when all earlier jobs are done.
    Flush(oneshot::Sender<()>),
}

/// Events by column, for UNNEST.
#[derive(Default)]
struct EventBatch {
    apps: Vec<String>,
    ids: Vec<Uuid>,
    times: Vec<OffsetDateTime>,
    kinds: Vec<String>,
    users: Vec<Option<Uuid>>,
    sessions: Vec<Option<Uuid>>,
    ips: Vec<Option<String>>,
    details: Vec<Option<String>>,
}

/// One event by column.
pub(super) struct EventColumns {
    pub(super) id: Uuid,
    pub(super) at: OffsetDateTime,
    pub(super) kind: &'static str,
    pub(super) session: Option<Uuid>,
    pub(super) ip: Option<String>,
    /// JSON. `None` if there are no details.
    pub(super) detail: Option<String>,
}

/// Refusals of a quarter of an hour of an App, by column.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RefusalColumns {
    pub(crate) ids: Vec<Uuid>,
    pub(crate) kinds: Vec<String>,
    pub(crate) users: Vec<Option<Uuid>>,
    pub(crate) clients: Vec<Option<String>>,
    pub(crate) counts: Vec<i64>,
}

struct ActivityRow {
    at: OffsetDateTime,
    kind: String,
    ip: Option<String>,
    session_id: Option<Uuid>,
    count: i64,
}

// === impl AuditMetrics ===

impl AuditMetrics {
    fn new() -> Self {
        Self { events: Counter::default(), lost: Counter::default() }
    }

    /// Registers metrics under names without a prefix; the caller passes the registry of audit, which has the prefix.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("events", "Audit events that were written", self.events.clone());
        registry.register("lost", "Audit events that could not be written", self.lost.clone());
    }

    fn count_lost(&self, count: usize) {
        self.lost.inc_by(count as u64);
    }
}

// === impl EventWriter ===

impl EventWriter {
    /// Starts the task that writes. It ends when the last handle to Postgres is dropped.
    pub(super) fn start(postgres: Weak<Shared>) -> Self {
        let (queue, jobs) = mpsc::channel(QUEUE_CAPACITY);
        let metrics = AuditMetrics::new();
        tokio::spawn(run_writer(postgres, jobs, metrics.clone()));
        Self { queue, metrics }
    }

    fn push(&self, job: Job) {
        if self.queue.try_send(job).is_err() {
            // The task logs the loss: it knows the cause.
            self.metrics.count_lost(1);
        }
    }
}

/// Writes batches in a loop. While one batch is being written, the next one gathers.
async fn run_writer(postgres: Weak<Shared>, mut jobs: mpsc::Receiver<Job>, metrics: AuditMetrics) {
    let mut batch = Vec::with_capacity(BATCH_SIZE);
    let mut losing = false;
    let mut next = Instant::now();
    loop {
        sleep_until(next).await;
        if jobs.recv_many(&mut batch, BATCH_SIZE).await == 0 {
            return;
        }
        next = Instant::now() + BATCH_INTERVAL;
        let mut columns = EventBatch::default();
        let mut waiting = Vec::new();
        for job in batch.drain(..) {
            match job {
                Job::Write { app, event, written } => {
                    columns.push(&app, &event);
                    waiting.extend(written);
                }
                Job::Flush(flushed) => waiting.push(flushed),
            }
        }
        if columns.ids.is_empty() {
            waiting.into_iter().for_each(notify_waiting);
            continue;
        }
        let Some(shared) = postgres.upgrade() else { return };
        let postgres = PostgresStore { shared };
        let mut written = postgres.insert_events(&columns).await;
        let until = Instant::now() + RETRY_TIME;
        let mut pause = Duration::ZERO;
        while matches!(written, Err(StoreError::Unavailable { .. })) && Instant::now() + pause < until {
            // A broken idle connection, or a failover. The events have ids, so writing them twice is harmless.
            sleep(pause).await;
            pause = RETRY_PAUSE;
            written = postgres.insert_events(&columns).await;
        }
        match written {
            Ok(rows) => {
                metrics.events.inc_by(rows);
                if std::mem::take(&mut losing) {
                    info!("audit events are written again");
                }
            }
            Err(error) => {
                metrics.count_lost(columns.ids.len());
                if !std::mem::replace(&mut losing, true) {
                    let lost = columns.ids.len();
                    error!(
                        error = &error as &dyn std::error::Error,
                        lost, "audit events cannot be written; they are lost"
                    );
                }
            }
        }
        waiting.into_iter().for_each(notify_waiting);
    }
}

/// Notifies a waiting request, which may have given up.
fn notify_waiting(waiting: oneshot::Sender<()>) {
    waiting.send(()).ok();
}

// === impl EventColumns ===

impl EventColumns {
    pub(super) fn from_event(event: &Event) -> Self {
        let detail = if event.detail.is_empty() { None } else { serde_json::to_string(&event.detail).ok() };
        Self {
            id: event.id,
            at: event.at,
            kind: event.kind.as_str(),
            session: event.session.map(|session| session.0),
            ip: event.ip.map(|ip| ip.to_string()),
            detail,
        }
    }
}

// === impl EventBatch ===

impl EventBatch {
    fn push(&mut self, app: &AppId, event: &Event) {
        let EventColumns { id, at, kind, session, ip, detail } = EventColumns::from_event(event);
        self.apps.push(app.to_string());
        self.ids.push(id);
        self.times.push(at);
        self.kinds.push(kind.to_owned());
        self.users.push(event.user.map(|user| user.0));
        self.sessions.push(session);
        self.ips.push(ip);
        self.details.push(detail);
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    pub fn audit_metrics(&self) -> &AuditMetrics {
        &self.shared.audit.metrics
    }

    /// Waits until all events recorded before are written, at most `FLUSH_TIMEOUT`.
    pub async fn flush_audit(&self) {
        let (flushed, done) = oneshot::channel();
        if self.shared.audit.queue.send(Job::Flush(flushed)).await.is_ok() {
            drop(timeout(FLUSH_TIMEOUT, done).await);
        }
    }

    pub(crate) async fn record_event(&self, app: &AppId, event: Event) {
        let (written, done) = oneshot::channel();
        self.shared.audit.push(Job::Write { app: app.clone(), event: Box::new(event), written: Some(written) });
        drop(timeout(WRITE_TIMEOUT, done).await);
    }

    pub(crate) fn record_event_later(&self, app: &AppId, event: Event) {
        self.shared.audit.push(Job::Write { app: app.clone(), event: Box::new(event), written: None });
    }

    async fn insert_events(&self, columns: &EventBatch) -> Result<u64, StoreError> {
        let mut held = self.begin_call("insert_events").await?;
        let (connection, until) = held.parts();
        let answer = timeout_at(until, insert_batch(connection, columns)).await;
        held.end_call(answer)
    }

    pub(crate) async fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> Result<Vec<ActivityEntry>, StoreError> {
        let known: Vec<String> = EventKind::ALL.iter().map(|kind| kind.as_str().to_owned()).collect();
        let mut held = self.begin_call("activity").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            ActivityRow,
            "SELECT at, kind, abbrev(ip) AS ip, session_id, count FROM audit_events
             WHERE app_id = $1 AND user_id = $2 AND at >= $3 AND kind = ANY ($4)
             ORDER BY at DESC, id DESC LIMIT $5",
            app.as_str(),
            user.0,
            since,
            &known,
            MAX_ACTIVITY,
        );
        let answer = timeout_at(until, query.fetch_all(connection)).await;
        let rows = held.end_call(answer)?;
        let activity: Result<Vec<_>, _> = rows.into_iter().map(ActivityEntry::try_from).collect();
        activity.map_err(|fault| self.record_error(fault))
    }
}

async fn insert_batch(connection: &mut PgConnection, columns: &EventBatch) -> Result<u64, sqlx::Error> {
    // The lock orders this with the deletion of an App, as in `create_user`. Events without a user are not written.
    let query = sqlx::query!(
        r#"
        WITH gate AS (
            SELECT app_id, state FROM apps WHERE app_id = ANY ($1) ORDER BY app_id FOR KEY SHARE
        )
        INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
        SELECT app_id, id, at, kind, user_id, session_id, ip::inet, detail::jsonb
        FROM unnest(
            $1::text[], $2::uuid[], $3::timestamptz[], $4::text[], $5::uuid[], $6::uuid[], $7::text[], $8::text[]
        ) AS event (app_id, id, at, kind, user_id, session_id, ip, detail)
        WHERE user_id IS NOT NULL
            AND NOT EXISTS (SELECT FROM gate WHERE gate.app_id = event.app_id AND gate.state <> 'active')
        ON CONFLICT DO NOTHING
        "#,
        &columns.apps,
        &columns.ids,
        &columns.times,
        &columns.kinds,
        &columns.users as &[Option<Uuid>],
        &columns.sessions as &[Option<Uuid>],
        &columns.ips as &[Option<String>],
        &columns.details as &[Option<String>],
    );
    query.execute(connection).await.map(|done| done.rows_affected())
}

/// The result of a function of the schema. `None` if this server's role may not call it.
fn if_permitted(answer: Result<i32, sqlx::Error>) -> Result<Option<i32>, sqlx::Error> {
    /// insufficient_privilege
    const NOT_ALLOWED: &str = "42501";
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(NOT_ALLOWED) => Ok(None),
        Err(error) => Err(error),
    }
}

// === maintenance of the table ===

impl PostgresStore {
    /// Writes an App's refusals of the quarter of an hour that began at `began`. Idempotent.
    pub(crate) async fn insert_refusals(
        &self,
        app: &AppId,
        began: OffsetDateTime,
        rows: &RefusalColumns,
    ) -> Result<(), StoreError> {
        let mut held = self.begin_call("insert_refusals").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            r#"
            WITH gate AS (
                SELECT state FROM apps WHERE app_id = $1 FOR KEY SHARE
            )
            INSERT INTO audit_events (app_id, at, id, kind, user_id, ip, count)
            SELECT $1, $2, id, kind, user_id, ip::inet, count
            FROM unnest($3::uuid[], $4::text[], $5::uuid[], $6::text[], $7::bigint[])
                AS refusal (id, kind, user_id, ip, count)
            WHERE NOT EXISTS (SELECT FROM gate WHERE state <> 'active')
            ON CONFLICT DO NOTHING
            "#,
            app.as_str(),
            began,
            &rows.ids,
            &rows.kinds,
            &rows.users as &[Option<Uuid>],
            &rows.clients as &[Option<String>],
            &rows.counts,
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        let written = held.end_call(answer)?;
        self.shared.audit.metrics.events.inc_by(written.rows_affected());
        Ok(())
    }

    /// Whether this server does the maintenance now. At most one server does it per interval.
    pub(crate) async fn try_start_audit_upkeep(&self, every: Duration) -> Result<bool, StoreError> {
        let mut held = self.begin_call("audit_turn").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            "UPDATE audit_upkeep SET next_at = statement_timestamp() + make_interval(secs => $1)
             WHERE next_at <= statement_timestamp()",
            every.as_secs_f64()
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        Ok(held.end_call(answer)?.rows_affected() > 0)
    }

    /// Creates the partitions of this month and `ahead` months after it, and returns how many. `None` if this server's
    /// role may not.
    pub(crate) async fn create_audit_partitions(&self, ahead: i32) -> Result<Option<i32>, StoreError> {
        let mut held = self.begin_call("make_audit_months").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_scalar!(r#"SELECT latchkey_audit_make_months($1) AS "made!""#, ahead);
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        held.end_call(answer.map(if_permitted))
    }

    /// Drops the partitions of months that ended by `before` and contain rows of these Apps only, and returns how many.
    /// `None` if this server's role may not.
    pub(crate) async fn drop_audit_partitions(
        &self,
        before: OffsetDateTime,
        apps: &[String],
    ) -> Result<Option<i32>, StoreError> {
        let mut held = self.begin_call("drop_audit_months").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_scalar!(r#"SELECT latchkey_audit_drop_months($1, $2) AS "dropped!""#, before, apps);
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        held.end_call(answer.map(if_permitted))
    }

    /// Deletes up to `most` events of each App that are older than the App's time in `before`. Returns how many.
    pub(crate) async fn delete_audit_events(
        &self,
        apps: &[String],
        before: &[OffsetDateTime],
        most: i64,
    ) -> Result<u64, StoreError> {
        let Some(latest) = before.iter().max() else { return Ok(0) };
        let mut held = self.begin_call("delete_audit_events").await?;
        let (connection, until) = held.parts();
        // The conditions on `latest` exclude newer partitions from the scan.
        let query = sqlx::query!(
            r#"
            DELETE FROM audit_events
            USING unnest($1::text[], $2::timestamptz[]) AS app (id, before), LATERAL (
                SELECT event.at, event.id FROM audit_events AS event
                WHERE event.app_id = app.id AND event.at < app.before AND event.at < $3
                ORDER BY event.at LIMIT $4
            ) AS old
            WHERE audit_events.app_id = app.id AND audit_events.at = old.at AND audit_events.id = old.id
                AND audit_events.at < $3
            "#,
            apps,
            before,
            *latest,
            most,
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        Ok(held.end_call(answer)?.rows_affected())
    }
}

// === impl ActivityEntry ===

impl TryFrom<ActivityRow> for ActivityEntry {
    type Error = CallError;

    fn try_from(row: ActivityRow) -> Result<Self, CallError> {
        Ok(Self {
            at: row.at,
            kind: EventKind::from_name(&row.kind).ok_or(CallError::unexpected_row())?,
            ip: row.ip,
            session: row.session_id.map(SessionId),
            count: u64::try_from(row.count).map_err(|_| CallError::unexpected_row())?,
        })
    }
}
