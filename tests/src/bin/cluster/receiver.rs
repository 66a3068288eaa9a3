//! The pod `receiver`: a receiver of webhooks at :8000, which logs each event.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use latchkey_tests::webhook_receiver::WebhookReceiver;
use tokio::time::sleep;

#[derive(clap::Args)]
pub(crate) struct ReceiverArgs {
    /// Key of the webhook (`whsec_…`).
    #[arg(long)]
    key: String,
}

/// How often the receiver looks for events to log.
const LOG_INTERVAL: Duration = Duration::from_millis(100);

/// What the receiver logs for an event with a valid signature.
pub(crate) fn signed(event_type: &str) -> String {
    format!("{event_type} is signed with the key")
}

pub(crate) async fn run(options: &ReceiverArgs) -> Result<()> {
    let receiver = WebhookReceiver::start_at(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8000)))?;
    let mut logged = 0;
    loop {
        for event in receiver.events().split_off(logged) {
            logged += 1;
            let event_type = event.event_type();
            if event.is_signed_with(&options.key) {
                println!("{}", signed(event_type));
            } else {
                println!("INVALID: {event_type} has another signature");
            }
        }
        sleep(LOG_INTERVAL).await;
    }
}
