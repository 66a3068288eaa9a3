//! Logs, panics and spans of the server.

use latchkey_telemetry::{InitError, LogArgs, Options, Telemetry, panics};
use tracing::error;

pub(crate) fn init(args: &LogArgs, exports_spans: bool) -> Result<Telemetry, InitError> {
    let options = Options {
        program: "latchkey-server",
        version: env!("CARGO_PKG_VERSION"),
        exports_spans,
        logs_current_span: true,
        filter_directives: &[],
    };
    let telemetry = Telemetry::init(&options, args)?;
    panics::install_hook(|location, text| error!(%location, text, "a panic"));
    Ok(telemetry)
}
