//! The server pods, and what each has reported.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    time::Duration,
};

use latchkey_crds::{
    conditions::Reason,
    rendered::{DeletionProgress, RejectedDocument, Revision, WebhookReport},
    types::{AppId, WebhookName},
    webhook::WebhookState,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::endpoints::PodEndpoint;

/// A serving pod that sends nothing for this time counts as silent.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);
/// The maximum time until one line is complete. A hello, the first line of a stream, has several MiB if it lists many
/// Apps.
pub(super) const LINE_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum length of a stored reason, in bytes. Longer reasons are cut.
const MAX_REASON_BYTES: usize = 1024;
/// The maximum number of webhooks of an App, as in the schema. Reports on more webhooks are dropped.
const MAX_WEBHOOKS: usize = 8;
/// The known findings on a Provider (results of a server's last check), the best first. Other findings come from a
/// later version of the server, and are dropped.
pub(super) const FINDINGS: [Reason; 5] = [
    Reason::Reachable,
    Reason::TokenEndpointFailed,
    Reason::KeysUnreadable,
    Reason::DiscoveryFailed,
    Reason::ClientRefused,
];

/// The pods, and which timeouts have passed. Only the periodic check records that a timeout has passed, because this
/// check also triggers the reconciles. Otherwise a caller could read a changed rollout state that has triggered no
/// reconcile.
#[derive(Default)]
pub(super) struct Pods {
    /// The pods, by their uid.
    pub(super) by_uid: BTreeMap<String, Pod>,
    /// Whether there has been no serving pod for 15 s.
    pub(super) no_serving_pod: bool,
}

pub(super) struct Pod {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) is_serving: bool,
    /// When the last bytes from the pod arrived.
    pub(super) last_heard: Instant,
    /// When the last complete line arrived.
    pub(super) last_line: Instant,
    pub(super) is_silent: bool,
    pub(super) report: Option<PodReport>,
    /// Whether the pod has sent a hello on a stream that is still open.
    pub(super) is_connected: bool,
    /// What this pod found when it last checked each Provider, as an index into [`FINDINGS`].
    pub(super) findings: HashMap<ProviderKey, usize>,
    /// For each Provider on which this pod had a finding: the worst finding of all serving pods before this pod's
    /// hello. An entry is dropped when the pod reports on the Provider again, or has reported all its findings.
    pub(super) findings_before_hello: OverallFindings,
    pub(super) stream: CancellationToken,
}

pub(super) struct PodReport {
    pub(super) format: u32,
    pub(super) apps: HashMap<AppId, AppReport>,
}

/// What a pod reports about an App.
#[derive(Default, PartialEq)]
pub(super) struct AppReport {
    pub(super) revision: Option<RevisionBytes>,
    pub(super) rejected: Option<Box<RejectedRevision>>,
    pub(super) deletion: Option<DeletionProgress>,
    /// The reported states of the App's webhooks. `None`: the pod reports on no webhook, as for most Apps.
    pub(super) webhooks: Option<Box<WebhookStates>>,
}

/// The states of the webhooks of an App.
pub(crate) type WebhookStates = BTreeMap<WebhookName, WebhookState>;

#[derive(PartialEq)]
pub(super) struct RejectedRevision {
    pub(super) revision: Option<RevisionBytes>,
    pub(super) reason: String,
    pub(super) keys_lost: bool,
}

/// A Provider, by namespace and name.
pub(super) type ProviderKey = (String, String);

/// The worst finding of all serving pods on each Provider, as an index into [`FINDINGS`]. `None` if no serving pod has
/// reported a finding.
pub(super) type OverallFindings = HashMap<ProviderKey, Option<usize>>;

/// A revision as its 32 bytes. The text would need more memory, and there is one revision for each App and pod.
pub(super) type RevisionBytes = [u8; 32];

// === impl Pods ===

impl Pods {
    pub(super) fn serving(&self) -> impl Iterator<Item = &Pod> {
        self.by_uid.values().filter(|pod| pod.is_serving)
    }

    /// Returns the pod of a stream, or `None` if the stream was cancelled: the pod with this uid may have another IP
    /// address now.
    pub(super) fn pod_of_stream(&mut self, uid: &str, stream: &CancellationToken) -> Option<&mut Pod> {
        if stream.is_cancelled() { None } else { self.by_uid.get_mut(uid) }
    }

    /// Called before `endpoints` replaces the pods. Returns the worst finding of all serving pods on each Provider on
    /// which a changing pod has a finding. A pod changes if it is removed, gets another IP address, or starts or stops
    /// serving. If a changing pod has just sent a hello, the result has the worst findings before the hello.
    pub(super) fn findings_before_change(&self, endpoints: &HashMap<String, PodEndpoint>) -> OverallFindings {
        let stays = |uid: &String, pod: &Pod| {
            endpoints
                .get(uid)
                .is_some_and(|endpoint| endpoint.address == pod.address && endpoint.is_serving == pod.is_serving)
        };
        let mut findings = OverallFindings::new();
        for (_, pod) in self.by_uid.iter().filter(|(uid, pod)| !stays(uid, pod)) {
            for provider in pod.findings.keys() {
                findings.entry(provider.clone()).or_insert_with(|| self.finding(provider));
            }
            findings.extend(pod.findings_before_hello.clone());
        }
        findings
    }

    /// Returns the state of each webhook of the App. If several serving pods report on a webhook, the worst state
    /// counts.
    pub(super) fn webhook_states(&self, app: &AppId) -> WebhookStates {
        let mut worst = WebhookStates::new();
        let reports = self.serving().filter_map(|pod| pod.report.as_ref()?.apps.get(app)?.webhooks.as_ref());
        for (name, state) in reports.flat_map(|states| states.iter()) {
            let known = worst.entry(name.clone()).or_insert(*state);
            *known = (*known).max(*state);
        }
        worst
    }

    /// Returns the webhook states of every App for which one of the selected pods reports webhook states.
    pub(super) fn webhooks_of_pods(
        &self,
        is_selected: impl Fn(&String, &Pod) -> bool,
    ) -> HashMap<AppId, WebhookStates> {
        let pods =
            self.by_uid.iter().filter(|(uid, pod)| is_selected(uid, pod)).filter_map(|(_, pod)| pod.report.as_ref());
        let apps = pods.flat_map(|report| report.apps.iter()).filter(|(_, reported)| reported.webhooks.is_some());
        apps.map(|(app, _)| (app.clone(), self.webhook_states(app))).collect()
    }

    /// Returns the worst finding of the serving pods, as an index into [`FINDINGS`].
    pub(super) fn finding(&self, provider: &ProviderKey) -> Option<usize> {
        self.serving().filter_map(|pod| pod.findings.get(provider).copied()).max()
    }
}

// === impl Pod ===

impl Pod {
    /// Drops the findings of a pod that is neither serving nor connected. The container of such a pod has ended or ends
    /// soon, and the next container will check the Providers again.
    pub(super) fn clear_findings_if_gone(&mut self) {
        if !self.is_serving && !self.is_connected {
            self.findings.clear();
            self.findings_before_hello.clear();
        }
    }

    /// Records a complete line. Returns whether the pod was silent.
    pub(super) fn record_line(&mut self) -> bool {
        let now = Instant::now();
        (self.last_heard, self.last_line) = (now, now);
        std::mem::take(&mut self.is_silent)
    }
}

// === impl RejectedRevision ===

impl RejectedRevision {
    pub(super) fn new(rejected: RejectedDocument) -> Box<Self> {
        let RejectedDocument { revision, mut reason, keys_lost } = rejected;
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        Box::new(Self { revision: revision_bytes(&revision), reason, keys_lost })
    }
}

/// Returns the webhook states in a report, without states that only a later version of the server has.
pub(super) fn webhook_states(report: WebhookReport) -> Option<Box<WebhookStates>> {
    let known = report.into_iter().filter_map(|(name, state)| Some((name, WebhookState::from_name(&state)?)));
    let states: WebhookStates = known.take(MAX_WEBHOOKS).collect();
    (!states.is_empty()).then(|| Box::new(states))
}

/// Returns the bytes of a revision, or `None` if the text is not a SHA-256. `None` differs from every published
/// revision.
pub(super) fn revision_bytes(revision: &Revision) -> Option<RevisionBytes> {
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
