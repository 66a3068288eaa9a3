//! Deletes, in batches, the users of Apps in state `Deleted`. Frees the appIDs of Apps in state `Released` if the Apps
//! have no users. Reports the progress of both.

use std::{sync::Arc, time::Duration};

use latchkey_crds::rendered::{AppState, DeletionProgress};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use crate::{
    config::{Apps, PendingDeletion, RejectError},
    domain::ports::StoreError,
    store::{
        Stores,
        postgres::{DeleteOutcome, OwnershipClaim, ReleaseOutcome},
    },
};

const USERS_PER_TRANSACTION: u32 = 500;
/// How long the server deletes users of one App before it reports the progress and continues with the next App. Also
/// the length of the pause when no App has users left to delete.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Runs until the future is dropped. First waits until `has_all_documents` is true, because documents that an earlier
/// process cached must not cause a deletion.
pub async fn run(apps: Arc<Apps>, stores: Stores, mut has_all_documents: watch::Receiver<bool>) {
    if has_all_documents.wait_for(|has_all| *has_all).await.is_err() {
        return;
    }
    loop {
        let mut has_more_users = false;
        for deleted in apps.pending_deletions() {
            if deleted.progress.is_some_and(|progress| progress.done) {
                continue;
            }
            let outcome = match deleted.doc.state {
                AppState::Released => release_app_id(&apps, &stores, &deleted).await,
                AppState::Deleted | AppState::Serving => delete_users(&apps, &stores, &deleted).await,
            };
            match outcome {
                Ok(DeleteOutcome::Partial) => has_more_users = true,
                Ok(DeleteOutcome::Done | DeleteOutcome::Contended) => {}
                Ok(DeleteOutcome::OtherNamespace) => reject(&apps, &deleted, &RejectError::OtherNamespace),
                Ok(DeleteOutcome::OtherApp) => reject(&apps, &deleted, &RejectError::OtherApp),
                Err(error) => {
                    let app = &deleted.doc.app_id;
                    let error = &error as &dyn std::error::Error;
                    warn!(%app, error, "users cannot be deleted or an appID cannot be freed now; retrying");
                }
            }
        }
        if !has_more_users {
            sleep(REPORT_INTERVAL).await;
        }
    }
}

fn reject(apps: &Apps, deleted: &PendingDeletion, refused: &RejectError) {
    apps.reject_deletion(&deleted.doc.app_id, &deleted.revision, refused);
}

/// Frees the appID unless users, or events of deleted users, still reserve it. Reports the result.
async fn release_app_id(apps: &Apps, stores: &Stores, released: &PendingDeletion) -> Result<DeleteOutcome, StoreError> {
    let claim = OwnershipClaim::from(&*released.doc);
    let is_still_pending = || apps.is_pending_deletion(&claim.app, &released.revision);
    if !is_still_pending() {
        return Ok(DeleteOutcome::Contended);
    }
    let progress = match stores.postgres.release_app(&claim, is_still_pending).await? {
        ReleaseOutcome::Freed => DeletionProgress { users_left: 0, done: true },
        ReleaseOutcome::Reserved { users } => DeletionProgress { users_left: users, done: false },
        ReleaseOutcome::Contended => return Ok(DeleteOutcome::Contended),
        ReleaseOutcome::OtherNamespace => return Ok(DeleteOutcome::OtherNamespace),
        ReleaseOutcome::OtherApp => return Ok(DeleteOutcome::OtherApp),
    };
    apps.report_progress(&claim.app, &released.revision, progress);
    if progress.done {
        info!(app = %claim.app, "the App was deleted and had no users; its appID is free");
    }
    // Not `Partial`: after `Partial`, `run` would start its next round without a pause.
    Ok(DeleteOutcome::Contended)
}

/// Deletes users for at most [`REPORT_INTERVAL`], and reports progress.
async fn delete_users(apps: &Apps, stores: &Stores, deleted: &PendingDeletion) -> Result<DeleteOutcome, StoreError> {
    let claim = OwnershipClaim::from(&*deleted.doc);
    let begun = Instant::now();
    let is_still_pending = || apps.is_pending_deletion(&claim.app, &deleted.revision);
    loop {
        if !is_still_pending() {
            return Ok(DeleteOutcome::Contended);
        }
        let deleting = stores.delete_users(&claim, USERS_PER_TRANSACTION, is_still_pending).await?;
        match deleting {
            DeleteOutcome::Partial if begun.elapsed() < REPORT_INTERVAL => continue,
            DeleteOutcome::OtherNamespace | DeleteOutcome::OtherApp => return Ok(deleting),
            DeleteOutcome::Partial | DeleteOutcome::Done | DeleteOutcome::Contended => {}
        }
        let progress = stores.postgres.deletion_progress(&claim).await?;
        apps.report_progress(&claim.app, &deleted.revision, progress);
        if progress.done {
            info!(app = %claim.app, "the users are deleted");
        }
        return Ok(deleting);
    }
}
