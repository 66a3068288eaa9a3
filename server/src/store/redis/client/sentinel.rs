//! The primary that sentinels name. Sentinels are queried when no primary is known, after a call has failed, and every
//! second.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use parking_lot::Mutex;
use redis::ConnectionInfo;
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout_at},
};
use tracing::info;

use super::{
    super::scripts::Scripts,
    address::ServerAddress,
    connection::{Connection, Peer},
    error::{CallError, CallErrorKind},
    node::Node,
    timeouts::{CALL_TIMEOUT, RETRY_PAUSE},
};

/// After this time, sentinels that have not replied are ignored if another sentinel has replied.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// How often sentinels are queried when no call fails. This is necessary, because calls to a primary that is cut off
/// from the sentinels succeed, but what they write is lost when this primary rejoins.
const QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Asks sentinels for the primary with this master name.
pub(super) struct SentinelGroup {
    master_name: String,
    sentinels: Vec<Connection>,
    /// The settings of the primary; only its address comes from the sentinels.
    primary_settings: ConnectionInfo,
    scripts: Arc<Scripts>,
    known_primary: Mutex<KnownPrimary>,
    /// When sentinels were last queried, and the outcome.
    last_query: AsyncMutex<Option<(Instant, Result<(), CallError>)>>,
}

#[derive(Default)]
struct KnownPrimary {
    primary: Option<(ServerAddress, Arc<Node>)>,
    /// Whether a call has failed since sentinels were last queried.
    is_stale: bool,
}

// === impl SentinelGroup ===

impl SentinelGroup {
    /// Creates the group, and starts the task that watches the primary. Must be called in a tokio runtime.
    pub(super) fn start(
        master_name: String,
        sentinels: Vec<ConnectionInfo>,
        primary_settings: ConnectionInfo,
        scripts: &Arc<Scripts>,
    ) -> Arc<Self> {
        let group = Arc::new(Self {
            master_name,
            sentinels: sentinels.into_iter().map(|sentinel| Connection::new(sentinel, Peer::Discovery)).collect(),
            primary_settings,
            scripts: Arc::clone(scripts),
            known_primary: Mutex::default(),
            last_query: AsyncMutex::default(),
        });
        tokio::spawn(watch_primary(Arc::downgrade(&group)));
        group
    }

    /// Returns the primary. Queries the sentinels first if no primary is known or a call has failed.
    pub(super) async fn primary(&self, until: Instant) -> Result<Arc<Node>, CallError> {
        if let (Some(primary), false) = self.known_primary() {
            return Ok(primary);
        }
        // If a primary is known, sentinels that do not reply must not use up the time of the call.
        let limit = if self.known_primary().0.is_some() { until.min(Instant::now() + REPLY_TIMEOUT) } else { until };
        let outcome = self.rediscover(limit).await;
        match self.known_primary() {
            // If the sentinels are unavailable, the previous primary may still work.
            (Some(primary), _) => Ok(primary),
            (None, _) => Err(outcome.err().unwrap_or(CallError::from_kind(CallErrorKind::Unavailable))),
        }
    }

    /// Records that a call failed: there may be a new primary.
    pub(super) fn mark_stale(&self) {
        self.known_primary.lock().is_stale = true;
    }

    /// Returns the known primary, and whether a call has failed since sentinels were queried.
    fn known_primary(&self) -> (Option<Arc<Node>>, bool) {
        let known = self.known_primary.lock();
        (known.primary.as_ref().map(|(_, node)| Arc::clone(node)), known.is_stale)
    }

    /// Queries the sentinels. Only one call at a time queries them. In the meantime, other calls use the known primary,
    /// or wait if no primary is known.
    async fn rediscover(&self, until: Instant) -> Result<(), CallError> {
        let mut last_query = match self.last_query.try_lock() {
            Ok(last_query) => last_query,
            Err(_) if self.known_primary().0.is_some() => return Ok(()),
            Err(_) => timeout_at(until, self.last_query.lock())
                .await
                .map_err(|_| CallError::from_kind(CallErrorKind::Deadline))?,
        };
        if let Some((at, outcome)) = &*last_query
            && at.elapsed() < RETRY_PAUSE
        {
            return outcome.clone();
        }
        // A call that fails from here on sets `is_stale` again.
        let was_stale = std::mem::take(&mut self.known_primary.lock().is_stale);
        let outcome = self.query_primary(until).await.map(|address| self.set_primary(address));
        // If the query failed, `is_stale` gets its earlier value back. The failure itself does not set it, because
        // unavailable sentinels are no reason to doubt a primary that works.
        if outcome.is_err() && was_stale {
            self.mark_stale();
        }
        *last_query = Some((Instant::now(), outcome.clone()));
        outcome
    }

    fn set_primary(&self, address: ServerAddress) {
        let mut known = self.known_primary.lock();
        if known.primary.as_ref().is_some_and(|(previous, _)| *previous == address) {
            return;
        }
        let server = address.with_settings_of(&self.primary_settings);
        if known.primary.is_some() {
            info!(at = %server.addr(), "Redis has a new primary");
        }
        let node = Node::new(server, Peer::Primary(Arc::clone(&self.scripts)), &self.scripts);
        known.primary = Some((address, Arc::new(node)));
    }

    /// Returns the address that a majority of all sentinels name. Without a majority, returns the address that is named
    /// most often.
    async fn query_primary(&self, until: Instant) -> Result<ServerAddress, CallError> {
        let reply_deadline = until.min(Instant::now() + REPLY_TIMEOUT);
        let mut queries: FuturesUnordered<_> =
            self.sentinels.iter().map(|sentinel| query_sentinel(sentinel, &self.master_name, until)).collect();
        let mut votes: HashMap<ServerAddress, usize> = HashMap::new();
        let mut last_error = CallError::from_kind(CallErrorKind::Configuration);
        loop {
            let limit = if votes.is_empty() { until } else { reply_deadline };
            let Ok(Some(answer)) = timeout_at(limit, queries.next()).await else { break };
            match answer {
                Ok(address) => {
                    let count = votes.entry(address.clone()).or_default();
                    *count += 1;
                    if *count * 2 > self.sentinels.len() {
                        return Ok(address);
                    }
                }
                Err(error) => last_error = error,
            }
        }
        // Too few sentinels replied, or they disagree, as during a failover.
        votes.into_iter().max_by_key(|(_, count)| *count).map(|(address, _)| address).ok_or(last_error)
    }
}

/// Asks a sentinel for the address of the primary.
async fn query_sentinel(sentinel: &Connection, master_name: &str, until: Instant) -> Result<ServerAddress, CallError> {
    let mut command = redis::cmd("SENTINEL");
    command.arg("get-master-addr-by-name").arg(master_name);
    let reply = sentinel.send_one(command, until).await?;
    let value = reply.map_err(|error| CallError::from(&error).for_discovery("SENTINEL"))?;
    let address: Option<(String, u16)> =
        redis::from_redis_value(value).map_err(|_| CallError::configuration("SENTINEL"))?;
    // None: the sentinel does not know the master name.
    let (host, port) = address.ok_or_else(|| CallError::configuration("no such primary"))?;
    Ok(ServerAddress { host, port })
}

/// Queries the sentinels at intervals, until the group is dropped.
async fn watch_primary(group: Weak<SentinelGroup>) {
    loop {
        tokio::time::sleep(QUERY_INTERVAL).await;
        let Some(group) = group.upgrade() else { return };
        // While no primary is known, calls query the sentinels themselves.
        if group.known_primary().0.is_some() {
            // The result is not used here: the connection logs a failure, and `last_query` records it.
            drop(group.rediscover(Instant::now() + CALL_TIMEOUT).await);
        }
    }
}
