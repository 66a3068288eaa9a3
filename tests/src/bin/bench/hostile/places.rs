//! Places in the hashing queue, taken over many Apps.
//!
//! The queue is fair to Apps and, inside one, to client addresses. So whoever has many Apps has many places.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use latchkey_tests::{builders::App, stack::Stack};
use serde_json::json;

use super::{
    outsiders::{Tally, address, post, storm},
    trial::{Trial, loose},
};
use crate::figures::Bound;

/// As many as the hashing queue has places on two cores.
const APPS_OF_A_CLIENT: u32 = 128;
const APPS_OF_A_TENANT: u32 = 130;
/// Clients of each App of the tenant.
const CLIENTS: u32 = 2;

/// One client address has one login in flight in each of 128 Apps of as many tenants, within all default limits.
///
/// Attacks the bound on the places of a client address, which must be counted over the whole queue.
pub(super) async fn client_of_many_apps(lasts: Duration) -> Result<Vec<Bound>> {
    let apps: Vec<App> =
        (0..APPS_OF_A_CLIENT).map(|number| App::new("visited").namespace(&format!("tenant-{number}"))).collect();
    attack(lasts, &apps, |_| vec![address(0)]).await
}

/// A tenant has 130 Apps in one namespace with loosened limits, and two clients log in to each without a pause.
///
/// Attacks the rotation of the queue: each namespace must have its turn before an App of it.
pub(super) async fn tenant_of_many_apps(lasts: Duration) -> Result<Vec<Bound>> {
    let apps: Vec<App> = (0..APPS_OF_A_TENANT).map(|_| loose(App::new("owned").namespace("attacker"))).collect();
    attack(lasts, &apps, |number| (0..CLIENTS).map(|client| address(number * CLIENTS + client)).collect()).await
}

/// Logs in to each of the Apps from the addresses that `clients` gives for it.
async fn attack(lasts: Duration, apps: &[App], clients: impl Fn(u32) -> Vec<IpAddr>) -> Result<Vec<Bound>> {
    let builder = apps.iter().fold(Stack::builder(), |builder, app| builder.app(app));
    let mut trial = Trial::start(builder, lasts).await?;
    trial.calm().await?;
    let (server, tally) = (trial.server(), trial.tally.clone());
    let mut storms = Vec::new();
    for (number, app) in (0..).zip(apps) {
        for from in clients(number) {
            storms.push(log_in(server, from, app.id().to_owned(), tally.clone()));
        }
    }
    trial
        .attack(async move {
            for storm in storms {
                tokio::spawn(storm);
            }
        })
        .await
}

async fn log_in(server: SocketAddr, from: IpAddr, app: String, tally: Tally) {
    let path = format!("/v1/{app}/email/login");
    let mut number = 0_u32;
    storm(server, from, tally, move || {
        // Another account each time: no limit of an account is reached.
        number += 1;
        post(server, &path, &json!({ "email": format!("nobody-{number}@example.com"), "password": "wrong by intent" }))
    })
    .await;
}
