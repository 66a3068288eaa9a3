//! The whole service for one test, without Kubernetes: the operator renders manifests, and servers serve the rendered
//! documents, with Postgres, Redis and an SMTP server.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use latchkey_crds::rendered::Revision;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    builders::{App, Client, Provider, Relay},
    client::{ApiClient, ApiResponse},
    mail::Mailbox,
    mock_provider,
    postgres::{self, Database, Postgres},
    process::{self, Process, Program},
    proxy::Proxy,
    redis::{self, Redis},
    smtp::{self, Smtp},
    tls::{ServerTls, TlsProxy},
};

/// Time limit for rendering a few Apps. Generating RSA keys takes longest.
const RENDER_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a server to become ready. It takes a second, longer on a loaded machine.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a drain. In a drain, a server waits for running requests.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// Settings for a service. A test can change them.
pub struct Builder {
    /// Socket address of the first server's public API.
    public: SocketAddr,
    /// The URL of the TLS proxy in front of the first server, if there is one.
    base_url: Option<String>,
    apps: Vec<App>,
    providers: Vec<Provider>,
    smtp: smtp::Options,
    redis: Option<redis::Options>,
    /// URL and CA file of a Redis that the test has started.
    external_redis: Option<(String, Option<PathBuf>)>,
    postgres: Option<postgres::Options>,
    proxied: bool,
    servers: usize,
    watch: bool,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    wrapper: Vec<String>,
    server_program: Option<PathBuf>,
}

/// A running service. Dropping this value ends the processes that the service does not share with other tests. If the
/// test fails, the folder of the service's files and the end of each server's log are printed.
pub struct Stack {
    pub smtp: Smtp,
    pub database: Database,
    /// The proxy in front of Postgres, if the test requested proxies.
    pub postgres_proxy: Option<Proxy>,
    /// The proxy in front of Redis, if the test requested proxies.
    pub redis_proxy: Option<Proxy>,
    servers: Vec<ServerProcess>,
    postgres: SharedOrOwn<Postgres>,
    redis: Option<SharedOrOwn<Redis>>,
    watcher: Option<Process>,
    base_url: String,
    dir: PathBuf,
}

/// A `latchkey-server` process, running or not.
pub struct ServerProcess {
    pub public: SocketAddr,
    pub admin: SocketAddr,
    pub ops: SocketAddr,
    index: usize,
    dir: PathBuf,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    wrapper: Vec<String>,
    /// The program, if it is not the build of this repository.
    program: Option<PathBuf>,
    process: Mutex<Option<Process>>,
}

/// A store or control plane that all tests of this process share, or that only this test uses.
pub(crate) enum SharedOrOwn<T: 'static> {
    Shared(&'static T),
    Own(Box<T>),
}

impl<T> std::ops::Deref for SharedOrOwn<T> {
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

    /// Adds a Provider and its Secret. Apps reference it with [`App::provider`].
    pub fn provider(mut self, provider: &Provider) -> Self {
        self.providers.push(provider.clone());
        self
    }

    /// The callback URL to register at a provider, known before the service starts.
    pub fn callback(&self, app: &App, provider: &Provider) -> String {
        let base = self.base_url.clone().unwrap_or_else(|| format!("http://{}", self.public));
        format!("{base}/{}/{}/callback", app.id(), provider.name())
    }

    /// Puts a TLS proxy in front of the first server. Users call the proxy's URL.
    pub async fn behind_tls(mut self, tls: &ServerTls) -> Result<(Self, TlsProxy)> {
        let front = TlsProxy::start(tls, self.public).await?;
        self.base_url = Some(front.url("localhost"));
        Ok((self, front))
    }

    /// Sets the options of the service's relay, which delivers the mails of Apps without their own relay.
    pub fn smtp(mut self, options: smtp::Options) -> Self {
        self.smtp = options;
        self
    }

    /// Starts a Redis that only this test uses, so the test can break it.
    pub fn own_redis(mut self, options: redis::Options) -> Self {
        self.redis = Some(options);
        self
    }

    /// Uses a Redis that the test has started. If it accepts only TLS, `ca` is the CA file for its certificates.
    pub fn external_redis(mut self, url: &str, ca: Option<&Path>) -> Self {
        self.external_redis = Some((url.to_owned(), ca.map(Path::to_owned)));
        self
    }

    /// Starts a Postgres that only this test uses, so the test can break it.
    pub fn own_postgres(mut self, options: postgres::Options) -> Self {
        self.postgres = Some(options);
        self
    }

    /// Puts proxies in front of Postgres and Redis.
    pub fn proxied(mut self) -> Self {
        self.proxied = true;
        self
    }

    /// Starts this number of servers with the same stores.
    pub fn servers(mut self, servers: usize) -> Self {
        self.servers = servers;
        self
    }

    /// Runs the operator as `render --watch`, which renders manifests as soon as they change.
    pub fn watch(mut self) -> Self {
        self.watch = true;
        self
    }

    /// Adds flags to the servers' command line.
    pub fn args<I: IntoIterator<Item: AsRef<str>>>(mut self, args: I) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the servers as arguments of this command ([`Program::wrapper`]).
    pub fn wrapper(mut self, command: &[String]) -> Self {
        self.wrapper = command.to_vec();
        self
    }

    /// Starts the servers from this program, for example another build.
    pub fn server_program(mut self, program: &Path) -> Self {
        self.server_program = Some(program.to_owned());
        self
    }

    /// Starts everything and waits until it is ready. Panics if that fails.
    pub async fn start(self) -> Stack {
        self.try_start().await.expect("the service starts")
    }

    pub async fn try_start(self) -> Result<Stack> {
        let dir = process::fresh_dir("stack");
        for folder in ["manifests", "rendered", "keys"] {
            fs::create_dir_all(dir.join(folder))?;
        }
        let postgres = start_postgres(self.postgres).await?;
        let redis = match &self.external_redis {
            Some(_) => None,
            None => Some(start_redis(self.redis).await?),
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
        let (redis_url, redis_ca) = match (self.external_redis, &redis) {
            (Some(given), _) => given,
            (None, Some(redis)) => {
                let url = redis_proxy.as_ref().map_or_else(|| redis.url(), |proxy| redis.url_at(proxy.addr()));
                (url, redis.ca().map(Path::to_owned))
            }
            (None, None) => bail!("a service has a Redis"),
        };
        write_store_files(&dir, &database_url, &redis_url, &smtp)?;

        let mut envs = self.envs;
        let authorities =
            [smtp.ca().map(str::to_owned), read_optional(postgres.ca())?, read_optional(redis_ca.as_deref())?];
        envs.extend(write_authorities(&dir, authorities.into_iter().flatten().collect())?);
        let mut servers: Vec<ServerProcess> = Vec::new();
        let mut args = vec!["--config-dir".to_owned(), dir.join("rendered").display().to_string()];
        args.extend(self.args);
        for index in 0..self.servers {
            let public = if index == 0 { self.public } else { process::free_addr() };
            let ops = process::free_addr();
            let base_url = self.base_url.clone().unwrap_or_else(|| {
                let first = servers.first().map_or(public, |first| first.public);
                format!("http://{first}")
            });
            let mut server = ServerProcess::new(index, &dir, (public, ops), &base_url, &args, &envs);
            server.program.clone_from(&self.server_program);
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
            server.wait_until_ready().await?;
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
            external_redis: None,
            postgres: None,
            proxied: false,
            servers: 1,
            watch: false,
            args: Vec::new(),
            // Without a load balancer, a drain has nothing to wait for. Servers must not use the proxy of this machine.
            // Variables of a test override these two variables.
            envs: vec![
                ("LATCHKEY_DRAIN_SECONDS".to_owned(), "0".to_owned()),
                ("HTTPS_PROXY".to_owned(), String::new()),
            ],
            wrapper: Vec::new(),
            server_program: None,
        }
    }

    /// Starts one server with this App.
    pub async fn with(app: &App) -> Self {
        Self::builder().app(app).start().await
    }

    /// A client of the first server, with its own client address.
    pub fn client(&self) -> ApiClient {
        ApiClient::new(self.servers[0].public)
    }

    /// A client of the server with this index, with its own client address.
    pub fn client_of(&self, server: usize) -> ApiClient {
        ApiClient::new(self.servers[server].public)
    }

    pub fn server(&self) -> &ServerProcess {
        &self.servers[0]
    }

    pub fn servers(&self) -> &[ServerProcess] {
        &self.servers
    }

    pub fn mails(&self) -> &Mailbox {
        self.smtp.mails()
    }

    pub fn postgres(&self) -> &Postgres {
        &self.postgres
    }

    /// The Redis of this service. Panics if the test uses [`Builder::external_redis`].
    pub fn redis(&self) -> &Redis {
        self.redis.as_ref().expect("the test does not run its own Redis")
    }

    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The `iss` of the App's tokens.
    pub fn issuer(&self, app: &App) -> String {
        format!("{}/{}", self.base_url, app.id())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The folder of the rendered documents.
    pub fn rendered(&self) -> PathBuf {
        self.dir.join("rendered")
    }

    /// Creates or replaces the manifest of an App. Renders it, unless `render --watch` runs.
    pub fn apply(&self, app: &App) -> Result<()> {
        self.write_manifest(app)?;
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// Creates or replaces the manifests of several Apps and Providers. Renders once, unless `render --watch` runs.
    pub fn apply_all(&self, apps: &[App], providers: &[Provider]) -> Result<()> {
        for provider in providers {
            self.write_provider(provider)?;
        }
        for app in apps {
            self.write_manifest(app)?;
        }
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// Deletes the manifest of an App. Renders, unless `render --watch` runs.
    pub fn delete(&self, app: &App) -> Result<()> {
        fs::remove_file(self.manifest_path(app))?;
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// Starts one more server with the same stores. It serves the documents in another folder, for example older ones.
    /// It ends when the returned value is dropped.
    pub async fn start_server_with_documents(&self, folder: &Path) -> Result<ServerProcess> {
        self.start_further_server(&[("--config-dir", folder.display().to_string())], &[]).await
    }

    /// Starts one more server with the same stores and documents, and with further arguments. It ends when the returned
    /// value is dropped.
    pub async fn start_server_with_args(&self, further: &[&str]) -> Result<ServerProcess> {
        self.start_further_server(&[], further).await
    }

    async fn start_further_server(&self, changed: &[(&str, String)], further: &[&str]) -> Result<ServerProcess> {
        let first = self.server();
        let (public, admin, ops) = (process::free_addr(), process::free_addr(), process::free_addr());
        let mut args = first.args.clone();
        let addresses = [
            ("--public-addr", public.to_string()),
            ("--admin-addr", admin.to_string()),
            ("--ops-addr", ops.to_string()),
        ];
        for (flag, value) in addresses.iter().chain(changed) {
            let at = args.iter().position(|arg| arg == flag).with_context(|| format!("servers have no {flag}"))?;
            args[at + 1].clone_from(value);
        }
        args.extend(further.iter().map(|arg| (*arg).to_owned()));
        let server = ServerProcess {
            public,
            admin,
            ops,
            index: self.servers.len(),
            dir: self.dir.clone(),
            args,
            envs: first.envs.clone(),
            wrapper: first.wrapper.clone(),
            program: first.program.clone(),
            process: Mutex::new(None),
        };
        server.start_ready().await?;
        Ok(server)
    }

    /// Creates or replaces the manifest of a Client. Renders it, unless `render --watch` runs.
    pub fn apply_client(&self, client: &Client) -> Result<()> {
        let path = self.dir.join(format!("manifests/client-{}.yaml", client.name()));
        postgres::write_private(&path, &client.manifest())?;
        if self.watcher.is_none() { self.render() } else { Ok(()) }
    }

    /// The secret that the operator has created for a Client.
    pub fn client_secret(&self, client: &Client) -> Result<String> {
        let path = self.dir.join("keys").join(client.secret_file());
        let text = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let secret: Value = serde_json::from_slice(&text)?;
        Ok(secret["client-secret"].as_str().context("a client has a secret")?.to_owned())
    }

    /// Waits until every server serves the rendered document of an App.
    pub async fn wait_until_served(&self, app: &App) -> Result<()> {
        let document = fs::read(self.rendered().join(format!("{}.json", app.id())))?;
        let revision = Revision::of(&document);
        for server in &self.servers {
            let served = tokio::time::timeout(READY_LIMIT, server.wait_for_revision(revision.as_str())).await;
            served.with_context(|| format!("server {} does not serve the new document", server.index))??;
        }
        Ok(())
    }

    /// Runs `latchkey-operator render` once.
    pub fn render(&self) -> Result<()> {
        self.render_program("render").run(RENDER_LIMIT)
    }

    fn render_program(&self, name: &str) -> Program {
        let operator = process::find_built_program("latchkey-operator").expect("the operator's program is built");
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
            let log = server.log_path();
            eprintln!("--- the end of {}:\n{}", log.display(), process::tail(&log, 40));
        }
        eprintln!("--- Postgres: {}", self.postgres.process().log_path().display());
    }
}

// === impl ServerProcess ===

impl ServerProcess {
    /// A server that is not started yet. `dir` contains the files of [`write_store_files`]. `extra_flags` are added to
    /// the command line, for example the flag for the source of the rendered documents.
    pub(crate) fn new(
        index: usize,
        dir: &Path,
        (public, ops): (SocketAddr, SocketAddr),
        base_url: &str,
        extra_flags: &[String],
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
        args.extend(mock_provider::unreachable_provider_args());
        args.extend(extra_flags.iter().cloned());
        Self {
            public,
            admin,
            ops,
            index,
            dir: dir.to_owned(),
            args,
            envs: envs.to_vec(),
            wrapper: Vec::new(),
            program: None,
            process: Mutex::new(None),
        }
    }

    /// From now on, starts the server as an argument of this command ([`Program::wrapper`]).
    pub(crate) fn wrapper(mut self, command: &[String]) -> Self {
        self.wrapper = command.to_vec();
        self
    }

    pub fn log_path(&self) -> PathBuf {
        self.dir.join(format!("server-{}.log", self.index))
    }

    /// The server's complete log, including earlier starts.
    pub fn read_log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Starts the server. Each start uses the same socket addresses. Does not wait until the server is ready
    /// ([`ServerProcess::wait_until_ready`] does).
    pub fn start(&self) -> Result<()> {
        let name = format!("server {}", self.index);
        let path = self.program.clone().map_or_else(|| process::find_built_program("latchkey-server"), Ok)?;
        let mut program = Program::new(&name, path, self.log_path()).args(&self.args).wrapper(&self.wrapper);
        for (name, value) in &self.envs {
            program = program.env(name, value);
        }
        let previous_process = process::lock(&self.process).replace(program.start()?);
        drop(previous_process);
        Ok(())
    }

    /// Waits until the server reports that it is ready.
    pub async fn wait_until_ready(&self) -> Result<()> {
        let client = ApiClient::new(self.ops);
        let end = tokio::time::Instant::now() + READY_LIMIT;
        loop {
            if let Some(status) = self.exit_status() {
                bail!("the server ended with {status}:\n{}", process::tail(&self.log_path(), 30));
            }
            let reason = match client.try_send(client.request(http::Method::GET, "readyz")).await {
                Ok(response) if response.status.is_success() => return Ok(()),
                Ok(response) => response.text,
                Err(error) => format!("{error:#}"),
            };
            if tokio::time::Instant::now() > end {
                bail!("the server is not ready ({reason}):\n{}", process::tail(&self.log_path(), 30));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the server has loaded a document with this revision. If the server never loads it, waits forever.
    async fn wait_for_revision(&self, revision: &str) -> Result<()> {
        let mut stream = ApiClient::new(self.ops).request(http::Method::GET, "revisions").send().await?;
        let mut received = Vec::new();
        while let Some(chunk) = stream.chunk().await? {
            received.extend_from_slice(&chunk);
            if String::from_utf8_lossy(&received).contains(revision) {
                return Ok(());
            }
        }
        bail!("the stream of revisions ended")
    }

    /// Starts the server and waits until it is ready.
    pub async fn start_ready(&self) -> Result<()> {
        self.start()?;
        self.wait_until_ready().await
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        // The drop sends SIGKILL and waits.
        drop(process::lock(&self.process).take());
    }

    /// Sends SIGTERM and waits until the server exits. `None` if it was not running or had to be killed.
    pub async fn terminate(&self) -> Option<ExitStatus> {
        let process = process::lock(&self.process).take()?;
        process.signal(Signal::TERM);
        tokio::time::timeout(DRAIN_LIMIT, process.wait_for_exit()).await.ok()
    }

    /// Sends SIGTERM and does not wait.
    pub fn begin_drain(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends SIGSTOP. Connections to the server can still be opened, but requests get no response.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Sends SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// The exit status if the server has ended by itself.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        process::lock(&self.process).as_ref().and_then(Process::exit_status)
    }

    pub fn pid(&self) -> Option<u32> {
        process::lock(&self.process).as_ref().map(Process::pid)
    }

    /// Sends a GET request to the operations port.
    pub async fn get_ops(&self, path: &str) -> ApiResponse {
        ApiClient::new(self.ops).get(path).await
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = &*process::lock(&self.process) {
            process.signal(signal);
        }
    }
}

async fn start_postgres(own: Option<postgres::Options>) -> Result<SharedOrOwn<Postgres>> {
    Ok(match own {
        None => SharedOrOwn::Shared(Postgres::shared().await),
        Some(options) => SharedOrOwn::Own(Box::new(Postgres::start(options).await?)),
    })
}

async fn start_redis(own: Option<redis::Options>) -> Result<SharedOrOwn<Redis>> {
    Ok(match own {
        None => SharedOrOwn::Shared(Redis::shared().await),
        Some(options) => SharedOrOwn::Own(Box::new(Redis::start(options).await?)),
    })
}

/// Writes the CA certificates that servers must trust. Returns the environment variable that names their file.
fn write_authorities(dir: &Path, authorities: Vec<String>) -> Result<Option<(String, String)>> {
    if authorities.is_empty() {
        return Ok(None);
    }
    // If `SSL_CERT_FILE` is set, rustls-native-certs reads that file instead of the system's certificates.
    let bundle = dir.join("authorities.pem");
    fs::write(&bundle, authorities.concat())?;
    Ok(Some(("SSL_CERT_FILE".to_owned(), bundle.display().to_string())))
}

/// Writes the files that servers read: the URLs of the stores, and the settings of the relay.
pub(crate) fn write_store_files(dir: &Path, database_url: &str, redis_url: &str, smtp: &Smtp) -> Result<()> {
    postgres::write_private(&dir.join("database-url"), database_url)?;
    postgres::write_private(&dir.join("redis-url"), redis_url)?;
    write_smtp_file(&dir.join("smtp.json"), smtp, "hello@latchkey.test")
}

/// Writes the relay's settings in the format of the server's `--smtp-file`.
pub fn write_smtp_file(path: &Path, smtp: &Smtp, from: &str) -> Result<()> {
    let relay = Relay::of(smtp);
    let mut file = json!({ "host": relay.host, "port": relay.port, "tls": relay.tls, "from": from });
    if let Some((name, password)) = relay.login {
        file["username"] = json!(name);
        file["password"] = json!(password);
    }
    postgres::write_private(path, &serde_json::to_string_pretty(&file)?)
}

fn read_optional(path: Option<&Path>) -> Result<Option<String>> {
    Ok(match path {
        Some(path) => Some(fs::read_to_string(path)?),
        None => None,
    })
}
