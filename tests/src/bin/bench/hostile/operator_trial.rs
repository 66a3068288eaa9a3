//! One hostile tenant against the operator, on a real control plane, beside the App of another tenant.

use std::{
    future::Future,
    net::SocketAddr,
    process::ExitStatus,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use http::Method;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use latchkey_crds::{
    app,
    conditions::{ConditionStatus, ConditionType},
};
use latchkey_tests::{
    builders::App,
    client::Anonymous,
    cluster::{Cluster, Install, Operator, PodServer},
    process,
};
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::limit::{self, MemoryLimit};
use crate::{
    figures::{Bound, anonymous, histogram, mib, micros, millis},
    fleet,
};

/// How often an operator is asked whether it is ready; the chart's probe asks every five seconds.
const POLL: Duration = Duration::from_millis(500);
/// `timeoutSeconds` of the chart's probe.
const POLL_LIMIT: Duration = Duration::from_secs(3);
/// Failures in a row by which a kubelet takes a pod for unready: its `failureThreshold`.
const THRESHOLD: u32 = 3;
const EDIT_EVERY: Duration = Duration::from_millis(500);
/// An edit takes well under a second on a calm machine; the control plane has the same two cores as everything else.
const EDIT_LIMIT: Duration = Duration::from_secs(10);

/// Two operators, a server under the memory limit, and the App of a tenant who does no harm.
pub(super) struct OperatorTrial<'a> {
    pub(super) install: Install<'a>,
    app: App,
    operators: Vec<Operator>,
    server: PodServer,
    /// Memory of the server before the attack, in bytes.
    before: u64,
    /// Dropped after the server, which is in it.
    limit: MemoryLimit,
}

/// How an operator did.
#[derive(Default)]
struct Readiness {
    polls: u32,
    failed: u32,
    in_a_row: u32,
    most_in_a_row: u32,
    ended: Option<(ExitStatus, Duration)>,
}

// === impl OperatorTrial ===

impl<'a> OperatorTrial<'a> {
    pub(super) async fn start(cluster: &'a Cluster) -> Result<Self> {
        println!("  the hostile tenant has the priority of everybody else: what it costs is the API server's work");
        let limit = MemoryLimit::new()?;
        let install = cluster.builder().tenants(2).server_wrapper(&limit.wrapper()).try_install().await?;
        let server = install.server().await;
        let operators = vec![install.operator().await, install.operator().await];
        let app = App::new("ordinary");
        install.apply(&app).await?;
        install.ready(&app).await;
        let before = memory(&server);
        let this = Self { install, app, operators, server, before, limit };
        for operator in &this.operators {
            let end = Instant::now() + EDIT_LIMIT;
            while !is_ready(operator.ops).await {
                anyhow::ensure!(Instant::now() < end, "{} is not ready without an attack", operator.identity());
                sleep(POLL).await;
            }
        }
        Ok(this)
    }

    /// The namespace of the hostile tenant.
    pub(super) fn hostile_namespace(&self) -> &str {
        &self.install.tenants()[1]
    }

    /// Watches operators, server and the other tenant's App during the attack, prints, and gives what was promised.
    pub(super) async fn during<T>(&self, attack: impl Future<Output = Result<T>>) -> Result<(T, Vec<Bound>)> {
        let done = AtomicBool::new(false);
        let [first, second] = &self.operators[..] else { anyhow::bail!("there are two operators") };
        let attacking = async {
            let outcome = attack.await;
            done.store(true, Ordering::Relaxed);
            outcome
        };
        let (outcome, one, two, edits, peak) = tokio::join!(
            attacking,
            poll(first, &done),
            poll(second, &done),
            self.edit(&done),
            self.server_memory(&done)
        );
        let outcome = outcome.context("the attack is not finished")?;
        let (edits, failed) = edits?;
        let mut bounds: Vec<_> = [(first, one), (second, two)].map(|(operator, seen)| seen.bound(operator)).into();
        bounds.push(Bound::new(
            format!(
                "an edit of another tenant's App is Ready within {EDIT_LIMIT:?}: {failed} of {} not, most {}",
                edits.len() + failed,
                if edits.is_empty() { "-".to_owned() } else { millis(&edits, 1.0) }
            ),
            failed == 0 && !edits.is_empty(),
        ));
        bounds.push(self.memory(peak));
        Ok((outcome, bounds))
    }

    /// Whether the server has grown by so many bytes at the most since before the attack.
    pub(super) fn growth(&self, most: u64) -> Bound {
        let growth = memory(&self.server).saturating_sub(self.before);
        Bound::new(
            format!("the server grows by at most {:.0} MiB: {:.1} MiB", mib(most), mib(growth)),
            growth <= most && self.server.ended().is_none(),
        )
    }

    /// Edits the ordinary App again and again: the times until it is Ready, and how often it was not.
    async fn edit(&self, done: &AtomicBool) -> Result<(Histogram<u64>, u64)> {
        let (mut times, mut failed) = (histogram(), 0);
        let apps: Api<app::App> = self.install.apps();
        let mut number = 0;
        while !done.load(Ordering::Relaxed) {
            number += 1;
            let patch = json!({ "spec": { "displayName": format!("Shop {number}") } });
            let started = Instant::now();
            let edited = async {
                apps.patch(self.app.id(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
                loop {
                    let app = apps.get(self.app.id()).await?;
                    if fleet::says(&app, ConditionType::Ready, ConditionStatus::True) {
                        return anyhow::Ok(());
                    }
                    sleep(Duration::from_millis(50)).await;
                }
            };
            match timeout(EDIT_LIMIT, edited).await {
                Ok(Ok(())) => times.record(micros(started.elapsed()))?,
                Ok(Err(_)) | Err(_) => failed += 1,
            }
            sleep(EDIT_EVERY).await;
        }
        Ok((times, failed))
    }

    async fn server_memory(&self, done: &AtomicBool) -> u64 {
        let mut peak = 0;
        while !done.load(Ordering::Relaxed) && self.server.ended().is_none() {
            peak = peak.max(memory(&self.server));
            sleep(Duration::from_millis(50)).await;
        }
        peak
    }

    fn memory(&self, peak: u64) -> Bound {
        println!("  memory of the server: {:.1} MiB before, {:.1} MiB at the most", mib(self.before), mib(peak));
        let what = format!("memory of the server stays under {:.0} MiB and it lives", mib(limit::BYTES));
        match self.server.ended() {
            Some(status) => Bound::new(format!("{what}: it ended with {status} at {:.1} MiB", mib(peak)), false),
            None => Bound::new(format!("{what}: {:.1} MiB at the most", mib(peak)), self.limit.is_kept(peak)),
        }
    }
}

/// None of a server that has ended.
fn memory(server: &PodServer) -> u64 {
    server.pid().and_then(|pid| anonymous(pid).ok()).unwrap_or_default()
}

/// Asks an operator whether it is ready until the attack is done or the process has ended.
async fn poll(operator: &Operator, done: &AtomicBool) -> Readiness {
    let mut seen = Readiness::default();
    let started = Instant::now();
    while !done.load(Ordering::Relaxed) {
        if let Some(status) = operator.ended() {
            seen.ended = Some((status, started.elapsed()));
            break;
        }
        seen.polls += 1;
        if is_ready(operator.ops).await {
            seen.in_a_row = 0;
        } else {
            seen.failed += 1;
            seen.in_a_row += 1;
            seen.most_in_a_row = seen.most_in_a_row.max(seen.in_a_row);
        }
        sleep(POLL).await;
    }
    seen
}

async fn is_ready(ops: SocketAddr) -> bool {
    let client = Anonymous::new(ops);
    let answer = timeout(POLL_LIMIT, client.try_send(client.request(Method::GET, "readyz"))).await;
    matches!(answer, Ok(Ok(answer)) if answer.status.is_success())
}

// === impl Readiness ===

impl Readiness {
    fn bound(&self, operator: &Operator) -> Bound {
        let what = format!("{} stays Ready", operator.identity());
        if let Some((status, after)) = self.ended {
            println!("  the last lines of {}:\n{}", operator.identity(), process::tail(operator.log(), 3));
            return Bound::new(format!("{what}: it ended after {:.1} s with {status}", after.as_secs_f64()), false);
        }
        Bound::new(
            format!("{what}: {} of {} polls failed, at most {} in a row", self.failed, self.polls, self.most_in_a_row),
            self.most_in_a_row < THRESHOLD,
        )
    }
}
