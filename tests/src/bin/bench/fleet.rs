//! The operator and its servers on a real control plane: how fast an App and its edits are live, and what many Apps cost.
//!
//! Each number of Apps has a control plane of its own, so that what an earlier one left behind weighs nothing, and every
//! request is counted by the API server's audit log.

mod population;
mod told;

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
    app,
    conditions::{ConditionStatus, ConditionType},
    names::{RENDERED_APP_KEY, rendered_app_secret},
    types::AppId,
};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    client::Anonymous,
    cluster::{Cluster, Endpoint, Install, Operator, PodServer, apply},
    control_plane::audit::{self, Event, Mark},
};
use serde_json::json;

pub(crate) use self::population::says;
use self::{population::Population, told::Told};
use crate::figures::{Bound, histogram, memory, micros, millis, peak_memory};

/// With so few Apps nothing is slow because of their number.
const FEW: usize = 10;
const APPLIES: usize = 20;
const EDITS: usize = 200;
const REPAIRS: usize = 10;
const APPLIED_WITHIN: Duration = Duration::from_secs(2);
const EDITED_WITHIN: Duration = Duration::from_secs(1);
const REPAIRED_WITHIN: Duration = Duration::from_secs(2);
/// What the median of an edit among many may be, of that among few: they are measured one after the other.
const AS_FAST: f64 = 1.5;
/// What is done once is done in less.
const LIMIT: Duration = Duration::from_secs(60);
/// Longer than a server may be silent (15 s): what follows from that would be written by then.
const CALM: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of Apps.
    #[arg(long, value_delimiter = ',', default_value = "100,1000,10000")]
    apps: Vec<usize>,
    /// How long the API server is watched for writes of an operator that has nothing to do, with the most Apps.
    #[arg(long, default_value_t = 300)]
    idle_seconds: u64,
}

/// What was measured at one number of Apps.
struct Figures {
    apps: usize,
    applied: Histogram<u64>,
    edited: Histogram<u64>,
    repaired: Histogram<u64>,
    /// Writes where there should be none, by what was done meanwhile.
    writes: Vec<(String, Vec<Event>)>,
}

/// Two servers and an operator with so many Apps.
struct Fleet<'a> {
    install: Install<'a>,
    client: Client,
    population: Population,
    servers: Vec<PodServer>,
    operator: Operator,
}

/// Measures, prints, and gives what was promised.
pub(crate) async fn run(options: &Options) -> Result<Vec<Bound>> {
    let threads = std::thread::available_parallelism()?.get();
    println!("Apps in a cluster, on {threads} cores shared by etcd, the API server, operator, servers and Postgres\n");
    let most = options.apps.iter().copied().max();
    let few = measure(FEW, None).await?;
    let mut bounds = few.bounds();
    for apps in &options.apps {
        let idle = (Some(*apps) == most).then(|| Duration::from_secs(options.idle_seconds));
        let many = measure(*apps, idle).await?;
        bounds.extend(many.bounds());
        bounds.push(many.against(&few));
    }
    Ok(bounds)
}

async fn measure(apps: usize, idle: Option<Duration>) -> Result<Figures> {
    println!("{apps} Apps");
    let cluster = Cluster::start().await?;
    let mut fleet = Fleet::start(&cluster, apps).await?;
    let mut figures =
        Figures { apps, applied: histogram(), edited: histogram(), repaired: histogram(), writes: Vec::new() };
    figures.writes.push(("the operator's restart".to_owned(), fleet.restart().await?));
    fleet.server_start().await?;
    fleet.edit(&mut figures.edited).await?;
    report("an edit, from the API server's answer to the last server serving it", &figures.edited);
    fleet.apply(&mut figures.applied).await?;
    report("from apply of App, Provider and Secret to Ready", &figures.applied);
    fleet.repair(&mut figures.repaired).await?;
    report("a rendered Secret, edited or deleted by hand, is back", &figures.repaired);
    // What edits led to is written.
    tokio::time::sleep(CALM).await;
    if let Some(idle) = idle {
        figures.writes.push((format!("{:.1} idle minutes", idle.as_secs_f64() / 60.0), fleet.idle(idle).await?));
        figures.writes.extend(fleet.roll().await?);
        fleet.memory("after all of it")?;
    }
    println!();
    Ok(figures)
}

fn report(what: &str, times: &Histogram<u64>) {
    println!(
        "  {what}: p50 {}, p90 {}, p99 {}, most {} ({} times)",
        millis(times, 0.5),
        millis(times, 0.9),
        millis(times, 0.99),
        millis(times, 1.0),
        times.len()
    );
}

// === impl Figures ===

impl Figures {
    fn bounds(&self) -> Vec<Bound> {
        let apps = self.apps;
        let most = |times: &Histogram<u64>| times.value_at_quantile(1.0);
        let mut bounds = vec![
            Bound::new(
                format!("{apps} Apps: applied to Ready under 2 s: most {}", millis(&self.applied, 1.0)),
                most(&self.applied) < micros(APPLIED_WITHIN),
            ),
            Bound::new(
                format!("{apps} Apps: an edit is live within 1 s: p99 {}", millis(&self.edited, 0.99)),
                self.edited.value_at_quantile(0.99) < micros(EDITED_WITHIN),
            ),
            Bound::new(
                format!("{apps} Apps: a rendered Secret is back within 2 s: most {}", millis(&self.repaired, 1.0)),
                most(&self.repaired) < micros(REPAIRED_WITHIN),
            ),
        ];
        bounds.extend(self.writes.iter().map(|(when, writes)| {
            let count = audit::count(writes);
            let kinds: Vec<_> = count.iter().map(|((verb, what), count)| format!("{count} {verb} {what}")).collect();
            let kinds = if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") };
            Bound::new(format!("{apps} Apps: no write but the Lease's in {when}: {kinds}"), writes.is_empty())
        }));
        bounds
    }

    /// One App changed is live as fast as among few.
    fn against(&self, few: &Self) -> Bound {
        #[expect(clippy::cast_precision_loss, reason = "microseconds of a benchmark are far below 2^52")]
        let at = |figures: &Self, quantile| figures.edited.value_at_quantile(quantile) as f64;
        let [p50, p99] = [0.5, 0.99].map(|quantile| at(self, quantile) / at(few, quantile));
        Bound::new(
            format!(
                "{} Apps: an edit takes at most {AS_FAST} times as long as among {FEW} Apps: p50 {p50:.2}, p99 {p99:.2}",
                self.apps
            ),
            p50 <= AS_FAST,
        )
    }
}

// === impl Fleet ===

impl<'a> Fleet<'a> {
    /// Makes the Apps, then starts the operator, and waits until all are Programmed.
    async fn start(cluster: &'a Cluster, apps: usize) -> Result<Self> {
        let install = cluster.builder().everywhere().tenants(FEW).install().await;
        let client = install.admin();
        let population = Population::new(&install, apps);
        let took = population.create(&client).await?;
        println!("  made by the administrator in {:.1} s", took.as_secs_f64());
        let servers = install.serve(2).await;
        let programmed = population.programmed(&client).await?;
        let mark = cluster.plane().audit_mark();
        let started = Instant::now();
        let operator = install.operator().await;
        programmed.await??;
        let took = started.elapsed().as_secs_f64();
        println!("  operator start to all Programmed: {took:.2} s");
        let fleet = Self { install, client, population, servers, operator };
        // Events go out after the last status.
        tokio::time::sleep(Duration::from_secs(1)).await;
        fleet.requests("until then the operator asked", mark)?;
        fleet.memory("once all are Programmed")?;
        Ok(fleet)
    }

    /// A restarted operator finds everything done.
    async fn restart(&self) -> Result<Vec<Event>> {
        self.operator.terminate().await.context("the operator ends when it is asked to")?;
        let mark = self.mark();
        let started = Instant::now();
        self.operator.start()?;
        self.looked_at_all(&self.operator).await?;
        println!("  a restarted operator has looked at all: {:.2} s", started.elapsed().as_secs_f64());
        self.requests("until then it asked", mark)?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        self.memory("after the operator's restart")?;
        self.writes(mark)
    }

    /// Waits until the operator has reconciled every App.
    async fn looked_at_all(&self, operator: &Operator) -> Result<()> {
        const DONE: &str = "controller_runtime_reconcile_total{controller=\"app\",result=\"success\"} ";
        let ops = Anonymous::new(operator.ops);
        let end = Instant::now() + 10 * LIMIT;
        loop {
            let page = ops.try_send(ops.request(http::Method::GET, "metrics")).await.map(|answer| answer.text);
            let done = page.ok().and_then(|page| {
                page.lines().find_map(|line| line.strip_prefix(DONE)).and_then(|count| count.parse::<usize>().ok())
            });
            if done.is_some_and(|done| done >= self.population.len()) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the operator has not reconciled all: {done:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A new Pod, and its container once more: it starts from what it kept.
    async fn server_start(&mut self) -> Result<()> {
        let server = self.install.server_as(self.install.server_account(), &[]).await?;
        let started = Instant::now();
        server.start_ready().await?;
        let first = started.elapsed().as_secs_f64();
        server.terminate().await.context("the server ends when it is asked to")?;
        let started = Instant::now();
        server.start_ready().await?;
        println!(
            "  a new server is ready after {first:.2} s, a restarted container after {:.2} s",
            started.elapsed().as_secs_f64()
        );
        server.set_endpoint(Endpoint::SERVING).await?;
        server.remove().await
    }

    /// One edit after the other, of a few Apps that lie far from each other.
    async fn edit(&self, times: &mut Histogram<u64>) -> Result<()> {
        let mut told = Told::by(&self.servers).await?;
        let step = (self.population.len() / FEW).max(1);
        for number in 0..EDITS {
            let (namespace, app) = self.population.at((number * step) % self.population.len());
            let apps: Api<app::App> = Api::namespaced(self.client.clone(), namespace);
            let before = told.now(app.id());
            let patch = json!({ "spec": { "displayName": format!("Shop {number}") } });
            apps.patch(app.id(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
            let answered = Instant::now();
            let live = tokio::time::timeout(LIMIT, told.changed(app.id(), &before)).await;
            let live = live.with_context(|| format!("edit {number} of {} is not live", app.id()))??;
            times.record(micros(live.saturating_duration_since(answered)))?;
        }
        Ok(())
    }

    /// New Apps, each with a Provider and Secrets, one after the other.
    async fn apply(&self, times: &mut Histogram<u64>) -> Result<()> {
        for number in 0..APPLIES {
            let provider = Provider::new(&format!("github-{number}"), "github");
            let app = App::new("new").relay(Relay::to(&self.install.smtp)).provider(&provider);
            let tenant = self.install.tenant();
            let mut objects = app.objects(tenant);
            objects.extend([provider.object(tenant), provider.secret_object(tenant)]);
            let apps: Api<app::App> = Api::namespaced(self.client.clone(), tenant);
            let name = app.id().to_owned();
            let ready = tokio::spawn(async move { await_condition(apps, &name, is_true(ConditionType::Ready)).await });
            let started = Instant::now();
            for object in &objects {
                apply(&self.client, object).await?;
            }
            let ready = tokio::time::timeout(LIMIT, ready).await;
            ready.with_context(|| format!("{} is not Ready", app.id()))???;
            times.record(micros(started.elapsed()))?;
        }
        Ok(())
    }

    /// Rendered Secrets that somebody edits or deletes.
    async fn repair(&self, times: &mut Histogram<u64>) -> Result<()> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), self.install.namespace());
        for number in 0..2 * REPAIRS {
            let (_, app) = self.population.at(number % self.population.len());
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
            let back = await_condition(secrets.clone(), &name, publishes(document));
            let back = tokio::time::timeout(LIMIT, back).await;
            back.with_context(|| format!("{name} is not repaired"))??;
            times.record(micros(began.elapsed()))?;
        }
        Ok(())
    }

    async fn idle(&self, time: Duration) -> Result<Vec<Event>> {
        let mark = self.mark();
        tokio::time::sleep(time).await;
        self.requests("in idle minutes the operator asked", mark)?;
        self.writes(mark)
    }

    /// Servers and operators come and go, and no App changes.
    async fn roll(&mut self) -> Result<Vec<(String, Vec<Event>)>> {
        let mut writes = Vec::new();
        self.servers.push(self.install.server().await);
        tokio::time::sleep(CALM).await;

        let mark = self.mark();
        for server in std::mem::take(&mut self.servers) {
            self.servers.push(self.install.server().await);
            server.remove().await?;
        }
        tokio::time::sleep(CALM).await;
        writes.push(("a rolling restart of 3 servers".to_owned(), self.writes(mark)?));

        let mark = self.mark();
        let more = self.install.serve(3).await;
        for server in more {
            server.remove().await?;
        }
        tokio::time::sleep(CALM).await;
        writes.push(("scaling 3 → 6 → 3".to_owned(), self.writes(mark)?));

        let mark = self.mark();
        let standby = self.install.operator().await;
        tokio::time::sleep(CALM).await;
        let began = Instant::now();
        self.operator.terminate().await.context("the operator ends when it is asked to")?;
        self.looked_at_all(&standby).await?;
        println!(
            "  a standby has looked at all {:.2} s after its leader was asked to end",
            began.elapsed().as_secs_f64()
        );
        tokio::time::sleep(CALM).await;
        writes.push(("a change of leader".to_owned(), self.writes(mark)?));
        self.operator = standby;
        Ok(writes)
    }

    // --- What it costs

    fn mark(&self) -> Mark {
        self.install.cluster().plane().audit_mark()
    }

    /// What the operator has asked of the API server since.
    fn asked(&self, since: Mark) -> Result<Vec<Event>> {
        let user = self.install.operator_account().user_name();
        let mut events = self.install.cluster().plane().audit_since(since)?;
        events.retain(|event| event.user == user);
        Ok(events)
    }

    fn writes(&self, since: Mark) -> Result<Vec<Event>> {
        let mut events = self.asked(since)?;
        events.retain(|event| event.is_write() && event.resource != "leases");
        Ok(events)
    }

    fn requests(&self, what: &str, since: Mark) -> Result<()> {
        let asked = self.asked(since)?;
        let mut verbs: BTreeMap<&str, usize> = BTreeMap::new();
        for event in &asked {
            *verbs.entry(&event.verb).or_default() += 1;
        }
        let verbs: Vec<_> = verbs.iter().map(|(verb, count)| format!("{verb} {count}")).collect();
        #[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^52")]
        let each = asked.len() as f64 / self.population.len() as f64;
        println!("  {what} the API server {} times ({}), {each:.1} for each App", asked.len(), verbs.join(", "));
        Ok(())
    }

    fn memory(&self, when: &str) -> Result<()> {
        let operator = self.operator.pid().context("the operator runs")?;
        let server = self.servers[0].pid().context("the server runs")?;
        println!(
            "  memory {when}: operator {:.1} MiB (most {:.1}), server {:.1} MiB (most {:.1})",
            memory(operator)?,
            peak_memory(operator)?,
            memory(server)?,
            peak_memory(server)?
        );
        Ok(())
    }
}

/// The condition is true of the App as it is written now.
fn is_true(type_: ConditionType) -> impl Condition<app::App> {
    move |app: Option<&app::App>| app.is_some_and(|app| population::says(app, type_, ConditionStatus::True))
}

fn publishes(document: ByteString) -> impl Condition<Secret> {
    move |secret: Option<&Secret>| {
        let data = secret.and_then(|secret| secret.data.as_ref());
        data.and_then(|data| data.get(RENDERED_APP_KEY)) == Some(&document)
    }
}
