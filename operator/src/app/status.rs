//! What a reconcile came to, as the App's status: computed from all of it, written in one place, and only when it says
//! something else.

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
    conditions::{Condition, ConditionStatus, ConditionType, Reason, Wanted, merge, same_but_for_time},
    names::{FIELD_MANAGER, NEW_KEYS_ANNOTATION},
    rendered::Revision,
    types::AppId,
};
use serde::Serialize;
use serde_json::json;
use time::OffsetDateTime;
use tokio::time::Instant;

use crate::{app::validate::Refusal, context::Context, error::Error, facts::Problem, probe::Verdict};

/// What a reconcile came to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) app_id: Option<AppId>,
    pub(crate) issuer: Option<String>,
    /// What is published for it; after a refusal that which goes on.
    pub(crate) revision: Option<Revision>,
    pub(crate) providers: Vec<AppProviderStatus>,
    pub(crate) signing_keys: Vec<KeyStatus>,
    pub(crate) hmac_keys: Vec<KeyStatus>,
    pub(crate) refusal: Option<Refusal>,
    pub(crate) problems: Vec<Problem>,
    /// What the servers tell; none: nothing is published.
    pub(crate) verdict: Option<Verdict>,
    /// The users are being deleted; what is said of it.
    pub(crate) deleting: Option<String>,
    /// Servers honour only an older format than the App needs; what is said of it.
    pub(crate) servers_too_old: Option<String>,
}

/// The statuses that were written and that the watch has not told yet: the copy that it keeps is older than they are. By
/// uid: the resourceVersion of the write, and what it wrote.
#[derive(Default)]
pub(crate) struct Written(Mutex<HashMap<String, WrittenStatus>>);

struct WrittenStatus {
    version: u64,
    status: serde_json::Value,
    at: Instant,
}

/// For so long it is remembered what was written: longer than a watch can be cut without anybody's notice.
const REMEMBERED: Duration = Duration::from_secs(60);

/// When the progress of something that goes on by itself was told last, by uid.
#[derive(Default)]
pub(crate) struct Told(Mutex<HashMap<String, Instant>>);

// === impl Outcome ===

impl Outcome {
    /// The whole status. `old` is that which is there.
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
            conditions: merge(&old.conditions, &wanted, generation, &time(now)),
        }
    }

    fn accepted(&self) -> Wanted {
        match &self.refusal {
            None => Wanted::new(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted, ""),
            Some(refusal) => Wanted::new(
                ConditionType::Accepted,
                ConditionStatus::False,
                refusal.reason,
                located(&refusal.field, &refusal.message),
            ),
        }
    }

    fn resolved_refs(&self) -> Wanted {
        let type_ = ConditionType::ResolvedRefs;
        match (self.problems.as_slice(), &self.refusal) {
            ([], None) => Wanted::new(type_, ConditionStatus::True, Reason::Resolved, ""),
            // What it refers to was not looked at.
            ([], Some(_)) => Wanted::new(type_, ConditionStatus::Unknown, Reason::Pending, "see Accepted"),
            (problems, _) => problems_wanted(type_, problems),
        }
    }

    fn programmed(&self, old: &AppStatus) -> Wanted {
        use ConditionStatus::{False, True, Unknown};
        let wanted = |status, reason, message: String| Wanted::new(ConditionType::Programmed, status, reason, message);
        if let Some(deleting) = &self.deleting {
            return wanted(False, Reason::Deleting, deleting.clone());
        }
        if self.refusal.is_some() {
            let message = match &self.revision {
                Some(_) => "the last accepted revision goes on; see Accepted",
                None => "nothing is served; see Accepted",
            };
            return wanted(Unknown, Reason::Pending, message.to_owned());
        }
        if let Some(message) = &self.servers_too_old {
            return wanted(False, Reason::ServersTooOld, message.clone());
        }
        let short = self.revision.as_ref().map_or("", |revision| &revision.as_str()[..12]);
        match &self.verdict {
            None => wanted(Unknown, Reason::Pending, "nothing is published yet".to_owned()),
            // A count here would be written anew each time servers are scaled.
            Some(Verdict::All { .. }) => wanted(True, Reason::Programmed, String::new()),
            Some(Verdict::Behind { pods }) => {
                let message = format!("waiting for {} to serve revision {short}", names(pods));
                wanted(False, Reason::WaitingForServers, message)
            }
            Some(Verdict::Silent { pods }) => {
                let message = format!(
                    "{} told nothing for 15 s while it should serve; look at its log, or delete the pod",
                    names(pods)
                );
                wanted(False, Reason::WaitingForServers, message)
            }
            Some(Verdict::Refused { pod, reason }) => {
                let message = format!("server pod {pod} refuses revision {short}: {reason}");
                wanted(False, Reason::RefusedByServer, message)
            }
            Some(Verdict::KeysLost { pod }) => {
                let message = format!(
                    "the keys of the App's users are lost: server pod {pod} refuses revision {short}, which has other \
                     keys; put the key Secret back from a copy, or set the annotation {NEW_KEYS_ANNOTATION} to a new \
                     value to start anew, which signs every user out"
                );
                wanted(False, Reason::KeysLost, message)
            }
            Some(Verdict::NoServers) => {
                let message = "no server pod is there; scale the servers up, or see why none is serving";
                wanted(Unknown, Reason::NoServers, message.to_owned())
            }
            Some(Verdict::Undecided { pods }) => self.undecided(old, pods),
        }
    }

    /// No answer is not a yes, and no evidence either: what was said of this very revision stays.
    fn undecided(&self, old: &AppStatus, pods: &[String]) -> Wanted {
        let before = condition(old, ConditionType::Programmed).and_then(as_wanted);
        let same = self.revision.as_ref().map(Revision::as_str) == old.revision.as_deref();
        match before {
            Some(before) if same && before.reason != Reason::Pending => before,
            Some(_) | None => Wanted::new(
                ConditionType::Programmed,
                ConditionStatus::Unknown,
                Reason::WaitingForServers,
                match pods {
                    [] => "waiting for a server pod".to_owned(),
                    pods => format!("waiting for {} to tell what it serves", names(pods)),
                },
            ),
        }
    }
}

/// The conditions of what does not resolve: the first one's reason, and every message.
pub(crate) fn problems_wanted(type_: ConditionType, problems: &[Problem]) -> Wanted {
    let messages: Vec<_> = problems.iter().map(|problem| located(&problem.field, &problem.message)).collect();
    let reason = problems.first().map_or(Reason::Resolved, |problem| problem.reason);
    Wanted::new(type_, ConditionStatus::False, reason, messages.join("; "))
}

/// A message with its field before it.
pub(crate) fn located(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field}: {message}") }
}

fn names(pods: &[String]) -> String {
    match pods {
        [] => "a server pod".to_owned(),
        [one] => format!("server pod {one}"),
        [some @ .., last] => format!("server pods {} and {last}", some.join(", ")),
    }
}

pub(crate) fn condition(status: &AppStatus, type_: ConditionType) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_.as_str())
}

fn as_wanted(condition: &Condition) -> Option<Wanted> {
    let reason = *Reason::ALL.iter().find(|reason| reason.as_str() == condition.reason)?;
    Some(Wanted::new(ConditionType::Programmed, condition.status, reason, condition.message.clone()))
}

/// Kubernetes keeps times in whole seconds.
pub(crate) fn time(at: OffsetDateTime) -> Time {
    Time(Timestamp::from_second(at.unix_timestamp()).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// Whether two statuses say the same, whatever the times of their conditions.
pub(crate) fn says_the_same(one: &AppStatus, other: &AppStatus) -> bool {
    let rest = |status: &AppStatus| AppStatus { conditions: Vec::new(), ..status.clone() };
    same_but_for_time(&one.conditions, &other.conditions) && rest(one) == rest(other)
}

// === impl Written ===

impl Written {
    /// The status that is there: the watch's, unless a newer one was written since.
    pub(crate) fn latest<S: serde::de::DeserializeOwned + Default>(
        &self,
        meta: &kube::core::ObjectMeta,
        told: Option<S>,
    ) -> S {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = meta.uid.as_deref().unwrap_or_default();
        let version: u64 = meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or(0);
        match written.get(uid) {
            Some(newer) if newer.version > version => serde_json::from_value(newer.status.clone()).unwrap_or_default(),
            Some(_) => {
                written.remove(uid);
                told.unwrap_or_default()
            }
            None => told.unwrap_or_default(),
        }
    }

    fn note(&self, uid: &str, version: Option<String>, status: serde_json::Value) {
        if let Some(version) = version.and_then(|version| version.parse().ok()) {
            let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let at = Instant::now();
            written.retain(|_, written| at - written.at < REMEMBERED);
            written.insert(uid.to_owned(), WrittenStatus { version, status, at });
        }
    }
}

// === impl Told ===

impl Told {
    /// Whether it may be told again, no more often than `each`; then it counts as told.
    pub(crate) fn again(&self, uid: &str, each: Duration) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // What ended is not kept.
        told.retain(|_, at| now - *at < each);
        if told.contains_key(uid) {
            return false;
        }
        told.insert(uid.to_owned(), now);
        true
    }
}

/// Writes a status. The object must be the one that was judged: by its uid, so that one made anew under the name is not
/// given the status of the old.
pub(crate) async fn write<K, S>(context: &Context, object: &K, status: &S) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    S: Serialize,
{
    let resource = ApiResource::erase::<K>(&());
    let namespace = object.namespace().unwrap_or_default();
    // The answer need not decode: an object that does not must have a status too.
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
            context.written.note(&object.uid().unwrap_or_default(), answer.resource_version(), body["status"].clone());
            context.metrics.status_written();
            Ok(())
        }
        // It went meanwhile; its status went with it.
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(()),
        Err(error) => Err(Error::api("write the status")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn served(verdict: Verdict) -> Outcome {
        Outcome {
            app_id: Some("shop".parse().unwrap()),
            revision: Some(Revision::of(b"1")),
            verdict: Some(verdict),
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
        let status = served(Verdict::All { servers: 2 }).status(&AppStatus::default(), 3, NOW);
        for type_ in ConditionType::APP {
            assert_eq!(says(&status, type_).0, ConditionStatus::True, "{type_}");
        }
        assert_eq!(status.observed_generation, Some(3));
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
        // However many servers there are: scaling writes nothing.
        assert!(says_the_same(&status, &served(Verdict::All { servers: 6 }).status(&status, 3, NOW)));
    }

    #[test]
    fn programmed_falls_only_on_evidence() {
        let ready = served(Verdict::All { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let undecided = served(Verdict::Undecided { pods: pods() });
        assert!(says_the_same(&ready, &undecided.status(&ready, 1, NOW)), "a pod that starts is no evidence");
        let fallen = |verdict| programmed(&served(verdict), &ready);
        let waiting = (ConditionStatus::False, "WaitingForServers".to_owned());
        assert_eq!(fallen(Verdict::Behind { pods: pods() }), waiting);
        assert_eq!(fallen(Verdict::Silent { pods: pods() }), waiting);
        let refused = Verdict::Refused { pod: "server-1".into(), reason: "no".into() };
        assert_eq!(fallen(refused), (ConditionStatus::False, "RefusedByServer".to_owned()));
        let lost = Verdict::KeysLost { pod: "server-1".into() };
        assert_eq!(fallen(lost), (ConditionStatus::False, "KeysLost".to_owned()));
        assert_eq!(fallen(Verdict::NoServers), (ConditionStatus::Unknown, "NoServers".to_owned()));
    }

    #[test]
    fn no_answer_to_a_new_revision_is_not_a_yes() {
        let ready = served(Verdict::All { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let mut edited = served(Verdict::Undecided { pods: pods() });
        edited.revision = Some(Revision::of(b"2"));
        assert_eq!(programmed(&edited, &ready), (ConditionStatus::Unknown, "WaitingForServers".to_owned()));
        assert_eq!(programmed(&edited, &AppStatus::default()).0, ConditionStatus::Unknown);
    }

    #[test]
    fn a_silent_pod_is_named_with_what_to_do() {
        let status = served(Verdict::Silent { pods: pods() }).status(&AppStatus::default(), 1, NOW);
        let message = &condition(&status, ConditionType::Ready).unwrap().message;
        assert!(message.contains("server-1") && message.contains("look at its log"), "{message}");
        assert_eq!(names(&["a".into(), "b".into(), "c".into()]), "server pods a, b and c");
    }

    #[test]
    fn what_is_refused_says_why_and_that_the_last_revision_goes_on() {
        let mut outcome = served(Verdict::All { servers: 1 });
        outcome.refusal = Some(Refusal::new(Reason::InvalidSpec, "spec.tokens", "shorten it"));
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
        let mut outcome = served(Verdict::All { servers: 1 });
        outcome.problems = vec![
            Problem::new(Reason::SecretNotFound, "spec.mail.smtpSecretRef", "make it"),
            Problem::new(Reason::ProviderNotFound, "spec.providerRefs[0]", "apply it"),
        ];
        let status = outcome.status(&AppStatus::default(), 1, NOW);
        let condition = condition(&status, ConditionType::ResolvedRefs).unwrap();
        assert_eq!(condition.reason, "SecretNotFound");
        assert_eq!(condition.message, "spec.mail.smtpSecretRef: make it; spec.providerRefs[0]: apply it");
        assert_eq!(says(&status, ConditionType::Programmed).0, ConditionStatus::True, "the rest is served");
    }

    #[tokio::test(start_paused = true)]
    async fn progress_is_told_now_and_then() {
        let (told, each) = (Told::default(), Duration::from_secs(10));
        assert!(told.again("a", each) && !told.again("a", each) && told.again("b", each));
        tokio::time::advance(each).await;
        assert!(told.again("a", each));
    }

    #[test]
    fn a_status_that_was_just_written_counts_until_the_watch_tells_it() {
        let written = Written::default();
        let meta = |version: &str| kube::core::ObjectMeta {
            uid: Some("u".into()),
            resource_version: Some(version.into()),
            ..Default::default()
        };
        let status = |generation| AppStatus { observed_generation: Some(generation), ..AppStatus::default() };
        written.note("u", Some("7".into()), serde_json::to_value(status(2)).unwrap());
        let latest = |version| written.latest(&meta(version), Some(status(1))).observed_generation;
        assert_eq!(latest("6"), Some(2), "the copy is older");
        assert_eq!(latest("7"), Some(1), "the watch has told it, or what came after it");
        assert_eq!(latest("6"), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_written_is_not_remembered_for_ever() {
        let written = Written::default();
        for uid in ["a", "b"] {
            written.note(uid, Some("7".into()), json!({}));
            tokio::time::advance(REMEMBERED).await;
        }
        written.note("c", Some("7".into()), json!({}));
        assert_eq!(written.0.lock().unwrap().len(), 1);
    }
}
