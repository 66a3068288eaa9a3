//! `make bench`: measures whether the service meets the bounds that it promises.
//!
//! Times vary between machines and runs, so most measurements are ratios of two times of the same run. Each bound is
//! printed with its measurement. If a bound is not met, the exit code is 1.

mod administration;
mod chaos;
mod hashing;
mod hostile;
mod http_client;
mod logins;
mod measurements;
mod openid;
mod operator;
mod pages;
mod provider_down;
mod refresh;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, ValueEnum};

use crate::measurements::Bound;

/// Measures the bounds that the service promises.
#[derive(Parser)]
struct Args {
    /// What to measure. Default: everything.
    parts: Vec<Benchmark>,
    #[command(flatten)]
    chaos: chaos::ChaosArgs,
    #[command(flatten)]
    refresh: refresh::RefreshArgs,
    #[command(flatten)]
    operator: operator::OperatorArgs,
    #[command(flatten)]
    hostile: hostile::HostileArgs,
    #[command(flatten)]
    openid: openid::OpenIdArgs,
    #[command(flatten)]
    pages: pages::PagesArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Benchmark {
    /// The argon2 kernels, compared with the crate argon2.
    Hashing,
    /// Password logins, compared with the rate of password hashing alone.
    Logins,
    /// Sessions while servers restart and the Redis primary is killed.
    Chaos,
    /// Refreshes, compared with the sum of their parts.
    Refresh,
    /// Logins, refreshes and other providers while a provider is down.
    ProviderDown,
    /// The operator and the servers in a cluster, with few Apps and with many.
    Operator,
    /// Ordinary users and Apps during one attack at a time.
    Hostile,
    /// Imports, user filters, foreign hashes and webhooks: their speed, and how much they slow down other requests.
    Administration,
    /// Logins through hosted pages and reads of pages, compared with the JSON API; the size of a page, and the memory
    /// of pages.
    Pages,
    /// Code exchanges and refreshes of OpenID Connect clients, compared with Dex and Keycloak; the memory of Clients.
    #[value(name = "openid")]
    OpenId,
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
    if is_wanted(Benchmark::Hashing) {
        bounds.extend(tokio::task::spawn_blocking(hashing::run).await??);
    }
    if is_wanted(Benchmark::Logins) {
        bounds.extend(logins::run().await?);
    }
    if is_wanted(Benchmark::Refresh) {
        bounds.extend(refresh::run(&args.refresh).await?);
    }
    if is_wanted(Benchmark::ProviderDown) {
        bounds.extend(provider_down::run().await?);
    }
    if is_wanted(Benchmark::Chaos) {
        bounds.extend(chaos::run(&args.chaos).await?);
    }
    if is_wanted(Benchmark::Operator) {
        bounds.extend(operator::run(&args.operator).await?);
    }
    if is_wanted(Benchmark::Hostile) {
        bounds.extend(hostile::run(&args.hostile).await?);
    }
    if is_wanted(Benchmark::Administration) {
        bounds.extend(administration::run().await?);
    }
    if is_wanted(Benchmark::Pages) {
        bounds.extend(pages::run(&args.pages).await?);
    }
    if is_wanted(Benchmark::OpenId) {
        bounds.extend(openid::run(&args.openid).await?);
    }
    Ok(bounds)
}
