//! One attacker against one server, beside ordinary users.

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
    client::Anonymous,
    process,
    stack::{self, Stack},
};

use super::{
    limit::{self, MemoryLimit},
    outsiders::{Outsiders, Tally},
    users::{Errand, PASSWORD, Seen, User, observe},
};
use crate::{
    figures::{Bound, anonymous, mib, micros, millis},
    logins,
};

/// Users who log in without a pause. On two cores that is a full machine already, so that the attacker's share is seen.
const USERS: u32 = 8;
/// How much longer a login may take beside an attacker.
const MAX_RATIO: f64 = 3.0;
const MAX_P99: Duration = Duration::from_secs(1);
/// The namespace of ordinary users' Apps; attackers are in others.
pub(super) const ORDINARY: &str = "ordinary";

/// A server under the limit, its ordinary users, and where the attacker runs.
pub(super) struct Trial {
    pub(super) stack: Stack,
    pub(super) outsiders: Outsiders,
    /// Counts what the attacker gets.
    pub(super) tally: Tally,
    app: String,
    users: Vec<User>,
    others: Vec<User>,
    lasts: Duration,
    calm: Option<Calm>,
    /// Dropped after the server, which is in it.
    limit: MemoryLimit,
}

/// What users saw before the attack.
struct Calm {
    logins: Seen,
    others: Option<Seen>,
    memory: u64,
}

/// A server is looked at while it is attacked.
struct Watch {
    /// Set when the process has ended.
    gone: Arc<AtomicBool>,
    done: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
}

/// An App whose own limits do not refuse the users of a benchmark.
pub(super) fn loose(app: App) -> App {
    let loose: &[(u32, u32)] = &[(10_000_000, 60)];
    ["loginsPerClient", "loginFailuresPerClient", "loginFailuresPerAccount", "loginFailuresPerClientOverall"]
        .into_iter()
        .fold(app, |app, limit| app.limit(limit, loose))
        .limit("registrationsPerClient", loose)
}

// === impl Trial ===

impl Trial {
    /// Starts what the builder says, and beside it the App of ordinary users.
    pub(super) async fn start(builder: stack::Builder, lasts: Duration) -> Result<Self> {
        let limit = MemoryLimit::new()?;
        let app = loose(App::new("ordinary").namespace(ORDINARY));
        let stack = builder.app(&app).wrapper(&limit.wrapper()).try_start().await?;
        let server = stack.server().public;
        let mut users = Vec::new();
        for number in 0..USERS {
            let (from, email) = (logins::address(number), format!("user-{number}@example.com"));
            let registered = Anonymous::from_address(server, from).register(app.id(), "Ada", &email, PASSWORD).await;
            ensure!(registered.status == StatusCode::OK, "register was answered {}", registered.status);
            users.push(User { from, errand: Errand::LogIn { app: app.id().to_owned(), email } });
        }
        Ok(Self {
            stack,
            outsiders: Outsiders::start()?,
            tally: Tally::default(),
            app: app.id().to_owned(),
            users,
            others: Vec::new(),
            lasts,
            calm: None,
            limit,
        })
    }

    pub(super) fn server(&self) -> SocketAddr {
        self.stack.server().public
    }

    /// Ordinary users beside those who log in, who are measured apart.
    pub(super) fn beside(&mut self, others: Vec<User>) {
        self.others = others;
    }

    /// Measures the users alone.
    pub(super) async fn calm(&mut self) -> Result<()> {
        let alive = Arc::new(AtomicBool::new(false));
        // Caches fill and connections to the stores are made before it counts.
        let _ = self.observe(Duration::from_secs(2), &alive).await?;
        let (logins, others) = self.observe(self.lasts, &alive).await?;
        println!("  users alone                   {}", logins.line());
        if let Some(others) = &others {
            println!("  sign-ins alone                {}", others.line());
        }
        ensure!(logins.failed() == 0, "logins of {} fail without an attacker", self.app);
        ensure!(others.as_ref().is_none_or(|others| others.failed() == 0), "sign-ins fail without an attacker");
        let pid = self.stack.server().pid().context("the server runs")?;
        self.calm = Some(Calm { logins, others, memory: anonymous(pid)? });
        Ok(())
    }

    /// Measures them beside the attacker, who goes on until the time is over, prints, and gives what was promised.
    pub(super) async fn attack(self, attacker: impl Future<Output = ()> + Send + 'static) -> Result<Vec<Bound>> {
        let calm = self.calm.as_ref().context("users are measured alone first")?;
        let watch = Watch::new();
        let attacking = self.outsiders.spawn(attacker);
        let (observed, ended) =
            tokio::join!(self.observe_and_finish(&watch), watch.follow(&self.stack, Instant::now()));
        attacking.abort();
        let (logins, others) = observed?;
        println!("  users beside the attacker     {}", logins.line());
        if let Some(others) = &others {
            println!("  sign-ins beside the attacker  {}", others.line());
        }
        println!("  the attacker                  {}", self.tally);
        let mut bounds = bounds("logins", &calm.logins, &logins);
        if let (Some(calm), Some(others)) = (&calm.others, &others) {
            bounds.extend(self::bounds("sign-ins", calm, others));
        }
        bounds.push(self.memory(calm.memory, watch.peak.load(Ordering::Relaxed), ended));
        Ok(bounds)
    }

    async fn observe_and_finish(&self, watch: &Watch) -> Result<(Seen, Option<Seen>)> {
        let observed = self.observe(self.lasts, &watch.gone).await;
        watch.done.store(true, Ordering::Relaxed);
        observed
    }

    async fn observe(&self, lasts: Duration, gone: &Arc<AtomicBool>) -> Result<(Seen, Option<Seen>)> {
        let server = self.server();
        if self.others.is_empty() {
            return Ok((observe(server, &self.users, lasts, gone).await?, None));
        }
        let (logins, others) =
            tokio::join!(observe(server, &self.users, lasts, gone), observe(server, &self.others, lasts, gone));
        Ok((logins?, Some(others?)))
    }

    fn memory(&self, before: u64, peak: u64, ended: Option<(ExitStatus, Duration)>) -> Bound {
        let charged = self.limit.peak().map(|peak| format!(", {:.0} MiB charged with its files", mib(peak)));
        println!(
            "  memory                        {:.1} MiB before, {:.1} MiB at the most{}",
            mib(before),
            mib(peak),
            charged.unwrap_or_default()
        );
        let what = format!("memory stays under {:.0} MiB and the server lives", mib(limit::BYTES));
        let Some((status, after)) = ended else {
            return Bound::new(format!("{what}: {:.1} MiB at the most", mib(peak)), self.limit.is_kept(peak));
        };
        println!("  the server's last lines:\n{}", process::tail(&self.stack.server().log(), 3));
        let by_limit = match self.limit.kills() {
            Some(0) => ", not for its memory",
            Some(_) => ", for its memory",
            None => "",
        };
        Bound::new(format!("{what}: it ended after {:.1} s with {status}{by_limit}", after.as_secs_f64()), false)
    }
}

fn bounds(what: &str, calm: &Seen, beside: &Seen) -> Vec<Bound> {
    let failed = Bound::new(
        format!("none of the {what} fails: {} of {}", beside.failed(), beside.failed() + beside.latency.len()),
        beside.failed() == 0,
    );
    let (Some(calm_p99), Some(p99)) = (calm.p99(), beside.p99()) else {
        let what = format!("p99 of {what} is under {MAX_RATIO} times that of calm and {MAX_P99:?}: too many fail");
        return vec![Bound::new(what, false), failed];
    };
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a benchmark are far below 2^52")]
    let ratio = p99 as f64 / calm_p99 as f64;
    vec![
        Bound::new(
            format!("p99 of {what} is under {MAX_RATIO} times that of calm: {ratio:.2} times"),
            ratio < MAX_RATIO,
        ),
        Bound::new(
            format!("p99 of {what} is under {MAX_P99:?}: {}", millis(&beside.latency, 0.99)),
            p99 < micros(MAX_P99),
        ),
        failed,
    ]
}

// === impl Watch ===

impl Watch {
    fn new() -> Self {
        Self {
            gone: Arc::new(AtomicBool::new(false)),
            done: Arc::new(AtomicBool::new(false)),
            peak: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Samples memory until the end of the trial, or of the server: then how it ended, and when.
    async fn follow(&self, stack: &Stack, started: Instant) -> Option<(ExitStatus, Duration)> {
        loop {
            if let Some(status) = stack.server().ended() {
                self.gone.store(true, Ordering::Relaxed);
                return Some((status, started.elapsed()));
            }
            if let Some(memory) = stack.server().pid().and_then(|pid| anonymous(pid).ok()) {
                self.peak.fetch_max(memory, Ordering::Relaxed);
            }
            if self.done.load(Ordering::Relaxed) {
                return None;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
