//! Deletes the users of Apps whose document says so, in batches, frees appIDs without users, and reports progress.

use std::{sync::Arc, time::Duration};

use latchkey_crds::rendered::{AppState, Deletion};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use crate::{
    config::{Apps, Deleted, Refused},
    domain::ports::StoreError,
    store::{
        Stores,
        postgres::{Claim, Deleting, Releasing},
    },
};

/// Users of one transaction.
const BATCH: u32 = 500;
/// How often is told how far it is, and for how long one App goes on while others wait.
const TURN: Duration = Duration::from_secs(2);

/// Runs until it is dropped. Documents that were kept from an earlier run delete nothing: `current` says that the whole
/// set was read.
pub async fn run(apps: Arc<Apps>, stores: Stores, mut current: watch::Receiver<bool>) {
    if current.wait_for(|current| *current).await.is_err() {
        return;
    }
    loop {
        let mut more = false;
        for deleted in apps.deleted() {
            if deleted.progress.is_some_and(|progress| progress.done) {
                continue;
            }
            let ended = match deleted.doc.state {
                AppState::Released => release(&apps, &stores, &deleted).await,
                AppState::Deleted | AppState::Serving => turn(&apps, &stores, &deleted).await,
            };
            match ended {
                Ok(Deleting::Some) => more = true,
                Ok(Deleting::Done | Deleting::Elsewhere) => {}
                Ok(Deleting::OtherNamespace) => refuse(&apps, &deleted, &Refused::OtherNamespace),
                Ok(Deleting::OtherApp) => refuse(&apps, &deleted, &Refused::OtherApp),
                Err(error) => {
                    let app = &deleted.doc.app_id;
                    let error = &error as &dyn std::error::Error;
                    warn!(%app, error, "users cannot be deleted, nor an appID freed, now; tried again");
                }
            }
        }
        if !more {
            sleep(TURN).await;
        }
    }
}

fn refuse(apps: &Apps, deleted: &Deleted, refused: &Refused) {
    apps.refuse_deletion(&deleted.doc.app_id, &deleted.revision, refused);
}

/// Frees the appID if the App has no users, and reports which.
async fn release(apps: &Apps, stores: &Stores, released: &Deleted) -> Result<Deleting, StoreError> {
    let claim = Claim::from(&*released.doc);
    let wanted = || apps.is_deleted(&claim.app, &released.revision);
    if !wanted() {
        return Ok(Deleting::Elsewhere);
    }
    let progress = match stores.postgres.release_app(&claim, wanted).await? {
        Releasing::Freed => Deletion { users_left: 0, done: true },
        Releasing::Reserved { users } => Deletion { users_left: users, done: false },
        Releasing::Elsewhere => return Ok(Deleting::Elsewhere),
        Releasing::OtherNamespace => return Ok(Deleting::OtherNamespace),
        Releasing::OtherApp => return Ok(Deleting::OtherApp),
    };
    apps.progress(&claim.app, &released.revision, progress);
    if progress.done {
        info!(app = %claim.app, "the App is gone and had no users; its appID is free");
    }
    Ok(Deleting::Elsewhere)
}

/// Deletes for a while, and tells how far it came.
async fn turn(apps: &Apps, stores: &Stores, deleted: &Deleted) -> Result<Deleting, StoreError> {
    let claim = Claim::from(&*deleted.doc);
    let begun = Instant::now();
    let wanted = || apps.is_deleted(&claim.app, &deleted.revision);
    loop {
        if !wanted() {
            return Ok(Deleting::Elsewhere);
        }
        let deleting = stores.delete_users(&claim, BATCH, wanted).await?;
        match deleting {
            Deleting::Some if begun.elapsed() < TURN => continue,
            Deleting::OtherNamespace | Deleting::OtherApp => return Ok(deleting),
            Deleting::Some | Deleting::Done | Deleting::Elsewhere => {}
        }
        let progress = stores.postgres.deletion(&claim).await?;
        apps.progress(&claim.app, &deleted.revision, progress);
        if progress.done {
            info!(app = %claim.app, "the users are deleted");
        }
        return Ok(deleting);
    }
}
