//! A real Redis primary with replicas and three sentinels. A test can kill the primary.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use redis::aio::MultiplexedConnection;

use super::{Options, Redis, open_connection, poll_until};
use crate::{
    postgres::write_private,
    process::{self, Process, Program},
};

/// The sentinels' name for the primary.
const PRIMARY_NAME: &str = "main";
const SENTINELS: usize = 3;
/// Time limit for the sentinels to discover each other and the replicas, for a failover, and for a replication. Each
/// takes a few seconds, longer on a loaded machine.
const CHANGE_LIMIT: Duration = Duration::from_secs(60);

/// Settings of a primary with sentinels.
pub struct SentinelOptions {
    /// Settings of each server, except folder and socket address.
    pub server: Options,
    pub replicas: usize,
    /// Password of the sentinels.
    pub password: Option<String>,
    /// A sentinel considers the primary down if the primary does not respond for this long.
    pub down_after: Duration,
}

/// A primary, its replicas and its sentinels. All end when this value is dropped.
pub struct SentinelSetup {
    servers: Vec<RestartableServer>,
    sentinels: Vec<Sentinel>,
    url: String,
}

/// A server that can be killed, and restarted with the same socket address.
struct RestartableServer {
    options: Options,
    redis: Mutex<Option<Arc<Redis>>>,
}

struct Sentinel {
    addr: SocketAddr,
    ca: Option<PathBuf>,
    password: Option<String>,
    process: Process,
}

// === impl SentinelOptions ===

impl SentinelOptions {
    /// A primary with one replica, without TLS and passwords.
    pub fn for_tests() -> Self {
        Self { server: Options::for_tests(), replicas: 1, password: None, down_after: Duration::from_secs(2) }
    }
}

// === impl SentinelSetup ===

impl SentinelSetup {
    /// Starts all processes, and waits until the sentinels know each other and the replicas replicate.
    pub async fn start(options: SentinelOptions) -> Result<Self> {
        let primary = options.server.with_new_location();
        let primary_addr = primary.addr;
        let primary_server = RestartableServer::start(primary).await?;
        let (scheme, login) = match primary_server.running_server() {
            Some(redis) => (redis.url_scheme("redis-sentinel"), redis.url_userinfo()),
            None => bail!("the primary runs"),
        };
        let mut servers = vec![primary_server];
        for _ in 0..options.replicas {
            servers.push(
                RestartableServer::start(Options {
                    replica_of: Some(primary_addr),
                    ..options.server.with_new_location()
                })
                .await?,
            );
        }
        let sentinels = (0..SENTINELS).map(|_| Sentinel::start(&options, primary_addr)).collect::<Result<Vec<_>>>()?;
        let hosts: Vec<String> = sentinels.iter().map(|sentinel| sentinel.addr.to_string()).collect();
        let query = options.password.map(|password| format!("?sentinel_password={password}")).unwrap_or_default();
        let url = format!("{scheme}://{login}{}/{PRIMARY_NAME}/0{query}", hosts.join(","));
        let this = Self { servers, sentinels, url };
        poll_until("the sentinels know all", CHANGE_LIMIT, async || {
            for sentinel in &this.sentinels {
                let primary_info = sentinel.ask("MASTER").await?;
                let count = |name: &str| primary_info.get(name).and_then(|count| count.parse::<usize>().ok());
                let knows_all = count("num-other-sentinels") == Some(SENTINELS - 1)
                    && count("num-slaves") == Some(options.replicas)
                    && primary_info.get("flags").is_some_and(|flags| flags == "master");
                if !knows_all {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .await?;
        this.wait_until_replicated().await?;
        Ok(this)
    }

    /// A `redis-sentinel` URL, with which clients find the current primary.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The CA file for the servers' certificates, if the servers accept only TLS.
    pub fn ca(&self) -> Option<&Path> {
        self.sentinels[0].ca.as_deref()
    }

    /// The primary's socket address, according to the majority of the sentinels.
    pub async fn primary(&self) -> Result<SocketAddr> {
        let mut votes: HashMap<SocketAddr, usize> = HashMap::new();
        for sentinel in &self.sentinels {
            *votes.entry(sentinel.primary().await?).or_default() += 1;
        }
        let most = votes.into_iter().max_by_key(|(_, count)| *count);
        most.filter(|(_, count)| *count * 2 > SENTINELS).map(|(addr, _)| addr).context("the sentinels disagree")
    }

    /// Connects to the primary as the user `default`, who has all permissions.
    pub async fn connect(&self) -> Result<MultiplexedConnection> {
        self.server(self.primary().await?)?.running_server().context("the primary runs")?.connect().await
    }

    /// All running servers.
    pub fn servers(&self) -> Vec<Arc<Redis>> {
        self.servers.iter().filter_map(RestartableServer::running_server).collect()
    }

    /// Sends SIGKILL to the primary and returns its socket address.
    pub async fn kill_primary(&self) -> Result<SocketAddr> {
        let addr = self.primary().await?;
        let redis = process::lock(&self.server(addr)?.redis).take().context("the primary runs")?;
        redis.process().kill();
        Ok(addr)
    }

    /// Waits until every sentinel reports a primary other than `from` and considers it up. Returns the new primary's
    /// socket address.
    pub async fn wait_for_failover(&self, from: SocketAddr) -> Result<SocketAddr> {
        let mut to = from;
        poll_until("the failover", CHANGE_LIMIT, async || {
            for sentinel in &self.sentinels {
                to = sentinel.primary().await?;
                // A sentinel that has not reached the new primary yet considers it down.
                let flags = sentinel.ask("MASTER").await?.remove("flags");
                if to == from || flags.as_deref() != Some("master") {
                    return Ok(false);
                }
            }
            let redis = self.server(to)?.running_server().context("the new primary runs")?;
            let role: (String, redis::Value, redis::Value) =
                redis::cmd("ROLE").query_async(&mut redis.connect().await?).await?;
            Ok(role.0 == "master")
        })
        .await?;
        Ok(to)
    }

    /// Restarts a killed server as a replica of the current primary, and waits until it replicates.
    pub async fn restart(&self, addr: SocketAddr) -> Result<()> {
        let primary = self.primary().await?;
        ensure!(primary != addr, "the sentinels still consider the killed server the primary");
        let server = self.server(addr)?;
        let mut options = Options { replica_of: Some(primary), ..server.options.clone() };
        // A server that is not durable restarts without data. If it became the primary before it has replicated
        // everything, all data would be lost. Priority 0 prevents that.
        options.settings.push(("replica-priority".to_owned(), "0".to_owned()));
        let redis = Arc::new(Redis::start(options).await?);
        *process::lock(&server.redis) = Some(Arc::clone(&redis));
        poll_until("the restarted server has replicated", CHANGE_LIMIT, async || is_replicating(&redis, primary).await)
            .await?;
        let allow_promotion = ["SET", "replica-priority", "100"];
        redis::cmd("CONFIG").arg(&allow_promotion).query_async::<()>(&mut redis.connect().await?).await?;
        self.wait_until_replicated().await
    }

    /// Waits until every running replica has replicated the primary's data, and until each sentinel could promote at
    /// least as many replicas as are running.
    async fn wait_until_replicated(&self) -> Result<()> {
        poll_until("the replicas replicate", CHANGE_LIMIT, async || {
            let primary = self.primary().await?;
            let mut replicas = 0;
            for server in self.servers.iter().filter(|server| server.options.addr != primary) {
                let Some(redis) = server.running_server() else { continue };
                replicas += 1;
                if !is_replicating(&redis, primary).await? {
                    return Ok(false);
                }
            }
            for sentinel in &self.sentinels {
                if sentinel.promotable_replicas().await? < replicas {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .await
    }

    fn server(&self, addr: SocketAddr) -> Result<&RestartableServer> {
        self.servers.iter().find(|server| server.options.addr == addr).context("the primary is one of the servers")
    }
}

async fn is_replicating(redis: &Redis, primary: SocketAddr) -> Result<bool> {
    let info: String = redis::cmd("INFO").arg("replication").query_async(&mut redis.connect().await?).await?;
    Ok(info.contains("master_link_status:up") && info.contains(&format!("master_port:{}", primary.port())))
}

// === impl RestartableServer ===

impl RestartableServer {
    async fn start(options: Options) -> Result<Self> {
        let redis = Redis::start(options.clone()).await?;
        Ok(Self { options, redis: Mutex::new(Some(Arc::new(redis))) })
    }

    fn running_server(&self) -> Option<Arc<Redis>> {
        process::lock(&self.redis).clone()
    }
}

// === impl Sentinel ===

impl Sentinel {
    fn start(options: &SentinelOptions, primary: SocketAddr) -> Result<Self> {
        let program = process::find_program(["redis-server", "/usr/bin/redis-server"])
            .context("Redis is not installed: run `make tools`, or install Debian's package `redis-server`")?;
        let dir = process::fresh_dir("sentinel");
        let addr = process::free_addr();
        let down_after = options.down_after.as_millis();
        let mut lines = vec![
            format!("bind {}", addr.ip()),
            format!("dir {}", dir.display()),
            format!("sentinel monitor {PRIMARY_NAME} {} {} {}", primary.ip(), primary.port(), SENTINELS / 2 + 1),
            format!("sentinel down-after-milliseconds {PRIMARY_NAME} {down_after}"),
            format!("sentinel failover-timeout {PRIMARY_NAME} 6000"),
        ];
        let mut ca = None;
        match &options.server.tls {
            None => lines.push(format!("port {}", addr.port())),
            Some(tls) => {
                tls.write_to(&dir, None)?;
                let file = |name: &str| dir.join(name).display().to_string();
                lines.extend([
                    "port 0".to_owned(),
                    format!("tls-port {}", addr.port()),
                    "tls-auth-clients no".to_owned(),
                    "tls-replication yes".to_owned(),
                    format!("tls-cert-file {}", file("server.pem")),
                    format!("tls-key-file {}", file("server.key")),
                    format!("tls-ca-cert-file {}", file("ca.pem")),
                ]);
                ca = Some(dir.join("ca.pem"));
            }
        }
        lines.extend(
            options.server.password.iter().map(|password| format!("sentinel auth-pass {PRIMARY_NAME} {password}")),
        );
        lines.extend(options.password.iter().map(|password| format!("requirepass {password}")));
        // A sentinel writes its state into its configuration file.
        let config = dir.join("sentinel.conf");
        write_private(&config, &(lines.join("\n") + "\n"))?;
        let process = Program::new("redis-sentinel", program, dir.join("sentinel.log"))
            .arg(config.display().to_string())
            .arg("--sentinel")
            .start()?;
        Ok(Self { addr, ca, password: options.password.clone(), process })
    }

    async fn connect(&self) -> Result<MultiplexedConnection> {
        let log = self.process.log_path();
        ensure!(self.process.exit_status().is_none(), "a sentinel ended:\n{}", process::tail(log, 20));
        let login = self.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        let scheme = if self.ca.is_some() { "rediss" } else { "redis" };
        open_connection(&format!("{scheme}://{login}{}/", self.addr), self.ca.as_deref()).await
    }

    async fn ask(&self, what: &str) -> Result<HashMap<String, String>> {
        Ok(redis::cmd("SENTINEL").arg(&[what, PRIMARY_NAME]).query_async(&mut self.connect().await?).await?)
    }

    async fn primary(&self) -> Result<SocketAddr> {
        let (host, port): (String, u16) = redis::cmd("SENTINEL")
            .arg(&["GET-MASTER-ADDR-BY-NAME", PRIMARY_NAME])
            .query_async(&mut self.connect().await?)
            .await?;
        Ok(SocketAddr::new(host.parse()?, port))
    }

    /// How many replicas the sentinel could promote.
    async fn promotable_replicas(&self) -> Result<usize> {
        let replicas: Vec<HashMap<String, String>> =
            redis::cmd("SENTINEL").arg(&["REPLICAS", PRIMARY_NAME]).query_async(&mut self.connect().await?).await?;
        let has_value = |replica: &HashMap<String, String>, name: &str, value: &str| {
            replica.get(name).is_some_and(|found| found == value)
        };
        let is_promotable = |replica: &&HashMap<String, String>| {
            has_value(replica, "flags", "slave")
                && has_value(replica, "master-link-status", "ok")
                && !has_value(replica, "slave-priority", "0")
        };
        Ok(replicas.iter().filter(is_promotable).count())
    }
}
