//! What the server pods say they serve, and what follows from it for each App.

mod pods;
mod stream;
mod table;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{
    Api,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use latchkey_crds::{
    conditions::Reason,
    rendered::{Deletion, Revision},
    types::AppId,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, interval, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::{
    pods::Seen,
    stream::Dial,
    table::{Stream, Table},
};
use crate::{backoff::ShortBackoff, watch::WATCH_SECONDS};

/// A pod that says nothing for so long is silent.
const SILENCE: Duration = Duration::from_secs(15);
/// Three heartbeats: a stream that says nothing for so long is begun again, so that a connection that was dropped in
/// silence is not yet a silent pod.
const QUIET: Duration = Duration::from_secs(6);
/// One line may take so long, while it keeps coming: a hello of many Apps has some MiB.
const LINE: Duration = Duration::from_secs(60);
/// How often the clock is looked at.
const TICK: Duration = Duration::from_secs(1);

/// Whose configuration is to be looked at again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The verdict of these is another one, or the deletion of their users went on.
    Apps(Vec<AppId>),
    /// The servers honour another format: everything may be rendered otherwise.
    All,
    /// The servers found something else of this Provider.
    Provider { namespace: String, name: String },
}

/// What the servers' words come to for an App, the worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A counting pod refuses the very document that is published.
    Refused { pod: String, reason: String },
    /// The same, because the App's users have other keys, which were lost.
    KeysLost { pod: String },
    /// No word for 15 s while serving.
    Silent { pods: Vec<String> },
    /// A counting pod tells another revision, or none.
    Behind { pods: Vec<String> },
    /// Some have not told yet: no evidence.
    Undecided { pods: Vec<String> },
    /// No pod counts, for 15 s.
    NoServers,
    /// Every counting pod serves it.
    All { servers: usize },
}

/// What the servers answer to a document with the state `Released`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// The App had no user, and the database says that the appID is free.
    Freed,
    /// It has users, or a server refuses the document.
    Reserved,
    /// The servers did not answer in time.
    Unanswered,
}

/// A cheap handle.
#[derive(Clone)]
pub(crate) struct Probe {
    table: Arc<Mutex<Table>>,
    turns: watch::Sender<()>,
    dial: Dial,
}

// === impl Probe ===

impl Probe {
    /// Follows the EndpointSlices of the ops Service and keeps one stream to each server pod until `stop`.
    pub(crate) fn start(
        client: kube::Client,
        namespace: &str,
        service: &str,
        wakes: mpsc::UnboundedSender<Wake>,
        stop: CancellationToken,
    ) -> (Self, JoinHandle<()>) {
        let probe = Self::new(wakes, stream::tcp());
        let api = Api::<EndpointSlice>::namespaced(client, namespace);
        let config =
            watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}")).timeout(WATCH_SECONDS);
        let follower = probe.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = follower.follow(api, config, &stop) => {}
                () = follower.tick() => {}
            }
        });
        (probe, task)
    }

    /// One that follows nobody.
    #[cfg(test)]
    pub(crate) fn deaf() -> Self {
        Self::new(mpsc::unbounded_channel().0, stream::tcp())
    }

    fn new(wakes: mpsc::UnboundedSender<Wake>, dial: Dial) -> Self {
        let turns = watch::Sender::new(());
        Self { table: Arc::new(Mutex::new(Table::new(wakes, turns.clone()))), turns, dial }
    }

    /// Every counting pod has told its set, or 15 s have passed since the EndpointSlices were first read.
    pub(crate) fn settled(&self) -> bool {
        self.table().settled()
    }

    pub(crate) async fn wait_settled(&self) {
        let mut turns = self.turns.subscribe();
        while !self.settled() {
            let _ = timeout(TICK, turns.changed()).await;
        }
    }

    /// Remembers which revision is published, so that only a change of the verdict wakes it; gives the verdict now.
    pub(crate) fn expect(&self, app: &AppId, revision: &Revision) -> Verdict {
        self.table().expect(app, revision)
    }

    /// Nothing is published for it any more.
    pub(crate) fn forget(&self, app: &AppId) {
        self.table().forget(app);
    }

    /// Waits until the verdict is decided or the limit is over.
    pub(crate) async fn wait(&self, app: &AppId, limit: Duration) -> Verdict {
        let mut turns = self.turns.subscribe();
        let end = Instant::now() + limit;
        loop {
            let verdict = self.table().verdict(app);
            match &verdict {
                // Nobody is there who could tell.
                Verdict::Undecided { pods } if pods.is_empty() => return verdict,
                Verdict::Behind { .. } | Verdict::Undecided { .. } if Instant::now() < end => {}
                Verdict::Behind { .. }
                | Verdict::Undecided { .. }
                | Verdict::Refused { .. }
                | Verdict::KeysLost { .. }
                | Verdict::Silent { .. }
                | Verdict::NoServers
                | Verdict::All { .. } => return verdict,
            }
            let _ = timeout_at(end, turns.changed()).await;
        }
    }

    /// Waits until every counting pod serves nothing of the App and one has looked for users, or until the limit.
    pub(crate) async fn wait_released(&self, app: &AppId, revision: &Revision, limit: Duration) -> Released {
        let mut turns = self.turns.subscribe();
        let end = Instant::now() + limit;
        loop {
            let (verdict, looked) = {
                let mut table = self.table();
                (table.expect(app, revision), table.deletion(app))
            };
            match (verdict, looked) {
                (Verdict::All { .. }, Some(Deletion { done: true, .. })) => return Released::Freed,
                (Verdict::All { .. }, Some(Deletion { users_left: 1.., .. })) => return Released::Reserved,
                // Also a server of an earlier version, which does not know such documents.
                (Verdict::Refused { .. } | Verdict::KeysLost { .. }, _) => return Released::Reserved,
                _ if Instant::now() >= end => return Released::Unanswered,
                _ => {}
            }
            let _ = timeout_at(end, turns.changed()).await;
        }
    }

    /// The lowest format that all counting pods honour, and no higher than this operator writes.
    pub(crate) fn format(&self) -> u32 {
        self.table().format()
    }

    /// The counting pods that honour no more than this format.
    pub(crate) fn pods_at_format(&self, format: u32) -> Vec<String> {
        self.table().pods_at_format(format)
    }

    /// How many pods count, and how many of them are silent.
    pub(crate) fn pods(&self) -> (usize, usize) {
        self.table().pods()
    }

    /// The furthest that any counting pod tells of the deletion of its users.
    pub(crate) fn deletion(&self, app: &AppId) -> Option<Deletion> {
        self.table().deletion(app)
    }

    /// What the servers found of a Provider: the worst that any counting pod tells; none where none has told.
    pub(crate) fn finding(&self, namespace: &str, name: &str) -> Option<Reason> {
        self.table().finding(&(namespace.to_owned(), name.to_owned()))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow(&self, api: Api<EndpointSlice>, config: watcher::Config, stop: &CancellationToken) {
        let name = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
        let (mut slices, mut fresh) = (BTreeMap::new(), BTreeMap::new());
        let events = watcher(api, config).backoff(ShortBackoff::of_watch());
        pin_mut!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => {
                    fresh.clear();
                    continue;
                }
                Ok(Event::InitApply(slice)) => {
                    fresh.insert(name(&slice), slice);
                    continue;
                }
                Ok(Event::InitDone) => slices = std::mem::take(&mut fresh),
                Ok(Event::Apply(slice)) => {
                    slices.insert(name(&slice), slice);
                }
                Ok(Event::Delete(slice)) => {
                    slices.remove(&name(&slice));
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "cannot watch the EndpointSlices of the servers; it is tried again");
                    continue;
                }
            }
            self.endpoints(pods::seen(slices.values()), stop);
        }
    }

    fn endpoints(&self, seen: HashMap<String, Seen>, stop: &CancellationToken) {
        let begun = self.table().endpoints(seen, stop);
        for Stream { uid, address, stop } in begun {
            let probe = self.clone();
            tokio::spawn(async move {
                let keep = stream::keep(&probe, &uid, address, &stop);
                stop.run_until_cancelled(keep).await;
            });
        }
    }

    async fn tick(&self) {
        let mut ticks = interval(TICK);
        loop {
            ticks.tick().await;
            self.table().look_at_the_clock();
        }
    }
}
