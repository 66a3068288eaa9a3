//! `make bench`: what the service promises in figures, measured in one run.
//!
//! Times are noisy, so what can be is reported as ratios; each bound of the service is printed with what was measured, and
//! a bound that is not met ends the program with 1.

mod chaos;
mod figures;
mod fleet;
mod hostile;
mod logins;
mod provider_down;
mod refresh;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, ValueEnum};

use crate::figures::Bound;

/// Measures what the service promises in figures.
#[derive(Parser)]
struct Args {
    /// What to measure; without it everything.
    parts: Vec<Part>,
    #[command(flatten)]
    chaos: chaos::Options,
    #[command(flatten)]
    fleet: fleet::Options,
    #[command(flatten)]
    hostile: hostile::Options,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Password log-ins against the bare argon2 rate.
    Logins,
    /// Sessions while servers restart and the Redis primary is killed.
    Chaos,
    /// Refreshes against plain reads of a document.
    Refresh,
    /// Log-ins, refreshes and other providers while a provider is down.
    ProviderDown,
    /// The operator and the servers in a cluster, with few Apps and with many.
    Operator,
    /// Ordinary users and Apps beside one attacker at a time.
    Hostile,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    match runtime.block_on(bench(&args)) {
        Ok(bounds) => {
            println!();
            for bound in &bounds {
                println!("{}   {}", if bound.met { "met    " } else { "NOT MET" }, bound.what);
            }
            if bounds.iter().all(|bound| bound.met) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn bench(args: &Args) -> Result<Vec<Bound>> {
    let is_wanted = |part| args.parts.is_empty() || args.parts.contains(&part);
    let mut bounds = Vec::new();
    if is_wanted(Part::Logins) {
        bounds.extend(logins::run().await?);
    }
    if is_wanted(Part::Refresh) {
        bounds.extend(refresh::run().await?);
    }
    if is_wanted(Part::ProviderDown) {
        bounds.extend(provider_down::run().await?);
    }
    if is_wanted(Part::Chaos) {
        bounds.extend(chaos::run(&args.chaos).await?);
    }
    if is_wanted(Part::Operator) {
        bounds.extend(fleet::run(&args.fleet).await?);
    }
    if is_wanted(Part::Hostile) {
        bounds.extend(hostile::run(&args.hostile).await?);
    }
    Ok(bounds)
}
