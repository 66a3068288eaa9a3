//! When an App is reconciled again without an event.

use std::time::Duration;

/// Watch events trigger every reconcile; the resync is only a safety net.
pub(crate) const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);
/// While an older claimant is not validated yet, or after somebody else changed the keys.
pub(crate) const RETRY_SOON: Duration = Duration::from_millis(500);
/// While a rotation waits for room in its namespace. Key changes that are due by time wait no longer than this.
pub(crate) const QUOTA_RETRY: Duration = Duration::from_secs(10 * 60);
