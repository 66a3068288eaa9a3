//! Frees the appIDs of deleted Apps that left no users. Under `deletionPolicy: Retain` an App leaves its key Secret,
//! which reserves the appID for its namespace. The servers know whether it has users: the operator asks them by
//! publishing a document with the state `Released`. They mark the App's row in Postgres as free in the transaction that
//! checks for users. Then the operator deletes the key Secret.
//!
//! An App that is created again meanwhile is safe in any order: the keys get a greater `handover` before the servers
//! are asked, so a server that is behind does not free what was published later.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt, runtime::reflector::ObjectRef};
use latchkey_crds::{
    names::rendered_app_secret,
    rendered::{AppState, DeletedApp, FORMAT, Revision},
    types::AppId,
};
use tokio::{
    sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock, Semaphore, mpsc},
    time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    app::{
        deletion::render_unserved,
        keys::secret::{self as key_secret, AppIdOwner, KeyLookup, Stored},
        publish::{DocumentOwner, delete_document, publish},
    },
    context::Context,
    error::{Error, ErrorChain, ErrorKind},
    monitor::ReleaseResponse,
    orphans::app_exists,
    watch::claimed_app_id,
};

/// Concurrent releases. Each waits for the servers, which look for new documents every two seconds. Releases that wait
/// for requests to end are not counted, because they do nothing meanwhile.
const MAX_CONCURRENT: usize = 16;
/// How long a request can still run after its server has stopped serving the App's document: a body takes 30 s, a
/// password 3 s in the queue and twice at most, calls to a provider 10 s each and three at most, and some ten store
/// calls 4 s each at most; that is 106 s. A pod that is terminating and no longer counts as serving ends within 55 s
/// (its grace period by the chart's defaults).
pub(crate) const REQUEST_DRAIN_SECONDS: u64 = 120;
/// How often a waiting release checks that its document is still published.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long the servers have to respond.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// When the servers are asked again if they did not respond or are too old to.
const UNANSWERED_RETRY: Duration = Duration::from_secs(10 * 60);
/// When every reserved appID is checked again. This can be rare: users of an App that is not served disappear only if
/// somebody edits the database.
const RECHECK_INTERVAL: Duration = Duration::from_secs(10 * 60 * 60);

/// Which appIDs are being released, and which Apps are being reconciled meanwhile.
#[derive(Default)]
pub(crate) struct Releases {
    /// Reconciles share the lock of an appID; the steps of a release hold it exclusively.
    locks: Mutex<HashMap<AppId, Weak<RwLock<()>>>>,
    under_way: Mutex<HashMap<AppId, ReleaseProgress>>,
    /// Since when the users of an App are known to be deleted, with the revision of the document that demands it.
    deleted: Mutex<HashMap<AppId, (Revision, Instant)>>,
    /// The retries that are scheduled.
    scheduled: Mutex<HashSet<(AppId, Retry)>>,
}

/// When an appID is checked again without an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Retry {
    Soon,
    Late,
}

/// The progress of a release.
#[derive(Clone, Copy, Default)]
struct ReleaseProgress {
    /// The servers are being asked, so the document of the release may exist.
    asking: bool,
    /// The appID was queued again meanwhile.
    requeued: bool,
}

/// The outcome of a check of an appID.
enum ReleaseOutcome {
    /// It is free, stays reserved, or belongs to an App.
    Done,
    /// The document of its App is still published.
    StillPublished,
    /// The servers did not respond.
    Unanswered,
}

/// An appID that is being released, until this is dropped.
struct ReleaseGuard<'a> {
    releases: &'a Releases,
    id: AppId,
    ended: bool,
}

/// Checks each queued appID, and all of them at intervals, until asked to stop.
pub(crate) async fn run(context: Arc<Context>, mut named: mpsc::UnboundedReceiver<AppId>, stop: &CancellationToken) {
    let mut again = interval_at(tokio::time::Instant::now() + RECHECK_INTERVAL, RECHECK_INTERVAL);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let all = async {
        loop {
            again.tick().await;
            context.reconcile_queue.enqueue_all_releases(&context.objects);
        }
    };
    let slots = Semaphore::new(MAX_CONCURRENT);
    // No limit of its own: there is at most one per appID, and a release that waits for requests to end must not delay
    // others.
    let each = futures::stream::poll_fn(move |cx| named.poll_recv(cx)).for_each_concurrent(None, |id| {
        let (context, slots) = (&context, &slots);
        async move { check_app_id(context, id, slots).await }
    });
    stop.run_until_cancelled(async { tokio::join!(all, each) }).await;
}

async fn check_app_id(context: &Arc<Context>, id: AppId, slots: &Semaphore) {
    let Some(under_way) = context.releases.try_begin(&id) else { return };
    let failure = format!("release {id}");
    let looked = release(context, &id, &under_way, slots).await;
    let state = under_way.end();
    if state.asking {
        // What was published in place of its document did not count as an orphan until now.
        context.reconcile_queue.enqueue_orphan(rendered_app_secret(&id));
    }
    if state.requeued {
        context.reconcile_queue.enqueue_release(id.clone());
    }
    let (again, wait) = match looked {
        Ok(ReleaseOutcome::Done) => return context.failures.reset(&failure),
        Ok(ReleaseOutcome::StillPublished) => {
            (Retry::Soon, context.failures.retry_after(&failure, ErrorKind::Unavailable))
        }
        Ok(ReleaseOutcome::Unanswered) => (Retry::Late, UNANSWERED_RETRY),
        // Nothing can be learned about a namespace that this operator cannot read.
        Err(error) if error.kind() == ErrorKind::Forbidden => return,
        Err(error) => {
            warn!(app = %id, error = %ErrorChain(&error), "an appID could not be released yet");
            (Retry::Soon, context.failures.retry_after(&failure, error.kind()))
        }
    };
    if !context.releases.try_schedule(&id, again) {
        return;
    }
    let context = Arc::clone(context);
    tokio::spawn(async move {
        sleep(wait).await;
        context.releases.unschedule(&id, again);
        context.reconcile_queue.enqueue_release(id);
    });
}

/// Frees the appID of a deleted App, starting from its key Secret.
async fn release(
    context: &Context,
    id: &AppId,
    under_way: &ReleaseGuard<'_>,
    slots: &Semaphore,
) -> Result<ReleaseOutcome, Error> {
    // The semaphore is never closed.
    let Ok(slot) = slots.acquire().await else { return Ok(ReleaseOutcome::Done) };
    let Some(holder) = context.objects.quotas.owner(id) else { return Ok(ReleaseOutcome::Done) };
    if is_claimed(context, id, &holder) {
        return Ok(ReleaseOutcome::Done);
    }
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    let secret = rendered_app_secret(id);
    let alone = context.releases.lock_exclusive(id).await;
    if context.objects.published.get(&secret).is_some() {
        return Ok(ReleaseOutcome::StillPublished);
    }
    let Some(kept) = retained_keys(context, &secrets, id, &holder).await? else { return Ok(ReleaseOutcome::Done) };
    if context.monitor.pod_counts().0 == 0 {
        return Ok(ReleaseOutcome::Unanswered);
    }
    let document = DeletedApp {
        format: FORMAT,
        app_id: id.clone(),
        namespace: holder.namespace.clone(),
        name: holder.name.clone(),
        state: AppState::Released,
        incarnation: kept.document.incarnation.clone(),
        handover: (kept.document.handover > 0).then_some(kept.document.handover),
    };
    let mut fenced = kept.document.clone();
    fenced.handover = fenced.handover.saturating_add(1);
    let Some(kept) = key_secret::replace(&secrets, &kept, &fenced, &holder).await? else {
        return Ok(ReleaseOutcome::Unanswered);
    };
    let rendered = render_unserved(&document);
    let owner = DocumentOwner { app_id: id, namespace: &holder.namespace, name: &holder.name };
    under_way.set_asking();
    publish(context, owner, &rendered).await?;
    context.monitor.expect_revision(id, &rendered.revision);
    drop(alone);

    let answer = context.monitor.wait_released(id, &rendered.revision, RESPONSE_TIMEOUT).await;
    drop(slot);
    // Until these requests have ended, the row must refuse their writes. Once another App owns the appID, it no longer
    // would.
    if answer == ReleaseResponse::Freed && !wait_for_requests(context, id, &holder, &rendered.revision).await {
        return Ok(ReleaseOutcome::Done);
    }
    let _slot = slots.acquire().await;

    let _alone = context.releases.lock_exclusive(id).await;
    let published = context.objects.published.get(&secret);
    let Some(own) = published.filter(|published| published.revision.as_ref() == Some(&rendered.revision)) else {
        // An App of this appID was published in its place, or somebody deleted it.
        return Ok(ReleaseOutcome::Done);
    };
    if is_claimed(context, id, &holder) {
        // The reconcile of that App replaces this document.
        return Ok(ReleaseOutcome::Done);
    }
    context.monitor.forget(id);
    delete_document(context, &secret, &own).await?;
    match answer {
        ReleaseResponse::Reserved => return Ok(ReleaseOutcome::Done),
        ReleaseResponse::Unanswered => return Ok(ReleaseOutcome::Unanswered),
        ReleaseResponse::Freed => {}
    }
    if retained_keys(context, &secrets, id, &holder).await?.is_none() {
        return Ok(ReleaseOutcome::Done);
    }
    if !key_secret::delete(&secrets, &kept).await? {
        return Ok(ReleaseOutcome::Unanswered);
    }
    info!(app = %id, holder.namespace, "the App is deleted and left no users; its appID is free");
    Ok(ReleaseOutcome::Done)
}

/// Waits until every request that began under the App's document has ended. Returns false as soon as an App claims the
/// appID or the document of the release is no longer published.
async fn wait_for_requests(context: &Context, id: &AppId, holder: &AppIdOwner, revision: &Revision) -> bool {
    let secret = rendered_app_secret(id);
    let end = Instant::now() + context.request_drain;
    loop {
        let published = context.objects.published.get(&secret);
        if published.and_then(|published| published.revision).as_ref() != Some(revision)
            || is_claimed(context, id, holder)
        {
            return false;
        }
        let now = Instant::now();
        if now >= end {
            return true;
        }
        sleep_until(end.min(now + POLL_INTERVAL)).await;
    }
}

/// The keys, if the API server says that their App is deleted and no other App of its namespace claims them.
async fn retained_keys(
    context: &Context,
    secrets: &Api<Secret>,
    id: &AppId,
    holder: &AppIdOwner,
) -> Result<Option<Box<Stored>>, Error> {
    let kept = match key_secret::read(secrets, id).await? {
        // Keys that were handed over wait for an App of their new namespace.
        KeyLookup::Stored(kept) if kept.owner == *holder && !kept.is_handed_over() => kept,
        KeyLookup::Stored(_) | KeyLookup::Unusable(..) | KeyLookup::Missing => return Ok(None),
    };
    let is_gone = !is_claimed(context, id, holder) && !app_exists(context, holder, id).await?;
    Ok(is_gone.then_some(kept))
}

/// Whether an App of the namespace claims the appID, as far as the watch has reported.
fn is_claimed(context: &Context, id: &AppId, holder: &AppIdOwner) -> bool {
    let stored = context.objects.apps.get(&ObjectRef::new(&holder.name).within(&holder.namespace));
    // An App that does not decode may claim it.
    let may_ask = stored.is_some_and(|app| app.0.is_err() || claimed_app_id(&app).as_ref() == Some(id));
    may_ask || context.objects.apps_with_id(id).iter().any(|app| app.namespace().as_ref() == Some(&holder.namespace))
}

// === impl Releases ===

impl Releases {
    /// For the reconcile of an App that claims the appID: while this guard is held, no step of a release runs.
    pub(crate) async fn lock_shared(&self, id: &AppId) -> OwnedRwLockReadGuard<()> {
        self.lock(id).read_owned().await
    }

    /// Whether the document of a release may exist. It is no orphan.
    pub(crate) fn is_asking_servers(&self, id: &AppId) -> bool {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).get(id).is_some_and(|state| state.asking)
    }

    /// How long requests can still run that began before the users of their App were deleted, counted from the first
    /// call for this document. Returns `None` once they have ended.
    pub(crate) fn request_drain_left(&self, id: &AppId, revision: &Revision, within: Duration) -> Option<Duration> {
        let mut deleted = self.deleted.lock().unwrap_or_else(PoisonError::into_inner);
        let (of, since) = deleted.entry(id.clone()).or_insert_with(|| (revision.clone(), Instant::now()));
        if of != revision {
            (*of, *since) = (revision.clone(), Instant::now());
        }
        let left = within.saturating_sub(since.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// Forgets the deletion of an App: its users are not known to be deleted, or nothing waits for it any more.
    pub(crate) fn forget_deletion(&self, id: &AppId) {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    async fn lock_exclusive(&self, id: &AppId) -> OwnedRwLockWriteGuard<()> {
        self.lock(id).write_owned().await
    }

    fn try_begin(&self, id: &AppId) -> Option<ReleaseGuard<'_>> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = under_way.get_mut(id) {
            state.requeued = true;
            return None;
        }
        under_way.insert(id.clone(), ReleaseProgress::default());
        Some(ReleaseGuard { releases: self, id: id.clone(), ended: false })
    }

    /// Records a scheduled retry. Returns false if there is one already: one timer is enough.
    fn try_schedule(&self, id: &AppId, again: Retry) -> bool {
        self.scheduled.lock().unwrap_or_else(PoisonError::into_inner).insert((id.clone(), again))
    }

    fn unschedule(&self, id: &AppId, again: Retry) {
        self.scheduled.lock().unwrap_or_else(PoisonError::into_inner).remove(&(id.clone(), again));
    }

    fn lock(&self, id: &AppId) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        // There are only as many as concurrent reconciles and releases.
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(id).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(id.clone(), Arc::downgrade(&lock));
        lock
    }
}

// === impl ReleaseGuard ===

impl ReleaseGuard<'_> {
    fn set_asking(&self) {
        let mut under_way = self.releases.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.entry(self.id.clone()).or_default().asking = true;
    }

    /// Ends the release and returns its progress.
    fn end(mut self) -> ReleaseProgress {
        self.ended = true;
        self.remove()
    }

    fn remove(&self) -> ReleaseProgress {
        let mut under_way = self.releases.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.remove(&self.id).unwrap_or_default()
    }
}

impl Drop for ReleaseGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{Method, StatusCode};
    use kube::runtime::watcher::Event;
    use latchkey_crds::rendered::SigningAlgorithm;
    use serde_json::{Value, json};
    use time::OffsetDateTime;

    use super::*;
    use crate::app::{
        keys::KeyDocument,
        mock_api::{MockApi, context, not_found},
    };
    use crate::{quota::DocumentSize, watch::PublishedApp};

    const APP: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/store";
    const KEYS: &str = "/api/v1/namespaces/latchkey/secrets/latchkey-keys-shop";

    fn shop() -> AppId {
        "shop".parse().unwrap()
    }

    fn app(name: &str) -> Value {
        json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App", "metadata": { "namespace": "shop", "name": name },
            "spec": { "appID": "shop", "displayName": "Shop" },
        })
    }

    fn keys() -> Value {
        let keys = KeyDocument::first(&shop(), SigningAlgorithm::ES256, OffsetDateTime::UNIX_EPOCH).unwrap();
        let secret = k8s_openapi::ByteString(serde_json::to_vec(&keys).unwrap());
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "latchkey.dev/app-keys",
            "metadata": {
                "name": "latchkey-keys-shop", "namespace": "latchkey", "uid": "1", "resourceVersion": "7",
                "annotations": { "latchkey.dev/namespace": "shop", "latchkey.dev/name": "store" },
            },
            "data": { "keys.json": secret },
        })
    }

    /// Checks the keys that App `shop/store` left or owns. The script must contain every call.
    async fn looked(script: &MockApi, stored: Option<Value>) -> ReleaseOutcome {
        let (context, mut apps) = context(script.client());
        apps.apply_watcher_event(&Event::Init);
        if let Some(stored) = stored {
            apps.apply_watcher_event(&Event::InitApply(serde_json::from_value(stored).unwrap()));
        }
        apps.apply_watcher_event(&Event::InitDone);
        let holder = AppIdOwner { namespace: "shop".into(), name: "store".into() };
        context.objects.quotas.record_keys(&shop(), Some(holder));
        let under_way = context.releases.try_begin(&shop()).unwrap();
        release(&context, &shop(), &under_way, &Semaphore::new(1)).await.unwrap()
    }

    #[tokio::test]
    async fn keys_of_an_existing_app_are_left_alone() {
        let known = MockApi::default();
        assert!(matches!(looked(&known, Some(app("store"))).await, ReleaseOutcome::Done));
        known.finish();
        // The watch is behind.
        let there =
            MockApi::default()
                .expect(Method::GET, KEYS, |_| (StatusCode::OK, keys()))
                .expect(Method::GET, APP, |_| (StatusCode::OK, app("store")));
        assert!(matches!(looked(&there, None).await, ReleaseOutcome::Done));
        there.finish();
    }

    #[tokio::test]
    async fn without_a_serving_pod_nothing_is_written() {
        let gone =
            MockApi::default()
                .expect(Method::GET, KEYS, |_| (StatusCode::OK, keys()))
                .expect(Method::GET, APP, |_| not_found("store"));
        assert!(matches!(looked(&gone, None).await, ReleaseOutcome::Unanswered));
        gone.finish();
    }

    fn published(document: &[u8], version: &str) -> PublishedApp {
        PublishedApp {
            revision: Some(Revision::of(document)),
            namespace: "shop".into(),
            name: "store".into(),
            resource_version: version.into(),
            uid: "1".into(),
            size: DocumentSize::of(document),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_keys_stay_until_every_request_of_the_deleted_app_has_ended() {
        let (context, _apps) = context(MockApi::default().client());
        let secret = rendered_app_secret(&shop());
        context.objects.published.record_write(&secret, published(b"released", "1"));
        let holder = AppIdOwner { namespace: "shop".into(), name: "store".into() };
        let revision = Revision::of(b"released");
        let waiting = async || {
            let begun = Instant::now();
            (wait_for_requests(&context, &shop(), &holder, &revision).await, begun.elapsed())
        };
        assert_eq!(waiting().await, (true, Duration::from_secs(120)));
        // An App that is created again, and perhaps deleted again, does not wait for this.
        let anew = async {
            sleep(Duration::from_secs(7)).await;
            context.objects.published.record_write(&secret, published(b"served", "2"));
        };
        let ((ended, waited), ()) = tokio::join!(waiting(), anew);
        assert!(!ended && waited <= Duration::from_secs(8), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_deletion_waits_for_requests_once_for_each_document() {
        let releases = Releases::default();
        let within = Duration::from_secs(120);
        let left = |document: &[u8]| releases.request_drain_left(&shop(), &Revision::of(document), within);
        assert_eq!(left(b"1"), Some(within));
        sleep(Duration::from_secs(100)).await;
        assert_eq!(left(b"1"), Some(Duration::from_secs(20)));
        assert_eq!(left(b"2"), Some(within), "the App was served again meanwhile");
        sleep(within).await;
        assert_eq!(left(b"2"), None);
        releases.forget_deletion(&shop());
        assert_eq!(left(b"2"), Some(within));
    }

    #[tokio::test]
    async fn a_step_of_a_release_and_a_reconcile_of_its_app_id_do_not_overlap() {
        let releases = Releases::default();
        let (one, other) = (releases.lock_shared(&shop()).await, releases.lock_shared(&shop()).await);
        let shop = shop();
        let step = releases.lock_exclusive(&shop);
        tokio::pin!(step);
        assert!(futures::poll!(&mut step).is_pending());
        drop(one);
        assert!(futures::poll!(&mut step).is_pending());
        drop(other);
        let step = step.await;
        let reconcile = releases.lock_shared(&shop);
        tokio::pin!(reconcile);
        assert!(futures::poll!(&mut reconcile).is_pending());
        let _elsewhere = releases.lock_shared(&"other".parse().unwrap()).await;
        drop(step);
        reconcile.await;
    }

    #[test]
    fn an_app_id_is_released_once_at_a_time_and_its_document_is_no_orphan_meanwhile() {
        let releases = Releases::default();
        let under_way = releases.try_begin(&shop()).unwrap();
        assert!(releases.try_begin(&shop()).is_none() && !releases.is_asking_servers(&shop()));
        under_way.set_asking();
        assert!(releases.is_asking_servers(&shop()));
        let state = under_way.end();
        assert!(state.asking && state.requeued, "it is checked once more");
        assert!(!releases.is_asking_servers(&shop()) && releases.try_begin(&shop()).is_some());
    }
}
