//! `latchkey-server`: the login API and its commands.

use std::process::ExitCode;

use clap::Parser;
use latchkey_server::{args::Arguments, telemetry};
use latchkey_telemetry::TraceExporter;

mod check;
mod run;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Only the server exports spans, not the commands.
    let export = match arguments.command {
        None => TraceExporter::from_env("latchkey-server", env!("CARGO_PKG_VERSION")),
        Some(_) => Ok(None),
    };
    let export = match export {
        Ok(export) => export,
        Err(error) => {
            eprintln!("latchkey-server: {:#}", anyhow::Error::from(error));
            return ExitCode::from(2);
        }
    };
    if let Err(error) = telemetry::install(&arguments.log, export.as_ref()) {
        eprintln!("latchkey-server: {error}");
        return ExitCode::from(2);
    }
    let ended = run::run(arguments);
    if let Some(export) = export {
        export.shutdown();
    }
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain of errors names what failed. No error text holds a secret.
            tracing::error!(error = format!("{error:#}"), "latchkey-server ends with an error");
            eprintln!("latchkey-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
