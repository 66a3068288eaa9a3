//! The interface between the worker, which claims rows, and the delivery of a row.

use std::future::Future;

use crate::domain::ports::{ClaimedRow, DeliveryOutcome};

/// Delivers one row of the outbox.
pub(super) trait Deliverer: Send + Sync + 'static {
    fn deliver(&self, claimed: &ClaimedRow) -> impl Future<Output = DeliveryOutcome> + Send;

    /// Closes connections that were idle for too long. The worker calls this in each iteration of its loop.
    fn close_idle(&self) {}
}
