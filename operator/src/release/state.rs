//! The state of the releases, and their locks.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::Duration,
};

use latchkey_crds::{rendered::Revision, types::AppId};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock},
    time::Instant,
};

/// Which appIDs are being released, and a lock for each appID. The lock prevents a reconcile of an App from running
/// during a step of a release of the same appID.
#[derive(Default)]
pub(crate) struct Releases {
    /// Reconciles share the lock of an appID. The steps of a release lock it exclusively.
    locks: Mutex<HashMap<AppId, Weak<RwLock<()>>>>,
    under_way: Mutex<HashMap<AppId, ReleaseProgress>>,
    /// For each App with deleted users: the revision of the document that demands the deletion, and since when the
    /// deletion is known to be complete.
    deleted: Mutex<HashMap<AppId, (Revision, Instant)>>,
    /// The checks of appIDs that are scheduled for later, as retries.
    scheduled: Mutex<HashSet<(AppId, Retry)>>,
}

/// How soon an appID is checked again without an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Retry {
    Soon,
    Late,
}

/// The progress of a release.
#[derive(Clone, Copy, Default)]
pub(super) struct ReleaseProgress {
    /// Whether the operator has begun to ask the servers if the App has users. From then on, a document with the state
    /// `Released` can exist.
    pub(super) asking: bool,
    /// Whether the appID was queued again during the release.
    pub(super) requeued: bool,
}

/// An appID that is being released, until this guard is dropped.
pub(super) struct ReleaseGuard<'a> {
    releases: &'a Releases,
    id: AppId,
    ended: bool,
}

// === impl Releases ===

impl Releases {
    /// Locks the appID for the reconcile of an App that claims it. No step of a release runs until the guard is
    /// dropped.
    pub(crate) async fn lock_shared(&self, id: &AppId) -> OwnedRwLockReadGuard<()> {
        self.lock(id).read_owned().await
    }

    /// Whether the document of a release can exist. Such a document is not an orphan.
    pub(crate) fn is_asking_servers(&self, id: &AppId) -> bool {
        self.under_way.lock().get(id).is_some_and(|progress| progress.asking)
    }

    /// Returns how much longer the requests that began before the deletion of their App's users can run. They can run
    /// for `drain`, counted from the first call with this revision. Returns `None` when this time is over.
    pub(crate) fn request_drain_left(&self, id: &AppId, revision: &Revision, drain: Duration) -> Option<Duration> {
        let mut deleted = self.deleted.lock();
        let (stored_revision, since) = deleted.entry(id.clone()).or_insert_with(|| (revision.clone(), Instant::now()));
        if stored_revision != revision {
            (*stored_revision, *since) = (revision.clone(), Instant::now());
        }
        let left = drain.saturating_sub(since.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// Drops the record of when the users of an App were deleted. Called if there can be users again, or if nothing
    /// waits for the end of requests any more.
    pub(crate) fn forget_deletion(&self, id: &AppId) {
        self.deleted.lock().remove(id);
    }

    pub(super) async fn lock_exclusive(&self, id: &AppId) -> OwnedRwLockWriteGuard<()> {
        self.lock(id).write_owned().await
    }

    /// Begins a release. Returns `None` if a release is under way already. The appID is then queued again when that
    /// release ends.
    pub(super) fn try_begin(&self, id: &AppId) -> Option<ReleaseGuard<'_>> {
        let mut under_way = self.under_way.lock();
        if let Some(progress) = under_way.get_mut(id) {
            progress.requeued = true;
            return None;
        }
        under_way.insert(id.clone(), ReleaseProgress::default());
        Some(ReleaseGuard { releases: self, id: id.clone(), ended: false })
    }

    /// Records a scheduled retry. Returns false if this retry is scheduled already, because one timer is enough.
    pub(super) fn try_schedule(&self, id: &AppId, retry: Retry) -> bool {
        self.scheduled.lock().insert((id.clone(), retry))
    }

    pub(super) fn unschedule(&self, id: &AppId, retry: Retry) {
        self.scheduled.lock().remove(&(id.clone(), retry));
    }

    fn lock(&self, id: &AppId) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock();
        // At most as many locks remain as there are concurrent reconciles and releases.
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(id).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(id.clone(), Arc::downgrade(&lock));
        lock
    }
}

// === impl ReleaseGuard ===

impl ReleaseGuard<'_> {
    pub(super) fn set_asking(&self) {
        let mut under_way = self.releases.under_way.lock();
        under_way.entry(self.id.clone()).or_default().asking = true;
    }

    /// Ends the release and returns its progress.
    pub(super) fn end(mut self) -> ReleaseProgress {
        self.ended = true;
        self.remove()
    }

    fn remove(&self) -> ReleaseProgress {
        let mut under_way = self.releases.under_way.lock();
        under_way.remove(&self.id).unwrap_or_default()
    }
}

impl Drop for ReleaseGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.remove();
        }
    }
}
