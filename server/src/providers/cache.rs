//! Cache of provider documents (discovery documents, key sets) by URL. Concurrent callers share one fetch of a
//! document, and a stale copy is used while the provider is unavailable.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use parking_lot::{Mutex, MutexGuard};
use time::OffsetDateTime;
use tokio::time::timeout;

use crate::domain::{
    clock::Env,
    identity::{ProviderError, UnavailableReason},
};

/// A copy younger than this is used without a fetch.
const MAX_AGE: time::Duration = time::Duration::HOUR;
/// After a failed fetch, a stale copy is used for this time without another fetch. This is also the shortest time
/// between two fetches that start because a copy lacks what a caller needs, for example a new key (specification:
/// Social login, Provider documents).
const RETRY_INTERVAL: time::Duration = time::Duration::MINUTE;
/// How long a caller waits for a newer copy if there is a stale copy. After that time, the caller gets the stale copy,
/// and the fetch continues.
const REFRESH_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of copies. Most copies have a few KiB.
const MAX_ENTRIES: usize = 2048;
/// Maximum size of all copies of one cache, in bytes: 4 KiB for each of [`MAX_ENTRIES`]. A key set can take more than
/// ten times as much, so without this bound the documents of hostile providers could exhaust the memory.
const MAX_CACHE_BYTES: usize = 8 * 1024 * 1024;

type FetchResult<T> = Result<Arc<T>, ProviderError>;

pub(super) struct DocumentCache<T> {
    env: Arc<Env>,
    entries: Arc<Mutex<Entries<T>>>,
}

/// The memory that a cached document takes, in bytes.
pub(super) trait MemorySize {
    fn memory_size(&self) -> usize;
}

struct Entries<T> {
    by_url: HashMap<String, Arc<Entry<T>>>,
    /// The memory that all documents take, in bytes.
    footprint: usize,
}

/// The cache entry of one URL.
struct Entry<T>(Mutex<EntryState<T>>);

struct EntryState<T> {
    /// The document and the time at which it was fetched.
    document: Option<(Arc<T>, OffsetDateTime)>,
    /// The memory that the document takes, in bytes.
    footprint: usize,
    failed_at: Option<OffsetDateTime>,
    /// When a fetch last began because the document lacked what a caller needed.
    last_miss: Option<OffsetDateTime>,
    last_used: OffsetDateTime,
    fetch: Option<Shared<BoxFuture<'static, FetchResult<T>>>>,
}

// === impl DocumentCache ===

impl<T: MemorySize + Send + Sync + 'static> DocumentCache<T> {
    pub(super) fn new(env: Arc<Env>) -> Self {
        Self { env, entries: Arc::new(Mutex::new(Entries { by_url: HashMap::new(), footprint: 0 })) }
    }

    /// The document at `url`. Runs `fetch` only if the copy is missing or stale. Returns the fetch's error if there is
    /// no copy.
    pub(super) async fn get(
        &self,
        url: &str,
        fetch: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> FetchResult<T> {
        let entry = self.entry(url);
        let now = self.env.now();
        let (stale, fetch) = {
            let mut state = entry.lock();
            state.last_used = now;
            let copy = state.document.clone();
            let is_usable = copy.as_ref().is_some_and(|(_, at)| now - *at < MAX_AGE)
                || copy.is_some() && state.failed_at.is_some_and(|at| now - at < RETRY_INTERVAL);
            match copy {
                Some((document, _)) if is_usable => return Ok(document),
                stale => (stale, self.start_fetch(&entry, &mut state, fetch)),
            }
        };
        match stale {
            None => fetch.await,
            Some((stale, _)) => Ok(timeout(REFRESH_WAIT, fetch).await.ok().and_then(Result::ok).unwrap_or(stale)),
        }
    }

    /// Returns a document that is newer than `stale`. `stale` is the copy that lacks what the caller needs. Returns
    /// `None` if the fetch fails. Also returns `None`, without a fetch, if the last fetch of a newer document has
    /// ended, but began less than [`RETRY_INTERVAL`] ago.
    pub(super) async fn get_newer(
        &self,
        url: &str,
        stale: &Arc<T>,
        fetch: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> Option<Arc<T>> {
        let entry = self.entry(url);
        let now = self.env.now();
        let fetch = {
            let mut state = entry.lock();
            match &state.document {
                Some((document, _)) if !Arc::ptr_eq(document, stale) => return Some(Arc::clone(document)),
                _ => {}
            }
            if state.last_miss.is_some_and(|at| now - at < RETRY_INTERVAL) {
                // Callers that need a newer document at the same time share one fetch.
                state.fetch.clone()?
            } else {
                state.last_miss = Some(now);
                self.start_fetch(&entry, &mut state, fetch)
            }
        };
        fetch.await.ok()
    }

    fn entry(&self, url: &str) -> Arc<Entry<T>> {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.by_url.get(url) {
            return Arc::clone(entry);
        }
        if entries.by_url.len() >= MAX_ENTRIES {
            entries.evict_least_recently_used();
        }
        let state = EntryState {
            document: None,
            footprint: 0,
            failed_at: None,
            last_miss: None,
            last_used: self.env.now(),
            fetch: None,
        };
        let entry = Arc::new(Entry(Mutex::new(state)));
        entries.by_url.insert(url.to_owned(), Arc::clone(&entry));
        entry
    }

    /// Joins the running fetch or starts one. The fetch runs in its own task, so that it continues if a caller is
    /// cancelled.
    fn start_fetch(
        &self,
        entry: &Arc<Entry<T>>,
        state: &mut EntryState<T>,
        fetch: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> Shared<BoxFuture<'static, FetchResult<T>>> {
        if let Some(running) = &state.fetch {
            return running.clone();
        }
        let (env, entries, entry) = (Arc::clone(&self.env), Arc::clone(&self.entries), Arc::clone(entry));
        let task = tokio::spawn(async move {
            let fetched = fetch.await;
            let now = env.now();
            // Lock order: first the map, then one entry.
            let mut entries = entries.lock();
            let mut state = entry.lock();
            state.fetch = None;
            match fetched {
                Ok(document) => {
                    let (before, document) = (state.footprint, Arc::new(document));
                    state.footprint = document.memory_size();
                    state.document = Some((Arc::clone(&document), now));
                    state.failed_at = None;
                    let after = state.footprint;
                    drop(state);
                    entries.update_footprint(&entry, before, after);
                    Ok(document)
                }
                Err(error) => {
                    state.failed_at = Some(now);
                    Err(error)
                }
            }
        });
        // A panic in the task is reported as a closed connection.
        let running = task
            .map(|ended| ended.unwrap_or(Err(ProviderError::Unavailable(UnavailableReason::ConnectionClosed))))
            .boxed()
            .shared();
        state.fetch = Some(running.clone());
        running
    }
}

// === impl Entries ===

impl<T> Entries<T> {
    /// Updates `footprint` after a copy changed, and evicts the least recently used copies while `footprint` is over
    /// [`MAX_CACHE_BYTES`]. At least one copy stays.
    fn update_footprint(&mut self, changed: &Arc<Entry<T>>, before: usize, after: usize) {
        // If the entry was evicted during the fetch, `footprint` does not include it.
        if !self.by_url.values().any(|entry| Arc::ptr_eq(entry, changed)) {
            return;
        }
        self.footprint = self.footprint - before + after;
        while self.footprint > MAX_CACHE_BYTES && self.by_url.len() > 1 {
            self.evict_least_recently_used();
        }
    }

    fn evict_least_recently_used(&mut self) {
        let oldest = self.by_url.iter().min_by_key(|(_, entry)| entry.lock().last_used).map(|(url, _)| url.clone());
        if let Some(entry) = oldest.and_then(|url| self.by_url.remove(&url)) {
            self.footprint -= entry.lock().footprint;
        }
    }
}

// === impl Entry ===

impl<T> Entry<T> {
    fn lock(&self) -> MutexGuard<'_, EntryState<T>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    use super::*;
    use crate::domain::clock::Clock;

    const UNREACHABLE: ProviderError = ProviderError::Unavailable(UnavailableReason::Unreachable);

    impl MemorySize for usize {
        fn memory_size(&self) -> usize {
            *self
        }
    }

    #[derive(Clone, Default)]
    struct TestClock(Arc<AtomicI64>);

    impl Clock for TestClock {
        fn now(&self) -> OffsetDateTime {
            OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(self.0.load(Ordering::SeqCst))
        }
    }

    struct Fixture {
        cache: DocumentCache<usize>,
        clock: TestClock,
        /// The number of fetches so far. The first fetch returns 1, the second one 2, and so on.
        fetched: Arc<AtomicUsize>,
    }

    impl Fixture {
        fn new() -> Self {
            let clock = TestClock::default();
            let env = Arc::new(Env { clock: Box::new(clock.clone()), ..Env::system() });
            Self { cache: DocumentCache::new(env), clock, fetched: Arc::default() }
        }

        fn fetch(&self, is_available: bool) -> impl Future<Output = Result<usize, ProviderError>> + Send + use<> {
            let fetched = Arc::clone(&self.fetched);
            async move {
                tokio::task::yield_now().await;
                let number = fetched.fetch_add(1, Ordering::SeqCst) + 1;
                if is_available { Ok(number) } else { Err(UNREACHABLE) }
            }
        }

        async fn get(&self, is_available: bool) -> Result<usize, ProviderError> {
            self.cache.get("a", self.fetch(is_available)).await.map(|document| *document)
        }

        fn advance(&self, seconds: i64) {
            self.clock.0.fetch_add(seconds, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn concurrent_callers_share_one_fetch() {
        let fixture = Fixture::new();
        let all = futures::future::join_all((0..50).map(|_| fixture.get(true))).await;
        assert!(all.iter().all(|got| *got == Ok(1)), "{all:?}");
        fixture.advance(3599);
        assert_eq!(fixture.get(true).await, Ok(1));
        fixture.advance(1);
        assert_eq!(fixture.get(true).await, Ok(2));
        assert_eq!(fixture.cache.get("b", fixture.fetch(true)).await.map(|document| *document), Ok(3));
    }

    #[tokio::test]
    async fn concurrent_callers_share_a_failure_and_the_next_call_fetches_again() {
        let fixture = Fixture::new();
        let all = futures::future::join_all((0..50).map(|_| fixture.get(false))).await;
        assert!(all.iter().all(|got| *got == Err(UNREACHABLE)), "{all:?}");
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 1);
        assert_eq!(fixture.get(true).await, Ok(2));
    }

    #[tokio::test]
    async fn a_stale_copy_is_used_while_the_provider_is_unavailable() {
        let fixture = Fixture::new();
        assert_eq!(fixture.get(true).await, Ok(1));
        fixture.advance(100_000);
        assert_eq!(fixture.get(false).await, Ok(1));
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 2);
        for _ in 0..10 {
            assert_eq!(fixture.get(false).await, Ok(1));
        }
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 2, "not every call fetches");
        fixture.advance(60);
        assert_eq!(fixture.get(true).await, Ok(3));
    }

    #[tokio::test]
    async fn a_hanging_provider_delays_callers_only_briefly_if_there_is_a_stale_copy() {
        let fixture = Fixture::new();
        assert_eq!(fixture.get(true).await, Ok(1));
        fixture.advance(100_000);
        let got = fixture.cache.get("a", std::future::pending()).await;
        assert_eq!(got.map(|document| *document), Ok(1));
    }

    #[tokio::test]
    async fn a_newer_document_is_fetched_at_most_once_per_minute() {
        let fixture = Fixture::new();
        let first = fixture.cache.get("a", fixture.fetch(true)).await.unwrap();
        let newer = |stale| {
            let fetch = fixture.fetch(true);
            let cache = &fixture.cache;
            async move { cache.get_newer("a", stale, fetch).await.map(|document| *document) }
        };
        assert_eq!(newer(&first).await, Some(2), "fetched immediately, whatever the age of the copy");
        assert_eq!(newer(&first).await, Some(2), "the cache already has a newer copy");
        let second = fixture.cache.get("a", fixture.fetch(true)).await.unwrap();
        assert_eq!(newer(&second).await, None);
        fixture.advance(59);
        assert_eq!(newer(&second).await, None);
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 2);
        fixture.advance(1);
        assert_eq!(newer(&second).await, Some(3));
    }

    #[tokio::test]
    async fn a_cancelled_caller_does_not_cancel_the_fetch() {
        let fixture = Fixture::new();
        let (open, opened) = tokio::sync::oneshot::channel::<()>();
        let fetch = async move { opened.await.map(|()| 7).map_err(|_| UNREACHABLE) };
        let caller = fixture.cache.get("a", fetch);
        assert!(timeout(Duration::from_millis(1), caller).await.is_err());
        open.send(()).unwrap();
        assert_eq!(fixture.get(true).await, Ok(7));
        assert_eq!(fixture.fetched.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn the_number_of_entries_is_bounded() {
        let fixture = Fixture::new();
        for number in 0..MAX_ENTRIES + 10 {
            fixture.advance(1);
            fixture.cache.get(&number.to_string(), fixture.fetch(true)).await.unwrap();
        }
        assert_eq!(fixture.cache.entries.lock().by_url.len(), MAX_ENTRIES);
    }

    #[tokio::test]
    async fn large_documents_evict_the_least_recently_used_ones() {
        let fixture = Fixture::new();
        let put = async |url: &str, size: usize| {
            fixture.advance(1);
            let fetch = async move { Ok(size) };
            assert_eq!(fixture.cache.get(url, fetch).await.map(|document| *document), Ok(size));
        };
        let cached = || {
            let entries = fixture.cache.entries.lock();
            let mut urls: Vec<_> = entries.by_url.keys().cloned().collect();
            urls.sort();
            (urls.join(" "), entries.footprint)
        };
        let half = MAX_CACHE_BYTES / 2;
        put("a", half).await;
        put("b", half).await;
        put("a", half).await;
        assert_eq!(cached(), ("a b".to_owned(), MAX_CACHE_BYTES));
        put("c", 1).await;
        assert_eq!(cached(), ("a c".to_owned(), half + 1));
        // In the total, the size of the newer document replaces the size of the older document.
        fixture.advance(3600);
        put("a", 2).await;
        assert_eq!(cached(), ("a c".to_owned(), 3));
    }
}
