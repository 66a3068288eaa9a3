//! A real Redis in its own process. All tests of a process share one Redis. A test that breaks Redis starts its own.
//! The submodules start a Redis with sentinels, and a Redis Cluster.

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
    tls::{self, ServerTls},
};

mod cluster;
mod sentinel;

pub use cluster::RedisCluster;
pub use sentinel::{SentinelOptions, SentinelSetup};

/// Time limit for a start, including the reading of a long append-only file.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a connection, and for the response to each command.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);

/// Settings of a server.
#[derive(Clone)]
pub struct Options {
    pub data: PathBuf,
    pub log: PathBuf,
    pub addr: SocketAddr,
    /// Whether the server keeps an append-only file, so that its data survives a restart.
    pub durable: bool,
    /// The password of the user `default`, who has all permissions.
    pub password: Option<String>,
    /// An additional user. If set, [`Redis::url`] is for this user, otherwise for the user `default`.
    pub user: Option<User>,
    /// If set, the server accepts only TLS connections, with this certificate.
    pub tls: Option<ServerTls>,
    /// If set, the server is a replica of the server at this socket address.
    pub replica_of: Option<SocketAddr>,
    /// Whether the server is a node of a Redis Cluster.
    pub cluster: bool,
    /// Additional settings: name and value.
    pub settings: Vec<(String, String)>,
}

/// A user of the server's access control list.
#[derive(Clone, Debug)]
pub struct User {
    pub name: String,
    pub password: String,
    /// Rules in the format of `ACL SETUSER`.
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

    /// These settings, but with a new folder and socket address.
    fn with_new_location(&self) -> Self {
        let Self { data, log, addr, .. } = Self::for_tests();
        Self { data, log, addr, ..self.clone() }
    }
}

// === impl Redis ===

impl Redis {
    /// The server that all tests of this process share. The tests do not interfere, because each key contains the appID
    /// of its App.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<Redis> = OnceCell::const_new();
        SHARED.get_or_init(|| async { Self::start(Options::for_tests()).await.expect("Redis starts") }).await
    }

    pub async fn start(options: Options) -> Result<Self> {
        let program = process::find_program(["redis-server", "/usr/bin/redis-server"])
            .context("Redis is not installed: run `make tools`, or install Debian's package `redis-server`")?;
        fs::create_dir_all(&options.data)?;
        let port = options.addr.port().to_string();
        // Passwords are in a file, because other users of the machine can see command lines.
        let secrets = options.data.join("redis-secrets.conf");
        let password = options.password.as_ref();
        let lines = password.map(|password| format!("requirepass {password}\nmasterauth {password}\n"));
        let user = options.user.as_ref().map(User::acl_line);
        write_private(&secrets, &[lines, user].into_iter().flatten().collect::<String>())?;
        let mut command = Program::new("redis-server", program, &options.log)
            .arg(secrets.display().to_string())
            .args(["--bind", &options.addr.ip().to_string(), "--daemonize", "no", "--save", ""])
            .args(["--appendonly", if options.durable { "yes" } else { "no" }])
            // By default, a primary waits 5 s for more replicas before it starts to replicate.
            .args(["--repl-diskless-sync-delay", "0"])
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
            command =
                command.args(["--cluster-enabled", "yes"]).args(["--cluster-port", &process::free_port().to_string()]);
        }
        for (name, value) in &options.settings {
            command = command.args([&format!("--{name}"), value]);
        }
        let Options { addr, password, user, .. } = options;
        let this = Self { process: command.start()?, addr, password, user, ca };
        this.wait_until_ready().await?;
        Ok(this)
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The CA file for the server's certificate, if the server accepts only TLS.
    pub fn ca(&self) -> Option<&Path> {
        self.ca.as_deref()
    }

    pub fn url(&self) -> String {
        self.url_at(self.addr)
    }

    /// The URL with another socket address, for example that of a proxy.
    pub fn url_at(&self, addr: SocketAddr) -> String {
        format!("{}://{}{addr}/0", self.url_scheme("redis"), self.url_userinfo())
    }

    pub async fn connect(&self) -> Result<MultiplexedConnection> {
        let login = self.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        open_connection(&format!("{}://{login}{}/0", self.url_scheme("redis"), self.addr), self.ca()).await
    }

    /// The URL scheme `plain`, or its variant for TLS if the server accepts only TLS.
    fn url_scheme(&self, plain: &str) -> String {
        let secure = plain.replacen("redis", "rediss", 1);
        if self.ca.is_some() { secure } else { plain.to_owned() }
    }

    /// The user information of the URL, including the `@`.
    fn url_userinfo(&self) -> String {
        match (&self.user, &self.password) {
            (Some(user), _) => format!("{}:{}@", user.name, user.password),
            (None, Some(password)) => format!(":{password}@"),
            (None, None) => String::new(),
        }
    }

    /// Sends SIGTERM, so that the server writes durable data to disk. Returns whether it ended within the limit.
    pub fn stop(&self, limit: Duration) -> bool {
        self.process.stop(Signal::TERM, limit)
    }

    async fn wait_until_ready(&self) -> Result<()> {
        let end = tokio::time::Instant::now() + START_LIMIT;
        loop {
            let error = match self.ping().await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let log = self.process.log_path();
            if let Some(status) = self.process.exit_status() {
                bail!("Redis ended with {status}; the end of {}:\n{}", log.display(), process::tail(log, 20));
            }
            if tokio::time::Instant::now() > end {
                return Err(error.context(format!("Redis is not ready; see {}", log.display())));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn ping(&self) -> Result<()> {
        let reply: String = redis::cmd("PING").query_async(&mut self.connect().await?).await?;
        ensure!(reply == "PONG", "a reply to PING that is not PONG");
        Ok(())
    }
}

// === impl User ===

impl User {
    fn acl_line(&self) -> String {
        format!("user {} on >{} {}\n", self.name, self.password, self.rules)
    }
}

async fn open_connection(url: &str, ca: Option<&Path>) -> Result<MultiplexedConnection> {
    let client = match ca {
        None => Client::open(url)?,
        Some(ca) => {
            tls::install_crypto_provider();
            let certificates = redis::TlsCertificates { client_tls: None, root_cert: Some(fs::read(ca)?) };
            Client::build_with_tls(url, certificates)?
        }
    };
    // The default limits of the client (one second to connect, half a second for a response) are too short on a loaded
    // machine.
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(COMMAND_LIMIT))
        .set_response_timeout(Some(COMMAND_LIMIT));
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}

/// Calls `is_met` until it returns true. Returns an error after the limit.
async fn poll_until(what: &str, limit: Duration, mut is_met: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let end = tokio::time::Instant::now() + limit;
    loop {
        let outcome = is_met().await;
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
