//! The events that pods of the test cause and receive, as lines of their logs.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The fields of a webhook event that are already known to the pod that causes the event.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub(crate) struct Event {
    /// The appID of the event's App.
    pub(crate) app: String,
    /// The type of the event, for example `user.created`.
    #[serde(rename = "type")]
    pub(crate) event_type: String,
    /// `None` if the event is about many users.
    pub(crate) user_id: Option<String>,
}

/// An event that the receiver has accepted.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct AcceptedEvent {
    /// The id of the event, which is the same for each delivery.
    pub(crate) id: String,
    pub(crate) event: Event,
    /// How many users an import created. 0 for other events.
    pub(crate) created: u64,
}

const CAUSED: &str = "caused ";
const ACCEPTED: &str = "accepted ";

/// What a pod logs after a call that causes this event.
pub(crate) fn caused_line(event: &Event) -> Result<String> {
    Ok(format!("{CAUSED}{}", serde_json::to_string(event)?))
}

/// What the receiver logs for an event with a valid signature and a new id.
pub(crate) fn accepted_line(event: &AcceptedEvent) -> Result<String> {
    Ok(format!("{ACCEPTED}{}", serde_json::to_string(event)?))
}

/// The events in the log of a pod that causes events.
pub(crate) fn read_caused(log: &str) -> Result<Vec<Event>> {
    let lines = log.lines().filter_map(|line| line.strip_prefix(CAUSED));
    lines.map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}

/// The events in the log of the receiver.
pub(crate) fn read_accepted(log: &str) -> Result<Vec<AcceptedEvent>> {
    let lines = log.lines().filter_map(|line| line.strip_prefix(ACCEPTED));
    lines.map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
}
