//! The whole service for one test: manifests, rendered by the operator's program, served by the server's, over a real
//! Postgres, Redis and SMTP.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::json;

use crate::{
    builders::{App, Provider, Relay},
    client::{Anonymous, Answer},
    mail::Mailbox,
    postgres::{self, Database, Postgres},
    process::{self, Process, Program},
    proxy::Proxy,
    redis::{self, Redis},
    smtp::{self, Smtp},
    tls::{Front, Tls},
    upstream,
};

/// Rendering a few Apps; the making of an RSA key is the slowest part.
const RENDER_LIMIT: Duration = Duration::from_secs(60);
/// A server starts within a second; a loaded machine takes longer.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// A server that drains waits for what runs.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// What a test wants to be different.
pub struct Builder {
    /// Where the first server will be.
    public: SocketAddr,
    /// What users call, where something stands in front.
    base_url: Option<String>,
    apps: Vec<App>,
    providers: Vec<Provider>,
    smtp: smtp::Options,
    redis: Option<redis::Options>,
    /// Where Redis is, and who vouches for it, where the test runs it.
    redis_at: Option<(String, Option<PathBuf>)>,
    postgres: Option<postgres::Options>,
    proxied: bool,
    servers: usize,
    watch: bool,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    wrapper: Vec<String>,
}

/// A running service. Everything of it ends when this value is dropped; when the test fails it says where to look.
pub struct Stack {
    pub smtp: Smtp,
    pub database: Database,
    /// In front of the stores, where the test asked for it.
    pub postgres_proxy: Option<Proxy>,
    pub redis_proxy: Option<Proxy>,
    servers: Vec<Server>,
    postgres: Store<Postgres>,
    redis: Option<Store<Redis>>,
    watcher: Option<Process>,
    base_url: String,
    dir: PathBuf,
}

/// One `latchkey-server`, running or not.
pub struct Server {
    pub public: SocketAddr,
    pub admin: SocketAddr,
    pub ops: SocketAddr,
    index: usize,
    dir: PathBuf,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    wrapper: Vec<String>,
    process: Mutex<Option<Process>>,
}

/// A store of this process's tests, or of this test alone.
pub(crate) enum Store<T: 'static> {
    Shared(&'static T),
    Own(Box<T>),
}

impl<T> std::ops::Deref for Store<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Shared(store) => store,
            Self::Own(store) => store,
        }
    }
}

// === impl Builder ===

impl Builder {
    pub fn app(mut self, app: &App) -> Self {
        self.apps.push(app.clone());
        self
    }

    /// With that Provider and its Secret, which Apps name by [`App::provider`].
    pub fn provider(mut self, provider: &Provider) -> Self {
        self.providers.push(provider.clone());
        self
    }

    /// Where a provider sends people back to, which it is told before the service starts.
    pub fn callback(&self, app: &App, provider: &Provider) -> String {
        let base = self.base_url.clone().unwrap_or_else(|| format!("http://{}", self.public));
        format!("{base}/{}/{}/callback", app.id(), provider.name())
    }

    /// TLS in front of the first server: people call that.
    pub async fn behind_tls(mut self, tls: &Tls) -> Result<(Self, Front)> {
        let front = Front::start(tls, self.public).await?;
        self.base_url = Some(front.url("localhost"));
        Ok((self, front))
    }

    /// The install's own relay.
    pub fn smtp(mut self, options: smtp::Options) -> Self {
        self.smtp = options;
        self
    }

    /// A Redis of its own, for tests that break it.
    pub fn own_redis(mut self, options: redis::Options) -> Self {
        self.redis = Some(options);
        self
    }

    /// A Redis that the test runs, in whatever form; `ca` is the authority of its certificates, where it speaks TLS.
    pub fn redis_at(mut self, url: &str, ca: Option<&Path>) -> Self {
        self.redis_at = Some((url.to_owned(), ca.map(Path::to_owned)));
        self
    }

    /// A Postgres of its own, for tests that break it.
    pub fn own_postgres(mut self, options: postgres::Options) -> Self {
        self.postgres = Some(options);
        self
    }

    /// With proxies in front of Postgres and Redis.
    pub fn proxied(mut self) -> Self {
        self.proxied = true;
        self
    }

    /// So many servers over the same stores.
    pub fn servers(mut self, servers: usize) -> Self {
        self.servers = servers;
        self
    }

    /// With a `render --watch` that follows edits.
    pub fn watch(mut self) -> Self {
        self.watch = true;
        self
    }

    /// More flags for the servers.
    pub fn args<I: IntoIterator<Item: AsRef<str>>>(mut self, args: I) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the servers by this command; see [`Program::wrapper`].
    pub fn wrapper(mut self, command: &[String]) -> Self {
        self.wrapper = command.to_vec();
        self
    }

    /// Starts all of it and waits until it is ready; panics where it does not come up, which fails the test.
    pub async fn start(self) -> Stack {
        self.try_start().await.expect("the service starts")
    }

    pub async fn try_start(self) -> Result<Stack> {
        let dir = process::fresh_dir("stack");
        for folder in ["manifests", "rendered", "keys"] {
            fs::create_dir_all(dir.join(folder))?;
        }
        let postgres = match self.postgres {
            None => Store::Shared(Postgres::shared().await),
            Some(options) => Store::Own(Box::new(Postgres::start(options).await?)),
        };
        let redis = match (&self.redis_at, self.redis) {
            (Some(_), _) => None,
            (None, None) => Some(Store::Shared(Redis::shared().await)),
            (None, Some(options)) => Some(Store::Own(Box::new(Redis::start(options).await?))),
        };
        let database = postgres.database().await?;
        let smtp = Smtp::start(self.smtp).await?;
        let (postgres_proxy, redis_proxy) = match self.proxied {
            false => (None, None),
            true => {
                let redis = redis.as_ref().map(|redis| Proxy::start(redis.addr())).transpose()?;
                (Some(Proxy::start(postgres.addr())?), redis)
            }
        };
        let database_url = match &postgres_proxy {
            None => database.url.clone(),
            Some(proxy) => postgres.url(&database.name, proxy.addr()),
        };
        let (redis_url, redis_ca) = match (self.redis_at, &redis) {
            (Some(given), _) => given,
            (None, Some(redis)) => {
                let url = redis_proxy.as_ref().map_or_else(|| redis.url(), |proxy| redis.url_at(proxy.addr()));
                (url, redis.ca().map(Path::to_owned))
            }
            (None, None) => bail!("a service has a Redis"),
        };
        write_store_files(&dir, &database_url, &redis_url, &smtp)?;

        let mut envs = self.envs;
        let authorities = [smtp.ca().map(str::to_owned), read(postgres.ca())?, read(redis_ca.as_deref())?];
        let authorities: Vec<String> = authorities.into_iter().flatten().collect();
        if !authorities.is_empty() {
            // Where rustls-native-certs looks first.
            let bundle = dir.join("authorities.pem");
            fs::write(&bundle, authorities.concat())?;
            envs.push(("SSL_CERT_FILE".to_owned(), bundle.display().to_string()));
        }
        let mut servers: Vec<Server> = Vec::new();
        let mut args = vec!["--config-dir".to_owned(), dir.join("rendered").display().to_string()];
        args.extend(self.args);
        for index in 0..self.servers {
            let public = if index == 0 { self.public } else { process::free_addr() };
            let ops = process::free_addr();
            let base_url = self.base_url.clone().unwrap_or_else(|| {
                let first = servers.first().map_or(public, |first| first.public);
                format!("http://{first}")
            });
            let server = Server::new(index, &dir, (public, ops), &base_url, &args, &envs);
            servers.push(server.wrapper(&self.wrapper));
        }
        let first = servers.first().context("a service has a server")?.public;
        let base_url = self.base_url.unwrap_or_else(|| format!("http://{first}"));
        let mut stack = Stack {
            smtp,
            database,
            postgres_proxy,
            redis_proxy,
            servers,
            postgres,
            redis,
            watcher: None,
            base_url,
            dir: dir.clone(),
        };
        for app in &self.apps {
            stack.write_manifest(app)?;
        }
        for provider in &self.providers {
            stack.write_provider(provider)?;
        }
        stack.render()?;
        if self.watch {
            stack.watcher = Some(stack.render_program("render-watch").arg("--watch").start()?);
        }
        for server in &stack.servers {
            server.start()?;
        }
        for server in &stack.servers {
            server.ready().await?;
        }
        Ok(stack)
    }
}

// === impl Stack ===

impl Stack {
    pub fn builder() -> Builder {
        Builder {
            public: process::free_addr(),
            base_url: None,
            apps: Vec::new(),
            providers: Vec::new(),
            smtp: smtp::Options::plain(),
            redis: None,
            redis_at: None,
            postgres: None,
            proxied: false,
            servers: 1,
            watch: false,
            args: Vec::new(),
            // No load balancer has to catch up, and the machine's proxy is not the test's. What a test says goes first.
            envs: vec![
                ("LATCHKEY_DRAIN_SECONDS".to_owned(), "0".to_owned()),
                ("HTTPS_PROXY".to_owned(), String::new()),
            ],
            wrapper: Vec::new(),
        }
    }

    /// One server with that App.
    pub async fn with(app: &App) -> Self {
        Self::builder().app(app).start().await
    }

    /// Somebody new, at a client address of their own.
    pub fn client(&self) -> Anonymous {
        Anonymous::new(self.servers[0].public)
    }

    /// Somebody new, who talks to that server.
    pub fn client_of(&self, server: usize) -> Anonymous {
        Anonymous::new(self.servers[server].public)
    }

    pub fn server(&self) -> &Server {
        &self.servers[0]
    }

    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    pub fn mails(&self) -> &Mailbox {
        self.smtp.mails()
    }

    pub fn postgres(&self) -> &Postgres {
        &self.postgres
    }

    /// Where this service runs it, or shares it.
    pub fn redis(&self) -> &Redis {
        self.redis.as_ref().expect("the test did not bring a Redis of its own")
    }

    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The `iss` of an App's tokens.
    pub fn issuer(&self, app: &App) -> String {
        format!("{}/{}", self.base_url, app.id())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the rendered documents are.
    pub fn rendered(&self) -> PathBuf {
        self.dir.join("rendered")
    }

    /// Writes an App's manifest, new or in place of the one before, and renders unless a watcher does.
    pub fn apply(&self, app: &App) -> Result<()> {
        self.write_manifest(app)?;
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// Writes manifests of several Apps and Providers, and renders once.
    pub fn apply_all(&self, apps: &[App], providers: &[Provider]) -> Result<()> {
        for provider in providers {
            self.write_provider(provider)?;
        }
        for app in apps {
            self.write_manifest(app)?;
        }
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// Takes an App's manifest away, and renders unless a watcher does.
    pub fn delete(&self, app: &App) -> Result<()> {
        fs::remove_file(self.manifest_path(app))?;
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// `latchkey-operator render`, once.
    pub fn render(&self) -> Result<()> {
        self.render_program("render").run(RENDER_LIMIT)
    }

    fn render_program(&self, name: &str) -> Program {
        let operator = process::our_program("latchkey-operator").expect("the operator's program is built");
        Program::new(name, operator, self.dir.join(format!("{name}.log")))
            .arg("render")
            .path_arg("--from", &self.dir.join("manifests"))
            .path_arg("--to", &self.rendered())
            .path_arg("--keys", &self.dir.join("keys"))
            .args(["--base-url", &self.base_url, "--allow-insecure"])
    }

    fn write_manifest(&self, app: &App) -> Result<()> {
        postgres::write_private(&self.manifest_path(app), &app.manifest())
    }

    fn write_provider(&self, provider: &Provider) -> Result<()> {
        let path = self.dir.join(format!("manifests/provider-{}.yaml", provider.name()));
        postgres::write_private(&path, &provider.manifest())
    }

    fn manifest_path(&self, app: &App) -> PathBuf {
        self.dir.join("manifests").join(format!("{}.yaml", app.id()))
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.watcher = None;
            self.servers.clear();
            drop(fs::remove_dir_all(&self.dir));
            return;
        }
        eprintln!("--- the service of this test: {}", self.dir.display());
        for server in &self.servers {
            let log = server.log();
            eprintln!("--- the end of {}:\n{}", log.display(), process::tail(&log, 40));
        }
        eprintln!("--- Postgres: {}", self.postgres.process().log().display());
    }
}

// === impl Server ===

impl Server {
    /// Not started. `dir` holds what [`write_store_files`] writes; `more` says where its documents come from.
    pub(crate) fn new(
        index: usize,
        dir: &Path,
        (public, ops): (SocketAddr, SocketAddr),
        base_url: &str,
        more: &[String],
        envs: &[(String, String)],
    ) -> Self {
        let admin = process::free_addr();
        let path = |name: &str| dir.join(name).display().to_string();
        let mut args: Vec<String> = [
            ("--public-addr", public.to_string()),
            ("--admin-addr", admin.to_string()),
            ("--ops-addr", ops.to_string()),
            ("--base-url", base_url.to_owned()),
            ("--database-url-file", path("database-url")),
            ("--redis-url-file", path("redis-url")),
            ("--smtp-file", path("smtp.json")),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        args.push("--allow-insecure".to_owned());
        args.extend(upstream::nobody_args());
        args.extend(more.iter().cloned());
        Self {
            public,
            admin,
            ops,
            index,
            dir: dir.to_owned(),
            args,
            envs: envs.to_vec(),
            wrapper: Vec::new(),
            process: Mutex::new(None),
        }
    }

    /// Starts it by this command from now on; see [`Program::wrapper`].
    pub(crate) fn wrapper(mut self, command: &[String]) -> Self {
        self.wrapper = command.to_vec();
        self
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join(format!("server-{}.log", self.index))
    }

    /// Everything it has logged, of earlier starts too.
    pub fn logged(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Starts it, at the same addresses as before. Does not wait: see [`Server::ready`].
    pub fn start(&self) -> Result<()> {
        let name = format!("server {}", self.index);
        let mut program = Program::new(&name, process::our_program("latchkey-server")?, self.log()).args(&self.args);
        program = program.wrapper(&self.wrapper);
        for (name, value) in &self.envs {
            program = program.env(name, value);
        }
        let before = process::lock(&self.process).replace(program.start()?);
        drop(before);
        Ok(())
    }

    /// Waits until it says that it is ready.
    pub async fn ready(&self) -> Result<()> {
        let client = Anonymous::new(self.ops);
        let end = tokio::time::Instant::now() + READY_LIMIT;
        loop {
            if let Some(status) = self.ended() {
                bail!("the server ended with {status}:\n{}", process::tail(&self.log(), 30));
            }
            let said = match client.try_send(client.request(http::Method::GET, "readyz")).await {
                Ok(answer) if answer.status.is_success() => return Ok(()),
                Ok(answer) => answer.text,
                Err(error) => format!("{error:#}"),
            };
            if tokio::time::Instant::now() > end {
                bail!("the server is not ready ({said}):\n{}", process::tail(&self.log(), 30));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Starts it and waits.
    pub async fn start_ready(&self) -> Result<()> {
        self.start()?;
        self.ready().await
    }

    /// As `kill -9`.
    pub fn kill(&self) {
        // Dropping it kills it, and waits.
        drop(process::lock(&self.process).take());
    }

    /// SIGTERM, and waits for its end; `None` where it had to be killed.
    pub async fn terminate(&self) -> Option<ExitStatus> {
        let process = process::lock(&self.process).take()?;
        process.signal(Signal::TERM);
        tokio::time::timeout(DRAIN_LIMIT, process.exit()).await.ok()
    }

    /// SIGTERM, without waiting.
    pub fn begin_drain(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGSTOP: it is there and says nothing.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Its exit status, once it has ended by itself.
    pub fn ended(&self) -> Option<ExitStatus> {
        process::lock(&self.process).as_ref().and_then(Process::ended)
    }

    pub fn pid(&self) -> Option<u32> {
        process::lock(&self.process).as_ref().map(Process::pid)
    }

    /// A path of the ops listener.
    pub async fn ops(&self, path: &str) -> Answer {
        Anonymous::new(self.ops).get(path).await
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = &*process::lock(&self.process) {
            process.signal(signal);
        }
    }
}

/// The files by which servers find their stores and the install's relay.
pub(crate) fn write_store_files(dir: &Path, database_url: &str, redis_url: &str, smtp: &Smtp) -> Result<()> {
    postgres::write_private(&dir.join("database-url"), database_url)?;
    postgres::write_private(&dir.join("redis-url"), redis_url)?;
    write_smtp_file(&dir.join("smtp.json"), smtp, "hello@latchkey.test")
}

/// The install's relay, as the server's `--smtp-file` wants it.
pub fn write_smtp_file(path: &Path, smtp: &Smtp, from: &str) -> Result<()> {
    let relay = Relay::to(smtp);
    let mut file = json!({ "host": relay.host, "port": relay.port, "tls": relay.tls, "from": from });
    if let Some((name, password)) = relay.login {
        file["username"] = json!(name);
        file["password"] = json!(password);
    }
    postgres::write_private(path, &serde_json::to_string_pretty(&file)?)
}

fn read(path: Option<&Path>) -> Result<Option<String>> {
    Ok(match path {
        Some(path) => Some(fs::read_to_string(path)?),
        None => None,
    })
}
