//! Refreshes of sessions that were opened through the JSON API, in an App with Clients and in an App without.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{CLIENTS_PER_APP, IN_FLIGHT};
use crate::{
    measurements::{Bound, Throughput, format_millis, join_clients},
    refresh::{self, Client},
};

/// Number of rounds. The order of the two Apps alternates from round to round, so that a drift of the machine's speed
/// affects both Apps.
const ROUNDS: u32 = 10;
const ROUND_TIME: Duration = Duration::from_millis(1500);
/// Minimum rate of refreshes in an App with pages and Clients, relative to an App with neither.
const MIN_RATIO: f64 = 0.95;

/// The sessions of an App, one for each of [`IN_FLIGHT`] clients.
struct Sessions<'a> {
    app: &'a str,
    clients: Vec<Client>,
    refreshes: Throughput,
}

pub(super) async fn compare(server: SocketAddr, with_clients: &str, without: &str) -> Result<Bound> {
    let mut with_clients = Sessions::open(server, with_clients, 0).await?;
    let mut without = Sessions::open(server, without, IN_FLIGHT).await?;
    with_clients.refresh().await?;
    without.refresh().await?;
    (with_clients.refreshes, without.refreshes) = (Throughput::new(), Throughput::new());
    for round in 0..ROUNDS {
        if round % 2 == 0 {
            with_clients.refresh().await?;
            without.refresh().await?;
        } else {
            without.refresh().await?;
            with_clients.refresh().await?;
        }
    }
    let both = [(format!("with {CLIENTS_PER_APP} Clients"), &with_clients), ("without Clients".to_owned(), &without)];
    for (what, sessions) in both {
        let refreshes = &sessions.refreshes;
        println!(
            "own refreshes of an App {what}: {:.0} per second, p99 {}",
            refreshes.per_second(),
            format_millis(&refreshes.latency, 0.99)
        );
    }
    println!();
    let ratio = with_clients.refreshes.per_second() / without.refreshes.per_second();
    Ok(Bound::at_least("own refreshes of an App with Clients, relative to an App without", MIN_RATIO, ratio))
}

// === impl Sessions ===

impl<'a> Sessions<'a> {
    /// Opens one session for each of [`IN_FLIGHT`] clients. `first` is the number of the first client.
    async fn open(server: SocketAddr, app: &'a str, first: u32) -> Result<Self> {
        let mut clients = Vec::new();
        for number in first..first + IN_FLIGHT {
            clients.push(refresh::log_in(server, app, number).await?);
        }
        Ok(Self { app, clients, refreshes: Throughput::new() })
    }

    async fn refresh(&mut self) -> Result<()> {
        let began = Instant::now();
        let end = began + ROUND_TIME;
        let app = self.app;
        let running =
            self.clients.drain(..).map(|client| tokio::spawn(refresh::refresh_until(end, client, app.to_owned())));
        let (clients, latencies) = join_clients(running).await?;
        self.clients = clients;
        self.refreshes.add(began, latencies)
    }
}
