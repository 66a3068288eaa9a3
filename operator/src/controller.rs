//! Reconciles the queued objects of one kind: concurrency, retries, metrics and panics.

use std::{convert::Infallible, sync::Arc};

use futures::{StreamExt, stream};
use kube::{
    Resource,
    runtime::{
        controller::{self, Action},
        reflector::{ObjectRef, Store},
    },
};
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, warn};

use crate::{
    context::Context,
    error::{Error, ErrorChain},
    panics::{Panicked, catch_async},
    spans,
};

/// Concurrent reconciles per controller.
const MAX_CONCURRENT_RECONCILES: u16 = 32;

/// Reconciles the queued objects until asked to stop.
pub(crate) async fn run<K, F, R>(
    name: &'static str,
    reconcile: fn(Arc<K>, Arc<Context>) -> F,
    report_panic: fn(Arc<K>, Arc<Context>, Panicked) -> R,
    context: &Arc<Context>,
    store: Store<K>,
    mut queue: mpsc::UnboundedReceiver<ObjectRef<K>>,
    stop: &CancellationToken,
) where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
    F: Future<Output = Result<Action, Error>> + Send + 'static,
    R: Future<Output = Result<(), Error>> + Send + 'static,
{
    context.metrics.set_max_concurrent(name, MAX_CONCURRENT_RECONCILES);
    let queued = stream::poll_fn(move |cx| queue.poll_recv(cx))
        .map(Ok::<_, Infallible>)
        .take_until(stop.clone().cancelled_owned());
    let reconcile_one = move |object: Arc<K>, context: Arc<Context>| {
        // Each reconcile has its own task, so that reconciles run on all threads.
        let task = tokio::spawn(async move {
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
        });
        Box::pin(async move { task.await.unwrap_or_else(|_| Err(Panicked::take_last().into())) })
    };
    let retry_later = |object: Arc<K>, error: &Error, context: Arc<Context>| {
        Action::requeue(context.failures.retry_after(&object_key(&*object), error.kind()))
    };
    let config = controller::Config::default().concurrency(MAX_CONCURRENT_RECONCILES);
    controller::applier(reconcile_one, retry_later, Arc::clone(context), store, queued, config)
        .for_each(|_| async {})
        .await;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::{FutureExt, future::BoxFuture};
    use http::{Method, StatusCode};
    use kube::{core::DeserializeGuard, runtime::watcher::Event};
    use latchkey_crds::app::App;
    use serde_json::json;

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
        let enqueue = |name: &str| queue.send(ObjectRef::<DeserializeGuard<App>>::new(name).within("shop")).unwrap();
        enqueue("bomb");
        let stop = CancellationToken::new();
        let store = context.objects.apps.clone();
        let controller = run("app", reconcile, app::report_panic, &context, store, queued, &stop);
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
            ended = tokio::time::timeout(limit, both_reconciles) => ended.expect("both are reconciled"),
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
}
