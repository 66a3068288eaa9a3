//! Deletes the users of Apps whose document says so, in batches, and tells how far that is.

use std::{sync::Arc, time::Duration};

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
        postgres::{Claim, Deleting},
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
            match turn(&apps, &stores, &deleted).await {
                Ok(Deleting::Some) => more = true,
                Ok(Deleting::Done | Deleting::Elsewhere) => {}
                Ok(Deleting::OtherNamespace) => refuse(&apps, &deleted, &Refused::OtherNamespace),
                Ok(Deleting::OtherApp) => refuse(&apps, &deleted, &Refused::OtherApp),
                Err(error) => {
                    let app = &deleted.doc.app_id;
                    warn!(%app, error = &error as &dyn std::error::Error, "users cannot be deleted now; tried again");
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
