//! Password hashing with admission control: a fixed set of threads with memory of their own, behind a bounded, fair queue
//! with a deadline. A login storm can neither starve other Apps nor kill the process for memory.

use std::{
    fmt,
    num::NonZeroUsize,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use latchkey_crds::types::AppId;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use tokio::sync::oneshot;
use tracing::Span;

use self::{
    engine::Engine,
    queue::{FairQueue, Push},
};
use crate::domain::{
    app::App,
    client::ClientAddress,
    password::{Busy, Password, PasswordHash},
    ports::Hasher,
};

mod engine;
mod queue;

/// How the pool is sized.
#[derive(Clone, Copy, Debug)]
pub struct HashingOptions {
    /// As many as there are CPUs: hashing is all CPU and memory bandwidth.
    pub threads: NonZeroUsize,
    /// Places in the queue for each thread. A hash takes about 15 ms, so 64 are a second of waiting.
    pub places_per_thread: usize,
    /// What has not started by then is answered 503.
    pub deadline: Duration,
}

impl Default for HashingOptions {
    fn default() -> Self {
        Self {
            // Heeds the CPU quota of the cgroup.
            threads: thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
            places_per_thread: 64,
            deadline: Duration::from_secs(2),
        }
    }
}

/// A handle to the hashing threads, which end when the last handle goes.
#[derive(Clone)]
pub struct Hashing {
    pool: Arc<Pool>,
}

struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    options: HashingOptions,
    state: Mutex<QueueState>,
    /// Told when a job comes or the pool closes.
    changed: Condvar,
    metrics: HashingMetrics,
    /// A hash that no password has: what an unknown address is checked against, by the very steps of a known one.
    nobody: PasswordHash,
}

struct QueueState {
    jobs: FairQueue<AppId, ClientAddress, Job>,
    closed: bool,
    /// Seconds that a job takes, averaged over the last ones.
    pace: f64,
}

struct Job {
    work: Work,
    queued: Instant,
    span: Span,
    reply: oneshot::Sender<Done>,
}

enum Work {
    Hash(Password),
    Verify(Password, Option<PasswordHash>),
    Strength(Password, Vec<String>, u8),
}

enum Done {
    Hash(PasswordHash),
    Answer(bool),
    /// Dropped from the queue.
    Busy(Busy),
}

/// Metrics of the pool: is there room, how long is the wait, who was sent away.
#[derive(Clone)]
pub struct HashingMetrics {
    waiting: Gauge,
    running: Gauge,
    refused: Family<RefusedLabels, Counter>,
    wait_seconds: Histogram,
    run_seconds: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusedLabels {
    /// `full`, `displaced` or `deadline`.
    reason: &'static str,
}

// === impl Work ===

impl Work {
    /// Its span's name.
    const fn name(&self) -> &'static str {
        match self {
            Self::Hash(..) => "hash password",
            Self::Verify(..) => "verify password",
            Self::Strength(..) => "judge password",
        }
    }
}

// === impl Hashing ===

impl Hashing {
    /// Starts the threads; metrics are registered under `hashing_`.
    pub fn start(options: HashingOptions, registry: &mut Registry) -> Self {
        let mut salt = [0; 16];
        SystemRandom::new().fill(&mut salt).expect("the system's random number generator answers");
        let nobody = Engine::new().hash(&Password::new(""), &salt);
        let capacity = options.places_per_thread.saturating_mul(options.threads.get());
        let shared = Arc::new(Shared {
            options,
            state: Mutex::new(QueueState { jobs: FairQueue::new(capacity), closed: false, pace: 0.015 }),
            changed: Condvar::new(),
            metrics: HashingMetrics::register(registry.sub_registry_with_prefix("hashing")),
            nobody,
        });
        for number in 0..options.threads.get() {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name(format!("hashing-{number}"))
                .stack_size(512 * 1024)
                .spawn(move || shared.work())
                .expect("the system has room for one thread for each CPU");
        }
        Self { pool: Arc::new(Pool { shared }) }
    }

    async fn run(&self, app: &AppId, client: ClientAddress, work: Work) -> Result<Done, Busy> {
        let shared = &self.pool.shared;
        let (reply, answer) = oneshot::channel();
        let span = latchkey_trace::child!(
            "internal",
            "hashing",
            otel.name = work.name(),
            latchkey.hashing.wait_ms = tracing::field::Empty,
        );
        shared.submit(app, client, Job { work, queued: Instant::now(), span, reply })?;
        // A job that has started ends well within the second that is added.
        let limit = shared.options.deadline + Duration::from_secs(1);
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(Done::Busy(busy))) => Err(busy),
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_)) | Err(_) => Err(shared.busy()),
        }
    }
}

impl fmt::Debug for Hashing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hashing").field("options", &self.pool.shared.options).finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.changed.notify_all();
    }
}

// === impl Shared ===

impl Shared {
    fn submit(&self, app: &AppId, client: ClientAddress, job: Job) -> Result<(), Busy> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let pushed = state.jobs.push(app, &client, job);
        self.metrics.waiting.set(i64::try_from(state.jobs.len()).unwrap_or(i64::MAX));
        let busy = self.retry_after(&state);
        drop(state);
        match pushed {
            Push::Queued => self.changed.notify_one(),
            Push::Displaced(job) => {
                self.refuse("displaced");
                // Whoever waited may have gone.
                let _ = job.reply.send(Done::Busy(busy));
            }
            Push::Refused(_) => {
                self.refuse("full");
                return Err(busy);
            }
        }
        Ok(())
    }

    /// Refuses what would find no place, before anything else is done for it.
    fn admit(&self, app: &AppId, client: ClientAddress) -> Result<(), Busy> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.jobs.has_place(app, &client) {
            return Ok(());
        }
        let busy = self.retry_after(&state);
        drop(state);
        self.refuse("full");
        Err(busy)
    }

    fn refuse(&self, reason: &'static str) {
        self.metrics.refused.get_or_create(&RefusedLabels { reason }).inc();
    }

    /// When what is waiting now should be done, in whole seconds.
    fn retry_after(&self, state: &QueueState) -> Busy {
        let jobs = u32::try_from(state.jobs.len()).unwrap_or(u32::MAX);
        let threads = u32::try_from(self.options.threads.get()).unwrap_or(u32::MAX);
        let seconds = (f64::from(jobs) * state.pace / f64::from(threads)).ceil().clamp(1.0, 30.0);
        Busy { retry_after: Duration::from_secs_f64(seconds) }
    }

    fn busy(&self) -> Busy {
        self.retry_after(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A thread's life.
    fn work(&self) {
        // Behind what answers requests: on a full machine, everything else stays quick. It is only a wish.
        let _ = rustix::process::setpriority_process(None, 5);
        let mut engine = Engine::new();
        while let Some(job) = self.next() {
            if job.reply.is_closed() {
                continue;
            }
            let waited = job.queued.elapsed();
            self.metrics.wait_seconds.observe(waited.as_secs_f64());
            job.span.record("latchkey.hashing.wait_ms", u64::try_from(waited.as_millis()).unwrap_or(u64::MAX));
            if waited > self.options.deadline {
                self.refuse("deadline");
                latchkey_trace::fail(&job.span, "deadline");
                let _ = job.reply.send(Done::Busy(self.busy()));
                continue;
            }
            let started = Instant::now();
            self.metrics.running.inc();
            let done = self.perform(&mut engine, job.work);
            self.metrics.running.dec();
            let took = started.elapsed().as_secs_f64();
            self.metrics.run_seconds.observe(took);
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.pace = state.pace.mul_add(0.95, took * 0.05);
            drop(state);
            // Before the answer, so that it ends before what it is a part of.
            drop(job.span);
            let _ = job.reply.send(done);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(job) = state.jobs.pop() {
                self.metrics.waiting.set(i64::try_from(state.jobs.len()).unwrap_or(i64::MAX));
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn perform(&self, engine: &mut Engine, work: Work) -> Done {
        match work {
            Work::Hash(password) => {
                let mut salt = [0; 16];
                SystemRandom::new().fill(&mut salt).expect("the system's random number generator answers");
                Done::Hash(engine.hash(&password, &salt))
            }
            Work::Verify(password, hash) => {
                let known = hash.is_some();
                let right = engine.verify(&password, hash.as_ref().unwrap_or(&self.nobody));
                Done::Answer(right && known)
            }
            Work::Strength(password, guesses, minimum) => {
                let guesses: Vec<&str> = guesses.iter().map(String::as_str).collect();
                let score = u8::from(zxcvbn::zxcvbn(password.expose(), &guesses).score());
                Done::Answer(score >= minimum)
            }
        }
    }
}

// === impl Hasher ===

impl Hasher for Hashing {
    fn admit(&self, app: &AppId, client: ClientAddress) -> Result<(), Busy> {
        self.pool.shared.admit(app, client)
    }

    async fn hash(&self, app: &AppId, client: ClientAddress, password: &Password) -> Result<PasswordHash, Busy> {
        match self.run(app, client, Work::Hash(password.clone())).await? {
            Done::Hash(hash) => Ok(hash),
            Done::Answer(_) | Done::Busy(_) => Err(self.pool.shared.busy()),
        }
    }

    async fn verify(
        &self,
        app: &AppId,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> Result<bool, Busy> {
        self.answer(app, client, Work::Verify(password.clone(), hash.cloned())).await
    }

    fn is_outdated(&self, hash: &PasswordHash) -> bool {
        engine::is_outdated(hash)
    }

    async fn strong_enough(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        guesses: Vec<String>,
    ) -> Result<bool, Busy> {
        let minimum = app.doc.password.minimum_strength;
        self.answer(app.id(), client, Work::Strength(password.clone(), guesses, minimum)).await
    }
}

impl Hashing {
    async fn answer(&self, app: &AppId, client: ClientAddress, work: Work) -> Result<bool, Busy> {
        match self.run(app, client, work).await? {
            Done::Answer(answer) => Ok(answer),
            Done::Hash(_) | Done::Busy(_) => Err(self.pool.shared.busy()),
        }
    }
}

// === impl HashingMetrics ===

impl HashingMetrics {
    fn register(registry: &mut Registry) -> Self {
        let buckets = || [0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0];
        let metrics = Self {
            waiting: Gauge::default(),
            running: Gauge::default(),
            refused: Family::default(),
            wait_seconds: Histogram::new(buckets()),
            run_seconds: Histogram::new(buckets()),
        };
        for reason in ["displaced", "full", "deadline"] {
            drop(metrics.refused.get_or_create(&RefusedLabels { reason }));
        }
        registry.register("queue_length", "Jobs that wait for a hashing thread", metrics.waiting.clone());
        registry.register("running", "Jobs that run on a hashing thread", metrics.running.clone());
        registry.register(
            "refused",
            "Jobs answered 503: the queue was full, a place went to a shorter line, or the deadline passed",
            metrics.refused.clone(),
        );
        registry.register_with_unit("wait", "Time in the queue", Unit::Seconds, metrics.wait_seconds.clone());
        registry.register_with_unit("run", "Time on a thread", Unit::Seconds, metrics.run_seconds.clone());
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashing(threads: usize, places: usize, deadline: Duration) -> Hashing {
        let options =
            HashingOptions { threads: NonZeroUsize::new(threads).unwrap(), places_per_thread: places, deadline };
        Hashing::start(options, &mut Registry::default())
    }

    fn client(number: u8) -> ClientAddress {
        ClientAddress::of([127, 0, 0, number].into())
    }

    fn app(name: &str) -> AppId {
        name.parse().unwrap()
    }

    #[tokio::test]
    async fn without_a_hash_the_answer_is_no_even_for_the_right_guess() {
        let hashing = hashing(1, 8, Duration::from_secs(10));
        // The password that `nobody` was made from.
        let answer = hashing.answer(&app("a"), client(1), Work::Verify(Password::new(""), None)).await;
        assert_eq!(answer, Ok(false));
    }

    #[tokio::test]
    async fn what_does_not_fit_is_refused_at_once_and_what_fits_is_done() {
        let hashing = hashing(1, 4, Duration::from_secs(60));
        let jobs = (0..64).map(|number| {
            let hashing = hashing.clone();
            async move { hashing.run(&app("a"), client(number), Work::Hash(Password::new("x"))).await.is_ok() }
        });
        let done = futures::future::join_all(jobs).await.into_iter().filter(|ok| *ok).count();
        assert!((4..=8).contains(&done), "{done} of 64 were done with four places and one thread");
        assert!(hashing.run(&app("a"), client(1), Work::Hash(Password::new("x"))).await.is_ok(), "room again");
    }

    #[tokio::test]
    async fn another_app_is_served_in_the_middle_of_a_storm() {
        let hashing = hashing(1, 32, Duration::from_secs(60));
        let storm = (0..200).map(|number| {
            let hashing = hashing.clone();
            tokio::spawn(async move {
                hashing.run(&app("storm"), client(number), Work::Hash(Password::new("x"))).await.is_ok()
            })
        });
        let storm: Vec<_> = storm.collect();
        tokio::task::yield_now().await;
        for number in 0..5 {
            assert!(hashing.run(&app("quiet"), client(number), Work::Hash(Password::new("x"))).await.is_ok());
        }
        let waiting = storm.iter().filter(|job| !job.is_finished()).count();
        assert!(waiting > 0, "the quiet App did not wait for the storm to end");
    }

    #[tokio::test]
    async fn a_passed_deadline_is_busy_with_a_time_to_retry() {
        let hashing = hashing(1, 64, Duration::ZERO);
        let jobs = (0..8).map(|number| {
            let hashing = hashing.clone();
            async move { hashing.run(&app("a"), client(number), Work::Hash(Password::new("x"))).await }
        });
        for outcome in futures::future::join_all(jobs).await {
            assert!(matches!(outcome, Err(Busy { retry_after }) if retry_after >= Duration::from_secs(1)));
        }
    }
}
