//! Logins as load: as many as possible, or at a fixed rate.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::Result;
use futures::future::try_join_all;
use hdrhistogram::Histogram;
use http::StatusCode;

use crate::{
    logins::{self, RetryBehavior, client_address, connect, log_in_request, log_in_until},
    measurements::{histogram, micros_of},
};

/// Number of clients that log in at a fixed rate.
pub(super) const SCHEDULED_CLIENTS: u32 = 8;
/// The latency that is recorded for a login that failed. It is longer than that of any successful login.
const FAILED: Duration = Duration::from_secs(60);

/// Successful logins per second of clients that send each request after the response to the previous one.
pub(super) async fn login_rate(server: SocketAddr, app: &str, clients: u32, duration: Duration) -> Result<f64> {
    let end = Instant::now() + duration;
    let running = (0..clients).map(|number| {
        let (from, app) = (client_address(number), app.to_owned());
        tokio::spawn(log_in_until(end, server, from, app, RetryBehavior::Patient))
    });
    let mut logins = 0_u32;
    for client in try_join_all(running).await? {
        logins += client?.logins_in_time;
    }
    Ok(f64::from(logins) / duration.as_secs_f64())
}

/// The latencies of logins at `rate` per second, by [`SCHEDULED_CLIENTS`] clients together. `first_client` is the
/// number of the first client address. A login that fails counts as one that takes a minute.
pub(super) async fn scheduled_logins(
    server: SocketAddr,
    app: &str,
    first_client: u32,
    rate: u32,
    duration: Duration,
) -> Result<Histogram<u64>> {
    let started = Instant::now();
    let period = Duration::from_secs(1) * SCHEDULED_CLIENTS / rate;
    let running = (0..SCHEDULED_CLIENTS).map(|number| {
        let schedule =
            Schedule { next: started + period * number / SCHEDULED_CLIENTS, period, end: started + duration };
        tokio::spawn(schedule.log_in(server, client_address(first_client + number), app.to_owned()))
    });
    let mut latency = histogram();
    for client in try_join_all(running).await? {
        latency.add(&client?)?;
    }
    Ok(latency)
}

/// When a client logs in.
struct Schedule {
    next: Instant,
    period: Duration,
    end: Instant,
}

// === impl Schedule ===

impl Schedule {
    async fn log_in(mut self, server: SocketAddr, from: IpAddr, app: String) -> Result<Histogram<u64>> {
        let mut latency = histogram();
        let mut connection = connect(server, from).await?;
        while self.next < self.end {
            // If a login is late because it waited for the previous login, its latency is measured from its scheduled
            // time. Otherwise the latency is measured from the end of the timer, because the timer is exact only to a
            // millisecond.
            let is_late = Instant::now() > self.next;
            if !is_late {
                tokio::time::sleep_until(self.next.into()).await;
            }
            let began = if is_late { self.next } else { Instant::now() };
            let response = logins::send(&mut connection, log_in_request(server, &app)).await?;
            let took = if response.status == StatusCode::OK { began.elapsed() } else { FAILED };
            latency.record(micros_of(took))?;
            self.next += self.period;
        }
        Ok(latency)
    }
}
