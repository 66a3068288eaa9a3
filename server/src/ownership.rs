//! Checks in the database that the served Apps own their appIDs. No request waits for this check.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use latchkey_crds::types::AppId;
use tokio::{
    sync::{broadcast, watch},
    time::sleep,
};
use tracing::{info, warn};

use crate::{
    config::{Apps, RejectError},
    domain::{app::App, ports::StoreError},
    store::postgres::{ClaimOutcome, OwnershipClaim, PostgresStore},
};

/// Maximum number of Apps per call of [`PostgresStore::claim_apps`].
const BATCH_SIZE: usize = 200;
/// How often suspended Apps are checked again. The database can accept such an App later, for example after the users
/// of an earlier App with the same appID were deleted.
const RECHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Delay before a retry while the database is unavailable.
const RETRY_DELAY: Duration = Duration::from_secs(2);

/// Checks the ownership of the served Apps. Suspends an App that does not own its appID, and resumes the App when it
/// owns the appID.
pub struct OwnershipChecker {
    apps: Arc<Apps>,
    postgres: PostgresStore,
    /// The claims that the database confirmed.
    confirmed: HashMap<AppId, OwnershipClaim>,
    /// The Apps that will be checked next.
    pending: BTreeSet<AppId>,
    is_unavailable: bool,
}

// === impl OwnershipChecker ===

impl OwnershipChecker {
    pub fn new(apps: Arc<Apps>, postgres: PostgresStore) -> Self {
        Self { apps, postgres, confirmed: HashMap::new(), pending: BTreeSet::new(), is_unavailable: false }
    }

    /// Runs until the future is dropped. First waits until `has_all_documents` is true. Before that, the Apps can come
    /// from the cache of an earlier process, and cached documents must not claim appIDs.
    pub async fn run(mut self, mut has_all_documents: watch::Receiver<bool>) {
        if has_all_documents.wait_for(|has_all| *has_all).await.is_err() {
            return;
        }
        let mut changes = self.apps.subscribe_changes();
        self.pending = self.apps.known_ids().into_iter().collect();
        loop {
            while !self.pending.is_empty() {
                match self.check_batch().await {
                    Ok(()) => self.record_success(),
                    Err(error) => {
                        self.record_failure(&error);
                        sleep(RETRY_DELAY).await;
                    }
                }
            }
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(change) => {
                        self.pending.insert(change.app);
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        changes = self.apps.subscribe_changes();
                        self.pending = self.apps.known_ids().into_iter().collect();
                        let known_ids = &self.pending;
                        self.confirmed.retain(|id, _| known_ids.contains(id));
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                () = sleep(RECHECK_INTERVAL) => {
                    self.pending.extend(self.apps.suspended().iter().map(|app| app.id().clone()));
                }
            }
        }
    }

    /// Checks the next batch.
    async fn check_batch(&mut self) -> Result<(), StoreError> {
        let batch: Vec<AppId> = self.pending.iter().take(BATCH_SIZE).cloned().collect();
        let suspended: HashMap<AppId, Arc<App>> =
            self.apps.suspended().into_iter().map(|app| (app.id().clone(), app)).collect();
        let mut to_check = Vec::new();
        for id in &batch {
            let unconfirmed = self
                .apps
                .get(id.as_str())
                .filter(|app| self.confirmed.get(id) != Some(&OwnershipClaim::from(&app.doc)));
            if let Some(app) = unconfirmed.or_else(|| suspended.get(id).cloned()) {
                to_check.push(app);
            }
        }
        if !to_check.is_empty() {
            let claims: Vec<OwnershipClaim> = to_check.iter().map(|app| OwnershipClaim::from(&app.doc)).collect();
            let outcomes = self.postgres.claim_apps(&claims).await?;
            for ((app, claim), outcome) in to_check.iter().zip(claims).zip(outcomes) {
                match outcome {
                    ClaimOutcome::Held => {
                        self.apps.resume(app.id(), &app.revision);
                        self.confirmed.insert(app.id().clone(), claim);
                    }
                    ClaimOutcome::OtherNamespace => {
                        self.apps.suspend(app.id(), &app.revision, RejectError::OtherNamespace)
                    }
                    ClaimOutcome::KeysLost => self.apps.suspend(app.id(), &app.revision, RejectError::KeysLost),
                    ClaimOutcome::Deleted => self.apps.suspend(app.id(), &app.revision, RejectError::UsersDeleted),
                }
            }
        }
        for id in batch {
            if self.apps.get(id.as_str()).is_none() {
                self.confirmed.remove(&id);
            }
            self.pending.remove(&id);
        }
        Ok(())
    }

    fn record_success(&mut self) {
        if std::mem::take(&mut self.is_unavailable) {
            info!("the database can check the ownership of appIDs again");
        }
    }

    fn record_failure(&mut self, error: &StoreError) {
        if !std::mem::replace(&mut self.is_unavailable, true) {
            warn!(
                error = error as &dyn std::error::Error,
                "the database cannot check the ownership of appIDs; the Apps are served meanwhile"
            );
        }
    }
}
