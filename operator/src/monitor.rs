//! Reads what the server pods report, and derives from it whether every pod serves each App's published revision.

mod endpoints;
mod pod;
mod pod_states;
mod rollout;
mod stream;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
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
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, interval, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::{
    endpoints::{PodEndpoint, pods_of_slices},
    pod_states::PodStates,
    stream::Connector,
};
pub(crate) use self::{pod::WebhookStates, pod_states::MonitorEvent, rollout::RolloutState};
use crate::{backoff, watch::WATCH_SECONDS};

/// How often timeouts are checked.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// How the servers respond to a document with the state `Released`, which asks them to free an appID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseResponse {
    /// The App had no users, and a server has marked the appID as free in the database.
    Freed,
    /// The App has users, or a server rejects the document.
    Reserved,
    /// The servers did not respond in time.
    Unanswered,
}

/// A handle to the state of all server pods. Cloning it is cheap.
#[derive(Clone)]
pub(crate) struct Monitor {
    states: Arc<Mutex<PodStates>>,
    changes: watch::Sender<()>,
    connector: Connector,
}

// === impl Monitor ===

impl Monitor {
    /// Starts a monitor that watches the EndpointSlices of `service`, the Service of the servers' operations port.
    /// Keeps one stream to each server pod. The monitor ends when `stop` is cancelled.
    pub(crate) fn start(
        client: kube::Client,
        namespace: &str,
        service: &str,
        events: mpsc::UnboundedSender<MonitorEvent>,
        stop: CancellationToken,
    ) -> (Self, JoinHandle<()>) {
        let monitor = Self::new(events, stream::tcp_connector());
        let api = Api::<EndpointSlice>::namespaced(client, namespace);
        let config =
            watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}")).timeout(WATCH_SECONDS);
        let follower = monitor.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = follower.watch_endpoints(api, config, &stop) => {}
                () = follower.run_ticks() => {}
            }
        });
        (monitor, task)
    }

    /// Creates a monitor that follows no pods.
    #[cfg(test)]
    pub(crate) fn without_pods() -> Self {
        Self::new(mpsc::unbounded_channel().0, stream::tcp_connector())
    }

    fn new(events: mpsc::UnboundedSender<MonitorEvent>, connector: Connector) -> Self {
        let changes = watch::Sender::new(());
        let states = Arc::new(Mutex::new(PodStates::new(events, changes.clone())));
        Self { states, changes, connector }
    }

    /// Whether every serving pod has reported its revisions, or 15 s have passed since the EndpointSlices were first
    /// read.
    pub(crate) fn is_settled(&self) -> bool {
        self.states().is_settled()
    }

    pub(crate) async fn wait_settled(&self) {
        let mut changes = self.changes.subscribe();
        while !self.is_settled() {
            let _ = timeout(TICK_INTERVAL, changes.changed()).await;
        }
    }

    /// Records the published revision, and returns the current rollout state. From now on, the monitor triggers a
    /// reconcile of the App when its rollout state differs from the returned one and is not undecided.
    pub(crate) fn expect_revision(&self, app: &AppId, revision: &Revision) -> RolloutState {
        self.states().expect_revision(app, revision)
    }

    /// Returns the rollout state of an App if it does not matter which of these revisions a pod serves. Unlike
    /// [`Self::expect_revision`], this triggers no reconcile.
    pub(crate) fn rollout_of_any(&self, app: &AppId, revisions: &[Revision]) -> RolloutState {
        self.states().rollout_of_any(app, revisions)
    }

    /// Whether a serving pod serves this revision of an App.
    pub(crate) fn is_reported(&self, app: &AppId, revision: &Revision) -> bool {
        self.states().is_reported(app, revision)
    }

    /// Drops the published revision of an App. Called if no document is published for the App any more.
    pub(crate) fn forget(&self, app: &AppId) {
        self.states().forget(app);
    }

    /// Waits while serving pods are behind or have not reported, at most for `max_wait`. Returns the rollout state.
    pub(crate) async fn wait_for_rollout(&self, app: &AppId, max_wait: Duration) -> RolloutState {
        let mut changes = self.changes.subscribe();
        let end = Instant::now() + max_wait;
        loop {
            let state = self.states().rollout(app);
            match &state {
                // Does not wait if no revision is published, or if no pod is serving at the moment.
                RolloutState::Undecided { pods } if pods.is_empty() => return state,
                RolloutState::Behind { .. } | RolloutState::Undecided { .. } if Instant::now() < end => {}
                RolloutState::Behind { .. }
                | RolloutState::Undecided { .. }
                | RolloutState::Rejected { .. }
                | RolloutState::KeysLost { .. }
                | RolloutState::Silent { .. }
                | RolloutState::NoServers
                | RolloutState::Complete { .. } => return state,
            }
            let _ = timeout_at(end, changes.changed()).await;
        }
    }

    /// Waits until no serving pod serves the App and one pod has checked whether the App has users, but at most for
    /// `max_wait`.
    pub(crate) async fn wait_released(&self, app: &AppId, revision: &Revision, max_wait: Duration) -> ReleaseResponse {
        let mut changes = self.changes.subscribe();
        let end = Instant::now() + max_wait;
        loop {
            let (state, progress) = {
                let mut states = self.states();
                (states.expect_revision(app, revision), states.deletion(app))
            };
            match (state, progress) {
                (RolloutState::Complete { .. }, Some(DeletionProgress { done: true, .. })) => {
                    return ReleaseResponse::Freed;
                }
                (RolloutState::Complete { .. }, Some(DeletionProgress { users_left: 1.., .. })) => {
                    return ReleaseResponse::Reserved;
                }
                // Servers of an earlier version reject the document, because they do not know the state `Released`.
                (RolloutState::Rejected { .. } | RolloutState::KeysLost { .. }, _) => return ReleaseResponse::Reserved,
                _ if Instant::now() >= end => return ReleaseResponse::Unanswered,
                _ => {}
            }
            let _ = timeout_at(end, changes.changed()).await;
        }
    }

    /// Returns the highest format that all serving pods support and that this operator can write.
    pub(crate) fn format(&self) -> u32 {
        self.states().format()
    }

    /// Returns the serving pods that support no format above `format`, as a list for a message: the names of the first
    /// pods, and the number of the other pods.
    pub(crate) fn pods_limited_to_format(&self, format: u32) -> Vec<String> {
        self.states().pods_limited_to_format(format)
    }

    /// Returns how many pods are serving, and how many of them are silent.
    pub(crate) fn pod_counts(&self) -> (usize, usize) {
        self.states().pod_counts()
    }

    /// Returns the furthest progress that any serving pod reports for the deletion of an App's users.
    pub(crate) fn deletion(&self, app: &AppId) -> Option<DeletionProgress> {
        self.states().deletion(app)
    }

    /// Returns the state of each webhook of the App. If several serving pods report on a webhook, the worst state
    /// counts.
    pub(crate) fn webhook_states(&self, app: &AppId) -> WebhookStates {
        self.states().webhook_states(app)
    }

    /// Returns the worst finding that any serving pod reports on a Provider, or `None` if no serving pod reports one.
    pub(crate) fn finding(&self, namespace: &str, name: &str) -> Option<Reason> {
        self.states().finding(&(namespace.to_owned(), name.to_owned()))
    }

    fn states(&self) -> MutexGuard<'_, PodStates> {
        self.states.lock()
    }

    async fn watch_endpoints(&self, api: Api<EndpointSlice>, config: watcher::Config, stop: &CancellationToken) {
        let name = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
        let (mut slices, mut listed) = (BTreeMap::new(), BTreeMap::new());
        let events = watcher(api, config).backoff(backoff::for_watch());
        pin_mut!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => {
                    listed.clear();
                    continue;
                }
                Ok(Event::InitApply(slice)) => {
                    listed.insert(name(&slice), slice);
                    continue;
                }
                Ok(Event::InitDone) => slices = std::mem::take(&mut listed),
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
            self.update_endpoints(pods_of_slices(slices.values()), stop);
        }
    }

    fn update_endpoints(&self, endpoints: HashMap<String, PodEndpoint>, stop: &CancellationToken) {
        let streams = self.states().update_endpoints(endpoints, stop);
        for pod in streams {
            let (states, connector) = (Arc::clone(&self.states), Arc::clone(&self.connector));
            tokio::spawn(async move {
                pod.stop.run_until_cancelled(stream::run(&states, &connector, &pod)).await;
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
