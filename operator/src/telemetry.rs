//! Logs: structured, one JSON object a line on standard error.

use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// The filter does not parse.
#[derive(Debug, thiserror::Error)]
#[error("--log is not a filter such as info or latchkey_operator=debug,info")]
pub(crate) struct BadFilter(#[from] tracing_subscriber::filter::ParseError);

pub(crate) fn start(log: &str, format: LogFormat) -> Result<(), BadFilter> {
    // kube's client logs an answer that does not parse, whole; it may be a Secret. Its runtime logs what we log.
    let filter = EnvFilter::try_new(format!("{log},kube_client=error,kube_runtime=error"))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Json => subscriber.json().flatten_event(true).with_current_span(false).with_span_list(false).init(),
        LogFormat::Text => subscriber.with_target(false).init(),
    }
    Ok(())
}
