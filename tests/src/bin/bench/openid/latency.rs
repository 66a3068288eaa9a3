//! The latency of `authorize` compared with a read of the JWKS document, at the same low rate.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use http::StatusCode;

use super::peers::Contestant;
use crate::{
    http_client::{exchange, get},
    logins::{client_address, connect},
    measurements::{Bound, format_millis, histogram, micros_of, p99_ratio},
};

/// Interval between two requests. Authorization requests and reads alternate.
const TICK: Duration = Duration::from_millis(10);
/// Long, because a p99 of few requests depends on chance.
const DURATION: Duration = Duration::from_secs(60);
/// Maximum p99 of `authorize`, relative to the p99 of a read of the JWKS document.
const MAX_RATIO: f64 = 3.0;

/// Compares authorization requests of the contestant's only user with reads of the App's JWKS document.
pub(super) async fn compare(contestant: Contestant, app: &str) -> Result<Bound> {
    let mut user = contestant.into_user().context("there is a user")?;
    let server = user.server();
    let mut connection = connect(server, client_address(1)).await?;
    let path = format!("/{app}/.well-known/jwks.json");
    let (mut authorize, mut jwks) = (histogram(), histogram());
    let mut ticks = tokio::time::interval(TICK);
    let end = Instant::now() + DURATION;
    while Instant::now() < end {
        ticks.tick().await;
        let started = Instant::now();
        user.authorize("openid").await?;
        authorize.record(micros_of(started.elapsed()))?;

        ticks.tick().await;
        let request = get(server, &path, "")?;
        let started = Instant::now();
        let response = exchange(&mut connection, request).await?;
        jwks.record(micros_of(started.elapsed()))?;
        ensure!(response.status == StatusCode::OK, "JWKS returned {}", response.status);
    }
    for (what, latency) in [("authorize", &authorize), ("JWKS", &jwks)] {
        let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|quantile| latency.value_at_quantile(quantile));
        println!("{what} at 50 per second: p50 {p50} µs, p90 {p90} µs, p99 {p99} µs ({} times)", latency.len());
    }
    println!();
    let what = format!(
        "p99 of authorize ({}), relative to that of a JWKS read ({}) at the same low rate",
        format_millis(&authorize, 0.99),
        format_millis(&jwks, 0.99)
    );
    Ok(Bound::at_most(&what, MAX_RATIO, p99_ratio(&jwks, &authorize)))
}
