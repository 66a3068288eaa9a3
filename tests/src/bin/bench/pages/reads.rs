//! Reads of the login page, compared with reads of the JWKS document.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use http::StatusCode;

use crate::{
    http_client::{exchange, get, read_until},
    logins::{client_address, connect},
    measurements::{Bound, Throughput, format_millis, join_clients},
};

/// Numbers of concurrent requests.
const IN_FLIGHT: [u32; 3] = [1, 8, 64];
/// Number of rounds for each number of requests in flight.
const ROUNDS: u32 = 4;
const ROUND_TIME: Duration = Duration::from_secs(2);
/// Minimum rate of reads of the login page, relative to reads of the JWKS document.
const MIN_RATIO: f64 = 0.5;

pub(super) async fn compare(server: SocketAddr, app: &str) -> Result<Bound> {
    let (page_path, jwks_path) = (format!("/{app}/login"), format!("/{app}/.well-known/jwks.json"));
    // Opens the page once, because the measured browser has the cookies of an earlier visit.
    let mut connection = connect(server, client_address(0)).await?;
    let first = exchange(&mut connection, get(server, &page_path, "")?).await?;
    ensure!(first.status == StatusCode::OK, "the login page returned {}", first.status);
    let cookies = first.cookies();

    println!("in flight   login page reads/s   JWKS reads/s   ratio   p99 of the page   p99 of JWKS");
    let mut min_ratio = f64::INFINITY;
    for in_flight in IN_FLIGHT {
        let (mut pages, mut jwks) = (Throughput::new(), Throughput::new());
        for _ in 0..ROUNDS {
            read(server, in_flight, &page_path, &cookies, &mut pages).await?;
            read(server, in_flight, &jwks_path, "", &mut jwks).await?;
        }
        let ratio = pages.per_second() / jwks.per_second();
        min_ratio = min_ratio.min(ratio);
        println!(
            "{in_flight:>9}   {:>18.0}   {:>12.0}   {ratio:>5.2}   {:>15}   {:>11}",
            pages.per_second(),
            jwks.per_second(),
            format_millis(&pages.latency, 0.99),
            format_millis(&jwks.latency, 0.99),
        );
    }
    println!();
    Ok(Bound::at_least("reads of the login page, relative to reads of the JWKS", MIN_RATIO, min_ratio))
}

/// Lets clients read a path for one round, and adds the measurements.
async fn read(
    server: SocketAddr,
    in_flight: u32,
    path: &str,
    cookies: &str,
    measurements: &mut Throughput,
) -> Result<()> {
    let began = Instant::now();
    let end = began + ROUND_TIME;
    let running = (0..in_flight).map(|number| {
        tokio::spawn(read_until(end, server, client_address(number), path.to_owned(), cookies.to_owned()))
    });
    let (_, latencies) = join_clients(running).await?;
    measurements.add(began, latencies)
}
