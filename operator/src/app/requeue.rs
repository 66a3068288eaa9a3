//! When an App is reconciled again without an event.

use std::time::Duration;

use time::OffsetDateTime;

use crate::context::Context;

/// The wait if nothing must be done at a known time. It can be long, because watch events report every change.
pub(crate) const RESYNC: Duration = Duration::from_secs(10 * 60 * 60);
/// The wait if the reconcile must be repeated soon, for example because another writer has changed the keys.
pub(crate) const RETRY_SOON: Duration = Duration::from_millis(500);
/// The longest wait while clients are left out, and the wait while the byte quota delays a requested rotation. Key
/// transitions that become due while a rotation waits are also delayed until the end of this wait.
pub(crate) const QUOTA_RETRY: Duration = Duration::from_secs(10 * 60);
/// The wait while another App has the host that this App wants for its pages. Almost every change that frees a host
/// triggers a reconcile. But if an older App is no longer accepted, nothing triggers a reconcile, so the host is also
/// checked at this interval.
pub(crate) const HOST_RETRY: Duration = Duration::from_secs(10 * 60);

/// Returns the wait until `due`, a time at which the App must be reconciled although no event reports a change. If
/// `due` has passed, the wait is short.
pub(crate) fn wait_until(due: OffsetDateTime, context: &Context) -> Duration {
    (due - context.now()).try_into().unwrap_or(RETRY_SOON).max(RETRY_SOON)
}
