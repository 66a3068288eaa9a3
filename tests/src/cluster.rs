//! Latchkey in a cluster, for one test: the chart's objects on a real control plane, namespaces for the test's Apps,
//! and operators and servers as processes that use the chart's ServiceAccounts.

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
    scripted::{RevisionScript, ScriptedServer},
    servers::{Endpoint, ServerInPod, ServerPod},
};
use crate::{
    builders,
    client::ApiClient,
    control_plane::{ControlPlane, ServiceAccountToken},
    eventually, eventually_ok,
    postgres::{Database, Postgres},
    process::{self, Process, Program},
    redis::Redis,
    smtp::{self, Smtp},
    stack::{self, SharedOrOwn},
};

/// Time limit for the API server to establish a CRD, which takes a second or two.
const ESTABLISH_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for a condition of an App to get the expected status. The operator reconciles within a second or two,
/// later on a loaded machine.
const CONDITION_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for an operator to exit. It releases its Lease first.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A control plane with Latchkey's CRDs.
pub struct TestCluster {
    plane: SharedOrOwn<ControlPlane>,
}

/// Settings for an installation. A test can change them.
pub struct Builder<'a> {
    cluster: &'a TestCluster,
    watch_all_namespaces: bool,
    tenants: usize,
    server_args: Vec<String>,
    server_envs: Vec<(String, String)>,
    operator_envs: Vec<(String, String)>,
    server_wrapper: Vec<String>,
    values: Vec<String>,
}

/// An installation of Latchkey in its own namespace, with the chart's objects. The test starts operators and servers.
/// Dropping this value removes the installation's files. If the test fails, the files stay, and the end of each log is
/// printed.
pub struct Installation<'a> {
    pub smtp: Smtp,
    pub database: Database,
    cluster: &'a TestCluster,
    admin: Client,
    release: String,
    namespace: String,
    tenants: Vec<String>,
    watch_all_namespaces: bool,
    objects: Vec<Value>,
    operator_account: ServiceAccountToken,
    server_account: ServiceAccountToken,
    /// Socket address of the first server's public API.
    public: SocketAddr,
    server_args: Vec<String>,
    server_envs: Vec<(String, String)>,
    operator_envs: Vec<(String, String)>,
    server_wrapper: Vec<String>,
    server_count: AtomicUsize,
    operator_count: AtomicUsize,
    dir: PathBuf,
}

/// A `latchkey-operator` process, running or not.
pub struct OperatorProcess {
    pub ops: SocketAddr,
    identity: String,
    account: ServiceAccountToken,
    args: Vec<String>,
    envs: Vec<(String, String)>,
    log: PathBuf,
    process: Mutex<Option<Process>>,
}

/// A condition of an App.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedCondition {
    pub status: ConditionStatus,
    pub reason: String,
    pub message: String,
    /// The generation of the App on which the condition is based; -1 if the operator has not reconciled the App yet.
    pub generation: i64,
}

// === impl TestCluster ===

impl TestCluster {
    /// The cluster that all tests of this process share. The operators of an installation watch only the namespaces of
    /// this installation.
    pub async fn shared() -> &'static Self {
        static SHARED: OnceCell<TestCluster> = OnceCell::const_new();
        let make = || async {
            let plane = SharedOrOwn::Shared(ControlPlane::shared().await);
            Self::with(plane).await.expect("the cluster accepts Latchkey's CRDs")
        };
        SHARED.get_or_init(make).await
    }

    /// Starts a cluster that only one test uses. A test needs its own cluster if it stops the API server, counts every
    /// request, watches all namespaces, or changes the CRDs.
    pub async fn start() -> Result<Self> {
        Self::with(SharedOrOwn::Own(Box::new(ControlPlane::start().await?))).await
    }

    async fn with(plane: SharedOrOwn<ControlPlane>) -> Result<Self> {
        let this = Self { plane };
        this.apply_crds().await?;
        Ok(this)
    }

    pub fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// A client with all permissions. It works only in the runtime of the test that calls this.
    pub async fn admin(&self) -> Client {
        self.plane.admin().await
    }

    /// Installs Latchkey with one tenant namespace. The operators watch only this namespace.
    pub async fn install(&self) -> Installation<'_> {
        self.builder().install().await
    }

    pub fn builder(&self) -> Builder<'_> {
        Builder {
            cluster: self,
            watch_all_namespaces: false,
            tenants: 1,
            server_args: Vec::new(),
            server_envs: Vec::new(),
            operator_envs: Vec::new(),
            server_wrapper: Vec::new(),
            values: Vec::new(),
        }
    }

    /// Applies the chart's CRDs and waits until they are established.
    pub async fn apply_crds(&self) -> Result<()> {
        let client = self.admin().await;
        let rendered = render_chart("latchkey", "latchkey", &[]).await?;
        let definitions: Vec<Value> = rendered.into_iter().filter(is_crd).collect();
        ensure!(!definitions.is_empty(), "the chart has no CRDs");
        for definition in &definitions {
            apply(&client, definition).await?;
        }
        let api: Api<CustomResourceDefinition> = Api::all(client);
        for definition in &definitions {
            let name = definition["metadata"]["name"].as_str().context("a CRD has a name")?;
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
    /// Makes the operator watch all namespaces. Use it only with [`TestCluster::start`]: in the shared cluster, the
    /// operator would reconcile the Apps of other tests.
    pub fn watch_all_namespaces(mut self) -> Self {
        assert!(matches!(self.cluster.plane, SharedOrOwn::Own(_)), "the shared cluster has other tests' Apps");
        self.watch_all_namespaces = true;
        self
    }

    /// Sets the number of tenant namespaces. Tests create Apps in these namespaces.
    pub fn tenants(mut self, tenants: usize) -> Self {
        self.tenants = tenants;
        self
    }

    /// Adds flags to the servers' command line.
    pub fn server_args<I: IntoIterator<Item: AsRef<str>>>(mut self, args: I) -> Self {
        self.server_args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable of the servers.
    pub fn server_env(mut self, name: &str, value: &str) -> Self {
        self.server_envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets an environment variable of the operators.
    pub fn operator_env(mut self, name: &str, value: &str) -> Self {
        self.operator_envs.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the servers as arguments of this command ([`Program::wrapper`]).
    pub fn server_wrapper(mut self, command: &[String]) -> Self {
        self.server_wrapper = command.to_vec();
        self
    }

    /// Sets a value of the chart, as `helm --set` does.
    pub fn value(mut self, value: &str) -> Self {
        self.values.push(value.to_owned());
        self
    }

    /// Installs Latchkey. Panics if the installation fails.
    pub async fn install(self) -> Installation<'a> {
        self.try_install().await.expect("Latchkey is installed")
    }

    pub async fn try_install(self) -> Result<Installation<'a>> {
        let plane = self.cluster.plane();
        let namespace = plane.namespace("install").await?;
        let mut tenants = Vec::new();
        for _ in 0..self.tenants {
            tenants.push(plane.namespace("tenant").await?);
        }
        let mut values = self.values;
        if !self.watch_all_namespaces {
            ensure!(!tenants.is_empty(), "an operator that watches no namespace watches all");
            values.push(format!("operator.watchNamespaces={{{}}}", tenants.join(",")));
        }
        let release = "latchkey".to_owned();
        let rendered = render_chart(&release, &namespace, &values).await?;
        let objects: Vec<Value> = rendered.into_iter().filter(|object| !is_crd(object)).collect();
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
        Ok(Installation {
            smtp,
            database,
            cluster: self.cluster,
            admin: client,
            operator_account: plane.account(&namespace, &operator).await?,
            server_account: plane.account(&namespace, &server).await?,
            release,
            namespace,
            tenants,
            watch_all_namespaces: self.watch_all_namespaces,
            objects,
            public: process::free_addr(),
            server_args: self.server_args,
            server_envs: self.server_envs,
            operator_envs: self.operator_envs,
            server_wrapper: self.server_wrapper,
            server_count: AtomicUsize::new(0),
            operator_count: AtomicUsize::new(0),
            dir,
        })
    }
}

// === impl Installation ===

impl Installation<'_> {
    pub fn cluster(&self) -> &TestCluster {
        self.cluster
    }

    /// A client with all permissions. It works only in the runtime of the test that created this installation.
    pub fn admin(&self) -> Client {
        self.admin.clone()
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The first tenant namespace.
    pub fn tenant(&self) -> &str {
        &self.tenants[0]
    }

    pub fn tenants(&self) -> &[String] {
        &self.tenants
    }

    /// The operator's ServiceAccount.
    pub fn operator_account(&self) -> &ServiceAccountToken {
        &self.operator_account
    }

    /// The servers' ServiceAccount.
    pub fn server_account(&self) -> &ServiceAccountToken {
        &self.server_account
    }

    /// The chart's objects as Helm rendered them, without the CRDs.
    pub fn objects(&self) -> &[Value] {
        &self.objects
    }

    /// The URL of the first server.
    pub fn base_url(&self) -> String {
        format!("http://{}", self.public)
    }

    /// The name of the headless Service for the operations ports of the servers.
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

    /// Starts an operator with the chart's ServiceAccount and a new token.
    pub async fn start_operator(&self) -> OperatorProcess {
        let account = self.cluster.plane().account(&self.namespace, self.operator_account.name()).await;
        self.start_operator_as(&account.expect("a token for the operator"), &[])
    }

    /// Starts an operator with this ServiceAccount and with additional flags. With an account from
    /// [`ControlPlane::account_at`], the operator reaches the API server through a proxy.
    pub fn start_operator_as(&self, account: &ServiceAccountToken, extra_flags: &[&str]) -> OperatorProcess {
        let index = self.operator_count.fetch_add(1, Ordering::Relaxed);
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
        if !extra_flags.contains(&"--requests-end-seconds") {
            // The default is too long for a test, and no request of a test runs longer than a second.
            args.extend(["--requests-end-seconds".to_owned(), "1".to_owned()]);
        }
        if !self.watch_all_namespaces {
            args.extend(["--watch-namespaces".to_owned(), self.tenants.join(",")]);
        }
        args.extend(extra_flags.iter().map(|arg| (*arg).to_owned()));
        let operator = OperatorProcess {
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

    /// The name of the operator's Lease.
    pub fn lease(&self) -> &str {
        let rules = self.objects.iter().flat_map(|object| object["rules"].as_array().into_iter().flatten());
        let lease = rules
            .filter(|rule| rule["resources"] == json!(["leases"]))
            .find_map(|rule| rule["resourceNames"].get(0).and_then(Value::as_str));
        lease.expect("the chart names the operator's Lease")
    }

    // --- Apps and Providers

    /// Applies an App with its Secrets and its ConfigMap in the first tenant namespace.
    pub async fn apply(&self, app: &builders::App) -> Result<()> {
        self.apply_all(&app.objects(self.tenant())).await
    }

    /// Applies a Provider with its Secret in the first tenant namespace.
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

    /// The Apps of the first tenant namespace.
    pub fn apps(&self) -> Api<app::App> {
        Api::namespaced(self.admin(), self.tenant())
    }

    /// The Providers of the first tenant namespace.
    pub fn providers(&self) -> Api<provider::Provider> {
        Api::namespaced(self.admin(), self.tenant())
    }

    pub async fn get(&self, app: &builders::App) -> Result<app::App> {
        Ok(self.apps().get(app.id()).await?)
    }

    /// The current state of an App's condition.
    pub async fn condition(&self, app: &builders::App, type_: ConditionType) -> Result<ObservedCondition> {
        let app = self.get(app).await?;
        let conditions = app.status.map(|status| status.conditions).unwrap_or_default();
        ObservedCondition::find_in(&conditions, type_)
    }

    /// Waits until the current generation of an App is Ready.
    pub async fn wait_until_ready(&self, app: &builders::App) {
        self.wait_for_condition(app, ConditionType::Ready, ConditionStatus::True, "Ready").await;
    }

    /// Waits until a condition has this status and reason for the App's current generation. Returns the condition's
    /// message.
    pub async fn wait_for_condition(
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
            let condition = ObservedCondition::find_in(&conditions, type_)?;
            ensure!(
                condition.generation == generation,
                "for generation {}, not {generation}: {condition:?}",
                condition.generation
            );
            ensure!(condition.status == status && condition.reason == reason, "{condition:?}");
            Ok(condition.message)
        })
        .await
    }

    /// A client of this server, with its own client address.
    pub fn client_of(&self, server: &ServerInPod) -> ApiClient {
        ApiClient::new(server.public)
    }
}

impl Drop for Installation<'_> {
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

// === impl OperatorProcess ===

impl OperatorProcess {
    /// The operator's identity in the Lease.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The operator's ServiceAccount. The audit log contains the credential id of the token, which shows which operator
    /// sent a request.
    pub fn account(&self) -> &ServiceAccountToken {
        &self.account
    }

    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The operator's complete log, including earlier starts.
    pub fn read_log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Starts the operator again, after [`OperatorProcess::kill`] or [`OperatorProcess::terminate`].
    pub fn start(&self) -> Result<()> {
        let mut program = Program::new(&self.identity, process::find_built_program("latchkey-operator")?, &self.log)
            .args(&self.args)
            .env("KUBECONFIG", &self.account.kubeconfig().display().to_string());
        for (name, value) in &self.envs {
            program = program.env(name, value);
        }
        drop(process::lock(&self.process).replace(program.start()?));
        Ok(())
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        drop(process::lock(&self.process).take());
    }

    /// Sends SIGTERM and waits until the operator exits. `None` if it was not running or had to be killed.
    pub async fn terminate(&self) -> Option<ExitStatus> {
        let process = process::lock(&self.process).take()?;
        process.signal(Signal::TERM);
        tokio::time::timeout(END_LIMIT, process.wait_for_exit()).await.ok()
    }

    /// Sends SIGSTOP.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Sends SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// The exit status if the operator has ended by itself.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        process::lock(&self.process).as_ref().and_then(Process::exit_status)
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

// === impl ObservedCondition ===

impl ObservedCondition {
    fn find_in(conditions: &[Condition], type_: ConditionType) -> Result<Self> {
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

/// The objects that Helm renders from the chart with the required values and `values`.
async fn render_chart(release: &str, namespace: &str, values: &[String]) -> Result<Vec<Value>> {
    let minimal_values = process::root().join("charts/latchkey/ci/minimal-values.yaml");
    let mut args = vec!["--values".to_owned(), minimal_values.display().to_string()];
    args.extend(values.iter().flat_map(|value| ["--set".to_owned(), value.clone()]));
    chart::template(release, namespace, &args).await
}

fn is_crd(object: &Value) -> bool {
    object["kind"] == "CustomResourceDefinition"
}
