//! The outcome of a reconcile, and the status that reports it. Pure.

use std::time::Duration;

use latchkey_crds::{
    app::{AppProviderStatus, AppStatus, KeyStatus},
    conditions::{
        Condition, ConditionStatus, ConditionType, DesiredCondition, Reason, equal_except_times, merge_conditions,
    },
    names::NEW_KEYS_ANNOTATION,
    rendered::Revision,
    types::{AppId, WebhookName},
};
use time::OffsetDateTime;

use crate::{
    app::validate::Rejection,
    facts::FieldError,
    monitor::{RolloutState, WebhookStates},
    status::{to_k8s_time, unresolved_condition, with_field},
};

mod delivering;
pub(crate) mod write;

/// A reconcile that finished.
pub(crate) struct Reconciled {
    pub(crate) outcome: Outcome,
    /// The time after which the App is reconciled again, even without an event.
    pub(crate) requeue: Duration,
    /// Whether the reconcile published a document.
    pub(crate) published: bool,
    /// Whether the published document differs only in its Clients from the previously published one.
    pub(crate) differs_only_in_clients: bool,
}

/// What the status reports about a reconcile.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) app_id: Option<AppId>,
    pub(crate) issuer: Option<String>,
    /// The published revision. If the App is not accepted, this is the revision that is still served.
    pub(crate) revision: Option<Revision>,
    pub(crate) providers: Vec<AppProviderStatus>,
    pub(crate) signing_keys: Vec<KeyStatus>,
    pub(crate) hmac_keys: Vec<KeyStatus>,
    pub(crate) rejection: Option<Rejection>,
    pub(crate) field_errors: Vec<FieldError>,
    /// What the servers report about the revision. `None`: the App is not accepted, or its users are being deleted.
    pub(crate) rollout: Option<RolloutState>,
    /// The revisions that differ from `revision` only in the Clients of the App. A condition about one of these
    /// revisions does not change while reports from servers are missing.
    pub(crate) revisions_with_app_part: Vec<Revision>,
    /// The progress message, if the users are being deleted.
    pub(crate) deletion_progress: Option<String>,
    /// The names of the App's webhooks.
    pub(crate) webhooks: Vec<WebhookName>,
    /// The names of the webhooks with a Secret that cannot be used.
    pub(crate) webhooks_without_keys: Vec<WebhookName>,
    /// What the servers report about the webhooks.
    pub(crate) webhook_states: WebhookStates,
    /// The message about the servers that do not support the format that the App needs, if there are such servers.
    pub(crate) servers_too_old: Option<String>,
}

// === impl Outcome ===

impl Outcome {
    /// Returns the complete status of the App. `old` is the status before this reconcile.
    pub(crate) fn status(&self, old: &AppStatus, generation: i64, now: OffsetDateTime) -> AppStatus {
        let mut wanted = vec![self.accepted(), self.resolved_refs(), self.programmed(old)];
        wanted.extend(self.delivering(old, generation));
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
            Some(rejection) => DesiredCondition::new(
                ConditionType::Accepted,
                ConditionStatus::False,
                rejection.reason,
                with_field(&rejection.field, &rejection.message),
            ),
        }
    }

    fn resolved_refs(&self) -> DesiredCondition {
        let type_ = ConditionType::ResolvedRefs;
        match (self.field_errors.as_slice(), &self.rejection) {
            ([], None) => DesiredCondition::new(type_, ConditionStatus::True, Reason::Resolved, ""),
            // The App may have been rejected before its references were looked up.
            ([], Some(_)) => DesiredCondition::new(type_, ConditionStatus::Unknown, Reason::Pending, "see Accepted"),
            (errors, _) => unresolved_condition(errors),
        }
    }

    /// Returns the condition `Delivering`, if the App has webhooks. While the App is not accepted, the webhooks of the
    /// last accepted revision are served, so the condition stays as it was.
    fn delivering(&self, old: &AppStatus, generation: i64) -> Option<DesiredCondition> {
        if self.rejection.is_some() {
            let type_ = ConditionType::Delivering;
            return condition(old, type_).and_then(|before| to_desired(type_, before));
        }
        delivering::delivering(&self.webhooks, &self.webhooks_without_keys, &self.webhook_states, old, generation)
    }

    fn programmed(&self, old: &AppStatus) -> DesiredCondition {
        use ConditionStatus::{False, Unknown};
        if let Some(progress) = &self.deletion_progress {
            programmed(False, Reason::Deleting, progress)
        } else if self.rejection.is_some() {
            let message = match &self.revision {
                Some(_) => "the last accepted revision is still served; see Accepted",
                None => "nothing is served; see Accepted",
            };
            programmed(Unknown, Reason::Pending, message)
        } else if let Some(message) = &self.servers_too_old {
            programmed(False, Reason::ServersTooOld, message)
        } else if let Some(rollout) = &self.rollout {
            self.rolled_out(rollout, old)
        } else {
            programmed(Unknown, Reason::Pending, "nothing is published yet")
        }
    }

    /// Returns the condition `Programmed` of a published revision.
    fn rolled_out(&self, rollout: &RolloutState, old: &AppStatus) -> DesiredCondition {
        use ConditionStatus::{False, True, Unknown};
        let short = self.revision.as_ref().map_or("", |revision| &revision.as_str()[..12]);
        match rollout {
            // If the message contained the number of pods, each scaling of the servers would change every status.
            RolloutState::Complete { .. } => programmed(True, Reason::Programmed, ""),
            RolloutState::Behind { pods } => {
                let message = format!("waiting for {} to serve revision {short}", pod_names(pods));
                programmed(False, Reason::WaitingForServers, message)
            }
            RolloutState::Silent { pods } => {
                let message = format!(
                    "{} sent nothing for 15 s while it should serve; check its log, or delete the pod",
                    pod_names(pods)
                );
                programmed(False, Reason::WaitingForServers, message)
            }
            RolloutState::Rejected { pod, reason } => {
                let message = format!("server pod {pod} rejects revision {short}: {reason}");
                programmed(False, Reason::RefusedByServer, message)
            }
            RolloutState::KeysLost { pod } => {
                let message = format!(
                    "the keys of the App's users are lost: server pod {pod} rejects revision {short}, which has other \
                     keys; restore the key Secret from a backup, or set the annotation {NEW_KEYS_ANNOTATION} to a new \
                     value to start with new keys, which logs every user out"
                );
                programmed(False, Reason::KeysLost, message)
            }
            RolloutState::NoServers => {
                let message = "no server pod is running; scale the servers up, or find out why none is serving";
                programmed(Unknown, Reason::NoServers, message)
            }
            RolloutState::Undecided { pods } => self.undecided(old, pods),
        }
    }

    /// Returns the condition `Programmed` while some pods have not reported yet. A missing report proves nothing, so a
    /// previous condition about the same revision does not change.
    fn undecided(&self, old: &AppStatus, pods: &[String]) -> DesiredCondition {
        let before =
            condition(old, ConditionType::Programmed).and_then(|before| to_desired(ConditionType::Programmed, before));
        let mut same = self.revision.iter().chain(&self.revisions_with_app_part);
        let is_same_revision = match old.revision.as_deref() {
            Some(before) => same.any(|revision| revision.as_str() == before),
            None => self.revision.is_none(),
        };
        match before {
            Some(before) if is_same_revision && before.reason != Reason::Pending => before,
            Some(_) | None => {
                let message = match pods {
                    [] => "waiting for a server pod".to_owned(),
                    pods => format!("waiting for {} to report what it serves", pod_names(pods)),
                };
                programmed(ConditionStatus::Unknown, Reason::WaitingForServers, message)
            }
        }
    }
}

fn programmed(status: ConditionStatus, reason: Reason, message: impl Into<String>) -> DesiredCondition {
    DesiredCondition::new(ConditionType::Programmed, status, reason, message)
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

fn to_desired(type_: ConditionType, condition: &Condition) -> Option<DesiredCondition> {
    let reason = *Reason::ALL.iter().find(|reason| reason.as_str() == condition.reason)?;
    Some(DesiredCondition::new(type_, condition.status, reason, condition.message.clone()))
}

/// Whether two statuses differ at most in the times of their conditions.
pub(crate) fn is_same_except_times(one: &AppStatus, other: &AppStatus) -> bool {
    let without_conditions = |status: &AppStatus| AppStatus { conditions: Vec::new(), ..status.clone() };
    equal_except_times(&one.conditions, &other.conditions) && without_conditions(one) == without_conditions(other)
}

#[cfg(test)]
mod tests {
    use latchkey_crds::webhook::WebhookState;

    use super::*;

    const NOW: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn served(rollout: RolloutState) -> Outcome {
        Outcome {
            app_id: Some("shop".parse().unwrap()),
            revision: Some(Revision::of(b"1")),
            rollout: Some(rollout),
            ..Outcome::default()
        }
    }

    fn status_and_reason(status: &AppStatus, type_: ConditionType) -> (ConditionStatus, String) {
        let condition = condition(status, type_).unwrap();
        (condition.status, condition.reason.clone())
    }

    fn programmed_of(outcome: &Outcome, old: &AppStatus) -> (ConditionStatus, String) {
        status_and_reason(&outcome.status(old, 1, NOW), ConditionType::Programmed)
    }

    fn pods() -> Vec<String> {
        vec!["server-1".into()]
    }

    #[test]
    fn an_app_that_every_server_serves_is_ready() {
        let status = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 3, NOW);
        for type_ in ConditionType::APP {
            assert_eq!(status_and_reason(&status, type_).0, ConditionStatus::True, "{type_}");
        }
        assert_eq!(status.observed_generation, Some(3));
        assert!(status.conditions.iter().all(|condition| condition.observed_generation == Some(3)));
        // The status does not depend on the number of servers, so scaling the servers causes no write.
        assert!(is_same_except_times(&status, &served(RolloutState::Complete { servers: 6 }).status(&status, 3, NOW)));
    }

    #[test]
    fn a_missing_report_does_not_change_programmed_from_true() {
        let ready = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let undecided = served(RolloutState::Undecided { pods: pods() });
        assert!(is_same_except_times(&ready, &undecided.status(&ready, 1, NOW)), "a starting pod is no evidence");
        let after = |rollout| programmed_of(&served(rollout), &ready);
        let waiting = (ConditionStatus::False, "WaitingForServers".to_owned());
        assert_eq!(after(RolloutState::Behind { pods: pods() }), waiting);
        assert_eq!(after(RolloutState::Silent { pods: pods() }), waiting);
        let rejected = RolloutState::Rejected { pod: "server-1".into(), reason: "no".into() };
        assert_eq!(after(rejected), (ConditionStatus::False, "RefusedByServer".to_owned()));
        let lost = RolloutState::KeysLost { pod: "server-1".into() };
        assert_eq!(after(lost), (ConditionStatus::False, "KeysLost".to_owned()));
        assert_eq!(after(RolloutState::NoServers), (ConditionStatus::Unknown, "NoServers".to_owned()));
    }

    #[test]
    fn programmed_is_unknown_for_a_new_revision_until_the_pods_report() {
        let ready = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let mut edited = served(RolloutState::Undecided { pods: pods() });
        edited.revision = Some(Revision::of(b"2"));
        assert_eq!(programmed_of(&edited, &ready), (ConditionStatus::Unknown, "WaitingForServers".to_owned()));
        assert_eq!(programmed_of(&edited, &AppStatus::default()).0, ConditionStatus::Unknown);
    }

    #[test]
    fn a_revision_with_other_clients_does_not_change_programmed() {
        let ready = served(RolloutState::Complete { servers: 2 }).status(&AppStatus::default(), 1, NOW);
        let mut other_clients = served(RolloutState::Undecided { pods: pods() });
        other_clients.revision = Some(Revision::of(b"2"));
        assert_eq!(programmed_of(&other_clients, &ready).0, ConditionStatus::Unknown);
        other_clients.revisions_with_app_part = vec![Revision::of(b"1"), Revision::of(b"2")];
        assert_eq!(programmed_of(&other_clients, &ready), (ConditionStatus::True, "Programmed".to_owned()));
    }

    #[test]
    fn the_message_about_a_silent_pod_names_the_pod_and_what_to_do() {
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
        assert_eq!(status_and_reason(&status, ConditionType::Accepted), (ConditionStatus::False, "InvalidSpec".into()));
        assert_eq!(status_and_reason(&status, ConditionType::Programmed).0, ConditionStatus::Unknown);
        assert_eq!(status_and_reason(&status, ConditionType::Ready), (ConditionStatus::False, "InvalidSpec".into()));
        let ready = condition(&status, ConditionType::Ready).unwrap();
        assert_eq!(ready.message, "spec.tokens: shorten it");
        assert_eq!(status.revision, Some(Revision::of(b"1").to_string()));
    }

    #[test]
    fn delivering_exists_only_with_webhooks_and_never_affects_ready() {
        let without = served(RolloutState::Complete { servers: 1 }).status(&AppStatus::default(), 1, NOW);
        assert!(condition(&without, ConditionType::Delivering).is_none());
        let mut outcome = served(RolloutState::Complete { servers: 1 });
        outcome.webhooks = vec!["crm".parse().unwrap()];
        outcome.webhook_states.insert("crm".parse().unwrap(), WebhookState::ReceiverFails);
        let failing = outcome.status(&without, 1, NOW);
        assert_eq!(
            status_and_reason(&failing, ConditionType::Delivering),
            (ConditionStatus::False, "ReceiverFails".to_owned())
        );
        assert_eq!(status_and_reason(&failing, ConditionType::Ready).0, ConditionStatus::True);
        let types: Vec<_> = failing.conditions.iter().map(|one| one.type_.as_str()).collect();
        assert_eq!(types, ["Accepted", "ResolvedRefs", "Programmed", "Delivering", "Ready"]);

        // The webhooks of the last accepted revision are still served.
        outcome.rejection = Some(Rejection::new(Reason::InvalidSpec, "spec.tokens", "shorten it"));
        (outcome.webhooks, outcome.webhook_states) = (Vec::new(), WebhookStates::new());
        let rejected = outcome.status(&failing, 2, NOW);
        assert_eq!(status_and_reason(&rejected, ConditionType::Delivering).1, "ReceiverFails");

        let removed = served(RolloutState::Complete { servers: 1 }).status(&failing, 2, NOW);
        assert!(condition(&removed, ConditionType::Delivering).is_none());
    }

    #[test]
    fn all_references_that_do_not_resolve_are_named() {
        let mut outcome = served(RolloutState::Complete { servers: 1 });
        outcome.field_errors = vec![
            FieldError::new(Reason::SecretNotFound, "spec.mail.smtpSecretRef", "make it"),
            FieldError::new(Reason::ProviderNotFound, "spec.providerRefs[0]", "apply it"),
        ];
        let status = outcome.status(&AppStatus::default(), 1, NOW);
        let condition = condition(&status, ConditionType::ResolvedRefs).unwrap();
        assert_eq!(condition.reason, "SecretNotFound");
        assert_eq!(condition.message, "spec.mail.smtpSecretRef: make it; spec.providerRefs[0]: apply it");
        assert_eq!(
            status_and_reason(&status, ConditionType::Programmed).0,
            ConditionStatus::True,
            "the App is served without the broken references"
        );
    }
}
