//! Triggers reconciles of Clients and of their Apps for the changes that the watches report. Namespaces take turns, and
//! an App is reconciled at most twice per second because of its Clients.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::{
    context::Context,
    watch::{FairQueue, NamespacedName, ReconcileQueue},
};

/// The maximum number of changes that are handled per second, except after a pause (see [`BURST`]). Each change causes
/// at most one publish, and a few small requests.
const RATE: u32 = 200;
/// The maximum number of changes that are handled without a wait, after a time without changes.
const BURST: u32 = 200;
/// The minimum time between two reconciles that Clients trigger for the same App.
const TRIGGER_INTERVAL: Duration = Duration::from_millis(500);
/// If [`AppTriggers`] has this many entries, the entries of Apps without a recent trigger are dropped.
const MAX_TRIGGERED_APPS: usize = 1024;

/// Handles the changes until asked to stop.
pub(crate) async fn run(context: Arc<Context>, changes: Arc<FairQueue>, stop: &CancellationToken) {
    let handle_all = async {
        let mut pacer = ChangePacer::new();
        loop {
            let change = changes.pop().await;
            pacer.wait().await;
            context.reconcile_queue.enqueue_client(change.client);
            if !change.app.name().is_empty() {
                context.app_triggers.trigger(change.app, &context.reconcile_queue);
            }
        }
    };
    stop.run_until_cancelled(handle_all).await;
}

/// Limits the rate at which changes are handled: each change gets a time slot.
struct ChangePacer {
    /// The time slot of the newest change. It is in the future while this change waits.
    last_slot: Instant,
}

/// For each App, the time of the last reconcile that its Clients triggered. The time is in the future while this
/// reconcile is scheduled.
#[derive(Default)]
pub(crate) struct AppTriggers(Mutex<HashMap<NamespacedName, Instant>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    Now,
    At(Instant),
    /// A reconcile is already scheduled for later, and includes this change.
    Scheduled,
}

// === impl ChangePacer ===

impl ChangePacer {
    fn new() -> Self {
        Self { last_slot: Instant::now() }
    }

    async fn wait(&mut self) {
        let (interval, now) = (Duration::from_secs(1) / RATE, Instant::now());
        // After a pause, at most `BURST` unused slots are available.
        self.last_slot = self.last_slot.max(now.checked_sub(interval * BURST).unwrap_or(now)) + interval;
        if self.last_slot > now {
            sleep_until(self.last_slot).await;
        }
    }
}

// === impl AppTriggers ===

impl AppTriggers {
    /// Queues an App because one of its Clients has changed. If the last trigger was less than half a second ago,
    /// queues the App when half a second has passed since that trigger.
    pub(crate) fn trigger(&self, app: NamespacedName, queue: &ReconcileQueue) {
        match self.next(&app) {
            Trigger::Now => queue.enqueue_app(app),
            Trigger::At(time) => {
                let queue = queue.clone();
                tokio::spawn(async move {
                    sleep_until(time).await;
                    queue.enqueue_app(app);
                });
            }
            Trigger::Scheduled => {}
        }
    }

    /// Decides when to reconcile the App after a change to one of its Clients, and records this time.
    fn next(&self, app: &NamespacedName) -> Trigger {
        let now = Instant::now();
        let mut times = self.0.lock();
        let last = times.get(app).copied();
        let trigger = match last {
            Some(last) if last > now => return Trigger::Scheduled,
            Some(last) if last + TRIGGER_INTERVAL > now => Trigger::At(last + TRIGGER_INTERVAL),
            Some(_) | None => Trigger::Now,
        };
        if last.is_none() && times.len() >= MAX_TRIGGERED_APPS {
            times.retain(|_, last| *last + TRIGGER_INTERVAL > now);
        }
        times.insert(app.clone(), if let Trigger::At(time) = trigger { time } else { now });
        trigger
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_app_is_triggered_at_most_twice_per_second_and_no_change_is_missed() {
        let app = NamespacedName::new("identity", "platform");
        let triggers = AppTriggers::default();
        assert_eq!(triggers.next(&app), Trigger::Now, "the first change does not wait");
        let begun = Instant::now();
        assert_eq!(triggers.next(&app), Trigger::At(begun + TRIGGER_INTERVAL));
        assert_eq!(triggers.next(&app), Trigger::Scheduled);
        assert_eq!(triggers.next(&NamespacedName::new("identity", "other")), Trigger::Now);
        tokio::time::advance(TRIGGER_INTERVAL).await;
        // The reconcile that was scheduled before may have begun before this change, so another one is scheduled.
        assert_eq!(triggers.next(&app), Trigger::At(begun + TRIGGER_INTERVAL * 2));
        tokio::time::advance(TRIGGER_INTERVAL * 3).await;
        assert_eq!(triggers.next(&app), Trigger::Now);
    }

    #[tokio::test(start_paused = true)]
    async fn apps_without_recent_changes_are_forgotten() {
        let triggers = AppTriggers::default();
        for number in 0..5 * MAX_TRIGGERED_APPS {
            triggers.next(&NamespacedName::new("identity", &number.to_string()));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let count = triggers.0.lock().len();
        assert!(count <= MAX_TRIGGERED_APPS, "{count}");
    }

    #[tokio::test(start_paused = true)]
    async fn further_changes_cause_only_one_later_reconcile_of_an_app() {
        let (queue, mut receivers) = ReconcileQueue::new();
        let triggers = AppTriggers::default();
        for _ in 0..10 {
            triggers.trigger(NamespacedName::new("identity", "platform"), &queue);
        }
        assert_eq!(receivers.apps.try_recv().unwrap().name(), "platform");
        assert!(receivers.apps.try_recv().is_err());
        let began = Instant::now();
        assert_eq!(receivers.apps.recv().await.unwrap().name(), "platform");
        assert!(began.elapsed() >= TRIGGER_INTERVAL);
        assert!(receivers.apps.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn many_changes_are_handled_at_the_rate_and_a_few_without_a_wait() {
        let begun = Instant::now();
        let mut pacer = ChangePacer::new();
        for _ in 0..5 * RATE {
            pacer.wait().await;
        }
        assert!(begun.elapsed() >= Duration::from_secs(4) && begun.elapsed() <= Duration::from_secs(6));
        tokio::time::advance(Duration::from_secs(60)).await;
        let begun = Instant::now();
        for _ in 0..BURST / 2 {
            pacer.wait().await;
        }
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
