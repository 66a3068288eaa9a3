//! Follows what the server pods report, and derives how far each App's revision is rolled out.

mod pod_states;
mod pods;
mod stream;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use latchkey_crds::{
    conditions::Reason,
    rendered::{DeletionProgress, Revision},
    types::AppId,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, interval, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::{
    pod_states::{PodStates, PodStream},
    pods::PodEndpoint,
    stream::Connector,
};
use crate::{backoff::ShortBackoff, watch::WATCH_SECONDS};

/// A pod that sends nothing for this long is silent.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);
/// Three heartbeats. A stream that is quiet for this long is opened again, so that a connection whose packets are
/// dropped does not yet make a silent pod.
const STREAM_TIMEOUT: Duration = Duration::from_secs(6);
/// The limit for one line while it keeps arriving: a hello of many Apps has several MiB.
const LINE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the clock is checked.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// What has to be reconciled again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MonitorEvent {
    /// Apps with a changed rollout state, or with progress in the deletion of their users.
    Apps(Vec<AppId>),
    /// The lowest format of the servers changed, so every App may render differently.
    AllApps,
    /// The servers' finding on this Provider changed.
    Provider { namespace: String, name: String },
}

/// How far the servers have rolled out an App's revision, the worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RolloutState {
    /// A serving pod rejects exactly the published document.
    Rejected { pod: String, reason: String },
    /// The same, because the App's users have other keys, which were lost.
    KeysLost { pod: String },
    /// Pods that sent nothing for 15 s while serving.
    Silent { pods: Vec<String> },
    /// Serving pods that report another revision, or none.
    Behind { pods: Vec<String> },
    /// Pods that have not reported yet: no evidence.
    Undecided { pods: Vec<String> },
    /// No pod has been serving for 15 s.
    NoServers,
    /// Every serving pod serves it.
    Complete { servers: usize },
}

/// The servers' response to a document with the state `ReleaseResponse`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseResponse {
    /// The App had no users, and the database marks the appID as free.
    Freed,
    /// It has users, or a server rejects the document.
    Reserved,
    /// The servers did not respond in time.
    Unanswered,
}

/// A cheap handle to the state of all server pods.
#[derive(Clone)]
pub(crate) struct Monitor {
    states: Arc<Mutex<PodStates>>,
    changes: watch::Sender<()>,
    connector: Connector,
}

// === impl Monitor ===

impl Monitor {
    /// Follows the EndpointSlices of the ops Service and keeps one stream to each server pod until `stop`.
    pub(crate) fn start(
        client: kube::Client,
        namespace: &str,
        service: &str,
        events: mpsc::UnboundedSender<MonitorEvent>,
        stop: CancellationToken,
    ) -> (Self, JoinHandle<()>) {
        let probe = Self::new(events, stream::tcp_connector());
        let api = Api::<EndpointSlice>::namespaced(client, namespace);
        let config =
            watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}")).timeout(WATCH_SECONDS);
        let follower = probe.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = follower.watch_endpoints(api, config, &stop) => {}
                () = follower.run_ticks() => {}
            }
        });
        (probe, task)
    }

    /// A monitor that follows no pods.
    #[cfg(test)]
    pub(crate) fn without_pods() -> Self {
        Self::new(mpsc::unbounded_channel().0, stream::tcp_connector())
    }

    fn new(events: mpsc::UnboundedSender<MonitorEvent>, dial: Connector) -> Self {
        let turns = watch::Sender::new(());
        Self { states: Arc::new(Mutex::new(PodStates::new(events, turns.clone()))), changes: turns, connector: dial }
    }

    /// Every serving pod has reported its set of revisions, or 15 s have passed since the EndpointSlices were first
    /// read.
    pub(crate) fn is_settled(&self) -> bool {
        self.states().is_settled()
    }

    pub(crate) async fn wait_settled(&self) {
        let mut turns = self.changes.subscribe();
        while !self.is_settled() {
            let _ = timeout(TICK_INTERVAL, turns.changed()).await;
        }
    }

    /// Records the published revision, so that only a change of the rollout state triggers a reconcile. Returns the
    /// present state.
    pub(crate) fn expect_revision(&self, app: &AppId, revision: &Revision) -> RolloutState {
        self.states().expect_revision(app, revision)
    }

    /// Nothing is published for the App any more.
    pub(crate) fn forget(&self, app: &AppId) {
        self.states().forget(app);
    }

    /// Waits until the rollout state is decided or the limit has passed.
    pub(crate) async fn wait_for_rollout(&self, app: &AppId, limit: Duration) -> RolloutState {
        let mut turns = self.changes.subscribe();
        let end = Instant::now() + limit;
        loop {
            let verdict = self.states().rollout(app);
            match &verdict {
                // There is no pod that could report.
                RolloutState::Undecided { pods } if pods.is_empty() => return verdict,
                RolloutState::Behind { .. } | RolloutState::Undecided { .. } if Instant::now() < end => {}
                RolloutState::Behind { .. }
                | RolloutState::Undecided { .. }
                | RolloutState::Rejected { .. }
                | RolloutState::KeysLost { .. }
                | RolloutState::Silent { .. }
                | RolloutState::NoServers
                | RolloutState::Complete { .. } => return verdict,
            }
            let _ = timeout_at(end, turns.changed()).await;
        }
    }

    /// Waits until no serving pod serves the App and one has checked for users, or until the limit has passed.
    pub(crate) async fn wait_released(&self, app: &AppId, revision: &Revision, limit: Duration) -> ReleaseResponse {
        let mut turns = self.changes.subscribe();
        let end = Instant::now() + limit;
        loop {
            let (verdict, looked) = {
                let mut table = self.states();
                (table.expect_revision(app, revision), table.deletion(app))
            };
            match (verdict, looked) {
                (RolloutState::Complete { .. }, Some(DeletionProgress { done: true, .. })) => {
                    return ReleaseResponse::Freed;
                }
                (RolloutState::Complete { .. }, Some(DeletionProgress { users_left: 1.., .. })) => {
                    return ReleaseResponse::Reserved;
                }
                // This includes servers of an earlier version, which do not know such documents.
                (RolloutState::Rejected { .. } | RolloutState::KeysLost { .. }, _) => return ReleaseResponse::Reserved,
                _ if Instant::now() >= end => return ReleaseResponse::Unanswered,
                _ => {}
            }
            let _ = timeout_at(end, turns.changed()).await;
        }
    }

    /// The lowest format that all serving pods support, at most the one that this operator writes.
    pub(crate) fn format(&self) -> u32 {
        self.states().format()
    }

    /// The serving pods that support this format at most.
    pub(crate) fn pods_at_format(&self, format: u32) -> Vec<String> {
        self.states().pods_at_format(format)
    }

    /// How many pods are serving, and how many of them are silent.
    pub(crate) fn pod_counts(&self) -> (usize, usize) {
        self.states().pod_counts()
    }

    /// The furthest progress that any serving pod reports for the deletion of an App's users.
    pub(crate) fn deletion(&self, app: &AppId) -> Option<DeletionProgress> {
        self.states().deletion(app)
    }

    /// The servers' finding on a Provider: the worst that any serving pod reports, or `Unbound` without a report.
    pub(crate) fn finding(&self, namespace: &str, name: &str) -> Option<Reason> {
        self.states().finding(&(namespace.to_owned(), name.to_owned()))
    }

    fn states(&self) -> MutexGuard<'_, PodStates> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn watch_endpoints(&self, api: Api<EndpointSlice>, config: watcher::Config, stop: &CancellationToken) {
        let name = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
        let (mut slices, mut fresh) = (BTreeMap::new(), BTreeMap::new());
        let events = watcher(api, config).backoff(ShortBackoff::for_watch());
        pin_mut!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => {
                    fresh.clear();
                    continue;
                }
                Ok(Event::InitApply(slice)) => {
                    fresh.insert(name(&slice), slice);
                    continue;
                }
                Ok(Event::InitDone) => slices = std::mem::take(&mut fresh),
                Ok(Event::Apply(slice)) => {
                    slices.insert(name(&slice), slice);
                }
                Ok(Event::Delete(slice)) => {
                    slices.remove(&name(&slice));
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "cannot watch the EndpointSlices of the servers; retrying");
                    continue;
                }
            }
            self.update_endpoints(pods::pods_of_slices(slices.values()), stop);
        }
    }

    fn update_endpoints(&self, seen: HashMap<String, PodEndpoint>, stop: &CancellationToken) {
        let begun = self.states().update_endpoints(seen, stop);
        for PodStream { uid, address, stop } in begun {
            let probe = self.clone();
            tokio::spawn(async move {
                let keep = stream::run(&probe, &uid, address, &stop);
                stop.run_until_cancelled(keep).await;
            });
        }
    }

    async fn run_ticks(&self) {
        let mut ticks = interval(TICK_INTERVAL);
        loop {
            ticks.tick().await;
            self.states().check_timeouts();
        }
    }
}
