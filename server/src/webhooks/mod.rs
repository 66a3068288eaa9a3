//! Webhooks: sends events to the receivers of Apps, reports whether that works, and removes old events.

mod metrics;
mod reports;
mod sender;
mod upkeep;
mod worker;

pub use metrics::WebhookMetrics;
pub use reports::report_states;
pub use sender::EventSender;
pub use upkeep::remove_old_events;
pub use worker::{Sender, WebhookWorker};
