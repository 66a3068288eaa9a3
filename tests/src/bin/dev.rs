//! `latchkey-dev`: the program behind `make run`, `make generate` and `make screenshots`, and a part of
//! `make interop`.

use std::process::ExitCode;

use latchkey_tests::{dev, openid, screenshots, sqlx_metadata, webhook_recording};

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the runtime does not start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let task = std::env::args().nth(1).unwrap_or_else(|| "run".to_owned());
    let result = match task.as_str() {
        "run" => runtime.block_on(dev::run()),
        "openid" => {
            let names: Vec<String> = std::env::args().skip(2).collect();
            runtime.block_on(openid::run_programs(&names))
        }
        "sqlx" => runtime.block_on(sqlx_metadata::write_query_metadata()),
        "screenshots" => runtime.block_on(screenshots::write()),
        "webhook-recording" => runtime.block_on(webhook_recording::print()),
        other => Err(anyhow::anyhow!(
            "latchkey-dev has no task {other}; use `run`, `openid`, `sqlx`, `screenshots` or `webhook-recording`"
        )),
    };
    // Does not wait for tasks that still wait for a child process: the children die with this process.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}
