//! Clients that retry immediately after each refusal.
//!
//! 256 clients, each with its own client address, log in to an App that raised its limits. The hashing queue rejects
//! most of the logins, and the clients ignore `Retry-After`.
//!
//! Attacks the cost of a 503 response: thousands of them per second must not slow down the clients that are served.

use std::time::Duration;

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;

use super::{
    attack::{ServerAttack, with_raised_limits},
    attackers::{address, flood, post_request},
};
use crate::measurements::Bound;

const CLIENTS: u32 = 256;

pub(super) async fn run(duration: Duration) -> Result<Vec<Bound>> {
    let app = with_raised_limits(App::new("stormed").namespace("attacker"));
    let mut trial = ServerAttack::start(Stack::builder().app(&app), duration).await?;
    trial.measure_baseline().await?;
    let (server, counts, id) = (trial.server(), trial.counts.clone(), app.id().to_owned());
    trial
        .run_attack(async move {
            for number in 0..CLIENTS {
                let path = format!("/v1/{id}/email/login");
                let body = json!({ "email": "nobody@example.com", "password": "wrong by intent" });
                tokio::spawn(flood(server, address(number), counts.clone(), move || {
                    post_request(server, &path, &body)
                }));
            }
        })
        .await
}
