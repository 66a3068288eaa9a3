//! The program `latchkey-server`: it serves the login API, or runs one of the administrative commands.

use std::process::ExitCode;

use clap::Parser;
use latchkey_server::args::Arguments;

mod check;
mod run;
mod telemetry;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Only the server exports spans, not the commands.
    let exports_spans = arguments.command.is_none();
    let telemetry = match telemetry::init(&arguments.log, exports_spans) {
        Ok(telemetry) => telemetry,
        Err(error) => {
            eprintln!("latchkey-server: {:#}", anyhow::Error::from(error));
            return ExitCode::from(2);
        }
    };
    let result = run::run(arguments);
    telemetry.shutdown();
    match result {
        Ok(code) => code,
        Err(error) => {
            // `#` adds the causes of the error. No error text contains a secret.
            tracing::error!(error = format!("{error:#}"), "latchkey-server ends with an error");
            eprintln!("latchkey-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
