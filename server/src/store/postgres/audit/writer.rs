//! One task per server writes events in batches, so that many simultaneous logins need few transactions.

use std::{sync::Weak, time::Duration};

use latchkey_crds::types::AppId;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tracing::error;
use uuid::Uuid;

use super::{AuditMetrics, EventColumns};
use crate::{
    domain::{audit::Event, ports::StoreError},
    store::postgres::{PostgresStore, Shared},
};

/// Maximum number of events that wait for the task, about half a megabyte. Further events are lost.
const QUEUE_CAPACITY: usize = 4096;
/// Maximum number of events that one statement writes.
const BATCH_SIZE: usize = 256;
/// The maximum time between the starts of two batches while events wait: a single event is written immediately, many
/// simultaneous logins share a transaction.
const BATCH_INTERVAL: Duration = Duration::from_millis(15);
/// After a batch, the next batch starts at least this much later for each event of the batch, but at most
/// [`BATCH_INTERVAL`] later. A login takes longer than this. So if one client logs in again and again, no login waits
/// because of the event of the previous login.
const INTERVAL_PER_EVENT: Duration = Duration::from_millis(4);
/// The maximum time that a request waits until its event is written.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a batch is retried, so that no events are lost during a restart of Postgres. Later events wait in the
/// queue. The first retry is immediate.
const RETRY_TIME: Duration = Duration::from_secs(6);
/// The minimum time between log messages about lost events while new events are written.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// The pause before each retry except the first.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// The time limit for writing the last events at shutdown.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// A handle to the task that writes events.
pub(in crate::store::postgres) struct EventWriter {
    queue: mpsc::Sender<Job>,
    pub(super) metrics: AuditMetrics,
}

enum Job {
    Write {
        app: AppId,
        event: Box<Event>,
        written: Option<oneshot::Sender<()>>,
    },
    /// Reports through the channel that all earlier jobs are done.
    Flush(oneshot::Sender<()>),
}

/// The columns of several events, one array for each column, for UNNEST.
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
    /// The webhooks that report the events: the id of an event and the name of a webhook at the same index.
    reported_ids: Vec<Uuid>,
    reporting_webhooks: Vec<String>,
}

// === impl Job ===

impl Job {
    const fn has_waiter(&self) -> bool {
        match self {
            Self::Write { written, .. } => written.is_some(),
            Self::Flush(_) => true,
        }
    }
}

// === impl EventWriter ===

impl EventWriter {
    /// Starts the task that writes. The task ends when the last handle to Postgres is dropped.
    pub(in crate::store::postgres) fn start(postgres: Weak<Shared>) -> Self {
        let (queue, jobs) = mpsc::channel(QUEUE_CAPACITY);
        let metrics = AuditMetrics::new();
        tokio::spawn(run_writer(postgres, jobs, metrics.clone()));
        Self { queue, metrics }
    }

    fn push(&self, job: Job) {
        if self.queue.try_send(job).is_err() {
            // The lost event is only counted here. The task logs the number of lost events after the next batch that it
            // writes.
            self.metrics.count_lost(1);
        }
    }
}

/// Writes batches in a loop. While a batch is being written, new jobs gather in the queue.
async fn run_writer(postgres: Weak<Shared>, mut jobs: mpsc::Receiver<Job>, metrics: AuditMetrics) {
    let mut batch = Vec::with_capacity(BATCH_SIZE);
    let mut is_losing = false;
    let mut logged_lost = 0;
    let mut next_log = Instant::now();
    let mut next_batch = Instant::now();
    loop {
        sleep_until(next_batch).await;
        if jobs.recv_many(&mut batch, BATCH_SIZE).await == 0 {
            return;
        }
        // If no request waits for these events, the batch starts a little later: the write must not slow down the
        // responses to the requests that caused the events.
        let latest_start = Instant::now() + BATCH_INTERVAL;
        while batch.len() < BATCH_SIZE && !batch.iter().any(Job::has_waiter) {
            let room = BATCH_SIZE - batch.len();
            if !matches!(timeout_at(latest_start, jobs.recv_many(&mut batch, room)).await, Ok(1..)) {
                break;
            }
        }
        let interval = INTERVAL_PER_EVENT.saturating_mul(u32::try_from(batch.len()).unwrap_or(u32::MAX));
        next_batch = Instant::now() + interval.min(BATCH_INTERVAL);
        let mut columns = EventBatch::default();
        let mut waiters = Vec::new();
        for job in batch.drain(..) {
            match job {
                Job::Write { app, event, written } => {
                    columns.push(&app, &event);
                    waiters.extend(written);
                }
                Job::Flush(flushed) => waiters.push(flushed),
            }
        }
        if columns.ids.is_empty() {
            waiters.into_iter().for_each(notify_waiter);
            continue;
        }
        let Some(shared) = postgres.upgrade() else { return };
        let postgres = PostgresStore { shared };
        let mut written = postgres.insert_events(&columns).await;
        let retry_until = Instant::now() + RETRY_TIME;
        let mut pause = Duration::ZERO;
        while matches!(written, Err(StoreError::Unavailable { .. })) && Instant::now() + pause < retry_until {
            // The cause may be a broken idle connection or a failover. The events have ids, so writing them twice is
            // harmless.
            sleep(pause).await;
            pause = RETRY_PAUSE;
            written = postgres.insert_events(&columns).await;
        }
        match written {
            Ok(rows) => {
                metrics.events.inc_by(rows);
                is_losing = false;
                let lost = metrics.lost.get();
                if lost > logged_lost && Instant::now() >= next_log {
                    error!(lost = lost - logged_lost, "audit events were lost; new events are written");
                    logged_lost = lost;
                    next_log = Instant::now() + LOG_INTERVAL;
                }
            }
            Err(error) => {
                metrics.count_lost(columns.ids.len());
                if !std::mem::replace(&mut is_losing, true) {
                    let lost = columns.ids.len();
                    error!(
                        error = &error as &dyn std::error::Error,
                        lost, "audit events cannot be written; they are lost"
                    );
                }
            }
        }
        waiters.into_iter().for_each(notify_waiter);
    }
}

/// Notifies the request that waits for a job. The request may have given up.
fn notify_waiter(waiter: oneshot::Sender<()>) {
    waiter.send(()).ok();
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
        for webhook in event.reporting_webhooks() {
            self.reported_ids.push(id);
            self.reporting_webhooks.push(webhook);
        }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    pub fn audit_metrics(&self) -> &AuditMetrics {
        &self.shared.audit.metrics
    }

    /// Waits until all events that were recorded before this call are written or lost, but at most `FLUSH_TIMEOUT`.
    pub async fn flush_audit(&self) {
        let (flushed, done) = oneshot::channel();
        let flushing = async {
            if self.shared.audit.queue.send(Job::Flush(flushed)).await.is_ok() {
                drop(done.await);
            }
        };
        if timeout(FLUSH_TIMEOUT, flushing).await.is_err() {
            error!("the last audit events are not written in time; they are lost");
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
        let mut call = self.begin_call("insert_events").await?;
        let (connection, deadline) = call.parts();
        let inserted = timeout_at(deadline, insert_batch(connection, columns, self.should_notify())).await;
        call.end_call(inserted)
    }
}

async fn insert_batch(connection: &mut PgConnection, columns: &EventBatch, notify: bool) -> Result<u64, sqlx::Error> {
    // The lock on an App's row prevents a concurrent deletion of the App's users, as in `create_user`. Events without a
    // user are not written.
    let query = sqlx::query_scalar!(
        r#"
        WITH gate AS (
            SELECT app_id, state FROM apps WHERE app_id = ANY ($1) ORDER BY app_id FOR KEY SHARE
        ), written AS (
        INSERT INTO audit_events (app_id, id, at, kind, user_id, session_id, ip, detail)
        SELECT app_id, id, at, kind, user_id, session_id, ip::inet, detail::jsonb
        FROM unnest(
            $1::text[], $2::uuid[], $3::timestamptz[], $4::text[], $5::uuid[], $6::uuid[], $7::text[], $8::text[]
        ) AS event (app_id, id, at, kind, user_id, session_id, ip, detail)
        WHERE user_id IS NOT NULL
            AND NOT EXISTS (SELECT FROM gate WHERE gate.app_id = event.app_id AND gate.state <> 'active')
        ON CONFLICT DO NOTHING
        RETURNING app_id, id, at, kind, user_id, session_id, detail
        ), queued AS (
            INSERT INTO webhook_events (app_id, webhook, id, kind, at, user_id, session_id, detail)
            SELECT app_id, webhook, written.id, kind, at, user_id, session_id, detail
            FROM written JOIN unnest($9::uuid[], $10::text[]) AS report (id, webhook) ON report.id = written.id
            RETURNING app_id, webhook
        ), notified AS (
            SELECT pg_notify('latchkey_webhooks', app_id || '/' || webhook) FROM queued WHERE $11
        )
        SELECT (SELECT count(*) FROM written) + 0 * (SELECT count(*) FROM notified) AS "written!"
        "#,
        &columns.apps,
        &columns.ids,
        &columns.times,
        &columns.kinds,
        &columns.users as &[Option<Uuid>],
        &columns.sessions as &[Option<Uuid>],
        &columns.ips as &[Option<String>],
        &columns.details as &[Option<String>],
        &columns.reported_ids,
        &columns.reporting_webhooks,
        notify,
    );
    query.fetch_one(connection).await.map(|written| u64::try_from(written).unwrap_or(0))
}
