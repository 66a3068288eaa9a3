//! Logs, panics and spans of the operator and the server.
//!
//! Spans are created with `tracing` and exported over OTLP if the standard `OTEL_*` variables name a collector.
//! Otherwise no span is enabled, and the creation of a span costs only one read of a static.

mod context;
mod export;
mod log;
pub mod panics;
mod sampler;
mod settings;
mod span;

use tracing_subscriber::{Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::export::TraceExporter;
pub use crate::{
    context::{add_link, current_traceparent, inject_context, is_sampled, set_parent, trace_id},
    export::ExportError,
    log::{InvalidFilter, LogArgs, LogFormat},
    settings::InvalidSetting,
    span::{TARGET, record_error},
};

/// The settings that differ between the operator and the server.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The name of the program, for example `latchkey-server`: the default of `service.name`.
    pub program: &'static str,
    /// The version of the program: the attribute `service.version`.
    pub version: &'static str,
    /// Whether spans are exported if the environment names a collector.
    pub exports_spans: bool,
    /// Whether a JSON log line contains the current span.
    pub logs_current_span: bool,
    /// Directives that the program adds to the filter of `--log`.
    pub filter_directives: &'static [&'static str],
}

/// Logs and exported spans of the process.
pub struct Telemetry {
    exporter: Option<TraceExporter>,
}

/// Why the logs or the export of spans cannot start.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Filter(#[from] InvalidFilter),
}

// === impl Telemetry ===

impl Telemetry {
    /// Installs logs and the export of spans for the whole process. Panics if called twice.
    pub fn init(options: &Options, args: &LogArgs) -> Result<Self, InitError> {
        let exporter =
            if options.exports_spans { TraceExporter::from_env(options.program, options.version)? } else { None };
        let filter = log::filter(options, &args.log)?;
        let lines = log::layer(args.log_format, options.logs_current_span);
        match &exporter {
            // The filter disables spans too, so that they cost nothing.
            None => tracing_subscriber::registry().with(lines).with(filter).init(),
            Some(exporter) => {
                tracing_subscriber::registry().with(lines.with_filter(filter)).with(exporter.layer()).init();
            }
        }
        Ok(Self { exporter })
    }

    /// Sends the remaining spans, within 3 seconds, and ends the export. Logs continue.
    pub fn shutdown(self) {
        if let Some(exporter) = self.exporter {
            exporter.shutdown();
        }
    }
}
