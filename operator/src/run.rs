//! Starts the watches, the monitor of the servers, leader election and the controllers, and stops them.

use std::{collections::HashSet, io, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use futures::future::select_all;
use kube::{Client, Config, client::ClientBuilder};
use latchkey_telemetry::LogArgs;
use time::OffsetDateTime;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::{
    admin::{self, Health},
    app,
    args::RunArgs,
    client::{self, changes::AppTriggers},
    context::Context,
    controller,
    error::{ErrorChain, Failures},
    facts::Settings,
    leader::{self, FenceLayer, LeaseOptions},
    metrics::{Metrics, RequestsLayer},
    monitor::{Monitor, MonitorEvent},
    orphans, provider,
    rate_limiter::RateLimiter,
    release::{self, Releases},
    report_throttle::ReportThrottle,
    spans::TraceLayer,
    telemetry,
    watch::{self, ClusterState, NamespacedName, QueueReceivers, ReconcileQueue},
    written_statuses::WrittenStatuses,
};

/// The maximum wait for data from the API server. It is longer than a watch lasts (30 s). A request that waits longer
/// fails and is retried.
const READ_TIMEOUT: Duration = Duration::from_secs(40);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of events of the monitor that are handled together.
const MAX_EVENT_BATCH: usize = 10_000;
const POD_METRICS_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum time for which active work can continue after the process was asked to stop.
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
    let config = cluster_config().await?;
    let metrics = Metrics::default();
    let health = Health::new(&watch::watch_names(&args.watch_namespaces));
    let stop = CancellationToken::new();
    let listener = tokio::net::TcpListener::bind(args.ops_addr)
        .await
        .with_context(|| format!("cannot listen on {} (--ops-addr)", args.ops_addr))?;
    let ops_server = tokio::spawn(admin::serve(listener, health.clone(), metrics.clone(), stop.clone()));

    // A standby also watches, so that it can take over immediately.
    let reader = ClientBuilder::try_from(config.clone())?.with_layer(&RequestsLayer::new(&metrics)).build();
    let (queue, mut receivers) = ReconcileQueue::new();
    let (objects, watches) =
        watch::start(&reader, &args.namespace, &args.watch_namespaces, args.limits(), &health, &queue);
    let mut watch_tasks = select_all(watches);
    let (event_sender, monitor_events) = mpsc::unbounded_channel();
    let (monitor, _monitor_task) =
        Monitor::start(reader.clone(), &args.namespace, &args.server_service, event_sender, stop.clone());
    tokio::spawn(forward_events(monitor_events, objects.clone(), queue.clone()));
    tokio::spawn(update_pod_metrics(monitor.clone(), metrics.clone()));
    let stop_requested = stop_signal()?;
    tokio::pin!(stop_requested);

    metrics.set_leader(&args.lease, false);
    let lease = LeaseOptions::new(&args.namespace, &args.lease, &args.identity);
    let mut held_lease = tokio::select! {
        held_lease = leader::acquire(reader, lease) => held_lease,
        never = receivers.discard_all() => match never {},
        _ = &mut watch_tasks => bail!("a watch ended"),
        () = &mut stop_requested => return Ok(()),
    };
    health.set_leader(true);
    metrics.set_leader(&args.lease, true);
    info!(lease = args.lease, identity = args.identity, "this operator is the leader");
    let writer = ClientBuilder::try_from(config)?
        .with_layer(&RequestsLayer::new(&metrics))
        .with_layer(&TraceLayer)
        .with_layer(&FenceLayer::new(held_lease.fence()))
        .build();
    let context = new_context(args, writer, objects, queue, monitor, metrics);

    let controllers = run_controllers(context, receivers, &health, &stop);
    tokio::pin!(controllers);
    let is_lease_lost = tokio::select! {
        () = &mut controllers => false,
        // Without a watch the operator would act on outdated state.
        _ = &mut watch_tasks => bail!("a watch ended"),
        lost = held_lease.lost() => {
            error!(reason = %lost, "the Lease is lost");
            true
        }
        () = &mut stop_requested => false,
    };
    if is_lease_lost {
        // Another replica may be the leader now, so this process ends without finishing its work. The restarted process
        // becomes a candidate for the Lease again.
        bail!("the Lease is lost; another operator is the leader");
    }
    info!("stopping");
    stop.cancel();
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, controllers).await;
    held_lease.release().await;
    let _ = ops_server.await;
    Ok(())
}

/// Returns the configuration for the cluster of KUBECONFIG, or for the cluster in which this pod runs.
async fn cluster_config() -> Result<Config> {
    let mut config = Config::infer().await.context("no cluster: set KUBECONFIG, or run in a pod")?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    // By default, kube would retry a request that has already passed the fence (the check that this process holds the
    // Lease), possibly minutes later. Every caller here has its own retries.
    config.default_retry = false;
    Ok(config)
}

/// Handles SIGTERM and SIGINT from now on. The future ends with the first signal.
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Creates the context of the controllers. `client` can write only while this process is the leader.
fn new_context(
    args: RunArgs,
    client: Client,
    objects: ClusterState,
    reconcile_queue: ReconcileQueue,
    monitor: Monitor,
    metrics: Metrics,
) -> Arc<Context> {
    Context {
        settings: Settings { base_url: args.base_url, allow_insecure: args.allow_insecure },
        namespace: args.namespace,
        creates_client_secrets: args.client_secrets,
        reporter: Context::reporter(&args.identity),
        client,
        objects,
        reconcile_queue,
        monitor,
        rate_limiter: RateLimiter::new(),
        client_rate_limiter: RateLimiter::new(),
        app_triggers: AppTriggers::default(),
        written_statuses: WrittenStatuses::default(),
        progress_throttle: ReportThrottle::default(),
        releases: Releases::default(),
        request_drain: Duration::from_secs(args.requests_end_seconds),
        failures: Failures::default(),
        metrics,
        now,
    }
    .shared()
}

/// Waits until the state of the cluster and of the servers is known, then reconciles everything until asked to stop.
async fn run_controllers(context: Arc<Context>, queue: QueueReceivers, health: &Health, stop: &CancellationToken) {
    wait_synced(&context.objects, health).await;
    context.monitor.wait_settled().await;
    info!("every watch is synced, and every server pod has reported what it serves");
    // Drops the changes of Clients so far: all Apps are queued next, the reconcile of each App decides about all its
    // Clients, and the Clients that no App decides about are queued, too.
    while queue.client_changes.try_pop().is_some() {}
    context.reconcile_queue.enqueue_everything(&context.objects);
    let objects = &context.objects;
    let get_app = |app: &NamespacedName| objects.apps.get(&app.object_ref());
    let get_provider = |provider: &NamespacedName| objects.providers.get(&provider.object_ref());
    let get_client = |client: &NamespacedName| objects.clients.get(client).map(Arc::new);
    tokio::join!(
        controller::run("app", app::reconcile, app::report_panic, &context, get_app, queue.apps, stop),
        controller::run(
            "provider",
            provider::reconcile::reconcile,
            provider::reconcile::report_panic,
            &context,
            get_provider,
            queue.providers,
            stop,
        ),
        controller::run(
            "client",
            client::reconcile::reconcile,
            client::reconcile::report_panic,
            &context,
            get_client,
            queue.clients,
            stop,
        ),
        client::changes::run(Arc::clone(&context), queue.client_changes, stop),
        orphans::run(Arc::clone(&context), queue.orphans, stop),
        release::run(Arc::clone(&context), queue.releases, stop),
    );
}

#[expect(clippy::disallowed_methods, reason = "the one place where the operator reads the clock")]
fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

/// Waits until every watch has reported its first list of objects, because decisions from incomplete state would be
/// wrong.
async fn wait_synced(objects: &ClusterState, health: &Health) {
    // These waits fail only if the writers are dropped, which happens when the process ends.
    let _ = objects.apps.wait_until_ready().await;
    let _ = objects.providers.wait_until_ready().await;
    // The Clients are in their store before the watch counts as synced.
    health.wait_synced().await;
}

/// Queues the reconciles for which the monitor sends events.
async fn forward_events(
    mut events: mpsc::UnboundedReceiver<MonitorEvent>,
    objects: ClusterState,
    queue: ReconcileQueue,
) {
    let mut batch = Vec::new();
    while events.recv_many(&mut batch, MAX_EVENT_BATCH).await > 0 {
        let (mut apps, mut all_apps) = (HashSet::new(), false);
        for event in batch.drain(..) {
            match event {
                MonitorEvent::Apps(changed) => apps.extend(changed),
                MonitorEvent::AllApps => all_apps = true,
                MonitorEvent::Provider { namespace, name } => {
                    queue.enqueue_provider(NamespacedName::new(&namespace, &name));
                }
            }
        }
        if all_apps {
            queue.enqueue_all_apps(&objects);
        } else {
            apps.iter().for_each(|id| queue.enqueue_apps_with_id(&objects, id));
        }
    }
}

/// Updates the metric of the server pods.
async fn update_pod_metrics(monitor: Monitor, metrics: Metrics) {
    let mut ticks = tokio::time::interval(POD_METRICS_INTERVAL);
    loop {
        ticks.tick().await;
        let (serving, silent) = monitor.pod_counts();
        metrics.set_server_pods(serving, silent);
    }
}
