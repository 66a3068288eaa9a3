//! How far an App's revision is rolled out, derived from the reports of the pods.

use latchkey_crds::types::AppId;

use super::pod::{Pods, RevisionBytes};

/// The maximum number of pods that a message names. Of the other pods, the message has only the number.
const MAX_NAMED_PODS: usize = 3;

/// How far the servers have rolled out the published revision of an App. The variants are in order, the worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RolloutState {
    /// A serving pod rejects the published document. Its rejections of earlier documents do not count.
    Rejected { pod: String, reason: String },
    /// A serving pod rejects the published document because it has new keys, and the App has users whose keys were
    /// lost.
    KeysLost { pod: String },
    /// Pods that sent nothing for 15 s while serving.
    Silent { pods: Vec<String> },
    /// Serving pods whose last report has another revision of the App, or does not have the App.
    Behind { pods: Vec<String> },
    /// Serving pods that have not reported yet. `pods` is empty if no revision is published, or if no pod is serving at
    /// the moment.
    Undecided { pods: Vec<String> },
    /// There has been no serving pod for 15 s.
    NoServers,
    /// Every serving pod serves the revision.
    Complete { servers: usize },
}

/// The published revision of an App.
pub(super) struct ExpectedRevision {
    pub(super) revision: RevisionBytes,
    /// The latest rollout state that a reconcile has read or that has triggered a reconcile. `None`: it was undecided.
    pub(super) last_reported: Option<RolloutState>,
}

// === impl ExpectedRevision ===

impl ExpectedRevision {
    /// Returns the App if its rollout state differs from `last_reported`, so that the App must be reconciled. An
    /// undecided state is not a change.
    pub(super) fn update<'a>(&mut self, pods: &Pods, app: &'a AppId) -> Option<&'a AppId> {
        let now = clone_if_decided(&pods.rollout(app, &self.revision))?;
        if self.last_reported.as_ref().is_some_and(|last| is_same(last, &now)) {
            return None;
        }
        self.last_reported = Some(now);
        Some(app)
    }
}

// === impl Pods ===

impl Pods {
    /// Whether a serving pod serves this revision.
    pub(super) fn is_reported(&self, app: &AppId, revision: &RevisionBytes) -> bool {
        let mut reports = self.serving().filter_map(|pod| pod.report.as_ref()?.apps.get(app));
        reports.any(|reported| reported.revision.as_ref() == Some(revision))
    }

    /// Returns the rollout state of this revision: the worst that applies to any serving pod, in the order of
    /// [`RolloutState`]. If several pods reject the revision, the first of them counts.
    pub(super) fn rollout(&self, app: &AppId, revision: &RevisionBytes) -> RolloutState {
        self.rollout_of_any(app, std::slice::from_ref(revision))
    }

    /// Like [`Self::rollout`], but for several revisions: it does not matter which of them a pod serves.
    pub(super) fn rollout_of_any(&self, app: &AppId, revisions: &[RevisionBytes]) -> RolloutState {
        let (mut silent, mut behind, mut unreported, mut servers) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut rejected = None;
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
            let reported = report.apps.get(app);
            let is_wanted =
                |revision: Option<RevisionBytes>| revision.is_some_and(|revision| revisions.contains(&revision));
            let is_served = reported.is_some_and(|reported| is_wanted(reported.revision));
            let rejection = reported.and_then(|reported| reported.rejected.as_ref());
            let rejection = rejection.filter(|rejection| is_wanted(rejection.revision));
            // A pod can serve one of several revisions and reject a later one. In this case, the pod counts as serving.
            // For a single revision, a rejection counts, even if the pod also reports the revision: a pod does both if
            // the App is deleted, and the database rejects the deletion of its users or the release of its appID.
            if let Some(rejection) = rejection.filter(|_| !is_served || revisions.len() == 1) {
                rejected.get_or_insert((name, rejection));
            } else if is_served {
                servers += 1;
            } else {
                behind.push(name);
            }
        }
        if let Some((pod, rejection)) = rejected {
            let (pod, reason) = (pod.to_owned(), rejection.reason.clone());
            if rejection.keys_lost { RolloutState::KeysLost { pod } } else { RolloutState::Rejected { pod, reason } }
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

/// Returns the names of the first pods, and the number of the other pods.
pub(super) fn shorten(pods: &[&str]) -> Vec<String> {
    let mut named: Vec<_> = pods.iter().take(MAX_NAMED_PODS).map(|pod| (*pod).to_owned()).collect();
    if pods.len() > MAX_NAMED_PODS {
        named.push(format!("{} more", pods.len() - MAX_NAMED_PODS));
    }
    named
}

pub(super) fn clone_if_decided(state: &RolloutState) -> Option<RolloutState> {
    (!matches!(state, RolloutState::Undecided { .. })).then(|| state.clone())
}

/// Whether two states are the same, except for the number of servers.
fn is_same(one: &RolloutState, other: &RolloutState) -> bool {
    matches!((one, other), (RolloutState::Complete { .. }, RolloutState::Complete { .. })) || one == other
}
