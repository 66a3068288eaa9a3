//! One hostile tenant against the operator, on a real control plane, while the operator serves another tenant's App.

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
    client::ApiClient,
    cluster::{Installation, OperatorProcess, ServerInPod, TestCluster},
    process,
};
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::memory_limit::{self, MemoryLimit};
use crate::{
    measurements::{Bound, anonymous_bytes, format_millis, histogram, mib, micros_of},
    operator,
};

/// How often each operator's readiness is checked; the chart's probe checks every five seconds.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Timeout of a readiness check: `timeoutSeconds` of the chart's probe.
const POLL_TIMEOUT: Duration = Duration::from_secs(3);
/// Consecutive failures after which a kubelet marks a pod unready: the default `failureThreshold`, which the chart's
/// probe uses.
const FAILURE_THRESHOLD: u32 = 3;
const EDIT_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit until an edited App is Ready. On an idle machine this takes much less than a second, but here the control
/// plane shares the cores with everything else.
const EDIT_LIMIT: Duration = Duration::from_secs(10);

/// Two operators, a server under the memory limit, and the App of a tenant who is not hostile.
pub(super) struct OperatorAttack<'a> {
    pub(super) install: Installation<'a>,
    app: App,
    operators: Vec<OperatorProcess>,
    server: ServerInPod,
    /// The server's memory before the attack, in bytes.
    memory_before: u64,
    /// Dropped after the server, because the server runs in this limit's cgroup.
    limit: MemoryLimit,
}

/// The results of the readiness checks of an operator during the attack.
#[derive(Default)]
struct ReadinessChecks {
    polls: u32,
    failed: u32,
    failed_in_a_row: u32,
    max_failed_in_a_row: u32,
    /// If the operator ended during the attack: its exit status, and the time since the attack began.
    ended: Option<(ExitStatus, Duration)>,
}

// === impl OperatorAttack ===

impl<'a> OperatorAttack<'a> {
    pub(super) async fn start(cluster: &'a TestCluster) -> Result<Self> {
        println!("  the hostile tenant runs at normal priority: its cost is the work of the API server");
        let limit = MemoryLimit::new()?;
        let install = cluster.builder().tenants(2).server_wrapper(&limit.wrapper()).try_install().await?;
        let server = install.start_server().await;
        let operators = vec![install.start_operator().await, install.start_operator().await];
        let app = App::new("ordinary");
        install.apply(&app).await?;
        install.wait_until_ready(&app).await;
        let memory_before = anonymous_memory(&server);
        let this = Self { install, app, operators, server, memory_before, limit };
        for operator in &this.operators {
            let end = Instant::now() + EDIT_LIMIT;
            while !is_ready(operator.ops).await {
                anyhow::ensure!(Instant::now() < end, "{} is not ready without an attack", operator.identity());
                sleep(POLL_INTERVAL).await;
            }
        }
        Ok(this)
    }

    /// The namespace of the hostile tenant.
    pub(super) fn hostile_namespace(&self) -> &str {
        &self.install.tenants()[1]
    }

    /// Watches the operators, the server and the other tenant's App during the attack, prints the measurements, and
    /// returns the bounds.
    pub(super) async fn run_during<T>(&self, attack: impl Future<Output = Result<T>>) -> Result<(T, Vec<Bound>)> {
        let done = AtomicBool::new(false);
        let [first, second] = &self.operators[..] else { anyhow::bail!("there are two operators") };
        let attacking = async {
            let outcome = attack.await;
            done.store(true, Ordering::Relaxed);
            outcome
        };
        let (outcome, first_checks, second_checks, edits, peak) = tokio::join!(
            attacking,
            poll_readiness(first, &done),
            poll_readiness(second, &done),
            self.measure_edits(&done),
            self.peak_server_memory(&done)
        );
        let outcome = outcome.context("the attack did not complete")?;
        let (edits, failed) = edits?;
        let mut bounds: Vec<_> =
            [(first, first_checks), (second, second_checks)].map(|(operator, checks)| checks.bound(operator)).into();
        bounds.push(Bound::new(
            format!(
                "an edit of another tenant's App is Ready within {EDIT_LIMIT:?}: {failed} of {} failed, max {}",
                edits.len() + failed,
                if edits.is_empty() { "-".to_owned() } else { format_millis(&edits, 1.0) }
            ),
            failed == 0 && !edits.is_empty(),
        ));
        bounds.push(self.memory_bound(peak));
        Ok((outcome, bounds))
    }

    /// The bound on the growth of the server's memory since the start of the attack: at most `max` bytes.
    pub(super) fn growth_bound(&self, max: u64) -> Bound {
        let growth = anonymous_memory(&self.server).saturating_sub(self.memory_before);
        Bound::new(
            format!("the server grows by at most {:.0} MiB: {:.1} MiB", mib(max), mib(growth)),
            growth <= max && self.server.exit_status().is_none(),
        )
    }

    /// Edits the ordinary App in a loop. Returns the times until the App was Ready, and the number of edits after which
    /// it did not become Ready in time.
    async fn measure_edits(&self, done: &AtomicBool) -> Result<(Histogram<u64>, u64)> {
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
                    if operator::has_condition(&app, ConditionType::Ready, ConditionStatus::True) {
                        return anyhow::Ok(());
                    }
                    sleep(Duration::from_millis(50)).await;
                }
            };
            match timeout(EDIT_LIMIT, edited).await {
                Ok(Ok(())) => times.record(micros_of(started.elapsed()))?,
                Ok(Err(_)) | Err(_) => failed += 1,
            }
            sleep(EDIT_INTERVAL).await;
        }
        Ok((times, failed))
    }

    async fn peak_server_memory(&self, done: &AtomicBool) -> u64 {
        let mut peak = 0;
        while !done.load(Ordering::Relaxed) && self.server.exit_status().is_none() {
            peak = peak.max(anonymous_memory(&self.server));
            sleep(Duration::from_millis(50)).await;
        }
        peak
    }

    fn memory_bound(&self, peak: u64) -> Bound {
        println!("  memory of the server: {:.1} MiB before, peak {:.1} MiB", mib(self.memory_before), mib(peak));
        let what =
            format!("the server's memory stays under {:.0} MiB and it keeps running", mib(memory_limit::LIMIT_BYTES));
        match self.server.exit_status() {
            Some(status) => Bound::new(format!("{what}: it ended with {status} at {:.1} MiB", mib(peak)), false),
            None => Bound::new(format!("{what}: peak {:.1} MiB", mib(peak)), self.limit.is_met(peak)),
        }
    }
}

/// The server's memory without mapped files, in bytes; zero if the server has ended.
fn anonymous_memory(server: &ServerInPod) -> u64 {
    server.pid().and_then(|pid| anonymous_bytes(pid).ok()).unwrap_or_default()
}

/// Checks an operator's readiness until the attack is done or the process has ended.
async fn poll_readiness(operator: &OperatorProcess, done: &AtomicBool) -> ReadinessChecks {
    let mut checks = ReadinessChecks::default();
    let started = Instant::now();
    while !done.load(Ordering::Relaxed) {
        if let Some(status) = operator.exit_status() {
            checks.ended = Some((status, started.elapsed()));
            break;
        }
        checks.polls += 1;
        if is_ready(operator.ops).await {
            checks.failed_in_a_row = 0;
        } else {
            checks.failed += 1;
            checks.failed_in_a_row += 1;
            checks.max_failed_in_a_row = checks.max_failed_in_a_row.max(checks.failed_in_a_row);
        }
        sleep(POLL_INTERVAL).await;
    }
    checks
}

async fn is_ready(ops: SocketAddr) -> bool {
    let client = ApiClient::new(ops);
    let response = timeout(POLL_TIMEOUT, client.try_send(client.request(Method::GET, "readyz"))).await;
    matches!(response, Ok(Ok(response)) if response.status.is_success())
}

// === impl ReadinessChecks ===

impl ReadinessChecks {
    fn bound(&self, operator: &OperatorProcess) -> Bound {
        let what = format!("{} stays Ready", operator.identity());
        if let Some((status, after)) = self.ended {
            println!("  the last lines of {}:\n{}", operator.identity(), process::tail(operator.log_path(), 3));
            return Bound::new(format!("{what}: it ended after {:.1} s with {status}", after.as_secs_f64()), false);
        }
        Bound::new(
            format!(
                "{what}: {} of {} checks failed, at most {} in a row",
                self.failed, self.polls, self.max_failed_in_a_row
            ),
            self.max_failed_in_a_row < FAILURE_THRESHOLD,
        )
    }
}
