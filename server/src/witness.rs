//! The second witness of whose an appID is: the database. It is asked beside the serving, never in front of it.

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
    config::{Apps, Refused},
    domain::{app::App, ports::StoreError},
    store::postgres::{AppClaim, Claim, Postgres},
};

/// So many Apps are asked for in one call.
const BATCH: usize = 200;
/// How often Apps that were refused are asked for again: the users of an earlier App may be deleted by then.
const AGAIN: Duration = Duration::from_secs(5);
/// How long is waited for a database that is away.
const AWAY: Duration = Duration::from_secs(2);

/// Asks the database whose the served Apps are, and takes back what is another's.
pub struct Witness {
    apps: Arc<Apps>,
    postgres: Postgres,
    /// What the database said yes to.
    held: HashMap<AppId, Claim>,
    unasked: BTreeSet<AppId>,
    away: bool,
}

// === impl Witness ===

impl Witness {
    pub fn new(apps: Arc<Apps>, postgres: Postgres) -> Self {
        Self { apps, postgres, held: HashMap::new(), unasked: BTreeSet::new(), away: false }
    }

    /// Runs until it is dropped. Documents that were kept from an earlier run claim nothing: `current` says that the
    /// whole set was read.
    pub async fn run(mut self, mut current: watch::Receiver<bool>) {
        if current.wait_for(|current| *current).await.is_err() {
            return;
        }
        let mut changes = self.apps.changes();
        self.unasked = self.apps.known().into_iter().collect();
        loop {
            while !self.unasked.is_empty() {
                match self.ask().await {
                    Ok(()) => self.answered(),
                    Err(error) => {
                        self.failed(&error);
                        sleep(AWAY).await;
                    }
                }
            }
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(change) => {
                        self.unasked.insert(change.app);
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        changes = self.apps.changes();
                        self.unasked = self.apps.known().into_iter().collect();
                        let known = &self.unasked;
                        self.held.retain(|id, _| known.contains(id));
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                },
                () = sleep(AGAIN) => {
                    self.unasked.extend(self.apps.withheld().iter().map(|app| app.id().clone()));
                }
            }
        }
    }

    /// Asks for some of those that were not asked for yet.
    async fn ask(&mut self) -> Result<(), StoreError> {
        let batch: Vec<AppId> = self.unasked.iter().take(BATCH).cloned().collect();
        let withheld: HashMap<AppId, Arc<App>> =
            self.apps.withheld().into_iter().map(|app| (app.id().clone(), app)).collect();
        let mut asked = Vec::new();
        for id in &batch {
            let served = self.apps.get(id.as_str()).filter(|app| self.held.get(id) != Some(&Claim::from(&app.doc)));
            if let Some(app) = served.or_else(|| withheld.get(id).cloned()) {
                asked.push(app);
            }
        }
        if !asked.is_empty() {
            let claims: Vec<Claim> = asked.iter().map(|app| Claim::from(&app.doc)).collect();
            let answers = self.postgres.claim_apps(&claims).await?;
            for ((app, claim), answer) in asked.iter().zip(claims).zip(answers) {
                match answer {
                    AppClaim::Held => {
                        self.apps.admit(app.id(), &app.revision);
                        self.held.insert(app.id().clone(), claim);
                    }
                    AppClaim::OtherNamespace => self.apps.withhold(app.id(), &app.revision, Refused::OtherNamespace),
                    AppClaim::KeysLost => self.apps.withhold(app.id(), &app.revision, Refused::KeysLost),
                    AppClaim::Deleted => self.apps.withhold(app.id(), &app.revision, Refused::Gone),
                }
            }
        }
        for id in batch {
            if self.apps.get(id.as_str()).is_none() {
                self.held.remove(&id);
            }
            self.unasked.remove(&id);
        }
        Ok(())
    }

    fn answered(&mut self) {
        if std::mem::take(&mut self.away) {
            info!("the database can be asked again whose the Apps are");
        }
    }

    fn failed(&mut self, error: &StoreError) {
        if !std::mem::replace(&mut self.away, true) {
            warn!(
                error = error as &dyn std::error::Error,
                "the database cannot be asked whose the Apps are; they are served meanwhile"
            );
        }
    }
}
