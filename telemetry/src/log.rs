//! Structured logs on standard error: one JSON object per line, or text.

use clap::{Args, ValueEnum};
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, Layer, fmt, registry::LookupSpan};

use crate::{Options, TARGET};

#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Log filter, in the syntax of tracing's EnvFilter.
    #[arg(long, env = "LATCHKEY_LOG", default_value = "info")]
    pub log: String,
    /// Log format: one JSON object per line, or text.
    #[arg(long, env = "LATCHKEY_LOG_FORMAT", value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Json,
    Text,
}

/// The value of `--log` is not a valid filter.
#[derive(Debug, thiserror::Error)]
#[error("--log is not a filter such as info or {crate_name}=debug,info")]
pub struct InvalidFilter {
    /// The crate name of the program, for the example in the message.
    crate_name: String,
}

/// Hides the warnings of kube: if a response of the API server does not parse, kube logs the whole response, which can
/// be a Secret.
const NO_RESPONSE_BODIES: &str = "kube_client=error";

/// Returns the filter of `--log` with additional directives. They replace the directives of `--log` for the same
/// targets.
pub(crate) fn filter(options: &Options, log: &str) -> Result<EnvFilter, InvalidFilter> {
    let no_spans = format!("{TARGET}=off");
    let mut directives = vec![log, NO_RESPONSE_BODIES];
    directives.extend(options.filter_directives);
    directives.push(&no_spans);
    EnvFilter::try_new(directives.join(","))
        .map_err(|_| InvalidFilter { crate_name: options.program.replace('-', "_") })
}

pub(crate) fn layer<S>(format: LogFormat, with_current_span: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let lines = fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Json => {
            lines.json().flatten_event(true).with_current_span(with_current_span).with_span_list(false).boxed()
        }
        LogFormat::Text => lines.with_target(false).boxed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: Options = Options {
        program: "latchkey-server",
        version: "0",
        exports_spans: false,
        logs_current_span: false,
        filter_directives: &["kube_runtime=error"],
    };

    #[test]
    fn the_directives_of_the_program_replace_those_of_the_user() {
        let filter = filter(&OPTIONS, "trace,kube_client=trace,kube_runtime=trace,span=trace").unwrap().to_string();
        for directive in ["trace", "kube_client=error", "kube_runtime=error", "span=off"] {
            assert!(filter.split(',').any(|found| found == directive), "{filter}");
        }
        assert!(!filter.contains("kube_client=trace") && !filter.contains("span=trace"), "{filter}");
    }

    #[test]
    fn an_invalid_filter_is_reported_with_an_example() {
        let error = filter(&OPTIONS, "latchkey_server=loud").unwrap_err();
        assert_eq!(error.to_string(), "--log is not a filter such as info or latchkey_server=debug,info");
    }
}
