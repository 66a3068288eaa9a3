//! The gate for ingresses, which ask at every request: who a token lets in, with what was found kept for a moment.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use aws_lc_rs::digest::{Context, SHA256};
use latchkey_crds::rendered::Revision;

use super::{
    app::App,
    clock::Env,
    ports::StoreError,
    session::{LiveSession, SessionId},
    signed_in::NotSignedIn,
    token,
    user::UserId,
};

/// How long a session that was seen is let in without another look (contract, 4): an ended one is out after that.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Tokens of one generation of what is kept; there are two. Of about 1 KiB each.
const GENERATION: usize = 8192;

/// What is known of tokens; of this process alone.
#[derive(Default)]
pub struct Gate {
    kept: Mutex<Kept>,
}

/// The youngest tokens, and those before them. What is asked for again moves to the young ones; when these are too many
/// the old ones go. So it is bounded, and what is in use stays.
#[derive(Default)]
struct Kept {
    young: HashMap<Key, Judged>,
    old: HashMap<Key, Judged>,
}

/// SHA-256 of a token: tokens themselves are not kept.
type Key = [u8; 32];

/// A token whose signature, issuer and audience hold under one revision of its App.
#[derive(Clone)]
struct Judged {
    revision: Revision,
    user: UserId,
    session: SessionId,
    /// Unix seconds.
    exp: i64,
    /// The session, and when it was asked for; none where it was not there.
    seen: Option<(Instant, Arc<LiveSession>)>,
}

// === impl Gate ===

impl Gate {
    /// The live session that the token is of. `look` asks the store, at most once a second for one token; only what it
    /// finds is kept, and what it does not find is asked for each time.
    pub async fn admit<F>(
        &self,
        env: &Env,
        app: &App,
        token: &str,
        now: Instant,
        look: impl FnOnce(UserId, SessionId) -> F,
    ) -> Result<Arc<LiveSession>, NotSignedIn>
    where
        F: Future<Output = Result<Option<LiveSession>, StoreError>>,
    {
        let key = key(token);
        // A revision is that of one App: what another App or an older document judged does not count.
        let judged = match self.find(&key).filter(|judged| judged.revision == app.revision) {
            Some(judged) => judged,
            None => Judged::by(app, env, token).ok_or(NotSignedIn::InvalidToken)?,
        };
        if env.now().unix_timestamp() >= judged.exp {
            return Err(NotSignedIn::InvalidToken);
        }
        if let Some((at, live)) = &judged.seen
            && now.saturating_duration_since(*at) < LOOK_AGAIN
        {
            return Ok(Arc::clone(live));
        }
        let live = look(judged.user, judged.session).await?.map(Arc::new);
        // As of before the look: the time that it took counts.
        self.keep(key, Judged { seen: live.clone().map(|live| (now, live)), ..judged });
        live.ok_or(NotSignedIn::InvalidToken)
    }

    fn find(&self, key: &Key) -> Option<Judged> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(judged) = kept.young.get(key) {
            return Some(judged.clone());
        }
        let judged = kept.old.remove(key)?;
        kept.put(*key, judged.clone());
        Some(judged)
    }

    fn keep(&self, key: Key, judged: Judged) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).put(key, judged);
    }
}

fn key(token: &str) -> Key {
    let mut context = Context::new(&SHA256);
    context.update(token.as_bytes());
    context.finish().as_ref().try_into().expect("SHA-256 has 32 octets")
}

// === impl Kept ===

impl Kept {
    fn put(&mut self, key: Key, judged: Judged) {
        if self.young.len() >= GENERATION && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, judged);
    }
}

// === impl Judged ===

impl Judged {
    fn by(app: &App, env: &Env, token: &str) -> Option<Self> {
        let claims = token::verify_access(app, env.now(), token)?;
        let revision = app.revision.clone();
        Some(Self { revision, user: claims.sub, session: claims.sid, exp: claims.exp, seen: None })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        sync::atomic::{AtomicI64, Ordering},
    };

    use futures::FutureExt;
    use latchkey_crds::rendered::KeyState;
    use time::OffsetDateTime;
    use uuid::Uuid;

    use super::*;
    use crate::{
        domain::{
            clock::Clock,
            session::{Amr, Profile, Session},
            user::Epoch,
        },
        fixtures,
    };

    const START: i64 = 1_900_000_000;

    struct Set(Arc<AtomicI64>);

    impl Clock for Set {
        fn now(&self) -> OffsetDateTime {
            OffsetDateTime::from_unix_timestamp(self.0.load(Ordering::Relaxed)).unwrap()
        }
    }

    /// An App, a clock, a store that counts its look-ups, and the gate before them.
    struct Scene {
        app: App,
        env: Env,
        unix: Arc<AtomicI64>,
        gate: Gate,
        is_there: Cell<bool>,
        looks: Cell<usize>,
        began: Instant,
    }

    impl Scene {
        fn new() -> Self {
            let unix = Arc::new(AtomicI64::new(START));
            Self {
                app: fixtures::app(fixtures::rendered("shop")),
                env: Env { clock: Box::new(Set(Arc::clone(&unix))), ..Env::system() },
                unix,
                gate: Gate::default(),
                is_there: Cell::new(true),
                looks: Cell::new(0),
                began: Instant::now(),
            }
        }

        fn token(&self, session: u128) -> token::Tokens {
            let live = live(session);
            token::issue(&self.app, &self.env, &live.profile, &live.session).unwrap()
        }

        fn asks(&self, app: &App, token: &str, millis: u64) -> bool {
            let now = self.began + Duration::from_millis(millis);
            let look = |user: UserId, session: SessionId| {
                assert_eq!(user, live(0).session.user);
                self.looks.set(self.looks.get() + 1);
                std::future::ready(Ok(self.is_there.get().then(|| live(session.0.as_u128()))))
            };
            let answer = self.gate.admit(&self.env, app, token, now, look).now_or_never().unwrap();
            match answer {
                Ok(_) => true,
                Err(NotSignedIn::InvalidToken) => false,
                Err(NotSignedIn::Store(error)) => panic!("{error}"),
            }
        }
    }

    fn live(session: u128) -> LiveSession {
        let session = Session {
            id: SessionId(Uuid::from_u128(session)),
            user: UserId(Uuid::from_u128(7)),
            epoch: Epoch(1),
            generation: 1,
            amr: Amr::Password,
            auth_time: OffsetDateTime::from_unix_timestamp(START).unwrap(),
        };
        let profile = Profile { version: 1, email: None, email_verified: false, name: "Ada".to_owned() };
        LiveSession { session, profile }
    }

    #[test]
    fn a_session_is_looked_up_once_a_second_and_an_ended_one_is_out_after_that() {
        let scene = Scene::new();
        let token = scene.token(1).access_token;
        for millis in [0, 1, 500, 999] {
            assert!(scene.asks(&scene.app, &token, millis));
        }
        assert_eq!(scene.looks.get(), 1);
        scene.is_there.set(false);
        assert!(scene.asks(&scene.app, &token, 999));
        assert!(!scene.asks(&scene.app, &token, 1000));
        assert_eq!(scene.looks.get(), 2);
    }

    #[test]
    fn what_was_not_there_is_looked_up_each_time() {
        let scene = Scene::new();
        let token = scene.token(1).access_token;
        scene.is_there.set(false);
        assert!(!scene.asks(&scene.app, &token, 0));
        assert!(!scene.asks(&scene.app, &token, 0));
        scene.is_there.set(true);
        assert!(scene.asks(&scene.app, &token, 0));
        assert_eq!(scene.looks.get(), 3);
    }

    #[test]
    fn a_token_that_is_kept_ends_all_the_same() {
        let scene = Scene::new();
        let token = scene.token(1);
        assert!(scene.asks(&scene.app, &token.access_token, 0));
        scene.unix.store(token.expires_at - 1, Ordering::Relaxed);
        assert!(scene.asks(&scene.app, &token.access_token, 1));
        scene.unix.store(token.expires_at, Ordering::Relaxed);
        assert!(!scene.asks(&scene.app, &token.access_token, 2));
        assert_eq!(scene.looks.get(), 1);
    }

    #[test]
    fn what_one_revision_judged_does_not_count_for_another() {
        let scene = Scene::new();
        let token = scene.token(1).access_token;
        assert!(scene.asks(&scene.app, &token, 0));
        // The key was revoked.
        let mut doc = scene.app.doc.clone();
        doc.keys.signing = vec![fixtures::signing_key("s2", doc.tokens.signing_algorithm, KeyState::Active)];
        assert!(!scene.asks(&fixtures::app(doc), &token, 1));
        // Another App that has the same keys.
        let mut doc = fixtures::rendered("other");
        doc.keys = scene.app.doc.keys.clone();
        assert!(!scene.asks(&fixtures::app(doc), &token, 1));
        assert_eq!(scene.looks.get(), 1);
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_in_use_stays() {
        let judged = Judged {
            revision: Revision::of(b"{}"),
            user: UserId(Uuid::from_u128(7)),
            session: SessionId(Uuid::from_u128(1)),
            exp: START,
            seen: None,
        };
        let gate = Gate::default();
        let used = key("used");
        gate.keep(used, judged.clone());
        for number in 0..5 * GENERATION {
            gate.keep(key(&number.to_string()), judged.clone());
            if number % 100 == 0 {
                assert!(gate.find(&used).is_some(), "after {number}");
            }
        }
        let kept = gate.kept.lock().unwrap();
        assert!(kept.young.len() + kept.old.len() <= 2 * GENERATION);
        drop(kept);
        assert!(gate.find(&key("0")).is_none());
    }
}
