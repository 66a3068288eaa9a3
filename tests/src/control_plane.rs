//! A real Kubernetes control plane in its own processes: etcd and kube-apiserver with RBAC, TLS and an audit log. All
//! tests of a process share one control plane. A test that breaks the control plane starts its own.
//!
//! No controller runs. So nothing creates EndpointSlices or a namespace's default ServiceAccount, nothing fills
//! aggregated ClusterRoles, and nothing deletes the objects of a deleted owner. A deleted namespace stays in
//! `Terminating` with its objects. A test that needs the effect of a controller produces it itself.

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
    control_plane::audit::{AuditEvent, Mark},
    postgres::write_private,
    process::{self, Process, Program},
    tls::{self, CertificateAuthority},
    tools,
};

/// Time limit for the API server to start. This takes a few seconds, longer on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Time limit for the API server to exit. It waits for running requests first.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for one readiness check. An API server that is about to start can delay the response.
const READYZ_LIMIT: Duration = Duration::from_secs(5);
/// Lifetime of tokens; no test or benchmark runs longer.
const TOKEN_SECONDS: i64 = 24 * 3600;
/// The issuer of ServiceAccount tokens.
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// The audit log contains who requested what, and the result, without bodies. It does not contain requests that the API
/// server sends to itself, or requests without a resource (health, discovery).
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
    programs: ProgramPaths,
    addr: SocketAddr,
    etcd_addr: SocketAddr,
    /// Additional arguments for the API server.
    args: Vec<String>,
    /// `None` while the API server is stopped.
    api_server: Mutex<Option<Process>>,
    /// Dropped after the API server, because without etcd the API server logs errors.
    _etcd: Process,
}

/// A ServiceAccount with a token, and a kubeconfig for a program that uses the token.
#[derive(Clone, Debug)]
pub struct ServiceAccountToken {
    namespace: String,
    name: String,
    credential: String,
    token_file: PathBuf,
    kubeconfig: PathBuf,
}

struct ProgramPaths {
    etcd: PathBuf,
    api_server: PathBuf,
}

/// The path of a `kubectl` of the same version as the control plane.
pub fn kubectl() -> Result<PathBuf> {
    control_plane_program("kubectl")
}

/// The path of a `helm` of the version in `tests/tools/go.mod`.
pub fn helm() -> Result<PathBuf> {
    tools::built_tool("tools", "helm.sh/helm/v4", "helm", "helm")
}

/// The path of a program: in the folder `KUBEBUILDER_ASSETS` if this environment variable is set, otherwise where
/// `scripts/need` built the program.
fn control_plane_program(name: &str) -> Result<PathBuf> {
    match std::env::var_os("KUBEBUILDER_ASSETS").filter(|folder| !folder.is_empty()) {
        Some(folder) => {
            let path = Path::new(&folder).join(name);
            if !path.is_file() {
                bail!("KUBEBUILDER_ASSETS is set, but {} does not exist", path.display());
            }
            Ok(path)
        }
        None => tools::built_tool("tools", "k8s.io/kubernetes", "control-plane", name),
    }
}

// === impl ControlPlane ===

impl ControlPlane {
    /// The control plane that all tests of this process share. Each test uses its own namespaces.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<ControlPlane> = OnceCell::const_new();
        SHARED.get_or_init(|| async { Self::start().await.expect("the control plane starts") }).await
    }

    /// Starts a control plane that only one test uses, because the test breaks it or counts every request.
    pub async fn start() -> Result<Self> {
        Self::start_with(&[]).await
    }

    /// Starts a control plane that only one test uses, with additional arguments for the API server.
    pub async fn start_with(args: &[&str]) -> Result<Self> {
        let dir = process::fresh_dir("control-plane");
        let programs =
            ProgramPaths { etcd: control_plane_program("etcd")?, api_server: control_plane_program("kube-apiserver")? };
        let (addr, etcd_addr) = (process::free_addr(), process::free_addr());
        write_certificates(&dir)?;
        fs::write(dir.join("audit-policy.yaml"), AUDIT_POLICY)?;
        let etcd = start_etcd(&programs.etcd, &dir, etcd_addr)?;
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let this = Self { dir, programs, addr, etcd_addr, args, api_server: Mutex::new(None), _etcd: etcd };
        this.write_kubeconfig(&this.admin_kubeconfig(), this.addr, "default", &this.admin_user())?;
        this.start_api_server().await?;
        Ok(this)
    }

    /// The socket address of the API server.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// A client with all permissions. It works only in the runtime of the test that calls this.
    pub async fn admin(&self) -> Client {
        client_of(&self.admin_kubeconfig()).await.expect("a client for the control plane's administrator")
    }

    /// Like [`ControlPlane::admin`], but through a proxy at `addr`.
    pub async fn admin_at(&self, addr: SocketAddr) -> Result<Client> {
        let kubeconfig = process::fresh_dir("admin").join("kubeconfig");
        self.write_kubeconfig(&kubeconfig, addr, "default", &self.admin_user())?;
        client_of(&kubeconfig).await
    }

    /// The administrator's kubeconfig, for `kubectl`.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// The CA of the API server's certificate.
    pub fn ca_path(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    /// Creates a namespace with a unique name that starts with `prefix`.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        let name = format!("{prefix}-{:08x}", rand::random::<u32>());
        let namespace = Namespace {
            metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
            ..Namespace::default()
        };
        Api::all(self.admin().await).create(&PostParams::default(), &namespace).await?;
        Ok(name)
    }

    /// Requests a token for an existing ServiceAccount, and writes the files that a program needs to use the token.
    pub async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccountToken> {
        let request = TokenRequest {
            spec: TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() },
            ..TokenRequest::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.admin().await, namespace);
        let response = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        let token = response.status.context("a TokenRequest returns a token")?.token;
        let dir = process::fresh_dir("account");
        let account = ServiceAccountToken {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            credential: credential_id(&token)?,
            token_file: dir.join("token"),
            kubeconfig: dir.join("kubeconfig"),
        };
        write_private(&account.token_file, &token)?;
        self.write_kubeconfig(&account.kubeconfig, self.addr, namespace, &account.user())?;
        Ok(account)
    }

    /// Requests a token of a ServiceAccount for this audience, as in a projected volume.
    pub async fn token(&self, namespace: &str, name: &str, audience: &str) -> Result<String> {
        let spec = TokenRequestSpec { audiences: vec![audience.to_owned()], ..TokenRequestSpec::default() };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.admin().await, namespace);
        let response = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        Ok(response.status.context("a TokenRequest returns a token")?.token)
    }

    /// The private key (PEM) that signs ServiceAccount tokens.
    pub fn account_key(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dir.join("accounts.key"))?)
    }

    /// Replaces the key that signs ServiceAccount tokens. The new key takes effect at the next start of the API server.
    /// If `accepts_old` is set, the API server still accepts tokens that the old key signed.
    pub fn rotate_account_key(&self, accepts_old: bool) -> Result<()> {
        let key = KeyPair::generate()?;
        let public = self.dir.join("accounts.pub");
        let old = if accepts_old { fs::read_to_string(&public)? } else { String::new() };
        fs::write(public, key.public_key_pem() + &old)?;
        write_private(&self.dir.join("accounts.key"), &key.serialize_pem())
    }

    /// A copy of this account for a program that reaches the API server through a proxy at `addr`.
    pub fn account_at(&self, account: &ServiceAccountToken, addr: SocketAddr) -> Result<ServiceAccountToken> {
        let account =
            ServiceAccountToken { kubeconfig: process::fresh_dir("account").join("kubeconfig"), ..account.clone() };
        self.write_kubeconfig(&account.kubeconfig, addr, &account.namespace, &account.user())?;
        Ok(account)
    }

    // --- The API server as a process

    /// Sends SIGTERM to the API server and waits until it ends.
    pub fn stop(&self) {
        let process = process::lock(&self.api_server).take();
        if let Some(process) = process {
            process.stop(Signal::TERM, STOP_LIMIT);
        }
    }

    /// Sends SIGKILL to the API server.
    pub fn kill(&self) {
        // The drop sends SIGKILL and waits.
        drop(process::lock(&self.api_server).take());
    }

    /// Sends SIGSTOP. Connections to the API server can still be opened, but requests get no response.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Sends SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts the API server after [`ControlPlane::stop`] or [`ControlPlane::kill`], with the same port and data, and
    /// waits until it is ready.
    pub async fn start_api_server(&self) -> Result<()> {
        let process = self.api_server_program().start()?;
        drop(process::lock(&self.api_server).replace(process));
        let end = tokio::time::Instant::now() + START_LIMIT;
        loop {
            let reason = match tokio::time::timeout(READYZ_LIMIT, self.readyz()).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => format!("{error:#}"),
                Err(_) => format!("no response within {READYZ_LIMIT:?}"),
            };
            let ended = process::lock(&self.api_server).as_ref().and_then(Process::exit_status);
            if let Some(status) = ended {
                bail!("kube-apiserver ended with {status}:\n{}", process::tail(&self.log_path(), 30));
            }
            if tokio::time::Instant::now() > end {
                bail!("kube-apiserver is not ready ({reason}):\n{}", process::tail(&self.log_path(), 30));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn log_path(&self) -> PathBuf {
        self.dir.join("kube-apiserver.log")
    }

    // --- The audit log

    /// Returns a mark for this moment. [`ControlPlane::audit_since`] returns the requests after the mark.
    pub fn audit_mark(&self) -> Mark {
        audit::mark(&self.audit_log())
    }

    /// The requests that the API server received after `mark` and has completed. A watch is included as soon as it has
    /// started or was rejected.
    pub fn audit_since(&self, mark: Mark) -> Result<Vec<AuditEvent>> {
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
        Program::new("kube-apiserver", &self.programs.api_server, self.log_path())
            .args(["--etcd-servers", &format!("http://{}", self.etcd_addr)])
            .args(["--bind-address", &self.addr.ip().to_string(), "--secure-port", &self.addr.port().to_string()])
            // By default, the API server advertises an address other than loopback, and not every machine has one. Here
            // it advertises a loopback address. It cannot publish a loopback address as its endpoint, so it publishes
            // no endpoint.
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
            // The size limit is in MB. It is so large that the log is never rotated: a mark contains an offset in one
            // file.
            .args(["--audit-log-maxsize", "1000000"])
            .args(["--profiling=false"])
            .args(&self.args)
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
            eprintln!("--- the end of {}:\n{}", self.log_path().display(), process::tail(&self.log_path(), 20));
        }
    }
}

// === impl ServiceAccountToken ===

impl ServiceAccountToken {
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The user name of the ServiceAccount in RBAC and in the audit log.
    pub fn user_name(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }

    /// The id of the token in the audit log. The id distinguishes two programs with the same ServiceAccount.
    pub fn credential(&self) -> &str {
        &self.credential
    }

    /// The kubeconfig file, for the `KUBECONFIG` of a program.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A client with the permissions of the ServiceAccount. It works only in the runtime of the test that calls this.
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

fn credential_id(token: &str) -> Result<String> {
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
    let authority = CertificateAuthority::new()?;
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
        // The data is not needed after a crash of the machine.
        .arg("--unsafe-no-fsync")
        // 4 GiB. The benchmark with 10,000 Apps needs less.
        .args(["--quota-backend-bytes", "4294967296"])
        .args(["--log-level", "warn"])
        .start()
}
