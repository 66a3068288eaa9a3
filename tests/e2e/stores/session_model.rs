//! Sessions against a small model of their rules: whatever is interleaved, the store decides as the model does.

use std::time::{Duration as Elapsed, Instant};

use futures::future::join_all;
use latchkey_server::{
    domain::{
        mail::EpochNews,
        ports::Sessions,
        session::{Amr, NewSession, Opening, Profile, RefreshRules, Refreshed, Renewal, SessionId},
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

/// Operations in all.
const STEPS: usize = 100_000;
/// Operations of one user, who then is left.
const EPISODE: usize = 50;
/// Episodes at a time.
const AT_ONCE: usize = 16;
/// Time goes in whole seconds here. An episode that took longer by the machine's clock proves nothing, and is repeated.
const TOO_SLOW: Elapsed = Elapsed::from_millis(900);

const IDLE: i64 = 10 * 24 * 3600;
const LIFE: i64 = 30 * 24 * 3600;
const NOTED_EVERY: i64 = 60;
const LATE_ANSWERS: usize = 5;
const LATENESS_STEP: u64 = 2;
const MAX_LATENESS: u64 = 14;
const DAY: i64 = 24 * 3600;
/// What time may pass between two operations, in seconds.
const PAUSES: [i64; 9] = [1, 7, 29, 31, 61, 301, 3600, 13 * 3600, 4 * DAY];

/// What the rules know of a session; times are seconds since the episode began.
#[derive(Clone, Debug)]
struct Known {
    id: SessionId,
    epoch: i64,
    generation: u64,
    taken: i64,
    used: i64,
    ends: i64,
    late: Vec<i64>,
    /// After the last late answer, and the generation then.
    lateness: (u64, u64),
}

#[derive(Clone, Debug, Default)]
struct Model {
    epoch: i64,
    sessions: Vec<Known>,
}

/// What a refresh comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Live { renewal: Renewal, generation: u64, epoch: i64 },
    Stolen,
    Gone,
}

/// Somebody who holds a refresh token: its user, or a thief.
#[derive(Clone, Debug)]
struct Holder {
    session: SessionId,
    generation: u64,
}

/// Redis's copy of a user's keys, and the model's at the same time.
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
    time: i64,
    grace: i64,
    model: Model,
    holders: Vec<Holder>,
    thieves: Vec<Holder>,
    snapshot: Option<Snapshot>,
    /// What was done, for whoever reads a failure.
    trace: Vec<String>,
}

// === impl Model ===

impl Model {
    /// The session where it is live; one past its time goes.
    fn live(&mut self, id: SessionId, time: i64) -> Option<&mut Known> {
        let epoch = self.epoch;
        let at = self.sessions.iter().position(|known| known.id == id)?;
        if self.sessions[at].epoch < epoch {
            return None;
        }
        if time >= self.sessions[at].ends || time >= self.sessions[at].used + IDLE {
            self.sessions.remove(at);
            return None;
        }
        Some(&mut self.sessions[at])
    }

    fn refresh(&mut self, id: SessionId, generation: u64, time: i64, grace: i64) -> Outcome {
        let Some(known) = self.live(id, time) else { return Outcome::Gone };
        let renewal = if generation >= known.generation {
            let renewal = if generation == known.generation { Renewal::Next } else { Renewal::Adopted };
            (known.generation, known.taken, known.used) = (generation + 1, time, time);
            renewal
        } else if generation + 1 == known.generation && time - known.taken < grace {
            Renewal::Again
        } else {
            known.late.retain(|at| time - at < DAY);
            let (before, since) = known.lateness;
            let lateness = before.saturating_sub(known.generation - since) + LATENESS_STEP;
            let too_late = known.late.len() == LATE_ANSWERS || lateness > MAX_LATENESS;
            if generation + 1 < known.generation || too_late {
                self.sessions.retain(|known| known.id != id);
                return Outcome::Stolen;
            }
            known.late.push(time);
            known.lateness = (lateness, known.generation);
            known.taken = time;
            Renewal::Late
        };
        if time - known.used >= NOTED_EVERY {
            known.used = time;
        }
        Outcome::Live { renewal, generation: known.generation, epoch: known.epoch }
    }

    fn get(&mut self, id: SessionId, time: i64) -> Option<(u64, i64)> {
        let known = self.live(id, time)?;
        if time - known.used >= NOTED_EVERY {
            known.used = time;
        }
        Some((known.generation, known.epoch))
    }

    fn open(&mut self, id: SessionId, epoch: i64, time: i64) -> Opening {
        if self.epoch > epoch {
            return Opening::Stale;
        }
        self.epoch = epoch;
        let (taken, used, ends) = (time, time, time + LIFE);
        let (late, lateness) = (Vec::new(), (0, 0));
        self.sessions.push(Known { id, epoch, generation: 1, taken, used, ends, late, lateness });
        Opening::Opened
    }

    fn raise(&mut self, epoch: i64, keep: Option<SessionId>) {
        if self.epoch > epoch {
            return;
        }
        self.epoch = epoch;
        self.sessions.retain(|known| known.epoch >= epoch || Some(known.id) == keep);
        for known in &mut self.sessions {
            known.epoch = known.epoch.max(epoch);
        }
    }

    fn end(&mut self, id: SessionId, time: i64) -> bool {
        let live = self.live(id, time).is_some();
        self.sessions.retain(|known| known.id != id);
        live
    }

    fn end_others(&mut self, keep: SessionId) {
        self.sessions.retain(|known| known.id == keep);
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

    fn did(&mut self, what: String) {
        self.trace.push(format!("{:>9} s  {what}", self.time));
    }

    #[track_caller]
    fn same<T: PartialEq + std::fmt::Debug>(&self, real: &T, expected: &T) {
        let trace = || self.trace.join("\n");
        assert!(real == expected, "the store says {real:?}, the rules {expected:?}, after\n{}", trace());
    }

    async fn log_in(&mut self, epoch: i64) {
        let id = SessionId(Uuid::from_u128(self.rng.random()));
        let session = NewSession {
            id,
            user: self.user,
            epoch: Epoch(epoch),
            profile: a_profile(epoch),
            amr: Amr::Password,
            auth_time: self.start,
            ip: "192.0.2.1".to_owned(),
            user_agent: None,
            ends_at: self.start + Duration::seconds(self.time + LIFE),
            idle_seconds: IDLE.try_into().unwrap(),
        };
        self.did(format!("log in at epoch {epoch}: {id}"));
        let real = self.stores.open_session(&self.fixture.app, &session).await.unwrap();
        let expected = self.model.open(id, epoch, self.time);
        self.same(&real, &expected);
        self.holders.push(Holder { session: id, generation: 1 });
    }

    /// Refreshes `times` at once; answers the token that all got.
    async fn refresh(&mut self, holder: &Holder, times: usize) -> Option<u64> {
        let token = RefreshToken { user: self.user, session: holder.session, generation: holder.generation };
        let rules = RefreshRules { grace_seconds: self.grace.try_into().unwrap(), windows: Vec::new() };
        self.did(format!("refresh {times} times with {holder:?}"));
        let calls = (0..times).map(|_| self.stores.refresh(&self.fixture.app, &token, &rules));
        let mut real: Vec<Outcome> = join_all(calls).await.into_iter().map(|answer| outcome(answer.unwrap())).collect();
        let mut expected: Vec<Outcome> =
            (0..times).map(|_| self.model.refresh(holder.session, holder.generation, self.time, self.grace)).collect();
        // Which of those that race comes first is not told.
        let order = |outcome: &Outcome| format!("{outcome:?}");
        real.sort_by_key(order);
        expected.sort_by_key(order);
        self.same(&real, &expected);
        real.iter().find_map(|outcome| match outcome {
            Outcome::Live { generation, .. } => Some(*generation),
            Outcome::Stolen | Outcome::Gone => None,
        })
    }

    fn pass(&mut self, seconds: i64) {
        self.time += seconds;
        let redis = self.fixture.stores.redis.later(Duration::seconds(self.time));
        self.stores = Stores { redis, ..self.fixture.stores.clone() };
    }

    /// A holder and a thief with a copy of the token refresh in turns, each once in 26 hours.
    async fn take_turns(&mut self, at: usize) {
        let mut thief = self.holders[at].clone();
        for _ in 0..self.rng.random_range(1..=16) {
            self.pass(13 * 3600);
            let holder = self.holders[at].clone();
            let Some(generation) = self.refresh(&holder, 1).await else { return };
            self.holders[at].generation = generation;
            self.pass(13 * 3600);
            let Some(generation) = self.refresh(&thief, 1).await else { return };
            thief.generation = generation;
        }
    }

    /// One operation, drawn.
    async fn step(&mut self) {
        let at = self.rng.random_range(0..self.holders.len());
        let holder = self.holders[at].clone();
        match self.rng.random_range(0..100) {
            // As most of the time: a client that gets its answer, once or in several tabs.
            0..34 => {
                let times = *[1, 1, 1, 2, 5].choose(&mut self.rng).unwrap();
                if let Some(generation) = self.refresh(&holder, times).await {
                    self.holders[at].generation = generation;
                }
            }
            // The answer is lost.
            34..44 => drop(self.refresh(&holder, 1).await),
            44..48 => {
                self.did(format!("steal {holder:?}"));
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
                self.did(format!("use {}", holder.session));
                let real = self.stores.session(&self.fixture.app, self.user, holder.session).await.unwrap();
                let real = real.map(|live| (live.session.generation, live.session.epoch.0));
                let expected = self.model.get(holder.session, self.time);
                self.same(&real, &expected);
            }
            64..82 => {
                let pause = *PAUSES.choose(&mut self.rng).unwrap();
                self.pass(pause);
            }
            82..84 => self.take_turns(at).await,
            84..86 => {
                self.did(format!("log out {}", holder.session));
                let real = self.stores.end_session(&self.fixture.app, self.user, holder.session).await.unwrap();
                let expected = self.model.end(holder.session, self.time);
                self.same(&real, &expected);
            }
            86..87 => {
                self.did(format!("end all but {}", holder.session));
                self.stores.end_other_sessions(&self.fixture.app, self.user, holder.session).await.unwrap();
                self.model.end_others(holder.session);
            }
            87..90 => self.log_in(self.model.epoch).await,
            // The news of a raised epoch come after a log-in at it, which is then the first that Redis hears of it.
            90..91 => self.log_in(self.model.epoch + 1).await,
            91..92 if self.model.epoch > 1 => self.log_in(self.model.epoch - 1).await,
            91..94 => {
                let epoch = self.model.epoch + self.rng.random_range(-1..=1);
                let keep = self.rng.random_bool(0.7).then_some(holder.session);
                self.did(format!("raise the epoch to {epoch}, keep {keep:?}"));
                let news = EpochNews { user: self.user, epoch: Epoch(epoch), keep };
                self.stores.raise_epoch(&self.fixture.app, &news, Some(&a_profile(epoch))).await.unwrap();
                self.model.raise(epoch, keep);
            }
            94..97 => {
                self.did("a replica has all of it".to_owned());
                let keys = self.dump().await;
                self.snapshot = Some(Snapshot { model: self.model.clone(), keys });
            }
            _ => self.fail_over().await,
        }
    }

    /// All that Redis may have of the user.
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

    /// A replica takes over that has what the last snapshot had.
    async fn fail_over(&mut self) {
        let Some(snapshot) = self.snapshot.take() else { return };
        self.did("fail-over to what the replica has".to_owned());
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

fn outcome(real: Refreshed) -> Outcome {
    match real {
        Refreshed::Live(renewal, live) => {
            Outcome::Live { renewal, generation: live.session.generation, epoch: live.session.epoch.0 }
        }
        Refreshed::Stolen => Outcome::Stolen,
        Refreshed::Gone => Outcome::Gone,
        Refreshed::Limited { .. } => panic!("no limit is set"),
    }
}

/// One episode; false where the machine was too slow for it to prove anything.
async fn episode(fixture: std::sync::Arc<Fixture>, seed: u64) -> bool {
    let began = Instant::now();
    let mut episode = Episode::new(fixture, seed).await;
    for _ in 0..EPISODE {
        // Judged before a step is: a difference that comes of slowness is none.
        if began.elapsed() > TOO_SLOW {
            return false;
        }
        let before = Instant::now();
        let step = futures::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(episode.step())).await;
        if let Err(panic) = step {
            if began.elapsed() > TOO_SLOW {
                return false;
            }
            eprintln!("the step took {:?}", before.elapsed());
            std::panic::resume_unwind(panic);
        }
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_interleaved_the_store_decides_as_the_rules_do() {
    let fixture = std::sync::Arc::new(Fixture::new().await);
    let first: u64 = rand::random();
    let mut done = 0;
    let mut begun = 0;
    while done < STEPS {
        assert!(begun * EPISODE < 20 * STEPS, "the machine is too slow: {done} of {STEPS} steps");
        let batch: Vec<_> = (0..AT_ONCE)
            .map(|number| {
                let seed = first.wrapping_add((begun + number) as u64);
                tokio::spawn(episode(fixture.clone(), seed))
            })
            .collect();
        begun += AT_ONCE;
        for ended in join_all(batch).await {
            match ended {
                Ok(counts) => done += if counts { EPISODE } else { 0 },
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
    }
    println!("{done} steps in {begun} episodes, no difference");
}
