//! Records Kubernetes Events about the effects of a change to an App. A change that affects all Apps (for example, a
//! change to the servers) causes no Event.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Resource,
    runtime::events::{Event, EventType, Recorder},
};
use latchkey_crds::{
    app::{App, AppStatus},
    conditions::{ConditionStatus, ConditionType},
};
use tracing::warn;

use crate::{
    app::{keys::lifecycle::KeyStatuses, status::condition},
    context::Context,
    error::ErrorChain,
};

/// The maximum length of an Event's note, in bytes (validation of events.k8s.io/v1).
const MAX_NOTE_BYTES: usize = 1024;

/// The reason of the Event about a new revision.
const PROGRAMMED: &str = "Programmed";

/// Records an Event for each of the conditions `Accepted` and `ResolvedRefs` that has changed and is now False. Also
/// records an Event when the revision in the status changes and every server pod already serves the new one. If the
/// pods serve it later, there is no Event, because only the servers have changed then. A revision that differs only in
/// the App's Clients causes no Event: the Clients have Events of their own.
pub(crate) async fn record_status_change(
    context: &Context,
    app: &App,
    old: &AppStatus,
    new: &AppStatus,
    differs_only_in_clients: bool,
) {
    let events = status_events(old, new).into_iter();
    for event in events.filter(|event| !differs_only_in_clients || event.reason != PROGRAMMED) {
        record(context, app, event).await;
    }
}

pub(crate) async fn record_key_change(context: &Context, app: &App, before: &KeyStatuses, after: &KeyStatuses) {
    let states = |keys: &KeyStatuses| {
        let states: Vec<_> =
            keys.signing.iter().chain(&keys.hmac).map(|key| format!("{} is {:?}", key.id, key.state)).collect();
        states.join(", ")
    };
    if states(before) != states(after) {
        record(context, app, new_event(EventType::Normal, "KeysChanged", "Rotate", states(after))).await;
    }
}

pub(crate) async fn record_users_deleted(context: &Context, app: &App) {
    record(
        context,
        app,
        new_event(EventType::Normal, "UsersDeleted", "Delete", "the users of the App are deleted".to_owned()),
    )
    .await;
}

/// Returns the Events for the differences between two statuses. Pure.
fn status_events(old: &AppStatus, new: &AppStatus) -> Vec<Event> {
    let mut events = Vec::new();
    let content = |status, type_| {
        condition(status, type_).map(|found| (found.status, found.reason.clone(), found.message.clone()))
    };
    for (type_, action) in [(ConditionType::Accepted, "Validate"), (ConditionType::ResolvedRefs, "Resolve")] {
        let new_content = content(new, type_);
        if new_content == content(old, type_) {
            continue;
        }
        if let Some((ConditionStatus::False, reason, message)) = new_content {
            events.push(new_event(EventType::Warning, &reason, action, message));
        }
    }
    let is_ready =
        |status| content(status, ConditionType::Ready).is_some_and(|(ready, ..)| ready == ConditionStatus::True);
    // If the revision is the same, only the servers have changed, not the App.
    if is_ready(new) && old.revision != new.revision {
        let revision = new.revision.as_deref().unwrap_or_default();
        let short_revision = revision.get(..12).unwrap_or(revision);
        events.push(new_event(
            EventType::Normal,
            PROGRAMMED,
            "Publish",
            format!("every server pod serves revision {short_revision}"),
        ));
    }
    events
}

pub(crate) fn new_event(type_: EventType, reason: &str, action: &str, note: String) -> Event {
    let mut note = note;
    if note.len() > MAX_NOTE_BYTES {
        let end = (0..=MAX_NOTE_BYTES - 3).rev().find(|end| note.is_char_boundary(*end)).unwrap_or(0);
        note.truncate(end);
        note.push('…');
    }
    Event { type_, reason: reason.to_owned(), note: Some(note), action: action.to_owned(), secondary: None }
}

async fn record(context: &Context, app: &App, event: Event) {
    publish(context, &app.object_ref(&()), event).await;
}

/// Records an Event about an object. A failure is only logged: a namespace that is being deleted accepts no Events.
pub(crate) async fn publish(context: &Context, object: &ObjectReference, event: Event) {
    // Each Event gets a new recorder. A recorder that has already sent an Event with the same reason only raises the
    // count of that Event, and drops the new note.
    let recorder = Recorder::new(context.client.clone(), context.reporter.clone());
    if let Err(error) = recorder.publish(&event, object).await {
        warn!(reason = event.reason, error = %ErrorChain(&error), "failed to record an Event");
    }
}

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use latchkey_crds::{
        app::AppSpec,
        conditions::{DesiredCondition, Reason, merge_conditions},
        rendered::Revision,
    };
    use time::OffsetDateTime;

    use super::*;
    use crate::{
        app::mock_api::{MockApi, ReceivedCall, context},
        status::to_k8s_time,
    };

    fn status(desired: &[DesiredCondition], document: &[u8]) -> AppStatus {
        AppStatus {
            revision: Some(Revision::of(document).to_string()),
            conditions: merge_conditions(&[], desired, 1, &to_k8s_time(OffsetDateTime::UNIX_EPOCH)),
            ..AppStatus::default()
        }
    }

    fn desired(type_: ConditionType, status: ConditionStatus, reason: Reason, message: &str) -> DesiredCondition {
        DesiredCondition::new(type_, status, reason, message)
    }

    #[test]
    fn each_change_to_an_app_is_recorded_once_and_pod_changes_are_not() {
        let accepted = desired(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted, "");
        let programmed = desired(ConditionType::Programmed, ConditionStatus::True, Reason::Programmed, "");
        let waiting = desired(ConditionType::Programmed, ConditionStatus::False, Reason::WaitingForServers, "pod a");
        let missing = desired(ConditionType::ResolvedRefs, ConditionStatus::False, Reason::SecretNotFound, "Secret x");
        let reasons = |old: &AppStatus, new: &AppStatus| {
            status_events(old, new).into_iter().map(|event| event.reason).collect::<Vec<_>>()
        };
        let ready = status(&[accepted.clone(), programmed.clone()], b"1");
        assert_eq!(reasons(&AppStatus::default(), &ready), ["Programmed"]);
        assert!(reasons(&ready, &ready).is_empty());
        // If a pod serves an earlier revision for a while, no Event is recorded, because the App has not changed.
        let waiting_again = status(&[accepted.clone(), waiting], b"1");
        assert!(reasons(&ready, &waiting_again).is_empty() && reasons(&waiting_again, &ready).is_empty());
        let broken = status(&[accepted, missing, programmed], b"1");
        assert_eq!(reasons(&ready, &broken), ["SecretNotFound"]);
        assert!(reasons(&broken, &ready).is_empty());
    }

    #[tokio::test]
    async fn each_event_is_recorded_with_its_own_note() {
        const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let accept = |call: &ReceivedCall| (StatusCode::OK, call.body.clone());
        let script = MockApi::default().expect(Method::POST, EVENTS, accept).expect(Method::POST, EVENTS, accept);
        let (context, _) = context(script.client());
        let mut app = App::new("shop", AppSpec::default());
        app.metadata.namespace = Some("shop".into());
        for note in ["h1 is Active", "h2 is Active"] {
            record(&context, &app, new_event(EventType::Normal, "KeysChanged", "Rotate", note.to_owned())).await;
        }
        let notes: Vec<_> = script.finish().into_iter().map(|call| call.body["note"].clone()).collect();
        assert_eq!(notes, ["h1 is Active", "h2 is Active"]);
    }

    #[test]
    fn a_long_note_is_cut_between_characters() {
        let cut = new_event(EventType::Warning, "X", "Y", "é".repeat(2000)).note.unwrap();
        assert!(cut.len() <= MAX_NOTE_BYTES && cut.ends_with("é…"));
    }
}
