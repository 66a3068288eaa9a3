//! The time from the response to a change until its event arrives at the receiver of a webhook.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use http::StatusCode;
use latchkey_tests::passwords::PASSWORD;
use serde_json::json;

use super::Service;
use crate::measurements::{Bound, format_millis, histogram, micros_of};

/// Number of users, who are registered and then renamed.
const USERS: u32 = 200;
/// The pause before a change is random, so that changes come at any time between two polls of the server's queue.
const MAX_PAUSE_MS: u64 = 100;
/// Upper limit of the median of the delays.
const MAX_P50: Duration = Duration::from_millis(250);
/// Upper limit of the p99 of the delays.
const MAX_P99: Duration = Duration::from_secs(1);

/// Measures the delays of the events for registrations and for name changes.
pub(super) async fn run(service: &Service) -> Result<[Bound; 2]> {
    let (app, client) = (service.apps.webhooks.id(), service.stack.client());
    let mut administrator = service.administrator().await?;
    // When the response to each change arrived, by the type of the change's event and the id of the user.
    let mut responses: HashMap<(String, String), Instant> = HashMap::new();
    for number in 0..USERS {
        pause().await;
        let registered = client.register(app, "Ada", &format!("user{number}@example.com"), PASSWORD).await;
        let responded = Instant::now();
        ensure!(registered.status == StatusCode::OK, "register returned {}", registered.status);
        let user = registered.string("local_id");
        responses.insert(("user.created".to_owned(), user.to_owned()), responded);

        pause().await;
        administrator.patch(&format!("/v1/{app}/users/{user}"), &json!({ "name": "Grace" })).await?;
        responses.insert(("user.updated".to_owned(), user.to_owned()), Instant::now());
    }
    service.receiver.wait_for_distinct(responses.len()).await;
    let mut delays = histogram();
    for event in service.receiver.events() {
        let user = event.body["data"]["user_id"].as_str().unwrap_or_default().to_owned();
        // A repeated delivery is not counted.
        if let Some(responded) = responses.remove(&(event.event_type().to_owned(), user)) {
            delays.record(micros_of(event.at.saturating_duration_since(responded)))?;
        }
    }
    ensure!(responses.is_empty(), "{} changes have no event", responses.len());
    println!("from the response to a registration or a change of a name until its event arrives");
    println!(
        "  {} events                    p50 {}, p90 {}, p99 {}, max {}\n",
        delays.len(),
        format_millis(&delays, 0.5),
        format_millis(&delays, 0.9),
        format_millis(&delays, 0.99),
        format_millis(&delays, 1.0)
    );
    let bound = |name: &str, quantile: f64, max: Duration| {
        Bound::new(
            format!("{name} of the time until an event arrives is under {max:?}: {}", format_millis(&delays, quantile)),
            delays.value_at_quantile(quantile) < micros_of(max),
        )
    };
    Ok([bound("p50", 0.5, MAX_P50), bound("p99", 0.99, MAX_P99)])
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..MAX_PAUSE_MS))).await;
}
