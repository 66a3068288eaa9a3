//! The real processes that tests, benchmarks and `make run` stand on: a Kubernetes control plane, Postgres, Redis, SMTP,
//! an OpenID provider, a browser, the two programs, and a network that fails on request.

pub mod browser;
pub mod builders;
pub mod chaos;
pub mod client;
pub mod cluster;
pub mod control_plane;
pub mod dev;
pub mod dex;
pub mod inbox;
pub mod mail;
pub mod nginx;
pub mod otlp;
pub mod postgres;
pub mod prepare;
pub mod process;
pub mod provider_down;
pub mod proxy;
pub mod redis;
pub mod service_account;
pub mod smtp;
pub mod stack;
pub mod tls;
pub mod tools;
pub mod tunnel;
pub mod upstream;
pub mod wire;

use std::{
    fmt::Debug,
    future::Future,
    time::{Duration, Instant},
};

/// How often [`eventually`] looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks until there is something to see, or panics with `what` when the limit is over.
pub async fn eventually<T, F, Fut>(what: &str, limit: Duration, mut look: F) -> T
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    let end = Instant::now() + limit;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Like [`eventually`], for what is tried and may fail; the last error is part of the panic.
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
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
