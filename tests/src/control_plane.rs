//! A real Kubernetes control plane in processes of our own: etcd and kube-apiserver with RBAC, TLS and an audit log; one
//! for all tests of a process, or one for a test that breaks it.
//!
//! No controller runs beside it. So nobody makes EndpointSlices or a namespace's default ServiceAccount, nobody fills
//! aggregated ClusterRoles or collects what belonged to a deleted owner, and a namespace that is deleted stays in
//! `Terminating` with its objects. A test that needs one of these makes it itself.

pub mod audit;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{Namespace, ServiceAccount},
};
use kube::{
    Api, Client, Config,
    api::{ObjectMeta, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use rcgen::KeyPair;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::{
    control_plane::audit::{Event, Mark},
    postgres::write_private,
    process::{self, Process, Program},
    tls::{self, Authority},
    tools,
};

/// It starts within a few seconds; a loaded machine takes longer.
const START_LIMIT: Duration = Duration::from_secs(120);
/// A server that drains waits for what runs.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// For one question whether it is ready. A server that is about to start may hold it.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Longer than any test or benchmark runs.
const TOKEN_SECONDS: i64 = 24 * 3600;
/// Of the tokens of ServiceAccounts.
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// What is written to the audit log: who asked for what and what became of it, no bodies. Left out are the API server's
/// own requests to itself and those without a resource (health, discovery).
const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: ['system:apiserver']
- level: None
  nonResourceURLs: ['*']
- level: Metadata
";

/// A running control plane. It is killed when this value is dropped.
pub struct ControlPlane {
    dir: PathBuf,
    programs: Programs,
    addr: SocketAddr,
    etcd_addr: SocketAddr,
    /// None where it was stopped.
    api_server: Mutex<Option<Process>>,
    /// Dropped after the API server, which would complain.
    _etcd: Process,
}

/// A ServiceAccount with a token, as a pod of it has.
#[derive(Clone, Debug)]
pub struct Account {
    namespace: String,
    name: String,
    credential: String,
    token_file: PathBuf,
    kubeconfig: PathBuf,
}

struct Programs {
    etcd: PathBuf,
    api_server: PathBuf,
}

/// `kubectl` of the control plane's version.
pub fn kubectl() -> Result<PathBuf> {
    control_plane_program("kubectl")
}

/// The `helm` of `tests/tools`.
pub fn helm() -> Result<PathBuf> {
    tools::built("tools", "helm.sh/helm/v4", "helm", "helm")
}

/// From `KUBEBUILDER_ASSETS` where that is set, else as `scripts/need` built it.
fn control_plane_program(name: &str) -> Result<PathBuf> {
    match std::env::var_os("KUBEBUILDER_ASSETS").filter(|folder| !folder.is_empty()) {
        Some(folder) => {
            let path = Path::new(&folder).join(name);
            if !path.is_file() {
                bail!("KUBEBUILDER_ASSETS is set, but {} is not there", path.display());
            }
            Ok(path)
        }
        None => tools::built("tools", "k8s.io/kubernetes", "control-plane", name),
    }
}

// === impl ControlPlane ===

impl ControlPlane {
    /// The one of this test process. Each test has namespaces of its own.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<ControlPlane> = OnceCell::const_new();
        SHARED.get_or_init(|| async { Self::start().await.expect("the control plane starts") }).await
    }

    /// One of its own, for a test that breaks it or that counts every request.
    pub async fn start() -> Result<Self> {
        let dir = process::fresh_dir("control-plane");
        let programs =
            Programs { etcd: control_plane_program("etcd")?, api_server: control_plane_program("kube-apiserver")? };
        let (addr, etcd_addr) = (process::free_addr(), process::free_addr());
        write_certificates(&dir)?;
        fs::write(dir.join("audit-policy.yaml"), AUDIT_POLICY)?;
        let etcd = start_etcd(&programs.etcd, &dir, etcd_addr)?;
        let this = Self { dir, programs, addr, etcd_addr, api_server: Mutex::new(None), _etcd: etcd };
        this.write_kubeconfig(&this.admin_kubeconfig(), this.addr, "default", &this.admin_user())?;
        this.start_api_server().await?;
        Ok(this)
    }

    /// Where the API server listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A client that may do everything. It belongs to the runtime of the test that asks.
    pub async fn admin(&self) -> Client {
        client_of(&self.admin_kubeconfig()).await.expect("a client for the control plane's administrator")
    }

    /// The same, but by way of another address (a proxy's).
    pub async fn admin_at(&self, addr: SocketAddr) -> Result<Client> {
        let kubeconfig = process::fresh_dir("admin").join("kubeconfig");
        self.write_kubeconfig(&kubeconfig, addr, "default", &self.admin_user())?;
        client_of(&kubeconfig).await
    }

    /// The file by which `kubectl` acts as the administrator.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// Makes a namespace whose name begins with `prefix` and is no other test's.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        let name = format!("{prefix}-{:08x}", rand::random::<u32>());
        let namespace = Namespace {
            metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
            ..Namespace::default()
        };
        Api::all(self.admin().await).create(&PostParams::default(), &namespace).await?;
        Ok(name)
    }

    /// A token of a ServiceAccount that is there, with the files that a program needs to act as it.
    pub async fn account(&self, namespace: &str, name: &str) -> Result<Account> {
        let request = TokenRequest {
            spec: TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() },
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.admin().await, namespace);
        let answer = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        let token = answer.status.context("a TokenRequest is answered with a token")?.token;
        let dir = process::fresh_dir("account");
        let account = Account {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            credential: credential_of(&token)?,
            token_file: dir.join("token"),
            kubeconfig: dir.join("kubeconfig"),
        };
        write_private(&account.token_file, &token)?;
        self.write_kubeconfig(&account.kubeconfig, self.addr, namespace, &account.user())?;
        Ok(account)
    }

    /// A token of a ServiceAccount for that audience, as a projected volume holds it.
    pub async fn token(&self, namespace: &str, name: &str, audience: &str) -> Result<String> {
        let spec = TokenRequestSpec { audiences: vec![audience.to_owned()], ..TokenRequestSpec::default() };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.admin().await, namespace);
        let answer = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        Ok(answer.status.context("a TokenRequest is answered with a token")?.token)
    }

    /// The private key (PEM) by which the API server signs such tokens.
    pub fn account_key(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join("accounts.key"))?)
    }

    /// From its next start the API server signs with a new key, and takes what the one before signed, or not.
    pub fn rotate_account_key(&self, takes_old: bool) -> Result<()> {
        let key = KeyPair::generate()?;
        let public = self.dir.join("accounts.pub");
        let old = if takes_old { fs::read_to_string(&public)? } else { String::new() };
        fs::write(public, key.public_key_pem() + &old)?;
        write_private(&self.dir.join("accounts.key"), &key.serialize_pem())
    }

    /// The same account, but by way of another address (a proxy's).
    pub fn account_at(&self, account: &Account, addr: SocketAddr) -> Result<Account> {
        let account = Account { kubeconfig: process::fresh_dir("account").join("kubeconfig"), ..account.clone() };
        self.write_kubeconfig(&account.kubeconfig, addr, &account.namespace, &account.user())?;
        Ok(account)
    }

    // --- The API server as a process

    /// SIGTERM, and waits for its end.
    pub fn stop(&self) {
        let process = process::lock(&self.api_server).take();
        if let Some(process) = process {
            process.stop(Signal::TERM, STOP_LIMIT);
        }
    }

    /// As `kill -9`.
    pub fn kill(&self) {
        // Dropping it kills it, and waits.
        drop(process::lock(&self.api_server).take());
    }

    /// SIGSTOP: it is there and says nothing.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts it on the same port with the same data, where it was stopped or killed, and waits until it is ready.
    pub async fn start_api_server(&self) -> Result<()> {
        let process = self.api_server_program().start()?;
        drop(process::lock(&self.api_server).replace(process));
        let end = tokio::time::Instant::now() + START_LIMIT;
        loop {
            let said = match tokio::time::timeout(ANSWER_LIMIT, self.readyz()).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => format!("{error:#}"),
                Err(_) => format!("no answer within {ANSWER_LIMIT:?}"),
            };
            let ended = process::lock(&self.api_server).as_ref().and_then(Process::ended);
            if let Some(status) = ended {
                bail!("kube-apiserver ended with {status}:\n{}", process::tail(&self.log(), 30));
            }
            if tokio::time::Instant::now() > end {
                bail!("kube-apiserver is not ready ({said}):\n{}", process::tail(&self.log(), 30));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join("kube-apiserver.log")
    }

    // --- The audit log

    /// The end of the audit log as it is now.
    pub fn audit_mark(&self) -> Mark {
        audit::mark(&self.audit_log())
    }

    /// What was asked of the API server since then and has been answered (of a watch: has begun).
    pub fn audit_since(&self, mark: Mark) -> Result<Vec<Event>> {
        audit::since(&self.audit_log(), mark)
    }

    fn audit_log(&self) -> PathBuf {
        self.dir.join("audit.log")
    }

    async fn readyz(&self) -> Result<()> {
        let client = client_of(&self.admin_kubeconfig()).await?;
        client.request_text(http::Request::get("/readyz").body(Vec::new())?).await?;
        Ok(())
    }

    fn api_server_program(&self) -> Program {
        let file = |name: &str| self.dir.join(name);
        Program::new("kube-apiserver", &self.programs.api_server, self.log())
            .args(["--etcd-servers", &format!("http://{}", self.etcd_addr)])
            .args(["--bind-address", &self.addr.ip().to_string(), "--secure-port", &self.addr.port().to_string()])
            // It refuses to find out by itself where there is no network but loopback.
            .args(["--advertise-address", &self.addr.ip().to_string(), "--endpoint-reconciler-type", "none"])
            .args(["--service-cluster-ip-range", "10.96.0.0/16"])
            .path_arg("--tls-cert-file", &file("server.pem"))
            .path_arg("--tls-private-key-file", &file("server.key"))
            .path_arg("--client-ca-file", &file("ca.pem"))
            .args(["--authorization-mode", "RBAC"])
            .args(["--service-account-issuer", ISSUER])
            .path_arg("--service-account-signing-key-file", &file("accounts.key"))
            .path_arg("--service-account-key-file", &file("accounts.pub"))
            .path_arg("--audit-policy-file", &file("audit-policy.yaml"))
            .path_arg("--audit-log-path", &self.audit_log())
            // In MB. It is never rotated: a mark is a place in the one file.
            .args(["--audit-log-maxsize", "1000000"])
            .args(["--profiling=false"])
    }

    fn admin_user(&self) -> UserEntry {
        UserEntry::Certificate { certificate: self.dir.join("admin.pem"), key: self.dir.join("admin.key") }
    }

    fn write_kubeconfig(&self, path: &Path, addr: SocketAddr, namespace: &str, user: &UserEntry) -> Result<()> {
        let user = match user {
            UserEntry::Certificate { certificate, key } => {
                json!({ "client-certificate": certificate, "client-key": key })
            }
            UserEntry::Token(file) => json!({ "tokenFile": file }),
        };
        let cluster = json!({
            "server": format!("https://{addr}"),
            "certificate-authority": self.dir.join("ca.pem"),
        });
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "tests", "cluster": cluster }],
            "users": [{ "name": "tests", "user": user }],
            "contexts": [{
                "name": "tests",
                "context": { "cluster": "tests", "user": "tests", "namespace": namespace },
            }],
            "current-context": "tests",
        });
        write_private(path, &serde_yaml::to_string(&kubeconfig)?)
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = &*process::lock(&self.api_server) {
            process.signal(signal);
        }
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- the control plane of this test: {}", self.dir.display());
            eprintln!("--- the end of {}:\n{}", self.log().display(), process::tail(&self.log(), 20));
        }
    }
}

// === impl Account ===

impl Account {
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// As the API server calls it, in RBAC and in the audit log.
    pub fn user_name(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }

    /// Its token, as the audit log calls it: by it two programs of one ServiceAccount are told apart.
    pub fn credential(&self) -> &str {
        &self.credential
    }

    /// For a program's `KUBECONFIG`.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A client that acts as it. It belongs to the runtime of the test that asks.
    pub async fn client(&self) -> Client {
        client_of(&self.kubeconfig).await.expect("a client for a ServiceAccount")
    }

    fn user(&self) -> UserEntry {
        UserEntry::Token(self.token_file.clone())
    }
}

enum UserEntry {
    Certificate { certificate: PathBuf, key: PathBuf },
    Token(PathBuf),
}

fn credential_of(token: &str) -> Result<String> {
    let claims = token.split('.').nth(1).context("a token is a JWT")?;
    let claims: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims)?)?;
    let id = claims["jti"].as_str().context("a token has an id")?;
    Ok(format!("JTI={id}"))
}

async fn client_of(kubeconfig: &Path) -> Result<Client> {
    tls::install_crypto_provider();
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn write_certificates(dir: &Path) -> Result<()> {
    let authority = Authority::new()?;
    let server = authority.server(&["localhost", "127.0.0.1", "kubernetes.default.svc"])?;
    let admin = authority.client("admin", "system:masters")?;
    let accounts = KeyPair::generate()?;
    fs::write(dir.join("ca.pem"), authority.certificate())?;
    for (name, identity) in [("server", &server), ("admin", &admin)] {
        fs::write(dir.join(format!("{name}.pem")), &identity.certificate)?;
        write_private(&dir.join(format!("{name}.key")), &identity.key)?;
    }
    fs::write(dir.join("accounts.pub"), accounts.public_key_pem())?;
    write_private(&dir.join("accounts.key"), &accounts.serialize_pem())
}

fn start_etcd(program: &Path, dir: &Path, addr: SocketAddr) -> Result<Process> {
    let (clients, peers) = (format!("http://{addr}"), format!("http://{}", process::free_addr()));
    Program::new("etcd", program, dir.join("etcd.log"))
        .path_arg("--data-dir", &dir.join("etcd"))
        .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
        .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
        .args(["--initial-cluster", &format!("default={peers}")])
        // Its data ends with it.
        .arg("--unsafe-no-fsync")
        // The benchmark with 10,000 Apps stays below it.
        .args(["--quota-backend-bytes", "4294967296"])
        .args(["--log-level", "warn"])
        .start()
}
