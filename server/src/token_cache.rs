//! The token cache of forward auth, the endpoint that an ingress calls before it forwards a request.

use std::{
    collections::HashMap,
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use aws_lc_rs::digest::{Context, SHA256};
use latchkey_crds::rendered::Revision;
use parking_lot::Mutex;

use crate::domain::{
    app::App,
    authentication::AuthenticationError,
    clock::Env,
    openid::scope::Scopes,
    ports::StoreError,
    session::{LiveSession, SessionId},
    token,
    user::UserId,
};

/// After a lookup, the session is used for this time without another lookup. Therefore an ended session is accepted for
/// at most this time.
const SESSION_TTL: Duration = Duration::from_secs(1);
/// The maximum number of tokens in each of the two maps of the cache. A token takes about 1 KiB.
const MAP_CAPACITY: usize = 8192;

/// The access tokens that this process has validated, with their sessions.
#[derive(Default)]
pub struct TokenCache {
    maps: Mutex<TokenMaps>,
}

/// The recently used tokens, and the tokens that were used before them. A token in `previous` that is used again moves
/// to `recent`. When `recent` is full, it replaces `previous`. So the cache is bounded, and tokens in use stay in it.
#[derive(Default)]
struct TokenMaps {
    recent: HashMap<TokenDigest, CachedToken>,
    previous: HashMap<TokenDigest, CachedToken>,
}

/// The session that a token names.
#[derive(Clone, Copy, Debug)]
pub struct TokenSession {
    pub user: UserId,
    pub session: SessionId,
    /// The scopes of the token, if it is a client's token and not one of the App itself.
    pub client_scopes: Option<Scopes>,
}

/// SHA-256 of a token. Tokens themselves are not stored.
type TokenDigest = [u8; 32];

/// A token with a valid signature, issuer and audience, as checked with one revision of its App.
#[derive(Clone)]
struct CachedToken {
    revision: Revision,
    session: TokenSession,
    /// When the token expires, in Unix seconds.
    exp: i64,
    /// The time of the last lookup and the session that it found. `None` if there was no lookup or it found no session.
    last_lookup: Option<(Instant, Arc<LiveSession>)>,
}

// === impl TokenCache ===

impl TokenCache {
    /// Returns the live session of the token. A session that `lookup` finds is used for `SESSION_TTL` without another
    /// lookup. A missing session is looked up each time.
    pub async fn authenticate<F>(
        &self,
        env: &Env,
        app: &App,
        token: &str,
        now: Instant,
        lookup: impl FnOnce(TokenSession) -> F,
    ) -> Result<Arc<LiveSession>, AuthenticationError>
    where
        F: Future<Output = Result<Option<LiveSession>, StoreError>>,
    {
        let key = token_digest(token);
        // A revision belongs to one App. A token that was validated for another App or another revision is
        // validated again.
        let cached = match self.find(&key).filter(|cached| cached.revision == app.revision) {
            Some(cached) => cached,
            None => CachedToken::verify(app, env, token).ok_or(AuthenticationError::InvalidToken)?,
        };
        if env.now().unix_timestamp() >= cached.exp {
            return Err(AuthenticationError::InvalidToken);
        }
        if let Some((at, live)) = &cached.last_lookup
            && now.saturating_duration_since(*at) < SESSION_TTL
        {
            return Ok(Arc::clone(live));
        }
        let live = lookup(cached.session).await?.map(Arc::new);
        // `now` is the time before the lookup, so that `SESSION_TTL` includes the duration of the lookup.
        self.insert(key, CachedToken { last_lookup: live.clone().map(|live| (now, live)), ..cached });
        live.ok_or(AuthenticationError::InvalidToken)
    }

    fn find(&self, key: &TokenDigest) -> Option<CachedToken> {
        let mut maps = self.maps.lock();
        if let Some(cached) = maps.recent.get(key) {
            return Some(cached.clone());
        }
        let cached = maps.previous.remove(key)?;
        maps.insert(*key, cached.clone());
        Some(cached)
    }

    fn insert(&self, key: TokenDigest, cached: CachedToken) {
        self.maps.lock().insert(key, cached);
    }
}

fn token_digest(token: &str) -> TokenDigest {
    let mut context = Context::new(&SHA256);
    context.update(token.as_bytes());
    context.finish().as_ref().try_into().expect("SHA-256 has 32 bytes")
}

// === impl TokenMaps ===

impl TokenMaps {
    fn insert(&mut self, key: TokenDigest, cached: CachedToken) {
        if self.recent.len() >= MAP_CAPACITY && !self.recent.contains_key(&key) {
            self.previous = std::mem::take(&mut self.recent);
        }
        self.recent.insert(key, cached);
    }
}

// === impl CachedToken ===

impl CachedToken {
    fn verify(app: &App, env: &Env, token: &str) -> Option<Self> {
        let claims = token::verify_any_access_token(app, env.now(), token)?;
        if !claims.is_admitted(app) {
            return None;
        }
        let client_scopes = claims.is_of_client(app).then_some(claims.scope);
        let session = TokenSession { user: claims.sub, session: claims.sid, client_scopes };
        Some(Self { revision: app.revision.clone(), session, exp: claims.exp, last_lookup: None })
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

    struct ManualClock(Arc<AtomicI64>);

    impl Clock for ManualClock {
        fn now(&self) -> OffsetDateTime {
            OffsetDateTime::from_unix_timestamp(self.0.load(Ordering::Relaxed)).unwrap()
        }
    }

    /// A cache, together with an App, a clock, and a session store that counts the lookups.
    struct TestCache {
        app: App,
        env: Env,
        unix_seconds: Arc<AtomicI64>,
        cache: TokenCache,
        session_exists: Cell<bool>,
        lookups: Cell<usize>,
        started_at: Instant,
    }

    impl TestCache {
        fn new() -> Self {
            let unix_seconds = Arc::new(AtomicI64::new(START));
            Self {
                app: fixtures::app(fixtures::rendered("shop")),
                env: Env { clock: Box::new(ManualClock(Arc::clone(&unix_seconds))), ..Env::system() },
                unix_seconds,
                cache: TokenCache::default(),
                session_exists: Cell::new(true),
                lookups: Cell::new(0),
                started_at: Instant::now(),
            }
        }

        fn issue_tokens(&self, session: u128) -> token::Tokens {
            let live = live_session(session);
            token::issue_tokens(&self.app, &self.env, &live.profile, &live.session).unwrap()
        }

        fn is_admitted(&self, app: &App, token: &str, millis: u64) -> bool {
            let now = self.started_at + Duration::from_millis(millis);
            let lookup = |token: TokenSession| {
                assert_eq!((token.user, token.client_scopes), (live_session(0).session.user, None));
                self.lookups.set(self.lookups.get() + 1);
                std::future::ready(Ok(self.session_exists.get().then(|| live_session(token.session.0.as_u128()))))
            };
            let outcome = self.cache.authenticate(&self.env, app, token, now, lookup).now_or_never().unwrap();
            match outcome {
                Ok(_) => true,
                Err(AuthenticationError::InvalidToken) => false,
                Err(AuthenticationError::Store(error)) => panic!("{error}"),
            }
        }
    }

    fn live_session(session: u128) -> LiveSession {
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
    fn a_session_is_looked_up_once_a_second_and_an_ended_session_is_rejected_after_a_second() {
        let test = TestCache::new();
        let token = test.issue_tokens(1).access_token;
        for millis in [0, 1, 500, 999] {
            assert!(test.is_admitted(&test.app, &token, millis));
        }
        assert_eq!(test.lookups.get(), 1);
        test.session_exists.set(false);
        assert!(test.is_admitted(&test.app, &token, 999));
        assert!(!test.is_admitted(&test.app, &token, 1000));
        assert_eq!(test.lookups.get(), 2);
    }

    #[test]
    fn a_missing_session_is_looked_up_each_time() {
        let test = TestCache::new();
        let token = test.issue_tokens(1).access_token;
        test.session_exists.set(false);
        assert!(!test.is_admitted(&test.app, &token, 0));
        assert!(!test.is_admitted(&test.app, &token, 0));
        test.session_exists.set(true);
        assert!(test.is_admitted(&test.app, &token, 0));
        assert_eq!(test.lookups.get(), 3);
    }

    #[test]
    fn a_cached_token_still_expires() {
        let test = TestCache::new();
        let token = test.issue_tokens(1);
        assert!(test.is_admitted(&test.app, &token.access_token, 0));
        test.unix_seconds.store(token.expires_at - 1, Ordering::Relaxed);
        assert!(test.is_admitted(&test.app, &token.access_token, 1));
        test.unix_seconds.store(token.expires_at, Ordering::Relaxed);
        assert!(!test.is_admitted(&test.app, &token.access_token, 2));
        assert_eq!(test.lookups.get(), 1);
    }

    #[test]
    fn a_token_is_validated_again_for_another_revision_or_app() {
        let test = TestCache::new();
        let token = test.issue_tokens(1).access_token;
        assert!(test.is_admitted(&test.app, &token, 0));
        // The signing key was revoked.
        let mut doc = test.app.doc.clone();
        doc.keys.signing = vec![fixtures::signing_key("s2", doc.tokens.signing_algorithm, KeyState::Active)];
        assert!(!test.is_admitted(&fixtures::app(doc), &token, 1));
        // Another App with the same keys.
        let mut doc = fixtures::rendered("other");
        doc.keys = test.app.doc.keys.clone();
        assert!(!test.is_admitted(&fixtures::app(doc), &token, 1));
        assert_eq!(test.lookups.get(), 1);
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_tokens_in_use() {
        let cached = CachedToken {
            revision: Revision::of(b"{}"),
            session: TokenSession {
                user: UserId(Uuid::from_u128(7)),
                session: SessionId(Uuid::from_u128(1)),
                client_scopes: None,
            },
            exp: START,
            last_lookup: None,
        };
        let cache = TokenCache::default();
        let used = token_digest("used");
        cache.insert(used, cached.clone());
        for number in 0..5 * MAP_CAPACITY {
            cache.insert(token_digest(&number.to_string()), cached.clone());
            if number % 100 == 0 {
                assert!(cache.find(&used).is_some(), "after {number}");
            }
        }
        let maps = cache.maps.lock();
        assert!(maps.recent.len() + maps.previous.len() <= 2 * MAP_CAPACITY);
        drop(maps);
        assert!(cache.find(&token_digest("0")).is_none());
    }
}
