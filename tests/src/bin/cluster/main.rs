//! `make cluster-test`: the chart in a real cluster, with real pods. The same program, in pods of its own, is the users:
//! they come by the Service's name, as an application does.

mod inbox;
mod install;
mod journey;
mod load;
mod steps;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything, against the cluster of KUBECONFIG.
    Run(steps::Options),
    /// In a pod: constant load, without a retry. Tells what failed at `:8000/counts`.
    Load(load::Options),
    /// In a pod: one user's way from registration to a changed password.
    Journey(journey::Options),
    /// In a pod: an SMTP server at :2525 with its inbox at :8025.
    Inbox,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    match runtime.block_on(run(args.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cluster-test: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(options) => steps::run(&options).await,
        Command::Load(options) => load::run(options).await,
        Command::Journey(options) => journey::run(&options).await,
        Command::Inbox => inbox::run().await,
    }
}
