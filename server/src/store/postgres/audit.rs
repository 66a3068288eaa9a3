//! Audit events: written in batches by one task of each server, so that many log-ins at once cost few transactions.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use latchkey_crds::types::AppId;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::{
    sync::{mpsc, oneshot},
    time::{timeout, timeout_at},
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
/// How long a request waits for its event.
const WAIT: Duration = Duration::from_secs(1);
/// How long the last events may take at the end.
const FLUSH: Duration = Duration::from_secs(5);
/// The events that a user sees (contract, 4).
const NEWEST: i64 = 100;

/// What is measured of audit; clones count together.
#[derive(Clone, Debug)]
pub struct AuditMetrics {
    events: Counter,
    lost: Family<Of, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    of: &'static str,
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

#[derive(sqlx::FromRow)]
struct Row {
    at: OffsetDateTime,
    kind: String,
    ip: Option<String>,
    session_id: Option<Uuid>,
    count: i32,
}

/// A detail as the column holds it; nothing to say is no detail.
pub(super) fn detail(event: &Event) -> Option<String> {
    if event.detail.is_empty() { None } else { serde_json::to_string(&event.detail).ok() }
}

// === impl AuditMetrics ===

impl AuditMetrics {
    fn new() -> Self {
        let lost = Family::<Of, Counter>::default();
        for of in ["event", "refusal"] {
            drop(lost.get_or_create(&Of { of }));
        }
        Self { events: Counter::default(), lost }
    }

    /// Under names without a prefix: the registry is to be one of audit's own.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("events", "Audit events that were written", self.events.clone());
        registry.register("lost", "Audit events and refusals that could not be written", self.lost.clone());
    }

    pub(crate) fn lost_refusals(&self, count: usize) {
        self.lost.get_or_create(&Of { of: "refusal" }).inc_by(count as u64);
    }

    fn lost_events(&self, count: usize) {
        self.lost.get_or_create(&Of { of: "event" }).inc_by(count as u64);
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
    while jobs.recv_many(&mut batch, BATCH).await > 0 {
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
        if let Err(StoreError::Unavailable { .. }) = written {
            // A connection that broke while it rested, or a fail-over: the events have their ids, so twice does no harm.
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
    drop(waiting.send(()));
}

// === impl Columns ===

impl Columns {
    fn push(&mut self, app: &AppId, event: &Event) {
        self.apps.push(app.to_string());
        self.ids.push(event.id);
        self.times.push(event.at);
        self.kinds.push(event.kind.as_str().to_owned());
        self.users.push(event.user.map(|user| user.0));
        self.sessions.push(event.session.map(|session| session.0));
        self.ips.push(event.ip.map(|ip| ip.to_string()));
        self.details.push(detail(event));
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
        let mut held = self.hold().await?;
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
        let mut held = self.hold().await?;
        let (connection, until) = held.parts();
        let query = sqlx::query_as::<_, Row>(
            "SELECT at, kind, abbrev(ip) AS ip, session_id, count FROM audit_events
             WHERE app_id = $1 AND user_id = $2 AND at >= $3 AND kind = ANY ($4)
             ORDER BY at DESC, id DESC LIMIT $5",
        )
        .bind(app.as_str())
        .bind(user.0)
        .bind(since)
        .bind(known)
        .bind(NEWEST);
        let answer = timeout_at(until, query.fetch_all(connection)).await;
        let rows = held.done(answer)?;
        let activity: Result<Vec<_>, _> = rows.into_iter().map(Activity::try_from).collect();
        activity.map_err(|fault| self.refused(fault))
    }
}

async fn insert(connection: &mut PgConnection, columns: &Columns) -> Result<u64, sqlx::Error> {
    // As in `create_user`: the lock orders this with the deletion of an App. Events of nobody write nothing.
    let query = sqlx::query(
        "WITH gate AS (
            SELECT app_id, state FROM apps WHERE app_id = ANY ($1) ORDER BY app_id FOR KEY SHARE
        )
        INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
        SELECT app_id, id, at, kind, user_id, session_id, ip::inet, detail::jsonb
        FROM unnest(
            $1::text[], $2::uuid[], $3::timestamptz[], $4::text[], $5::uuid[], $6::uuid[], $7::text[], $8::text[]
        ) AS event (app_id, id, at, kind, user_id, session_id, ip, detail)
        WHERE user_id IS NOT NULL
            AND NOT EXISTS (SELECT FROM gate WHERE gate.app_id = event.app_id AND gate.state <> 'active')
        ON CONFLICT DO NOTHING",
    )
    .bind(&columns.apps)
    .bind(&columns.ids)
    .bind(&columns.times)
    .bind(&columns.kinds)
    .bind(&columns.users)
    .bind(&columns.sessions)
    .bind(&columns.ips)
    .bind(&columns.details);
    query.execute(connection).await.map(|done| done.rows_affected())
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
            count: u32::try_from(row.count).map_err(|_| Fault::unreadable())?,
        })
    }
}
