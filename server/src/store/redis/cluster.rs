//! A Redis Cluster: each command goes to the primary that has its slot, and after it where the slot moves.

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
    PAUSE, Scripts,
    errors::{Fault, FaultKind},
    form::Address,
    line::{Answer, End, Line},
    node::Node,
};
use crate::domain::ports::Carried;

/// The hash of Redis Cluster's specification, "Key distribution model".
static CRC: LazyLock<Crc<u16>> = LazyLock::new(|| Crc::<u16>::new(&CRC_16_XMODEM));
const SLOTS: u16 = 16_384;
/// When nodes that are asked for the map of slots say nothing for so long, others are asked too.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);
/// How many nodes are asked for the map at a time.
const ASKED: usize = 3;
/// The wait before a command is sent again, after so many turns without one.
const TURN: Duration = Duration::from_millis(10);
const LONGEST_TURN: Duration = Duration::from_millis(50);
const TURNS_AT_ONCE: u32 = 2;

/// The nodes of a cluster, and which has what.
pub(super) struct Cluster {
    seeds: Vec<Line>,
    /// Any node, but for its address.
    like: ConnectionInfo,
    scripts: Arc<Scripts>,
    map: Mutex<Map>,
    /// When the map was looked up last, and why it was in vain.
    looked: AsyncMutex<Option<(Instant, Result<(), Fault>)>>,
}

#[derive(Default)]
struct Map {
    /// By the first slot of a range: its last, and who has it.
    ranges: BTreeMap<u16, (u16, Address)>,
    /// Slots that moved since the ranges were looked up.
    moved: HashMap<u16, Address>,
    nodes: HashMap<Address, Arc<Node>>,
    doubtful: bool,
    /// Counts look-ups, so that they begin with another node each.
    number: usize,
}

/// A command on its way.
struct Order {
    /// Among the commands of the call.
    place: usize,
    slot: u16,
    command: Cmd,
    to: Option<Redirect>,
}

/// Where a node says that a slot is.
enum Redirect {
    /// From now on.
    Moved(Address),
    /// For this command: its slot is on the way there.
    Asked(Address),
}

// === impl Cluster ===

impl Cluster {
    pub(super) fn new(seeds: Vec<ConnectionInfo>, like: ConnectionInfo, scripts: &Arc<Scripts>) -> Self {
        Self {
            seeds: seeds.into_iter().map(|seed| Line::new(seed, End::Guide)).collect(),
            like,
            scripts: Arc::clone(scripts),
            map: Mutex::default(),
            looked: AsyncMutex::default(),
        }
    }

    /// Sends each command to its node; an answer for each, or the first error among them.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, Fault> {
        let orders = commands.cmd_iter().enumerate().map(|(place, command)| Order::new(place, command.clone()));
        self.carry_out(orders.collect(), false, until).await.map(|(values, _)| values)
    }

    /// As `send`, for one command; where its node has replicas, waits a while for one to have what it did.
    pub(super) async fn send_replicated(&self, command: Cmd, until: Instant) -> Result<(Value, Carried), Fault> {
        let (mut values, carried) = self.carry_out(vec![Order::new(0, command)], true, until).await?;
        Ok((values.pop().ok_or_else(Fault::unreadable)?, carried))
    }

    /// The same to every primary, one after the other: what each says.
    pub(super) async fn send_to_all(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Vec<Answer>>, Fault> {
        self.look_if_doubtful(until).await?;
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

    /// A command is sent again only where a node says that it did nothing.
    async fn carry_out(
        &self,
        mut orders: Vec<Order>,
        replicated: bool,
        until: Instant,
    ) -> Result<(Vec<Value>, Carried), Fault> {
        let mut answers: Vec<Option<Result<Value, Fault>>> = orders.iter().map(|_| None).collect();
        let mut carried = Carried::Safely;
        for turn in 0.. {
            self.look_if_doubtful(until).await?;
            let mut groups: HashMap<(Address, bool), Vec<Order>> = HashMap::new();
            for order in orders.drain(..) {
                match self.way_of(&order) {
                    Some(way) => groups.entry(way).or_default().push(order),
                    None => answers[order.place] = Some(Err(Fault::slot_unserved())),
                }
            }
            let sent = groups.into_iter().map(|((to, asking), orders)| async move {
                let (said, carried) = self.send_group(&to, asking, &orders, replicated, until).await;
                (to, orders, said, carried)
            });
            for (to, group, said, how) in join_all(sent).await {
                if how == Carried::Unconfirmed {
                    carried = how;
                }
                match said {
                    Err(fault) => {
                        self.doubt();
                        for order in group {
                            answers[order.place] = Some(Err(fault.clone()));
                        }
                    }
                    Ok(said) => {
                        for (order, answer) in group.into_iter().zip(said) {
                            match answer {
                                Ok(value) => answers[order.place] = Some(Ok(value)),
                                Err(error) => match self.next_turn(&to, order, &error) {
                                    Ok(order) => orders.push(order),
                                    Err(place) => answers[place] = Some(Err(Fault::from(&error))),
                                },
                            }
                        }
                    }
                }
            }
            if orders.is_empty() {
                break;
            }
            if turn >= TURNS_AT_ONCE {
                let next = Instant::now() + LONGEST_TURN.min(TURN * (turn - TURNS_AT_ONCE + 1));
                if next >= until {
                    return Err(Fault::slot_unserved());
                }
                sleep_until(next).await;
            }
        }
        let values = answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(Fault::unreadable())));
        Ok((values.collect::<Result<_, _>>()?, carried))
    }

    async fn send_group(
        &self,
        to: &Address,
        asking: bool,
        orders: &[Order],
        replicated: bool,
        until: Instant,
    ) -> (Result<Vec<Answer>, Fault>, Carried) {
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
                Err(fault) => (Err(fault), Carried::Unconfirmed),
            }
        } else {
            (node.send(&commands, until).await, Carried::Safely)
        };
        // Not what is said to ASKING.
        let said =
            said.map(|said| said.into_iter().skip(usize::from(asking)).step_by(1 + usize::from(asking)).collect());
        (said, carried)
    }

    /// Where a command goes, and whether it has been sent there on the way of its slot.
    fn way_of(&self, order: &Order) -> Option<(Address, bool)> {
        match &order.to {
            Some(Redirect::Asked(to)) => Some((to.clone(), true)),
            Some(Redirect::Moved(to)) => Some((to.clone(), false)),
            None => self.map().owner(order.slot).cloned().map(|to| (to, false)),
        }
    }

    /// The command again, where its node did nothing and another or a later try may do; else its place.
    fn next_turn(&self, at: &Address, mut order: Order, error: &RedisError) -> Result<Order, usize> {
        use redis::ErrorKind::Server;

        let redirect = || error.redirect_node().and_then(|(to, _)| Address::parse(to, &at.host));
        order.to = match (error.kind(), redirect()) {
            (Server(ServerErrorKind::Moved), Some(to)) => {
                let mut map = self.map();
                map.moved.insert(order.slot, to.clone());
                map.doubtful = true;
                Some(Redirect::Moved(to))
            }
            (Server(ServerErrorKind::Ask), Some(to)) => Some(Redirect::Asked(to)),
            // Some of the command's keys are on the way and some not yet; it is a matter of moments.
            (Server(ServerErrorKind::TryAgain), _) => None,
            _ if is_torn(error) => None,
            (Server(ServerErrorKind::ClusterDown | ServerErrorKind::ReadOnly), _) => {
                self.doubt();
                return Err(order.place);
            }
            _ => return Err(order.place),
        };
        Ok(order)
    }

    pub(super) fn doubt(&self) {
        self.map().doubtful = true;
    }

    fn map(&self) -> std::sync::MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn node(&self, map: &mut Map, at: &Address) -> Arc<Node> {
        if let Some(node) = map.nodes.get(at) {
            return Arc::clone(node);
        }
        let end = End::Server(Arc::clone(&self.scripts));
        let node = Arc::new(Node::new(at.like(&self.like), end, &self.scripts));
        map.nodes.insert(at.clone(), Arc::clone(&node));
        node
    }

    async fn look_if_doubtful(&self, until: Instant) -> Result<(), Fault> {
        let (is_known, is_doubtful) = {
            let map = self.map();
            (!map.ranges.is_empty(), map.doubtful)
        };
        if is_known && !is_doubtful {
            return Ok(());
        }
        let outcome = self.look(is_known, until).await;
        // An old map is better than none: a node that is not asked for the map may well serve its slots.
        if is_known { Ok(()) } else { outcome }
    }

    /// Looks the map up. One call does; others go on with the map that is known, and wait where there is none.
    async fn look(&self, is_known: bool, until: Instant) -> Result<(), Fault> {
        let mut looked = match self.looked.try_lock() {
            Ok(looked) => looked,
            Err(_) if is_known => return Ok(()),
            Err(_) => timeout_at(until, self.looked.lock()).await.map_err(|_| Fault::of(FaultKind::Deadline))?,
        };
        if let Some((at, outcome)) = &*looked
            && at.elapsed() < PAUSE
        {
            return outcome.clone();
        }
        // What fails from here on is a new doubt.
        self.map().doubtful = false;
        let outcome = self.ask(until).await;
        if outcome.is_err() {
            self.doubt();
        }
        *looked = Some((Instant::now(), outcome.clone()));
        outcome
    }

    /// Asks nodes, a few at a time, for the map; the first good answer counts, and MOVED mends what is old in it.
    async fn ask(&self, until: Instant) -> Result<(), Fault> {
        let nodes: Vec<Arc<Node>> = {
            let mut map = self.map();
            map.number += 1;
            let mut nodes: Vec<_> = map.nodes.values().cloned().collect();
            if !nodes.is_empty() {
                let first = map.number % nodes.len();
                nodes.rotate_left(first);
            }
            nodes
        };
        let lines: Vec<&Line> = nodes.iter().map(|node| node.shared()).chain(&self.seeds).collect();
        let mut fault = Fault::of(FaultKind::Deadline);
        let mut further = lines.chunks(ASKED);
        let mut answers = FuturesUnordered::new();
        loop {
            if let Some(lines) = further.next() {
                answers.extend(lines.iter().map(|line| ask(line, until)));
            } else if answers.is_empty() || Instant::now() >= until {
                return Err(fault);
            }
            let limit = until.min(Instant::now() + ANSWER_LIMIT);
            while let Ok(Some(answer)) = timeout_at(limit, answers.next()).await {
                match answer {
                    Ok(ranges) => {
                        self.map().learn(ranges);
                        return Ok(());
                    }
                    Err(error) => fault = error,
                }
            }
        }
    }
}

/// A script met a key that has left while it ran. Ours may all be run again: at worst a limit counts twice.
fn is_torn(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.contains("attempted to access a non local key"))
}

/// The primaries by slots, as one node knows them.
async fn ask(line: &Line, until: Instant) -> Result<BTreeMap<u16, (u16, Address)>, Fault> {
    let mut commands = Pipeline::new();
    commands.cmd("CLUSTER").arg("SLOTS");
    let answer = line.send(&commands, until).await?.pop().ok_or_else(Fault::unreadable)?;
    let answer = answer.map_err(|error| Fault::from(&error).of_guide("CLUSTER SLOTS"))?;
    let asked = Address::of(line.to()).map(|address| address.host).unwrap_or_default();
    let ranges = ranges(answer, &asked).ok_or_else(|| Fault::configuration("CLUSTER SLOTS"))?;
    // A node that has just come and met nobody yet.
    if ranges.is_empty() { Err(Fault::slot_unserved()) } else { Ok(ranges) }
}

fn ranges(slots: Value, asked: &str) -> Option<BTreeMap<u16, (u16, Address)>> {
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
            // Where the node was asked, so the specification of CLUSTER SLOTS.
            None | Some("") => asked.to_owned(),
            // It is to be called by a name that it was not given.
            Some("?") => continue,
            Some(host) => host.to_owned(),
        };
        ranges.insert(first, (last, Address { host, port }));
    }
    Some(ranges)
}

// === impl Map ===

impl Map {
    fn owner(&self, slot: u16) -> Option<&Address> {
        self.moved.get(&slot).or_else(|| {
            let (_, (last, owner)) = self.ranges.range(..=slot).next_back()?;
            (slot <= *last).then_some(owner)
        })
    }

    fn learn(&mut self, ranges: BTreeMap<u16, (u16, Address)>) {
        self.nodes.retain(|address, _| ranges.values().any(|(_, owner)| owner == address));
        self.moved.clear();
        self.ranges = ranges;
    }
}

// === impl Order ===

impl Order {
    fn new(place: usize, command: Cmd) -> Self {
        // What has no key may go anywhere.
        let slot = key_of(&command).map(slot_of).unwrap_or_default();
        Self { place, slot, command, to: None }
    }
}

/// The first key: all of one command lie in one slot.
fn key_of(command: &Cmd) -> Option<&[u8]> {
    let mut arguments = command.args_iter().filter_map(|argument| match argument {
        Arg::Simple(argument) => Some(argument),
        _ => None,
    });
    // The script and the number of keys come first.
    let skipped = if arguments.next()? == b"EVALSHA" { 2 } else { 0 };
    arguments.nth(skipped)
}

/// Redis Cluster's specification, "Hash tags".
fn slot_of(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|octet| *octet == b'{')?;
        let tag = &key[open + 1..];
        let close = tag.iter().position(|octet| *octet == b'}')?;
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
    fn a_key_lies_where_redis_says() {
        // By CLUSTER KEYSLOT.
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
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        assert_eq!(slot_of(b"bar"), slot_of(b"x{bar}y"));
    }

    #[test]
    fn a_script_goes_where_its_keys_are() {
        let mut call = redis::cmd("EVALSHA");
        call.arg("hash").arg(2).arg("lk:{a:b}:x").arg("lk:{a:b}:y").arg("argument");
        assert_eq!(key_of(&call), Some(&b"lk:{a:b}:x"[..]));
        let mut get = redis::cmd("GETDEL");
        get.arg("lk:{a:c}:code");
        assert_eq!(key_of(&get), Some(&b"lk:{a:c}:code"[..]));
        assert_eq!(key_of(&redis::cmd("PING")), None);
    }

    #[test]
    fn a_map_is_read_with_and_without_names_of_hosts() {
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
        let mut map = Map::default();
        map.learn(ranges(slots, "asked").unwrap());
        assert_eq!(map.owner(0), Some(&address("10.0.0.1", 1)));
        assert_eq!(map.owner(99), Some(&address("10.0.0.1", 1)));
        assert_eq!(map.owner(100), None);
        assert_eq!(map.owner(250), Some(&address("asked", 2)));
        assert_eq!(map.owner(399), Some(&address("asked", 3)));
        assert_eq!(map.owner(400), None);
        map.moved.insert(42, address("10.0.0.9", 9));
        assert_eq!(map.owner(42), Some(&address("10.0.0.9", 9)));
        assert!(ranges(Value::Okay, "asked").is_none());
    }
}
