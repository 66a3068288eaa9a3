//! The operator of Latchkey: turns App and Provider resources into the documents that the servers read.

use std::process::ExitCode;

use clap::Parser;

mod app;
mod args;
mod facts;
mod manifests;
mod provider;
mod render;

fn main() -> ExitCode {
    match args::Args::parse().command {
        args::Command::Render(args) => render::run(args),
    }
}
