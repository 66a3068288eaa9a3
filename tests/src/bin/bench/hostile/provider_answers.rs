//! A provider that answers with a mebibyte of nested JSON.
//!
//! A tenant's provider behaves while users are measured alone. Then the tenant adds eight more Providers, which the
//! server checks by itself within seconds, and sixteen clients call *login* with a token that nobody gave. Whatever the
//! provider is asked, it answers with nested JSON of the largest size that the server reads.
//!
//! Attacks the memory of what is parsed: its nodes and depth, and how many are parsed at once.

use std::time::Duration;

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;

use super::{
    outsiders::{Outsiders, address, post, storm},
    provider::Provider,
    trial::{Trial, loose},
};
use crate::figures::Bound;

const CLIENTS: u32 = 16;
/// As many as the server checks at once.
const CHECKED: u32 = 8;
const NAMESPACE: &str = "attacker";

pub(super) async fn run(lasts: Duration) -> Result<Vec<Bound>> {
    // Of the attacker, so it has the attacker's share of CPU.
    let outsiders = Outsiders::start()?;
    let provider = outsiders.spawn(Provider::start()).await??;
    let corp = provider.oauth2("corp").namespace(NAMESPACE);
    let app = loose(App::new("attacked").namespace(NAMESPACE)).provider(&corp);
    let mut trial = Trial::start(Stack::builder().app(&app).provider(&corp), lasts).await?;
    trial.calm().await?;

    provider.turn_hostile();
    let more: Vec<_> = (0..CHECKED).map(|number| provider.oidc(&format!("id-{number}")).namespace(NAMESPACE)).collect();
    let app = more.iter().fold(app, |app, provider| app.provider(provider));
    trial.stack.apply_all(std::slice::from_ref(&app), &more)?;
    let (server, tally, path) = (trial.server(), trial.tally.clone(), format!("/{}/corp/login", app.id()));
    trial
        .attack(async move {
            for number in 0..CLIENTS {
                let path = path.clone();
                let request = move || post(server, &path, &json!({ "token": "nobody-gave-this" }));
                tokio::spawn(storm(server, address(number), tally.clone(), request));
            }
        })
        .await
}
