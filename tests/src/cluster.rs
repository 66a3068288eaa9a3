//! Latchkey in a cluster for one test: the chart's own objects on a real control plane, the operator and the servers as
//! real processes under the chart's ServiceAccounts, and a namespace for the test's Apps.

pub mod chart;
mod objects;
mod rbac;
mod scripted;
mod servers;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, Client, api::DeleteParams};
use latchkey_crds::{
    app,
    conditions::{Condition, ConditionStatus, ConditionType},
    provider,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

pub use self::{
    objects::apply,
    rbac::Permission,
    scripted::{ScriptedServer, Words},
    servers::{Endpoint, PodServer, ServerPod},
};
use crate::{
    builders,
    client::Anonymous,
    control_plane::{Account, ControlPlane},
    eventually, eventually_ok,
    postgres::{Database, Postgres},
    process::{self, Process, Program},
    redis::Redis,
    smtp::{self, Smtp},
    stack::{self, Store},
};

/// The API server takes definitions within a second or two.
const ESTABLISH_LIMIT: Duration = Duration::from_secs(60);
/// What the operator does, it does within a second or two; a loaded machine takes longer.
const CONDITION_LIMIT: Duration = Duration::from_secs(60);
/// An operator that ends gives its Lease back.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A control plane that knows the resources of Latchkey.
pub struct Cluster {
    plane: Store<ControlPlane>,
}

/// What a test wants of an install to be different.
pub struct Builder<'a> {
    cluster: &'a Cluster,
    everywhere: bool,
    tenants: usize,
    server_args: Vec<String>,
    server_envs: Vec<(String, String)>,
    operator_envs: Vec<(String, String)>,
    server_wrapper: Vec<String>,
    values: Vec<String>,
}

/// Latchkey, installed: in a namespace of its own, with the chart's objects, and at first without a program that runs.
/// What runs ends when this value is dropped; when the test fails it says where to look.
pub struct Install<'a> {
    pub smtp: Smtp,
    pub database: Database,
    cluster: &'a Cluster,
    admin: Client,
    release: String,
    namespace: String,
    tenants: Vec<String>,
    everywhere: bool,
    objects: Vec<Value>,
    operator: Account,
    server: Account,
    /// Where the first server listens for users.
    public: SocketAddr,
    server_args: Vec<String>,
    server_envs: Vec<(String, String)>,
    operator_envs: Vec<(String, String)>,
    server_wrapper: Vec<String>,
    servers: AtomicUsize,
    operators: AtomicUsize,
    dir: PathBuf,
}

/// A `latchkey-operator`, running or not.
pub struct Operator {
    pub ops: SocketAddr,
    identity: String,
    account: Account,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    log: PathBuf,
    process: Mutex<Option<Process>>,
}

/// A condition as a test looks at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub status: ConditionStatus,
    pub reason: String,
    pub message: String,
    /// The generation that it was judged on; -1 where nobody has judged yet.
    pub generation: i64,
}

// === impl Cluster ===

impl Cluster {
    /// The one of this test process. Its installs each watch namespaces of their own.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<Cluster> = OnceCell::const_new();
        let make = || async {
            let plane = Store::Shared(ControlPlane::shared().await);
            Self::with(plane).await.expect("the cluster knows Latchkey's resources")
        };
        SHARED.get_or_init(make).await
    }

    /// One of its own: for a test that breaks the API server, that counts every request, whose operator watches all
    /// namespaces, or that changes the definitions.
    pub async fn start() -> Result<Self> {
        Self::with(Store::Own(Box::new(ControlPlane::start().await?))).await
    }

    async fn with(plane: Store<ControlPlane>) -> Result<Self> {
        let this = Self { plane };
        this.apply_definitions().await?;
        Ok(this)
    }

    pub fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// A client that may do everything. It belongs to the runtime of the test that asks.
    pub async fn admin(&self) -> Client {
        self.plane.admin().await
    }

    /// Latchkey with one tenant's namespace, the only one that its operator watches.
    pub async fn install(&self) -> Install<'_> {
        self.builder().install().await
    }

    pub fn builder(&self) -> Builder<'_> {
        Builder {
            cluster: self,
            everywhere: false,
            tenants: 1,
            server_args: Vec::new(),
            server_envs: Vec::new(),
            operator_envs: Vec::new(),
            server_wrapper: Vec::new(),
            values: Vec::new(),
        }
    }

    /// The definitions as the chart has them, applied and taken up.
    pub async fn apply_definitions(&self) -> Result<()> {
        let client = self.admin().await;
        let rendered = helm_template("latchkey", "latchkey", &[]).await?;
        let definitions: Vec<Value> = rendered.into_iter().filter(is_definition).collect();
        ensure!(!definitions.is_empty(), "the chart has no definitions");
        for definition in &definitions {
            apply(&client, definition).await?;
        }
        let api: Api<CustomResourceDefinition> = Api::all(client);
        for definition in &definitions {
            let name = definition["metadata"]["name"].as_str().context("a definition has a name")?;
            eventually(&format!("{name} is established"), ESTABLISH_LIMIT, || async {
                let status = api.get(name).await.ok()?.status?;
                let conditions = status.conditions.unwrap_or_default();
                conditions.iter().any(|one| one.type_ == "Established" && one.status == "True").then_some(())
            })
            .await;
        }
        Ok(())
    }
}

// === impl Builder ===

impl<'a> Builder<'a> {
    /// The operator watches all namespaces. Only in a cluster of the test's own: it would take up other tests' Apps.
    pub fn everywhere(mut self) -> Self {
        assert!(matches!(self.cluster.plane, Store::Own(_)), "the shared cluster has other tests' Apps");
        self.everywhere = true;
        self
    }

    /// So many namespaces for Apps.
    pub fn tenants(mut self, tenants: usize) -> Self {
        self.tenants = tenants;
        self
    }

    /// More flags for the servers.
    pub fn server_args<I: IntoIterator<Item: AsRef<str>>>(mut self, args: I) -> Self {
        self.server_args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// An environment variable of the servers.
    pub fn server_env(mut self, name: &str, value: &str) -> Self {
        self.server_envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A variable in the operators' environment.
    pub fn operator_env(mut self, name: &str, value: &str) -> Self {
        self.operator_envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the servers by this command; see [`Program::wrapper`].
    pub fn server_wrapper(mut self, command: &[String]) -> Self {
        self.server_wrapper = command.to_vec();
        self
    }

    /// A value of the chart, as `helm --set` takes it.
    pub fn value(mut self, value: &str) -> Self {
        self.values.push(value.to_owned());
        self
    }

    /// Panics where it cannot be made, which fails the test.
    pub async fn install(self) -> Install<'a> {
        self.try_install().await.expect("Latchkey is installed")
    }

    pub async fn try_install(self) -> Result<Install<'a>> {
        let plane = self.cluster.plane();
        let namespace = plane.namespace("install").await?;
        let mut tenants = Vec::new();
        for _ in 0..self.tenants {
            tenants.push(plane.namespace("tenant").await?);
        }
        let mut values = self.values;
        if !self.everywhere {
            ensure!(!tenants.is_empty(), "an operator that watches no namespace watches all");
            values.push(format!("operator.watchNamespaces={{{}}}", tenants.join(",")));
        }
        let release = "latchkey".to_owned();
        let rendered = helm_template(&release, &namespace, &values).await?;
        let objects: Vec<Value> = rendered.into_iter().filter(|object| !is_definition(object)).collect();
        let client = plane.admin().await;
        for object in &objects {
            apply(&client, object).await?;
        }
        let account = |component: &'static str| {
            let found = objects.iter().find(|object| {
                object["kind"] == "ServiceAccount"
                    && object["metadata"]["labels"]["app.kubernetes.io/component"] == component
            });
            found.and_then(|object| object["metadata"]["name"].as_str()).map(str::to_owned)
        };
        let operator = account("operator").context("the chart has the operator's ServiceAccount")?;
        let server = account("server").context("the chart has the servers' ServiceAccount")?;

        let dir = process::fresh_dir("install");
        let database = Postgres::shared().await.database().await?;
        let smtp = Smtp::start(smtp::Options::plain()).await?;
        stack::write_store_files(&dir, &database.url, &Redis::shared().await.url(), &smtp)?;
        Ok(Install {
            smtp,
            database,
            cluster: self.cluster,
            admin: client,
            operator: plane.account(&namespace, &operator).await?,
            server: plane.account(&namespace, &server).await?,
            release,
            namespace,
            tenants,
            everywhere: self.everywhere,
            objects,
            public: process::free_addr(),
            server_args: self.server_args,
            server_envs: self.server_envs,
            operator_envs: self.operator_envs,
            server_wrapper: self.server_wrapper,
            servers: AtomicUsize::new(0),
            operators: AtomicUsize::new(0),
            dir,
        })
    }
}

// === impl Install ===

impl Install<'_> {
    pub fn cluster(&self) -> &Cluster {
        self.cluster
    }

    /// A client that may do everything. It belongs to the runtime of the test that installed.
    pub fn admin(&self) -> Client {
        self.admin.clone()
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The namespace of the test's Apps.
    pub fn tenant(&self) -> &str {
        &self.tenants[0]
    }

    pub fn tenants(&self) -> &[String] {
        &self.tenants
    }

    /// The operator's ServiceAccount.
    pub fn operator_account(&self) -> &Account {
        &self.operator
    }

    /// The servers' ServiceAccount.
    pub fn server_account(&self) -> &Account {
        &self.server
    }

    /// What the chart made, as Helm rendered it, without the definitions.
    pub fn objects(&self) -> &[Value] {
        &self.objects
    }

    /// Where users reach the service: the first server.
    pub fn base_url(&self) -> String {
        format!("http://{}", self.public)
    }

    /// The headless Service of the servers' operations ports.
    pub fn ops_service(&self) -> &str {
        let found = self.objects.iter().find(|object| {
            object["kind"] == "Service"
                && object["spec"]["clusterIP"] == "None"
                && object["metadata"]["labels"]["app.kubernetes.io/component"] == "server"
        });
        let name = found.and_then(|object| object["metadata"]["name"].as_str());
        name.expect("the chart has the servers' headless Service")
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    // --- The operator

    /// Starts one more operator, under the chart's ServiceAccount with a token of its own.
    pub async fn operator(&self) -> Operator {
        let account = self.cluster.plane().account(&self.namespace, self.operator.name()).await;
        self.operator_as(&account.expect("a token for the operator"), &[])
    }

    /// The same, under an account that reaches the API server by another way (see [`ControlPlane::account_at`]) and with
    /// more flags.
    pub fn operator_as(&self, account: &Account, more: &[&str]) -> Operator {
        let index = self.operators.fetch_add(1, Ordering::Relaxed);
        let identity = format!("operator-{index}");
        let ops = process::free_addr();
        let mut args: Vec<String> = [
            ("--namespace", self.namespace.clone()),
            ("--server-service", self.ops_service().to_owned()),
            ("--base-url", self.base_url()),
            ("--ops-addr", ops.to_string()),
            ("--identity", identity.clone()),
            ("--lease", self.lease().to_owned()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect();
        args.push("--allow-insecure".to_owned());
        if !more.contains(&"--requests-end-seconds") {
            // The default is longer than a test can wait, and no test has a request that runs on.
            args.extend(["--requests-end-seconds".to_owned(), "1".to_owned()]);
        }
        if !self.everywhere {
            args.extend(["--watch-namespaces".to_owned(), self.tenants.join(",")]);
        }
        args.extend(more.iter().map(|arg| (*arg).to_owned()));
        let operator = Operator {
            ops,
            log: self.dir.join(format!("{identity}.log")),
            identity,
            account: account.clone(),
            args,
            envs: self.operator_envs.clone(),
            process: Mutex::new(None),
        };
        operator.start().expect("the operator's program starts");
        operator
    }

    /// The Lease that the chart gives the operator.
    pub fn lease(&self) -> &str {
        let names = self.objects.iter().flat_map(|object| object["rules"].as_array().into_iter().flatten());
        let lease = names
            .filter(|rule| rule["resources"] == json!(["leases"]))
            .find_map(|rule| rule["resourceNames"].get(0).and_then(Value::as_str));
        lease.expect("the chart names the operator's Lease")
    }

    // --- Apps and Providers

    /// Applies an App with its Secret and ConfigMap in the tenant's namespace.
    pub async fn apply(&self, app: &builders::App) -> Result<()> {
        self.apply_all(&app.objects(self.tenant())).await
    }

    /// Applies a Provider with its Secret in the tenant's namespace.
    pub async fn apply_provider(&self, provider: &builders::Provider) -> Result<()> {
        self.apply_all(&[provider.secret_object(self.tenant()), provider.object(self.tenant())]).await
    }

    pub async fn apply_all(&self, objects: &[Value]) -> Result<()> {
        let client = self.admin();
        for object in objects {
            apply(&client, object).await?;
        }
        Ok(())
    }

    pub async fn delete(&self, app: &builders::App) -> Result<()> {
        self.apps().delete(app.id(), &DeleteParams::default()).await?;
        Ok(())
    }

    /// The Apps of the tenant's namespace.
    pub fn apps(&self) -> Api<app::App> {
        Api::namespaced(self.admin(), self.tenant())
    }

    /// The Providers of the tenant's namespace.
    pub fn providers(&self) -> Api<provider::Provider> {
        Api::namespaced(self.admin(), self.tenant())
    }

    pub async fn get(&self, app: &builders::App) -> Result<app::App> {
        Ok(self.apps().get(app.id()).await?)
    }

    /// A condition of an App as it stands now.
    pub async fn condition(&self, app: &builders::App, type_: ConditionType) -> Result<Told> {
        let app = self.get(app).await?;
        let conditions = app.status.map(|status| status.conditions).unwrap_or_default();
        Told::find(&conditions, type_)
    }

    /// Waits until an App is Ready as it is written now.
    pub async fn ready(&self, app: &builders::App) {
        self.until(app, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    }

    /// Waits until a condition of an App says this about the App as it is written now, and gives its message.
    pub async fn until(
        &self,
        app: &builders::App,
        type_: ConditionType,
        status: ConditionStatus,
        reason: &str,
    ) -> String {
        let apps = self.apps();
        eventually_ok(&format!("{type_:?} of {} is {status:?}, {reason}", app.id()), CONDITION_LIMIT, || async {
            let app = apps.get(app.id()).await?;
            let generation = app.metadata.generation.unwrap_or_default();
            let conditions = app.status.map(|status| status.conditions).unwrap_or_default();
            let told = Told::find(&conditions, type_)?;
            ensure!(told.generation == generation, "of generation {}, not {generation}: {told:?}", told.generation);
            ensure!(told.status == status && told.reason == reason, "{told:?}");
            Ok(told.message)
        })
        .await
    }

    /// Somebody new, who talks to that server.
    pub fn client_of(&self, server: &PodServer) -> Anonymous {
        Anonymous::new(server.public)
    }
}

impl Drop for Install<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            drop(fs::remove_dir_all(&self.dir));
            return;
        }
        eprintln!("--- the install of this test: {} in {}", self.namespace, self.dir.display());
        let logs = fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path());
        for log in logs.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
            eprintln!("--- the end of {}:\n{}", log.display(), process::tail(&log, 40));
        }
    }
}

// === impl Operator ===

impl Operator {
    /// Its name in the Lease.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Whom it acts as. By its credential the audit log tells which operator wrote what.
    pub fn account(&self) -> &Account {
        &self.account
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Everything it has logged, of earlier starts too.
    pub fn logged(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Starts it again, after [`Operator::kill`] or [`Operator::terminate`].
    pub fn start(&self) -> Result<()> {
        let mut program = Program::new(&self.identity, process::our_program("latchkey-operator")?, &self.log)
            .args(&self.args)
            .env("KUBECONFIG", &self.account.kubeconfig().display().to_string());
        for (name, value) in &self.envs {
            program = program.env(name, value);
        }
        drop(process::lock(&self.process).replace(program.start()?));
        Ok(())
    }

    /// As `kill -9`.
    pub fn kill(&self) {
        drop(process::lock(&self.process).take());
    }

    /// SIGTERM, and waits for its end; `None` where it had to be killed.
    pub async fn terminate(&self) -> Option<ExitStatus> {
        let process = process::lock(&self.process).take()?;
        process.signal(Signal::TERM);
        tokio::time::timeout(END_LIMIT, process.exit()).await.ok()
    }

    /// SIGSTOP.
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

    fn signal(&self, signal: Signal) {
        if let Some(process) = &*process::lock(&self.process) {
            process.signal(signal);
        }
    }
}

// === impl Told ===

impl Told {
    fn find(conditions: &[Condition], type_: ConditionType) -> Result<Self> {
        let found = conditions.iter().find(|condition| condition.type_ == type_.as_str());
        let Some(found) = found else { bail!("no condition {type_:?}") };
        Ok(Self {
            status: found.status,
            reason: found.reason.clone(),
            message: found.message.clone(),
            generation: found.observed_generation.unwrap_or_default(),
        })
    }
}

/// The chart as Helm renders it, with the least that it must be told.
async fn helm_template(release: &str, namespace: &str, values: &[String]) -> Result<Vec<Value>> {
    let least = process::root().join("charts/latchkey/ci/minimal-values.yaml");
    let mut args = vec!["--values".to_owned(), least.display().to_string()];
    args.extend(values.iter().flat_map(|value| ["--set".to_owned(), value.clone()]));
    chart::template(release, namespace, &args).await
}

fn is_definition(object: &Value) -> bool {
    object["kind"] == "CustomResourceDefinition"
}
