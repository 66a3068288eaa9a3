//! One attacker against one server with ordinary users.

use std::{
    future::Future,
    net::SocketAddr,
    process::ExitStatus,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use http::StatusCode;
use latchkey_tests::{
    builders::App,
    client::ApiClient,
    passwords::PASSWORD,
    process,
    stack::{self, Stack},
};

use super::{
    attackers::{AttackerRuntime, ResponseCounts},
    memory_limit::{self, MemoryLimit},
    users::{User, UserAction, UserMeasurements, measure_users},
};
use crate::{
    logins,
    measurements::{Bound, anonymous_bytes, format_millis, mib, micros_of},
};

/// Number of users that log in continuously. On two cores they use the whole machine, so that the effect of an attacker
/// is visible.
const USERS: u32 = 8;
/// Upper limit of the p99 of logins during an attack, relative to the p99 without an attack.
const MAX_RATIO: f64 = 3.0;
/// Absolute upper limit of the p99 of logins during an attack.
const MAX_P99: Duration = Duration::from_secs(1);
/// The namespace of the ordinary users' Apps. The attackers' Apps are in other namespaces.
pub(super) const ORDINARY_NAMESPACE: &str = "ordinary";

/// A server under the memory limit, its ordinary users, and the attackers' runtime.
pub(super) struct ServerAttack {
    pub(super) stack: Stack,
    pub(super) attacker_runtime: AttackerRuntime,
    /// Counts the responses that the attacker gets.
    pub(super) counts: ResponseCounts,
    app: String,
    users: Vec<User>,
    /// The users that [`ServerAttack::add_users`] has added. They log in at a provider and are measured separately.
    social_users: Vec<User>,
    duration: Duration,
    baseline: Option<Baseline>,
    /// Dropped after the server, because the server runs in this limit's cgroup.
    limit: MemoryLimit,
}

/// Measurements without the attack.
struct Baseline {
    logins: UserMeasurements,
    social_logins: Option<UserMeasurements>,
    /// The server's memory without mapped files, in bytes.
    memory: u64,
}

/// Watches the server process during the attack.
struct ServerWatch {
    /// Set when the process has ended.
    server_ended: Arc<AtomicBool>,
    /// Set when the measurement is over.
    measurement_done: Arc<AtomicBool>,
    /// The maximum of the server's memory without mapped files so far, in bytes.
    peak: Arc<AtomicU64>,
}

/// Raises the limits of an App, so that no user of a benchmark reaches them.
pub(super) fn with_raised_limits(app: App) -> App {
    let high_limit: &[(u32, u32)] = &[(10_000_000, 60)];
    ["loginsPerClient", "loginFailuresPerClient", "loginFailuresPerAccount", "loginFailuresPerClientOverall"]
        .into_iter()
        .fold(app, |app, limit| app.limit(limit, high_limit))
        .limit("registrationsPerClient", high_limit)
}

// === impl ServerAttack ===

impl ServerAttack {
    /// Adds the App of the ordinary users to `builder`, starts the service, and registers the users.
    pub(super) async fn start(builder: stack::Builder, duration: Duration) -> Result<Self> {
        let limit = MemoryLimit::new()?;
        let app = with_raised_limits(App::new("ordinary").namespace(ORDINARY_NAMESPACE));
        let stack = builder.app(&app).wrapper(&limit.wrapper()).try_start().await?;
        let server = stack.server().public;
        let mut users = Vec::new();
        for number in 0..USERS {
            let (from, email) = (logins::client_address(number), format!("user-{number}@example.com"));
            let registered = ApiClient::from_address(server, from).register(app.id(), "Ada", &email, PASSWORD).await;
            ensure!(registered.status == StatusCode::OK, "register returned {}", registered.status);
            users.push(User { from, action: UserAction::PasswordLogin { app: app.id().to_owned(), email } });
        }
        Ok(Self {
            stack,
            attacker_runtime: AttackerRuntime::start()?,
            counts: ResponseCounts::default(),
            app: app.id().to_owned(),
            users,
            social_users: Vec::new(),
            duration,
            baseline: None,
            limit,
        })
    }

    pub(super) fn server(&self) -> SocketAddr {
        self.stack.server().public
    }

    /// Adds ordinary users who log in at a provider. They are measured separately.
    pub(super) fn add_users(&mut self, social_users: Vec<User>) {
        self.social_users = social_users;
    }

    /// Measures the users without the attacker.
    pub(super) async fn measure_baseline(&mut self) -> Result<()> {
        let server_ended = Arc::new(AtomicBool::new(false));
        // Warms up caches and connections to the stores.
        let _ = self.measure(Duration::from_secs(2), &server_ended).await?;
        let (logins, social_logins) = self.measure(self.duration, &server_ended).await?;
        println!("  users without an attack       {}", logins.report_line());
        if let Some(social_logins) = &social_logins {
            println!("  social logins without it      {}", social_logins.report_line());
        }
        ensure!(logins.failed_count() == 0, "logins to {} fail without an attacker", self.app);
        ensure!(
            social_logins.as_ref().is_none_or(|social_logins| social_logins.failed_count() == 0),
            "social logins fail without an attacker"
        );
        let pid = self.stack.server().pid().context("the server runs")?;
        self.baseline = Some(Baseline { logins, social_logins, memory: anonymous_bytes(pid)? });
        Ok(())
    }

    /// Measures the users during the attack, prints the measurements, and returns the bounds.
    pub(super) async fn run_attack(self, attacker: impl Future<Output = ()> + Send + 'static) -> Result<Vec<Bound>> {
        let baseline = self.baseline.as_ref().context("users were measured without an attack first")?;
        let watch = ServerWatch::new();
        let attacking = self.attacker_runtime.spawn(attacker);
        let (observed, ended) =
            tokio::join!(self.measure_until_done(&watch), watch.watch_until_end(&self.stack, Instant::now()));
        attacking.abort();
        let (logins, social_logins) = observed?;
        println!("  users during the attack       {}", logins.report_line());
        if let Some(social_logins) = &social_logins {
            println!("  social logins during it       {}", social_logins.report_line());
        }
        println!("  the attacker                  {}", self.counts);
        let mut bounds = bounds("logins", &baseline.logins, &logins);
        if let (Some(baseline), Some(social_logins)) = (&baseline.social_logins, &social_logins) {
            bounds.extend(self::bounds("social logins", baseline, social_logins));
        }
        bounds.push(self.memory_bound(baseline.memory, watch.peak.load(Ordering::Relaxed), ended));
        Ok(bounds)
    }

    async fn measure_until_done(&self, watch: &ServerWatch) -> Result<(UserMeasurements, Option<UserMeasurements>)> {
        let observed = self.measure(self.duration, &watch.server_ended).await;
        watch.measurement_done.store(true, Ordering::Relaxed);
        observed
    }

    async fn measure(
        &self,
        duration: Duration,
        server_ended: &Arc<AtomicBool>,
    ) -> Result<(UserMeasurements, Option<UserMeasurements>)> {
        let server = self.server();
        if self.social_users.is_empty() {
            return Ok((measure_users(server, &self.users, duration, server_ended).await?, None));
        }
        let (logins, social_logins) = tokio::join!(
            measure_users(server, &self.users, duration, server_ended),
            measure_users(server, &self.social_users, duration, server_ended)
        );
        Ok((logins?, Some(social_logins?)))
    }

    fn memory_bound(&self, before: u64, peak: u64, ended: Option<(ExitStatus, Duration)>) -> Bound {
        let charged = self.limit.peak().map(|peak| format!(", {:.0} MiB charged including files", mib(peak)));
        println!(
            "  memory                        {:.1} MiB before, peak {:.1} MiB{}",
            mib(before),
            mib(peak),
            charged.unwrap_or_default()
        );
        let what = format!("memory stays under {:.0} MiB and the server keeps running", mib(memory_limit::LIMIT_BYTES));
        let Some((status, after)) = ended else {
            return Bound::new(format!("{what}: peak {:.1} MiB", mib(peak)), self.limit.is_met(peak));
        };
        println!("  the server's last lines:\n{}", process::tail(&self.stack.server().log_path(), 3));
        let by_limit = match self.limit.oom_kills() {
            Some(0) => ", not because of its memory",
            Some(_) => ", because of its memory",
            None => "",
        };
        Bound::new(format!("{what}: it ended after {:.1} s with {status}{by_limit}", after.as_secs_f64()), false)
    }
}

fn bounds(what: &str, baseline: &UserMeasurements, attacked: &UserMeasurements) -> Vec<Bound> {
    let failed = Bound::new(
        format!("no {what} fail: {} of {}", attacked.failed_count(), attacked.failed_count() + attacked.latency.len()),
        attacked.failed_count() == 0,
    );
    let (Some(baseline_p99), Some(p99)) = (baseline.p99(), attacked.p99()) else {
        let what = format!(
            "p99 of {what} is under {MAX_RATIO} times the p99 without the attack and {MAX_P99:?}: too many fail"
        );
        return vec![Bound::new(what, false), failed];
    };
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a benchmark are far below 2^52")]
    let ratio = p99 as f64 / baseline_p99 as f64;
    vec![
        Bound::new(
            format!("p99 of {what} is under {MAX_RATIO} times the p99 without the attack: {ratio:.2} times"),
            ratio < MAX_RATIO,
        ),
        Bound::new(
            format!("p99 of {what} is under {MAX_P99:?}: {}", format_millis(&attacked.latency, 0.99)),
            p99 < micros_of(MAX_P99),
        ),
        failed,
    ]
}

// === impl ServerWatch ===

impl ServerWatch {
    fn new() -> Self {
        Self {
            server_ended: Arc::new(AtomicBool::new(false)),
            measurement_done: Arc::new(AtomicBool::new(false)),
            peak: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Samples the server's memory until the end of the attack. If the server ends first, returns its exit status and
    /// the time since `started`.
    async fn watch_until_end(&self, stack: &Stack, started: Instant) -> Option<(ExitStatus, Duration)> {
        loop {
            if let Some(status) = stack.server().exit_status() {
                self.server_ended.store(true, Ordering::Relaxed);
                return Some((status, started.elapsed()));
            }
            if let Some(memory) = stack.server().pid().and_then(|pid| anonymous_bytes(pid).ok()) {
                self.peak.fetch_max(memory, Ordering::Relaxed);
            }
            if self.measurement_done.load(Ordering::Relaxed) {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
