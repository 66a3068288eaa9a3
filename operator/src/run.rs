//! Starts the watches, the monitor of the servers, leader election and the controllers, and stops them.

use std::{collections::HashSet, convert::Infallible, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt, future::select_all, stream};
use kube::{
    Config, Resource,
    client::ClientBuilder,
    runtime::{
        controller::{self, Action},
        reflector::{ObjectRef, Store},
    },
};
use latchkey_telemetry::LogArgs;
use time::OffsetDateTime;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info, warn};

use crate::{
    admin::{self, Health},
    app,
    args::RunArgs,
    context::Context,
    error::{Error, ErrorChain, Failures},
    facts::Settings,
    leader::{self, FenceLayer, LeaseOptions},
    metrics::{Metrics, RequestsLayer},
    monitor::{Monitor, MonitorEvent},
    orphans,
    panics::{Panicked, catch_async},
    provider,
    rate_limiter::RateLimiter,
    release::{self, Releases},
    report_throttle::ReportThrottle,
    spans::{self, TraceLayer},
    telemetry,
    watch::{self, ClusterState, ReconcileQueue},
    written_statuses::WrittenStatuses,
};

/// Concurrent reconciles per controller.
const MAX_CONCURRENT_RECONCILES: u16 = 32;
/// Longer than a watch's 30 s and its last event. A request without a response within this time is retried.
const READ_TIMEOUT: Duration = Duration::from_secs(40);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// At most this many notifications of the monitor are handled at once.
const MAX_EVENT_BATCH: usize = 10_000;
const POD_METRICS_INTERVAL: Duration = Duration::from_secs(5);
/// How long running work can take after the process was asked to stop.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs until asked to stop, or until the Lease is lost.
pub(crate) fn run(args: RunArgs, log: &LogArgs) -> ExitCode {
    let telemetry = match telemetry::init(log) {
        Ok(telemetry) => telemetry,
        Err(error) => {
            eprintln!("latchkey-operator: {}", ErrorChain(&error));
            return ExitCode::from(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(run_operator(args)));
    telemetry.shutdown();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!(error = %ErrorChain(error.as_ref()), "the operator failed");
            ExitCode::FAILURE
        }
    }
}

async fn run_operator(args: RunArgs) -> Result<()> {
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is already installed"))?;
    if args.base_url.as_str().starts_with("http://") && !args.allow_insecure {
        bail!("--base-url is http; use https, or --allow-insecure for development");
    }
    let mut config = Config::infer().await.context("no cluster: set KUBECONFIG, or run in a pod")?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // kube's retries would run below the fence, with waits of minutes. Every caller here retries by itself.
    config.default_retry = false;
    let metrics = Metrics::default();
    let health = Health::new(watch::WATCHES);
    let stop = CancellationToken::new();
    let listener = tokio::net::TcpListener::bind(args.ops_addr)
        .await
        .with_context(|| format!("cannot listen on {} (--ops-addr)", args.ops_addr))?;
    let operations = tokio::spawn(admin::serve(listener, health.clone(), metrics.clone(), stop.clone()));

    // A standby also watches, so that it can take over at once.
    let reader = ClientBuilder::try_from(config.clone())?.with_layer(&RequestsLayer::new(&metrics)).build();
    let (queue, mut queues) = ReconcileQueue::new();
    let (objects, watches) =
        watch::start(&reader, &args.namespace, &args.watch_namespaces, args.limits(), &health, &queue);
    let mut watching = select_all(watches);
    let (event_sender, monitor_events) = mpsc::unbounded_channel();
    let (probe, _probing) =
        Monitor::start(reader.clone(), &args.namespace, &args.server_service, event_sender, stop.clone());
    tokio::spawn(forward_events(monitor_events, objects.clone(), queue.clone()));
    tokio::spawn(update_pod_metrics(probe.clone(), metrics.clone()));

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let asked_to_end = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::pin!(asked_to_end);

    metrics.set_leader(&args.lease, false);
    let lease = LeaseOptions::new(&args.namespace, &args.lease, &args.identity);
    let mut held = tokio::select! {
        held = leader::acquire(reader, lease) => held,
        never = queues.discard_all() => match never {},
        _ = &mut watching => bail!("a watch ended"),
        () = &mut asked_to_end => return Ok(()),
    };
    health.set_leader(true);
    metrics.set_leader(&args.lease, true);
    info!(lease = args.lease, identity = args.identity, "this operator is the leader");
    let writer = ClientBuilder::try_from(config)?
        .with_layer(&RequestsLayer::new(&metrics))
        .with_layer(&TraceLayer)
        .with_layer(&FenceLayer::new(held.fence()))
        .build();
    let context = Context {
        settings: Settings { base_url: args.base_url, allow_insecure: args.allow_insecure },
        namespace: args.namespace,
        reporter: Context::reporter(&args.identity),
        client: writer,
        objects: objects.clone(),
        reconcile_queue: queue.clone(),
        monitor: probe.clone(),
        rate_limiter: RateLimiter::new(),
        written_statuses: WrittenStatuses::default(),
        progress_throttle: ReportThrottle::default(),
        releases: Releases::default(),
        request_drain: Duration::from_secs(args.requests_end_seconds),
        failures: Failures::default(),
        metrics: metrics.clone(),
        now,
    }
    .shared();

    let controllers = async {
        wait_synced(&objects, &health).await;
        probe.wait_settled().await;
        info!("every watch is synced, and every server pod has reported what it serves");
        queue.enqueue_everything(&objects);
        let apps = run_controller(
            "app",
            app::reconcile,
            app::report_panic,
            &context,
            objects.apps.clone(),
            queues.apps,
            &stop,
        );
        let providers = run_controller(
            "provider",
            provider::reconcile::reconcile,
            provider::reconcile::report_panic,
            &context,
            objects.providers.clone(),
            queues.providers,
            &stop,
        );
        tokio::join!(
            apps,
            providers,
            orphans::run(Arc::clone(&context), queues.orphans, &stop),
            release::run(Arc::clone(&context), queues.releases, &stop),
        );
    };
    tokio::pin!(controllers);
    let lost = tokio::select! {
        () = &mut controllers => false,
        // Without a watch it would act on outdated state.
        _ = &mut watching => bail!("a watch ended"),
        lost = held.lost() => {
            error!(reason = %lost, "the Lease is lost");
            true
        }
        () = &mut asked_to_end => false,
    };
    if lost {
        // Another replica leads: nothing more is written, not even by requests in flight. A new process becomes a
        // candidate.
        bail!("the Lease is lost; another operator is the leader");
    }
    info!("stopping");
    stop.cancel();
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, controllers).await;
    held.release().await;
    let _ = operations.await;
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the one place where the operator reads the clock")]
fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

/// Waits until everything has been listed. Decisions on partial state would be wrong.
async fn wait_synced(objects: &ClusterState, health: &Health) {
    // The writers are dropped only when the process ends.
    let _ = objects.apps.wait_until_ready().await;
    let _ = objects.providers.wait_until_ready().await;
    health.wait_synced().await;
}

/// Queues the reconciles that the monitor asks for.
async fn forward_events(
    mut events: mpsc::UnboundedReceiver<MonitorEvent>,
    objects: ClusterState,
    queue: ReconcileQueue,
) {
    let mut batch = Vec::new();
    while events.recv_many(&mut batch, MAX_EVENT_BATCH).await > 0 {
        let (mut apps, mut all) = (HashSet::new(), false);
        for wake in batch.drain(..) {
            match wake {
                MonitorEvent::Apps(named) => apps.extend(named),
                MonitorEvent::AllApps => all = true,
                MonitorEvent::Provider { namespace, name } => queue.enqueue_provider_named(&namespace, &name),
            }
        }
        if all {
            queue.enqueue_all_apps(&objects);
        } else {
            apps.iter().for_each(|id| queue.enqueue_apps_with_id(&objects, id));
        }
    }
}

/// Updates the metric of the server pods.
async fn update_pod_metrics(probe: Monitor, metrics: Metrics) {
    let mut ticks = tokio::time::interval(POD_METRICS_INTERVAL);
    loop {
        ticks.tick().await;
        let (counting, silent) = probe.pod_counts();
        metrics.set_server_pods(counting, silent);
    }
}

/// Reconciles the queued objects until asked to stop.
async fn run_controller<K, F, R>(
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
    let named = stream::poll_fn(move |cx| queue.poll_recv(cx))
        .map(Ok::<_, Infallible>)
        .take_until(stop.clone().cancelled_owned());
    let one = move |object: Arc<K>, context: Arc<Context>| {
        // A task of its own, so that reconciles run on all threads.
        let task = tokio::spawn(async move {
            let began = Instant::now();
            let active = context.metrics.track_active(name);
            let place = object_key(&*object);
            let span = spans::reconcile_span(name, object.meta());
            let run = catch_async(reconcile(Arc::clone(&object), Arc::clone(&context)));
            let result = run.instrument(span.clone()).await.unwrap_or_else(|panicked| Err(panicked.into()));
            spans::record_outcome(&span, &result);
            drop(active);
            match &result {
                Ok(_) => {
                    context.failures.reset(&place);
                    context.metrics.record_reconcile(name, "success", began.elapsed());
                }
                Err(error) => {
                    warn!(
                        object = place,
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
                    warn!(object = place, error = %ErrorChain(&error), "failed to report the panic in the status");
                }
            }
            result
        });
        Box::pin(async move { task.await.unwrap_or_else(|_| Err(Panicked::take_last().into())) })
    };
    let after_error = |object: Arc<K>, error: &Error, context: Arc<Context>| {
        Action::requeue(context.failures.retry_after(&object_key(&*object), error.kind()))
    };
    let config = controller::Config::default().concurrency(MAX_CONCURRENT_RECONCILES);
    controller::applier(one, after_error, Arc::clone(context), store, named, config).for_each(|_| async {}).await;
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
    use futures::{FutureExt, future::BoxFuture};
    use http::{Method, StatusCode};
    use kube::runtime::watcher::Event;
    use latchkey_crds::app::App;
    use serde_json::json;

    use super::*;
    use crate::{
        app::mock_api::{MockApi, ReceivedCall, context},
        watch::Guarded,
    };

    fn reconcile(app: Arc<Guarded<App>>, _: Arc<Context>) -> BoxFuture<'static, Result<Action, Error>> {
        async move {
            assert!(app.meta().name.as_deref() != Some("bomb"), "{}", "hush");
            Ok(Action::await_change())
        }
        .boxed()
    }

    #[tokio::test]
    async fn a_panic_fails_only_its_object() {
        const STATUS: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/bomb/status";
        const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let written = |call: &ReceivedCall| {
            let mut answer = call.body.clone();
            answer["metadata"]["resourceVersion"] = json!("8");
            (StatusCode::OK, answer)
        };
        let script = MockApi::default()
            .expect(Method::PATCH, STATUS, written)
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
        let (queue, named) = mpsc::unbounded_channel();
        let wake = |name: &str| queue.send(ObjectRef::<Guarded<App>>::new(name).within("shop")).unwrap();
        wake("bomb");
        let stop = CancellationToken::new();
        let store = context.objects.apps.clone();
        let controller = run_controller("app", reconcile, app::report_panic, &context, store, named, &stop);
        let says = |line: &str| context.metrics.encode().unwrap().contains(&format!("{line}\n"));
        let panics =
            |times: u32| says(&format!("controller_runtime_reconcile_panics_total{{controller=\"app\"}} {times}"));
        let scene = async {
            // It is retried, and the other App is reconciled after the first panic.
            while panics(0) {
                tokio::task::yield_now().await;
            }
            wake("good");
            while !says("controller_runtime_reconcile_total{controller=\"app\",result=\"success\"} 1") || !panics(3) {
                tokio::task::yield_now().await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::select! {
            () = controller => panic!("the controller ended"),
            ended = tokio::time::timeout(limit, scene) => ended.expect("both are reconciled"),
        }
        // However often it panics, the status is written once.
        let calls = script.finish();
        assert_eq!(calls.len(), 2, "the status and its Event: {calls:?}");
        let status = &calls[0].body["status"];
        let said = |type_: &str| {
            let conditions = status["conditions"].as_array().unwrap();
            conditions.iter().find(|condition| condition["type"] == type_).unwrap().clone()
        };
        assert_eq!(
            (&said("Accepted")["status"], &said("Accepted")["reason"]),
            (&json!("False"), &json!("InternalError"))
        );
        assert_eq!((&said("Ready")["status"], &said("Ready")["reason"]), (&json!("False"), &json!("InternalError")));
        assert_eq!(status["observedGeneration"], 3);
        let message = said("Ready")["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("the operator failed on this object: a panic at "), "{message}");
        assert!(!serde_json::to_string(&calls[0].body).unwrap().contains("hush"));
    }
}
