//! A primary with replicas and three sentinels that watch it, as real processes; the primary can be killed.

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use redis::aio::MultiplexedConnection;

use super::{Options, Redis, open, until};
use crate::{
    postgres::write_private,
    process::{self, Process, Program},
};

/// What the sentinels call the primary.
const NAME: &str = "main";
const SENTINELS: usize = 3;
/// Sentinels find each other and the replicas within a few seconds; a fail-over takes as long. A loaded machine takes
/// longer.
const LIMIT: Duration = Duration::from_secs(60);

/// How to run one.
pub struct SentinelOptions {
    /// For each server; its folder and address are not used.
    pub server: Options,
    pub replicas: usize,
    /// Of the sentinels.
    pub password: Option<String>,
    /// A primary that says nothing for so long is taken for gone.
    pub down_after: Duration,
}

/// A primary, its replicas and its sentinels. All end when this value is dropped.
pub struct RedisSentinel {
    servers: Vec<Server>,
    sentinels: Vec<Watcher>,
    url: String,
}

/// A server that may be gone and come back at the same address.
struct Server {
    options: Options,
    redis: Mutex<Option<Arc<Redis>>>,
}

struct Watcher {
    addr: SocketAddr,
    ca: Option<PathBuf>,
    password: Option<String>,
    process: Process,
}

// === impl SentinelOptions ===

impl SentinelOptions {
    /// One replica, no TLS, no passwords.
    pub fn for_tests() -> Self {
        Self { server: Options::for_tests(), replicas: 1, password: None, down_after: Duration::from_secs(1) }
    }
}

// === impl RedisSentinel ===

impl RedisSentinel {
    /// Starts all of it; the sentinels know each other and the replicas, which follow.
    pub async fn start(options: SentinelOptions) -> Result<Self> {
        let primary = options.server.elsewhere();
        let at = primary.addr;
        let first = Server::start(primary).await?;
        let (scheme, login) = match first.running() {
            Some(redis) => (redis.scheme("redis-sentinel"), redis.login()),
            None => bail!("the primary runs"),
        };
        let mut servers = vec![first];
        for _ in 0..options.replicas {
            servers.push(Server::start(Options { replica_of: Some(at), ..options.server.elsewhere() }).await?);
        }
        let sentinels = (0..SENTINELS).map(|_| Watcher::start(&options, at)).collect::<Result<Vec<_>>>()?;
        let hosts: Vec<String> = sentinels.iter().map(|sentinel| sentinel.addr.to_string()).collect();
        let query = options.password.map(|password| format!("?sentinel_password={password}")).unwrap_or_default();
        let url = format!("{scheme}://{login}{}/{NAME}/0{query}", hosts.join(","));
        let this = Self { servers, sentinels, url };
        until("the sentinels know all", LIMIT, async || {
            for sentinel in &this.sentinels {
                let known = sentinel.ask("MASTER").await?;
                let count = |name: &str| known.get(name).and_then(|count| count.parse::<usize>().ok());
                let knows_all = count("num-other-sentinels") == Some(SENTINELS - 1)
                    && count("num-slaves") == Some(options.replicas)
                    && known.get("flags").is_some_and(|flags| flags == "master");
                if !knows_all {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .await?;
        this.followed().await?;
        Ok(this)
    }

    /// The URL that leads to the primary, whichever it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The authority that signed all certificates, where all speak TLS only.
    pub fn ca(&self) -> Option<&Path> {
        self.sentinels[0].ca.as_deref()
    }

    /// Where most sentinels say that the primary is.
    pub async fn primary(&self) -> Result<SocketAddr> {
        let mut votes: HashMap<SocketAddr, usize> = HashMap::new();
        for sentinel in &self.sentinels {
            *votes.entry(sentinel.primary().await?).or_default() += 1;
        }
        let most = votes.into_iter().max_by_key(|(_, count)| *count);
        most.filter(|(_, count)| *count * 2 > SENTINELS).map(|(addr, _)| addr).context("the sentinels disagree")
    }

    /// To the primary, as its administrator.
    pub async fn connect(&self) -> Result<MultiplexedConnection> {
        self.server(self.primary().await?)?.running().context("the primary runs")?.connect().await
    }

    /// Every server that runs.
    pub fn servers(&self) -> Vec<Arc<Redis>> {
        self.servers.iter().filter_map(Server::running).collect()
    }

    /// As `kill -9`; tells which it was.
    pub async fn kill_primary(&self) -> Result<SocketAddr> {
        let addr = self.primary().await?;
        let redis = process::lock(&self.server(addr)?.redis).take().context("the primary runs")?;
        redis.process().kill();
        Ok(addr)
    }

    /// Waits until the sentinels have made another server the primary, and tells which.
    pub async fn failed_over(&self, from: SocketAddr) -> Result<SocketAddr> {
        let mut to = from;
        until("the fail-over", LIMIT, async || {
            for sentinel in &self.sentinels {
                to = sentinel.primary().await?;
                if to == from {
                    return Ok(false);
                }
            }
            let redis = self.server(to)?.running().context("the new primary runs")?;
            let role: (String, redis::Value, redis::Value) =
                redis::cmd("ROLE").query_async(&mut redis.connect().await?).await?;
            Ok(role.0 == "master")
        })
        .await?;
        Ok(to)
    }

    /// Starts a server that was killed again, as a replica of who is the primary now, and waits until it follows.
    pub async fn restart(&self, addr: SocketAddr) -> Result<()> {
        let primary = self.primary().await?;
        ensure!(primary != addr, "the sentinels have not left it yet");
        let server = self.server(addr)?;
        let redis = Redis::start(Options { replica_of: Some(primary), ..server.options.clone() }).await?;
        *process::lock(&server.redis) = Some(Arc::new(redis));
        self.followed().await
    }

    /// Waits until every server that runs but the primary has what the primary has, and the sentinels see it so.
    async fn followed(&self) -> Result<()> {
        until("the replicas follow", LIMIT, async || {
            let primary = self.primary().await?;
            let mut replicas = 0;
            for server in self.servers.iter().filter(|server| server.options.addr != primary) {
                let Some(redis) = server.running() else { continue };
                replicas += 1;
                let info: String =
                    redis::cmd("INFO").arg("replication").query_async(&mut redis.connect().await?).await?;
                if !info.contains("master_link_status:up") || !info.contains(&format!("master_port:{}", primary.port()))
                {
                    return Ok(false);
                }
            }
            for sentinel in &self.sentinels {
                if sentinel.good_replicas().await? < replicas {
                    return Ok(false);
                }
            }
            Ok(true)
        })
        .await
    }

    fn server(&self, addr: SocketAddr) -> Result<&Server> {
        self.servers.iter().find(|server| server.options.addr == addr).context("the primary is one of the servers")
    }
}

// === impl Server ===

impl Server {
    async fn start(options: Options) -> Result<Self> {
        let redis = Redis::start(options.clone()).await?;
        Ok(Self { options, redis: Mutex::new(Some(Arc::new(redis))) })
    }

    fn running(&self) -> Option<Arc<Redis>> {
        process::lock(&self.redis).clone()
    }
}

// === impl Watcher ===

impl Watcher {
    fn start(options: &SentinelOptions, primary: SocketAddr) -> Result<Self> {
        let program = process::find_program(["redis-server", "/usr/bin/redis-server"])
            .context("Redis is not installed: run `make tools`, or install Debian's package `redis-server`")?;
        let dir = process::fresh_dir("sentinel");
        let addr = process::free_addr();
        let down_after = options.down_after.as_millis();
        let mut lines = vec![
            format!("bind {}", addr.ip()),
            format!("dir {}", dir.display()),
            format!("sentinel monitor {NAME} {} {} {}", primary.ip(), primary.port(), SENTINELS / 2 + 1),
            format!("sentinel down-after-milliseconds {NAME} {down_after}"),
            format!("sentinel failover-timeout {NAME} 6000"),
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
        lines.extend(options.server.password.iter().map(|password| format!("sentinel auth-pass {NAME} {password}")));
        lines.extend(options.password.iter().map(|password| format!("requirepass {password}")));
        // A sentinel writes what it learns into its file.
        let config = dir.join("sentinel.conf");
        write_private(&config, &(lines.join("\n") + "\n"))?;
        let process = Program::new("redis-sentinel", program, dir.join("sentinel.log"))
            .arg(config.display().to_string())
            .arg("--sentinel")
            .start()?;
        Ok(Self { addr, ca, password: options.password.clone(), process })
    }

    async fn connect(&self) -> Result<MultiplexedConnection> {
        let log = self.process.log();
        ensure!(self.process.ended().is_none(), "a sentinel ended:\n{}", process::tail(log, 20));
        let login = self.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        let scheme = if self.ca.is_some() { "rediss" } else { "redis" };
        open(&format!("{scheme}://{login}{}/", self.addr), self.ca.as_deref()).await
    }

    async fn ask(&self, what: &str) -> Result<HashMap<String, String>> {
        Ok(redis::cmd("SENTINEL").arg(&[what, NAME]).query_async(&mut self.connect().await?).await?)
    }

    async fn primary(&self) -> Result<SocketAddr> {
        let (host, port): (String, u16) = redis::cmd("SENTINEL")
            .arg(&["GET-MASTER-ADDR-BY-NAME", NAME])
            .query_async(&mut self.connect().await?)
            .await?;
        Ok(SocketAddr::new(host.parse()?, port))
    }

    /// How many replicas it could make the primary.
    async fn good_replicas(&self) -> Result<usize> {
        let replicas: Vec<HashMap<String, String>> =
            redis::cmd("SENTINEL").arg(&["REPLICAS", NAME]).query_async(&mut self.connect().await?).await?;
        let is = |replica: &HashMap<String, String>, name: &str, value: &str| {
            replica.get(name).is_some_and(|found| found == value)
        };
        let good = |replica: &&HashMap<String, String>| {
            is(replica, "flags", "slave") && is(replica, "master-link-status", "ok")
        };
        Ok(replicas.iter().filter(good).count())
    }
}
