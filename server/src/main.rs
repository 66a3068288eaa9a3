//! `latchkey-server`: the login API, and the commands around it.

use std::process::ExitCode;

use clap::Parser;
use latchkey_server::{args::Arguments, telemetry};
use latchkey_trace::Export;

mod check;
mod run;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Only who serves has spans.
    let export = match arguments.command {
        None => Export::from_env("latchkey-server", env!("CARGO_PKG_VERSION")),
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
        export.finish();
    }
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain says what was tried; it holds no secret, since no error does.
            tracing::error!(error = format!("{error:#}"), "latchkey-server ends");
            eprintln!("latchkey-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
