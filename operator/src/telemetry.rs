//! Structured logs, one JSON object per line on standard error, and spans if they are exported.

use latchkey_telemetry::{TARGET, TraceExporter};
use tracing::{Subscriber, error};
use tracing_subscriber::{EnvFilter, Layer, fmt, layer::SubscriberExt, registry::LookupSpan, util::SubscriberInitExt};

use crate::{args::LogFormat, panics};

/// The filter does not parse.
#[derive(Debug, thiserror::Error)]
#[error("--log is not a filter such as info or latchkey_operator=debug,info")]
pub(crate) struct BadFilter(#[from] tracing_subscriber::filter::ParseError);

pub(crate) fn start(log: &str, format: LogFormat, export: Option<&TraceExporter>) -> Result<(), BadFilter> {
    // kube's client logs the whole response if it does not parse, and it may be a Secret. Its runtime logs what we log
    // ourselves.
    let filter = EnvFilter::try_new(format!("{log},kube_client=error,kube_runtime=error,{TARGET}=off"))?;
    let lines = lines(format);
    match export {
        None => tracing_subscriber::registry().with(lines).with(filter).init(),
        Some(export) => {
            tracing_subscriber::registry().with(lines.with_filter(filter)).with(export.layer()).init();
        }
    }
    // A log line like any other.
    panics::install_hook(|location, text| error!(%location, text, "a panic"));
    Ok(())
}

fn lines<S: Subscriber + for<'a> LookupSpan<'a>>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync> {
    let lines = fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed(),
        LogFormat::Text => lines.with_target(false).boxed(),
    }
}
