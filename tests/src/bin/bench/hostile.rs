//! The service under attack by one attacker at a time, with ordinary users or ordinary Apps.
//!
//! Attacks on the servers: eight users log in continuously to an App that is not attacked, first without and then
//! during the attack. The server has the chart's default memory limit, enforced by the kernel. The attacker runs at
//! full speed on one thread. The priority of this thread is low, because the attacker shares the machine with the
//! server, and must not slow down the users by its own CPU time.
//!
//! Attacks on the operator: a tenant applies objects to a real API server. Two operators must stay Ready, and edits of
//! another tenant's App must take effect.
//!
//! All attacks stay on loopback, are bounded in number and time, and end with this process.

mod attack;
mod attackers;
mod callbacks;
mod connections;
mod hashing_slots;
mod impatient;
mod many_apps;
mod memory_limit;
mod operator_attack;
mod password;
mod provider;
mod provider_responses;
mod retained_keys;
mod streams;
mod templates;
mod users;

use std::{thread, time::Duration};

use anyhow::Result;
use clap::ValueEnum;
use latchkey_tests::process;

use self::memory_limit::MemoryLimit;
use crate::measurements::Bound;

#[derive(Clone, clap::Args)]
#[group(id = "hostile")]
pub(crate) struct HostileArgs {
    /// For `hostile`: run only these attackers (comma-separated).
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Attacker>,
    /// For `hostile`: how long users are measured without an attacker, and again with each attacker of a server, in
    /// seconds. Attackers of the operator ignore this option.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(2..=300))]
    attack_seconds: u64,
}

/// The attackers. The comment of an attacker's file or function states what the attacker does and which bound it
/// attacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Attacker {
    /// Passwords that are expensive to validate.
    Password,
    /// A provider that responds with 1 MiB of nested JSON.
    ProviderAnswers,
    /// Thousands of requests with bodies that do not end.
    SlowBodies,
    /// Thousands of requests with headers that do not end.
    SlowHeads,
    /// HTTP/2 connections with a hundred unfinished requests each.
    Streams,
    /// Thousands of connections without a request.
    Silent,
    /// One client address that opens as many connections as it can.
    OneAddress,
    /// One client address with one request in each of 128 Apps.
    ClientOfManyApps,
    /// A namespace with 130 Apps that raised their limits, and two clients of each App.
    TenantOfManyApps,
    /// One client that keeps a shared provider busy with callbacks.
    Callbacks,
    /// 256 clients that retry immediately after each refusal.
    Impatient,
    /// Mail templates that are deeply nested, very long, or expensive to render.
    Templates,
    /// 700 Apps that reference one large ConfigMap.
    ManyApps,
    /// Apps that are created and deleted, and leave Secrets with their keys behind.
    RetainedKeys,
}

/// Runs the attackers one after the other, prints the measurements, and returns the bounds.
pub(crate) async fn run(options: &HostileArgs) -> Result<Vec<Bound>> {
    let cores = thread::available_parallelism()?;
    println!("Hostile clients, tenants and providers; {cores} cores, shared by all processes");
    println!("memory limit of a server: {}", MemoryLimit::new()?.describe());
    println!(
        "malloc: {}",
        std::env::var("GLIBC_TUNABLES").unwrap_or_else(|_| "no GLIBC_TUNABLES; `make bench` sets them".to_owned())
    );
    for program in ["latchkey-server", "latchkey-operator"] {
        println!("{program}: {}", process::find_built_program(program)?.display());
    }
    println!("attackers of a server: {}\n", attackers::PRIORITY);
    attackers::raise_file_limit()?;

    let mut bounds = Vec::new();
    for attacker in Attacker::value_variants() {
        if options.only.is_empty() || options.only.contains(attacker) {
            bounds.extend(attacker.run(Duration::from_secs(options.attack_seconds)).await);
        }
    }
    Ok(bounds)
}

// === impl Attacker ===

impl Attacker {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Runs one attacker. If the attack cannot be completed, returns a bound that is not met.
    async fn run(self, duration: Duration) -> Vec<Bound> {
        println!("{}", self.name());
        // If a service does not start, the harness panics. The separate task catches the panic.
        let bounds = match tokio::spawn(async move { self.bounds(duration).await }).await {
            Ok(Ok(bounds)) => bounds,
            Ok(Err(error)) => vec![Bound::new(format!("the attack completes: {error:#}"), false)],
            Err(error) => vec![Bound::new(format!("the attack completes: {error}"), false)],
        };
        println!();
        let name = self.name();
        bounds.into_iter().map(|bound| Bound { what: format!("{name}: {}", bound.what), ..bound }).collect()
    }

    async fn bounds(self, duration: Duration) -> Result<Vec<Bound>> {
        match self {
            Self::Password => password::run(duration).await,
            Self::ProviderAnswers => provider_responses::run(duration).await,
            Self::SlowBodies => connections::slow_bodies(duration).await,
            Self::SlowHeads => connections::slow_heads(duration).await,
            Self::Streams => streams::run(duration).await,
            Self::Silent => connections::silent(duration).await,
            Self::OneAddress => connections::one_address(duration).await,
            Self::ClientOfManyApps => hashing_slots::client_in_many_apps(duration).await,
            Self::TenantOfManyApps => hashing_slots::tenant_of_many_apps(duration).await,
            Self::Callbacks => callbacks::run(duration).await,
            Self::Impatient => impatient::run(duration).await,
            Self::Templates => templates::run().await,
            Self::ManyApps => many_apps::run().await,
            Self::RetainedKeys => retained_keys::run().await,
        }
    }
}
