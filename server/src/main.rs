//! `latchkey-server`: the login API, and the commands around it.

use std::process::ExitCode;

use clap::Parser;
use latchkey_server::{args::Arguments, telemetry};

mod check;
mod run;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = telemetry::install(&arguments.log) {
        eprintln!("latchkey-server: {error}");
        return ExitCode::from(2);
    }
    match run::run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain says what was tried; it holds no secret, since no error does.
            tracing::error!(error = format!("{error:#}"), "latchkey-server ends");
            eprintln!("latchkey-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
