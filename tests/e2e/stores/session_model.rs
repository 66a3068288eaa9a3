//! Compares the session store with a small model: for random operations, also concurrent ones, both must make the same
//! decisions.

use std::time::{Duration as Elapsed, Instant};

use futures::future::join_all;
use latchkey_server::{
    domain::{
        mail::EpochChange,
        ports::Sessions,
        session::{Amr, NewSession, OpenOutcome, Profile, RefreshKind, RefreshOutcome, RefreshRules, SessionId},
        token::RefreshToken,
        user::{Epoch, UserId},
    },
    store::Stores,
};
use latchkey_tests::redis;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{Fixture, a_user_id, now};

/// The total number of operations.
const STEPS: usize = 100_000;
/// The number of operations of one episode. Each episode has a new user.
const STEPS_PER_EPISODE: usize = 50;
/// The number of concurrent episodes.
const CONCURRENT_EPISODES: usize = 16;
/// Maximum duration of an episode. The model counts whole seconds, so a longer episode proves nothing and is repeated.
const MAX_EPISODE_TIME: Elapsed = Elapsed::from_millis(900);

const IDLE_SECONDS: i64 = 10 * 24 * 3600;
const LIFETIME_SECONDS: i64 = 30 * 24 * 3600;
const TOUCH_INTERVAL_SECONDS: i64 = 60;
/// Maximum number of late responses of a session in a day. A late response is a response with tokens to the previous
/// refresh token after its grace period (specification: Sessions and tokens, Reuse detection).
const MAX_LATE_RESPONSES: usize = 5;
/// Each late response adds this number to the lateness of the session, and each new generation subtracts 1
/// (specification: Sessions and tokens, Reuse detection).
const LATENESS_STEP: u64 = 2;
const MAX_LATENESS: u64 = 14;
const DAY_SECONDS: i64 = 24 * 3600;
/// The possible pauses between two operations, in seconds. Each pause is drawn at random.
const PAUSES: [i64; 9] = [1, 7, 29, 31, 61, 301, 3600, 13 * 3600, 4 * DAY_SECONDS];

/// The state of a session in the model. Times are seconds since the start of the episode.
#[derive(Clone, Debug)]
struct ModelSession {
    id: SessionId,
    epoch: i64,
    generation: u64,
    renewed_at: i64,
    used_at: i64,
    ends_at: i64,
    late_responses: Vec<i64>,
    /// The lateness after the last late response, and the generation at that time.
    lateness: (u64, u64),
}

#[derive(Clone, Debug, Default)]
struct Model {
    epoch: i64,
    sessions: Vec<ModelSession>,
}

/// The result of a refresh.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ModelOutcome {
    Live { renewal: RefreshKind, generation: u64, epoch: i64 },
    Stolen,
    Gone,
}

/// Somebody with a refresh token: the user, or a thief.
#[derive(Clone, Debug)]
struct TokenHolder {
    session: SessionId,
    generation: u64,
}

/// A copy of the user's keys in Redis, and of the model at the same moment.
struct Snapshot {
    model: Model,
    keys: Vec<(String, Vec<u8>)>,
}

struct Episode {
    stores: Stores,
    fixture: std::sync::Arc<Fixture>,
    redis: ::redis::aio::MultiplexedConnection,
    user: UserId,
    start: OffsetDateTime,
    rng: StdRng,
    /// The current time, in seconds since the start of the episode.
    time: i64,
    /// The grace period, in seconds.
    grace: i64,
    model: Model,
    holders: Vec<TokenHolder>,
    thieves: Vec<TokenHolder>,
    snapshot: Option<Snapshot>,
    /// The operations so far. A failed test prints them.
    trace: Vec<String>,
}

// === impl Model ===

impl Model {
    /// The session, if it is live. Removes an expired session.
    fn live_session(&mut self, id: SessionId, time: i64) -> Option<&mut ModelSession> {
        let epoch = self.epoch;
        let index = self.sessions.iter().position(|session| session.id == id)?;
        if self.sessions[index].epoch < epoch {
            return None;
        }
        if time >= self.sessions[index].ends_at || time >= self.sessions[index].used_at + IDLE_SECONDS {
            self.sessions.remove(index);
            return None;
        }
        Some(&mut self.sessions[index])
    }

    fn refresh(&mut self, id: SessionId, generation: u64, time: i64, grace: i64) -> ModelOutcome {
        let Some(session) = self.live_session(id, time) else { return ModelOutcome::Gone };
        let renewal = if generation >= session.generation {
            let renewal = if generation == session.generation { RefreshKind::Rotated } else { RefreshKind::Adopted };
            (session.generation, session.renewed_at, session.used_at) = (generation + 1, time, time);
            renewal
        } else if generation + 1 == session.generation && time - session.renewed_at < grace {
            RefreshKind::Repeated
        } else {
            session.late_responses.retain(|at| time - at < DAY_SECONDS);
            let (lateness_before, generation_before) = session.lateness;
            let lateness = lateness_before.saturating_sub(session.generation - generation_before) + LATENESS_STEP;
            let too_late = session.late_responses.len() == MAX_LATE_RESPONSES || lateness > MAX_LATENESS;
            if generation + 1 < session.generation || too_late {
                self.sessions.retain(|session| session.id != id);
                return ModelOutcome::Stolen;
            }
            session.late_responses.push(time);
            session.lateness = (lateness, session.generation);
            session.renewed_at = time;
            RefreshKind::Late
        };
        if time - session.used_at >= TOUCH_INTERVAL_SECONDS {
            session.used_at = time;
        }
        ModelOutcome::Live { renewal, generation: session.generation, epoch: session.epoch }
    }

    fn look_up(&mut self, id: SessionId, time: i64) -> Option<(u64, i64)> {
        let session = self.live_session(id, time)?;
        if time - session.used_at >= TOUCH_INTERVAL_SECONDS {
            session.used_at = time;
        }
        Some((session.generation, session.epoch))
    }

    fn open(&mut self, id: SessionId, epoch: i64, time: i64) -> OpenOutcome {
        if self.epoch > epoch {
            return OpenOutcome::EpochRaised;
        }
        self.epoch = epoch;
        self.sessions.push(ModelSession {
            id,
            epoch,
            generation: 1,
            renewed_at: time,
            used_at: time,
            ends_at: time + LIFETIME_SECONDS,
            late_responses: Vec::new(),
            lateness: (0, 0),
        });
        OpenOutcome::Opened
    }

    fn raise_epoch(&mut self, epoch: i64, keep: Option<SessionId>) {
        if self.epoch > epoch {
            return;
        }
        self.epoch = epoch;
        self.sessions.retain(|session| session.epoch >= epoch || Some(session.id) == keep);
        for session in &mut self.sessions {
            session.epoch = session.epoch.max(epoch);
        }
    }

    fn end_session(&mut self, id: SessionId, time: i64) -> bool {
        let live = self.live_session(id, time).is_some();
        self.sessions.retain(|session| session.id != id);
        live
    }

    fn end_other_sessions(&mut self, keep: SessionId) {
        self.sessions.retain(|session| session.id == keep);
    }
}

// === impl Episode ===

impl Episode {
    async fn new(fixture: std::sync::Arc<Fixture>, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let grace = *[0, 30, 300].choose(&mut rng).unwrap();
        let redis = redis::Redis::shared().await.connect().await.unwrap();
        let mut this = Self {
            stores: fixture.stores.clone(),
            fixture,
            redis,
            user: a_user_id(),
            start: now(),
            rng,
            time: 0,
            grace,
            model: Model { epoch: 1, ..Model::default() },
            holders: Vec::new(),
            thieves: Vec::new(),
            snapshot: None,
            trace: vec![format!("seed {seed}, grace {grace}")],
        };
        this.log_in(1).await;
        this
    }

    fn record_step(&mut self, what: String) {
        self.trace.push(format!("{:>9} s  {what}", self.time));
    }

    #[track_caller]
    fn assert_same<T: PartialEq + std::fmt::Debug>(&self, real: &T, expected: &T) {
        let trace = || self.trace.join("\n");
        assert!(real == expected, "the store returns {real:?}, the model {expected:?}, after\n{}", trace());
    }

    async fn log_in(&mut self, epoch: i64) {
        let id = SessionId(Uuid::from_u128(self.rng.random()));
        let session = NewSession {
            kind: None,
            id,
            user: self.user,
            epoch: Epoch(epoch),
            profile: a_profile(epoch),
            amr: Amr::Password,
            auth_time: self.start,
            ip: "192.0.2.1".to_owned(),
            user_agent: None,
            ends_at: self.start + Duration::seconds(self.time + LIFETIME_SECONDS),
            idle_seconds: IDLE_SECONDS.try_into().unwrap(),
        };
        self.record_step(format!("log in at epoch {epoch}: {id}"));
        let real = self.stores.open_session(&self.fixture.app, &session).await.unwrap();
        let expected = self.model.open(id, epoch, self.time);
        self.assert_same(&real, &expected);
        self.holders.push(TokenHolder { session: id, generation: 1 });
    }

    /// Sends `times` concurrent refreshes with the same token. Returns the generation of the next token, which is the
    /// same for all responses.
    async fn refresh(&mut self, holder: &TokenHolder, times: usize) -> Option<u64> {
        let token = RefreshToken { user: self.user, session: holder.session, generation: holder.generation };
        let rules = RefreshRules { grace_seconds: self.grace.try_into().unwrap(), windows: Vec::new() };
        self.record_step(format!("refresh {times} times with {holder:?}"));
        let calls = (0..times).map(|_| self.stores.refresh(&self.fixture.app, &token, &rules));
        let mut real: Vec<ModelOutcome> =
            join_all(calls).await.into_iter().map(|result| model_outcome(result.unwrap())).collect();
        let mut expected: Vec<ModelOutcome> =
            (0..times).map(|_| self.model.refresh(holder.session, holder.generation, self.time, self.grace)).collect();
        // Compares the outcomes without their order, because the order of concurrent calls is not known.
        let order = |outcome: &ModelOutcome| format!("{outcome:?}");
        real.sort_by_key(order);
        expected.sort_by_key(order);
        self.assert_same(&real, &expected);
        real.iter().find_map(|outcome| match outcome {
            ModelOutcome::Live { generation, .. } => Some(*generation),
            ModelOutcome::Stolen | ModelOutcome::Gone => None,
        })
    }

    fn advance_clock(&mut self, seconds: i64) {
        self.time += seconds;
        let redis = self.fixture.stores.redis.with_clock_ahead(Duration::seconds(self.time));
        self.stores = Stores { redis, ..self.fixture.stores.clone() };
    }

    /// A user and a thief, who has a copy of the token, refresh alternately, each of them every 26 hours.
    async fn alternate_with_thief(&mut self, at: usize) {
        let mut thief = self.holders[at].clone();
        for _ in 0..self.rng.random_range(1..=16) {
            self.advance_clock(13 * 3600);
            let holder = self.holders[at].clone();
            let Some(generation) = self.refresh(&holder, 1).await else { return };
            self.holders[at].generation = generation;
            self.advance_clock(13 * 3600);
            let Some(generation) = self.refresh(&thief, 1).await else { return };
            thief.generation = generation;
        }
    }

    /// One random operation.
    async fn step(&mut self) {
        let at = self.rng.random_range(0..self.holders.len());
        let holder = self.holders[at].clone();
        match self.rng.random_range(0..100) {
            // The most frequent case: one tab or several tabs refresh, and get the responses.
            0..34 => {
                let times = *[1, 1, 1, 2, 5].choose(&mut self.rng).unwrap();
                if let Some(generation) = self.refresh(&holder, times).await {
                    self.holders[at].generation = generation;
                }
            }
            // A refresh with a lost response.
            34..44 => drop(self.refresh(&holder, 1).await),
            44..48 => {
                self.record_step(format!("steal {holder:?}"));
                self.thieves.push(holder);
            }
            48..54 => {
                if let Some(at) = (!self.thieves.is_empty()).then(|| self.rng.random_range(0..self.thieves.len())) {
                    let thief = self.thieves[at].clone();
                    if let Some(generation) = self.refresh(&thief, 1).await {
                        self.thieves[at].generation = generation;
                    }
                }
            }
            54..64 => {
                self.record_step(format!("use {}", holder.session));
                let real = self.stores.session(&self.fixture.app, self.user, holder.session).await.unwrap();
                let real = real.map(|live| (live.session.generation, live.session.epoch.0));
                let expected = self.model.look_up(holder.session, self.time);
                self.assert_same(&real, &expected);
            }
            64..82 => {
                let pause = *PAUSES.choose(&mut self.rng).unwrap();
                self.advance_clock(pause);
            }
            82..84 => self.alternate_with_thief(at).await,
            84..86 => {
                self.record_step(format!("log out {}", holder.session));
                let real = self.stores.end_session(&self.fixture.app, self.user, holder.session).await.unwrap();
                let expected = self.model.end_session(holder.session, self.time);
                self.assert_same(&real, &expected);
            }
            86..87 => {
                self.record_step(format!("end all except {}", holder.session));
                self.stores.end_other_sessions(&self.fixture.app, self.user, holder.session).await.unwrap();
                self.model.end_other_sessions(holder.session);
            }
            87..90 => self.log_in(self.model.epoch).await,
            // A login with a raised epoch reaches Redis before the epoch change, so Redis gets the epoch from the
            // login.
            90..91 => self.log_in(self.model.epoch + 1).await,
            91..92 if self.model.epoch > 1 => self.log_in(self.model.epoch - 1).await,
            91..94 => {
                let epoch = self.model.epoch + self.rng.random_range(-1..=1);
                let keep = self.rng.random_bool(0.7).then_some(holder.session);
                self.record_step(format!("raise the epoch to {epoch}, keep {keep:?}"));
                let epoch_change = EpochChange { user: self.user, epoch: Epoch(epoch), kept_session: keep };
                self.stores.raise_epoch(&self.fixture.app, &epoch_change, Some(&a_profile(epoch))).await.unwrap();
                self.model.raise_epoch(epoch, keep);
            }
            94..97 => {
                self.record_step("the replica has everything".to_owned());
                let keys = self.dump().await;
                self.snapshot = Some(Snapshot { model: self.model.clone(), keys });
            }
            _ => self.fail_over().await,
        }
    }

    /// All keys that Redis can have for the user.
    fn keys(&self) -> Vec<String> {
        let user = format!("lk:{{{}:{}}}", self.fixture.app, self.user);
        let sessions = self.holders.iter().map(|holder| format!("{user}:session:{}", holder.session));
        [format!("{user}:user"), format!("{user}:sessions")].into_iter().chain(sessions).collect()
    }

    async fn dump(&mut self) -> Vec<(String, Vec<u8>)> {
        let mut dumped = Vec::new();
        for key in self.keys() {
            let value: Option<Vec<u8>> = ::redis::cmd("DUMP").arg(&key).query_async(&mut self.redis).await.unwrap();
            dumped.extend(value.map(|value| (key, value)));
        }
        dumped
    }

    /// A failover to a replica that has only the state of the last snapshot.
    async fn fail_over(&mut self) {
        let Some(snapshot) = self.snapshot.take() else { return };
        self.record_step("failover to the state of the replica".to_owned());
        for key in self.keys() {
            let _: i64 = ::redis::cmd("DEL").arg(key).query_async(&mut self.redis).await.unwrap();
        }
        for (key, value) in snapshot.keys {
            let restore = ::redis::cmd("RESTORE").arg(key).arg(0).arg(value).to_owned();
            let _: String = restore.query_async(&mut self.redis).await.unwrap();
        }
        self.model = snapshot.model;
    }
}

fn a_profile(version: i64) -> Profile {
    Profile { version, email: None, email_verified: false, name: "Ada".to_owned() }
}

fn model_outcome(real: RefreshOutcome) -> ModelOutcome {
    match real {
        RefreshOutcome::Renewed(renewal, live) => {
            ModelOutcome::Live { renewal, generation: live.session.generation, epoch: live.session.epoch.0 }
        }
        RefreshOutcome::ReuseDetected => ModelOutcome::Stolen,
        RefreshOutcome::NotFound => ModelOutcome::Gone,
        RefreshOutcome::Limited { .. } => panic!("no limit is set"),
    }
}

/// Runs one episode. Returns false if the machine was too slow, so that the episode proves nothing.
async fn run_episode(fixture: std::sync::Arc<Fixture>, seed: u64) -> bool {
    let began = Instant::now();
    let mut episode = Episode::new(fixture, seed).await;
    for _ in 0..STEPS_PER_EPISODE {
        // The time is checked before each step, because slowness alone can make the store differ from the model.
        if began.elapsed() > MAX_EPISODE_TIME {
            return false;
        }
        let before = Instant::now();
        let step = futures::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(episode.step())).await;
        if let Err(panic) = step {
            if began.elapsed() > MAX_EPISODE_TIME {
                return false;
            }
            eprintln!("the step took {:?}", before.elapsed());
            std::panic::resume_unwind(panic);
        }
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_decides_like_the_model_for_any_interleaving() {
    let fixture = std::sync::Arc::new(Fixture::new().await);
    let first_seed: u64 = rand::random();
    let mut steps_done = 0;
    let mut episodes_begun = 0;
    while steps_done < STEPS {
        assert!(
            episodes_begun * STEPS_PER_EPISODE < 20 * STEPS,
            "the machine is too slow: {steps_done} of {STEPS} steps"
        );
        let batch: Vec<_> = (0..CONCURRENT_EPISODES)
            .map(|number| {
                let seed = first_seed.wrapping_add((episodes_begun + number) as u64);
                tokio::spawn(run_episode(fixture.clone(), seed))
            })
            .collect();
        episodes_begun += CONCURRENT_EPISODES;
        for result in join_all(batch).await {
            match result {
                Ok(is_valid) => steps_done += if is_valid { STEPS_PER_EPISODE } else { 0 },
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
    }
    println!("{steps_done} steps in {episodes_begun} episodes, no difference");
}
