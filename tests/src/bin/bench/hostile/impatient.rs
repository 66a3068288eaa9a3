//! Clients who ask again at once after each refusal.
//!
//! 256 of them, each at an address of its own, log in to an App that loosened its limits. The hashing queue refuses most;
//! they ignore `Retry-After`.
//!
//! Attacks the cost of a refusal: what thousands of them a second take from those who are served.

use std::time::Duration;

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;

use super::{
    outsiders::{address, post, storm},
    trial::{Trial, loose},
};
use crate::figures::Bound;

const CLIENTS: u32 = 256;

pub(super) async fn run(lasts: Duration) -> Result<Vec<Bound>> {
    let app = loose(App::new("stormed").namespace("attacker"));
    let mut trial = Trial::start(Stack::builder().app(&app), lasts).await?;
    trial.calm().await?;
    let (server, tally, id) = (trial.server(), trial.tally.clone(), app.id().to_owned());
    trial
        .attack(async move {
            for number in 0..CLIENTS {
                let path = format!("/v1/{id}/email/login");
                let body = json!({ "email": "nobody@example.com", "password": "wrong by intent" });
                tokio::spawn(storm(server, address(number), tally.clone(), move || post(server, &path, &body)));
            }
        })
        .await
}
