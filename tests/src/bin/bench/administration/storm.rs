//! Logins to one App during a storm of logins to another App, which has expensive bcrypt hashes.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use http::StatusCode;
use latchkey_tests::passwords::WRONG_PASSWORD;
use tokio::{task::JoinSet, time::sleep};

use super::{
    Service,
    administrator::{Batch, bcrypt_hash},
    load::login_rate,
};
use crate::{
    logins::{self, client_address, connect, log_in_request_of},
    measurements::Bound,
};

/// The cost of the bcrypt hashes. The check of one such hash takes as long as 16 of the server's own hashes (Argon2).
const BCRYPT_COST: u32 = 12;
/// Number of clients of the storm, each with its own client address and user.
pub(super) const STORM_CLIENTS: u32 = 64;
/// Number of clients that log in to the other App.
pub(super) const ORDINARY_CLIENTS: u32 = 8;
/// A client of the storm waits at most this long after a refusal, so that the queue is always full.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Pause before a new connection.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);
/// Number of rounds. Each round measures logins first without and then during the storm.
const ROUNDS: u32 = 4;
/// Duration of the logins in one round, without the storm and again during the storm.
const ROUND_TIME: Duration = Duration::from_secs(5);
/// Time until the storm has filled the queue.
const FILL_TIME: Duration = Duration::from_secs(2);
/// Time until the hashing queue has no jobs from the storm: a job must start within 2 s, and then takes less than a
/// second.
const DRAIN_TIME: Duration = Duration::from_secs(3);
/// Minimum rate of logins during the storm, relative to the rate without it.
const MIN_RATE: f64 = 0.4;

/// The responses to the storm.
#[derive(Default)]
struct StormCounts {
    /// Number of 401 responses: the server checked the password hash.
    checked: AtomicU32,
    /// Number of 503 responses: the server refused the login without a check.
    refused: AtomicU32,
    other: AtomicU32,
}

/// Compares the rate of logins during the storm with the rate without it. Both Apps are in one namespace.
///
/// The storm sends wrong passwords: each such login costs one Argon2 hash and one bcrypt hash. A login with the right
/// password of an imported user costs the same, but only once, because it replaces the bcrypt hash.
pub(super) async fn run(service: &Service) -> Result<Bound> {
    let users = Batch::new(usize::try_from(STORM_CLIENTS)?, || bcrypt_hash(BCRYPT_COST));
    service.administrator().await?.import(service.apps.storm.id(), users.lines(), users.len()).await?;
    let (server, ordinary) = (service.public(), service.apps.ordinary.id());
    let counts = Arc::new(StormCounts::default());
    let (mut calm, mut loaded, mut storming) = (0.0, 0.0, Duration::ZERO);
    for _ in 0..ROUNDS {
        calm += login_rate(server, ordinary, ORDINARY_CLIENTS, ROUND_TIME).await? / f64::from(ROUNDS);
        let started = Instant::now();
        let mut storm = JoinSet::new();
        for (number, email) in (ORDINARY_CLIENTS..).zip(&users.emails) {
            let (app, counts) = (service.apps.storm.id().to_owned(), Arc::clone(&counts));
            storm.spawn(log_in_forever(server, client_address(number), app, email.clone(), counts));
        }
        sleep(FILL_TIME).await;
        loaded += login_rate(server, ordinary, ORDINARY_CLIENTS, ROUND_TIME).await? / f64::from(ROUNDS);
        storm.shutdown().await;
        storming += started.elapsed();
        sleep(DRAIN_TIME).await;
    }
    let [checked, refused, other] =
        [&counts.checked, &counts.refused, &counts.other].map(|count| count.load(Ordering::Relaxed));
    ensure!(checked > 0 && other == 0, "the storm got {checked} × 401, {refused} × 503 and {other} other responses");
    let per_second = |count: u32| f64::from(count) / storming.as_secs_f64();
    let ratio = loaded / calm;
    println!("logins per second during a storm of {STORM_CLIENTS} clients in an App with bcrypt of cost {BCRYPT_COST}");
    println!("  the storm                     {:.1} checked, {:.1} refused", per_second(checked), per_second(refused));
    println!("  another App                   {loaded:.1}, without the storm {calm:.1}\n");
    Ok(Bound::new(
        format!(
            "during a storm of bcrypt logins, another App has at least {:.0} % of its logins: {:.0} %",
            100.0 * MIN_RATE,
            100.0 * ratio
        ),
        ratio >= MIN_RATE,
    ))
}

async fn log_in_forever(
    server: SocketAddr,
    from: IpAddr,
    app: String,
    email: String,
    counts: Arc<StormCounts>,
) -> Infallible {
    loop {
        let Ok(mut connection) = connect(server, from).await else {
            sleep(RECONNECT_PAUSE).await;
            continue;
        };
        loop {
            let request = log_in_request_of(server, &app, &email, WRONG_PASSWORD);
            let Ok(response) = logins::send(&mut connection, request).await else { break };
            match response.status {
                StatusCode::UNAUTHORIZED => counts.checked.fetch_add(1, Ordering::Relaxed),
                StatusCode::SERVICE_UNAVAILABLE => counts.refused.fetch_add(1, Ordering::Relaxed),
                _ => counts.other.fetch_add(1, Ordering::Relaxed),
            };
            if response.status != StatusCode::UNAUTHORIZED {
                sleep(response.retry_after.unwrap_or(MAX_RETRY_AFTER).min(MAX_RETRY_AFTER)).await;
            }
        }
        sleep(RECONNECT_PAUSE).await;
    }
}
