//! Times that all parts of the client share.

use std::time::Duration;

/// The time limit of a call, including connecting.
pub(in crate::store::redis) const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// After a failure to connect, read the URL, query sentinels or look up slots, calls fail for this long without a
/// retry.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(100);
