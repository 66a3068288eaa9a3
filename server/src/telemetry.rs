//! Logs, one JSON object per line on standard error, and export of spans. Secrets have types that cannot be printed.

use std::panic::PanicHookInfo;

use latchkey_telemetry::{TARGET, TraceExporter};
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, registry::LookupSpan, util::SubscriberInitExt};

use crate::args::{LogArgs, LogFormat};

/// The log filter does not parse.
#[derive(Debug, thiserror::Error)]
#[error("--log is not a filter such as info or latchkey_server=debug,info")]
pub struct InvalidFilter(#[from] tracing_subscriber::filter::ParseError);

pub fn install(log: &LogArgs, export: Option<&TraceExporter>) -> Result<(), InvalidFilter> {
    // kube_client logs the whole body of a response that does not parse; it can hold rendered Apps.
    let filter = EnvFilter::try_new(format!("{},kube_client=error,{TARGET}=off", log.log))?;
    let lines = log_layer(log.log_format);
    match export {
        // The filter applies to spans too: without an exporter they cost nothing.
        None => tracing_subscriber::registry().with(lines).with(filter).init(),
        Some(export) => {
            tracing_subscriber::registry().with(lines.with_filter(filter)).with(export.layer()).init();
        }
    }
    std::panic::set_hook(Box::new(log_panic));
    Ok(())
}

fn log_layer<S: Subscriber + for<'a> LookupSpan<'a>>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync> {
    let lines = fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
        LogFormat::Text => lines.with_target(false).boxed(),
    }
}

/// Logs a panic as an event. Only a message that is a literal in the code is logged: one that was formatted at run time
/// could hold a secret.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let text = panic.payload().downcast_ref::<&'static str>();
    tracing::error!(location = panic.location().map(tracing::field::display), text, "a panic");
}
