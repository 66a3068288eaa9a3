//! Audit events: written in batches by one task of each server, so that many log-ins at once cost few transactions; and
//! the upkeep of their table.

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

use super::{Postgres, Shared, errors::Fault};
use crate::domain::{
    audit::{Activity, Event, EventKind},
    ports::StoreError,
    session::SessionId,
    user::UserId,
};

/// Events that wait for the writer, half a megabyte of them; more are lost.
const ROOM: usize = 4096;
/// Events of one statement.
const BATCH: usize = 256;
/// Batches begin at most so often: an event that comes alone is written at once, log-ins that come in a crowd share a
/// transaction.
const PACE: Duration = Duration::from_millis(15);
/// How long a request waits for its event.
const WAIT: Duration = Duration::from_secs(1);
/// A batch is tried again for so long, the first time at once: a restart of Postgres loses none. Those that follow wait.
const RETRY_LIMIT: Duration = Duration::from_secs(6);
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// How long the last events may take at the end.
const FLUSH: Duration = Duration::from_secs(5);
/// The events that a user sees (contract, 4).
const NEWEST: i64 = 100;

/// What is measured of audit; clones count together.
#[derive(Clone, Debug)]
pub struct AuditMetrics {
    events: Counter,
    lost: Counter,
}

/// The way to the task that writes.
pub(super) struct Writer {
    queue: mpsc::Sender<Job>,
    metrics: AuditMetrics,
}

enum Job {
    Write {
        app: AppId,
        event: Box<Event>,
        written: Option<oneshot::Sender<()>>,
    },
    /// Answered when all before it is written.
    Flush(oneshot::Sender<()>),
}

/// Events by column, as UNNEST takes them.
#[derive(Default)]
struct Columns {
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
    /// JSON; nothing to say is no detail.
    pub(super) detail: Option<String>,
}

/// Refusals of an App's quarter of an hour, by column.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RefusalColumns {
    pub(crate) ids: Vec<Uuid>,
    pub(crate) kinds: Vec<String>,
    pub(crate) users: Vec<Option<Uuid>>,
    pub(crate) clients: Vec<Option<String>>,
    pub(crate) counts: Vec<i64>,
}

struct Row {
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

    /// Under names without a prefix: the registry is to be one of audit's own.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("events", "Audit events that were written", self.events.clone());
        registry.register("lost", "Audit events that could not be written", self.lost.clone());
    }

    fn lost_events(&self, count: usize) {
        self.lost.inc_by(count as u64);
    }
}

// === impl Writer ===

impl Writer {
    /// The task that writes ends when the last handle to Postgres goes.
    pub(super) fn start(postgres: Weak<Shared>) -> Self {
        let (queue, jobs) = mpsc::channel(ROOM);
        let metrics = AuditMetrics::new();
        tokio::spawn(write(postgres, jobs, metrics.clone()));
        Self { queue, metrics }
    }

    fn push(&self, job: Job) {
        if self.queue.try_send(job).is_err() {
            // Said by the task, which knows why it is behind.
            self.metrics.lost_events(1);
        }
    }
}

/// Writes what there is, again and again: while one batch is on its way the next one gathers.
async fn write(postgres: Weak<Shared>, mut jobs: mpsc::Receiver<Job>, metrics: AuditMetrics) {
    let mut batch = Vec::with_capacity(BATCH);
    let mut losing = false;
    let mut next = Instant::now();
    loop {
        sleep_until(next).await;
        if jobs.recv_many(&mut batch, BATCH).await == 0 {
            return;
        }
        next = Instant::now() + PACE;
        let mut columns = Columns::default();
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
            waiting.into_iter().for_each(told);
            continue;
        }
        let Some(shared) = postgres.upgrade() else { return };
        let postgres = Postgres { shared };
        let mut written = postgres.insert_events(&columns).await;
        let until = Instant::now() + RETRY_LIMIT;
        let mut pause = Duration::ZERO;
        while matches!(written, Err(StoreError::Unavailable { .. })) && Instant::now() + pause < until {
            // A connection that broke while it rested, or a fail-over: the events have their ids, so twice does no harm.
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
                metrics.lost_events(columns.ids.len());
                if !std::mem::replace(&mut losing, true) {
                    let lost = columns.ids.len();
                    error!(
                        error = &error as &dyn std::error::Error,
                        lost, "audit events cannot be written; they are lost"
                    );
                }
            }
        }
        waiting.into_iter().for_each(told);
    }
}

/// Who waited may have gone.
fn told(waiting: oneshot::Sender<()>) {
    waiting.send(()).ok();
}

// === impl EventColumns ===

impl EventColumns {
    pub(super) fn of(event: &Event) -> Self {
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

// === impl Columns ===

impl Columns {
    fn push(&mut self, app: &AppId, event: &Event) {
        let EventColumns { id, at, kind, session, ip, detail } = EventColumns::of(event);
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

// === impl Postgres ===

impl Postgres {
    pub fn audit_metrics(&self) -> &AuditMetrics {
        &self.shared.audit.metrics
    }

    /// Waits until what was recorded before is written, or for a while.
    pub async fn flush_audit(&self) {
        let (flushed, done) = oneshot::channel();
        if self.shared.audit.queue.send(Job::Flush(flushed)).await.is_ok() {
            drop(timeout(FLUSH, done).await);
        }
    }

    pub(crate) async fn record_event(&self, app: &AppId, event: Event) {
        let (written, done) = oneshot::channel();
        self.shared.audit.push(Job::Write { app: app.clone(), event: Box::new(event), written: Some(written) });
        drop(timeout(WAIT, done).await);
    }

    pub(crate) fn record_event_later(&self, app: &AppId, event: Event) {
        self.shared.audit.push(Job::Write { app: app.clone(), event: Box::new(event), written: None });
    }

    async fn insert_events(&self, columns: &Columns) -> Result<u64, StoreError> {
        let mut held = self.hold("insert_events").await?;
        let (connection, until) = held.parts();
        let answer = timeout_at(until, insert(connection, columns)).await;
        held.done(answer)
    }

    pub(crate) async fn activity(
        &self,
        app: &AppId,
        user: UserId,
        since: OffsetDateTime,
    ) -> Result<Vec<Activity>, StoreError> {
        let known: Vec<String> = EventKind::ALL.iter().map(|kind| kind.as_str().to_owned()).collect();
        let mut held = self.hold("activity").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as!(
            Row,
            "SELECT at, kind, abbrev(ip) AS ip, session_id, count FROM audit_events
             WHERE app_id = $1 AND user_id = $2 AND at >= $3 AND kind = ANY ($4)
             ORDER BY at DESC, id DESC LIMIT $5",
            app.as_str(),
            user.0,
            since,
            &known,
            NEWEST,
        );
        let answer = timeout_at(until, query.fetch_all(connection)).await;
        let rows = held.done(answer)?;
        let activity: Result<Vec<_>, _> = rows.into_iter().map(Activity::try_from).collect();
        activity.map_err(|fault| self.refused(fault))
    }
}

async fn insert(connection: &mut PgConnection, columns: &Columns) -> Result<u64, sqlx::Error> {
    // As in `create_user`: the lock orders this with the deletion of an App. Events of nobody write nothing.
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

/// What a function of the schema answers; none where this server's role may not call it.
fn where_allowed(answer: Result<i32, sqlx::Error>) -> Result<Option<i32>, sqlx::Error> {
    /// insufficient_privilege
    const NOT_ALLOWED: &str = "42501";
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(NOT_ALLOWED) => Ok(None),
        Err(error) => Err(error),
    }
}

// === upkeep ===

impl Postgres {
    /// Writes an App's refusals of a quarter of an hour that began at that time. Written twice they are there once.
    pub(crate) async fn insert_refusals(
        &self,
        app: &AppId,
        began: OffsetDateTime,
        rows: &RefusalColumns,
    ) -> Result<(), StoreError> {
        let mut held = self.hold("insert_refusals").await?;
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
        let written = held.done(answer)?;
        self.shared.audit.metrics.events.inc_by(written.rows_affected());
        Ok(())
    }

    /// Whether it is this server's turn; the next one is so much later, whoever's it is.
    pub(crate) async fn audit_turn(&self, every: Duration) -> Result<bool, StoreError> {
        let mut held = self.hold("audit_turn").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query!(
            "UPDATE audit_upkeep SET next_at = statement_timestamp() + make_interval(secs => $1)
             WHERE next_at <= statement_timestamp()",
            every.as_secs_f64()
        );
        let answer = timeout_at(until, query.execute(connection)).await;
        Ok(held.done(answer)?.rows_affected() > 0)
    }

    /// Makes the partitions of this month and some after it; none where this server's role may not.
    pub(crate) async fn make_audit_months(&self, ahead: i32) -> Result<Option<i32>, StoreError> {
        let mut held = self.hold("make_audit_months").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_scalar!(r#"SELECT latchkey_audit_make_months($1) AS "made!""#, ahead);
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        held.done(answer.map(where_allowed))
    }

    /// Drops the partitions of months that were over at that time and hold rows of these Apps only; none where this
    /// server's role may not.
    pub(crate) async fn drop_audit_months(
        &self,
        before: OffsetDateTime,
        apps: &[String],
    ) -> Result<Option<i32>, StoreError> {
        let mut held = self.hold("drop_audit_months").await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_scalar!(r#"SELECT latchkey_audit_drop_months($1, $2) AS "dropped!""#, before, apps);
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        held.done(answer.map(where_allowed))
    }

    /// Deletes up to so many of each App's events from before its time; how many.
    pub(crate) async fn delete_audit_events(
        &self,
        apps: &[String],
        before: &[OffsetDateTime],
        most: i64,
    ) -> Result<u64, StoreError> {
        let Some(latest) = before.iter().max() else { return Ok(0) };
        let mut held = self.hold("delete_audit_events").await?;
        let (connection, until) = held.parts();
        // `latest` once more, so that no later partition is looked at.
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
        Ok(held.done(answer)?.rows_affected())
    }
}

// === impl Activity ===

impl TryFrom<Row> for Activity {
    type Error = Fault;

    fn try_from(row: Row) -> Result<Self, Fault> {
        Ok(Self {
            at: row.at,
            kind: EventKind::named(&row.kind).ok_or(Fault::unreadable())?,
            ip: row.ip,
            session: row.session_id.map(SessionId),
            count: u64::try_from(row.count).map_err(|_| Fault::unreadable())?,
        })
    }
}
