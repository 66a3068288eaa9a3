//! The harness of tests, benchmarks and `make run`. It starts real processes: a Kubernetes control plane, Postgres,
//! Redis, NGINX, an OpenID provider, a browser, and Latchkey's two programs. Inside the calling process it runs the
//! SMTP server, scripted providers, and proxies that inject network faults.
//!
//! `tests/README.md` explains how to write a test with it.

pub mod browser;
pub mod builders;
pub mod chaos;
#[cfg(test)]
mod citations;
pub mod client;
pub mod cluster;
pub mod control_plane;
pub mod dev;
pub mod dex;
pub mod inbox;
pub mod keycloak;
pub mod mail;
pub mod mock_provider;
pub mod nginx;
pub mod openid;
pub mod otlp;
pub mod page_browser;
pub mod page_tour;
pub mod passwords;
pub mod postgres;
pub mod process;
pub mod provider_down;
pub mod proxy;
pub mod raw_connection;
#[cfg(test)]
mod recipes;
pub mod redis;
pub mod screenshots;
pub mod service_account;
pub mod smtp;
pub mod sqlx_metadata;
pub mod stack;
pub mod tls;
pub mod tools;
pub mod tunnel;
pub mod web_browser;
pub mod webhook_receiver;
pub mod webhook_recording;

use std::{
    fmt::Debug,
    future::Future,
    time::{Duration, Instant},
};

/// Polling interval of [`eventually`] and [`eventually_ok`].
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Calls `poll` until it returns a value. Panics with `what` after the limit.
pub async fn eventually<T, F, Fut>(what: &str, limit: Duration, mut poll: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let end = Instant::now() + limit;
    loop {
        if let Some(seen) = poll().await {
            return seen;
        }
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Calls `attempt` until it succeeds. After the limit, panics with `what` and the last error.
pub async fn eventually_ok<T, E: Debug, F, Fut>(what: &str, limit: Duration, mut attempt: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, E>>,
{
    let end = Instant::now() + limit;
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(Instant::now() < end, "{what}: not within {limit:?}: {error:?}"),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
