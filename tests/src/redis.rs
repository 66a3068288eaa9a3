//! A real Redis in a process of our own: one for all tests of a process, or one for a test that breaks it; also a
//! cluster of three.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use redis::{AsyncConnectionConfig, Client, aio::MultiplexedConnection};
use rustix::process::Signal;
use tokio::sync::OnceCell;

use crate::{
    postgres::write_private,
    process::{self, Process, Program},
    tls::{self, Tls},
};

/// Starting one, with a long append-only file to read.
const START_LIMIT: Duration = Duration::from_secs(30);
/// For each command of a test's own.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// A cluster of three agrees within a few seconds.
const CLUSTER_LIMIT: Duration = Duration::from_secs(30);
/// Slots of a Redis Cluster.
const SLOTS: u16 = 16_384;

/// How to run one.
pub struct Options {
    pub data: PathBuf,
    pub log: PathBuf,
    pub addr: SocketAddr,
    /// Whether it keeps an append-only file.
    pub durable: bool,
    pub password: Option<String>,
    /// Only TLS, with the certificate of this authority.
    pub tls: Option<Tls>,
    /// Replicates the one at this address.
    pub replica_of: Option<SocketAddr>,
    /// A member of a cluster.
    pub cluster: bool,
    /// Settings beyond ours, name and value.
    pub settings: Vec<(String, String)>,
}

/// A running server.
pub struct Redis {
    process: Process,
    addr: SocketAddr,
    password: Option<String>,
    ca: Option<PathBuf>,
}

/// Three masters that share the slots.
pub struct RedisCluster {
    pub masters: Vec<Redis>,
}

// === impl Options ===

impl Options {
    pub fn for_tests() -> Self {
        let dir = process::fresh_dir("redis");
        Self {
            log: dir.join("redis.log"),
            data: dir,
            addr: process::free_addr(),
            durable: false,
            password: None,
            tls: None,
            replica_of: None,
            cluster: false,
            settings: Vec::new(),
        }
    }
}

// === impl Redis ===

impl Redis {
    /// The one of this test process. An App's id leads every key, so tests do not meet.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<Redis> = OnceCell::const_new();
        SHARED.get_or_init(|| async { Self::start(Options::for_tests()).await.expect("Redis starts") }).await
    }

    pub async fn start(options: Options) -> Result<Self> {
        let program = process::find_program(["redis-server", "/usr/bin/redis-server"])
            .context("Redis is not installed: run `make tools`, or install Debian's package `redis-server`")?;
        fs::create_dir_all(&options.data)?;
        let port = options.addr.port().to_string();
        // In a file, since command lines are seen by all.
        let secrets = options.data.join("redis-secrets.conf");
        let password = options.password.as_ref();
        let lines = password.map(|password| format!("requirepass {password}\nmasterauth {password}\n"));
        write_private(&secrets, &lines.unwrap_or_default())?;
        let mut command = Program::new("redis-server", program, &options.log)
            .arg(secrets.display().to_string())
            .args(["--bind", &options.addr.ip().to_string(), "--daemonize", "no", "--save", ""])
            .args(["--appendonly", if options.durable { "yes" } else { "no" }])
            .path_arg("--dir", &options.data);
        let mut ca = None;
        match &options.tls {
            None => command = command.args(["--port", &port]),
            Some(tls) => {
                tls.write_to(&options.data, None)?;
                let file = |name: &str| options.data.join(name);
                command = command
                    .args(["--port", "0", "--tls-port", &port, "--tls-auth-clients", "no"])
                    .path_arg("--tls-cert-file", &file("server.pem"))
                    .path_arg("--tls-key-file", &file("server.key"))
                    .path_arg("--tls-ca-cert-file", &file("ca.pem"));
                ca = Some(file("ca.pem"));
            }
        }
        if let Some(master) = options.replica_of {
            command = command.args(["--replicaof", &format!("{} {}", master.ip(), master.port())]);
        }
        if options.cluster {
            command = command
                .args(["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"])
                .args(["--cluster-port", &process::free_port().to_string()]);
        }
        for (name, value) in &options.settings {
            command = command.args([&format!("--{name}"), value]);
        }
        let this = Self { process: command.start()?, addr: options.addr, password: options.password, ca };
        this.ready().await?;
        Ok(this)
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The authority that signed its certificate, where it speaks TLS only.
    pub fn ca(&self) -> Option<&Path> {
        self.ca.as_deref()
    }

    pub fn url(&self) -> String {
        self.url_at(self.addr)
    }

    /// As seen at another address (a proxy's).
    pub fn url_at(&self, addr: SocketAddr) -> String {
        let scheme = if self.ca.is_some() { "rediss" } else { "redis" };
        let login = self.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        format!("{scheme}://{login}{addr}/0")
    }

    pub async fn connect(&self) -> Result<MultiplexedConnection> {
        let client = match &self.ca {
            None => Client::open(self.url())?,
            Some(ca) => {
                tls::install_crypto_provider();
                let certificates = redis::TlsCertificates { client_tls: None, root_cert: Some(fs::read(ca)?) };
                Client::build_with_tls(self.url(), certificates)?
            }
        };
        // The client's own limit of half a second is too short on a loaded machine.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ANSWER_LIMIT))
            .set_response_timeout(Some(ANSWER_LIMIT));
        Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
    }

    /// Ends it as an administrator does: what is to be kept is written.
    pub fn stop(&self, limit: Duration) -> bool {
        self.process.stop(Signal::TERM, limit)
    }

    async fn ready(&self) -> Result<()> {
        let end = tokio::time::Instant::now() + START_LIMIT;
        loop {
            let error = match self.ping().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let log = self.process.log();
            if let Some(status) = self.process.ended() {
                bail!("Redis ended with {status}; the end of {}:\n{}", log.display(), process::tail(log, 20));
            }
            if tokio::time::Instant::now() > end {
                return Err(error.context(format!("Redis is not ready; see {}", log.display())));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn ping(&self) -> Result<()> {
        let answer: String = redis::cmd("PING").query_async(&mut self.connect().await?).await?;
        ensure!(answer == "PONG", "an answer to PING that is not PONG");
        Ok(())
    }
}

// === impl RedisCluster ===

impl RedisCluster {
    pub async fn start() -> Result<Self> {
        let mut masters = Vec::new();
        for _ in 0..3 {
            masters.push(Redis::start(Options { cluster: true, ..Options::for_tests() }).await?);
        }
        let (share, mut first) = (SLOTS / 3, 0);
        for (index, master) in masters.iter().enumerate() {
            let last = if index == 2 { SLOTS - 1 } else { first + share - 1 };
            let mut connection = master.connect().await?;
            let assign = ["ADDSLOTSRANGE".to_owned(), first.to_string(), last.to_string()];
            redis::cmd("CLUSTER").arg(&assign).query_async::<()>(&mut connection).await?;
            first = last + 1;
        }
        let mut connection = masters[0].connect().await?;
        for other in &masters[1..] {
            let bus: Vec<String> =
                redis::cmd("CONFIG").arg(&["GET", "cluster-port"]).query_async(&mut other.connect().await?).await?;
            let bus = bus.get(1).context("a cluster's member has a bus port")?;
            let meet = ["MEET", &other.addr.ip().to_string(), &other.addr.port().to_string(), bus];
            redis::cmd("CLUSTER").arg(&meet).query_async::<()>(&mut connection).await?;
        }
        let this = Self { masters };
        let end = tokio::time::Instant::now() + CLUSTER_LIMIT;
        while !this.agreed().await? {
            ensure!(tokio::time::Instant::now() < end, "the Redis Cluster did not come together in {CLUSTER_LIMIT:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(this)
    }

    async fn agreed(&self) -> Result<bool> {
        for master in &self.masters {
            let info: String = redis::cmd("CLUSTER").arg("INFO").query_async(&mut master.connect().await?).await?;
            if !info.contains("cluster_state:ok") || !info.contains("cluster_known_nodes:3") {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
