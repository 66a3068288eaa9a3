//! Logs: structured, one JSON object a line on standard error. What must not be logged has types that do not print.
//! Beside them spans, where they are exported.

use std::panic::PanicHookInfo;

use latchkey_trace::{Export, TARGET};
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, registry::LookupSpan, util::SubscriberInitExt};

use crate::args::{Log, LogFormat};

/// The filter does not parse.
#[derive(Debug, thiserror::Error)]
#[error("--log is not a filter such as info or latchkey_server=debug,info")]
pub struct BadFilter(#[from] tracing_subscriber::filter::ParseError);

pub fn install(log: &Log, export: Option<&Export>) -> Result<(), BadFilter> {
    // The client of the API server logs an answer that does not parse, whole; it holds rendered Apps.
    let filter = EnvFilter::try_new(format!("{},kube_client=error,{TARGET}=off", log.log))?;
    let lines = lines(log.log_format);
    match export {
        // Here a span that would be exported is known to be of no use, and costs nothing.
        None => tracing_subscriber::registry().with(lines).with(filter).init(),
        Some(export) => {
            tracing_subscriber::registry().with(lines.with_filter(filter)).with(export.layer()).init();
        }
    }
    std::panic::set_hook(Box::new(tell_panic));
    Ok(())
}

fn lines<S: Subscriber + for<'a> LookupSpan<'a>>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync> {
    let lines = fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).boxed(),
        LogFormat::Text => lines.with_target(false).boxed(),
    }
}

/// A panic is a line like any other. A text that was put together at run time could hold what must not be logged, so
/// only one that stands in the code is told.
fn tell_panic(panic: &PanicHookInfo<'_>) {
    let text = panic.payload().downcast_ref::<&'static str>();
    tracing::error!(location = panic.location().map(tracing::field::display), text, "a panic");
}
