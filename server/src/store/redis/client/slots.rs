//! The slots of a Redis Cluster: the slot of a command's key, and which primary serves which slot.

use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

use crc::{CRC_16_XMODEM, Crc};
use redis::{Arg, Cmd, Value};

use super::address::ServerAddress;

/// The hash function of the Redis Cluster specification, "Key distribution model".
static CRC: LazyLock<Crc<u16>> = LazyLock::new(|| Crc::<u16>::new(&CRC_16_XMODEM));
const SLOTS: u16 = 16_384;

/// Maps the first slot of each range to the last slot and the primary of the range.
pub(super) type SlotRanges = BTreeMap<u16, (u16, ServerAddress)>;

/// The primary of each slot.
#[derive(Default)]
pub(super) struct SlotMap {
    ranges: SlotRanges,
    /// The new primaries of slots that moved after the ranges were queried.
    moved: HashMap<u16, ServerAddress>,
}

// === impl SlotMap ===

impl SlotMap {
    /// Whether no ranges are known yet.
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn primary(&self, slot: u16) -> Option<&ServerAddress> {
        self.moved.get(&slot).or_else(|| {
            let (_, (last, primary)) = self.ranges.range(..=slot).next_back()?;
            (slot <= *last).then_some(primary)
        })
    }

    /// Returns the primaries of all ranges, each once.
    pub(super) fn primaries(&self) -> Vec<ServerAddress> {
        let mut primaries: Vec<ServerAddress> = self.ranges.values().map(|(_, primary)| primary.clone()).collect();
        primaries.sort_by(|a, b| (&a.host, a.port).cmp(&(&b.host, b.port)));
        primaries.dedup();
        primaries
    }

    pub(super) fn record_move(&mut self, slot: u16, to: ServerAddress) {
        self.moved.insert(slot, to);
    }

    pub(super) fn replace(&mut self, ranges: SlotRanges) {
        self.moved.clear();
        self.ranges = ranges;
    }
}

/// Returns the slot of a command. A command without a key gets slot 0, because it can go to any node.
pub(super) fn command_slot(command: &Cmd) -> u16 {
    first_key(command).map(key_slot).unwrap_or_default()
}

/// Returns the first key of a command. All keys of a command are in one slot.
fn first_key(command: &Cmd) -> Option<&[u8]> {
    let mut arguments = command.args_iter().filter_map(|argument| match argument {
        Arg::Simple(argument) => Some(argument),
        _ => None,
    });
    // After EVALSHA, the script's hash and the number of keys come before the first key.
    let skipped = if arguments.next()? == b"EVALSHA" { 2 } else { 0 };
    arguments.nth(skipped)
}

/// Returns the slot of a key, by the Redis Cluster specification, "Hash tags".
fn key_slot(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|byte| *byte == b'{')?;
        let tag = &key[open + 1..];
        let close = tag.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &tag[..close])
    };
    CRC.checksum(tag().unwrap_or(key)) % SLOTS
}

/// Parses the reply of a node to CLUSTER SLOTS. `node_host` is the host of this node.
pub(super) fn parse_slots(slots: Value, node_host: &str) -> Option<SlotRanges> {
    let slots: Vec<Vec<Value>> = redis::from_redis_value(slots).ok()?;
    let mut ranges = SlotRanges::new();
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
            // No host means the host that was queried (documentation of CLUSTER SLOTS).
            None | Some("") => node_host.to_owned(),
            // The cluster requires hostnames, but none is configured for this node, so its address is unknown.
            Some("?") => continue,
            Some(host) => host.to_owned(),
        };
        ranges.insert(first, (last, ServerAddress { host, port }));
    }
    Some(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> ServerAddress {
        ServerAddress { host: host.to_owned(), port }
    }

    #[test]
    fn a_key_has_the_slot_that_redis_computes() {
        // The expected slots are the results of CLUSTER KEYSLOT.
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
        map.record_move(42, address("10.0.0.9", 9));
        assert_eq!(map.primary(42), Some(&address("10.0.0.9", 9)));
        assert!(parse_slots(Value::Okay, "asked").is_none());
    }
}
