//! A Redis Cluster: each command goes to the primary that serves its slot. Commands follow redirections.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::{StreamExt, future::join_all, stream::FuturesUnordered};
use parking_lot::Mutex;
use redis::{Cmd, ConnectionInfo, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, sleep_until, timeout_at},
};

use super::{
    super::scripts::Scripts,
    address::ServerAddress,
    connection::{Connection, Peer},
    error::{CallError, CallErrorKind},
    node::Node,
    reply::Reply,
    slots::{SlotMap, SlotRanges, command_slot, parse_slots},
    timeouts::RETRY_PAUSE,
};
use crate::domain::ports::Replication;

/// If the queried nodes do not return the slot map within this time, further nodes are queried too.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// How many nodes are queried for the slot map at a time.
const NODES_PER_QUERY: usize = 3;
/// The wait before a command is sent again grows by this step up to `MAX_RETRY_PAUSE`. The first `IMMEDIATE_RETRIES`
/// retries do not wait.
const RETRY_STEP: Duration = Duration::from_millis(10);
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(50);
const IMMEDIATE_RETRIES: u32 = 2;

/// The nodes of a cluster and the map of slots.
pub(super) struct Cluster {
    seeds: Vec<Connection>,
    /// The settings of every node; only the address differs.
    node_settings: ConnectionInfo,
    scripts: Arc<Scripts>,
    state: Mutex<ClusterState>,
    /// When the slot map was last queried, and the outcome.
    last_query: AsyncMutex<Option<(Instant, Result<(), CallError>)>>,
}

#[derive(Default)]
struct ClusterState {
    slots: SlotMap,
    nodes: HashMap<ServerAddress, Arc<Node>>,
    /// Whether a call has failed, or a slot has moved, since the slot map was last queried.
    is_stale: bool,
    /// Counts queries for the slot map, so that each query starts with a different node.
    queries: usize,
}

/// A call of one or more commands: the commands that still must be sent, and the results so far.
struct RoutedCall {
    pending: Vec<RoutedCommand>,
    /// The results so far, by the command's index.
    results: Vec<Option<Result<Value, CallError>>>,
    replication: Replication,
}

/// A command, and what decides to which node it is sent.
struct RoutedCommand {
    /// The command's index in the call.
    index: usize,
    slot: u16,
    command: Cmd,
    redirect: Option<Redirect>,
}

/// A redirection by a node.
enum Redirect {
    /// MOVED: from now on, all commands for the slot go to this node.
    Moved(ServerAddress),
    /// ASK: only this command goes to this node, because its slot is being migrated.
    Ask(ServerAddress),
}

/// The node for a command, and whether ASKING must be sent before the command.
type Route = (ServerAddress, bool);

// === impl Cluster ===

impl Cluster {
    pub(super) fn new(seeds: Vec<ConnectionInfo>, node_settings: ConnectionInfo, scripts: &Arc<Scripts>) -> Self {
        Self {
            seeds: seeds.into_iter().map(|seed| Connection::new(seed, Peer::Discovery)).collect(),
            node_settings,
            scripts: Arc::clone(scripts),
            state: Mutex::default(),
            last_query: AsyncMutex::default(),
        }
    }

    /// Sends each command to its node. Returns a value for each command, or the first error.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, CallError> {
        let call = RoutedCall::new(commands.cmd_iter().cloned());
        self.send_routed(call, false, until).await.map(|(values, _)| values)
    }

    /// Like `send`, for one command. If its node has replicas, waits up to 100 ms for one of them to acknowledge the
    /// write.
    pub(super) async fn send_replicated(
        &self,
        command: Cmd,
        until: Instant,
    ) -> Result<(Value, Replication), CallError> {
        let call = RoutedCall::new(std::iter::once(command));
        let (mut values, replication) = self.send_routed(call, true, until).await?;
        Ok((values.pop().ok_or_else(CallError::unexpected_reply)?, replication))
    }

    /// Sends the same commands to every primary, one after the other. Returns the replies of each primary.
    pub(super) async fn send_to_all(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Vec<Reply>>, CallError> {
        self.rediscover_if_stale(until).await?;
        let primaries: Vec<_> = {
            let mut state = self.state.lock();
            state.slots.primaries().iter().map(|address| self.node(&mut state, address)).collect()
        };
        let mut replies = Vec::new();
        for primary in primaries {
            replies.push(primary.send(commands, until).await?);
        }
        Ok(replies)
    }

    /// Sends the commands of a call. Sends a command again only if its node reports that the command was not executed,
    /// or that a key of a script migrated while the script ran ([`is_key_migrated`]).
    async fn send_routed(
        &self,
        mut call: RoutedCall,
        waits_for_replica: bool,
        until: Instant,
    ) -> Result<(Vec<Value>, Replication), CallError> {
        for attempt in 0.. {
            self.rediscover_if_stale(until).await?;
            let groups = self.group_by_route(&mut call);
            let sent = groups.into_iter().map(|((node, needs_asking), group)| async move {
                let (replies, replication) =
                    self.send_group(&node, needs_asking, &group, waits_for_replica, until).await;
                (node, group, replies, replication)
            });
            for (node, group, replies, replication) in join_all(sent).await {
                if replication == Replication::Unconfirmed {
                    call.replication = replication;
                }
                self.apply_replies(&mut call, &node, group, replies);
            }
            if call.pending.is_empty() {
                break;
            }
            if attempt >= IMMEDIATE_RETRIES {
                let next = Instant::now() + MAX_RETRY_PAUSE.min(RETRY_STEP * (attempt - IMMEDIATE_RETRIES + 1));
                if next >= until {
                    return Err(CallError::slot_unserved());
                }
                sleep_until(next).await;
            }
        }
        call.into_values()
    }

    /// Takes the pending commands out of the call, and groups them. The commands of a group have the same route and
    /// share a pipeline.
    fn group_by_route(&self, call: &mut RoutedCall) -> HashMap<Route, Vec<RoutedCommand>> {
        let mut groups: HashMap<Route, Vec<RoutedCommand>> = HashMap::new();
        for command in std::mem::take(&mut call.pending) {
            match self.route(&command) {
                Some(route) => groups.entry(route).or_default().push(command),
                None => call.results[command.index] = Some(Err(CallError::slot_unserved())),
            }
        }
        groups
    }

    fn route(&self, command: &RoutedCommand) -> Option<Route> {
        match &command.redirect {
            Some(Redirect::Ask(node)) => Some((node.clone(), true)),
            Some(Redirect::Moved(node)) => Some((node.clone(), false)),
            None => self.state.lock().slots.primary(command.slot).cloned().map(|node| (node, false)),
        }
    }

    async fn send_group(
        &self,
        address: &ServerAddress,
        needs_asking: bool,
        group: &[RoutedCommand],
        waits_for_replica: bool,
        until: Instant,
    ) -> (Result<Vec<Reply>, CallError>, Replication) {
        let node = self.node(&mut self.state.lock(), address);
        let mut commands = Pipeline::new();
        for routed in group {
            if needs_asking {
                commands.cmd("ASKING");
            }
            commands.add_command(routed.command.clone());
        }
        let (replies, replication) = if waits_for_replica {
            match node.send_replicated(commands, until).await {
                Ok((replies, replication)) => (Ok(replies), replication),
                Err(error) => (Err(error), Replication::Unconfirmed),
            }
        } else {
            (node.send(&commands, until).await, Replication::Complete)
        };
        // Leaves out the replies to ASKING.
        let (skipped, step) = if needs_asking { (1, 2) } else { (0, 1) };
        let replies = replies.map(|replies| replies.into_iter().skip(skipped).step_by(step).collect());
        (replies, replication)
    }

    /// Writes the results of a group into the call. Commands that must be sent again become pending.
    fn apply_replies(
        &self,
        call: &mut RoutedCall,
        node: &ServerAddress,
        group: Vec<RoutedCommand>,
        replies: Result<Vec<Reply>, CallError>,
    ) {
        match replies {
            Err(error) => {
                self.mark_stale();
                for command in group {
                    call.results[command.index] = Some(Err(error.clone()));
                }
            }
            Ok(replies) => {
                for (command, reply) in group.into_iter().zip(replies) {
                    match reply {
                        Ok(value) => call.results[command.index] = Some(Ok(value)),
                        Err(error) => match self.prepare_retry(node, command, &error) {
                            Ok(command) => call.pending.push(command),
                            Err(index) => call.results[index] = Some(Err(CallError::from(&error))),
                        },
                    }
                }
            }
        }
    }

    /// Returns `Ok` with the command if a retry is harmless and can succeed, otherwise `Err` with the command's index.
    fn prepare_retry(
        &self,
        node: &ServerAddress,
        mut command: RoutedCommand,
        error: &RedisError,
    ) -> Result<RoutedCommand, usize> {
        use redis::ErrorKind::Server;

        let redirect = || error.redirect_node().and_then(|(to, _)| ServerAddress::parse(to, &node.host));
        command.redirect = match (error.kind(), redirect()) {
            (Server(ServerErrorKind::Moved), Some(to)) => {
                let mut state = self.state.lock();
                state.slots.record_move(command.slot, to.clone());
                state.is_stale = true;
                Some(Redirect::Moved(to))
            }
            (Server(ServerErrorKind::Ask), Some(to)) => Some(Redirect::Ask(to)),
            // Some of the command's keys have migrated and some have not. This lasts only a moment.
            (Server(ServerErrorKind::TryAgain), _) => None,
            _ if is_key_migrated(error) => None,
            (Server(ServerErrorKind::ClusterDown | ServerErrorKind::ReadOnly), _) => {
                self.mark_stale();
                return Err(command.index);
            }
            _ => return Err(command.index),
        };
        Ok(command)
    }

    /// Records that a call failed: the slot map may be outdated.
    pub(super) fn mark_stale(&self) {
        self.state.lock().is_stale = true;
    }

    fn node(&self, state: &mut ClusterState, address: &ServerAddress) -> Arc<Node> {
        if let Some(node) = state.nodes.get(address) {
            return Arc::clone(node);
        }
        let peer = Peer::Server(Arc::clone(&self.scripts));
        let node = Arc::new(Node::new(address.with_settings_of(&self.node_settings), peer, &self.scripts));
        state.nodes.insert(address.clone(), Arc::clone(&node));
        node
    }

    async fn rediscover_if_stale(&self, until: Instant) -> Result<(), CallError> {
        let (has_map, is_stale) = {
            let state = self.state.lock();
            (!state.slots.is_empty(), state.is_stale)
        };
        if has_map && !is_stale {
            return Ok(());
        }
        // Nodes that do not reply must not use up the time of the call.
        let limit = if has_map { until.min(Instant::now() + 2 * REPLY_TIMEOUT) } else { until };
        let outcome = self.rediscover(has_map, limit).await;
        // An old map is better than none: nodes that did not return a map may still serve their slots.
        if has_map { Ok(()) } else { outcome }
    }

    /// Queries the slot map. Only one call at a time queries it. In the meantime, other calls use the known map, or
    /// wait if no map is known.
    async fn rediscover(&self, has_map: bool, until: Instant) -> Result<(), CallError> {
        let mut last_query = match self.last_query.try_lock() {
            Ok(last_query) => last_query,
            Err(_) if has_map => return Ok(()),
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
        self.state.lock().is_stale = false;
        let outcome = self.query_slots(until).await;
        if outcome.is_err() {
            self.mark_stale();
        }
        *last_query = Some((Instant::now(), outcome.clone()));
        outcome
    }

    /// Queries nodes for the slot map, a few at a time, and uses the first valid map. MOVED replies correct outdated
    /// entries of the map.
    async fn query_slots(&self, until: Instant) -> Result<(), CallError> {
        let nodes = self.state.lock().rotated_nodes();
        let connections: Vec<&Connection> = nodes.iter().map(|node| node.shared()).chain(&self.seeds).collect();
        let mut last_error = CallError::from_kind(CallErrorKind::Deadline);
        let mut batches = connections.chunks(NODES_PER_QUERY);
        let mut queries = FuturesUnordered::new();
        loop {
            if let Some(batch) = batches.next() {
                queries.extend(batch.iter().map(|connection| query_node(connection, until)));
            } else if queries.is_empty() || Instant::now() >= until {
                return Err(last_error);
            }
            let limit = until.min(Instant::now() + REPLY_TIMEOUT);
            while let Ok(Some(result)) = timeout_at(limit, queries.next()).await {
                match result {
                    Ok(ranges) => {
                        self.state.lock().replace_slots(ranges);
                        return Ok(());
                    }
                    Err(error) => last_error = error,
                }
            }
        }
    }
}

/// Whether a script failed because a key migrated while the script ran. All scripts can run again: at worst a use of a
/// limit is counted twice.
fn is_key_migrated(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("attempted to access a non local key"))
}

/// Queries one node for the slot map.
async fn query_node(connection: &Connection, until: Instant) -> Result<SlotRanges, CallError> {
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    let reply = connection.send_one(command, until).await?;
    let slots = reply.map_err(|error| CallError::from(&error).for_discovery("CLUSTER SLOTS"))?;
    let node_host = ServerAddress::of(connection.info()).map(|address| address.host).unwrap_or_default();
    let ranges = parse_slots(slots, &node_host).ok_or_else(|| CallError::configuration("CLUSTER SLOTS"))?;
    // Only a new node that has not met the other nodes yet returns an empty map.
    if ranges.is_empty() { Err(CallError::slot_unserved()) } else { Ok(ranges) }
}

// === impl ClusterState ===

impl ClusterState {
    /// Returns the known nodes. Each call of this function returns them in a different order.
    fn rotated_nodes(&mut self) -> Vec<Arc<Node>> {
        self.queries += 1;
        let mut nodes: Vec<_> = self.nodes.values().cloned().collect();
        if !nodes.is_empty() {
            let first = self.queries % nodes.len();
            nodes.rotate_left(first);
        }
        nodes
    }

    /// Uses a new slot map, and drops nodes that serve no slot any more.
    fn replace_slots(&mut self, ranges: SlotRanges) {
        self.nodes.retain(|address, _| ranges.values().any(|(_, primary)| primary == address));
        self.slots.replace(ranges);
    }
}

// === impl RoutedCall ===

impl RoutedCall {
    fn new(commands: impl Iterator<Item = Cmd>) -> Self {
        let pending: Vec<RoutedCommand> =
            commands.enumerate().map(|(index, command)| RoutedCommand::new(index, command)).collect();
        let results = pending.iter().map(|_| None).collect();
        Self { pending, results, replication: Replication::Complete }
    }

    /// Returns the values in the order of the commands, or the first error.
    fn into_values(self) -> Result<(Vec<Value>, Replication), CallError> {
        let results =
            self.results.into_iter().map(|result| result.unwrap_or_else(|| Err(CallError::unexpected_reply())));
        Ok((results.collect::<Result<_, _>>()?, self.replication))
    }
}

// === impl RoutedCommand ===

impl RoutedCommand {
    fn new(index: usize, command: Cmd) -> Self {
        Self { index, slot: command_slot(&command), command, redirect: None }
    }
}
