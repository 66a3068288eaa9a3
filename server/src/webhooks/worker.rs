//! Claims due events and sends them concurrently, so that no receiver delays another receiver. Mails have a separate
//! worker, so that receivers do not delay mails either.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::metrics::{DeliveryOutcome, WebhookMetrics};
use crate::domain::{
    clock::Env,
    ports::{ClaimableWebhook, ClaimedEvent, EventOutcome, StoreError, WebhookEvents},
};

/// The maximum number of events that the server sends at the same time.
const MAX_IN_FLIGHT: usize = 64;
/// The maximum number of events that the server sends at the same time for the Apps of one namespace, so that one
/// tenant cannot use up the deliveries of a server.
const MAX_IN_FLIGHT_PER_NAMESPACE: usize = MAX_IN_FLIGHT / 2;
/// The maximum number of webhooks in one claim. If more webhooks have due events, each claim starts at a random
/// webhook.
const MAX_WEBHOOKS_PER_CLAIM: usize = 4 * MAX_IN_FLIGHT;
/// The minimum time between two claims, so that many notifications cause few claims.
const CLAIM_INTERVAL: Duration = Duration::from_millis(20);
/// How long a claimed event belongs to the server that claimed it: longer than a delivery (10 s) and the storing of its
/// outcome. After this time, other servers can claim the events of a dead server.
const LEASE: Duration = Duration::from_secs(60);
/// How often the queue is polled if there is no notification.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often the metrics of the backlog are updated, and dummy events are deleted.
const BACKLOG_INTERVAL: Duration = Duration::from_secs(15);
/// How long running deliveries can continue at shutdown: the timeout of a delivery, and the time to store its outcome.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Sends one event.
pub trait Sender: Send + Sync + 'static {
    /// The namespace of the App, if the App has a push webhook of this name with a usable key.
    fn namespace_if_sendable(&self, app: &str, webhook: &str) -> Option<String>;

    fn send(&self, claimed: &ClaimedEvent) -> impl Future<Output = EventOutcome> + Send;
}

/// The number of events that are being sent, by the namespace of their Apps.
#[derive(Clone, Default)]
struct InFlight(Arc<Mutex<HashMap<String, usize>>>);

/// One event that is being sent. [`InFlight`] counts it until this value is dropped.
struct InFlightEvent {
    counts: InFlight,
    namespace: String,
}

/// Sends the events of all Apps until shutdown.
pub struct WebhookWorker<S, D> {
    stores: Arc<S>,
    sender: Arc<D>,
    env: Arc<Env>,
    metrics: WebhookMetrics,
}

// === impl WebhookWorker ===

impl<S: WebhookEvents + Send + Sync + 'static> WebhookWorker<S, super::EventSender> {
    pub fn new(stores: S, sender: super::EventSender, env: Arc<Env>, metrics: WebhookMetrics) -> Self {
        Self { stores: Arc::new(stores), sender: Arc::new(sender), env, metrics }
    }

    /// Runs until `shutdown`, then waits at most [`DRAIN_TIMEOUT`] for running deliveries. An event without a stored
    /// outcome can be claimed again when its lease ends.
    pub async fn run(self, shutdown: CancellationToken) {
        tokio::join!(self.schedule(&shutdown), self.report_backlog(&shutdown));
    }
}

impl<S: WebhookEvents + Send + Sync + 'static, D: Sender> WebhookWorker<S, D> {
    /// Claims events while fewer than [`MAX_IN_FLIGHT`] are being sent: after a delivery, on a notification, and every
    /// second.
    async fn schedule(&self, shutdown: &CancellationToken) {
        let mut notifications = self.stores.subscribe_to_new_events();
        let mut running = JoinSet::new();
        let in_flight = InFlight::default();
        let mut is_unavailable = false;
        while !shutdown.is_cancelled() {
            let next_claim = Instant::now() + CLAIM_INTERVAL;
            if running.len() < MAX_IN_FLIGHT {
                let claimed = tokio::select! {
                    claimed = self.claim(MAX_IN_FLIGHT - running.len(), &in_flight) => claimed,
                    () = shutdown.cancelled() => break,
                };
                match claimed {
                    Ok(events) => {
                        if std::mem::take(&mut is_unavailable) {
                            info!("the queue of webhook events is available again");
                        }
                        for (claimed, counted) in events {
                            let (stores, sender) = (Arc::clone(&self.stores), Arc::clone(&self.sender));
                            running.spawn(deliver(stores, sender, self.metrics.clone(), claimed, counted));
                        }
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut is_unavailable, true) {
                            let error = &error as &dyn std::error::Error;
                            error!(error, "the queue of webhook events cannot be read; events wait");
                        }
                    }
                }
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
                () = wait_for_notification(&mut notifications, next_claim), if !is_full && !is_unavailable => {}
                () = sleep(POLL_INTERVAL.mul_f64(0.8 + 0.4 * self.env.random_unit())), if !is_full => {}
            }
        }
        let drained = timeout(DRAIN_TIMEOUT, async {
            while let Some(ended) = running.join_next().await {
                log_panic(ended);
            }
        });
        if drained.await.is_err() {
            warn!(events = running.len(), "unfinished webhook events are left to another server");
        }
    }

    /// Claims up to `limit` events, and for each namespace at most as many as [`InFlight::room`] allows.
    async fn claim(
        &self,
        limit: usize,
        in_flight: &InFlight,
    ) -> Result<Vec<(ClaimedEvent, InFlightEvent)>, StoreError> {
        let due = self.stores.webhooks_with_due_events().await?;
        let sendable = due.into_iter().filter_map(|key| {
            let namespace = self.sender.namespace_if_sendable(key.app.as_str(), key.webhook.as_str())?;
            let room = in_flight.room(&namespace, limit);
            (room > 0).then_some(ClaimableWebhook { key, namespace, room })
        });
        let mut webhooks: Vec<_> = sendable.collect();
        if webhooks.is_empty() {
            return Ok(Vec::new());
        }
        if webhooks.len() > MAX_WEBHOOKS_PER_CLAIM {
            let count = webhooks.len();
            webhooks.rotate_left(self.env.random_below(count));
            webhooks.truncate(MAX_WEBHOOKS_PER_CLAIM);
        }
        let claimed = self.stores.claim_events(&webhooks, limit, LEASE).await?;
        let counted = claimed.into_iter().map(|claimed| {
            let webhook = webhooks.iter().find(|webhook| webhook.key == claimed.key);
            let namespace = webhook.map_or_else(String::new, |webhook| webhook.namespace.clone());
            let counted = in_flight.count(namespace);
            (claimed, counted)
        });
        Ok(counted.collect())
    }

    /// Updates the metrics of the backlog and deletes dummy events, every [`BACKLOG_INTERVAL`] until shutdown.
    async fn report_backlog(&self, shutdown: &CancellationToken) {
        loop {
            let backlog = tokio::select! {
                backlog = self.stores.event_backlog() => backlog,
                () = shutdown.cancelled() => return,
            };
            // During an outage, `schedule` logs the error.
            if let Ok(backlog) = backlog {
                self.metrics.set_backlog(backlog);
            }
            // Deletes batches until no dummy event is left, because outsiders can cause any number of them.
            // After an error, the next run deletes the rest.
            while !shutdown.is_cancelled() && self.stores.delete_dummy_events().await.is_ok_and(|deleted| deleted > 0) {
            }
            tokio::select! {
                () = sleep(BACKLOG_INTERVAL) => {}
                () = shutdown.cancelled() => return,
            }
        }
    }
}

/// Waits until there may be new events, but at least until `earliest`. Takes all waiting messages, because one claim
/// serves them all.
async fn wait_for_notification(notifications: &mut Receiver<String>, earliest: Instant) {
    match notifications.recv().await {
        Ok(_) | Err(RecvError::Lagged(_)) => {
            sleep_until(earliest).await;
            while notifications.try_recv().is_ok() {}
        }
        // No more notifications come, so events are found only by polling.
        Err(RecvError::Closed) => std::future::pending().await,
    }
}

async fn deliver<S: WebhookEvents, D: Sender>(
    stores: Arc<S>,
    sender: Arc<D>,
    metrics: WebhookMetrics,
    claimed: ClaimedEvent,
    _counted: InFlightEvent,
) {
    let lease_end = Instant::now() + LEASE;
    let outcome = sender.send(&claimed).await;
    metrics.count(DeliveryOutcome::of(&outcome), 1);
    // If the outcome is not stored, the event is sent again. Therefore storing is retried until the lease ends.
    let mut pause = Duration::from_millis(100);
    while let Err(error) = stores.finish_event(&claimed, outcome.clone()).await {
        if Instant::now() + pause >= lease_end {
            error!(
                app = %claimed.key.app,
                event = %claimed.event.id,
                error = &error as &dyn std::error::Error,
                "the outcome of a webhook event cannot be stored; the event will be sent again"
            );
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    // The panic hook has logged the location.
    if ended.is_err() {
        error!("the delivery of a webhook event panicked; it is retried when its lease ends");
    }
}

// === impl InFlight ===

impl InFlight {
    /// Returns how many more events of the namespace can be sent if `free` more can be sent in total. A namespace gets
    /// at most half of all deliveries, and never more than it leaves free for other namespaces, so that other
    /// namespaces can always send an event.
    fn room(&self, namespace: &str, free: usize) -> usize {
        let own = self.0.lock().get(namespace).copied().unwrap_or(0);
        MAX_IN_FLIGHT_PER_NAMESPACE.min((free + own) / 2).saturating_sub(own)
    }

    fn count(&self, namespace: String) -> InFlightEvent {
        *self.0.lock().entry(namespace.clone()).or_insert(0) += 1;
        InFlightEvent { counts: self.clone(), namespace }
    }
}

impl Drop for InFlightEvent {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        if let Some(count) = counts.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.namespace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use parking_lot::Mutex;
    use prometheus_client::registry::Registry;
    use time::OffsetDateTime;
    use tokio::sync::{Semaphore, broadcast, mpsc};
    use uuid::Uuid;

    use super::*;
    use crate::domain::{
        audit::EventKind,
        ports::{DeliveryState, EventBacklog, KnownWebhook, WebhookKey},
        webhook::QueuedEvent,
    };

    /// A queue in memory. It hands out at most 16 events of a webhook at a time. Another server has leased the events
    /// of the webhooks named `leased…`.
    struct FakeQueue {
        due: Mutex<Vec<ClaimedEvent>>,
        in_flight: Mutex<BTreeMap<WebhookKey, usize>>,
        claim_limits: Mutex<Vec<usize>>,
        /// For each call of `claim_events`: the number of webhooks that were passed to it.
        webhooks_per_claim: Mutex<Vec<usize>>,
        failing_finishes: Mutex<u32>,
        finished: mpsc::UnboundedSender<(WebhookKey, EventOutcome)>,
        notifications: broadcast::Sender<String>,
    }

    fn key(webhook: &str) -> WebhookKey {
        WebhookKey { app: "shop".parse().unwrap(), webhook: webhook.parse().unwrap() }
    }

    fn events(webhook: &str, count: usize) -> impl Iterator<Item = ClaimedEvent> {
        let key = key(webhook);
        (0..count).map(move |_| ClaimedEvent {
            key: key.clone(),
            event: QueuedEvent {
                id: Uuid::now_v7(),
                attempts: 0,
                kind: EventKind::Registered,
                at: OffsetDateTime::UNIX_EPOCH,
                user: None,
                session: None,
                version: None,
                detail: None,
                profile: None,
            },
            lease_until: OffsetDateTime::UNIX_EPOCH,
            stopped_for: None,
        })
    }

    fn unavailable() -> StoreError {
        StoreError::Unavailable { store: "Postgres", source: "gone".into() }
    }

    impl WebhookEvents for FakeQueue {
        async fn webhooks_with_due_events(&self) -> Result<Vec<WebhookKey>, StoreError> {
            let mut keys: Vec<_> = self.due.lock().iter().map(|claimed| claimed.key.clone()).collect();
            keys.dedup();
            Ok(keys)
        }

        async fn claim_events(
            &self,
            webhooks: &[ClaimableWebhook],
            limit: usize,
            lease: Duration,
        ) -> Result<Vec<ClaimedEvent>, StoreError> {
            assert_eq!(lease, LEASE);
            self.claim_limits.lock().push(limit);
            self.webhooks_per_claim.lock().push(webhooks.len());
            let (mut due, mut in_flight) = (self.due.lock(), self.in_flight.lock());
            let mut claimed = Vec::new();
            for event in std::mem::take(&mut *due) {
                let count = in_flight.entry(event.key.clone()).or_default();
                let webhook = webhooks.iter().find(|webhook| webhook.key == event.key);
                let room = webhook.map_or(0, |webhook| webhook.room);
                let same_namespace = |other: &&ClaimedEvent| namespace_of(&other.key) == namespace_of(&event.key);
                let taken = claimed.iter().filter(same_namespace).count();
                let is_leased = event.key.webhook.as_str().starts_with("leased");
                if claimed.len() < limit && taken < room && *count < 16 && !is_leased {
                    *count += 1;
                    claimed.push(event);
                } else {
                    due.push(event);
                }
            }
            Ok(claimed)
        }

        async fn finish_event(&self, claimed: &ClaimedEvent, outcome: EventOutcome) -> Result<(), StoreError> {
            {
                let mut failures = self.failing_finishes.lock();
                if *failures > 0 {
                    *failures -= 1;
                    return Err(unavailable());
                }
            }
            *self.in_flight.lock().get_mut(&claimed.key).unwrap() -= 1;
            self.finished.send((claimed.key.clone(), outcome)).unwrap();
            Ok(())
        }

        async fn fetch_events(&self, _: &WebhookKey, _: u16, _: Duration) -> Result<Vec<QueuedEvent>, StoreError> {
            unreachable!("only consumers fetch")
        }

        async fn acknowledge_events(&self, _: &WebhookKey, _: &[Uuid]) -> Result<u64, StoreError> {
            unreachable!("only consumers acknowledge")
        }

        fn subscribe_to_new_events(&self) -> Receiver<String> {
            self.notifications.subscribe()
        }

        async fn delivery_states(&self, _: &[KnownWebhook]) -> Result<BTreeMap<WebhookKey, DeliveryState>, StoreError> {
            unreachable!("the worker reports no states")
        }

        async fn delete_dummy_events(&self) -> Result<u64, StoreError> {
            unreachable!("the scheduler deletes nothing")
        }

        async fn event_backlog(&self) -> Result<EventBacklog, StoreError> {
            Ok(EventBacklog::default())
        }
    }

    /// The webhooks named `hangs…` belong to a separate namespace.
    fn namespace_of(key: &WebhookKey) -> &'static str {
        if key.webhook.as_str().starts_with("hangs") { "loud" } else { "quiet" }
    }

    /// Sends immediately, except to the webhooks named `hangs…`: their events first wait for a permit. Nothing can be
    /// sent to the webhook `unknown`.
    struct FakeSender {
        released: Semaphore,
        started: mpsc::UnboundedSender<String>,
    }

    impl Sender for FakeSender {
        fn namespace_if_sendable(&self, _: &str, webhook: &str) -> Option<String> {
            (webhook != "unknown").then(|| namespace_of(&key(webhook)).to_owned())
        }

        async fn send(&self, claimed: &ClaimedEvent) -> EventOutcome {
            self.started.send(claimed.key.webhook.to_string()).unwrap();
            if claimed.key.webhook.as_str().starts_with("hangs") {
                self.released.acquire().await.unwrap().forget();
            }
            EventOutcome::Sent
        }
    }

    struct RunningWorker {
        queue: Arc<FakeQueue>,
        sender: Arc<FakeSender>,
        started: mpsc::UnboundedReceiver<String>,
        finished: mpsc::UnboundedReceiver<(WebhookKey, EventOutcome)>,
        shutdown: CancellationToken,
        worker: tokio::task::JoinHandle<()>,
    }

    fn run(due: Vec<ClaimedEvent>) -> RunningWorker {
        let (started_sender, started) = mpsc::unbounded_channel();
        let (finished_sender, finished) = mpsc::unbounded_channel();
        let queue = Arc::new(FakeQueue {
            due: Mutex::new(due),
            in_flight: Mutex::default(),
            claim_limits: Mutex::default(),
            webhooks_per_claim: Mutex::default(),
            failing_finishes: Mutex::default(),
            finished: finished_sender,
            notifications: broadcast::Sender::new(1),
        });
        let sender = Arc::new(FakeSender { released: Semaphore::new(0), started: started_sender });
        let shutdown = CancellationToken::new();
        let worker = WebhookWorker {
            stores: Arc::clone(&queue),
            sender: Arc::clone(&sender),
            env: Arc::new(Env::system()),
            metrics: WebhookMetrics::register(&mut Registry::default()),
        };
        let worker = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { worker.schedule(&shutdown).await }
        });
        RunningWorker { queue, sender, started, finished, shutdown, worker }
    }

    impl RunningWorker {
        async fn wait_for_started(&mut self, count: usize) -> Vec<String> {
            let mut started = Vec::new();
            while started.len() < count {
                let next = timeout(Duration::from_secs(20), self.started.recv()).await;
                started.push(next.expect("another delivery starts").unwrap());
            }
            started
        }

        async fn stop(self) {
            self.shutdown.cancel();
            timeout(Duration::from_secs(20), self.worker).await.expect("the worker ends").unwrap();
        }
    }

    #[tokio::test]
    async fn a_hanging_receiver_delays_no_other_receiver() {
        let mut running = run(events("hangs", 100).chain(events("crm", 100)).collect());
        let started = running.wait_for_started(116).await;
        assert_eq!(started.iter().filter(|webhook| *webhook == "hangs").count(), 16);
        running.queue.due.lock().extend(events("crm", 5));
        running.queue.notifications.send("shop".to_owned()).unwrap();
        assert_eq!(running.wait_for_started(5).await, ["crm"; 5]);
        assert!(running.queue.claim_limits.lock().iter().all(|limit| *limit <= MAX_IN_FLIGHT));
        running.sender.released.add_permits(1000);
        running.stop().await;
    }

    #[tokio::test]
    async fn one_namespace_gets_at_most_half_of_the_deliveries() {
        let due = ["hangs1", "hangs2", "hangs3", "hangs4"].into_iter().flat_map(|webhook| events(webhook, 100));
        let mut running = run(due.collect());
        running.wait_for_started(32).await;
        running.queue.due.lock().extend(events("crm", 5));
        running.queue.notifications.send("shop/crm".to_owned()).unwrap();
        assert_eq!(running.wait_for_started(5).await, ["crm"; 5]);
        assert_eq!(running.queue.in_flight.lock().values().sum::<usize>(), 32);
        running.sender.released.add_permits(1000);
        running.stop().await;
    }

    #[test]
    fn a_namespace_leaves_at_least_as_many_deliveries_free_as_it_uses() {
        let in_flight = InFlight::default();
        let first: Vec<_> = (0..32).map(|_| in_flight.count("one".to_owned())).collect();
        assert_eq!((in_flight.room("one", 32), in_flight.room("two", 32)), (0, 16));
        drop(first);
        assert_eq!(in_flight.room("one", 64), 32);
        assert!(in_flight.0.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_limited_to_some_webhooks_but_every_webhook_is_claimed_eventually() {
        let leased = (0..MAX_WEBHOOKS_PER_CLAIM + 44).map(|number| format!("leased{number}"));
        let leased = leased.flat_map(|webhook| events(&webhook, 1).collect::<Vec<_>>());
        let mut running = run(leased.chain(events("crm", 1)).collect());
        assert_eq!(running.wait_for_started(1).await, ["crm"], "the last webhook of the list");
        let claimed = running.queue.webhooks_per_claim.lock().clone();
        assert!(claimed.iter().all(|webhooks| *webhooks == MAX_WEBHOOKS_PER_CLAIM), "{claimed:?}");
        running.stop().await;
    }

    #[tokio::test]
    async fn events_that_the_server_cannot_send_stay_in_the_queue() {
        let mut running = run(events("unknown", 3).chain(events("crm", 1)).collect());
        assert_eq!(running.wait_for_started(1).await, ["crm"]);
        running.finished.recv().await.unwrap();
        assert_eq!(running.queue.due.lock().len(), 3);
        running.stop().await;
    }

    #[tokio::test(start_paused = true)]
    async fn storing_the_outcome_is_retried_without_a_second_delivery() {
        let mut running = run(Vec::new());
        *running.queue.failing_finishes.lock() = 5;
        running.queue.due.lock().extend(events("crm", 1));
        let (key, outcome) = running.finished.recv().await.unwrap();
        assert_eq!(key.webhook.as_str(), "crm");
        assert!(matches!(outcome, EventOutcome::Sent));
        assert_eq!(running.wait_for_started(1).await, ["crm"], "it was sent once");
        running.stop().await;
    }

    #[tokio::test]
    async fn the_worker_waits_for_a_running_delivery_before_it_ends() {
        let mut running = run(events("hangs", 1).collect());
        running.wait_for_started(1).await;
        running.shutdown.cancel();
        running.sender.released.add_permits(1);
        assert!(running.finished.recv().await.is_some());
        running.stop().await;
    }
}
