//! A primary that sentinels name: asked for when there is none or it fails, and now and then whether it is still the one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use redis::{ConnectionInfo, Pipeline};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout_at},
};
use tracing::info;

use super::{
    CALL_LIMIT, PAUSE, Scripts,
    errors::{Fault, FaultKind},
    form::Address,
    line::{End, Line},
    node::Node,
};

/// Sentinels that say nothing for so long are not waited for, where another did.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);
/// How often sentinels are asked though nothing fails: a primary that is cut off from them still takes writes, which are
/// lost when it comes back.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The primary that sentinels call by a name.
pub(super) struct Sentinel {
    name: String,
    sentinels: Vec<Line>,
    primary: ConnectionInfo,
    scripts: Arc<Scripts>,
    known: Mutex<Known>,
    /// When sentinels were asked last, and why it was in vain.
    looked: AsyncMutex<Option<(Instant, Result<(), Fault>)>>,
}

#[derive(Default)]
struct Known {
    primary: Option<(Address, Arc<Node>)>,
    /// A call failed since sentinels were asked.
    doubtful: bool,
}

// === impl Sentinel ===

impl Sentinel {
    /// Needs a running tokio.
    pub(super) fn start(
        name: String,
        sentinels: Vec<ConnectionInfo>,
        primary: ConnectionInfo,
        scripts: &Arc<Scripts>,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            name,
            sentinels: sentinels.into_iter().map(|sentinel| Line::new(sentinel, End::Guide)).collect(),
            primary,
            scripts: Arc::clone(scripts),
            known: Mutex::default(),
            looked: AsyncMutex::default(),
        });
        tokio::spawn(watch(Arc::downgrade(&this)));
        this
    }

    /// The primary as last heard of.
    pub(super) async fn primary(&self, until: Instant) -> Result<Arc<Node>, Fault> {
        if let (Some(primary), false) = self.known() {
            return Ok(primary);
        }
        let outcome = self.look(until).await;
        match self.known() {
            // Where sentinels are away, the one before may do.
            (Some(primary), _) => Ok(primary),
            (None, _) => Err(outcome.err().unwrap_or(Fault::of(FaultKind::Away))),
        }
    }

    /// A call failed: there may be another primary.
    pub(super) fn doubt(&self) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).doubtful = true;
    }

    fn known(&self) -> (Option<Arc<Node>>, bool) {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        (known.primary.as_ref().map(|(_, node)| Arc::clone(node)), known.doubtful)
    }

    /// Asks the sentinels. One call does; others go on with the primary that is known, and wait where there is none.
    async fn look(&self, until: Instant) -> Result<(), Fault> {
        let mut looked = match self.looked.try_lock() {
            Ok(looked) => looked,
            Err(_) if self.known().0.is_some() => return Ok(()),
            Err(_) => timeout_at(until, self.looked.lock()).await.map_err(|_| Fault::of(FaultKind::Deadline))?,
        };
        if let Some((at, outcome)) = &*looked
            && at.elapsed() < PAUSE
        {
            return outcome.clone();
        }
        // What fails from here on is a new doubt.
        self.known.lock().unwrap_or_else(PoisonError::into_inner).doubtful = false;
        let outcome = self.ask(until).await.map(|address| self.learn(address));
        if outcome.is_err() {
            self.doubt();
        }
        *looked = Some((Instant::now(), outcome.clone()));
        outcome
    }

    fn learn(&self, address: Address) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.primary.as_ref().is_some_and(|(before, _)| *before == address) {
            return;
        }
        let to = address.like(&self.primary);
        if known.primary.is_some() {
            info!(at = %to.addr(), "Redis has another primary");
        }
        let node = Node::new(to, End::Primary(Arc::clone(&self.scripts)), &self.scripts);
        known.primary = Some((address, Arc::new(node)));
    }

    /// Where most sentinels say that the primary is.
    async fn ask(&self, until: Instant) -> Result<Address, Fault> {
        let soon = until.min(Instant::now() + ANSWER_LIMIT);
        let mut answers: FuturesUnordered<_> =
            self.sentinels.iter().map(|sentinel| ask(sentinel, &self.name, until)).collect();
        let mut votes: HashMap<Address, usize> = HashMap::new();
        let mut fault = Fault::of(FaultKind::Configuration);
        loop {
            let limit = if votes.is_empty() { until } else { soon };
            let Ok(Some(answer)) = timeout_at(limit, answers.next()).await else { break };
            match answer {
                Ok(address) => {
                    let count = votes.entry(address.clone()).or_default();
                    *count += 1;
                    if *count * 2 > self.sentinels.len() {
                        return Ok(address);
                    }
                }
                Err(error) => fault = error,
            }
        }
        // Too few of them are there, or they disagree, as in the middle of a fail-over.
        votes.into_iter().max_by_key(|(_, count)| *count).map(|(address, _)| address).ok_or(fault)
    }
}

async fn ask(sentinel: &Line, name: &str, until: Instant) -> Result<Address, Fault> {
    let mut commands = Pipeline::new();
    commands.cmd("SENTINEL").arg("get-master-addr-by-name").arg(name);
    let answer = sentinel.send(&commands, until).await?.pop().ok_or_else(Fault::unreadable)?;
    let answer = answer.map_err(|error| Fault::from(&error).of_guide("SENTINEL"))?;
    let address: Option<(String, u16)> =
        redis::from_redis_value(answer).map_err(|_| Fault::configuration("SENTINEL"))?;
    // It does not know the name.
    let (host, port) = address.ok_or_else(|| Fault::configuration("no such primary"))?;
    Ok(Address { host, port })
}

async fn watch(sentinel: Weak<Sentinel>) {
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let Some(sentinel) = sentinel.upgrade() else { return };
        // Before there is a primary, calls ask by themselves.
        if sentinel.known().0.is_some() {
            // A failure is told by the connection, and stands in `looked`.
            drop(sentinel.look(Instant::now() + CALL_LIMIT).await);
        }
    }
}
