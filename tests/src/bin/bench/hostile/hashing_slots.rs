//! Attackers that use many slots of the hashing queue by using many Apps.
//!
//! If the queue were fair only between Apps, and within an App between client addresses, a client or a tenant could get
//! many slots by using many Apps.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;

use super::{
    attack::{ServerAttack, with_raised_limits},
    attackers::{ResponseCounts, address, flood, post_request},
};
use crate::measurements::Bound;

/// As many Apps as the hashing queue has slots on two cores.
const APPS_OF_A_CLIENT: u32 = 128;
/// Slightly more Apps than the hashing queue has slots on two cores.
const APPS_OF_A_TENANT: u32 = 130;
/// Number of clients for each App of the tenant.
const CLIENTS: u32 = 2;

/// One client address has one login in flight in each of 128 Apps. Each App belongs to another tenant, and has the
/// default limits.
///
/// Attacks the bound on the slots of a client address, which must apply to the whole queue and not to each App.
pub(super) async fn client_in_many_apps(duration: Duration) -> Result<Vec<Bound>> {
    let apps: Vec<App> =
        (0..APPS_OF_A_CLIENT).map(|number| App::new("visited").namespace(&format!("tenant-{number}"))).collect();
    log_in_to_all(duration, &apps, |_| vec![address(0)]).await
}

/// A tenant has 130 Apps with raised limits in one namespace, and two clients log in to each App continuously.
///
/// Attacks the fairness of the queue: it must be fair between namespaces first, and only then between Apps.
pub(super) async fn tenant_of_many_apps(duration: Duration) -> Result<Vec<Bound>> {
    let apps: Vec<App> =
        (0..APPS_OF_A_TENANT).map(|_| with_raised_limits(App::new("owned").namespace("attacker"))).collect();
    log_in_to_all(duration, &apps, |number| (0..CLIENTS).map(|client| address(number * CLIENTS + client)).collect())
        .await
}

/// Logs in to each App continuously, from the client addresses that `clients` returns for the App's index.
async fn log_in_to_all(duration: Duration, apps: &[App], clients: impl Fn(u32) -> Vec<IpAddr>) -> Result<Vec<Bound>> {
    let builder = apps.iter().fold(Stack::builder(), |builder, app| builder.app(app));
    let mut trial = ServerAttack::start(builder, duration).await?;
    trial.measure_baseline().await?;
    let (server, counts) = (trial.server(), trial.counts.clone());
    let mut storms = Vec::new();
    for (number, app) in (0..).zip(apps) {
        for from in clients(number) {
            storms.push(flood_logins(server, from, app.id().to_owned(), counts.clone()));
        }
    }
    trial
        .run_attack(async move {
            for storm in storms {
                tokio::spawn(storm);
            }
        })
        .await
}

async fn flood_logins(server: SocketAddr, from: IpAddr, app: String, counts: ResponseCounts) {
    let path = format!("/v1/{app}/email/login");
    let mut number = 0_u32;
    flood(server, from, counts, move || {
        // A different account each time, so that no limit per account is reached.
        number += 1;
        post_request(
            server,
            &path,
            &json!({ "email": format!("nobody-{number}@example.com"), "password": "wrong by intent" }),
        )
    })
    .await;
}
