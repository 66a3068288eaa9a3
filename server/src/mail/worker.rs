//! Takes rows from the outbox and has them delivered, so that no App holds up another.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{MailMetrics, MailSettings, backoff, delivery::Delivery};
use crate::{
    config::Apps,
    domain::{
        clock::Env,
        ports::{Claimed, Codes, Outbox, Outcome, Sessions, Users},
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
                        running.spawn(carry_out(outbox.clone(), courier.clone(), row));
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

async fn carry_out<O: Outbox, C: Courier>(outbox: Arc<O>, courier: Arc<C>, row: Claimed) {
    let until = Instant::now() + LEASE;
    let Ok(outcome) = timeout(WHOLE, courier.deliver(&row)).await else {
        warn!(app = %row.app, row = %row.id, "a row took too long and is left until its lease has passed");
        return;
    };
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
    if let Err(panicked) = ended {
        error!(error = &panicked as &dyn std::error::Error, "a row was given up; its lease will pass");
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
