//! The service while somebody works against it: one attacker at a time, beside ordinary users or ordinary Apps.
//!
//! Against the servers: eight users of another App log in without a pause, first alone and then beside the attacker. The
//! server has the memory of the chart's default, enforced by the kernel. The attacker runs at full speed on one thread of
//! low priority: server and attacker share a machine here, and its own cost must not be counted as the server's.
//!
//! Against the operator: a tenant applies objects to a real API server, while two operators must stay Ready and the App
//! of another tenant must follow its edits.
//!
//! Everything stays on loopback, is bounded in number and time, and ends with this process.

mod callbacks;
mod connections;
mod impatient;
mod limit;
mod many_apps;
mod operator_trial;
mod outsiders;
mod password;
mod places;
mod provider;
mod provider_answers;
mod retained_keys;
mod streams;
mod templates;
mod trial;
mod users;

use std::{thread, time::Duration};

use anyhow::Result;
use clap::ValueEnum;
use latchkey_tests::process;

use self::limit::MemoryLimit;
use crate::figures::Bound;

#[derive(Clone, clap::Args)]
#[group(id = "hostile")]
pub(crate) struct Options {
    /// Of `hostile`: these attackers alone, comma-separated.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Attacker>,
    /// Of `hostile`: how long users are measured alone and again beside each attacker, in seconds.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(2..=300))]
    attack_seconds: u64,
}

/// Each has a file or a function of its own, which says what it does and which bound it attacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Attacker {
    /// Passwords that take long to judge.
    Password,
    /// A provider that answers with 1 MiB of nested JSON.
    ProviderAnswers,
    /// Thousands of requests whose bodies do not end.
    SlowBodies,
    /// Thousands of requests whose heads do not end.
    SlowHeads,
    /// HTTP/2 connections with a hundred unfinished requests each.
    Streams,
    /// One client address that holds as many connections as it gets.
    OneAddress,
    /// One client address with one request in each of 128 Apps.
    ClientOfManyApps,
    /// A namespace with 130 Apps of loosened limits, and their crowds.
    TenantOfManyApps,
    /// One client that keeps the exchanges of a shared provider busy.
    Callbacks,
    /// 256 clients who ask again at once after each refusal.
    Impatient,
    /// Mail templates that are deep, long or wide.
    Templates,
    /// 700 Apps that name one large ConfigMap.
    ManyApps,
    /// Apps that are made and deleted, and leave their keys.
    RetainedKeys,
}

/// Runs the attackers one after the other, prints, and gives what was promised.
pub(crate) async fn run(options: &Options) -> Result<Vec<Bound>> {
    let cores = thread::available_parallelism()?;
    println!("Hostile clients, tenants and providers, on {cores} cores shared by all of it");
    println!("memory limit of a server: {}", MemoryLimit::new()?.describe());
    println!(
        "malloc: {}",
        std::env::var("GLIBC_TUNABLES").unwrap_or_else(|_| "no GLIBC_TUNABLES; `make bench` sets them".to_owned())
    );
    for program in ["latchkey-server", "latchkey-operator"] {
        println!("{program}: {}", process::our_program(program)?.display());
    }
    println!("attackers of a server: {}\n", outsiders::PRIORITY);
    outsiders::raise_file_limit()?;

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

    /// A trial that cannot be finished is a bound that is not met: the others go on.
    async fn run(self, lasts: Duration) -> Vec<Bound> {
        println!("{}", self.name());
        // A task of its own, since the harness panics where a service does not come up.
        let bounds = match tokio::spawn(async move { self.bounds(lasts).await }).await {
            Ok(Ok(bounds)) => bounds,
            Ok(Err(error)) => vec![Bound::new(format!("the trial is finished: {error:#}"), false)],
            Err(error) => vec![Bound::new(format!("the trial is finished: {error}"), false)],
        };
        println!();
        let name = self.name();
        bounds.into_iter().map(|bound| Bound { what: format!("{name}: {}", bound.what), ..bound }).collect()
    }

    async fn bounds(self, lasts: Duration) -> Result<Vec<Bound>> {
        match self {
            Self::Password => password::run(lasts).await,
            Self::ProviderAnswers => provider_answers::run(lasts).await,
            Self::SlowBodies => connections::slow_bodies(lasts).await,
            Self::SlowHeads => connections::slow_heads(lasts).await,
            Self::Streams => streams::run(lasts).await,
            Self::OneAddress => connections::one_address(lasts).await,
            Self::ClientOfManyApps => places::client_of_many_apps(lasts).await,
            Self::TenantOfManyApps => places::tenant_of_many_apps(lasts).await,
            Self::Callbacks => callbacks::run(lasts).await,
            Self::Impatient => impatient::run(lasts).await,
            Self::Templates => templates::run().await,
            Self::ManyApps => many_apps::run().await,
            Self::RetainedKeys => retained_keys::run().await,
        }
    }
}
