//! Compares what every server pod has reported with what is published. Does no I/O and never waits.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
};

use latchkey_crds::{
    conditions::Reason,
    rendered::{DeletionProgress, FORMAT, Hello, ProviderReport, RejectedDocument, Revision, RevisionChange},
    types::AppId,
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::{LINE_TIMEOUT, MonitorEvent, RolloutState, SILENCE_TIMEOUT, pods::PodEndpoint};

/// A server that reports more Apps is broken; its stream is closed.
const MAX_APPS: usize = 200_000;
const MAX_REASON_BYTES: usize = 1024;
/// Reports on more Providers are dropped.
const MAX_PROVIDERS: usize = 200_000;
/// The possible findings on a Provider, the best first. Other reports, of a later server version, are dropped.
const FINDINGS: [Reason; 5] = [
    Reason::Reachable,
    Reason::TokenEndpointFailed,
    Reason::KeysUnreadable,
    Reason::DiscoveryFailed,
    Reason::ClientRefused,
];
/// At most this many pods are named in a message; the rest is a number.
const MAX_NAMED_PODS: usize = 3;

pub(super) struct PodStates {
    pods: Pods,
    expected: HashMap<AppId, ExpectedRevision>,
    /// When the EndpointSlices were first read.
    read_at: Option<Instant>,
    /// Since when no pod is serving.
    no_serving_pod_since: Option<Instant>,
    /// The lowest format at the last notification.
    notified_format: u32,
    events: mpsc::UnboundedSender<MonitorEvent>,
    /// Notifies waiting tasks that something may have changed.
    changes: watch::Sender<()>,
}

/// The pods, and the time-outs that apply to them. Only the periodic check changes the latter, so that no caller gets a
/// rollout state whose change does not trigger a reconcile.
#[derive(Default)]
struct Pods {
    /// By uid.
    by_uid: BTreeMap<String, Pod>,
    /// No pod has been serving for 15 s.
    no_serving_pod: bool,
}

struct ExpectedRevision {
    revision: RevisionBytes,
    /// The rollout state that was last returned or notified; `None` if it was undecided.
    last_reported: Option<RolloutState>,
}

struct Pod {
    name: String,
    address: SocketAddr,
    is_serving: bool,
    /// When the pod last sent anything.
    last_heard: Instant,
    /// When the last complete line arrived.
    last_line: Instant,
    is_silent: bool,
    report: Option<PodReport>,
    /// It has sent a hello on a stream that is still open.
    is_connected: bool,
    /// The finding on each Provider, as an index into [`FINDINGS`].
    findings: HashMap<ProviderKey, usize>,
    /// The overall finding on each Provider before the hello, until the server has reported everything that it knows.
    findings_before_hello: OverallFindings,
    stream: CancellationToken,
}

struct PodReport {
    format: u32,
    apps: HashMap<AppId, AppReport>,
}

/// What a pod reports of an App.
#[derive(Default, PartialEq)]
struct AppReport {
    revision: Option<RevisionBytes>,
    rejected: Option<Box<RejectedRevision>>,
    deletion: Option<DeletionProgress>,
}

#[derive(PartialEq)]
struct RejectedRevision {
    revision: Option<RevisionBytes>,
    reason: String,
    keys_lost: bool,
}

/// A Provider, by namespace and name.
type ProviderKey = (String, String);

/// The worst finding on each Provider, as an index into [`FINDINGS`]; `None` without a report.
type OverallFindings = HashMap<ProviderKey, Option<usize>>;

/// A revision as its 32 bytes, because there is one for each App and pod.
type RevisionBytes = [u8; 32];

/// A stream to keep open until it is cancelled.
pub(super) struct PodStream {
    pub(super) uid: String,
    pub(super) address: SocketAddr,
    pub(super) stop: CancellationToken,
}

/// A server reported too many Apps.
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

    // --- What is asked of it

    /// Whether every serving pod has reported, or 15 s have passed since the EndpointSlices were first read.
    pub(super) fn is_settled(&self) -> bool {
        self.read_at
            .is_some_and(|at| at.elapsed() >= SILENCE_TIMEOUT || self.pods.serving().all(|pod| pod.report.is_some()))
    }

    pub(super) fn expect_revision(&mut self, app: &AppId, revision: &Revision) -> RolloutState {
        let Some(revision) = revision_bytes(revision) else { return RolloutState::Undecided { pods: Vec::new() } };
        let verdict = self.pods.rollout(app, &revision);
        self.expected.insert(app.clone(), ExpectedRevision { revision, last_reported: if_decided(&verdict) });
        verdict
    }

    pub(super) fn forget(&mut self, app: &AppId) {
        self.expected.remove(app);
    }

    /// Without an expected revision nothing is decided, and there is no pod to wait for.
    pub(super) fn rollout(&self, app: &AppId) -> RolloutState {
        match self.expected.get(app) {
            Some(expected) => self.pods.rollout(app, &expected.revision),
            None => RolloutState::Undecided { pods: Vec::new() },
        }
    }

    /// The lowest format that all serving pods support.
    pub(super) fn format(&self) -> u32 {
        let formats = self.pods.serving().filter_map(|pod| Some(pod.report.as_ref()?.format));
        formats.min().map_or(FORMAT, |format| format.min(FORMAT))
    }

    pub(super) fn pods_at_format(&self, format: u32) -> Vec<String> {
        let at = |pod: &&Pod| pod.report.as_ref().is_some_and(|told| told.format <= format);
        shorten(&self.pods.serving().filter(at).map(|pod| pod.name.as_str()).collect::<Vec<_>>())
    }

    pub(super) fn pod_counts(&self) -> (usize, usize) {
        (self.pods.serving().count(), self.pods.serving().filter(|pod| pod.is_silent).count())
    }

    pub(super) fn deletion(&self, app: &AppId) -> Option<DeletionProgress> {
        let deletions = self.pods.serving().filter_map(|pod| pod.report.as_ref()?.apps.get(app)?.deletion);
        deletions.min_by_key(|deletion| (!deletion.done, deletion.users_left))
    }

    pub(super) fn finding(&self, provider: &ProviderKey) -> Option<Reason> {
        self.pods.finding(provider).and_then(|at| FINDINGS.get(at).copied())
    }

    /// For how many Providers a pod's findings are stored: present ones, and those before its hello.
    #[cfg(test)]
    pub(super) fn stored_findings(&self, uid: &str) -> (usize, usize) {
        self.pods.by_uid.get(uid).map_or((0, 0), |pod| (pod.findings.len(), pod.findings_before_hello.len()))
    }

    // --- What changes it

    /// Replaces the set of pods. Returns the streams to open; the streams of removed pods are cancelled.
    pub(super) fn update_endpoints(
        &mut self,
        seen: HashMap<String, PodEndpoint>,
        stop: &CancellationToken,
    ) -> Vec<PodStream> {
        let now = Instant::now();
        self.read_at.get_or_insert(now);
        let turning = self.pods.findings_before_change(&seen);
        self.pods.by_uid.retain(|uid, pod| {
            let stays = seen.get(uid).is_some_and(|seen| seen.address == pod.address);
            if !stays {
                pod.stream.cancel();
            }
            stays
        });
        let mut begun = Vec::new();
        for (uid, PodEndpoint { name, address, is_serving: counts }) in seen {
            if let Some(pod) = self.pods.by_uid.get_mut(&uid) {
                if counts && !pod.is_serving {
                    // Its time to report starts again.
                    (pod.last_heard, pod.last_line, pod.is_silent) = (now, now, false);
                }
                pod.is_serving = counts;
                pod.clear_findings_if_gone();
                continue;
            }
            let stream = stop.child_token();
            begun.push(PodStream { uid: uid.clone(), address, stop: stream.clone() });
            let pod = Pod {
                name,
                address,
                is_serving: counts,
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
        self.notify_changed_providers(turning);
        begun
    }

    /// Marks pods that are now silent, and notices if no pod has been serving for too long.
    pub(super) fn check_timeouts(&mut self) {
        let mut turned = false;
        for pod in self.pods.by_uid.values_mut() {
            if pod.is_serving && !pod.is_silent && pod.last_heard.elapsed() >= SILENCE_TIMEOUT {
                pod.is_silent = true;
                turned = true;
            }
        }
        if !self.pods.no_serving_pod
            && self.no_serving_pod_since.is_some_and(|since| since.elapsed() >= SILENCE_TIMEOUT)
        {
            self.pods.no_serving_pod = true;
            turned = true;
        }
        if turned {
            self.notify_changed();
        }
    }

    /// Part of a line arrived. A long line leaves no room for heartbeats, so its parts count as signs of life for a
    /// while. But a line that never ends reports nothing, and only a complete line ends a silence.
    pub(super) fn record_part(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) =
            self.pods.pod_of_stream(uid, stream).filter(|pod| !pod.is_silent && pod.last_line.elapsed() < LINE_TIMEOUT)
        {
            pod.last_heard = Instant::now();
        }
    }

    /// A heartbeat arrived.
    pub(super) fn record_heartbeat(&mut self, uid: &str, stream: &CancellationToken) {
        self.record_line(uid, stream);
        self.release_findings(uid, stream);
    }

    fn record_line(&mut self, uid: &str, stream: &CancellationToken) {
        if self.pods.pod_of_stream(uid, stream).is_some_and(Pod::record_line) {
            self.notify_changed();
        }
    }

    /// Clears the pod's findings on a new hello: the server reports them again, unless it is a new container that has
    /// not checked yet.
    fn hold_findings(&mut self, uid: &str, stream: &CancellationToken) {
        let Some(pod) = self.pods.by_uid.get(uid) else { return };
        let providers = pod.findings.keys().filter(|provider| !pod.findings_before_hello.contains_key(*provider));
        // Repeated hellos must not use more memory.
        let room = MAX_PROVIDERS.saturating_sub(pod.findings_before_hello.len());
        let before = providers.take(room).map(|provider| (provider.clone(), self.pods.finding(provider)));
        let before: Vec<_> = before.collect();
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.findings_before_hello.extend(before);
            pod.findings.clear();
        }
    }

    /// After its hello a server first reports all that it knows of Providers. The first other line ends that phase.
    fn release_findings(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            let turning = std::mem::take(&mut pod.findings_before_hello);
            self.notify_changed_providers(turning);
        }
    }

    /// The stream was cut and will be opened again.
    pub(super) fn record_disconnect(&mut self, uid: &str, stream: &CancellationToken) {
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.is_connected = false;
            pod.clear_findings_if_gone();
        }
    }

    /// A server checked a Provider.
    pub(super) fn record_finding(&mut self, uid: &str, stream: &CancellationToken, report: ProviderReport) {
        self.record_line(uid, stream);
        let ProviderReport { namespace, name, reason } = report;
        let key = (namespace, name);
        let Some(at) = FINDINGS.iter().position(|known| known.as_str() == reason) else { return };
        let Some(pod) = self.pods.pod_of_stream(uid, stream) else { return };
        if pod.findings.len() >= MAX_PROVIDERS && !pod.findings.contains_key(&key) {
            return;
        }
        let before_hello = pod.findings_before_hello.remove(&key);
        let before = before_hello.unwrap_or_else(|| self.pods.finding(&key));
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.findings.insert(key.clone(), at);
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
        for (app, refused) in hello.refused {
            apps.entry(app).or_default().rejected = Some(RejectedRevision::new(refused));
        }
        let deletions: Vec<_> = hello.deletions.keys().cloned().collect();
        for (app, deletion) in hello.deletions {
            apps.entry(app).or_default().deletion = Some(deletion);
        }
        if apps.len() > MAX_APPS {
            return Err(TooManyApps);
        }
        if let Some(pod) = self.pods.pod_of_stream(uid, stream) {
            pod.report = Some(PodReport { format: hello.format, apps });
            pod.is_connected = true;
            pod.record_line();
            self.hold_findings(uid, stream);
            self.notify_changed();
            self.notify_apps(deletions);
        }
        Ok(())
    }

    pub(super) fn record_change(
        &mut self,
        uid: &str,
        stream: &CancellationToken,
        change: RevisionChange,
    ) -> Result<(), TooManyApps> {
        self.release_findings(uid, stream);
        let Some(pod) = self.pods.pod_of_stream(uid, stream) else { return Ok(()) };
        let was_silent = pod.record_line();
        let Some(report) = pod.report.as_mut() else { return Ok(()) };
        let RevisionChange { app, revision, refused, deletion } = change;
        let known = AppReport {
            revision: revision.as_ref().and_then(revision_bytes),
            rejected: refused.map(RejectedRevision::new),
            deletion,
        };
        let before = if known == AppReport::default() {
            report.apps.remove(&app)
        } else {
            report.apps.insert(app.clone(), known)
        };
        let too_many = report.apps.len() > MAX_APPS;
        let progressed = before.and_then(|known| known.deletion) != deletion;
        if was_silent {
            self.notify_changed();
        } else {
            self.notify_if_changed(&app);
        }
        if progressed {
            self.notify_apps(vec![app]);
        }
        if too_many { Err(TooManyApps) } else { Ok(()) }
    }

    // --- What follows

    /// Triggers a reconcile of the Apps with a changed rollout state.
    fn notify_changed(&mut self) {
        let fleet = &self.pods;
        let turned = self.expected.iter_mut().filter_map(|(app, expected)| expected.update(fleet, app));
        let woken = turned.cloned().collect();
        self.notify_apps(woken);
        let format = self.format();
        if std::mem::replace(&mut self.notified_format, format) != format {
            self.notify(MonitorEvent::AllApps);
        }
        self.changes.send_replace(());
    }

    fn notify_if_changed(&mut self, app: &AppId) {
        let turned = self.expected.get_mut(app).and_then(|expected| expected.update(&self.pods, app)).cloned();
        self.notify_apps(turned.into_iter().collect());
        self.changes.send_replace(());
    }

    fn notify_apps(&self, apps: Vec<AppId>) {
        if !apps.is_empty() {
            self.notify(MonitorEvent::Apps(apps));
        }
    }

    /// Triggers a reconcile of the Providers whose finding changed. Without any report, the previous finding remains.
    fn notify_changed_providers(&self, turning: OverallFindings) {
        for (provider, before) in turning {
            let after = self.pods.finding(&provider);
            if after.is_some() && after != before {
                self.notify_provider(provider);
            }
        }
    }

    fn notify_provider(&self, (namespace, name): ProviderKey) {
        self.notify(MonitorEvent::Provider { namespace, name });
    }

    fn notify(&self, wake: MonitorEvent) {
        // The receiver is gone: the process is ending.
        let _ = self.events.send(wake);
    }
}

// === impl Pods ===

impl Pods {
    fn serving(&self) -> impl Iterator<Item = &Pod> {
        self.by_uid.values().filter(|pod| pod.is_serving)
    }

    /// The pod of a stream, or `None` for an old stream: the pod with this uid may have another address now.
    fn pod_of_stream(&mut self, uid: &str, stream: &CancellationToken) -> Option<&mut Pod> {
        if stream.is_cancelled() { None } else { self.by_uid.get_mut(uid) }
    }

    /// The findings that may change, with their present values (or those before the hello): those of pods that are
    /// removed, or that start or stop serving.
    fn findings_before_change(&self, seen: &HashMap<String, PodEndpoint>) -> OverallFindings {
        let stays = |uid: &String, pod: &Pod| {
            seen.get(uid).is_some_and(|seen| seen.address == pod.address && seen.is_serving == pod.is_serving)
        };
        let mut turning = OverallFindings::new();
        for (_, pod) in self.by_uid.iter().filter(|(uid, pod)| !stays(uid, pod)) {
            for provider in pod.findings.keys() {
                turning.entry(provider.clone()).or_insert_with(|| self.finding(provider));
            }
            turning.extend(pod.findings_before_hello.clone());
        }
        turning
    }

    /// The worst finding of the serving pods, as an index into [`FINDINGS`].
    fn finding(&self, provider: &ProviderKey) -> Option<usize> {
        self.serving().filter_map(|pod| pod.findings.get(provider).copied()).max()
    }

    /// The worst of: rejected, silent, behind, not reported.
    fn rollout(&self, app: &AppId, revision: &RevisionBytes) -> RolloutState {
        let (mut silent, mut behind, mut unreported, mut servers) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut refused = None;
        for pod in self.serving() {
            let name = pod.name.as_str();
            if pod.is_silent {
                silent.push(name);
                continue;
            }
            let Some(report) = &pod.report else {
                unreported.push(name);
                continue;
            };
            let known = report.apps.get(app);
            let refusal = known.and_then(|known| known.rejected.as_ref());
            if let Some(refusal) = refusal.filter(|refusal| refusal.revision.as_ref() == Some(revision)) {
                refused.get_or_insert((name, refusal));
            } else if known.and_then(|known| known.revision.as_ref()) == Some(revision) {
                servers += 1;
            } else {
                behind.push(name);
            }
        }
        if let Some((pod, refusal)) = refused {
            let (pod, reason) = (pod.to_owned(), refusal.reason.clone());
            if refusal.keys_lost { RolloutState::KeysLost { pod } } else { RolloutState::Rejected { pod, reason } }
        } else if !silent.is_empty() {
            RolloutState::Silent { pods: shorten(&silent) }
        } else if !behind.is_empty() {
            RolloutState::Behind { pods: shorten(&behind) }
        } else if !unreported.is_empty() {
            RolloutState::Undecided { pods: shorten(&unreported) }
        } else if servers > 0 {
            RolloutState::Complete { servers }
        } else if self.no_serving_pod {
            RolloutState::NoServers
        } else {
            RolloutState::Undecided { pods: Vec::new() }
        }
    }
}

// === impl ExpectedRevision ===

impl ExpectedRevision {
    /// The App, if its rollout state differs from the one that was last returned or notified. An undecided state does
    /// not count as a change.
    fn update<'a>(&mut self, fleet: &Pods, app: &'a AppId) -> Option<&'a AppId> {
        let now = if_decided(&fleet.rollout(app, &self.revision))?;
        if self.last_reported.as_ref().is_some_and(|last| is_same(last, &now)) {
            return None;
        }
        self.last_reported = Some(now);
        Some(app)
    }
}

// === impl Pod ===

impl Pod {
    /// Drops the findings of a pod that is neither serving nor connected: its container has ended or soon will, and the
    /// next one checks again.
    fn clear_findings_if_gone(&mut self) {
        if !self.is_serving && !self.is_connected {
            self.findings.clear();
            self.findings_before_hello.clear();
        }
    }

    /// Records a complete line. Returns whether the pod was silent.
    fn record_line(&mut self) -> bool {
        let now = Instant::now();
        (self.last_heard, self.last_line) = (now, now);
        std::mem::take(&mut self.is_silent)
    }
}

// === impl Refused ===

impl RejectedRevision {
    fn new(refused: RejectedDocument) -> Box<Self> {
        let RejectedDocument { revision, mut reason, keys_lost } = refused;
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        Box::new(Self { revision: revision_bytes(&revision), reason, keys_lost })
    }
}

/// The bytes of a revision. `None`: what the server reports is no revision, so it is not the published one.
fn revision_bytes(revision: &Revision) -> Option<RevisionBytes> {
    let text = revision.as_str().as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = [0; 32];
    if text.len() != 64 {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

fn shorten(pods: &[&str]) -> Vec<String> {
    let mut named: Vec<_> = pods.iter().take(MAX_NAMED_PODS).map(|pod| (*pod).to_owned()).collect();
    if pods.len() > MAX_NAMED_PODS {
        named.push(format!("{} more", pods.len() - MAX_NAMED_PODS));
    }
    named
}

fn if_decided(verdict: &RolloutState) -> Option<RolloutState> {
    (!matches!(verdict, RolloutState::Undecided { .. })).then(|| verdict.clone())
}

/// Whether nothing relevant changed. The number of servers is not relevant.
fn is_same(one: &RolloutState, other: &RolloutState) -> bool {
    matches!((one, other), (RolloutState::Complete { .. }, RolloutState::Complete { .. })) || one == other
}
