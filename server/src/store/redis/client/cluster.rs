//! A Redis Cluster: each command goes to the primary that serves its slot. Commands follow redirections.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, LazyLock, Mutex, PoisonError},
    time::Duration,
};

use crc::{CRC_16_XMODEM, Crc};
use futures::{StreamExt, future::join_all, stream::FuturesUnordered};
use redis::{Arg, Cmd, ConnectionInfo, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, sleep_until, timeout_at},
};

use super::{
    super::{RETRY_PAUSE, Scripts},
    connection::{Connection, Peer, Reply},
    error::{CallError, CallErrorKind},
    node::Node,
    url::Address,
};
use crate::domain::ports::Replication;

/// The hash of the Redis Cluster specification, "Key distribution model".
static CRC: LazyLock<Crc<u16>> = LazyLock::new(|| Crc::<u16>::new(&CRC_16_XMODEM));
const SLOTS: u16 = 16_384;
/// If the queried nodes do not return the slot map within this time, further nodes are queried too.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// How many nodes are queried for the slot map at a time.
const NODES_PER_QUERY: usize = 3;
/// The wait before a command is sent again grows by this step up to `MAX_RETRY_PAUSE`. The first `IMMEDIATE_RETRIES` retries
/// do not wait.
const RETRY_STEP: Duration = Duration::from_millis(10);
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(50);
const IMMEDIATE_RETRIES: u32 = 2;

/// The nodes of a cluster and the map of slots.
pub(super) struct Cluster {
    seeds: Vec<Connection>,
    /// The settings of every node; only the address differs.
    node_settings: ConnectionInfo,
    scripts: Arc<Scripts>,
    map: Mutex<SlotMap>,
    /// When the slot map was last queried, and the outcome.
    last_query: AsyncMutex<Option<(Instant, Result<(), CallError>)>>,
}

#[derive(Default)]
struct SlotMap {
    /// By the first slot of a range: the last slot and the primary.
    ranges: BTreeMap<u16, (u16, Address)>,
    /// Slots that moved since the ranges were queried.
    moved: HashMap<u16, Address>,
    nodes: HashMap<Address, Arc<Node>>,
    stale: bool,
    /// Counts queries for the map, so that each starts with another node.
    queries: usize,
}

/// A command and its routing state.
struct RoutedCommand {
    /// The command's index in the call.
    index: usize,
    slot: u16,
    command: Cmd,
    redirect: Option<Redirect>,
}

/// A redirection by a node.
enum Redirect {
    /// MOVED: for all commands from now on.
    Moved(Address),
    /// ASK: for this command only, while its slot migrates.
    Ask(Address),
}

// === impl Cluster ===

impl Cluster {
    pub(super) fn new(seeds: Vec<ConnectionInfo>, like: ConnectionInfo, scripts: &Arc<Scripts>) -> Self {
        Self {
            seeds: seeds.into_iter().map(|seed| Connection::new(seed, Peer::Discovery)).collect(),
            node_settings: like,
            scripts: Arc::clone(scripts),
            map: Mutex::default(),
            last_query: AsyncMutex::default(),
        }
    }

    /// Sends each command to its node. Returns a value for each, or the first error.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, CallError> {
        let orders = commands.cmd_iter().enumerate().map(|(place, command)| RoutedCommand::new(place, command.clone()));
        self.send_routed(orders.collect(), false, until).await.map(|(values, _)| values)
    }

    /// Like `send`, for one command. If its node has replicas, waits up to 100 ms for one to acknowledge the write.
    pub(super) async fn send_replicated(
        &self,
        command: Cmd,
        until: Instant,
    ) -> Result<(Value, Replication), CallError> {
        let (mut values, carried) = self.send_routed(vec![RoutedCommand::new(0, command)], true, until).await?;
        Ok((values.pop().ok_or_else(CallError::unexpected_reply)?, carried))
    }

    /// Sends the same commands to every primary, one after the other. Returns the replies of each.
    pub(super) async fn send_to_all(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Vec<Reply>>, CallError> {
        self.rediscover_if_stale(until).await?;
        let primaries: Vec<_> = {
            let mut map = self.map();
            let mut addresses: Vec<Address> = map.ranges.values().map(|(_, address)| address.clone()).collect();
            addresses.sort_by(|a, b| (&a.host, a.port).cmp(&(&b.host, b.port)));
            addresses.dedup();
            addresses.iter().map(|address| self.node(&mut map, address)).collect()
        };
        let mut answers = Vec::new();
        for primary in primaries {
            answers.push(primary.send(commands, until).await?);
        }
        Ok(answers)
    }

    /// Sends commands, and sends one again only if its node reports that it did nothing.
    async fn send_routed(
        &self,
        mut orders: Vec<RoutedCommand>,
        replicated: bool,
        until: Instant,
    ) -> Result<(Vec<Value>, Replication), CallError> {
        let mut answers: Vec<Option<Result<Value, CallError>>> = orders.iter().map(|_| None).collect();
        let mut carried = Replication::Complete;
        for turn in 0.. {
            self.rediscover_if_stale(until).await?;
            let mut groups: HashMap<(Address, bool), Vec<RoutedCommand>> = HashMap::new();
            for order in orders.drain(..) {
                match self.route(&order) {
                    Some(way) => groups.entry(way).or_default().push(order),
                    None => answers[order.index] = Some(Err(CallError::slot_unserved())),
                }
            }
            let sent = groups.into_iter().map(|((to, asking), orders)| async move {
                let (said, carried) = self.send_group(&to, asking, &orders, replicated, until).await;
                (to, orders, said, carried)
            });
            for (to, group, said, how) in join_all(sent).await {
                if how == Replication::Unconfirmed {
                    carried = how;
                }
                match said {
                    Err(fault) => {
                        self.mark_stale();
                        for order in group {
                            answers[order.index] = Some(Err(fault.clone()));
                        }
                    }
                    Ok(said) => {
                        for (order, answer) in group.into_iter().zip(said) {
                            match answer {
                                Ok(value) => answers[order.index] = Some(Ok(value)),
                                Err(error) => match self.retry(&to, order, &error) {
                                    Ok(order) => orders.push(order),
                                    Err(place) => answers[place] = Some(Err(CallError::from(&error))),
                                },
                            }
                        }
                    }
                }
            }
            if orders.is_empty() {
                break;
            }
            if turn >= IMMEDIATE_RETRIES {
                let next = Instant::now() + MAX_RETRY_PAUSE.min(RETRY_STEP * (turn - IMMEDIATE_RETRIES + 1));
                if next >= until {
                    return Err(CallError::slot_unserved());
                }
                sleep_until(next).await;
            }
        }
        let values = answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(CallError::unexpected_reply())));
        Ok((values.collect::<Result<_, _>>()?, carried))
    }

    async fn send_group(
        &self,
        to: &Address,
        asking: bool,
        orders: &[RoutedCommand],
        replicated: bool,
        until: Instant,
    ) -> (Result<Vec<Reply>, CallError>, Replication) {
        let node = self.node(&mut self.map(), to);
        let mut commands = Pipeline::new();
        for order in orders {
            if asking {
                commands.cmd("ASKING");
            }
            commands.add_command(order.command.clone());
        }
        let (said, carried) = if replicated {
            match node.send_replicated(commands, until).await {
                Ok((said, carried)) => (Ok(said), carried),
                Err(fault) => (Err(fault), Replication::Unconfirmed),
            }
        } else {
            (node.send(&commands, until).await, Replication::Complete)
        };
        // Without the replies to ASKING.
        let said =
            said.map(|said| said.into_iter().skip(usize::from(asking)).step_by(1 + usize::from(asking)).collect());
        (said, carried)
    }

    /// The node for a command, and whether the command needs ASKING.
    fn route(&self, order: &RoutedCommand) -> Option<(Address, bool)> {
        match &order.redirect {
            Some(Redirect::Ask(to)) => Some((to.clone(), true)),
            Some(Redirect::Moved(to)) => Some((to.clone(), false)),
            None => self.map().primary(order.slot).cloned().map(|to| (to, false)),
        }
    }

    /// The command to send again, if its node did nothing and a retry can succeed. Otherwise its index.
    fn retry(&self, at: &Address, mut order: RoutedCommand, error: &RedisError) -> Result<RoutedCommand, usize> {
        use redis::ErrorKind::Server;

        let redirect = || error.redirect_node().and_then(|(to, _)| Address::parse(to, &at.host));
        order.redirect = match (error.kind(), redirect()) {
            (Server(ServerErrorKind::Moved), Some(to)) => {
                let mut map = self.map();
                map.moved.insert(order.slot, to.clone());
                map.stale = true;
                Some(Redirect::Moved(to))
            }
            (Server(ServerErrorKind::Ask), Some(to)) => Some(Redirect::Ask(to)),
            // Some of the command's keys have migrated and some have not. This lasts only a moment.
            (Server(ServerErrorKind::TryAgain), _) => None,
            _ if is_key_migrated(error) => None,
            (Server(ServerErrorKind::ClusterDown | ServerErrorKind::ReadOnly), _) => {
                self.mark_stale();
                return Err(order.index);
            }
            _ => return Err(order.index),
        };
        Ok(order)
    }

    pub(super) fn mark_stale(&self) {
        self.map().stale = true;
    }

    fn map(&self) -> std::sync::MutexGuard<'_, SlotMap> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn node(&self, map: &mut SlotMap, at: &Address) -> Arc<Node> {
        if let Some(node) = map.nodes.get(at) {
            return Arc::clone(node);
        }
        let end = Peer::Server(Arc::clone(&self.scripts));
        let node = Arc::new(Node::new(at.with_settings_of(&self.node_settings), end, &self.scripts));
        map.nodes.insert(at.clone(), Arc::clone(&node));
        node
    }

    async fn rediscover_if_stale(&self, until: Instant) -> Result<(), CallError> {
        let (is_known, is_doubtful) = {
            let map = self.map();
            (!map.ranges.is_empty(), map.stale)
        };
        if is_known && !is_doubtful {
            return Ok(());
        }
        // Silent nodes must leave time to call the others.
        let limit = if is_known { until.min(Instant::now() + 2 * REPLY_TIMEOUT) } else { until };
        let outcome = self.rediscover(is_known, limit).await;
        // An old map is better than none: nodes that did not return a map may still serve their slots.
        if is_known { Ok(()) } else { outcome }
    }

    /// Queries the slot map. One call does this; others use the known map, or wait if there is none.
    async fn rediscover(&self, is_known: bool, until: Instant) -> Result<(), CallError> {
        let mut last_query = match self.last_query.try_lock() {
            Ok(last_query) => last_query,
            Err(_) if is_known => return Ok(()),
            Err(_) => timeout_at(until, self.last_query.lock())
                .await
                .map_err(|_| CallError::from_kind(CallErrorKind::Deadline))?,
        };
        if let Some((at, outcome)) = &*last_query
            && at.elapsed() < RETRY_PAUSE
        {
            return outcome.clone();
        }
        // A failure from here on sets `doubtful` again.
        self.map().stale = false;
        let outcome = self.query_slots(until).await;
        if outcome.is_err() {
            self.mark_stale();
        }
        *last_query = Some((Instant::now(), outcome.clone()));
        outcome
    }

    /// Queries nodes for the map, a few at a time. The first valid map counts; MOVED corrects outdated entries.
    async fn query_slots(&self, until: Instant) -> Result<(), CallError> {
        let nodes: Vec<Arc<Node>> = {
            let mut map = self.map();
            map.queries += 1;
            let mut nodes: Vec<_> = map.nodes.values().cloned().collect();
            if !nodes.is_empty() {
                let first = map.queries % nodes.len();
                nodes.rotate_left(first);
            }
            nodes
        };
        let lines: Vec<&Connection> = nodes.iter().map(|node| node.shared()).chain(&self.seeds).collect();
        let mut fault = CallError::from_kind(CallErrorKind::Deadline);
        let mut further = lines.chunks(NODES_PER_QUERY);
        let mut answers = FuturesUnordered::new();
        loop {
            if let Some(lines) = further.next() {
                answers.extend(lines.iter().map(|line| query_node(line, until)));
            } else if answers.is_empty() || Instant::now() >= until {
                return Err(fault);
            }
            let limit = until.min(Instant::now() + REPLY_TIMEOUT);
            while let Ok(Some(answer)) = timeout_at(limit, answers.next()).await {
                match answer {
                    Ok(ranges) => {
                        self.map().replace(ranges);
                        return Ok(());
                    }
                    Err(error) => fault = error,
                }
            }
        }
    }
}

/// A script failed because a key migrated while it ran. All scripts can run again: at worst a limit counts twice.
fn is_key_migrated(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("attempted to access a non local key"))
}

/// Queries one node for its slot map.
async fn query_node(line: &Connection, until: Instant) -> Result<BTreeMap<u16, (u16, Address)>, CallError> {
    let mut commands = Pipeline::new();
    commands.cmd("CLUSTER").arg("SLOTS");
    let answer = line.send(&commands, until).await?.pop().ok_or_else(CallError::unexpected_reply)?;
    let answer = answer.map_err(|error| CallError::from(&error).for_discovery("CLUSTER SLOTS"))?;
    let asked = Address::of(line.info()).map(|address| address.host).unwrap_or_default();
    let ranges = parse_slots(answer, &asked).ok_or_else(|| CallError::configuration("CLUSTER SLOTS"))?;
    // A new node that has not met the other nodes yet.
    if ranges.is_empty() { Err(CallError::slot_unserved()) } else { Ok(ranges) }
}

fn parse_slots(slots: Value, asked: &str) -> Option<BTreeMap<u16, (u16, Address)>> {
    let slots: Vec<Vec<Value>> = redis::from_redis_value(slots).ok()?;
    let mut ranges = BTreeMap::new();
    for range in slots {
        let mut range = range.into_iter();
        let first: u16 = redis::from_redis_value(range.next()?).ok()?;
        let last: u16 = redis::from_redis_value(range.next()?).ok()?;
        let Some(primary) = range.next() else { continue };
        let primary: Vec<Value> = redis::from_redis_value(primary).ok()?;
        let mut primary = primary.into_iter();
        let host: Option<String> = redis::from_redis_value(primary.next()?).ok()?;
        let port: u16 = redis::from_redis_value(primary.next()?).ok()?;
        let host = match host.as_deref() {
            // The host that was queried, by the documentation of CLUSTER SLOTS.
            None | Some("") => asked.to_owned(),
            // The node must be called by a hostname, but has none configured.
            Some("?") => continue,
            Some(host) => host.to_owned(),
        };
        ranges.insert(first, (last, Address { host, port }));
    }
    Some(ranges)
}

// === impl SlotMap ===

impl SlotMap {
    fn primary(&self, slot: u16) -> Option<&Address> {
        self.moved.get(&slot).or_else(|| {
            let (_, (last, owner)) = self.ranges.range(..=slot).next_back()?;
            (slot <= *last).then_some(owner)
        })
    }

    fn replace(&mut self, ranges: BTreeMap<u16, (u16, Address)>) {
        self.nodes.retain(|address, _| ranges.values().any(|(_, owner)| owner == address));
        self.moved.clear();
        self.ranges = ranges;
    }
}

// === impl RoutedCommand ===

impl RoutedCommand {
    fn new(place: usize, command: Cmd) -> Self {
        // A command without a key can go to any node.
        let slot = first_key(&command).map(key_slot).unwrap_or_default();
        Self { index: place, slot, command, redirect: None }
    }
}

/// The first key. All keys of a command are in one slot.
fn first_key(command: &Cmd) -> Option<&[u8]> {
    let mut arguments = command.args_iter().filter_map(|argument| match argument {
        Arg::Simple(argument) => Some(argument),
        _ => None,
    });
    // The script's hash and the number of keys come first.
    let skipped = if arguments.next()? == b"EVALSHA" { 2 } else { 0 };
    arguments.nth(skipped)
}

/// The slot of a key, by the Redis Cluster specification, "Hash tags".
fn key_slot(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|byte| *byte == b'{')?;
        let tag = &key[open + 1..];
        let close = tag.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &tag[..close])
    };
    CRC.checksum(tag().unwrap_or(key)) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> Address {
        Address { host: host.to_owned(), port }
    }

    #[test]
    fn a_key_has_the_slot_that_redis_computes() {
        // Expected values from CLUSTER KEYSLOT.
        for (key, slot) in [
            ("123456789", 12739),
            ("foo", 12182),
            ("{user1000}.following", 3443),
            ("{user1000}.followers", 3443),
            ("foo{}{bar}", 8363),
            ("foo{{bar}}zap", 4015),
            ("foo{bar}{zap}", 5061),
            ("", 0),
        ] {
            assert_eq!(key_slot(key.as_bytes()), slot, "{key}");
        }
        assert_eq!(key_slot(b"bar"), key_slot(b"x{bar}y"));
    }

    #[test]
    fn a_script_is_routed_by_its_first_key() {
        let mut call = redis::cmd("EVALSHA");
        call.arg("hash").arg(2).arg("lk:{a:b}:x").arg("lk:{a:b}:y").arg("argument");
        assert_eq!(first_key(&call), Some(&b"lk:{a:b}:x"[..]));
        let mut get = redis::cmd("GETDEL");
        get.arg("lk:{a:c}:code");
        assert_eq!(first_key(&get), Some(&b"lk:{a:c}:code"[..]));
        assert_eq!(first_key(&redis::cmd("PING")), None);
    }

    #[test]
    fn a_slot_map_is_parsed_with_and_without_host_names() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let range = |first, last, host, port| {
            let node = Value::Array(vec![host, Value::Int(port), text("id"), Value::Array(Vec::new())]);
            Value::Array(vec![Value::Int(first), Value::Int(last), node.clone(), node])
        };
        let slots = Value::Array(vec![
            range(0, 99, text("10.0.0.1"), 1),
            range(200, 299, Value::Nil, 2),
            range(300, 399, text(""), 3),
            range(400, 499, text("?"), 4),
        ]);
        let mut map = SlotMap::default();
        map.replace(parse_slots(slots, "asked").unwrap());
        assert_eq!(map.primary(0), Some(&address("10.0.0.1", 1)));
        assert_eq!(map.primary(99), Some(&address("10.0.0.1", 1)));
        assert_eq!(map.primary(100), None);
        assert_eq!(map.primary(250), Some(&address("asked", 2)));
        assert_eq!(map.primary(399), Some(&address("asked", 3)));
        assert_eq!(map.primary(400), None);
        map.moved.insert(42, address("10.0.0.9", 9));
        assert_eq!(map.primary(42), Some(&address("10.0.0.9", 9)));
        assert!(parse_slots(Value::Okay, "asked").is_none());
    }
}
