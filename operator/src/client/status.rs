//! The status of a Client, and the digest of it that the operator stores. Pure, except for the record of written
//! statuses.

use std::{collections::HashMap, time::Duration};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use latchkey_crds::{
    client::ClientStatus,
    conditions::{Condition, ConditionStatus, ConditionType, DesiredCondition, Reason, merge_conditions},
};
use parking_lot::Mutex;
use time::OffsetDateTime;
use tokio::time::Instant;

use crate::{
    app::status::pod_names,
    client::{digest::digest, outcomes::Programmed},
    facts::FieldError,
    monitor::RolloutState,
    status::{to_k8s_time, unresolved_condition},
};

/// The minimum time for which the digest of a written status is stored if the watch does not report the write.
const WRITTEN_STATUS_TTL: Duration = Duration::from_secs(60);

/// The digest of a Client's status that the operator stores: enough to see whether a new status differs, and to keep
/// the transition times of its conditions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StatusDigest {
    generation: Option<i64>,
    /// A hash of everything except the transition times.
    content: u64,
    /// The digests of the conditions, in the order of [`ConditionType::CLIENT`].
    conditions: [ConditionDigest; ConditionType::CLIENT.len()],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ConditionDigest {
    /// `None`: the status does not have the condition.
    status: Option<ConditionStatus>,
    /// A hash of reason and message.
    content: u64,
    /// The transition time, in seconds since the Unix epoch.
    since: i64,
}

/// What a reconcile reports about a Client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientReport {
    pub(crate) client_id: Option<String>,
    pub(crate) issuer: Option<String>,
    pub(crate) secret_name: Option<String>,
    pub(crate) accepted: DesiredCondition,
    pub(crate) resolved_refs: DesiredCondition,
    pub(crate) programmed: DesiredCondition,
}

/// The digests of written statuses that the watch has not reported yet, by uid.
#[derive(Default)]
pub(crate) struct WrittenClientStatuses(Mutex<HashMap<String, WrittenStatus>>);

struct WrittenStatus {
    /// The resourceVersion of the Client after the write.
    version: u64,
    status: StatusDigest,
    at: Instant,
}

// === impl StatusDigest ===

impl StatusDigest {
    pub(crate) fn of(status: &ClientStatus) -> Self {
        let condition = |type_: ConditionType| {
            let found = status.conditions.iter().find(|condition| condition.type_ == type_.as_str());
            found.map(ConditionDigest::of).unwrap_or_default()
        };
        let conditions = ConditionType::CLIENT.map(condition);
        let contents: Vec<_> = status
            .conditions
            .iter()
            .map(|one| (one.type_.as_str(), one.observed_generation, ConditionDigest::of(one).without_time()))
            .collect();
        let ClientStatus { observed_generation, client_id, issuer, secret_name, .. } = status;
        let content = digest((observed_generation, client_id, issuer, secret_name, contents));
        Self { generation: *observed_generation, content, conditions }
    }

    /// Whether two statuses differ at most in the times of their conditions.
    pub(crate) fn is_same_except_times(&self, other: &Self) -> bool {
        self.content == other.content
    }

    /// Whether the status is about this generation of the Client.
    pub(crate) fn reports(&self, generation: i64) -> bool {
        self.generation == Some(generation)
    }

    /// Whether the status reports that every server serves this generation of the Client.
    pub(crate) fn is_programmed(&self, generation: i64) -> bool {
        self.reports(generation) && self.condition(ConditionType::Programmed).status == Some(ConditionStatus::True)
    }

    /// Whether the status, the reason or the message of a condition differs.
    pub(crate) fn condition_differs(&self, type_: ConditionType, other: &Self) -> bool {
        self.condition(type_).without_time() != other.condition(type_).without_time()
    }

    fn condition(&self, type_: ConditionType) -> ConditionDigest {
        let index = ConditionType::CLIENT.iter().position(|one| *one == type_);
        index.map(|index| self.conditions[index]).unwrap_or_default()
    }

    /// Returns the conditions, but without reasons and messages, because only a hash of these is stored.
    fn to_conditions(self) -> Vec<Condition> {
        let condition = |(type_, digest): (ConditionType, ConditionDigest)| {
            Some(Condition {
                type_: type_.as_str().to_owned(),
                status: digest.status?,
                observed_generation: self.generation,
                last_transition_time: Time(Timestamp::from_second(digest.since).unwrap_or(Timestamp::UNIX_EPOCH)),
                reason: String::new(),
                message: String::new(),
            })
        };
        ConditionType::CLIENT.into_iter().zip(self.conditions).filter_map(condition).collect()
    }
}

// === impl ConditionDigest ===

impl ConditionDigest {
    fn of(condition: &Condition) -> Self {
        Self {
            status: Some(condition.status),
            content: digest((&condition.reason, &condition.message)),
            since: condition.last_transition_time.0.as_second(),
        }
    }

    /// Returns the values that must be equal if the condition has not changed.
    fn without_time(self) -> (Option<u8>, u64) {
        let status = self.status.map(|status| match status {
            ConditionStatus::True => 1,
            ConditionStatus::False => 2,
            ConditionStatus::Unknown => 3,
        });
        (status, self.content)
    }
}

// === impl ClientReport ===

impl ClientReport {
    /// Returns the complete status. `old` is the status before this reconcile.
    pub(crate) fn status(&self, old: &StatusDigest, generation: i64, now: OffsetDateTime) -> ClientStatus {
        let wanted = [self.accepted.clone(), self.resolved_refs.clone(), self.programmed.clone()];
        ClientStatus {
            observed_generation: Some(generation),
            client_id: self.client_id.clone(),
            issuer: self.issuer.clone(),
            secret_name: self.secret_name.clone(),
            conditions: merge_conditions(&old.to_conditions(), &wanted, generation, &to_k8s_time(now)),
        }
    }
}

/// Returns `Accepted=True`.
pub(crate) fn accepted() -> DesiredCondition {
    DesiredCondition::new(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted, "")
}

/// Returns the condition `ResolvedRefs` of an accepted Client.
pub(crate) fn resolved_refs(error: Option<&FieldError>) -> DesiredCondition {
    match error {
        None => DesiredCondition::new(ConditionType::ResolvedRefs, ConditionStatus::True, Reason::Resolved, ""),
        Some(error) => unresolved_condition(std::slice::from_ref(error)),
    }
}

/// Returns `ResolvedRefs=Unknown` of a Client that is not accepted.
pub(crate) fn unknown_refs() -> DesiredCondition {
    DesiredCondition::new(ConditionType::ResolvedRefs, ConditionStatus::Unknown, Reason::Pending, "see Accepted")
}

/// Returns the condition `Programmed` of a Client that is not accepted.
pub(crate) fn not_programmed(is_served: bool) -> DesiredCondition {
    let message = if is_served {
        "the last accepted form of the Client is still served; see Accepted"
    } else {
        "nothing is served; see Accepted"
    };
    DesiredCondition::new(ConditionType::Programmed, ConditionStatus::Unknown, Reason::Pending, message)
}

/// Returns the condition `Programmed` of an accepted Client. If reports from servers are missing, the condition stays
/// `True` if it was `True` before.
pub(crate) fn programmed(state: &Programmed, old: &StatusDigest, generation: i64) -> DesiredCondition {
    let programmed =
        |status, reason, message: &str| DesiredCondition::new(ConditionType::Programmed, status, reason, message);
    match state {
        Programmed::Yes => programmed(ConditionStatus::True, Reason::Programmed, ""),
        Programmed::Undecided(_) if old.is_programmed(generation) => {
            programmed(ConditionStatus::True, Reason::Programmed, "")
        }
        Programmed::Undecided(message) => programmed(ConditionStatus::Unknown, Reason::WaitingForServers, message),
        Programmed::No { status, reason, message } => programmed(*status, *reason, message),
    }
}

/// Returns whether the servers serve a Client, from the rollout state of the revisions that contain it. The messages do
/// not quote why a server rejects a revision: the reason can be about the App, which can belong to somebody else.
pub(crate) fn programmed_state(rollout: &RolloutState) -> Programmed {
    let no = |status, reason, message: String| Programmed::No { status, reason, message: message.into_boxed_str() };
    match rollout {
        RolloutState::Complete { .. } => Programmed::Yes,
        RolloutState::Behind { pods } => {
            let message = format!("waiting for {} to serve this generation", pod_names(pods));
            no(ConditionStatus::False, Reason::WaitingForServers, message)
        }
        RolloutState::Silent { pods } => {
            let message = format!("{} sent nothing for 15 s while it should serve", pod_names(pods));
            no(ConditionStatus::False, Reason::WaitingForServers, message)
        }
        RolloutState::Rejected { pod, .. } | RolloutState::KeysLost { pod } => {
            let message = format!("server pod {pod} rejects the document of the App; see the conditions of the App");
            no(ConditionStatus::False, Reason::RefusedByServer, message)
        }
        RolloutState::NoServers => {
            no(ConditionStatus::Unknown, Reason::NoServers, "no server pod is running".to_owned())
        }
        RolloutState::Undecided { pods } => {
            let message = match pods.as_slice() {
                [] => "waiting for a server pod".to_owned(),
                pods => format!("waiting for {} to report what it serves", pod_names(pods)),
            };
            Programmed::Undecided(message.into_boxed_str())
        }
    }
}

// === impl WrittenClientStatuses ===

impl WrittenClientStatuses {
    /// Returns the latest status: the status that the watch reported, unless the operator has written a newer one.
    pub(crate) fn latest(&self, uid: &str, version: u64, watched: StatusDigest) -> StatusDigest {
        let written = self.0.lock();
        written.get(uid).filter(|written| written.version > version).map_or(watched, |written| written.status)
    }

    pub(crate) fn record(&self, uid: &str, version: u64, status: StatusDigest) {
        let mut written = self.0.lock();
        let at = Instant::now();
        // Usually the watch reports a write within milliseconds, so there are few entries.
        if written.len() >= 1024 {
            written.retain(|_, written| at - written.at < WRITTEN_STATUS_TTL);
        }
        written.insert(uid.to_owned(), WrittenStatus { version, status, at });
    }

    /// Drops the stored digest of a Client's written status if the watch now reports this version of the Client or a
    /// later one.
    pub(crate) fn forget_reported(&self, uid: &str, version: u64) {
        let mut written = self.0.lock();
        if written.get(uid).is_some_and(|written| written.version <= version) {
            written.remove(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn report(programmed: DesiredCondition) -> ClientReport {
        ClientReport {
            client_id: Some("monitoring.grafana".to_owned()),
            issuer: Some("https://auth.example.com/platform".to_owned()),
            secret_name: Some("grafana-oidc".to_owned()),
            accepted: accepted(),
            resolved_refs: resolved_refs(None),
            programmed,
        }
    }

    fn ready(old: &StatusDigest, now: OffsetDateTime) -> ClientStatus {
        report(programmed(&Programmed::Yes, old, 1)).status(old, 1, now)
    }

    fn behind() -> RolloutState {
        RolloutState::Behind { pods: vec!["server-1".to_owned()] }
    }

    fn condition(status: &ClientStatus, type_: ConditionType) -> (ConditionStatus, &str) {
        let found = status.conditions.iter().find(|one| one.type_ == type_.as_str()).unwrap();
        (found.status, &found.reason)
    }

    #[test]
    fn a_client_that_every_server_serves_is_ready() {
        let status = ready(&StatusDigest::default(), NOW);
        let types: Vec<_> = status.conditions.iter().map(|one| one.type_.as_str()).collect();
        assert_eq!(types, ["Accepted", "ResolvedRefs", "Programmed", "Ready"]);
        for type_ in ConditionType::CLIENT {
            assert_eq!(condition(&status, type_).0, ConditionStatus::True, "{type_}");
        }
        assert_eq!(status.observed_generation, Some(1));
    }

    #[test]
    fn an_unchanged_status_is_recognized_by_its_digest_and_keeps_its_times() {
        let before = ready(&StatusDigest::default(), NOW);
        let digest = StatusDigest::of(&before);
        let later = ready(&digest, NOW + time::Duration::HOUR);
        assert_eq!(later, before);
        assert!(StatusDigest::of(&later).is_same_except_times(&digest));
        let changes: [fn(&mut ClientStatus); 9] = [
            |status| status.client_id = Some("grafana".to_owned()),
            |status| status.issuer = None,
            |status| status.secret_name = None,
            |status| status.observed_generation = Some(2),
            |status| status.conditions[0].message = "another".to_owned(),
            |status| status.conditions[1].reason = "Another".to_owned(),
            |status| status.conditions[2].status = ConditionStatus::Unknown,
            |status| status.conditions[3].observed_generation = Some(2),
            |status| drop(status.conditions.pop()),
        ];
        for change in changes {
            let mut changed = before.clone();
            change(&mut changed);
            assert!(!StatusDigest::of(&changed).is_same_except_times(&digest), "{changed:?}");
        }
    }

    #[test]
    fn a_changed_condition_gets_a_new_time_and_the_others_keep_theirs() {
        let digest = StatusDigest::of(&ready(&StatusDigest::default(), NOW));
        let hour = NOW + time::Duration::HOUR;
        let waiting = report(programmed(&programmed_state(&behind()), &digest, 1)).status(&digest, 1, hour);
        let times: Vec<_> = waiting.conditions.iter().map(|one| one.last_transition_time.0.as_second()).collect();
        assert_eq!(times, [0, 0, 3600, 3600]);
        assert_eq!(condition(&waiting, ConditionType::Ready), (ConditionStatus::False, "WaitingForServers"));
        let waiting = StatusDigest::of(&waiting);
        assert!(waiting.condition_differs(ConditionType::Programmed, &digest));
        assert!(!waiting.condition_differs(ConditionType::Accepted, &digest));
    }

    #[test]
    fn a_missing_report_does_not_change_programmed_from_true() {
        let digest = StatusDigest::of(&ready(&StatusDigest::default(), NOW));
        let undecided = programmed_state(&RolloutState::Undecided { pods: vec!["server-1".to_owned()] });
        assert_eq!(programmed(&undecided, &digest, 1).status, ConditionStatus::True);
        assert_eq!(programmed(&undecided, &digest, 2).status, ConditionStatus::Unknown, "another generation");
        assert_eq!(programmed(&undecided, &StatusDigest::default(), 1).status, ConditionStatus::Unknown);
        assert_eq!(programmed(&programmed_state(&behind()), &digest, 1).status, ConditionStatus::False);
    }

    #[test]
    fn rejection_reasons_from_servers_are_not_quoted() {
        let rejected = RolloutState::Rejected { pod: "server-1".to_owned(), reason: "hush".to_owned() };
        let condition = programmed(&programmed_state(&rejected), &StatusDigest::default(), 1);
        assert_eq!((condition.status, condition.reason), (ConditionStatus::False, Reason::RefusedByServer));
        assert!(!condition.message.contains("hush"), "{}", condition.message);
    }

    #[test]
    fn a_written_status_is_used_until_the_watch_reports_it() {
        let written = WrittenClientStatuses::default();
        let digest = StatusDigest::of(&ready(&StatusDigest::default(), NOW));
        written.record("u", 7, digest);
        assert_eq!(written.latest("u", 6, StatusDigest::default()), digest);
        assert_eq!(written.latest("u", 7, StatusDigest::default()), StatusDigest::default());
        assert_eq!(written.latest("v", 6, StatusDigest::default()), StatusDigest::default());
        written.forget_reported("u", 6);
        assert_eq!(written.latest("u", 6, StatusDigest::default()), digest, "an earlier change");
        written.forget_reported("u", 7);
        assert_eq!(written.latest("u", 6, StatusDigest::default()), StatusDigest::default());
    }
}
