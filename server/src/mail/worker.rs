//! Claims rows from the outbox and delivers them concurrently, so that no App delays another App.

use std::{sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span, error, info, warn};

use super::{backoff, deliverer::Deliverer, delivery::OutboxDeliverer, metrics::MailMetrics, settings::MailSettings};
use crate::{
    config::Apps,
    domain::{
        clock::Env,
        ports::{ClaimedRow, Codes, DeliveryOutcome, GroupChanges, Outbox, OutboxTask, Sessions, Users},
    },
};

/// The maximum number of rows in delivery at the same time. Each delivery needs a connection and a few buffers.
const MAX_IN_FLIGHT: usize = 16;
/// The maximum number of rows of one App in delivery, over all servers: a hanging relay occupies at most a quarter of
/// [`MAX_IN_FLIGHT`].
const MAX_IN_FLIGHT_PER_APP: usize = 4;
/// How long a claimed row belongs to the server that claimed it: at least twice the time that a delivery needs (ten
/// seconds for DNS lookup and SMTP, and some seconds for the stores). After this time, other servers can claim the rows
/// of a dead server.
const LEASE: Duration = Duration::from_secs(60);
/// Timeout of the delivery of a row. It is shorter than [`LEASE`], so that a delivery ends before the lease of its row.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(40);
/// How often the outbox is polled if there is no notification.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often the metrics of the backlog are updated.
const BACKLOG_INTERVAL: Duration = Duration::from_secs(15);
/// How long running deliveries can continue after shutdown begins: enough to send one mail and finish its row.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Delivers the rows of the outbox until shutdown.
pub struct Worker<S> {
    stores: Arc<S>,
    delivery: Arc<OutboxDeliverer<S>>,
    env: Arc<Env>,
    metrics: MailMetrics,
}

// === impl Worker ===

impl<S: Outbox + Users + Codes + Sessions + GroupChanges + Send + Sync + 'static> Worker<S> {
    pub fn new(stores: S, apps: Arc<Apps>, env: Arc<Env>, settings: MailSettings, metrics: MailMetrics) -> Self {
        let stores = Arc::new(stores);
        let delivery = OutboxDeliverer::new(stores.clone(), apps, env.clone(), settings, metrics.clone());
        Self { stores, delivery: Arc::new(delivery), env, metrics }
    }

    /// Runs until `shutdown`, then waits at most [`DRAIN_TIMEOUT`] for running deliveries. A row that is not finished
    /// can be claimed again when its lease ends.
    pub async fn run(self, shutdown: CancellationToken) {
        tokio::join!(
            schedule(self.stores.clone(), self.delivery, &self.env, &self.metrics, &shutdown),
            report_backlog(&*self.stores, &self.metrics, &shutdown),
        );
    }
}

/// Claims rows while fewer than [`MAX_IN_FLIGHT`] are in delivery: after a delivery, on a notification, and every
/// second.
async fn schedule<O, D>(
    outbox: Arc<O>,
    deliverer: Arc<D>,
    env: &Env,
    metrics: &MailMetrics,
    shutdown: &CancellationToken,
) where
    O: Outbox + Send + Sync + 'static,
    D: Deliverer,
{
    let mut running = JoinSet::new();
    let mut is_unavailable = false;
    while !shutdown.is_cancelled() {
        metrics.set_in_flight(running.len());
        let free = MAX_IN_FLIGHT - running.len();
        if free > 0 {
            let claimed = tokio::select! {
                claimed = outbox.claim(free, MAX_IN_FLIGHT_PER_APP, LEASE) => claimed,
                () = shutdown.cancelled() => break,
            };
            match claimed {
                Ok(rows) => {
                    if std::mem::take(&mut is_unavailable) {
                        info!("the outbox is available again");
                    }
                    for row in rows {
                        let span = row_span(&row);
                        running.spawn(deliver_row(outbox.clone(), deliverer.clone(), row).instrument(span));
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_unavailable, true) {
                        error!(error = &error as &dyn std::error::Error, "the outbox cannot be read; mail waits");
                    }
                }
            }
            metrics.set_in_flight(running.len());
        }
        let is_full = running.len() >= MAX_IN_FLIGHT;
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(ended) = running.join_next() => {
                log_panic(ended);
                while let Some(ended) = running.try_join_next() {
                    log_panic(ended);
                }
            }
            // During an outage of Postgres, notifications are ignored, so that they cause no additional attempts.
            () = outbox.wait_for_notification(), if !is_full && !is_unavailable => {}
            () = sleep(backoff::jitter(POLL_INTERVAL, env.random_unit())), if !is_full => {}
        }
        deliverer.close_idle();
    }
    let drained = timeout(DRAIN_TIMEOUT, async {
        while let Some(ended) = running.join_next().await {
            log_panic(ended);
        }
    });
    if drained.await.is_err() {
        warn!(rows = running.len(), "unfinished rows are left to another server");
    }
    metrics.set_in_flight(0);
}

/// The span of a delivery. It starts a new trace, because the request that created the row has ended. The span has a
/// link to that request.
fn row_span(row: &ClaimedRow) -> Span {
    let (name, mail) = match &row.task {
        OutboxTask::Mail(mail) | OutboxTask::MailToFormerAddress(mail, _) => ("deliver mail", Some(mail.kind.as_str())),
        OutboxTask::PropagateEpoch(_) => ("carry epoch", None),
        OutboxTask::PropagateProfile(_) => ("carry profile", None),
        OutboxTask::PropagateGroups(_) => ("carry groups", None),
    };
    let span = latchkey_telemetry::span!(
        "consumer",
        "outbox row",
        otel.name = name,
        latchkey.app = row.app.as_str(),
        latchkey.mail = mail,
        latchkey.outbox.attempts = row.attempts,
        latchkey.outbox.outcome = tracing::field::Empty,
    );
    if let Some(trace) = &row.trace {
        latchkey_telemetry::add_link(&span, trace);
    }
    span
}

async fn deliver_row<O: Outbox, D: Deliverer>(outbox: Arc<O>, deliverer: Arc<D>, row: ClaimedRow) {
    let lease_end = Instant::now() + LEASE;
    let Ok(outcome) = timeout(DELIVERY_TIMEOUT, deliverer.deliver(&row)).await else {
        warn!(app = %row.app, row = %row.id, "the delivery of a row timed out; it is retried when its lease ends");
        return;
    };
    let outcome_name = match &outcome {
        DeliveryOutcome::Done => "done",
        DeliveryOutcome::Retry { .. } => "retry",
        DeliveryOutcome::Wait { .. } => "wait",
        DeliveryOutcome::Dead { .. } => "dead",
    };
    Span::current().record("latchkey.outbox.outcome", outcome_name);
    // If the row of a mail is not finished, the mail is sent again. Therefore `finish` is retried until the lease ends.
    let mut pause = Duration::from_millis(100);
    while let Err(error) = outbox.finish(&row, outcome.clone()).await {
        if Instant::now() + pause >= lease_end {
            error!(
                app = %row.app,
                row = %row.id,
                error = &error as &dyn std::error::Error,
                "a row cannot be settled and will be delivered again"
            );
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    // The panic hook has logged the location. The text of the error is not logged, because it can quote a value such as
    // a code.
    if ended.is_err() {
        error!("the delivery of a row panicked; it is retried when its lease ends");
    }
}

async fn report_backlog<O: Outbox>(outbox: &O, metrics: &MailMetrics, shutdown: &CancellationToken) {
    loop {
        let backlog = tokio::select! {
            backlog = outbox.backlog() => backlog,
            () = shutdown.cancelled() => return,
        };
        // If the backlog cannot be read, rows cannot be claimed either, and `schedule` logs that error.
        if let Ok(backlog) = backlog {
            metrics.set_backlog(backlog);
        }
        tokio::select! {
            () = sleep(BACKLOG_INTERVAL) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Mutex};

    use latchkey_crds::types::AppId;
    use prometheus_client::registry::Registry;
    use time::OffsetDateTime;
    use tokio::sync::{Notify, Semaphore, mpsc};
    use uuid::Uuid;

    use super::*;
    use crate::domain::{
        mail::{EpochChange, Mail, MailKind},
        ports::{OutboxBacklog, StoreError},
    };

    /// An outbox in memory, with a bounded number of claimed rows per App.
    #[derive(Default)]
    struct FakeOutbox {
        due: Mutex<VecDeque<ClaimedRow>>,
        claimed: Mutex<Vec<ClaimedRow>>,
        claim_limits: Mutex<Vec<usize>>,
        failing_finishes: Mutex<u32>,
        failing_claims: Mutex<u32>,
        notification: Notify,
        finished: Mutex<Vec<(String, DeliveryOutcome)>>,
    }

    fn unavailable() -> StoreError {
        StoreError::Unavailable { store: "Postgres", source: "gone".into() }
    }

    impl FakeOutbox {
        fn with(rows: &[(&str, usize)]) -> Arc<Self> {
            let outbox = Self::default();
            for (app, count) in rows {
                outbox.add(app, *count);
            }
            Arc::new(outbox)
        }

        fn add(&self, app: &str, count: usize) {
            let requested_at = OffsetDateTime::UNIX_EPOCH;
            let mail = Mail { kind: MailKind::Reset, recipient: None, requested_at };
            for _ in 0..count {
                let mut due = self.due.lock().unwrap();
                due.push_back(ClaimedRow {
                    id: Uuid::now_v7(),
                    app: app.parse().unwrap(),
                    attempts: 0,
                    task: OutboxTask::Mail(mail.clone()),
                    lease_until: requested_at,
                    trace: None,
                });
            }
        }
    }

    impl Outbox for FakeOutbox {
        async fn enqueue(&self, _: &AppId, _: Mail) -> Result<(), StoreError> {
            unreachable!("the worker queues nothing")
        }

        async fn claim(&self, limit: usize, per_app: usize, lease: Duration) -> Result<Vec<ClaimedRow>, StoreError> {
            assert_eq!(lease, LEASE);
            let mut failures = self.failing_claims.lock().unwrap();
            if *failures > 0 {
                *failures -= 1;
                return Err(unavailable());
            }
            self.claim_limits.lock().unwrap().push(limit);
            let (mut due, mut claimed) = (self.due.lock().unwrap(), self.claimed.lock().unwrap());
            let mut rows = Vec::new();
            for row in std::mem::take(&mut *due) {
                let claimed_of_app = claimed.iter().filter(|other| other.app == row.app).count();
                if rows.len() < limit && claimed_of_app < per_app {
                    claimed.push(row.clone());
                    rows.push(row);
                } else {
                    due.push_back(row);
                }
            }
            Ok(rows)
        }

        async fn finish(&self, claimed: &ClaimedRow, outcome: DeliveryOutcome) -> Result<(), StoreError> {
            let mut failures = self.failing_finishes.lock().unwrap();
            if *failures > 0 {
                *failures -= 1;
                return Err(unavailable());
            }
            self.claimed.lock().unwrap().retain(|row| row.id != claimed.id);
            self.finished.lock().unwrap().push((claimed.app.to_string(), outcome));
            Ok(())
        }

        async fn remove_epoch_row(&self, _: &AppId, _: &EpochChange) -> Result<(), StoreError> {
            unreachable!("only requests remove epoch rows")
        }

        async fn wait_for_notification(&self) {
            self.notification.notified().await;
        }

        async fn backlog(&self) -> Result<OutboxBacklog, StoreError> {
            unreachable!("the scheduler does not read the backlog")
        }
    }

    /// Delivers rows immediately, except those of the App `hangs`, which wait for a permit from `released`.
    struct FakeDeliverer {
        released: Semaphore,
        started: mpsc::UnboundedSender<String>,
    }

    impl Deliverer for FakeDeliverer {
        async fn deliver(&self, claimed: &ClaimedRow) -> DeliveryOutcome {
            self.started.send(claimed.app.to_string()).unwrap();
            if claimed.app.as_str() == "hangs" {
                self.released.acquire().await.unwrap().forget();
            }
            DeliveryOutcome::Done
        }
    }

    struct RunningWorker {
        outbox: Arc<FakeOutbox>,
        deliverer: Arc<FakeDeliverer>,
        started: mpsc::UnboundedReceiver<String>,
        shutdown: CancellationToken,
        worker: tokio::task::JoinHandle<()>,
    }

    fn run(outbox: Arc<FakeOutbox>) -> RunningWorker {
        let (sender, started) = mpsc::unbounded_channel();
        let deliverer = Arc::new(FakeDeliverer { released: Semaphore::new(0), started: sender });
        let shutdown = CancellationToken::new();
        let worker = tokio::spawn({
            let (outbox, deliverer, shutdown) = (outbox.clone(), deliverer.clone(), shutdown.clone());
            async move {
                let metrics = MailMetrics::register(&mut Registry::default());
                schedule(outbox, deliverer, &Env::system(), &metrics, &shutdown).await;
            }
        });
        RunningWorker { outbox, deliverer, started, shutdown, worker }
    }

    impl RunningWorker {
        /// Waits until `count` more deliveries have started. Returns their Apps.
        async fn wait_for_started_apps(&mut self, count: usize) -> Vec<String> {
            let mut apps = Vec::new();
            while apps.len() < count {
                let next = timeout(Duration::from_secs(20), self.started.recv()).await;
                apps.push(next.expect("another delivery starts").unwrap());
            }
            apps
        }

        async fn stop(self) {
            self.shutdown.cancel();
            timeout(Duration::from_secs(20), self.worker).await.expect("the worker ends").unwrap();
        }
    }

    #[tokio::test]
    async fn an_app_with_a_hanging_relay_delays_no_other_app() {
        let mut running = run(FakeOutbox::with(&[("hangs", 100), ("shop", 40), ("blog", 40)]));
        let started = running.wait_for_started_apps(84).await;
        assert_eq!(started.iter().filter(|app| *app == "hangs").count(), MAX_IN_FLIGHT_PER_APP);
        // Later rows of other Apps do not wait for the hanging App either.
        running.outbox.add("shop", 5);
        running.outbox.notification.notify_one();
        assert_eq!(running.wait_for_started_apps(5).await, ["shop"; 5]);
        assert!(running.outbox.claim_limits.lock().unwrap().iter().all(|limit| (1..=MAX_IN_FLIGHT).contains(limit)));
        running.deliverer.released.add_permits(1_000);
        assert_eq!(running.wait_for_started_apps(96).await, ["hangs"; 96]);
        running.stop().await;
    }

    #[tokio::test]
    async fn rows_are_found_by_polling_without_a_notification() {
        let mut running = run(FakeOutbox::with(&[]));
        running.outbox.add("shop", 1);
        assert_eq!(running.wait_for_started_apps(1).await, ["shop"]);
        running.stop().await;
    }

    #[tokio::test]
    async fn nothing_is_claimed_and_running_deliveries_finish_at_shutdown() {
        let mut running = run(FakeOutbox::with(&[("hangs", 6)]));
        running.wait_for_started_apps(4).await;
        running.shutdown.cancel();
        running.deliverer.released.add_permits(1_000);
        let outbox = running.outbox.clone();
        running.stop().await;
        assert_eq!(outbox.finished.lock().unwrap().len(), 4);
        assert_eq!(outbox.due.lock().unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_failed_finish_is_retried_without_a_second_delivery() {
        let outbox = FakeOutbox::with(&[("shop", 1)]);
        *outbox.failing_finishes.lock().unwrap() = 2;
        let mut running = run(outbox.clone());
        running.wait_for_started_apps(1).await;
        running.stop().await;
        assert!(matches!(outbox.finished.lock().unwrap()[..], [(_, DeliveryOutcome::Done)]));
    }

    #[tokio::test]
    async fn an_outbox_is_read_again_after_an_outage() {
        let outbox = FakeOutbox::with(&[("shop", 1)]);
        *outbox.failing_claims.lock().unwrap() = 1;
        let mut running = run(outbox);
        assert_eq!(running.wait_for_started_apps(1).await, ["shop"]);
        running.stop().await;
    }
}
