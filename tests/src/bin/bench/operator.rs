//! The operator and its servers on a real control plane: how fast a new App and an edit take effect, and what many Apps
//! cost.
//!
//! For each number of Apps the benchmark starts a new control plane, so that earlier measurements do not influence the
//! next ones. The API server's audit log counts every request.

mod app_set;
mod client_set;
mod revisions;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams},
    runtime::wait::{Condition, await_condition},
};
use latchkey_crds::{
    app, client,
    conditions::{ConditionStatus, ConditionType},
    names::{RENDERED_APP_KEY, rendered_app_secret},
    types::AppId,
};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    client::ApiClient,
    cluster::{Endpoint, Installation, OperatorProcess, ServerInPod, TestCluster, apply},
    control_plane::audit::{self, AuditEvent, Mark},
};
use serde_json::json;

pub(crate) use self::app_set::has_condition;
use self::{app_set::AppSet, revisions::RevisionStreams};
use crate::measurements::{
    Bound, anonymous_bytes, format_millis, histogram, micros_of, peak_resident_mib, resident_mib,
};

/// A number of Apps that is too small to slow anything down.
const FEW_APPS: usize = 10;
const APPLY_COUNT: usize = 20;
const EDIT_COUNT: usize = 200;
const REPAIR_COUNT: usize = 10;
const APPLY_LIMIT: Duration = Duration::from_secs(2);
const EDIT_LIMIT: Duration = Duration::from_secs(1);
const REPAIR_LIMIT: Duration = Duration::from_secs(2);
/// Upper limit for the memory of one Client in the operator, and in a server, in bytes.
const MAX_CLIENT_BYTES: u64 = 2 * 1024;
/// Upper limit for the median edit time with many Apps, relative to the median edit time with few Apps.
const MAX_EDIT_RATIO: f64 = 1.5;
/// Time limit for one operation, for example an edit.
const STEP_LIMIT: Duration = Duration::from_secs(60);
/// How long to wait until the operator has made all writes that a change causes. This is longer than 15 s, because the
/// operator reports a silent server in the status of Apps after 15 s.
const SETTLE_TIME: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub(crate) struct OperatorArgs {
    /// Numbers of Apps, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "100,1000,10000")]
    apps: Vec<usize>,
    /// How long to watch for writes of an idle operator, with the largest number of Apps, in seconds.
    #[arg(long, default_value_t = 300)]
    idle_seconds: u64,
    /// Number of Clients of each App.
    #[arg(long, default_value_t = 0)]
    clients: usize,
}

/// The measurements with one number of Apps. Times are in microseconds.
struct Measurements {
    apps: usize,
    apply_times: Histogram<u64>,
    edit_times: Histogram<u64>,
    repair_times: Histogram<u64>,
    /// Unexpected writes, with the activity during which they happened.
    writes: Vec<(String, Vec<AuditEvent>)>,
    clients: Option<ClientMeasurements>,
}

/// The measurements with Clients.
struct ClientMeasurements {
    count: usize,
    edit_times: Histogram<u64>,
    /// Memory that the Clients need in the operator and in a server, in bytes.
    operator_bytes: u64,
    server_bytes: u64,
}

/// Two servers and an operator, with a number of Apps.
struct BenchCluster<'a> {
    install: Installation<'a>,
    client: Client,
    app_set: AppSet,
    servers: Vec<ServerInPod>,
    operator: OperatorProcess,
}

/// Runs the benchmark, prints the measurements, and returns the bounds.
pub(crate) async fn run(options: &OperatorArgs) -> Result<Vec<Bound>> {
    let threads = std::thread::available_parallelism()?.get();
    println!("Apps in a cluster, on {threads} cores shared by etcd, the API server, operator, servers and Postgres\n");
    let max_apps = options.apps.iter().copied().max();
    let baseline = measure(FEW_APPS, None, 0).await?;
    let mut bounds = baseline.bounds();
    for apps in &options.apps {
        let idle = (Some(*apps) == max_apps).then(|| Duration::from_secs(options.idle_seconds));
        let measurements = measure(*apps, idle, options.clients).await?;
        bounds.extend(measurements.bounds());
        bounds.push(measurements.bound_against(&baseline));
    }
    Ok(bounds)
}

/// Measures the cost of Clients in the operator and in a server, with `apps` Apps and `per_app` Clients for each App.
/// Prints the measurements, and returns the bounds.
pub(crate) async fn measure_client_cost(apps: usize, per_app: usize) -> Result<Vec<Bound>> {
    println!("{apps} Apps with {per_app} Clients each, in a cluster");
    let cluster = TestCluster::start().await?;
    let bench = BenchCluster::start(&cluster, apps, true).await?;
    // The restart frees memory that the operator needed only while the Apps were created.
    bench.restart_operator().await?;
    let (clients, _) = bench.measure_clients(per_app).await?;
    Ok(clients.bounds())
}

async fn measure(apps: usize, idle: Option<Duration>, clients_per_app: usize) -> Result<Measurements> {
    println!("{apps} Apps");
    let cluster = TestCluster::start().await?;
    let mut bench = BenchCluster::start(&cluster, apps, clients_per_app > 0).await?;
    let mut measurements = Measurements {
        apps,
        apply_times: histogram(),
        edit_times: histogram(),
        repair_times: histogram(),
        writes: Vec::new(),
        clients: None,
    };
    measurements.writes.push(("the operator's restart".to_owned(), bench.restart_operator().await?));
    if clients_per_app > 0 {
        let (clients, writes) = bench.measure_clients(clients_per_app).await?;
        measurements.writes.push(("the operator's restart with Clients".to_owned(), writes));
        measurements.clients = Some(clients);
    }
    bench.measure_server_start().await?;
    bench.measure_edits(&mut measurements.edit_times).await?;
    print_times("an edit, from the API server's response until the last server serves it", &measurements.edit_times);
    bench.measure_applies(&mut measurements.apply_times).await?;
    print_times("from apply of App, Provider and Secret until Ready", &measurements.apply_times);
    bench.measure_repairs(&mut measurements.repair_times).await?;
    print_times("until a rendered Secret is repaired after an edit or deletion by hand", &measurements.repair_times);
    // Waits until the writes that the changes above caused are done.
    tokio::time::sleep(SETTLE_TIME).await;
    if let Some(idle) = idle {
        measurements
            .writes
            .push((format!("{:.1} idle minutes", idle.as_secs_f64() / 60.0), bench.measure_idle(idle).await?));
        measurements.writes.extend(bench.roll_out().await?);
        bench.print_memory("after all of it")?;
    }
    println!();
    Ok(measurements)
}

fn print_times(what: &str, times: &Histogram<u64>) {
    println!(
        "  {what}: p50 {}, p90 {}, p99 {}, max {} ({} times)",
        format_millis(times, 0.5),
        format_millis(times, 0.9),
        format_millis(times, 0.99),
        format_millis(times, 1.0),
        times.len()
    );
}

// === impl Measurements ===

impl Measurements {
    fn bounds(&self) -> Vec<Bound> {
        let apps = self.apps;
        let longest = |times: &Histogram<u64>| times.value_at_quantile(1.0);
        let mut bounds = vec![
            Bound::new(
                format!("{apps} Apps: from apply to Ready under 2 s: max {}", format_millis(&self.apply_times, 1.0)),
                longest(&self.apply_times) < micros_of(APPLY_LIMIT),
            ),
            Bound::new(
                format!("{apps} Apps: an edit takes effect within 1 s: p99 {}", format_millis(&self.edit_times, 0.99)),
                self.edit_times.value_at_quantile(0.99) < micros_of(EDIT_LIMIT),
            ),
            Bound::new(
                format!(
                    "{apps} Apps: a rendered Secret is repaired within 2 s: max {}",
                    format_millis(&self.repair_times, 1.0)
                ),
                longest(&self.repair_times) < micros_of(REPAIR_LIMIT),
            ),
        ];
        if let Some(clients) = &self.clients {
            bounds.extend(clients.bounds());
        }
        bounds.extend(self.writes.iter().map(|(when, writes)| {
            let count = audit::count(writes);
            let kinds: Vec<_> = count.iter().map(|((verb, what), count)| format!("{count} {verb} {what}")).collect();
            let kinds = if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") };
            Bound::new(format!("{apps} Apps: no write except of the Lease during {when}: {kinds}"), writes.is_empty())
        }));
        bounds
    }

    /// The bound on the time of an edit, relative to the time of an edit in `baseline`, which has few Apps.
    fn bound_against(&self, baseline: &Self) -> Bound {
        #[expect(clippy::cast_precision_loss, reason = "microseconds of a benchmark are far below 2^52")]
        let at = |measurements: &Self, quantile| measurements.edit_times.value_at_quantile(quantile) as f64;
        let [p50, p99] = [0.5, 0.99].map(|quantile| at(self, quantile) / at(baseline, quantile));
        Bound::new(
            format!(
                "{} Apps: an edit takes at most {MAX_EDIT_RATIO} times as long as among {FEW_APPS} Apps: p50 {p50:.2}, p99 {p99:.2}",
                self.apps
            ),
            p50 <= MAX_EDIT_RATIO,
        )
    }
}

// === impl ClientMeasurements ===

impl ClientMeasurements {
    fn bounds(&self) -> Vec<Bound> {
        let count = u64::try_from(self.count).unwrap_or(u64::MAX).max(1);
        let memory = |program: &str, bytes: u64| {
            let each = bytes / count;
            let text = format!("{count} Clients: at most {MAX_CLIENT_BYTES} bytes for each in the {program}: {each}");
            Bound::new(text, each <= MAX_CLIENT_BYTES)
        };
        let p99 = self.edit_times.value_at_quantile(0.99);
        let text =
            format!("{count} Clients: an edit takes effect within 1 s: p99 {}", format_millis(&self.edit_times, 0.99));
        vec![
            Bound::new(text, p99 < micros_of(EDIT_LIMIT)),
            memory("operator", self.operator_bytes),
            memory("server", self.server_bytes),
        ]
    }
}

// === impl BenchCluster ===

impl<'a> BenchCluster<'a> {
    /// Creates the Apps, starts the servers and the operator, and waits until all Apps are Programmed.
    async fn start(cluster: &'a TestCluster, apps: usize, with_pages: bool) -> Result<Self> {
        let install = cluster.builder().watch_all_namespaces().tenants(FEW_APPS).install().await;
        let client = install.admin();
        let app_set = AppSet::new(&install, apps, with_pages);
        let took = app_set.create(&client).await?;
        println!("  created by the administrator in {:.1} s", took.as_secs_f64());
        let servers = install.start_servers(2).await;
        let programmed = app_set.watch_until_programmed(&client).await?;
        let mark = cluster.plane().audit_mark();
        let started = Instant::now();
        let operator = install.start_operator().await;
        programmed.await??;
        let took = started.elapsed().as_secs_f64();
        println!("  from the operator's start until all are Programmed: {took:.2} s");
        let bench = Self { install, client, app_set, servers, operator };
        // Waits for the Events that the operator writes after the last status.
        tokio::time::sleep(Duration::from_secs(1)).await;
        bench.print_requests("until then the operator sent", mark)?;
        bench.print_memory("once all are Programmed")?;
        Ok(bench)
    }

    /// Restarts the operator while no object needs a change. Returns the operator's writes, except those of the Lease.
    async fn restart_operator(&self) -> Result<Vec<AuditEvent>> {
        self.operator.terminate().await.context("the operator ends after SIGTERM")?;
        let mark = self.audit_mark();
        let started = Instant::now();
        self.operator.start()?;
        self.wait_until_reconciled(&self.operator).await?;
        println!("  a restarted operator has reconciled all: {:.2} s", started.elapsed().as_secs_f64());
        self.print_requests("until then it sent", mark)?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        self.print_memory("after the operator's restart")?;
        self.operator_writes(mark)
    }

    /// Creates Clients for every App, and measures their cost after another restart of the operator. Returns the
    /// operator's writes after this restart, too.
    async fn measure_clients(&self, per_app: usize) -> Result<(ClientMeasurements, Vec<AuditEvent>)> {
        let operator_before = self.operator_bytes()?;
        let server_before = self.server_bytes()?;
        let took = client_set::create_ready(&self.client, &self.app_set, per_app).await?;
        println!("  from the first Client until all are Ready: {:.1} s", took.as_secs_f64());
        tokio::time::sleep(SETTLE_TIME).await;
        let server_bytes = self.server_bytes()?.saturating_sub(server_before);
        // Memory that is needed only to create the Clients is not counted: a restarted operator did not create them.
        let writes = self.restart_operator().await?;
        let operator_bytes = self.operator_bytes()?.saturating_sub(operator_before);
        let mut edit_times = histogram();
        self.measure_client_edits(per_app, &mut edit_times).await?;
        print_times("an edit of a Client, from the API server's response until the last server serves it", &edit_times);
        let count = self.app_set.len() * per_app;
        Ok((ClientMeasurements { count, edit_times, operator_bytes, server_bytes }, writes))
    }

    /// Makes [`EDIT_COUNT`] edits of Clients. The Clients of [`FEW_APPS`] Apps take turns.
    async fn measure_client_edits(&self, per_app: usize, times: &mut Histogram<u64>) -> Result<()> {
        let mut streams = RevisionStreams::connect(&self.servers).await?;
        let step = (self.app_set.len() / FEW_APPS).max(1);
        for number in 0..EDIT_COUNT {
            let (namespace, app) = self.app_set.app((number * step) % self.app_set.len());
            let clients: Api<client::Client> = Api::namespaced(self.client.clone(), namespace);
            let before = streams.revisions_of(app.id());
            let patch = json!({ "spec": { "displayName": format!("Client {number}") } });
            let name = client_set::name(app.id(), number % per_app);
            clients.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
            let responded = Instant::now();
            let live_at = tokio::time::timeout(STEP_LIMIT, streams.wait_for_change(app.id(), &before)).await;
            let live_at = live_at.with_context(|| format!("edit {number} of {name} does not take effect"))??;
            times.record(micros_of(live_at.saturating_duration_since(responded)))?;
        }
        Ok(())
    }

    fn operator_bytes(&self) -> Result<u64> {
        anonymous_bytes(self.operator.pid().context("the operator runs")?)
    }

    fn server_bytes(&self) -> Result<u64> {
        anonymous_bytes(self.servers[0].pid().context("the server runs")?)
    }

    /// Waits until the operator has reconciled every App.
    async fn wait_until_reconciled(&self, operator: &OperatorProcess) -> Result<()> {
        const RECONCILE_METRIC: &str = "controller_runtime_reconcile_total{controller=\"app\",result=\"success\"} ";
        let ops = ApiClient::new(operator.ops);
        let end = Instant::now() + 10 * STEP_LIMIT;
        loop {
            let page = ops.try_send(ops.request(http::Method::GET, "metrics")).await.map(|response| response.text);
            let reconciled = page.ok().and_then(|page| {
                page.lines()
                    .find_map(|line| line.strip_prefix(RECONCILE_METRIC))
                    .and_then(|count| count.parse::<usize>().ok())
            });
            if reconciled.is_some_and(|reconciled| reconciled >= self.app_set.len()) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the operator has not reconciled all: {reconciled:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Starts a server in a new Pod, then restarts its container. The restarted server reads the documents from its
    /// cache.
    async fn measure_server_start(&mut self) -> Result<()> {
        let server = self.install.create_server(self.install.server_account(), &[]).await?;
        let started = Instant::now();
        server.start_ready().await?;
        let first = started.elapsed().as_secs_f64();
        server.terminate().await.context("the server ends after SIGTERM")?;
        let started = Instant::now();
        server.start_ready().await?;
        println!(
            "  a new server is ready after {first:.2} s, a restarted container after {:.2} s",
            started.elapsed().as_secs_f64()
        );
        server.set_endpoint(Endpoint::SERVING).await?;
        server.remove().await
    }

    /// Makes [`EDIT_COUNT`] edits of [`FEW_APPS`] Apps in turn. These Apps are spread evenly over the list of all Apps.
    async fn measure_edits(&self, times: &mut Histogram<u64>) -> Result<()> {
        let mut streams = RevisionStreams::connect(&self.servers).await?;
        let step = (self.app_set.len() / FEW_APPS).max(1);
        for number in 0..EDIT_COUNT {
            let (namespace, app) = self.app_set.app((number * step) % self.app_set.len());
            let apps: Api<app::App> = Api::namespaced(self.client.clone(), namespace);
            let before = streams.revisions_of(app.id());
            let patch = json!({ "spec": { "displayName": format!("Shop {number}") } });
            apps.patch(app.id(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
            let responded = Instant::now();
            let live_at = tokio::time::timeout(STEP_LIMIT, streams.wait_for_change(app.id(), &before)).await;
            let live_at = live_at.with_context(|| format!("edit {number} of {} does not take effect", app.id()))??;
            times.record(micros_of(live_at.saturating_duration_since(responded)))?;
        }
        Ok(())
    }

    /// Creates new Apps, each with a Provider and Secrets, one after the other.
    async fn measure_applies(&self, times: &mut Histogram<u64>) -> Result<()> {
        for number in 0..APPLY_COUNT {
            let provider = Provider::new(&format!("github-{number}"), "github");
            let app = App::new("new").relay(Relay::of(&self.install.smtp)).provider(&provider);
            let tenant = self.install.tenant();
            let mut objects = app.objects(tenant);
            objects.extend([provider.object(tenant), provider.secret_object(tenant)]);
            let apps: Api<app::App> = Api::namespaced(self.client.clone(), tenant);
            let name = app.id().to_owned();
            let ready =
                tokio::spawn(
                    async move { await_condition(apps, &name, is_condition_true(ConditionType::Ready)).await },
                );
            let started = Instant::now();
            for object in &objects {
                apply(&self.client, object).await?;
            }
            let ready = tokio::time::timeout(STEP_LIMIT, ready).await;
            ready.with_context(|| format!("{} is not Ready", app.id()))???;
            times.record(micros_of(started.elapsed()))?;
        }
        Ok(())
    }

    /// Edits and deletes rendered Secrets alternately, and waits until the operator has repaired each of them.
    async fn measure_repairs(&self, times: &mut Histogram<u64>) -> Result<()> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), self.install.namespace());
        for number in 0..2 * REPAIR_COUNT {
            let (_, app) = self.app_set.app(number % self.app_set.len());
            let id: AppId = app.id().parse()?;
            let name = rendered_app_secret(&id);
            let document = secrets.get(&name).await?.data.unwrap_or_default().remove(RENDERED_APP_KEY);
            let document = document.context("a rendered Secret has a document")?;
            if number % 2 == 0 {
                let patch = json!({ "stringData": { RENDERED_APP_KEY: "{}" } });
                secrets.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
            } else {
                secrets.delete(&name, &DeleteParams::default()).await?;
            }
            let began = Instant::now();
            let repaired = await_condition(secrets.clone(), &name, contains_document(document));
            let repaired = tokio::time::timeout(STEP_LIMIT, repaired).await;
            repaired.with_context(|| format!("{name} is not repaired"))??;
            times.record(micros_of(began.elapsed()))?;
        }
        Ok(())
    }

    async fn measure_idle(&self, time: Duration) -> Result<Vec<AuditEvent>> {
        let mark = self.audit_mark();
        tokio::time::sleep(time).await;
        self.print_requests("while idle the operator sent", mark)?;
        self.operator_writes(mark)
    }

    /// Starts and stops servers and operators while no App changes. Returns the unexpected writes.
    async fn roll_out(&mut self) -> Result<Vec<(String, Vec<AuditEvent>)>> {
        let mut writes = Vec::new();
        self.servers.push(self.install.start_server().await);
        tokio::time::sleep(SETTLE_TIME).await;

        let mark = self.audit_mark();
        for server in std::mem::take(&mut self.servers) {
            self.servers.push(self.install.start_server().await);
            server.remove().await?;
        }
        tokio::time::sleep(SETTLE_TIME).await;
        writes.push(("a rolling restart of 3 servers".to_owned(), self.operator_writes(mark)?));

        let mark = self.audit_mark();
        let added_servers = self.install.start_servers(3).await;
        for server in added_servers {
            server.remove().await?;
        }
        tokio::time::sleep(SETTLE_TIME).await;
        writes.push(("scaling 3 → 6 → 3".to_owned(), self.operator_writes(mark)?));

        let mark = self.audit_mark();
        let standby = self.install.start_operator().await;
        tokio::time::sleep(SETTLE_TIME).await;
        let began = Instant::now();
        self.operator.terminate().await.context("the operator ends after SIGTERM")?;
        self.wait_until_reconciled(&standby).await?;
        println!(
            "  a standby has reconciled all {:.2} s after the leader received SIGTERM",
            began.elapsed().as_secs_f64()
        );
        tokio::time::sleep(SETTLE_TIME).await;
        writes.push(("a change of leader".to_owned(), self.operator_writes(mark)?));
        self.operator = standby;
        Ok(writes)
    }

    // --- Cost

    fn audit_mark(&self) -> Mark {
        self.install.cluster().plane().audit_mark()
    }

    /// The requests that the operator has sent to the API server since the mark.
    fn operator_requests(&self, since: Mark) -> Result<Vec<AuditEvent>> {
        let user = self.install.operator_account().user_name();
        let mut events = self.install.cluster().plane().audit_since(since)?;
        events.retain(|event| event.user == user);
        Ok(events)
    }

    fn operator_writes(&self, since: Mark) -> Result<Vec<AuditEvent>> {
        let mut events = self.operator_requests(since)?;
        events.retain(|event| event.is_write() && event.resource != "leases");
        Ok(events)
    }

    fn print_requests(&self, what: &str, since: Mark) -> Result<()> {
        let requests = self.operator_requests(since)?;
        let mut verbs: BTreeMap<&str, usize> = BTreeMap::new();
        for event in &requests {
            *verbs.entry(&event.verb).or_default() += 1;
        }
        let verbs: Vec<_> = verbs.iter().map(|(verb, count)| format!("{verb} {count}")).collect();
        #[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^52")]
        let each = requests.len() as f64 / self.app_set.len() as f64;
        println!("  {what} {} requests to the API server ({}), {each:.1} per App", requests.len(), verbs.join(", "));
        Ok(())
    }

    fn print_memory(&self, when: &str) -> Result<()> {
        let operator = self.operator.pid().context("the operator runs")?;
        let server = self.servers[0].pid().context("the server runs")?;
        println!(
            "  memory {when}: operator {:.1} MiB (peak {:.1}), server {:.1} MiB (peak {:.1})",
            resident_mib(operator)?,
            peak_resident_mib(operator)?,
            resident_mib(server)?,
            peak_resident_mib(server)?
        );
        Ok(())
    }
}

/// For [`await_condition`]: whether this condition of an App is true for the App's current generation.
fn is_condition_true(type_: ConditionType) -> impl Condition<app::App> {
    move |app: Option<&app::App>| app.is_some_and(|app| app_set::has_condition(app, type_, ConditionStatus::True))
}

/// For [`await_condition`]: whether a Secret contains this rendered document.
fn contains_document(document: ByteString) -> impl Condition<Secret> {
    move |secret: Option<&Secret>| {
        let data = secret.and_then(|secret| secret.data.as_ref());
        data.and_then(|data| data.get(RENDERED_APP_KEY)) == Some(&document)
    }
}
