//! Starts watches, probe, Lease and controllers, and joins them.

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
use latchkey_trace::Export;
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
    app::{
        self,
        status::{Told, Written},
    },
    args::RunArgs,
    context::Context,
    error::{Chain, Error, Failures},
    facts::Settings,
    leader::{self, FenceLayer, LeaseOptions},
    metrics::{Metrics, RequestsLayer},
    orphans,
    pace::Pace,
    panics::{Panicked, catch_async},
    probe::{Probe, Wake},
    provider,
    release::{self, Releases},
    telemetry,
    traced::{self, TracedLayer},
    watch::{self, Objects, Wakes},
};

/// Reconciles at a time (design, Operator).
const RECONCILES: u16 = 32;
/// An API server that does not answer within this is asked again. Longer than a watch's 30 s and its last event.
const READ_TIMEOUT: Duration = Duration::from_secs(40);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// What the servers tell is taken in so many at a time.
const WAKES: usize = 10_000;
const COUNT_PODS: Duration = Duration::from_secs(5);
/// What runs when the process is asked to end may take so long.
const FINISH: Duration = Duration::from_secs(10);

/// Runs until asked to end, or until the Lease is lost.
pub(crate) fn run(args: RunArgs) -> ExitCode {
    let export = match Export::from_env("latchkey-operator", env!("CARGO_PKG_VERSION")) {
        Ok(export) => export,
        Err(error) => {
            eprintln!("latchkey-operator: {}", Chain(&error));
            return ExitCode::from(2);
        }
    };
    if let Err(error) = telemetry::start(&args.log, args.log_format, export.as_ref()) {
        eprintln!("latchkey-operator: {error}");
        return ExitCode::from(2);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(operate(args)));
    if let Some(export) = export {
        export.finish();
    }
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!(error = %Chain(error.as_ref()), "the operator ends");
            ExitCode::FAILURE
        }
    }
}

async fn operate(args: RunArgs) -> Result<()> {
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .map_err(|_| anyhow::anyhow!("a TLS provider is installed already"))?;
    if args.base_url.as_str().starts_with("http://") && !args.allow_insecure {
        bail!("--base-url is http; use https, or --allow-insecure for development");
    }
    let mut config = Config::infer().await.context("no cluster: set KUBECONFIG, or run in a pod")?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // Below the fence, and with waits of minutes: whoever asks here tries again by itself.
    config.default_retry = false;
    let metrics = Metrics::default();
    let health = Health::new(&watch::WATCHES);
    let stop = CancellationToken::new();
    let listener = tokio::net::TcpListener::bind(args.ops_addr)
        .await
        .with_context(|| format!("cannot listen on {} (--ops-addr)", args.ops_addr))?;
    let operations = tokio::spawn(admin::serve(listener, health.clone(), metrics.clone(), stop.clone()));

    // A standby watches too, so that it can act at once.
    let reader = ClientBuilder::try_from(config.clone())?.with_layer(&RequestsLayer::new(&metrics)).build();
    let (wakes, mut queues) = Wakes::new();
    let (objects, watches) =
        watch::start(&reader, &args.namespace, &args.watch_namespaces, args.limits(), &health, &wakes);
    let mut watching = select_all(watches);
    let (probe_wakes, told) = mpsc::unbounded_channel();
    let (probe, _probing) =
        Probe::start(reader.clone(), &args.namespace, &args.server_service, probe_wakes, stop.clone());
    tokio::spawn(pass_on(told, objects.clone(), wakes.clone()));
    tokio::spawn(count_pods(probe.clone(), metrics.clone()));

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let asked_to_end = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::pin!(asked_to_end);

    metrics.leader(&args.lease, false);
    let lease = LeaseOptions::new(&args.namespace, &args.lease, &args.identity);
    let mut held = tokio::select! {
        held = leader::acquire(reader, lease) => held,
        never = queues.drain() => match never {},
        _ = &mut watching => bail!("a watch ended"),
        () = &mut asked_to_end => return Ok(()),
    };
    health.leader(true);
    metrics.leader(&args.lease, true);
    info!(lease = args.lease, identity = args.identity, "this operator acts");
    let writer = ClientBuilder::try_from(config)?
        .with_layer(&RequestsLayer::new(&metrics))
        .with_layer(&TracedLayer)
        .with_layer(&FenceLayer::new(held.fence()))
        .build();
    let context = Context {
        settings: Settings { base_url: args.base_url, allow_insecure: args.allow_insecure },
        namespace: args.namespace,
        reporter: Context::reporter(&args.identity),
        client: writer,
        objects: objects.clone(),
        wakes: wakes.clone(),
        probe: probe.clone(),
        pace: Pace::new(),
        written: Written::default(),
        told: Told::default(),
        releases: Releases::default(),
        requests_end: Duration::from_secs(args.requests_end_seconds),
        failures: Failures::default(),
        metrics: metrics.clone(),
        now,
    }
    .shared();

    let controllers = async {
        synced(&objects, &health).await;
        probe.wait_settled().await;
        info!("every watch has told all, and every server pod what it serves");
        wakes.everything(&objects);
        let apps =
            control("app", app::reconcile, app::report_panic, &context, objects.apps.clone(), queues.apps, &stop);
        let providers = control(
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
        // It would go on blind.
        _ = &mut watching => bail!("a watch ended"),
        lost = held.lost() => {
            error!(reason = %lost, "the Lease is lost");
            true
        }
        () = &mut asked_to_end => false,
    };
    if lost {
        // Another one acts: nothing more is written, not even what is on its way. A new process waits for its turn.
        bail!("the Lease is lost; another operator acts");
    }
    info!("ending");
    stop.cancel();
    let _ = tokio::time::timeout(FINISH, controllers).await;
    held.release().await;
    let _ = operations.await;
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the one place where the operator takes the time")]
fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

/// Nothing is judged on a part of what is there.
async fn synced(objects: &Objects, health: &Health) {
    // A writer is gone only with the process.
    let _ = objects.apps.wait_until_ready().await;
    let _ = objects.providers.wait_until_ready().await;
    health.wait_synced().await;
}

/// What the servers tell wakes whom it concerns.
async fn pass_on(mut told: mpsc::UnboundedReceiver<Wake>, objects: Objects, wakes: Wakes) {
    let mut some = Vec::new();
    while told.recv_many(&mut some, WAKES).await > 0 {
        let (mut apps, mut all) = (HashSet::new(), false);
        for wake in some.drain(..) {
            match wake {
                Wake::Apps(named) => apps.extend(named),
                Wake::All => all = true,
                Wake::Provider { namespace, name } => wakes.provider_named(&namespace, &name),
            }
        }
        if all {
            wakes.all(&objects);
        } else {
            apps.iter().for_each(|id| wakes.apps_with_id(&objects, id));
        }
    }
}

/// Keeps the metric of the server pods.
async fn count_pods(probe: Probe, metrics: Metrics) {
    let mut ticks = tokio::time::interval(COUNT_PODS);
    loop {
        ticks.tick().await;
        let (counting, silent) = probe.pods();
        metrics.server_pods(counting, silent);
    }
}

/// Reconciles what is named, until asked to stop.
async fn control<K, F, R>(
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
    context.metrics.max_concurrent(name, RECONCILES);
    let named = stream::poll_fn(move |cx| queue.poll_recv(cx))
        .map(Ok::<_, Infallible>)
        .take_until(stop.clone().cancelled_owned());
    let one = move |object: Arc<K>, context: Arc<Context>| {
        // A task of its own, so that both cores work.
        let task = tokio::spawn(async move {
            let began = Instant::now();
            let active = context.metrics.active(name);
            let place = place(&*object);
            let span = traced::reconcile(name, object.meta());
            let run = catch_async(reconcile(Arc::clone(&object), Arc::clone(&context)));
            let result = run.instrument(span.clone()).await.unwrap_or_else(|panicked| Err(panicked.into()));
            traced::reconciled(&span, &result);
            drop(active);
            match &result {
                Ok(_) => {
                    context.failures.forget(&place);
                    context.metrics.reconciled(name, "success", began.elapsed());
                }
                Err(error) => {
                    warn!(
                        object = place,
                        error = %Chain(error),
                        "a reconcile failed; it is tried again"
                    );
                    context.metrics.reconciled(name, error.kind().as_str(), began.elapsed());
                }
            }
            if let Err(Error::Panicked(panicked)) = &result {
                context.metrics.panicked(name);
                let report = catch_async(report_panic(object, Arc::clone(&context), panicked.clone())).await;
                if let Err(error) = report.unwrap_or_else(|panicked| Err(panicked.into())) {
                    warn!(object = place, error = %Chain(&error), "the status does not say yet that a reconcile failed");
                }
            }
            result
        });
        Box::pin(async move { task.await.unwrap_or_else(|_| Err(Panicked::last().into())) })
    };
    let after_error = |object: Arc<K>, error: &Error, context: Arc<Context>| {
        Action::requeue(context.failures.retry_after(&place(&*object), error.kind()))
    };
    let config = controller::Config::default().concurrency(RECONCILES);
    controller::applier(one, after_error, Arc::clone(context), store, named, config).for_each(|_| async {}).await;
}

fn place<K: Resource<DynamicType = ()>>(object: &K) -> String {
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
        app::scripted::{Call, Script, context},
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
    async fn a_panic_is_the_fault_of_its_object_and_the_others_go_on() {
        const STATUS: &str = "/apis/latchkey.dev/v1alpha1/namespaces/shop/apps/bomb/status";
        const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/shop/events";
        let written = |call: &Call| {
            let mut answer = call.body.clone();
            answer["metadata"]["resourceVersion"] = json!("8");
            (StatusCode::OK, answer)
        };
        let script = Script::default()
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
        let controller = control("app", reconcile, app::report_panic, &context, store, named, &stop);
        let says = |line: &str| context.metrics.page().unwrap().contains(&format!("{line}\n"));
        let panics =
            |times: u32| says(&format!("controller_runtime_reconcile_panics_total{{controller=\"app\"}} {times}"));
        let scene = async {
            // It is tried again, and the other App is reconciled after its first panic.
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
        let calls = script.calls();
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
