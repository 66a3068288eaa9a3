//! Logs: structured, one JSON object a line on standard error. What must not be logged has types that do not print.

use std::panic::PanicHookInfo;

use tracing_subscriber::EnvFilter;

use crate::args::{Log, LogFormat};

/// The filter does not parse.
#[derive(Debug, thiserror::Error)]
#[error("--log is not a filter such as info or latchkey_server=debug,info")]
pub struct BadFilter(#[from] tracing_subscriber::filter::ParseError);

pub fn install(log: &Log) -> Result<(), BadFilter> {
    // The client of the API server logs an answer that does not parse, whole; it holds rendered Apps.
    let filter = EnvFilter::try_new(format!("{},kube_client=error", log.log))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log.log_format {
        LogFormat::Json => subscriber.json().flatten_event(true).with_current_span(true).with_span_list(false).init(),
        LogFormat::Text => subscriber.with_target(false).init(),
    }
    std::panic::set_hook(Box::new(tell_panic));
    Ok(())
}

/// A panic is a line like any other. A text that was put together at run time could hold what must not be logged, so
/// only one that stands in the code is told.
fn tell_panic(panic: &PanicHookInfo<'_>) {
    let text = panic.payload().downcast_ref::<&'static str>();
    tracing::error!(location = panic.location().map(tracing::field::display), text, "a panic");
}
