//! `latchkey-dev`, behind `make run` and `make generate`.

use std::process::ExitCode;

use latchkey_tests::{dev, prepare};

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
        "sqlx" => runtime.block_on(prepare::write_query_metadata()),
        other => Err(anyhow::anyhow!("{other} is no task of latchkey-dev: `run`, or `sqlx`")),
    };
    // What still waits for a child is not waited for: the children die with us.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}
