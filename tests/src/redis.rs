//! A real Redis in a process of our own: one for all tests of a process, or one for a test that breaks it; also behind
//! sentinels, and as a cluster.

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

mod cluster;
mod sentinel;

pub use cluster::RedisCluster;
pub use sentinel::{RedisSentinel, SentinelOptions};

/// Starting one, with a long append-only file to read.
const START_LIMIT: Duration = Duration::from_secs(30);
/// For each command of a test's own.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How to run one.
#[derive(Clone)]
pub struct Options {
    pub data: PathBuf,
    pub log: PathBuf,
    pub addr: SocketAddr,
    /// Whether it keeps an append-only file.
    pub durable: bool,
    /// Of the user `default`, who may do all.
    pub password: Option<String>,
    /// Who uses it; without one it is the user `default`.
    pub user: Option<User>,
    /// Only TLS, with the certificate of this authority.
    pub tls: Option<Tls>,
    /// Replicates the one at this address.
    pub replica_of: Option<SocketAddr>,
    /// A member of a cluster.
    pub cluster: bool,
    /// Settings beyond ours, name and value.
    pub settings: Vec<(String, String)>,
}

/// A user of a server's access control list.
#[derive(Clone, Debug)]
pub struct User {
    pub name: String,
    pub password: String,
    /// As `ACL SETUSER` takes them.
    pub rules: String,
}

/// A running server.
pub struct Redis {
    process: Process,
    addr: SocketAddr,
    password: Option<String>,
    user: Option<User>,
    ca: Option<PathBuf>,
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
            user: None,
            tls: None,
            replica_of: None,
            cluster: false,
            settings: Vec::new(),
        }
    }

    /// The same for another server: with a folder and an address of its own.
    fn elsewhere(&self) -> Self {
        let Self { data, log, addr, .. } = Self::for_tests();
        Self { data, log, addr, ..self.clone() }
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
        let user = options.user.as_ref().map(User::line);
        write_private(&secrets, &[lines, user].into_iter().flatten().collect::<String>())?;
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
                    .args(["--tls-replication", "yes", "--tls-cluster", if options.cluster { "yes" } else { "no" }])
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
        let Options { addr, password, user, .. } = options;
        let this = Self { process: command.start()?, addr, password, user, ca };
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
        format!("{}://{}{addr}/0", self.scheme("redis"), self.login())
    }

    pub async fn connect(&self) -> Result<MultiplexedConnection> {
        let login = self.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        open(&format!("{}://{login}{}/0", self.scheme("redis"), self.addr), self.ca()).await
    }

    fn scheme(&self, plain: &str) -> String {
        let secure = plain.replacen("redis", "rediss", 1);
        if self.ca.is_some() { secure } else { plain.to_owned() }
    }

    /// What stands before the host in a URL.
    fn login(&self) -> String {
        match (&self.user, &self.password) {
            (Some(user), _) => format!("{}:{}@", user.name, user.password),
            (None, Some(password)) => format!(":{password}@"),
            (None, None) => String::new(),
        }
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

// === impl User ===

impl User {
    fn line(&self) -> String {
        format!("user {} on >{} {}\n", self.name, self.password, self.rules)
    }
}

async fn open(url: &str, ca: Option<&Path>) -> Result<MultiplexedConnection> {
    let client = match ca {
        None => Client::open(url)?,
        Some(ca) => {
            tls::install_crypto_provider();
            let certificates = redis::TlsCertificates { client_tls: None, root_cert: Some(fs::read(ca)?) };
            Client::build_with_tls(url, certificates)?
        }
    };
    // The client's own limit of half a second is too short on a loaded machine.
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(ANSWER_LIMIT))
        .set_response_timeout(Some(ANSWER_LIMIT));
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}

/// Looks until it holds, or tells that it did not.
async fn until(what: &str, limit: Duration, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let end = tokio::time::Instant::now() + limit;
    loop {
        let outcome = holds().await;
        match outcome {
            Ok(true) => return Ok(()),
            Ok(false) if tokio::time::Instant::now() > end => bail!("{what}: not within {limit:?}"),
            Err(error) if tokio::time::Instant::now() > end => {
                return Err(error.context(format!("{what}: not within {limit:?}")));
            }
            Ok(false) | Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
