//! Times that all parts of the client share.

use std::time::Duration;

/// The time limit of a call, including connecting.
pub(in crate::store::redis) const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause after a failed attempt to connect, and after each attempt to read the URL, query sentinels or query the
/// slot map. During the pause, calls use the outcome of the last attempt.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(100);
