//! What providers publish and seldom change (discovery documents, key sets), kept by address: fetched by one call at a
//! time, and an old copy serves while the provider is down.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use time::OffsetDateTime;
use tokio::time::timeout;

use crate::domain::{
    clock::Env,
    identity::{Away, ProviderError},
};

/// A copy is used so long without a question.
const FRESH: time::Duration = time::Duration::HOUR;
/// After a fetch that failed an old copy is used so long without a question; and what a copy lacks is asked for once in
/// this time (contract, 5).
const PAUSE: time::Duration = time::Duration::MINUTE;
/// So long an old copy waits for a newer one; the fetch goes on without the caller.
const PATIENCE: Duration = Duration::from_secs(1);
/// Copies that are kept; most have a few KiB.
const MOST: usize = 2048;
/// What the copies of one shelf may take together: 4 KiB for each of them. A provider's largest key set takes some 50
/// KiB, so without it the copies of hostile ones would fill the memory.
const MAX_FOOTPRINT: usize = 8 * 1024 * 1024;

type Outcome<T> = Result<Arc<T>, ProviderError>;

pub(super) struct Shelf<T> {
    env: Arc<Env>,
    copies: Arc<Mutex<Copies<T>>>,
}

/// What a document takes while it is kept, in bytes.
pub(super) trait Footprint {
    fn footprint(&self) -> usize;
}

struct Copies<T> {
    by_url: HashMap<String, Arc<Copy<T>>>,
    /// Of all documents.
    footprint: usize,
}

/// One document.
struct Copy<T>(Mutex<Held<T>>);

struct Held<T> {
    document: Option<(Arc<T>, OffsetDateTime)>,
    /// Of the document.
    footprint: usize,
    failed: Option<OffsetDateTime>,
    /// When somebody last missed something in it.
    missed: Option<OffsetDateTime>,
    used: OffsetDateTime,
    flight: Option<Shared<BoxFuture<'static, Outcome<T>>>>,
}

// === impl Shelf ===

impl<T: Footprint + Send + Sync + 'static> Shelf<T> {
    pub(super) fn new(env: Arc<Env>) -> Self {
        Self { env, copies: Arc::new(Mutex::new(Copies { by_url: HashMap::new(), footprint: 0 })) }
    }

    /// The document of that address; `fetch` reads it anew, and is not always run.
    pub(super) async fn get(
        &self,
        url: &str,
        fetch: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> Outcome<T> {
        let copy = self.copy(url);
        let now = self.env.now();
        let (old, flight) = {
            let mut held = copy.held();
            held.used = now;
            let old = held.document.clone();
            let is_good = old.as_ref().is_some_and(|(_, at)| now - *at < FRESH)
                || old.is_some() && held.failed.is_some_and(|at| now - at < PAUSE);
            match old {
                Some((document, _)) if is_good => return Ok(document),
                old => (old, self.begin(&copy, &mut held, fetch)),
            }
        };
        match old {
            None => flight.await,
            Some((old, _)) => Ok(timeout(PATIENCE, flight).await.ok().and_then(Result::ok).unwrap_or(old)),
        }
    }

    /// A newer one than `seen`, which lacks what the caller looks for; none: it was asked for a short while ago, or
    /// cannot be had.
    pub(super) async fn newer(
        &self,
        url: &str,
        seen: &Arc<T>,
        fetch: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> Option<Arc<T>> {
        let copy = self.copy(url);
        let now = self.env.now();
        let flight = {
            let mut held = copy.held();
            match &held.document {
                Some((document, _)) if !Arc::ptr_eq(document, seen) => return Some(Arc::clone(document)),
                _ => {}
            }
            if held.missed.is_some_and(|at| now - at < PAUSE) {
                // Others who miss something at this moment share the fetch of the first.
                held.flight.clone()?
            } else {
                held.missed = Some(now);
                self.begin(&copy, &mut held, fetch)
            }
        };
        flight.await.ok()
    }

    fn copy(&self, url: &str) -> Arc<Copy<T>> {
        let mut copies = lock(&self.copies);
        if let Some(copy) = copies.by_url.get(url) {
            return Arc::clone(copy);
        }
        if copies.by_url.len() >= MOST {
            copies.drop_least_recently_used();
        }
        let held =
            Held { document: None, footprint: 0, failed: None, missed: None, used: self.env.now(), flight: None };
        let copy = Arc::new(Copy(Mutex::new(held)));
        copies.by_url.insert(url.to_owned(), Arc::clone(&copy));
        copy
    }

    /// Joins the fetch that is under way, or begins one. It is a task of its own: who asked first may go away.
    fn begin(
        &self,
        copy: &Arc<Copy<T>>,
        held: &mut Held<T>,
        fetch: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> Shared<BoxFuture<'static, Outcome<T>>> {
        if let Some(flight) = &held.flight {
            return flight.clone();
        }
        let (env, copies, copy) = (Arc::clone(&self.env), Arc::clone(&self.copies), Arc::clone(copy));
        let task = tokio::spawn(async move {
            let fetched = fetch.await;
            let now = env.now();
            // Always in this order: the copies, then one of them.
            let mut copies = lock(&copies);
            let mut held = copy.held();
            held.flight = None;
            match fetched {
                Ok(document) => {
                    let (before, document) = (held.footprint, Arc::new(document));
                    held.footprint = document.footprint();
                    held.document = Some((Arc::clone(&document), now));
                    held.failed = None;
                    let after = held.footprint;
                    drop(held);
                    copies.grown(&copy, before, after);
                    Ok(document)
                }
                Err(error) => {
                    held.failed = Some(now);
                    Err(error)
                }
            }
        });
        // A task that panicked is told as a connection that broke off.
        let flight = task.map(|ended| ended.unwrap_or(Err(ProviderError::Away(Away::Broken)))).boxed().shared();
        held.flight = Some(flight.clone());
        flight
    }
}

fn lock<T>(copies: &Mutex<Copies<T>>) -> MutexGuard<'_, Copies<T>> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Copies ===

impl<T> Copies<T> {
    /// Makes room after a copy has got another document.
    fn grown(&mut self, copy: &Arc<Copy<T>>, before: usize, after: usize) {
        // It may have been dropped while it was fetched; then it counts no more.
        if !self.by_url.values().any(|kept| Arc::ptr_eq(kept, copy)) {
            return;
        }
        self.footprint = self.footprint - before + after;
        while self.footprint > MAX_FOOTPRINT && self.by_url.len() > 1 {
            self.drop_least_recently_used();
        }
    }

    fn drop_least_recently_used(&mut self) {
        let oldest = self.by_url.iter().min_by_key(|(_, copy)| copy.held().used).map(|(url, _)| url.clone());
        if let Some(copy) = oldest.and_then(|url| self.by_url.remove(&url)) {
            self.footprint -= copy.held().footprint;
        }
    }
}

// === impl Copy ===

impl<T> Copy<T> {
    fn held(&self) -> MutexGuard<'_, Held<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    use super::*;
    use crate::domain::clock::Clock;

    const AWAY: ProviderError = ProviderError::Away(Away::Unreachable);

    impl Footprint for usize {
        fn footprint(&self) -> usize {
            *self
        }
    }

    #[derive(Clone, Default)]
    struct Hands(Arc<AtomicI64>);

    impl Clock for Hands {
        fn now(&self) -> OffsetDateTime {
            OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(self.0.load(Ordering::SeqCst))
        }
    }

    struct Fixture {
        shelf: Shelf<usize>,
        clock: Hands,
        /// How often was fetched; what is fetched is that number.
        fetched: Arc<AtomicUsize>,
    }

    impl Fixture {
        fn new() -> Self {
            let clock = Hands::default();
            let env = Arc::new(Env { clock: Box::new(clock.clone()), ..Env::system() });
            Self { shelf: Shelf::new(env), clock, fetched: Arc::default() }
        }

        fn fetch(&self, up: bool) -> impl Future<Output = Result<usize, ProviderError>> + Send + use<> {
            let fetched = Arc::clone(&self.fetched);
            async move {
                tokio::task::yield_now().await;
                let number = fetched.fetch_add(1, Ordering::SeqCst) + 1;
                if up { Ok(number) } else { Err(AWAY) }
            }
        }

        async fn get(&self, up: bool) -> Result<usize, ProviderError> {
            self.shelf.get("a", self.fetch(up)).await.map(|document| *document)
        }

        fn pass(&self, seconds: i64) {
            self.clock.0.fetch_add(seconds, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn a_document_is_fetched_once_by_however_many() {
        let fixture = Fixture::new();
        let all = futures::future::join_all((0..50).map(|_| fixture.get(true))).await;
        assert!(all.iter().all(|got| *got == Ok(1)), "{all:?}");
        fixture.pass(3599);
        assert_eq!(fixture.get(true).await, Ok(1));
        fixture.pass(1);
        assert_eq!(fixture.get(true).await, Ok(2));
        assert_eq!(fixture.shelf.get("b", fixture.fetch(true)).await.map(|document| *document), Ok(3));
    }

    #[tokio::test]
    async fn a_failure_is_everybodys_and_the_next_asks_again() {
        let fixture = Fixture::new();
        let all = futures::future::join_all((0..50).map(|_| fixture.get(false))).await;
        assert!(all.iter().all(|got| *got == Err(AWAY)), "{all:?}");
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 1);
        assert_eq!(fixture.get(true).await, Ok(2));
    }

    #[tokio::test]
    async fn an_old_copy_serves_while_the_provider_is_down() {
        let fixture = Fixture::new();
        assert_eq!(fixture.get(true).await, Ok(1));
        fixture.pass(100_000);
        assert_eq!(fixture.get(false).await, Ok(1));
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 2);
        for _ in 0..10 {
            assert_eq!(fixture.get(false).await, Ok(1));
        }
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 2, "it is not asked at every call");
        fixture.pass(60);
        assert_eq!(fixture.get(true).await, Ok(3));
    }

    #[tokio::test]
    async fn a_provider_that_hangs_costs_a_moment_where_there_is_an_old_copy() {
        let fixture = Fixture::new();
        assert_eq!(fixture.get(true).await, Ok(1));
        fixture.pass(100_000);
        let got = fixture.shelf.get("a", std::future::pending()).await;
        assert_eq!(got.map(|document| *document), Ok(1));
    }

    #[tokio::test]
    async fn what_is_missed_is_asked_for_once_a_minute() {
        let fixture = Fixture::new();
        let first = fixture.shelf.get("a", fixture.fetch(true)).await.unwrap();
        let newer = |seen| {
            let fetch = fixture.fetch(true);
            let shelf = &fixture.shelf;
            async move { shelf.newer("a", seen, fetch).await.map(|document| *document) }
        };
        assert_eq!(newer(&first).await, Some(2), "at once, however young the copy is");
        assert_eq!(newer(&first).await, Some(2), "another has it already");
        let second = fixture.shelf.get("a", fixture.fetch(true)).await.unwrap();
        assert_eq!(newer(&second).await, None);
        fixture.pass(59);
        assert_eq!(newer(&second).await, None);
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 2);
        fixture.pass(1);
        assert_eq!(newer(&second).await, Some(3));
    }

    #[tokio::test]
    async fn who_goes_away_does_not_end_the_fetch() {
        let fixture = Fixture::new();
        let (open, opened) = tokio::sync::oneshot::channel::<()>();
        let fetch = async move { opened.await.map(|()| 7).map_err(|_| AWAY) };
        let asked = fixture.shelf.get("a", fetch);
        assert!(timeout(Duration::from_millis(1), asked).await.is_err());
        open.send(()).unwrap();
        assert_eq!(fixture.get(true).await, Ok(7));
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn the_shelf_has_an_end() {
        let fixture = Fixture::new();
        for number in 0..MOST + 10 {
            fixture.pass(1);
            fixture.shelf.get(&number.to_string(), fixture.fetch(true)).await.unwrap();
        }
        assert_eq!(fixture.shelf.copies.lock().unwrap().by_url.len(), MOST);
    }

    #[tokio::test]
    async fn large_documents_push_out_what_was_used_least_recently() {
        let fixture = Fixture::new();
        let put = async |url: &str, size: usize| {
            fixture.pass(1);
            let fetch = async move { Ok(size) };
            assert_eq!(fixture.shelf.get(url, fetch).await.map(|document| *document), Ok(size));
        };
        let kept = || {
            let copies = fixture.shelf.copies.lock().unwrap();
            let mut urls: Vec<_> = copies.by_url.keys().cloned().collect();
            urls.sort();
            (urls.join(" "), copies.footprint)
        };
        let half = MAX_FOOTPRINT / 2;
        put("a", half).await;
        put("b", half).await;
        put("a", half).await;
        assert_eq!(kept(), ("a b".to_owned(), MAX_FOOTPRINT));
        put("c", 1).await;
        assert_eq!(kept(), ("a c".to_owned(), half + 1));
        // A newer document counts in place of the older one.
        fixture.pass(3600);
        put("a", 2).await;
        assert_eq!(kept(), ("a c".to_owned(), 3));
    }
}
