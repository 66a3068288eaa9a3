//! Mail: the outbox worker, the templates and the connections to relays.

mod backoff;
mod deliverer;
mod delivery;
#[doc(hidden)]
pub mod fuzzing;
mod link;
mod metrics;
mod relay;
mod relay_ports;
mod relay_stream;
mod send_error;
mod settings;
mod template_cache;
mod templates;
mod worker;

pub use metrics::MailMetrics;
pub use settings::{InstallRelay, MailSettings};
pub use worker::Worker;
