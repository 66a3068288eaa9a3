//! Compares what every server pod has reported with what is published. Does no I/O and never waits.

use std::{collections::HashMap, net::SocketAddr};

use latchkey_crds::{
    conditions::Reason,
    rendered::{DeletionProgress, FORMAT, Hello, ProviderReport, Revision, RevisionChange},
    types::AppId,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{
    endpoints::PodEndpoint,
    pod::{
        AppReport, FINDINGS, LINE_TIMEOUT, OverallFindings, Pod, PodReport, Pods, ProviderKey, RejectedRevision,
        SILENCE_TIMEOUT, WebhookStates, revision_bytes, webhook_states,
    },
    rollout::{ExpectedRevision, RolloutState, clone_if_decided, shorten},
};

/// The maximum number of Apps that a server can report. A server that reports more is broken, so its stream is closed.
const MAX_APPS: usize = 200_000;
/// The maximum number of Providers on which the findings of a pod are stored. Reports on more Providers are dropped.
const MAX_PROVIDERS: usize = 200_000;

/// Which objects must be reconciled again because of new reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MonitorEvent {
    /// Apps with a changed rollout state, with progress in the deletion of their users, or with a changed state of a
    /// webhook.
    Apps(Vec<AppId>),
    /// The highest format that all servers support has changed. So the servers may now be too old for some Apps, or no
    /// longer too old for them.
    AllApps,
    /// The servers' finding on this Provider has changed.
    Provider { namespace: String, name: String },
}

/// The state of all server pods, and the published revisions.
pub(super) struct PodStates {
    pods: Pods,
    expected: HashMap<AppId, ExpectedRevision>,
    /// When the EndpointSlices were first read.
    read_at: Option<Instant>,
    /// Since when there has been no serving pod. `None`: a pod is serving, or the EndpointSlices were not read yet.
    no_serving_pod_since: Option<Instant>,
    /// The highest format that all serving pods supported when [`MonitorEvent::AllApps`] was last sent, or at the
    /// start.
    notified_format: u32,
    events: mpsc::UnboundedSender<MonitorEvent>,
    /// Notifies waiting tasks that something may have changed.
    changes: watch::Sender<()>,
}

/// A stream of reports from one pod, which is kept open until `stop` is cancelled.
pub(super) struct PodStream {
    pub(super) uid: String,
    pub(super) address: SocketAddr,
    pub(super) stop: CancellationToken,
}

/// The error if a server reports too many Apps.
#[derive(Debug, thiserror::Error)]
#[error("it reports too many Apps")]
pub(super) struct TooManyApps;

// === impl PodStates ===

impl PodStates {
    pub(super) fn new(events: mpsc::UnboundedSender<MonitorEvent>, changes: watch::Sender<()>) -> Self {
        Self {
            pods: Pods::default(),
            expected: HashMap::new(),
            read_at: None,
            no_serving_pod_since: None,
            notified_format: FORMAT,
            events,
            changes,
        }
    }

    // --- Queries

    /// Whether every serving pod has reported, or 15 s have passed since the EndpointSlices were first read.
    pub(super) fn is_settled(&self) -> bool {
        self.read_at
            .is_some_and(|at| at.elapsed() >= SILENCE_TIMEOUT || self.pods.serving().all(|pod| pod.report.is_some()))
    }

    /// Records the published revision of an App, and returns the current rollout state.
    pub(super) fn expect_revision(&mut self, app: &AppId, revision: &Revision) -> RolloutState {
        let Some(revision) = revision_bytes(revision) else { return RolloutState::Undecided { pods: Vec::new() } };
        let state = self.pods.rollout(app, &revision);
        self.expected.insert(app.clone(), ExpectedRevision { revision, last_reported: clone_if_decided(&state) });
        state
    }

    pub(super) fn forget(&mut self, app: &AppId) {
        self.expected.remove(app);
    }

    /// Returns the rollout state of an App. Without a published revision, the state is undecided and names no pod.
    pub(super) fn rollout(&self, app: &AppId) -> RolloutState {
        match self.expected.get(app) {
            Some(expected) => self.pods.rollout(app, &expected.revision),
            None => RolloutState::Undecided { pods: Vec::new() },
        }
    }

    /// Like `rollout`, but for several revisions: a pod is up to date if it serves any of them.
    pub(super) fn rollout_of_any(&self, app: &AppId, revisions: &[Revision]) -> RolloutState {
        let revisions: Vec<_> = revisions.iter().filter_map(revision_bytes).collect();
        self.pods.rollout_of_any(app, &revisions)
    }

    pub(super) fn is_reported(&self, app: &AppId, revision: &Revision) -> bool {
        revision_bytes(revision).is_some_and(|revision| self.pods.is_reported(app, &revision))
    }

    /// Returns the highest format that all serving pods support.
    pub(super) fn format(&self) -> u32 {
        let formats = self.pods.serving().filter_map(|pod| Some(pod.report.as_ref()?.format));
        formats.min().map_or(FORMAT, |format| format.min(FORMAT))
    }

    pub(super) fn pods_limited_to_format(&self, format: u32) -> Vec<String> {
        let is_limited = |pod: &&Pod| pod.report.as_ref().is_some_and(|report| report.format <= format);
        shorten(&self.pods.serving().filter(is_limited).map(|pod| pod.name.as_str()).collect::<Vec<_>>())
    }

    pub(super) fn pod_counts(&self) -> (usize, usize) {
        (self.pods.serving().count(), self.pods.serving().filter(|pod| pod.is_silent).count())
    }

    pub(super) fn deletion(&self, app: &AppId) -> Option<DeletionProgress> {
        let deletions = self.pods.serving().filter_map(|pod| pod.report.as_ref()?.apps.get(app)?.deletion);
        deletions.min_by_key(|deletion| (!deletion.done, deletion.users_left))
    }

    pub(super) fn webhook_states(&self, app: &AppId) -> WebhookStates {
        self.pods.webhook_states(app)
    }

    pub(super) fn finding(&self, provider: &ProviderKey) -> Option<Reason> {
        self.pods.finding(provider).and_then(|index| FINDINGS.get(index).copied())
    }

    /// Returns how many findings are stored for a pod: its current findings, and the overall findings before its hello.
    #[cfg(test)]
    pub(super) fn stored_findings(&self, uid: &str) -> (usize, usize) {
        self.pods.by_uid.get(uid).map_or((0, 0), |pod| (pod.findings.len(), pod.findings_before_hello.len()))
    }

    // --- Changes

    /// Replaces the set of pods. Returns the streams that the caller must open. Cancels the streams of removed pods.
    pub(super) fn update_endpoints(
        &mut self,
        endpoints: HashMap<String, PodEndpoint>,
        stop: &CancellationToken,
    ) -> Vec<PodStream> {
        let now = Instant::now();
        self.read_at.get_or_insert(now);
        let findings_before = self.pods.findings_before_change(&endpoints);
        let webhooks_before = self.pods.webhooks_of_pods(|uid, pod| {
            let endpoint = endpoints.get(uid);
            endpoint.is_none_or(|it| it.address != pod.address || it.is_serving != pod.is_serving)
        });
        self.pods.by_uid.retain(|uid, pod| {
            let stays = endpoints.get(uid).is_some_and(|endpoint| endpoint.address == pod.address);
            if !stays {
                pod.stream.cancel();
            }
            stays
        });
        let mut streams = Vec::new();
        for (uid, PodEndpoint { name, address, is_serving }) in endpoints {
            if let Some(pod) = self.pods.by_uid.get_mut(&uid) {
                if is_serving && !pod.is_serving {
                    // From now on, the pod has 15 s to report again.
                    (pod.last_heard, pod.last_line, pod.is_silent) = (now, now, false);
                }
                pod.is_serving = is_serving;
                pod.clear_findings_if_gone();
                continue;
            }
            let stream = stop.child_token();
            streams.push(PodStream { uid: uid.clone(), address, stop: stream.clone() });
            let pod = Pod {
                name,
                address,
                is_serving,
                last_heard: now,
                last_line: now,
                is_silent: false,
                report: None,
                is_connected: false,
                findings: HashMap::new(),
                findings_before_hello: OverallFindings::new(),
                stream,
            };
            self.pods.by_uid.insert(uid, pod);
        }
        if self.pods.serving().next().is_some() {
            self.no_serving_pod_since = None;
            self.pods.no_serving_pod = false;
        } else {
            self.no_serving_pod_since.get_or_insert(now);
        }
        self.notify_changed();
        self.notify_changed_providers(findings_before);
        self.notify_changed_webhooks(webhooks_before);
        streams
    }

    /// Marks pods that have become silent, and sets `no_serving_pod` if there has been no serving pod for too long.
    pub(super) fn check_timeouts(&mut self) {
        let mut changed = false;
        for pod in self.pods.by_uid.values_mut() {
            if pod.is_serving && !pod.is_silent && pod.last_heard.elapsed() >= SILENCE_TIMEOUT {
                pod.is_silent = true;
                changed = true;
            }
        }
        if !self.pods.no_serving_pod
            && self.no_serving_pod_since.is_some_and(|since| since.elapsed() >= SILENCE_TIMEOUT)
        {
            self.pods.no_serving_pod = true;
            changed = true;
        }
        if changed {
            self.notify_changed();
        }
    }

    /// Records that a part of a line arrived. A server cannot send a heartbeat within a long line, so while parts of a
    /// line arrive, the pod does not become silent (for at most [`LINE_TIMEOUT`]). If the pod is silent already, only a
    /// complete line ends the silence.
    pub(super) fn record_part(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) =
            self.pods.pod_of_stream(uid, stream).filter(|pod| !pod.is_silent && pod.last_line.elapsed() < LINE_TIMEOUT)
        {
            pod.last_heard = Instant::now();
        }
    }

    /// Records a heartbeat.
    pub(super) fn record_heartbeat(&mut self, uid: &str, stream: &CancellationToken) {
        self.record_line(uid, stream);
        self.end_hello(uid, stream);
    }

    fn record_line(&mut self, uid: &str, stream: &CancellationToken) {
        if self.pods.pod_of_stream(uid, stream).is_some_and(Pod::record_line) {
            self.notify_changed();
        }
    }

    /// Clears the pod's findings. For each Provider of these findings, stores the worst finding of all serving pods
    /// before the hello. After a hello the server reports its findings again, unless it is a new container, which has
    /// not checked any Provider yet.
    fn begin_hello(&mut self, uid: &str, stream: &CancellationToken) {
        let Some(pod) = self.pods.by_uid.get(uid) else { return };
        let providers = pod.findings.keys().filter(|provider| !pod.findings_before_hello.contains_key(*provider));
        // The number is limited, because otherwise repeated hellos could use more and more memory.
        let room = MAX_PROVIDERS.saturating_sub(pod.findings_before_hello.len());
        let before = providers.take(room).map(|provider| (provider.clone(), self.pods.finding(provider)));
        let before: Vec<_> = before.collect();
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.findings_before_hello.extend(before);
            pod.findings.clear();
        }
    }

    /// Ends the phase after a hello in which the server reports all its findings. The first line that is not a finding
    /// ends this phase.
    fn end_hello(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            let findings_before = std::mem::take(&mut pod.findings_before_hello);
            self.notify_changed_providers(findings_before);
        }
    }

    /// Records that there is no stream to the pod at the moment: the stream was cut, or could not be opened. The
    /// monitor opens it again.
    pub(super) fn record_disconnect(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.is_connected = false;
            pod.clear_findings_if_gone();
        }
    }

    /// Records what a server found when it checked a Provider.
    pub(super) fn record_finding(&mut self, uid: &str, stream: &CancellationToken, report: ProviderReport) {
        self.record_line(uid, stream);
        let ProviderReport { namespace, name, reason } = report;
        let key = (namespace, name);
        let Some(index) = FINDINGS.iter().position(|finding| finding.as_str() == reason) else { return };
        let Some(pod) = self.pods.pod_of_stream(uid, stream) else { return };
        if pod.findings.len() >= MAX_PROVIDERS && !pod.findings.contains_key(&key) {
            return;
        }
        let before_hello = pod.findings_before_hello.remove(&key);
        let before = before_hello.unwrap_or_else(|| self.pods.finding(&key));
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.findings.insert(key.clone(), index);
        }
        if self.pods.finding(&key) != before {
            self.notify_provider(key);
        }
    }

    pub(super) fn record_hello(
        &mut self,
        uid: &str,
        stream: &CancellationToken,
        hello: Hello,
    ) -> Result<(), TooManyApps> {
        let mut apps: HashMap<AppId, AppReport> = HashMap::with_capacity(hello.revisions.len().min(MAX_APPS));
        for (app, revision) in &hello.revisions {
            apps.entry(app.clone()).or_default().revision = revision_bytes(revision);
        }
        for (app, rejected) in hello.refused {
            apps.entry(app).or_default().rejected = Some(RejectedRevision::new(rejected));
        }
        let deletions: Vec<_> = hello.deletions.keys().cloned().collect();
        for (app, deletion) in hello.deletions {
            apps.entry(app).or_default().deletion = Some(deletion);
        }
        let mut webhooks_before = self.pods.webhooks_of_pods(|other, _| other == uid);
        for (app, report) in hello.webhooks {
            webhooks_before.entry(app.clone()).or_insert_with(|| self.pods.webhook_states(&app));
            apps.entry(app).or_default().webhooks = webhook_states(report);
        }
        if apps.len() > MAX_APPS {
            return Err(TooManyApps);
        }
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.report = Some(PodReport { format: hello.format, apps });
            pod.is_connected = true;
            pod.record_line();
            self.begin_hello(uid, stream);
            self.notify_changed();
            self.notify_apps(deletions);
            self.notify_changed_webhooks(webhooks_before);
        }
        Ok(())
    }

    pub(super) fn record_change(
        &mut self,
        uid: &str,
        stream: &CancellationToken,
        change: RevisionChange,
    ) -> Result<(), TooManyApps> {
        self.end_hello(uid, stream);
        let webhooks_before = self.pods.webhook_states(&change.app);
        let Some(pod) = self.pods.pod_of_stream(uid, stream) else { return Ok(()) };
        let was_silent = pod.record_line();
        let Some(report) = pod.report.as_mut() else { return Ok(()) };
        let RevisionChange { app, revision, refused, deletion, webhooks } = change;
        let reported = AppReport {
            revision: revision.as_ref().and_then(revision_bytes),
            rejected: refused.map(RejectedRevision::new),
            deletion,
            webhooks: webhook_states(webhooks),
        };
        let before = if reported == AppReport::default() {
            report.apps.remove(&app)
        } else {
            report.apps.insert(app.clone(), reported)
        };
        let too_many = report.apps.len() > MAX_APPS;
        let has_progressed = before.and_then(|before| before.deletion) != deletion;
        if was_silent {
            self.notify_changed();
        } else {
            self.notify_if_changed(&app);
        }
        if has_progressed {
            self.notify_apps(vec![app.clone()]);
        }
        self.notify_changed_webhooks(HashMap::from([(app, webhooks_before)]));
        if too_many { Err(TooManyApps) } else { Ok(()) }
    }

    // --- Notifications

    /// Triggers a reconcile of the Apps with a changed rollout state.
    fn notify_changed(&mut self) {
        let pods = &self.pods;
        let changed = self.expected.iter_mut().filter_map(|(app, expected)| expected.update(pods, app));
        let changed = changed.cloned().collect();
        self.notify_apps(changed);
        let format = self.format();
        if std::mem::replace(&mut self.notified_format, format) != format {
            self.notify(MonitorEvent::AllApps);
        }
        self.changes.send_replace(());
    }

    fn notify_if_changed(&mut self, app: &AppId) {
        let changed = self.expected.get_mut(app).and_then(|expected| expected.update(&self.pods, app)).cloned();
        self.notify_apps(changed.into_iter().collect());
        self.changes.send_replace(());
    }

    fn notify_apps(&self, apps: Vec<AppId>) {
        if !apps.is_empty() {
            self.notify(MonitorEvent::Apps(apps));
        }
    }

    /// Triggers a reconcile of each Provider with a changed finding. If no serving pod reports a finding any more, the
    /// previous finding remains in the status.
    fn notify_changed_providers(&self, findings_before: OverallFindings) {
        for (provider, before) in findings_before {
            let after = self.pods.finding(&provider);
            if after.is_some() && after != before {
                self.notify_provider(provider);
            }
        }
    }

    /// Triggers a reconcile of each App with a webhook that has a changed state. If no serving pod reports on a webhook
    /// any more, its previous state remains in the status.
    fn notify_changed_webhooks(&self, before: HashMap<AppId, WebhookStates>) {
        let has_changed = |app: &AppId, before: &WebhookStates| {
            self.pods.webhook_states(app).iter().any(|(name, state)| before.get(name) != Some(state))
        };
        let changed = before.iter().filter(|(app, before)| has_changed(app, before)).map(|(app, _)| app.clone());
        self.notify_apps(changed.collect());
    }

    fn notify_provider(&self, (namespace, name): ProviderKey) {
        self.notify(MonitorEvent::Provider { namespace, name });
    }

    fn notify(&self, event: MonitorEvent) {
        // If the receiver is gone, the process is ending.
        let _ = self.events.send(event);
    }
}
