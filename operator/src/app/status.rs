//! The outcome of a reconcile as the App's status: computed from all of it, written in one place, and only when it
//! changes in more than time.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::NamespaceResourceScope,
};
use latchkey_crds::{
    app::{AppProviderStatus, AppStatus, KeyStatus},
    conditions::{
        Condition, ConditionStatus, ConditionType, DesiredCondition, Reason, equal_except_times, merge_conditions,
    },
    names::{FIELD_MANAGER, NEW_KEYS_ANNOTATION},
    rendered::Revision,
    types::AppId,
};
use serde::Serialize;
use serde_json::json;
use time::OffsetDateTime;
use tokio::time::Instant;

use crate::{app::validate::Rejection, context::Context, error::Error, facts::FieldError, monitor::RolloutState};

/// The outcome of a reconcile.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) app_id: Option<AppId>,
    pub(crate) issuer: Option<String>,
    /// The published revision. If the App is not accepted, the one that is still served.
    pub(crate) revision: Option<Revision>,
    pub(crate) providers: Vec<AppProviderStatus>,
    pub(crate) signing_keys: Vec<KeyStatus>,
    pub(crate) hmac_keys: Vec<KeyStatus>,
    pub(crate) rejection: Option<Rejection>,
    pub(crate) field_errors: Vec<FieldError>,
    /// What the servers report. `None`: nothing is published.
    pub(crate) rollout: Option<RolloutState>,
    /// Progress message while the users are being deleted.
    pub(crate) deletion_progress: Option<String>,
    /// Message if servers support only an older format than the App needs.
    pub(crate) servers_too_old: Option<String>,
}

/// Statuses that were written and that the watch has not reported yet, so the store's copy is older. By uid: the
/// resourceVersion of the write and its content.
#[derive(Default)]
pub(crate) struct WrittenStatuses(Mutex<HashMap<String, WrittenStatus>>);

struct WrittenStatus {
    version: u64,
    status: serde_json::Value,
    at: Instant,
}

/// How long a written status is remembered: longer than a watch can be interrupted without notice.
const WRITTEN_STATUS_TTL: Duration = Duration::from_secs(60);

/// When progress was last reported, by uid.
#[derive(Default)]
pub(crate) struct ReportThrottle(Mutex<HashMap<String, Instant>>);

// === impl Outcome ===

impl Outcome {
    /// The whole status. `old` is the present one.
    pub(crate) fn status(&self, old: &AppStatus, generation: i64, now: OffsetDateTime) -> AppStatus {
        let wanted = [self.accepted(), self.resolved_refs(), self.programmed(old)];
        AppStatus {
            observed_generation: Some(generation),
            app_id: self.app_id.as_ref().map(ToString::to_string),
            issuer: self.issuer.clone(),
            revision: self.revision.as_ref().map(ToString::to_string),
            providers: self.providers.clone(),
            signing_keys: self.signing_keys.clone(),
            hmac_keys: self.hmac_keys.clone(),
            conditions: merge_conditions(&old.conditions, &wanted, generation, &to_k8s_time(now)),
        }
    }

    fn accepted(&self) -> DesiredCondition {
        match &self.rejection {
            None => DesiredCondition::new(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted, ""),
            Some(refusal) => DesiredCondition::new(
                ConditionType::Accepted,
                ConditionStatus::False,
                refusal.reason,
                with_field(&refusal.field, &refusal.message),
            ),
        }
    }

    fn resolved_refs(&self) -> DesiredCondition {
        let type_ = ConditionType::ResolvedRefs;
        match (self.field_errors.as_slice(), &self.rejection) {
            ([], None) => DesiredCondition::new(type_, ConditionStatus::True, Reason::Resolved, ""),
            // The references were not looked up.
            ([], Some(_)) => DesiredCondition::new(type_, ConditionStatus::Unknown, Reason::Pending, "see Accepted"),
            (problems, _) => unresolved_condition(type_, problems),
        }
    }

    fn programmed(&self, old: &AppStatus) -> DesiredCondition {
        use ConditionStatus::{False, True, Unknown};
        let wanted =
            |status, reason, message: String| DesiredCondition::new(ConditionType::Programmed, status, reason, message);
        if let Some(deleting) = &self.deletion_progress {
            return wanted(False, Reason::Deleting, deleting.clone());
        }
        if self.rejection.is_some() {
            let message = match &self.revision {
                Some(_) => "the last accepted revision is still served; see Accepted",
                None => "nothing is served; see Accepted",
            };
            return wanted(Unknown, Reason::Pending, message.to_owned());
        }
        if let Some(message) = &self.servers_too_old {
            return wanted(False, Reason::ServersTooOld, message.clone());
        }
        let short = self.revision.as_ref().map_or("", |revision| &revision.as_str()[..12]);
        match &self.rollout {
            None => wanted(Unknown, Reason::Pending, "nothing is published yet".to_owned()),
            // A count of pods here would be rewritten each time the servers are scaled.
            Some(RolloutState::Complete { .. }) => wanted(True, Reason::Programmed, String::new()),
            Some(RolloutState::Behind { pods }) => {
                let message = format!("waiting for {} to serve revision {short}", pod_names(pods));
                wanted(False, Reason::WaitingForServers, message)
            }
            Some(RolloutState::Silent { pods }) => {
                let message = format!(
                    "{} sent nothing for 15 s while it should serve; check its log, or delete the pod",
                    pod_names(pods)
                );
                wanted(False, Reason::WaitingForServers, message)
            }
            Some(RolloutState::Rejected { pod, reason }) => {
                let message = format!("server pod {pod} rejects revision {short}: {reason}");
                wanted(False, Reason::RefusedByServer, message)
            }
            Some(RolloutState::KeysLost { pod }) => {
                let message = format!(
                    "the keys of the App's users are lost: server pod {pod} rejects revision {short}, which has other \
                     keys; restore the key Secret from a backup, or set the annotation {NEW_KEYS_ANNOTATION} to a new \
                     value to start with new keys, which logs every user out"
                );
                wanted(False, Reason::KeysLost, message)
            }
            Some(RolloutState::NoServers) => {
                let message = "no server pod is running; scale the servers up, or find out why none is serving";
                wanted(Unknown, Reason::NoServers, message.to_owned())
            }
            Some(RolloutState::Undecided { pods }) => self.undecided(old, pods),
        }
    }

    /// No answer is neither a yes nor evidence: the condition of this revision stays as it was.
    fn undecided(&self, old: &AppStatus, pods: &[String]) -> DesiredCondition {
        let before = condition(old, ConditionType::Programmed).and_then(to_wanted);
        let same = self.revision.as_ref().map(Revision::as_str) == old.revision.as_deref();
        match before {
            Some(before) if same && before.reason != Reason::Pending => before,
            Some(_) | None => DesiredCondition::new(
                ConditionType::Programmed,
                ConditionStatus::Unknown,
                Reason::WaitingForServers,
                match pods {
                    [] => "waiting for a server pod".to_owned(),
                    pods => format!("waiting for {} to report what it serves", pod_names(pods)),
                },
            ),
        }
    }
}

/// The condition for references that do not resolve: the reason of the first, the messages of all.
pub(crate) fn unresolved_condition(type_: ConditionType, problems: &[FieldError]) -> DesiredCondition {
    let messages: Vec<_> = problems.iter().map(|problem| with_field(&problem.field, &problem.message)).collect();
    let reason = problems.first().map_or(Reason::Resolved, |problem| problem.reason);
    DesiredCondition::new(type_, ConditionStatus::False, reason, messages.join("; "))
}

/// A message, preceded by its field.
pub(crate) fn with_field(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field}: {message}") }
}

pub(crate) fn pod_names(pods: &[String]) -> String {
    match pods {
        [] => "a server pod".to_owned(),
        [one] => format!("server pod {one}"),
        [some @ .., last] => format!("server pods {} and {last}", some.join(", ")),
    }
}

pub(crate) fn condition(status: &AppStatus, type_: ConditionType) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_.as_str())
}

fn to_wanted(condition: &Condition) -> Option<DesiredCondition> {
    let reason = *Reason::ALL.iter().find(|reason| reason.as_str() == condition.reason)?;
    Some(DesiredCondition::new(ConditionType::Programmed, condition.status, reason, condition.message.clone()))
}

/// Kubernetes stores times in whole seconds.
pub(crate) fn to_k8s_time(at: OffsetDateTime) -> Time {
    Time(Timestamp::from_second(at.unix_timestamp()).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// Whether two statuses differ in nothing but the times of their conditions.
pub(crate) fn is_same_but_for_times(one: &AppStatus, other: &AppStatus) -> bool {
    let rest = |status: &AppStatus| AppStatus { conditions: Vec::new(), ..status.clone() };
    equal_except_times(&one.conditions, &other.conditions) && rest(one) == rest(other)
}

// === impl WrittenStatuses ===

impl WrittenStatuses {
    /// The latest status: the watch's, unless a newer one was written since.
    pub(crate) fn latest<S: serde::de::DeserializeOwned + Default>(
        &self,
        meta: &kube::core::ObjectMeta,
        watched: Option<S>,
    ) -> S {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = meta.uid.as_deref().unwrap_or_default();
        let version: u64 = meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0);
        match written.get(uid) {
            Some(newer) if newer.version > version => serde_json::from_value(newer.status.clone()).unwrap_or_default(),
            Some(_) => {
                written.remove(uid);
                watched.unwrap_or_default()
            }
            None => watched.unwrap_or_default(),
        }
    }

    fn record(&self, uid: &str, version: Option<String>, status: serde_json::Value) {
        if let Some(version) = version.and_then(|version| version.parse().ok()) {
            let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let at = Instant::now();
            written.retain(|_, written| at - written.at < WRITTEN_STATUS_TTL);
            written.insert(uid.to_owned(), WrittenStatus { version, status, at });
        }
    }
}

// === impl ReportThrottle ===

impl ReportThrottle {
    /// Whether progress can be reported again, at most once every `each`; then it counts as reported.
    pub(crate) fn try_report(&self, uid: &str, each: Duration) -> bool {
        let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Entries older than `each` are dropped.
        reported.retain(|_, at| now - *at < each);
        if reported.contains_key(uid) {
            return false;
        }
        reported.insert(uid.to_owned(), now);
        true
    }
}

/// Writes a status, only to the object with the uid that was reconciled: a new object of the same name must not get the
/// status of the old one.
pub(crate) async fn write_status<K, S>(context: &Context, object: &K, status: &S) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    S: Serialize,
{
    let resource = ApiResource::erase::<K>(&());
    let namespace = object.namespace().unwrap_or_default();
    // The response need not decode: an object that does not decode needs a status as well.
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &namespace, &resource);
    let body = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": { "name": object.name_any(), "uid": object.uid() },
        "status": status,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    match api.patch_status(&object.name_any(), &parameters, &Patch::Apply(&body)).await {
        Ok(answer) => {
            context.written_statuses.record(
                &object.uid().unwrap_or_default(),
                answer.resource_version(),
                body["status"].clone(),
            );
            context.metrics.record_status_write();
            Ok(())
        }
        // The object was deleted meanwhile, and its status with it.
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(()),
        Err(error) => Err(Error::api("write the status")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn served(verdict: RolloutState) -> Outcome {
        Outcome {
            app_id: Some("shop".parse().unwrap()),
            revision: Some(Revision::of(b"1")),
            rollout: Some(verdict),
            ..Outcome::default()
        }
    }

    fn says(status: &AppStatus, type_: ConditionType) -> (ConditionStatus, String) {
        let condition = condition(status, type_).unwrap();
        (condition.status, condition.reason.clone())
    }

    fn programmed(outcome: &Outcome, old: &AppStatus) -> (ConditionStatus, String) {
        says(&outcome.status(old, 1, NOW), ConditionType::Programmed)
    }

    fn pods() -> Vec<String> {
        vec!["server-1".into()]
    }

    #[test]
    fn an_app_that_every_server_serves_is_ready() {
        let status = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 3, NOW);
        for type_ in ConditionType::APP {
            assert_eq!(says(&status, type_).0, ConditionStatus::True, "{type_}");
        }
        assert_eq!(status.observed_generation, Some(3));
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
        // The number of servers does not matter: scaling writes nothing.
        assert!(is_same_but_for_times(&status, &served(RolloutState::Complete { servers: 6 }).status(&status, 3, NOW)));
    }

    #[test]
    fn programmed_falls_only_on_evidence() {
        let ready = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let undecided = served(RolloutState::Undecided { pods: pods() });
        assert!(is_same_but_for_times(&ready, &undecided.status(&ready, 1, NOW)), "a starting pod is no evidence");
        let fallen = |verdict| programmed(&served(verdict), &ready);
        let waiting = (ConditionStatus::False, "WaitingForServers".to_owned());
        assert_eq!(fallen(RolloutState::Behind { pods: pods() }), waiting);
        assert_eq!(fallen(RolloutState::Silent { pods: pods() }), waiting);
        let refused = RolloutState::Rejected { pod: "server-1".into(), reason: "no".into() };
        assert_eq!(fallen(refused), (ConditionStatus::False, "RefusedByServer".to_owned()));
        let lost = RolloutState::KeysLost { pod: "server-1".into() };
        assert_eq!(fallen(lost), (ConditionStatus::False, "KeysLost".to_owned()));
        assert_eq!(fallen(RolloutState::NoServers), (ConditionStatus::Unknown, "NoServers".to_owned()));
    }

    #[test]
    fn no_answer_to_a_new_revision_is_not_a_yes() {
        let ready = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let mut edited = served(RolloutState::Undecided { pods: pods() });
        edited.revision = Some(Revision::of(b"2"));
        assert_eq!(programmed(&edited, &ready), (ConditionStatus::Unknown, "WaitingForServers".to_owned()));
        assert_eq!(programmed(&edited, &AppStatus::default()).0, ConditionStatus::Unknown);
    }

    #[test]
    fn a_silent_pod_is_named_with_what_to_do() {
        let status = served(RolloutState::Silent { pods: pods() }).status(&AppStatus::default(), 1, NOW);
        let message = &condition(&status, ConditionType::Ready).unwrap().message;
        assert!(message.contains("server-1") && message.contains("check its log"), "{message}");
        assert_eq!(pod_names(&["a".into(), "b".into(), "c".into()]), "server pods a, b and c");
    }

    #[test]
    fn a_rejected_app_reports_why_and_that_the_last_revision_is_served() {
        let mut outcome = served(RolloutState::Complete { servers: 1 });
        outcome.rejection = Some(Rejection::new(Reason::InvalidSpec, "spec.tokens", "shorten it"));
        let status = outcome.status(&AppStatus::default(), 2, NOW);
        assert_eq!(says(&status, ConditionType::Accepted), (ConditionStatus::False, "InvalidSpec".into()));
        assert_eq!(says(&status, ConditionType::Programmed).0, ConditionStatus::Unknown);
        assert_eq!(says(&status, ConditionType::Ready), (ConditionStatus::False, "InvalidSpec".into()));
        let ready = condition(&status, ConditionType::Ready).unwrap();
        assert_eq!(ready.message, "spec.tokens: shorten it");
        assert_eq!(status.revision, Some(Revision::of(b"1").to_string()));
    }

    #[test]
    fn references_that_do_not_resolve_are_all_named() {
        let mut outcome = served(RolloutState::Complete { servers: 1 });
        outcome.field_errors = vec![
            FieldError::new(Reason::SecretNotFound, "spec.mail.smtpSecretRef", "make it"),
            FieldError::new(Reason::ProviderNotFound, "spec.providerRefs[0]", "apply it"),
        ];
        let status = outcome.status(&AppStatus::default(), 1, NOW);
        let condition = condition(&status, ConditionType::ResolvedRefs).unwrap();
        assert_eq!(condition.reason, "SecretNotFound");
        assert_eq!(condition.message, "spec.mail.smtpSecretRef: make it; spec.providerRefs[0]: apply it");
        assert_eq!(says(&status, ConditionType::Programmed).0, ConditionStatus::True, "the rest is served");
    }

    #[tokio::test(start_paused = true)]
    async fn progress_is_reported_at_intervals() {
        let (told, each) = (ReportThrottle::default(), Duration::from_secs(10));
        assert!(told.try_report("a", each) && !told.try_report("a", each) && told.try_report("b", each));
        tokio::time::advance(each).await;
        assert!(told.try_report("a", each));
    }

    #[test]
    fn a_written_status_counts_until_the_watch_reports_it() {
        let written = WrittenStatuses::default();
        let meta = |version: &str| kube::core::ObjectMeta {
            uid: Some("u".into()),
            resource_version: Some(version.into()),
            ..Default::default()
        };
        let status = |generation| AppStatus { observed_generation: Some(generation), ..AppStatus::default() };
        written.record("u", Some("7".into()), serde_json::to_value(status(2)).unwrap());
        let latest = |version| written.latest(&meta(version), Some(status(1))).observed_generation;
        assert_eq!(latest("6"), Some(2), "the copy is older");
        assert_eq!(latest("7"), Some(1), "the watch has reported it, or something newer");
        assert_eq!(latest("6"), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn written_statuses_are_not_remembered_forever() {
        let written = WrittenStatuses::default();
        for uid in ["a", "b"] {
            written.record(uid, Some("7".into()), json!({}));
            tokio::time::advance(WRITTEN_STATUS_TTL).await;
        }
        written.record("c", Some("7".into()), json!({}));
        assert_eq!(written.0.lock().unwrap().len(), 1);
    }
}
