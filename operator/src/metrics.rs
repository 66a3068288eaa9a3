//! The operator's metrics. If controller-runtime has the same metric, the operator uses the name from
//! controller-runtime, so that existing dashboards work.

use std::{
    sync::Arc,
    task::{Context as TaskContext, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use http::{Request, Response};
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use tower::{Layer, Service};

/// A handle to all metrics.
#[derive(Clone)]
pub(crate) struct Metrics(Arc<MetricsState>);

struct MetricsState {
    registry: Registry,
    reconciles: Family<ReconcileLabels, Counter>,
    reconcile_errors: Family<ControllerLabels, Counter>,
    reconcile_panics: Family<ControllerLabels, Counter>,
    reconcile_seconds: Family<ControllerLabels, Histogram, fn() -> Histogram>,
    active: Family<ControllerLabels, Gauge>,
    max_concurrent: Family<ControllerLabels, Gauge>,
    leader: Family<LeaseLabels, Gauge>,
    requests: Family<RequestLabels, Counter>,
    publishes: Counter,
    status_writes: Counter,
    server_pods: Family<PodLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ControllerLabels {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReconcileLabels {
    controller: &'static str,
    /// `success`, or the kind of the error.
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LeaseLabels {
    name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    /// The status code of the response, or `<error>` without a response, as in client-go.
    code: String,
    method: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PodLabels {
    /// `counting`: all serving pods, including the silent ones. `silent`: the silent serving pods.
    state: &'static str,
}

/// While a value of this type exists, it counts as one running reconcile in the metrics.
pub(crate) struct ActiveReconcile(Gauge);

/// Counts the requests that a Kubernetes client sends.
#[derive(Clone)]
pub(crate) struct RequestsLayer(Metrics);

#[derive(Clone)]
pub(crate) struct CountedService<S> {
    inner: S,
    metrics: Metrics,
}

/// The upper bounds of the histogram buckets, in seconds. The smallest fits a reconcile with nothing to do, the largest
/// fits a reconcile that waits for servers.
const RECONCILE_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

fn reconcile_histogram() -> Histogram {
    Histogram::new(RECONCILE_BUCKETS)
}

// === impl Metrics ===

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let reconciles = Family::<ReconcileLabels, Counter>::default();
        let reconcile_errors = Family::<ControllerLabels, Counter>::default();
        let reconcile_panics = Family::<ControllerLabels, Counter>::default();
        let reconcile_seconds: Family<_, _, fn() -> Histogram> = Family::new_with_constructor(reconcile_histogram);
        let active = Family::<ControllerLabels, Gauge>::default();
        let max_concurrent = Family::default();
        let leader = Family::default();
        let requests = Family::default();
        let publishes = Counter::default();
        let status_writes = Counter::default();
        let server_pods = Family::default();
        registry.register("controller_runtime_reconcile", "Reconciles by result", reconciles.clone());
        registry.register("controller_runtime_reconcile_errors", "Reconciles that failed", reconcile_errors.clone());
        registry.register("controller_runtime_reconcile_panics", "Reconciles that panicked", reconcile_panics.clone());
        registry.register(
            "controller_runtime_reconcile_time_seconds",
            "How long a reconcile takes",
            reconcile_seconds.clone(),
        );
        registry.register("controller_runtime_active_workers", "Running reconciles", active.clone());
        registry.register(
            "controller_runtime_max_concurrent_reconciles",
            "Maximum number of concurrent reconciles",
            max_concurrent.clone(),
        );
        registry.register("leader_election_master_status", "1 if this operator holds the Lease", leader.clone());
        registry.register("rest_client_requests", "Requests to the API server", requests.clone());
        registry.register("latchkey_operator_publishes", "Rendered Apps written", publishes.clone());
        registry.register("latchkey_operator_status_writes", "Statuses written", status_writes.clone());
        registry.register("latchkey_operator_server_pods", "Server pods by state", server_pods.clone());
        // Creates these metrics with the value 0 at the start, so that their first increase is visible.
        for controller in ["app", "provider", "client"] {
            let labels = ControllerLabels { controller };
            drop(reconciles.get_or_create(&ReconcileLabels { controller, result: "success" }));
            drop(reconcile_errors.get_or_create(&labels));
            drop(reconcile_panics.get_or_create(&labels));
            drop(reconcile_seconds.get_or_create(&labels));
            drop(active.get_or_create(&labels));
        }
        Self(Arc::new(MetricsState {
            registry,
            reconciles,
            reconcile_errors,
            reconcile_panics,
            reconcile_seconds,
            active,
            max_concurrent,
            leader,
            requests,
            publishes,
            status_writes,
            server_pods,
        }))
    }
}

impl Metrics {
    /// Returns the `/metrics` page, in the OpenMetrics text format.
    pub(crate) fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.0.registry)?;
        Ok(page)
    }

    pub(crate) fn record_publish(&self) {
        self.0.publishes.inc();
    }

    pub(crate) fn record_status_write(&self) {
        self.0.status_writes.inc();
    }

    pub(crate) fn set_leader(&self, lease: &str, is_leader: bool) {
        self.0.leader.get_or_create(&LeaseLabels { name: lease.to_owned() }).set(is_leader.into());
    }

    pub(crate) fn set_max_concurrent(&self, controller: &'static str, max: u16) {
        self.0.max_concurrent.get_or_create(&ControllerLabels { controller }).set(max.into());
    }

    /// Counts a running reconcile until the returned value is dropped.
    pub(crate) fn track_active(&self, controller: &'static str) -> ActiveReconcile {
        let gauge = self.0.active.get_or_create_owned(&ControllerLabels { controller });
        gauge.inc();
        ActiveReconcile(gauge)
    }

    pub(crate) fn record_reconcile(&self, controller: &'static str, result: &'static str, took: Duration) {
        self.0.reconciles.get_or_create(&ReconcileLabels { controller, result }).inc();
        let labels = ControllerLabels { controller };
        if result != "success" {
            self.0.reconcile_errors.get_or_create(&labels).inc();
        }
        self.0.reconcile_seconds.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn record_panic(&self, controller: &'static str) {
        self.0.reconcile_panics.get_or_create(&ControllerLabels { controller }).inc();
    }

    pub(crate) fn set_server_pods(&self, serving: usize, silent: usize) {
        for (state, number) in [("counting", serving), ("silent", silent)] {
            self.0.server_pods.get_or_create(&PodLabels { state }).set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }
}

impl Drop for ActiveReconcile {
    fn drop(&mut self) {
        self.0.dec();
    }
}

// === impl RequestsLayer ===

impl RequestsLayer {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        Self(metrics.clone())
    }
}

impl<S> Layer<S> for RequestsLayer {
    type Service = CountedService<S>;

    fn layer(&self, inner: S) -> CountedService<S> {
        CountedService { inner, metrics: self.0.clone() }
    }
}

impl<S, B, A> Service<Request<B>> for CountedService<S>
where
    S: Service<Request<B>, Response = Response<A>, Future: Send + 'static>,
    S::Error: 'static,
    A: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let method = request.method().to_string();
        let requests = self.metrics.0.requests.clone();
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await;
            let code = match &response {
                Ok(response) => response.status().as_str().to_owned(),
                Err(_) => "<error>".to_owned(),
            };
            requests.get_or_create(&RequestLabels { code, method }).inc();
            response
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_have_controller_runtime_names() {
        let metrics = Metrics::default();
        metrics.record_reconcile("app", "forbidden", Duration::from_millis(3));
        let running = metrics.track_active("app");
        metrics.set_leader("latchkey-operator", true);
        metrics.set_server_pods(2, 1);
        let page = metrics.encode().unwrap();
        for line in [
            "controller_runtime_reconcile_total{controller=\"app\",result=\"forbidden\"} 1",
            "controller_runtime_reconcile_errors_total{controller=\"app\"} 1",
            "controller_runtime_active_workers{controller=\"app\"} 1",
            "leader_election_master_status{name=\"latchkey-operator\"} 1",
            "latchkey_operator_server_pods{state=\"silent\"} 1",
        ] {
            assert!(page.contains(line), "{line}\n{page}");
        }
        drop(running);
        assert!(metrics.encode().unwrap().contains("controller_runtime_active_workers{controller=\"app\"} 0"));
    }
}
