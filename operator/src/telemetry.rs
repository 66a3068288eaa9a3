//! Logs, panics and spans of the operator.

use latchkey_telemetry::{InitError, LogArgs, Options, Telemetry};
use tracing::error;

use crate::panics;

const OPTIONS: Options = Options {
    program: "latchkey-operator",
    version: env!("CARGO_PKG_VERSION"),
    exports_spans: true,
    logs_current_span: false,
    // Without this filter, kube's runtime would log errors that the operator has already logged.
    filter_directives: &["kube_runtime=error"],
};

pub(crate) fn init(args: &LogArgs) -> Result<Telemetry, InitError> {
    let telemetry = Telemetry::init(&OPTIONS, args)?;
    panics::install_hook(|location, text| error!(%location, text, "a panic"));
    Ok(telemetry)
}
