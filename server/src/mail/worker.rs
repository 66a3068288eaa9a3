//! Takes rows from the outbox and has them delivered, so that no App holds up another.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span, error, info, warn};

use super::{MailMetrics, MailSettings, backoff, delivery::Delivery};
use crate::{
    config::Apps,
    domain::{
        clock::Env,
        ports::{Claimed, Codes, Outbox, Outcome, Sessions, Task, Users},
    },
};

/// Rows in hand at one time. Each is a connection and a few buffers.
const IN_FLIGHT: usize = 16;
/// Of one App, over all servers: a relay that hangs takes a quarter of this one.
const PER_APP: usize = 4;
/// Stores, look-up and the ten seconds of SMTP fit in twice over; a server that dies gives its rows back after this.
const LEASE: Duration = Duration::from_secs(60);
/// What reads and sends a row is given up after this, so that it cannot outlive its lease.
const WHOLE: Duration = Duration::from_secs(40);
/// How often the outbox is asked when nothing wakes the worker.
const POLL: Duration = Duration::from_secs(1);
const BACKLOG: Duration = Duration::from_secs(15);
/// What runs at the end may run for so long: one send, and its row settled.
const DRAIN: Duration = Duration::from_secs(15);

/// Sends what the outbox holds until it is told to stop.
pub struct Worker<S> {
    stores: Arc<S>,
    delivery: Arc<Delivery<S>>,
    env: Arc<Env>,
    metrics: MailMetrics,
}

/// Carries out what a row asks for.
pub(super) trait Courier: Send + Sync + 'static {
    fn deliver(&self, claimed: &Claimed) -> impl Future<Output = Outcome> + Send;

    /// Called every few seconds.
    fn tidy(&self) {}
}

// === impl Worker ===

impl<S: Outbox + Users + Codes + Sessions + Send + Sync + 'static> Worker<S> {
    pub fn new(stores: S, apps: Arc<Apps>, env: Arc<Env>, settings: MailSettings, metrics: MailMetrics) -> Self {
        let stores = Arc::new(stores);
        let delivery = Delivery::new(stores.clone(), apps, env.clone(), settings, metrics.clone());
        Self { stores, delivery: Arc::new(delivery), env, metrics }
    }

    /// Runs until `shutdown`, then lets what is in hand come to its end for a while. A row that does not is free again
    /// when its lease passes.
    pub async fn run(self, shutdown: CancellationToken) {
        tokio::join!(
            schedule(self.stores.clone(), self.delivery, &self.env, &self.metrics, &shutdown),
            measure(&*self.stores, &self.metrics, &shutdown),
        );
    }
}

/// Claims whenever there is room: when a row is done, when rows may have come, and every second.
async fn schedule<O, C>(outbox: Arc<O>, courier: Arc<C>, env: &Env, metrics: &MailMetrics, shutdown: &CancellationToken)
where
    O: Outbox + Send + Sync + 'static,
    C: Courier,
{
    let mut running = JoinSet::new();
    let mut away = false;
    while !shutdown.is_cancelled() {
        metrics.in_flight(running.len());
        let room = IN_FLIGHT - running.len();
        if room > 0 {
            let claimed = tokio::select! {
                claimed = outbox.claim(room, PER_APP, LEASE) => claimed,
                () = shutdown.cancelled() => break,
            };
            match claimed {
                Ok(rows) => {
                    if std::mem::take(&mut away) {
                        info!("the outbox is there again");
                    }
                    for row in rows {
                        let span = span(&row);
                        running.spawn(carry_out(outbox.clone(), courier.clone(), row).instrument(span));
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        error!(error = &error as &dyn std::error::Error, "the outbox cannot be read; mail waits");
                    }
                }
            }
            metrics.in_flight(running.len());
        }
        let full = running.len() >= IN_FLIGHT;
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(ended) = running.join_next() => {
                report(ended);
                while let Some(ended) = running.try_join_next() {
                    report(ended);
                }
            }
            // While the store is away its notifications mean nothing, and a broken one must not spin.
            () = outbox.notified(), if !full && !away => {}
            () = sleep(backoff::spread(POLL, env.unit())), if !full => {}
        }
        courier.tidy();
    }
    let left = timeout(DRAIN, async {
        while let Some(ended) = running.join_next().await {
            report(ended);
        }
    });
    if left.await.is_err() {
        warn!(rows = running.len(), "rows in hand at the end are left to another server");
    }
    metrics.in_flight(0);
}

/// A trace of its own, linked to the request that asked for it: that one has long been answered.
fn span(row: &Claimed) -> Span {
    let (name, mail) = match &row.task {
        Task::Mail(mail) | Task::MailToFormer(mail, _) => ("deliver mail", Some(mail.kind.as_str())),
        Task::CarryEpoch(_) => ("carry epoch", None),
        Task::CarryProfile(_) => ("carry profile", None),
    };
    let span = latchkey_trace::span!(
        "consumer",
        "outbox row",
        otel.name = name,
        latchkey.app = row.app.as_str(),
        latchkey.mail = mail,
        latchkey.outbox.attempts = row.attempts,
        latchkey.outbox.outcome = tracing::field::Empty,
    );
    if let Some(trace) = &row.trace {
        latchkey_trace::follow(&span, trace);
    }
    span
}

async fn carry_out<O: Outbox, C: Courier>(outbox: Arc<O>, courier: Arc<C>, row: Claimed) {
    let until = Instant::now() + LEASE;
    let Ok(outcome) = timeout(WHOLE, courier.deliver(&row)).await else {
        warn!(app = %row.app, row = %row.id, "a row took too long and is left until its lease has passed");
        return;
    };
    let ended = match &outcome {
        Outcome::Done => "done",
        Outcome::Retry { .. } => "retry",
        Outcome::Wait { .. } => "wait",
        Outcome::Dead { .. } => "dead",
    };
    Span::current().record("latchkey.outbox.outcome", ended);
    // A mail that was sent and not settled is sent again: so this is tried for as long as the row is ours.
    let mut pause = Duration::from_millis(100);
    while let Err(error) = outbox.settle(&row, outcome.clone()).await {
        if Instant::now() + pause >= until {
            error!(
                app = %row.app,
                row = %row.id,
                error = &error as &dyn std::error::Error,
                "a row cannot be settled and will be carried out again"
            );
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    // The panic hook has logged the place. The text of the error can quote a value, such as a code.
    if ended.is_err() {
        error!("the delivery of a mail panicked; it is tried again when its lease ends");
    }
}

async fn measure<O: Outbox>(outbox: &O, metrics: &MailMetrics, shutdown: &CancellationToken) {
    loop {
        let asked = tokio::select! {
            asked = outbox.backlog() => asked,
            () = shutdown.cancelled() => return,
        };
        // Where it fails, claiming fails too and has told so.
        if let Ok(backlog) = asked {
            metrics.backlog(backlog);
        }
        tokio::select! {
            () = sleep(BACKLOG) => {}
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
        mail::{EpochNews, Mail, MailKind},
        ports::{Backlog, StoreError},
    };

    /// Rows in a list, handed out as the port says: in turn over Apps, a bounded number of each.
    #[derive(Default)]
    struct Script {
        due: Mutex<VecDeque<Claimed>>,
        held: Mutex<Vec<Claimed>>,
        claims: Mutex<Vec<usize>>,
        settles_that_fail: Mutex<u32>,
        away: Mutex<u32>,
        woken: Notify,
        settled: Mutex<Vec<(String, Outcome)>>,
    }

    fn away() -> StoreError {
        StoreError::Unavailable { store: "Postgres", source: "gone".into() }
    }

    impl Script {
        fn with(rows: &[(&str, usize)]) -> Arc<Self> {
            let script = Self::default();
            for (app, count) in rows {
                script.add(app, *count);
            }
            Arc::new(script)
        }

        fn add(&self, app: &str, count: usize) {
            let requested_at = OffsetDateTime::UNIX_EPOCH;
            let mail = Mail { kind: MailKind::Reset, user: None, requested_at };
            for _ in 0..count {
                let mut due = self.due.lock().unwrap();
                due.push_back(Claimed {
                    id: Uuid::now_v7(),
                    app: app.parse().unwrap(),
                    attempts: 0,
                    task: Task::Mail(mail.clone()),
                    lease_until: requested_at,
                    trace: None,
                });
            }
        }
    }

    impl Outbox for Script {
        async fn enqueue(&self, _: &AppId, _: Mail) -> Result<(), StoreError> {
            unreachable!("the worker queues nothing")
        }

        async fn claim(&self, most: usize, per_app: usize, lease: Duration) -> Result<Vec<Claimed>, StoreError> {
            assert_eq!(lease, LEASE);
            let mut left = self.away.lock().unwrap();
            if *left > 0 {
                *left -= 1;
                return Err(away());
            }
            self.claims.lock().unwrap().push(most);
            let (mut due, mut held) = (self.due.lock().unwrap(), self.held.lock().unwrap());
            let mut taken = Vec::new();
            for row in std::mem::take(&mut *due) {
                let of_app = held.iter().filter(|other| other.app == row.app).count();
                if taken.len() < most && of_app < per_app {
                    held.push(row.clone());
                    taken.push(row);
                } else {
                    due.push_back(row);
                }
            }
            Ok(taken)
        }

        async fn settle(&self, claimed: &Claimed, outcome: Outcome) -> Result<(), StoreError> {
            let mut left = self.settles_that_fail.lock().unwrap();
            if *left > 0 {
                *left -= 1;
                return Err(away());
            }
            self.held.lock().unwrap().retain(|row| row.id != claimed.id);
            self.settled.lock().unwrap().push((claimed.app.to_string(), outcome));
            Ok(())
        }

        async fn epoch_carried(&self, _: &AppId, _: &EpochNews) -> Result<(), StoreError> {
            unreachable!("requests do this")
        }

        async fn notified(&self) {
            self.woken.notified().await;
        }

        async fn backlog(&self) -> Result<Backlog, StoreError> {
            unreachable!("the scheduler does not ask")
        }
    }

    /// Delivers at once what is not of the App `hangs`, and of that one whatever `released` lets go.
    struct Hands {
        released: Semaphore,
        begun: mpsc::UnboundedSender<String>,
    }

    impl Courier for Hands {
        async fn deliver(&self, claimed: &Claimed) -> Outcome {
            self.begun.send(claimed.app.to_string()).unwrap();
            if claimed.app.as_str() == "hangs" {
                self.released.acquire().await.unwrap().forget();
            }
            Outcome::Done
        }
    }

    struct Running {
        script: Arc<Script>,
        hands: Arc<Hands>,
        begun: mpsc::UnboundedReceiver<String>,
        shutdown: CancellationToken,
        worker: tokio::task::JoinHandle<()>,
    }

    fn run(script: Arc<Script>) -> Running {
        let (sender, begun) = mpsc::unbounded_channel();
        let hands = Arc::new(Hands { released: Semaphore::new(0), begun: sender });
        let shutdown = CancellationToken::new();
        let (outbox, courier, stop) = (script.clone(), hands.clone(), shutdown.clone());
        let worker = tokio::spawn(async move {
            let metrics = MailMetrics::register(&mut Registry::default());
            schedule(outbox, courier, &Env::system(), &metrics, &stop).await;
        });
        Running { script, hands, begun, shutdown, worker }
    }

    impl Running {
        async fn begins(&mut self, count: usize) -> Vec<String> {
            let mut apps = Vec::new();
            while apps.len() < count {
                let next = timeout(Duration::from_secs(20), self.begun.recv()).await;
                apps.push(next.expect("nothing more was begun").unwrap());
            }
            apps
        }

        async fn stop(self) {
            self.shutdown.cancel();
            timeout(Duration::from_secs(20), self.worker).await.expect("the worker ends").unwrap();
        }
    }

    #[tokio::test]
    async fn one_app_that_hangs_holds_up_nobody() {
        let mut running = run(Script::with(&[("hangs", 100), ("shop", 40), ("blog", 40)]));
        let begun = running.begins(84).await;
        assert_eq!(begun.iter().filter(|app| *app == "hangs").count(), PER_APP);
        // Later rows of others do not wait for it either.
        running.script.add("shop", 5);
        running.script.woken.notify_one();
        assert_eq!(running.begins(5).await, ["shop"; 5]);
        assert!(running.script.claims.lock().unwrap().iter().all(|most| (1..=IN_FLIGHT).contains(most)));
        running.hands.released.add_permits(1_000);
        assert_eq!(running.begins(96).await, ["hangs"; 96]);
        running.stop().await;
    }

    #[tokio::test]
    async fn rows_are_found_by_polling_alone() {
        let mut running = run(Script::with(&[]));
        running.script.add("shop", 1);
        assert_eq!(running.begins(1).await, ["shop"]);
        running.stop().await;
    }

    #[tokio::test]
    async fn at_the_end_nothing_is_claimed_and_what_is_in_hand_is_finished() {
        let mut running = run(Script::with(&[("hangs", 6)]));
        running.begins(4).await;
        running.shutdown.cancel();
        running.hands.released.add_permits(1_000);
        let script = running.script.clone();
        running.stop().await;
        assert_eq!(script.settled.lock().unwrap().len(), 4);
        assert_eq!(script.due.lock().unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_row_that_cannot_be_settled_at_first_is_settled_and_not_sent_twice() {
        let script = Script::with(&[("shop", 1)]);
        *script.settles_that_fail.lock().unwrap() = 2;
        let mut running = run(script.clone());
        running.begins(1).await;
        running.stop().await;
        assert!(matches!(script.settled.lock().unwrap()[..], [(_, Outcome::Done)]));
    }

    #[tokio::test]
    async fn an_outbox_that_was_away_is_read_when_it_is_back() {
        let script = Script::with(&[("shop", 1)]);
        *script.away.lock().unwrap() = 1;
        let mut running = run(script);
        assert_eq!(running.begins(1).await, ["shop"]);
        running.stop().await;
    }
}
