//! Frees the appIDs of Apps that are gone and left no user. Under `deletionPolicy: Retain` an App leaves its key Secret,
//! which reserves the appID for its namespace. The servers know whether it has users: they are asked by a document with
//! the state `Released`, and mark the App's row in Postgres as free in the same transaction in which they look. Then the
//! key Secret goes.
//!
//! An App that is made anew meanwhile is not harmed, whatever the order: the keys get a greater `handover` before the
//! servers are asked, so a server that is behind does not free what was published later.

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
        deletion::render_gone,
        keys::secret::{self as key_secret, Found, Holder, Kept},
        publish::{Owner, publish, withdraw},
    },
    context::Context,
    error::{Chain, Error, Kind},
    orphans::exists,
    probe::Released,
    watch::app_id,
};

/// Releases at a time. Each waits for the servers, which look for new documents every two seconds. Those that wait for
/// requests to end are not counted: they do nothing meanwhile.
const AT_ONCE: usize = 16;
/// A request that a server judged by the document of the App has ended so long after the server serves it no more: a body
/// takes 30 s, a password 3 s in the queue and twice at most, calls of a provider 10 s each and three at most, and some
/// ten calls of the stores 4 s each at most; that is 106 s. A pod that is ending and counts no more ends within 55 s (its
/// grace period by the chart's defaults).
pub(crate) const REQUESTS_END_SECONDS: u64 = 120;
/// How often a release that waits looks whether its document is still there.
const LOOK: Duration = Duration::from_secs(1);
/// How long the servers have to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// When the servers are asked again if they did not answer, or are too old to.
const UNANSWERED: Duration = Duration::from_secs(10 * 60);
/// When every reserved appID is looked at again. It is rare: users of an App that is not served go only by an edit of the
/// database.
const AGAIN: Duration = Duration::from_secs(10 * 60 * 60);

/// Which appIDs are being released, and which Apps are being reconciled meanwhile.
#[derive(Default)]
pub(crate) struct Releases {
    /// Reconciles share the lock of an appID; the steps of a release have it alone.
    locks: Mutex<HashMap<AppId, Weak<RwLock<()>>>>,
    under_way: Mutex<HashMap<AppId, State>>,
    /// Since when the users of Apps are known to be deleted, by the revisions of the documents that say so.
    deleted: Mutex<HashMap<AppId, (Revision, Instant)>>,
    /// Those that are looked at again by themselves, soon or late.
    scheduled: Mutex<HashSet<(AppId, Again)>>,
}

/// When an appID is looked at again by itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Again {
    Soon,
    Late,
}

/// How far a release is.
#[derive(Clone, Copy, Default)]
struct State {
    /// The servers are asked, so the document of the release may be there.
    asking: bool,
    /// Somebody named the appID again meanwhile.
    again: bool,
}

/// What came of a look at an appID.
enum Looked {
    /// It is free, stays reserved, or belongs to an App.
    Done,
    /// The document of its App is still there.
    Published,
    /// The servers did not answer.
    Unanswered,
}

/// An appID under way, until this is dropped.
struct UnderWay<'a> {
    releases: &'a Releases,
    id: AppId,
    ended: bool,
}

/// Looks at each appID that is named, and at all of them now and then, until asked to stop.
pub(crate) async fn run(context: Arc<Context>, mut named: mpsc::UnboundedReceiver<AppId>, stop: &CancellationToken) {
    let mut again = interval_at(tokio::time::Instant::now() + AGAIN, AGAIN);
    again.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let all = async {
        loop {
            again.tick().await;
            context.wakes.retained(&context.objects);
        }
    };
    let slots = Semaphore::new(AT_ONCE);
    // Without a limit of its own: there is one at most for each appID, and a release that waits for requests to end must
    // not keep others back.
    let each = futures::stream::poll_fn(move |cx| named.poll_recv(cx)).for_each_concurrent(None, |id| {
        let (context, slots) = (&context, &slots);
        async move { look_at(context, id, slots).await }
    });
    stop.run_until_cancelled(async { tokio::join!(all, each) }).await;
}

async fn look_at(context: &Arc<Context>, id: AppId, slots: &Semaphore) {
    let Some(under_way) = context.releases.begin(&id) else { return };
    let failure = format!("release {id}");
    let looked = release(context, &id, &under_way, slots).await;
    let state = under_way.end();
    if state.asking {
        // What was published in place of its document was no orphan until now.
        context.wakes.orphan(rendered_app_secret(&id));
    }
    if state.again {
        context.wakes.release(id.clone());
    }
    let (again, wait) = match looked {
        Ok(Looked::Done) => return context.failures.forget(&failure),
        Ok(Looked::Published) => (Again::Soon, context.failures.retry_after(&failure, Kind::Unavailable)),
        Ok(Looked::Unanswered) => (Again::Late, UNANSWERED),
        // Nothing can be known of a namespace that this operator cannot read.
        Err(error) if error.kind() == Kind::Forbidden => return,
        Err(error) => {
            warn!(app = %id, error = %Chain(&error), "an appID is not released yet");
            (Again::Soon, context.failures.retry_after(&failure, error.kind()))
        }
    };
    if !context.releases.schedule(&id, again) {
        return;
    }
    let context = Arc::clone(context);
    tokio::spawn(async move {
        sleep(wait).await;
        context.releases.scheduled_no_more(&id, again);
        context.wakes.release(id);
    });
}

/// From the key Secret of an App that is gone to a free appID.
async fn release(context: &Context, id: &AppId, under_way: &UnderWay<'_>, slots: &Semaphore) -> Result<Looked, Error> {
    // It is never closed.
    let Ok(slot) = slots.acquire().await else { return Ok(Looked::Done) };
    let Some(holder) = context.objects.quotas.holder(id) else { return Ok(Looked::Done) };
    if is_claimed(context, id, &holder) {
        return Ok(Looked::Done);
    }
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &context.namespace);
    let secret = rendered_app_secret(id);
    let alone = context.releases.alone(id).await;
    if context.objects.published.get(&secret).is_some() {
        return Ok(Looked::Published);
    }
    let Some(kept) = retained(context, &secrets, id, &holder).await? else { return Ok(Looked::Done) };
    if context.probe.pods().0 == 0 {
        return Ok(Looked::Unanswered);
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
        return Ok(Looked::Unanswered);
    };
    let rendered = render_gone(&document);
    let owner = Owner { app_id: id, namespace: &holder.namespace, name: &holder.name };
    under_way.asks();
    publish(context, owner, &rendered).await?;
    context.probe.expect(id, &rendered.revision);
    drop(alone);

    let answer = context.probe.wait_released(id, &rendered.revision, ANSWER).await;
    drop(slot);
    // Until then the row refuses what these requests write. Once another App claims it, it no longer would.
    if answer == Released::Freed && !requests_ended(context, id, &holder, &rendered.revision).await {
        return Ok(Looked::Done);
    }
    let _slot = slots.acquire().await;

    let _alone = context.releases.alone(id).await;
    let published = context.objects.published.get(&secret);
    let Some(own) = published.filter(|published| published.revision.as_ref() == Some(&rendered.revision)) else {
        // An App of this appID was published in its place, or somebody took it away.
        return Ok(Looked::Done);
    };
    if is_claimed(context, id, &holder) {
        // Its reconcile publishes in place of this document.
        return Ok(Looked::Done);
    }
    context.probe.forget(id);
    withdraw(context, &secret, &own).await?;
    match answer {
        Released::Reserved => return Ok(Looked::Done),
        Released::Unanswered => return Ok(Looked::Unanswered),
        Released::Freed => {}
    }
    if retained(context, &secrets, id, &holder).await?.is_none() {
        return Ok(Looked::Done);
    }
    if !key_secret::remove(&secrets, &kept).await? {
        return Ok(Looked::Unanswered);
    }
    info!(app = %id, holder.namespace, "the App is gone and left no user; its appID is free");
    Ok(Looked::Done)
}

/// Waits until no request runs that was judged by the document of the App. Returns false as soon as an App asks for the
/// appID, or the document of the release is no longer there.
async fn requests_ended(context: &Context, id: &AppId, holder: &Holder, revision: &Revision) -> bool {
    let secret = rendered_app_secret(id);
    let end = Instant::now() + context.requests_end;
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
        sleep_until(end.min(now + LOOK)).await;
    }
}

/// The keys, if the API server says that their App is gone and nobody else of its namespace asks for them.
async fn retained(
    context: &Context,
    secrets: &Api<Secret>,
    id: &AppId,
    holder: &Holder,
) -> Result<Option<Box<Kept>>, Error> {
    let kept = match key_secret::read(secrets, id).await? {
        // Keys that were handed over wait for an App of their new namespace.
        Found::Kept(kept) if kept.holder == *holder && !kept.are_handed_over() => kept,
        Found::Kept(_) | Found::Unusable(..) | Found::Missing => return Ok(None),
    };
    let is_gone = !is_claimed(context, id, holder) && !exists(context, holder, id).await?;
    Ok(is_gone.then_some(kept))
}

/// Whether an App of the namespace asks for the appID, as far as the watch has reported.
fn is_claimed(context: &Context, id: &AppId, holder: &Holder) -> bool {
    let stored = context.objects.apps.get(&ObjectRef::new(&holder.name).within(&holder.namespace));
    // One that does not decode may ask for it.
    let may_ask = stored.is_some_and(|app| app.0.is_err() || app_id(&app).as_ref() == Some(id));
    may_ask || context.objects.apps_with_id(id).iter().any(|app| app.namespace().as_ref() == Some(&holder.namespace))
}

// === impl Releases ===

impl Releases {
    /// For a reconcile of an App that asks for the appID: while this is held, no step of a release runs.
    pub(crate) async fn hold_off(&self, id: &AppId) -> OwnedRwLockReadGuard<()> {
        self.lock(id).read_owned().await
    }

    /// Whether the document of a release may be there, which is no orphan.
    pub(crate) fn is_under_way(&self, id: &AppId) -> bool {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).get(id).is_some_and(|state| state.asking)
    }

    /// How long requests may still run that were judged by an App whose users are deleted, since this was asked first of
    /// the document. Returns `None` once they have ended.
    pub(crate) fn requests_end(&self, id: &AppId, revision: &Revision, within: Duration) -> Option<Duration> {
        let mut deleted = self.deleted.lock().unwrap_or_else(PoisonError::into_inner);
        let (of, since) = deleted.entry(id.clone()).or_insert_with(|| (revision.clone(), Instant::now()));
        if of != revision {
            (*of, *since) = (revision.clone(), Instant::now());
        }
        let left = within.saturating_sub(since.elapsed());
        (!left.is_zero()).then_some(left)
    }

    /// Nothing of the App is known to be deleted, or nothing waits for it any more.
    pub(crate) fn not_deleted(&self, id: &AppId) {
        self.deleted.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    async fn alone(&self, id: &AppId) -> OwnedRwLockWriteGuard<()> {
        self.lock(id).write_owned().await
    }

    fn begin(&self, id: &AppId) -> Option<UnderWay<'_>> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = under_way.get_mut(id) {
            state.again = true;
            return None;
        }
        under_way.insert(id.clone(), State::default());
        Some(UnderWay { releases: self, id: id.clone(), ended: false })
    }

    /// Notes that the appID is looked at again by itself. Returns false if that was noted before: one timer is enough.
    fn schedule(&self, id: &AppId, again: Again) -> bool {
        self.scheduled.lock().unwrap_or_else(PoisonError::into_inner).insert((id.clone(), again))
    }

    fn scheduled_no_more(&self, id: &AppId, again: Again) {
        self.scheduled.lock().unwrap_or_else(PoisonError::into_inner).remove(&(id.clone(), again));
    }

    fn lock(&self, id: &AppId) -> Arc<RwLock<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        // As many as reconciles and releases run at a time.
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(id).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(id.clone(), Arc::downgrade(&lock));
        lock
    }
}

// === impl UnderWay ===

impl UnderWay<'_> {
    fn asks(&self) {
        let mut under_way = self.releases.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.entry(self.id.clone()).or_default().asking = true;
    }

    /// Ends it, and returns how far it got.
    fn end(mut self) -> State {
        self.ended = true;
        self.take()
    }

    fn take(&self) -> State {
        let mut under_way = self.releases.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.remove(&self.id).unwrap_or_default()
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.take();
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
        scripted::{Script, context, not_found},
    };
    use crate::{quota::Size, watch::PublishedApp};

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

    /// What comes of a look at the keys that App `shop/store` left, or has. Every call must be of the script.
    async fn looked(script: &Script, stored: Option<Value>) -> Looked {
        let (context, mut apps) = context(script.client());
        apps.apply_watcher_event(&Event::Init);
        if let Some(stored) = stored {
            apps.apply_watcher_event(&Event::InitApply(serde_json::from_value(stored).unwrap()));
        }
        apps.apply_watcher_event(&Event::InitDone);
        let holder = Holder { namespace: "shop".into(), name: "store".into() };
        context.objects.quotas.keys(&shop(), Some(holder));
        let under_way = context.releases.begin(&shop()).unwrap();
        release(&context, &shop(), &under_way, &Semaphore::new(1)).await.unwrap()
    }

    #[tokio::test]
    async fn keys_of_an_app_that_is_there_are_left_alone() {
        let known = Script::default();
        assert!(matches!(looked(&known, Some(app("store"))).await, Looked::Done));
        known.calls();
        // The watch is behind.
        let there =
            Script::default()
                .expect(Method::GET, KEYS, |_| (StatusCode::OK, keys()))
                .expect(Method::GET, APP, |_| (StatusCode::OK, app("store")));
        assert!(matches!(looked(&there, None).await, Looked::Done));
        there.calls();
    }

    #[tokio::test]
    async fn without_a_server_that_could_answer_nothing_is_written() {
        let gone =
            Script::default()
                .expect(Method::GET, KEYS, |_| (StatusCode::OK, keys()))
                .expect(Method::GET, APP, |_| not_found("store"));
        assert!(matches!(looked(&gone, None).await, Looked::Unanswered));
        gone.calls();
    }

    fn published(document: &[u8], version: &str) -> PublishedApp {
        PublishedApp {
            revision: Some(Revision::of(document)),
            namespace: "shop".into(),
            name: "store".into(),
            resource_version: version.into(),
            uid: "1".into(),
            size: Size::of(document),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_keys_stay_until_every_request_of_the_app_that_is_gone_has_ended() {
        let (context, _apps) = context(Script::default().client());
        let secret = rendered_app_secret(&shop());
        context.objects.published.wrote(&secret, published(b"released", "1"));
        let holder = Holder { namespace: "shop".into(), name: "store".into() };
        let revision = Revision::of(b"released");
        let waiting = async || {
            let begun = Instant::now();
            (requests_ended(&context, &shop(), &holder, &revision).await, begun.elapsed())
        };
        assert_eq!(waiting().await, (true, Duration::from_secs(120)));
        // An App that is made anew, and perhaps deleted again, does not wait for this.
        let anew = async {
            sleep(Duration::from_secs(7)).await;
            context.objects.published.wrote(&secret, published(b"served", "2"));
        };
        let ((ended, waited), ()) = tokio::join!(waiting(), anew);
        assert!(!ended && waited <= Duration::from_secs(8), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_deletion_waits_for_requests_once_for_each_document() {
        let releases = Releases::default();
        let within = Duration::from_secs(120);
        let left = |document: &[u8]| releases.requests_end(&shop(), &Revision::of(document), within);
        assert_eq!(left(b"1"), Some(within));
        sleep(Duration::from_secs(100)).await;
        assert_eq!(left(b"1"), Some(Duration::from_secs(20)));
        assert_eq!(left(b"2"), Some(within), "the App was served again meanwhile");
        sleep(within).await;
        assert_eq!(left(b"2"), None);
        releases.not_deleted(&shop());
        assert_eq!(left(b"2"), Some(within));
    }

    #[tokio::test]
    async fn a_step_of_a_release_and_a_reconcile_of_its_app_id_do_not_overlap() {
        let releases = Releases::default();
        let (one, other) = (releases.hold_off(&shop()).await, releases.hold_off(&shop()).await);
        let shop = shop();
        let step = releases.alone(&shop);
        tokio::pin!(step);
        assert!(futures::poll!(&mut step).is_pending());
        drop(one);
        assert!(futures::poll!(&mut step).is_pending());
        drop(other);
        let step = step.await;
        let reconcile = releases.hold_off(&shop);
        tokio::pin!(reconcile);
        assert!(futures::poll!(&mut reconcile).is_pending());
        let _elsewhere = releases.hold_off(&"other".parse().unwrap()).await;
        drop(step);
        reconcile.await;
    }

    #[test]
    fn an_app_id_is_released_once_at_a_time_and_only_asking_makes_its_document_no_orphan() {
        let releases = Releases::default();
        let under_way = releases.begin(&shop()).unwrap();
        assert!(releases.begin(&shop()).is_none() && !releases.is_under_way(&shop()));
        under_way.asks();
        assert!(releases.is_under_way(&shop()));
        let state = under_way.end();
        assert!(state.asking && state.again, "it is looked at once more");
        assert!(!releases.is_under_way(&shop()) && releases.begin(&shop()).is_some());
    }
}
