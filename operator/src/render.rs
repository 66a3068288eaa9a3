//! `latchkey-operator render`: turns the manifests of a folder into rendered documents, once or whenever a manifest
//! changes.

use std::process::ExitCode;

use time::OffsetDateTime;

use self::renderer::Renderer;
use crate::{args::RenderArgs, panics};

mod clients;
mod files;
mod renderer;
mod watch;

/// Runs the command.
pub(crate) fn run(args: RenderArgs) -> ExitCode {
    panics::install_hook(|location, text| {
        let text = text.unwrap_or("its text is not shown because it may quote a secret");
        eprintln!("latchkey-operator: a panic at {location}: {text}");
    });
    match start(args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("latchkey-operator: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn start(args: RenderArgs) -> anyhow::Result<ExitCode> {
    let renderer = Renderer::new(args)?;
    if renderer.args.watch {
        watch::run(&renderer, now)?;
        return Ok(ExitCode::SUCCESS);
    }
    let summary = renderer.run(now())?;
    summary.print();
    Ok(if summary.rejected.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[expect(clippy::disallowed_methods, reason = "the one place where the command reads the clock")]
fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}
