//! The operator of Latchkey: turns App, Provider and Client resources into the documents that the servers read.

use std::process::ExitCode;

use clap::{CommandFactory, Parser, error::ErrorKind};

mod admin;
mod app;
mod args;
mod backoff;
mod client;
mod context;
mod controller;
mod error;
mod facts;
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod leader;
mod manifests;
mod metrics;
mod monitor;
mod orphans;
mod panics;
mod provider;
mod quota;
mod rate_limiter;
mod release;
mod render;
mod report_throttle;
mod run;
mod run_cache;
mod schedule;
mod spans;
mod status;
mod telemetry;
mod undecodable;
mod watch;
mod written_statuses;

/// Runs the program with the arguments of this process.
pub fn run() -> ExitCode {
    let args = args::Args::parse();
    match (args.command, args.run) {
        (Some(args::Command::Render(args)), _) => render::run(args),
        (None, Some(run_args)) => run::run(run_args, &args.log),
        (None, None) => {
            let message = "set the flags for reconciling a cluster, or give a command; see --help";
            args::Args::command().error(ErrorKind::MissingRequiredArgument, message).exit()
        }
    }
}
