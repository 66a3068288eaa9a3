//! When an App is reconciled again without an event.

use std::time::Duration;

/// The wait if nothing is due. Watch events report every change, so this is only a safety net.
pub(crate) const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);
/// The wait if an older App may take the appID, or if somebody else changed the keys.
pub(crate) const RETRY_SOON: Duration = Duration::from_millis(500);
/// The wait while a rotation has no room in its namespace. Key changes that are due by time wait no longer than this.
pub(crate) const QUOTA_RETRY: Duration = Duration::from_secs(10 * 60);
