//! Events: what a change of the App itself led to. What concerns all Apps at once is told by none.

use kube::{
    Resource,
    runtime::events::{Event, EventType, Recorder},
};
use latchkey_crds::{
    app::{App, AppStatus, KeyStatus},
    conditions::{ConditionStatus, ConditionType},
};
use tracing::warn;

use crate::{app::status::condition, context::Context, error::Chain};

/// An Event may hold this many octets of text (validation of events.k8s.io/v1).
const MAX_NOTE: usize = 1024;

/// Tells what a new status says that the old did not.
pub(crate) async fn changed(context: &Context, app: &App, old: &AppStatus, new: &AppStatus) {
    for event in events(old, new) {
        send(context, app, event).await;
    }
}

/// Signing keys and HMAC keys, without what they hold.
type Keys = (Vec<KeyStatus>, Vec<KeyStatus>);

pub(crate) async fn keys_changed(context: &Context, app: &App, before: &Keys, now: &Keys) {
    let states = |(signing, hmac): &Keys| {
        let states: Vec<_> = signing.iter().chain(hmac).map(|key| format!("{} is {:?}", key.id, key.state)).collect();
        states.join(", ")
    };
    if states(before) != states(now) {
        send(context, app, event(EventType::Normal, "KeysChanged", "Rotate", states(now))).await;
    }
}

pub(crate) async fn users_deleted(context: &Context, app: &App) {
    send(
        context,
        app,
        event(EventType::Normal, "UsersDeleted", "Delete", "the users of the App are deleted".to_owned()),
    )
    .await;
}

/// Pure: the Events that follow from two statuses.
fn events(old: &AppStatus, new: &AppStatus) -> Vec<Event> {
    let mut events = Vec::new();
    let said = |status, type_| {
        condition(status, type_).map(|found| (found.status, found.reason.clone(), found.message.clone()))
    };
    for (type_, action) in [(ConditionType::Accepted, "Validate"), (ConditionType::ResolvedRefs, "Resolve")] {
        let now = said(new, type_);
        if now == said(old, type_) {
            continue;
        }
        if let Some((ConditionStatus::False, reason, message)) = now {
            events.push(event(EventType::Warning, &reason, action, message));
        }
    }
    let is_ready =
        |status| said(status, ConditionType::Ready).is_some_and(|(ready, ..)| ready == ConditionStatus::True);
    // Without a new revision it is the servers that changed, not the App.
    if is_ready(new) && old.revision != new.revision {
        let revision = new.revision.as_deref().unwrap_or_default();
        let short = revision.get(..12).unwrap_or(revision);
        events.push(event(
            EventType::Normal,
            "Programmed",
            "Publish",
            format!("every server pod serves revision {short}"),
        ));
    }
    events
}

fn event(type_: EventType, reason: &str, action: &str, note: String) -> Event {
    let mut note = note;
    if note.len() > MAX_NOTE {
        let end = (0..=MAX_NOTE - 3).rev().find(|end| note.is_char_boundary(*end)).unwrap_or(0);
        note.truncate(end);
        note.push('…');
    }
    Event { type_, reason: reason.to_owned(), note: Some(note), action: action.to_owned(), secondary: None }
}

/// An Event that is not taken is no failure of what it tells of; a namespace that is going takes none.
async fn send(context: &Context, app: &App, event: Event) {
    // A recorder that knows of one of the same reason only counts that up: the new note would be lost.
    let recorder = Recorder::new(context.client.clone(), context.reporter.clone());
    if let Err(error) = recorder.publish(&event, &app.object_ref(&())).await {
        warn!(reason = event.reason, error = %Chain(&error), "an Event was not written");
    }
}

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use latchkey_crds::{
        app::AppSpec,
        conditions::{Reason, Wanted, merge},
        rendered::Revision,
    };
    use time::OffsetDateTime;

    use super::*;
    use crate::app::{
        scripted::{Call, Script, context},
        status::time,
    };

    fn status(wanted: &[Wanted], document: &[u8]) -> AppStatus {
        AppStatus {
            revision: Some(Revision::of(document).to_string()),
            conditions: merge(&[], wanted, 1, &time(OffsetDateTime::UNIX_EPOCH)),
            ..AppStatus::default()
        }
    }

    fn wanted(type_: ConditionType, status: ConditionStatus, reason: Reason, message: &str) -> Wanted {
        Wanted::new(type_, status, reason, message)
    }

    #[test]
    fn an_event_tells_of_what_the_app_led_to_and_only_once() {
        let accepted = wanted(ConditionType::Accepted, ConditionStatus::True, Reason::Accepted, "");
        let programmed = wanted(ConditionType::Programmed, ConditionStatus::True, Reason::Programmed, "");
        let waiting = wanted(ConditionType::Programmed, ConditionStatus::False, Reason::WaitingForServers, "pod a");
        let missing = wanted(ConditionType::ResolvedRefs, ConditionStatus::False, Reason::SecretNotFound, "Secret x");
        let reasons = |old: &AppStatus, new: &AppStatus| {
            events(old, new).into_iter().map(|event| event.reason).collect::<Vec<_>>()
        };
        let first = status(&[accepted.clone(), programmed.clone()], b"1");
        assert_eq!(reasons(&AppStatus::default(), &first), ["Programmed"]);
        assert!(reasons(&first, &first).is_empty());
        // A pod that is behind, and comes back: the App did nothing.
        let behind = status(&[accepted.clone(), waiting], b"1");
        assert!(reasons(&first, &behind).is_empty() && reasons(&behind, &first).is_empty());
        let broken = status(&[accepted, missing, programmed], b"1");
        assert_eq!(reasons(&first, &broken), ["SecretNotFound"]);
        assert!(reasons(&broken, &first).is_empty());
    }

    #[tokio::test]
    async fn each_event_is_told_with_its_own_note() {
        const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let taken = |call: &Call| (StatusCode::OK, call.body.clone());
        let script = Script::default().expect(Method::POST, EVENTS, taken).expect(Method::POST, EVENTS, taken);
        let (context, _) = context(script.client());
        let mut app = App::new("shop", AppSpec::default());
        app.metadata.namespace = Some("shop".into());
        for note in ["h1 is Active", "h2 is Active"] {
            send(&context, &app, event(EventType::Normal, "KeysChanged", "Rotate", note.to_owned())).await;
        }
        let notes: Vec<_> = script.calls().into_iter().map(|call| call.body["note"].clone()).collect();
        assert_eq!(notes, ["h1 is Active", "h2 is Active"]);
    }

    #[test]
    fn a_long_note_is_cut_between_letters() {
        let cut = event(EventType::Warning, "X", "Y", "é".repeat(2000)).note.unwrap();
        assert!(cut.len() <= MAX_NOTE && cut.ends_with("é…"));
    }
}
