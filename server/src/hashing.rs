//! Password hashing with admission control: a fixed set of threads with memory of their own, behind a bounded, fair queue
//! with a deadline. A login storm can neither starve other Apps nor kill the process for memory.

use std::{
    fmt,
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
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
use tokio::{sync::oneshot, time::timeout};
use tracing::Span;

use self::{
    engine::Engine,
    queue::{FairQueue, JobOwner, Push, Turn},
};
use crate::domain::{
    app::App,
    client::ClientAddress,
    password::{Busy, Password, PasswordHash},
    ports::Hasher,
};

mod engine;
mod queue;
pub mod strength;

/// How the pool is sized.
#[derive(Clone, Copy, Debug)]
pub struct HashingOptions {
    /// As many as there are CPUs: hashing is all CPU and memory bandwidth.
    pub threads: NonZeroUsize,
    /// Places in the queue for each thread. A hash takes about 15 ms, so 64 are a second of waiting.
    pub places_per_thread: usize,
    /// Jobs that would not end by then are refused, and their callers get 503 by then.
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

/// What sending a response takes on a full machine.
const SENDING: Duration = Duration::from_millis(50);
/// How long a job can run: far longer than any does.
const RUN_LIMIT: Duration = Duration::from_secs(1);

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
    jobs: FairQueue<String, AppId, ClientAddress, Job>,
    closed: bool,
    /// What a job takes, averaged over the last ones.
    pace: Duration,
}

type Owner = JobOwner<String, AppId, ClientAddress>;

struct Job {
    work: Work,
    queued: Instant,
    /// Set by whoever is first: the thread that starts the job, or its caller at the deadline.
    claimed: Arc<AtomicBool>,
    span: Span,
    reply: oneshot::Sender<Done>,
}

enum Work {
    Hash(Password),
    Verify(Password, Option<PasswordHash>),
    Strength(Password, Vec<String>, u8),
    #[cfg(test)]
    Panic,
    #[cfg(test)]
    Wait(oneshot::Receiver<()>),
}

/// How a job ended.
struct Outcome {
    reply: oneshot::Sender<Done>,
    done: Done,
    /// Whether it ran; what did not says nothing about how long jobs take.
    is_run: bool,
}

enum Done {
    Hash(PasswordHash),
    Answer(bool),
    /// Dropped from the queue, or failed.
    Busy(Busy),
}

/// Metrics of the pool: is there room, how long is the wait, who was sent away.
#[derive(Clone)]
pub struct HashingMetrics {
    waiting: Gauge,
    running: Gauge,
    refused: Family<RefusedLabels, Counter>,
    panics: Counter,
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
            #[cfg(test)]
            Self::Panic => "panic",
            #[cfg(test)]
            Self::Wait(..) => "wait",
        }
    }
}

// === impl Hashing ===

impl Hashing {
    /// Starts the threads; metrics are registered under `hashing_`.
    pub fn start(options: HashingOptions, registry: &mut Registry) -> Self {
        let mut salt = [0; 16];
        SystemRandom::new().fill(&mut salt).expect("the system's random number generator answers");
        let nobody = Engine::default().hash(&Password::new(""), &salt);
        // The first score reads the dictionaries, which no request should wait for.
        strength::score("password", &[]);
        let capacity = options.places_per_thread.saturating_mul(options.threads.get());
        let shared = Arc::new(Shared {
            options,
            state: Mutex::new(QueueState {
                jobs: FairQueue::new(capacity),
                closed: false,
                pace: Duration::from_millis(15),
            }),
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

    async fn run(&self, owner: &Owner, work: Work) -> Result<Done, Busy> {
        let shared = &self.pool.shared;
        let (reply, mut answer) = oneshot::channel();
        let claimed = Arc::new(AtomicBool::new(false));
        let span = latchkey_trace::child!(
            "internal",
            "hashing",
            otel.name = work.name(),
            latchkey.hashing.wait_ms = tracing::field::Empty,
        );
        let queued = Instant::now();
        shared.submit(owner, Job { work, queued, claimed: Arc::clone(&claimed), span, reply })?;
        let mut done = timeout(shared.start_limit(), &mut answer).await;
        if done.is_err() {
            if !claimed.swap(true, Ordering::AcqRel) {
                shared.refuse("deadline");
                return Err(shared.busy());
            }
            // It has started.
            done = timeout(RUN_LIMIT, answer).await;
        }
        match done {
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
    fn submit(&self, owner: &Owner, job: Job) -> Result<(), Busy> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let pace = state.pace;
        let pushed = state.jobs.push(owner, pace, job);
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
    fn admit(&self, owner: &Owner) -> Result<(), Busy> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.jobs.has_place(owner) {
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
        let seconds = (f64::from(jobs) * state.pace.as_secs_f64() / f64::from(threads)).ceil().clamp(1.0, 30.0);
        Busy { retry_after: Duration::from_secs_f64(seconds) }
    }

    /// How long a job can wait for its start, if it or its refusal is to be sent by the deadline.
    fn start_limit(&self) -> Duration {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.options.deadline.saturating_sub(state.pace + SENDING)
    }

    fn busy(&self) -> Busy {
        self.retry_after(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A thread's life.
    fn work(&self) {
        // Behind what answers requests: on a full machine, everything else stays quick. It is only a wish.
        let _ = rustix::process::setpriority_process(None, 5);
        let mut engine = Engine::default();
        while let Some(Turn { job, charge }) = self.next() {
            let started = Instant::now();
            let outcome = self.run_job(&mut engine, job);
            let took = started.elapsed();
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            // Before the reply, so that the next job of the line finds it charged.
            state.jobs.settle(&charge, took);
            if outcome.is_run {
                state.pace = state.pace.mul_f64(0.95) + took.mul_f64(0.05);
            }
            drop(state);
            // Whoever waited may have gone.
            let _ = outcome.reply.send(outcome.done);
        }
    }

    /// Runs a job, unless nobody waits for it or it waited too long.
    fn run_job(&self, engine: &mut Engine, job: Job) -> Outcome {
        let Job { work, queued, claimed, span, reply } = job;
        let unfit = |reply| Outcome { reply, done: Done::Busy(self.busy()), is_run: false };
        if reply.is_closed() || claimed.swap(true, Ordering::AcqRel) {
            return unfit(reply);
        }
        let waited = queued.elapsed();
        self.metrics.wait_seconds.observe(waited.as_secs_f64());
        span.record("latchkey.hashing.wait_ms", u64::try_from(waited.as_millis()).unwrap_or(u64::MAX));
        if waited > self.options.deadline {
            self.refuse("deadline");
            latchkey_trace::fail(&span, "deadline");
            return unfit(reply);
        }
        let started = Instant::now();
        self.metrics.running.inc();
        let done = catch_unwind(AssertUnwindSafe(|| self.perform(engine, work)));
        self.metrics.running.dec();
        self.metrics.run_seconds.observe(started.elapsed().as_secs_f64());
        let done = done.unwrap_or_else(|_| {
            // The panic hook has logged where; the payload could hold a password.
            self.metrics.panics.inc();
            latchkey_trace::fail(&span, "panic");
            *engine = Engine::default();
            Done::Busy(self.busy())
        });
        // The span ends here, before the reply and so before what it is a part of.
        Outcome { reply, done, is_run: true }
    }

    fn next(&self) -> Option<Turn<String, AppId, ClientAddress, Job>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let pace = state.pace;
            if let Some(turn) = state.jobs.pop(pace) {
                self.metrics.waiting.set(i64::try_from(state.jobs.len()).unwrap_or(i64::MAX));
                return Some(turn);
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
                Done::Answer(strength::score(password.expose(), &guesses) >= minimum)
            }
            #[cfg(test)]
            Work::Panic => panic!("a job panics"),
            #[cfg(test)]
            Work::Wait(ended) => {
                ended.blocking_recv().expect("the test ends it");
                Done::Answer(true)
            }
        }
    }
}

// === impl Hasher ===

impl Hasher for Hashing {
    fn admit(&self, app: &App, client: ClientAddress) -> Result<(), Busy> {
        self.pool.shared.admit(&owner(app, client))
    }

    async fn hash(&self, app: &App, client: ClientAddress, password: &Password) -> Result<PasswordHash, Busy> {
        match self.run(&owner(app, client), Work::Hash(password.clone())).await? {
            Done::Hash(hash) => Ok(hash),
            Done::Answer(_) | Done::Busy(_) => Err(self.pool.shared.busy()),
        }
    }

    async fn verify(
        &self,
        app: &App,
        client: ClientAddress,
        password: &Password,
        hash: Option<&PasswordHash>,
    ) -> Result<bool, Busy> {
        self.answer(&owner(app, client), Work::Verify(password.clone(), hash.cloned())).await
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
        self.answer(&owner(app, client), Work::Strength(password.clone(), guesses, minimum)).await
    }
}

impl Hashing {
    async fn answer(&self, owner: &Owner, work: Work) -> Result<bool, Busy> {
        match self.run(owner, work).await? {
            Done::Answer(answer) => Ok(answer),
            Done::Hash(_) | Done::Busy(_) => Err(self.pool.shared.busy()),
        }
    }
}

fn owner(app: &App, client: ClientAddress) -> Owner {
    JobOwner { namespace: app.doc.namespace.clone(), app: app.id().clone(), client }
}

// === impl HashingMetrics ===

impl HashingMetrics {
    fn register(registry: &mut Registry) -> Self {
        let buckets = || [0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0];
        let metrics = Self {
            waiting: Gauge::default(),
            running: Gauge::default(),
            refused: Family::default(),
            panics: Counter::default(),
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
        registry.register("panics", "Jobs that panicked; a bug", metrics.panics.clone());
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

    fn owner(app: &str, client: ClientAddress) -> Owner {
        JobOwner { namespace: app.to_owned(), app: app.parse().unwrap(), client }
    }

    #[tokio::test]
    async fn without_a_hash_the_answer_is_no_even_for_the_right_guess() {
        let hashing = hashing(1, 8, Duration::from_secs(10));
        // The password that `nobody` was made from.
        let answer = hashing.answer(&owner("a", client(1)), Work::Verify(Password::new(""), None)).await;
        assert_eq!(answer, Ok(false));
    }

    #[tokio::test]
    async fn what_does_not_fit_is_refused_at_once_and_what_fits_is_done() {
        let hashing = hashing(1, 4, Duration::from_secs(60));
        let jobs = (0..64).map(|number| {
            let hashing = hashing.clone();
            async move { hashing.run(&owner("a", client(number)), Work::Hash(Password::new("x"))).await.is_ok() }
        });
        let done = futures::future::join_all(jobs).await.into_iter().filter(|ok| *ok).count();
        assert!((4..=8).contains(&done), "{done} of 64 were done with four places and one thread");
        assert!(hashing.run(&owner("a", client(1)), Work::Hash(Password::new("x"))).await.is_ok(), "room again");
    }

    #[tokio::test]
    async fn another_app_is_served_in_the_middle_of_a_storm() {
        let hashing = hashing(1, 32, Duration::from_secs(60));
        let storm = (0..200).map(|number| {
            let hashing = hashing.clone();
            tokio::spawn(async move {
                hashing.run(&owner("storm", client(number)), Work::Hash(Password::new("x"))).await.is_ok()
            })
        });
        let storm: Vec<_> = storm.collect();
        tokio::task::yield_now().await;
        for number in 0..5 {
            assert!(hashing.run(&owner("quiet", client(number)), Work::Hash(Password::new("x"))).await.is_ok());
        }
        let waiting = storm.iter().filter(|job| !job.is_finished()).count();
        assert!(waiting > 0, "the quiet App did not wait for the storm to end");
    }

    #[tokio::test]
    async fn a_passed_deadline_is_busy_with_a_time_to_retry() {
        let hashing = hashing(1, 64, Duration::ZERO);
        let jobs = (0..8).map(|number| {
            let hashing = hashing.clone();
            async move { hashing.run(&owner("a", client(number)), Work::Hash(Password::new("x"))).await }
        });
        for outcome in futures::future::join_all(jobs).await {
            assert!(matches!(outcome, Err(Busy { retry_after }) if retry_after >= Duration::from_secs(1)));
        }
    }

    #[tokio::test]
    async fn a_job_that_does_not_start_is_refused_by_the_deadline() {
        const DEADLINE: Duration = Duration::from_millis(500);
        let mut registry = Registry::default();
        let options = HashingOptions { threads: NonZeroUsize::MIN, places_per_thread: 64, deadline: DEADLINE };
        let hashing = Hashing::start(options, &mut registry);
        let (end, ended) = oneshot::channel();
        let occupied = {
            let hashing = hashing.clone();
            tokio::spawn(async move { hashing.run(&owner("a", client(1)), Work::Wait(ended)).await.is_ok() })
        };
        while hashing.pool.shared.metrics.running.get() == 0 {
            tokio::task::yield_now().await;
        }
        let queued = Instant::now();
        assert!(hashing.run(&owner("a", client(2)), Work::Hash(Password::new("x"))).await.is_err());
        assert!(queued.elapsed() < DEADLINE + RUN_LIMIT, "{:?}", queued.elapsed());
        end.send(()).unwrap();
        assert!(occupied.await.unwrap(), "a job that has started is not refused");
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("refused_total{reason=\"deadline\"} 1\n"), "{text}");
    }

    #[tokio::test]
    async fn a_job_that_panics_is_an_error_and_the_thread_goes_on() {
        let mut registry = Registry::default();
        let options =
            HashingOptions { threads: NonZeroUsize::MIN, places_per_thread: 8, deadline: Duration::from_secs(60) };
        let hashing = Hashing::start(options, &mut registry);
        let owner = owner("a", client(1));
        let right = hashing.run(&owner, Work::Hash(Password::new("x"))).await;
        let Ok(Done::Hash(hash)) = right else { panic!("a hash") };
        for _ in 0..3 {
            assert!(hashing.run(&owner, Work::Panic).await.is_err());
            let answer = hashing.answer(&owner, Work::Verify(Password::new("x"), Some(hash.clone()))).await;
            assert_eq!(answer, Ok(true), "with memory as good as new");
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("hashing_panics_total 3\n") && text.contains("hashing_running 0\n"), "{text}");
    }
}
