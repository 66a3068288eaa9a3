//! The queue of refusals that wait to be counted.

use latchkey_crds::types::AppId;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;

use crate::domain::audit::Refusal;

/// Maximum number of refusals that wait to be counted. Further refusals are lost.
const QUEUE_CAPACITY: usize = 4096;

/// The receiving end of the queue.
pub(in crate::store::redis) type QueuedRefusals = mpsc::Receiver<(AppId, Refusal)>;

pub(in crate::store::redis) struct RefusalQueue {
    sender: mpsc::Sender<(AppId, Refusal)>,
    lost: Counter,
}

// === impl RefusalQueue ===

impl RefusalQueue {
    pub(in crate::store::redis) fn new() -> (Self, QueuedRefusals) {
        let (sender, receiver) = mpsc::channel(QUEUE_CAPACITY);
        (Self { sender, lost: Counter::default() }, receiver)
    }

    /// Adds a refusal. If the queue is full, the refusal is lost.
    pub(super) fn enqueue(&self, app: &AppId, refusal: Refusal) {
        if self.sender.try_send((app.clone(), refusal)).is_err() {
            self.lost.inc();
        }
    }

    /// Returns the counter of lost refusals.
    pub(in crate::store::redis) const fn lost(&self) -> &Counter {
        &self.lost
    }
}
