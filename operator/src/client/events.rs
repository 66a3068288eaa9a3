//! Records Kubernetes Events about Clients. A change that affects all Clients (for example, a change to the servers)
//! causes no Event.

use kube::{
    Resource,
    runtime::events::{Event, EventType},
};
use latchkey_crds::{
    client::ClientStatus,
    conditions::{ConditionStatus, ConditionType},
};

use crate::{
    app::events::{new_event, publish},
    client::status::StatusDigest,
    context::Context,
    watch::WatchedClient,
};

/// Records an Event for each of the conditions `Accepted` and `ResolvedRefs` that has changed and is now False. Also
/// records an Event if the first status about a new generation of the Client already reports that every server pod
/// serves this generation.
pub(super) async fn record_status_change(
    context: &Context,
    client: &WatchedClient,
    old: &StatusDigest,
    new: &ClientStatus,
) {
    for event in status_events(old, new) {
        publish(context, &client.object_ref(&()), event).await;
    }
}

pub(super) async fn record_rotation(context: &Context, client: &WatchedClient, secret: &str) {
    let note = format!("Secret {secret} has a new client secret");
    publish(context, &client.object_ref(&()), new_event(EventType::Normal, "SecretRotated", "Rotate", note)).await;
}

/// Returns the Events for the differences between two statuses. Pure.
fn status_events(old: &StatusDigest, new: &ClientStatus) -> Vec<Event> {
    let digest = StatusDigest::of(new);
    let condition = |type_: ConditionType| new.conditions.iter().find(|one| one.type_ == type_.as_str());
    let mut events = Vec::new();
    for (type_, action) in [(ConditionType::Accepted, "Validate"), (ConditionType::ResolvedRefs, "Resolve")] {
        let found = condition(type_).filter(|one| one.status == ConditionStatus::False);
        if let Some(found) = found.filter(|_| digest.condition_differs(type_, old)) {
            events.push(new_event(EventType::Warning, &found.reason, action, found.message.clone()));
        }
    }
    let generation = new.observed_generation.unwrap_or(0);
    let is_ready = condition(ConditionType::Ready).is_some_and(|ready| ready.status == ConditionStatus::True);
    if is_ready && !old.reports(generation) {
        let note = format!("every server pod serves generation {generation}");
        events.push(new_event(EventType::Normal, "Programmed", "Publish", note));
    }
    events
}

#[cfg(test)]
mod tests {
    use latchkey_crds::conditions::{DesiredCondition, Reason, merge_conditions};
    use time::OffsetDateTime;

    use super::*;
    use crate::{
        client::status::{accepted, resolved_refs},
        facts::FieldError,
        status::to_k8s_time,
    };

    fn status(generation: i64, unresolved: Option<&FieldError>, programmed: ConditionStatus) -> ClientStatus {
        let programmed = DesiredCondition::new(ConditionType::Programmed, programmed, Reason::Programmed, "");
        let wanted = [accepted(), resolved_refs(unresolved), programmed];
        ClientStatus {
            observed_generation: Some(generation),
            conditions: merge_conditions(&[], &wanted, generation, &to_k8s_time(OffsetDateTime::UNIX_EPOCH)),
            ..ClientStatus::default()
        }
    }

    #[test]
    fn each_change_to_a_client_is_recorded_once_and_pod_changes_are_not() {
        let reasons = |old: &StatusDigest, new: &ClientStatus| -> Vec<_> {
            status_events(old, new).into_iter().map(|event| event.reason).collect()
        };
        let ready = status(1, None, ConditionStatus::True);
        assert_eq!(reasons(&StatusDigest::default(), &ready), ["Programmed"]);
        let digest = StatusDigest::of(&ready);
        assert!(reasons(&digest, &ready).is_empty());
        let waiting = status(1, None, ConditionStatus::False);
        assert!(reasons(&digest, &waiting).is_empty() && reasons(&StatusDigest::of(&waiting), &ready).is_empty());
        let missing = FieldError::new(Reason::SecretNotFound, "spec.web.secretRef", "create it");
        let broken = status(1, Some(&missing), ConditionStatus::True);
        assert_eq!(reasons(&digest, &broken), ["SecretNotFound"]);
        assert!(reasons(&StatusDigest::of(&broken), &broken).is_empty());
        assert!(reasons(&StatusDigest::of(&broken), &ready).is_empty());
        assert_eq!(reasons(&digest, &status(2, None, ConditionStatus::True)), ["Programmed"]);
    }
}
