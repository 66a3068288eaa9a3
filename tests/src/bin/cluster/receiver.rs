//! The pod `receiver`: a receiver of webhooks at :8000, which accepts and logs each event.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use latchkey_tests::webhook_receiver::{ReceivedEvent, WebhookReceiver};
use serde_json::Value;
use tokio::time::sleep;

use crate::events::{self, AcceptedEvent, Event};

#[derive(clap::Args)]
pub(crate) struct ReceiverArgs {
    /// Key of a webhook (`whsec_…`). Can be repeated: an event must be signed with one of the keys.
    #[arg(long = "key", required = true)]
    keys: Vec<String>,
}

/// How often the receiver looks for events to log.
const LOG_INTERVAL: Duration = Duration::from_millis(100);

/// The beginning of a line about an event that must not arrive: its signature is wrong, or its id is not new.
pub(crate) const INVALID: &str = "INVALID: ";

pub(crate) async fn run(options: &ReceiverArgs) -> Result<()> {
    let receiver = WebhookReceiver::start_at(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8000)))?;
    // The bodies of the events so far, by id.
    let mut accepted = HashMap::new();
    loop {
        for event in receiver.take_events() {
            println!("{}", log_line(&options.keys, &mut accepted, &event)?);
        }
        sleep(LOG_INTERVAL).await;
    }
}

/// Returns the line that the receiver logs for a request. The receiver responds 204 to every request, so no id should
/// arrive twice.
fn log_line(keys: &[String], accepted: &mut HashMap<String, Value>, received: &ReceivedEvent) -> Result<String> {
    let (id, event_type) = (received.id(), received.event_type());
    if !keys.iter().any(|key| received.is_signed_with(key)) {
        return Ok(format!("{INVALID}{event_type} {id} is signed with another key"));
    }
    let mut body = received.body.clone();
    // Each delivery contains the user's current profile, so only the rest of the body is the same in all deliveries of
    // an event.
    if let Some(data) = body.get_mut("data").and_then(Value::as_object_mut) {
        data.remove("user");
    }
    match accepted.entry(id.to_owned()) {
        Entry::Occupied(first) => {
            let other = if *first.get() == body { "the same" } else { "another" };
            Ok(format!("{INVALID}{event_type} {id} arrived again, with {other} body"))
        }
        Entry::Vacant(new) => {
            let data = &body["data"];
            let event = Event {
                app: data["app"].as_str().unwrap_or_default().to_owned(),
                event_type: event_type.to_owned(),
                user_id: data["user_id"].as_str().map(str::to_owned),
            };
            let created = data["detail"]["created"].as_u64().unwrap_or_default();
            let line = events::accepted_line(&AcceptedEvent { id: id.to_owned(), event, created })?;
            new.insert(body);
            Ok(line)
        }
    }
}
