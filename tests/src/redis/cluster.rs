//! A real Redis Cluster: three masters that share the slots, with replicas if a test needs them.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use redis::aio::MultiplexedConnection;

use super::{Options, Redis, poll_until};

/// Time limit for the nodes to agree, and for the replicas to connect. Both take a few seconds, longer on a loaded
/// machine.
const SETUP_LIMIT: Duration = Duration::from_secs(60);
/// Number of slots of a Redis Cluster.
const SLOTS: u16 = 16_384;
const MASTERS: usize = 3;
/// How long a node waits until it considers another node down, in milliseconds. A cluster without replicas uses the
/// default of Redis (15 s): no replica can take over, so a node that a loaded machine delays must not count as down.
const NODE_TIMEOUT_WITH_REPLICAS: &str = "2000";
/// After this time, nodes that do not know each other are introduced again. Redis forgets an introduction that is not
/// answered within the node timeout.
const MEET_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Three masters that share the slots.
pub struct RedisCluster {
    pub masters: Vec<Redis>,
    /// One replica for each master, in the same order; empty without replicas.
    pub replicas: Vec<Redis>,
    password: Option<String>,
}

// === impl RedisCluster ===

impl RedisCluster {
    pub async fn start() -> Result<Self> {
        Self::start_with(&Options::for_tests(), false).await
    }

    /// Starts a cluster in which each node has these settings, except folder and socket address. If `replicated` is
    /// set, each master has one replica.
    pub async fn start_with(options: &Options, replicated: bool) -> Result<Self> {
        let mut options = Options { cluster: true, ..options.clone() };
        if replicated {
            options.settings.push(("cluster-node-timeout".to_owned(), NODE_TIMEOUT_WITH_REPLICAS.to_owned()));
        }
        let node = async || Redis::start(options.with_new_location()).await;
        let (mut masters, mut replicas) = (Vec::new(), Vec::new());
        for _ in 0..MASTERS {
            masters.push(node().await?);
            if replicated {
                replicas.push(node().await?);
            }
        }
        let (share, mut first) = (SLOTS / 3, 0);
        for (index, master) in masters.iter().enumerate() {
            let last = if index == MASTERS - 1 { SLOTS - 1 } else { first + share - 1 };
            let mut connection = master.connect().await?;
            let assign = ["ADDSLOTSRANGE".to_owned(), first.to_string(), last.to_string()];
            redis::cmd("CLUSTER").arg(&assign).query_async::<()>(&mut connection).await?;
            // As in `redis-cli --cluster create`, no two masters have the same epoch, so none of them has to change it.
            let epoch = ["SET-CONFIG-EPOCH".to_owned(), (index + 1).to_string()];
            redis::cmd("CLUSTER").arg(&epoch).query_async::<()>(&mut connection).await?;
            first = last + 1;
        }
        let this = Self { masters, replicas, password: options.password.clone() };
        this.introduce_nodes().await?;
        let mut introduced = Instant::now();
        poll_until("the nodes of the Redis Cluster agree", SETUP_LIMIT, async || {
            let agree = this.do_nodes_agree().await?;
            if !agree && introduced.elapsed() > MEET_AGAIN_AFTER {
                this.introduce_nodes().await?;
                introduced = Instant::now();
            }
            Ok(agree)
        })
        .await?;
        for (master, replica) in this.masters.iter().zip(&this.replicas) {
            let id: String = redis::cmd("CLUSTER").arg("MYID").query_async(&mut master.connect().await?).await?;
            let replicate = ["REPLICATE", &id];
            redis::cmd("CLUSTER").arg(&replicate).query_async::<()>(&mut replica.connect().await?).await?;
        }
        poll_until("the replicas are connected", SETUP_LIMIT, async || this.are_replicas_connected().await).await?;
        Ok(this)
    }

    /// A URL with one node, from which clients discover the other nodes.
    pub fn url(&self) -> String {
        let master = &self.masters[0];
        format!("{}://{}{}", master.url_scheme("redis-cluster"), master.url_userinfo(), master.addr())
    }

    /// A URL with all nodes, for tests that stop one of them.
    pub fn url_of_all(&self) -> String {
        let master = &self.masters[0];
        let hosts: Vec<String> = self.nodes().map(|node| node.addr().to_string()).collect();
        format!("{}://{}{}", master.url_scheme("redis-cluster"), master.url_userinfo(), hosts.join(","))
    }

    /// The CA file for the nodes' certificates, if the nodes accept only TLS.
    pub fn ca(&self) -> Option<&Path> {
        self.masters[0].ca()
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Redis> {
        self.masters.iter().chain(&self.replicas)
    }

    /// The slot of a key.
    pub async fn slot_of(&self, key: &str) -> Result<u16> {
        let mut connection = self.masters[0].connect().await?;
        Ok(redis::cmd("CLUSTER").arg(&["KEYSLOT", key]).query_async(&mut connection).await?)
    }

    /// The index of the master that considers itself the owner of a slot.
    pub async fn owner(&self, slot: u16) -> Result<usize> {
        for (index, master) in self.masters.iter().enumerate() {
            let mut connection = master.connect().await?;
            let nodes: String = redis::cmd("CLUSTER").arg("NODES").query_async(&mut connection).await?;
            let own_line = nodes.lines().find(|line| line.contains("myself")).context("a node lists itself")?;
            let owns_slot = own_line.split(' ').skip(8).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last) = (first.parse(), last.parse());
                matches!((first, last), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
            });
            if owns_slot {
                return Ok(index);
            }
        }
        anyhow::bail!("no master owns slot {slot}")
    }

    /// Moves a slot and its keys to another master, with the commands of `redis-cli --cluster reshard`, one key at a
    /// time. Returns the number of keys.
    pub async fn move_slot(&self, slot: u16, to: usize) -> Result<usize> {
        let from = self.owner(slot).await?;
        ensure!(from != to, "slot {slot} is on that master already");
        let (mut source, mut target) = (self.masters[from].connect().await?, self.masters[to].connect().await?);
        let (source_id, target_id) = (node_id(&mut source).await?, node_id(&mut target).await?);
        let slot = slot.to_string();
        setslot(&mut target, &[&slot, "IMPORTING", &source_id]).await?;
        setslot(&mut source, &[&slot, "MIGRATING", &target_id]).await?;
        let mut moved = 0;
        loop {
            let keys: Vec<String> =
                redis::cmd("CLUSTER").arg(&["GETKEYSINSLOT", &slot, "1"]).query_async(&mut source).await?;
            let Some(key) = keys.first() else { break };
            let addr = self.masters[to].addr();
            let mut migrate = redis::cmd("MIGRATE");
            migrate.arg(&[&addr.ip().to_string(), &addr.port().to_string(), "", "0", "5000"]);
            if let Some(password) = &self.password {
                migrate.arg(&["AUTH", password]);
            }
            // MIGRATE replies NOKEY if the key has expired after GETKEYSINSLOT.
            migrate.arg(&["KEYS", key]).query_async::<String>(&mut source).await?;
            moved += 1;
        }
        // The new owner must be the first to know that the slot is its own. Otherwise, the two nodes could redirect
        // clients to each other.
        setslot(&mut target, &[&slot, "NODE", &target_id]).await?;
        setslot(&mut source, &[&slot, "NODE", &target_id]).await?;
        for (index, other) in self.masters.iter().enumerate() {
            if index != from && index != to {
                setslot(&mut other.connect().await?, &[&slot, "NODE", &target_id]).await?;
            }
        }
        Ok(moved)
    }

    /// Introduces all nodes to the first node, from which they learn about each other.
    async fn introduce_nodes(&self) -> Result<()> {
        let mut connection = self.masters[0].connect().await?;
        for other in self.nodes().skip(1) {
            let bus: Vec<String> =
                redis::cmd("CONFIG").arg(&["GET", "cluster-port"]).query_async(&mut other.connect().await?).await?;
            let bus = bus.get(1).context("a cluster's member has a bus port")?;
            let meet = ["MEET", &other.addr().ip().to_string(), &other.addr().port().to_string(), bus];
            redis::cmd("CLUSTER").arg(&meet).query_async::<()>(&mut connection).await?;
        }
        Ok(())
    }

    async fn do_nodes_agree(&self) -> Result<bool> {
        let expected_count = format!("cluster_known_nodes:{}", self.nodes().count());
        for node in self.nodes() {
            let info: String = redis::cmd("CLUSTER").arg("INFO").query_async(&mut node.connect().await?).await?;
            if !info.contains("cluster_state:ok") || !info.contains(&expected_count) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn are_replicas_connected(&self) -> Result<bool> {
        for (master, replica) in self.masters.iter().zip(&self.replicas) {
            let info = async |node: &Redis| -> Result<String> {
                let mut connection = node.connect().await?;
                Ok(redis::cmd("INFO").arg("replication").query_async(&mut connection).await?)
            };
            if !info(master).await?.contains("connected_slaves:1")
                || !info(replica).await?.contains("master_link_status:up")
            {
                return Ok(false);
            }
            // Every node must list the replicas.
            for node in self.nodes() {
                let mut connection = node.connect().await?;
                let nodes: String = redis::cmd("CLUSTER").arg("NODES").query_async(&mut connection).await?;
                if nodes.lines().filter(|line| line.contains("slave")).count() != self.replicas.len() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

async fn node_id(node: &mut MultiplexedConnection) -> Result<String> {
    Ok(redis::cmd("CLUSTER").arg("MYID").query_async(node).await?)
}

async fn setslot(node: &mut MultiplexedConnection, arguments: &[&str]) -> Result<()> {
    Ok(redis::cmd("CLUSTER").arg("SETSLOT").arg(arguments).query_async(node).await?)
}
