//! Reconciles the queued objects of one kind: concurrency, retries, metrics and panics.

use std::{future, sync::Arc, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use kube::Resource;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, warn};

use crate::{
    context::Context,
    error::{Error, ErrorChain},
    panics::{Panicked, catch_async},
    schedule::Schedule,
    spans,
    watch::NamespacedName,
};

/// Concurrent reconciles per controller.
const MAX_CONCURRENT_RECONCILES: u16 = 32;

/// When an object is reconciled again after a reconcile, unless it is queued earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Action {
    requeue_after: Option<Duration>,
}

/// Reconciles the queued objects until asked to stop. Returns when the running reconciles have ended. `get` returns an
/// object from the store, or `None` if it does not exist any more.
pub(crate) async fn run<K, F, R>(
    name: &'static str,
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
    report_panic: fn(Arc<K>, Arc<Context>, Panicked) -> R,
    context: &Arc<Context>,
    get: impl Fn(&NamespacedName) -> Option<Arc<K>>,
    mut queue: mpsc::UnboundedReceiver<NamespacedName>,
    stop: &CancellationToken,
) where
    K: Resource<DynamicType = ()> + Send + Sync + 'static,
    F: Future<Output = Result<Action, Error>> + Send + 'static,
    R: Future<Output = Result<(), Error>> + Send + 'static,
{
    context.metrics.set_max_concurrent(name, MAX_CONCURRENT_RECONCILES);
    let max_running = usize::from(MAX_CONCURRENT_RECONCILES);
    let reconcile_one = |queued: NamespacedName, object: Arc<K>| {
        let (key, context) = (object_key(&*object), Arc::clone(context));
        // Each reconcile has its own task, so that reconciles run on all threads.
        let task = tokio::spawn(reconcile_object(name, reconcile, report_panic, object, Arc::clone(&context)));
        async move {
            let result = task.await.unwrap_or_else(|_| Err(Panicked::take_last().into()));
            let retry = |error: Error| Action::requeue(context.failures.retry_after(&key, error.kind()));
            (queued, result.unwrap_or_else(retry))
        }
    };
    let mut schedule = Schedule::default();
    let mut running = FuturesUnordered::new();
    // No reconcile starts after the stop, even if something else was ready at the same time.
    while !stop.is_cancelled() {
        while running.len() < max_running
            && let Some(queued) = schedule.start_next(Instant::now())
        {
            match get(&queued) {
                Some(object) => running.push(reconcile_one(queued, object)),
                None => schedule.finish(queued, None),
            }
        }
        let next_time = schedule.next_time().filter(|_| running.len() < max_running);
        let next_is_due = async {
            match next_time {
                Some(time) => sleep_until(time).await,
                None => future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => break,
            queued = queue.recv() => match queued {
                Some(queued) => schedule.queue(queued, Instant::now()),
                None => break,
            },
            Some((queued, action)) = running.next() => {
                schedule.finish(queued, action.requeue_after.and_then(|wait| Instant::now().checked_add(wait)));
            }
            () = next_is_due => {}
        }
    }
    while running.next().await.is_some() {}
}

/// Reconciles an object, and records the result in the log, the metrics and the span.
async fn reconcile_object<K, F, R>(
    name: &'static str,
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
    report_panic: fn(Arc<K>, Arc<Context>, Panicked) -> R,
    object: Arc<K>,
    context: Arc<Context>,
) -> Result<Action, Error>
where
    K: Resource<DynamicType = ()>,
    F: Future<Output = Result<Action, Error>>,
    R: Future<Output = Result<(), Error>>,
{
    let began = Instant::now();
    let active = context.metrics.track_active(name);
    let key = object_key(&*object);
    let span = spans::reconcile_span(name, object.meta());
    let run = catch_async(reconcile(Arc::clone(&object), Arc::clone(&context)));
    let result = run.instrument(span.clone()).await.unwrap_or_else(|panicked| Err(panicked.into()));
    spans::record_outcome(&span, &result);
    drop(active);
    match &result {
        Ok(_) => {
            context.failures.reset(&key);
            context.metrics.record_reconcile(name, "success", began.elapsed());
        }
        Err(error) => {
            warn!(
                object = key,
                error = %ErrorChain(error),
                "a reconcile failed; retrying"
            );
            context.metrics.record_reconcile(name, error.kind().as_str(), began.elapsed());
        }
    }
    if let Err(Error::Panicked(panicked)) = &result {
        context.metrics.record_panic(name);
        let report = catch_async(report_panic(object, Arc::clone(&context), panicked.clone())).await;
        if let Err(error) = report.unwrap_or_else(|panicked| Err(panicked.into())) {
            warn!(object = key, error = %ErrorChain(&error), "failed to report the panic in the status");
        }
    }
    result
}

fn object_key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    let meta = object.meta();
    format!(
        "{} {}/{}",
        K::kind(&()),
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default()
    )
}

// === impl Action ===

impl Action {
    /// Reconciles the object again after this time, even if nothing queues it.
    pub(crate) const fn requeue(after: Duration) -> Self {
        Self { requeue_after: Some(after) }
    }

    /// Reconciles the object again only when something queues it.
    pub(crate) const fn await_change() -> Self {
        Self { requeue_after: None }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::{FutureExt, future::BoxFuture};
    use http::{Method, StatusCode};
    use kube::{core::DeserializeGuard, runtime::watcher::Event};
    use latchkey_crds::app::App;
    use parking_lot::Mutex;
    use serde_json::json;
    use tokio::{
        sync::Semaphore,
        time::{sleep, timeout},
    };

    use super::*;
    use crate::app::{
        self,
        mock_api::{MockApi, ReceivedCall, context},
    };

    fn reconcile(app: Arc<DeserializeGuard<App>>, _: Arc<Context>) -> BoxFuture<'static, Result<Action, Error>> {
        async move {
            assert!(app.meta().name.as_deref() != Some("bomb"), "{}", "hush");
            Ok(Action::await_change())
        }
        .boxed()
    }

    #[tokio::test]
    async fn a_panic_affects_only_the_object_that_caused_it() {
        const STATUS: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/bomb/status";
        const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let respond_as_stored = |call: &ReceivedCall| {
            let mut answer = call.body.clone();
            answer["metadata"]["resourceVersion"] = json!("8");
            (StatusCode::OK, answer)
        };
        let script =
            MockApi::default()
                .expect(Method::PATCH, STATUS, respond_as_stored)
                .expect(Method::POST, EVENTS, |call| (StatusCode::OK, call.body.clone()));
        let (context, mut apps) = context(script.client());
        apps.apply_watcher_event(&Event::Init);
        for name in ["bomb", "good"] {
            let metadata =
                json!({ "namespace": "shop", "name": name, "uid": name, "resourceVersion": "7", "generation": 3 });
            let app = json!({ "apiVersion": "latchkey.dev/v1alpha1", "kind": "App", "metadata": metadata, "spec": {} });
            apps.apply_watcher_event(&Event::InitApply(serde_json::from_value(app).unwrap()));
        }
        apps.apply_watcher_event(&Event::InitDone);
        let context = context.shared();
        let (queue, queued) = mpsc::unbounded_channel();
        let enqueue = |name: &str| queue.send(NamespacedName::new("shop", name)).unwrap();
        enqueue("bomb");
        let stop = CancellationToken::new();
        let get = |app: &NamespacedName| context.objects.apps.get(&app.object_ref());
        let controller = run("app", reconcile, app::report_panic, &context, get, queued, &stop);
        let metrics_contain = |line: &str| context.metrics.encode().unwrap().contains(&format!("{line}\n"));
        let panic_count_is = |times: u32| {
            metrics_contain(&format!("controller_runtime_reconcile_panics_total{{controller=\"app\"}} {times}"))
        };
        let both_reconciles = async {
            // The reconcile of `bomb` is retried after each panic. `good` is reconciled after the first panic.
            while panic_count_is(0) {
                tokio::task::yield_now().await;
            }
            enqueue("good");
            while !metrics_contain("controller_runtime_reconcile_total{controller=\"app\",result=\"success\"} 1")
                || !panic_count_is(3)
            {
                tokio::task::yield_now().await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::select! {
            () = controller => panic!("the controller ended"),
            ended = timeout(limit, both_reconciles) => ended.expect("both are reconciled"),
        }
        // The reconcile panics several times, but the status is written once.
        let calls = script.finish();
        assert_eq!(calls.len(), 2, "the status and its Event: {calls:?}");
        let status = &calls[0].body["status"];
        let reported_condition = |type_: &str| {
            let conditions = status["conditions"].as_array().unwrap();
            conditions.iter().find(|condition| condition["type"] == type_).unwrap().clone()
        };
        assert_eq!(
            (&reported_condition("Accepted")["status"], &reported_condition("Accepted")["reason"]),
            (&json!("False"), &json!("InternalError"))
        );
        assert_eq!(
            (&reported_condition("Ready")["status"], &reported_condition("Ready")["reason"]),
            (&json!("False"), &json!("InternalError"))
        );
        assert_eq!(status["observedGeneration"], 3);
        let message = reported_condition("Ready")["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("the operator failed on this object: a panic at "), "{message}");
        assert!(!serde_json::to_string(&calls[0].body).unwrap().contains("hush"));
    }

    /// Returns the same App for every name.
    fn get(_: &NamespacedName) -> Option<Arc<DeserializeGuard<App>>> {
        let app = json!({
            "apiVersion": "latchkey.dev/v1alpha1", "kind": "App",
            "metadata": { "namespace": "shop", "name": "shop" }, "spec": {},
        });
        Some(Arc::new(serde_json::from_value(app).unwrap()))
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_ends_the_wait_for_the_next_reconcile() {
        static TIMES: Mutex<Vec<Instant>> = Mutex::new(Vec::new());
        fn reconcile(_: Arc<DeserializeGuard<App>>, _: Arc<Context>) -> BoxFuture<'static, Result<Action, Error>> {
            async {
                TIMES.lock().push(Instant::now());
                sleep(Duration::from_secs(1)).await;
                Ok(Action::requeue(Duration::from_secs(60)))
            }
            .boxed()
        }
        let context = context(MockApi::default().client()).0.shared();
        let (queue, queued) = mpsc::unbounded_channel();
        let (stop, began) = (CancellationToken::new(), Instant::now());
        // The two events during the first reconcile cause one further reconcile.
        let events = async {
            for seconds in [0.0, 0.5, 0.2, 10.0] {
                sleep(Duration::from_secs_f64(seconds)).await;
                queue.send(NamespacedName::new("shop", "shop")).unwrap();
            }
            sleep(Duration::from_secs(70)).await;
            stop.cancel();
        };
        tokio::join!(run("app", reconcile, app::report_panic, &context, get, queued, &stop), events);
        let times: Vec<_> = TIMES.lock().iter().map(|time| (*time - began).as_secs_f64().round()).collect();
        assert_eq!(times, [0.0, 1.0, 11.0, 72.0]);
    }

    #[tokio::test]
    async fn when_asked_to_stop_running_reconciles_end_and_no_others_begin() {
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        static MAY_END: Semaphore = Semaphore::const_new(0);
        fn reconcile(_: Arc<DeserializeGuard<App>>, _: Arc<Context>) -> BoxFuture<'static, Result<Action, Error>> {
            async {
                BEGUN.fetch_add(1, Ordering::SeqCst);
                // The semaphore is never closed.
                let _permit = MAY_END.acquire().await;
                ENDED.fetch_add(1, Ordering::SeqCst);
                Ok(Action::await_change())
            }
            .boxed()
        }
        let max = usize::from(MAX_CONCURRENT_RECONCILES);
        let context = context(MockApi::default().client()).0.shared();
        let (queue, queued) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let get = |name: &NamespacedName| get(name).filter(|_| name.name() != "gone");
        let stopping = async {
            for name in ["gone".to_owned()].into_iter().chain((0..max + 8).map(|number| number.to_string())) {
                queue.send(NamespacedName::new("shop", &name)).unwrap();
            }
            while BEGUN.load(Ordering::SeqCst) < max {
                tokio::task::yield_now().await;
            }
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            stop.cancel();
            tokio::task::yield_now().await;
            assert_eq!(ENDED.load(Ordering::SeqCst), 0);
            MAY_END.add_permits(max);
        };
        let controller = run("app", reconcile, app::report_panic, &context, get, queued, &stop);
        timeout(Duration::from_secs(60), async { tokio::join!(controller, stopping) }).await.unwrap();
        assert_eq!((BEGUN.load(Ordering::SeqCst), ENDED.load(Ordering::SeqCst)), (max, max));
    }

    #[tokio::test]
    async fn no_reconcile_begins_after_the_stop() {
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        fn reconcile(_: Arc<DeserializeGuard<App>>, _: Arc<Context>) -> BoxFuture<'static, Result<Action, Error>> {
            BEGUN.fetch_add(1, Ordering::SeqCst);
            future::ready(Ok(Action::await_change())).boxed()
        }
        let context = context(MockApi::default().client()).0.shared();
        // `select!` chooses at random if both the stop and the queue are ready.
        for _ in 0..50 {
            let (queue, queued) = mpsc::unbounded_channel();
            queue.send(NamespacedName::new("shop", "1")).unwrap();
            let stop = CancellationToken::new();
            stop.cancel();
            run("app", reconcile, app::report_panic, &context, get, queued, &stop).await;
        }
        assert_eq!(BEGUN.load(Ordering::SeqCst), 0);
    }
}
