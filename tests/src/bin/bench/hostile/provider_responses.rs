//! A provider that responds with 1 MiB of nested JSON.
//!
//! A tenant's provider behaves normally while users are measured without the attack. Then the tenant adds eight more
//! Providers, and sixteen clients call *login* with an invalid provider token. The server checks the added Providers
//! within seconds, even if no client uses them. The provider responds to every request with 1 MiB of nested JSON, which
//! is more than the server reads.
//!
//! Attacks the bounds on the memory of parsed documents: their nodes, their depth, and how many the server parses at
//! the same time.

use std::time::Duration;

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;

use super::{
    attack::{ServerAttack, with_raised_limits},
    attackers::{AttackerRuntime, address, flood, post_request},
    provider::BenchProvider,
};
use crate::measurements::Bound;

const CLIENTS: u32 = 16;
/// Number of added Providers: as many as the server checks concurrently.
const ADDED_PROVIDERS: u32 = 8;
const NAMESPACE: &str = "attacker";

pub(super) async fn run(duration: Duration) -> Result<Vec<Bound>> {
    // The provider runs on the attackers' thread, so that it does not slow down the users by its own CPU time.
    let attacker_runtime = AttackerRuntime::start()?;
    let provider = attacker_runtime.spawn(BenchProvider::start()).await??;
    let corp = provider.oauth2("corp").namespace(NAMESPACE);
    let app = with_raised_limits(App::new("attacked").namespace(NAMESPACE)).provider(&corp);
    let mut trial = ServerAttack::start(Stack::builder().app(&app).provider(&corp), duration).await?;
    trial.measure_baseline().await?;

    provider.turn_hostile();
    let added_providers: Vec<_> =
        (0..ADDED_PROVIDERS).map(|number| provider.oidc(&format!("id-{number}")).namespace(NAMESPACE)).collect();
    let app = added_providers.iter().fold(app, |app, provider| app.provider(provider));
    trial.stack.apply_all(std::slice::from_ref(&app), &added_providers)?;
    let (server, counts, path) = (trial.server(), trial.counts.clone(), format!("/{}/corp/login", app.id()));
    trial
        .run_attack(async move {
            for number in 0..CLIENTS {
                let path = path.clone();
                let request = move || post_request(server, &path, &json!({ "token": "nobody-gave-this" }));
                tokio::spawn(flood(server, address(number), counts.clone(), request));
            }
        })
        .await
}
