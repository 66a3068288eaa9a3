//! What the operator counts: by controller-runtime's names where one fits, so that dashboards made for others read it.

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

/// A handle to all of them.
#[derive(Clone)]
pub(crate) struct Metrics(Arc<Inner>);

struct Inner {
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
    /// `<error>` where there was no answer, as client-go has it.
    code: String,
    method: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PodLabels {
    /// `counting` or `silent`.
    state: &'static str,
}

/// A reconcile that runs, until it is dropped.
pub(crate) struct Active(Gauge);

/// Counts the requests of a client.
#[derive(Clone)]
pub(crate) struct RequestsLayer(Metrics);

#[derive(Clone)]
pub(crate) struct Counted<S> {
    inner: S,
    metrics: Metrics,
}

/// Seconds of a reconcile, from one that finds nothing to do to one that waits for servers.
const SECONDS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

// === impl Metrics ===

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let reconciles = Family::<ReconcileLabels, Counter>::default();
        let reconcile_errors = Family::<ControllerLabels, Counter>::default();
        let reconcile_panics = Family::<ControllerLabels, Counter>::default();
        let reconcile_seconds: Family<_, _, fn() -> Histogram> = Family::new_with_constructor(seconds);
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
        registry.register("controller_runtime_active_workers", "Reconciles that run", active.clone());
        registry.register(
            "controller_runtime_max_concurrent_reconciles",
            "Reconciles that may run at once",
            max_concurrent.clone(),
        );
        registry.register("leader_election_master_status", "1 where this operator holds the Lease", leader.clone());
        registry.register("rest_client_requests", "Requests to the API server", requests.clone());
        registry.register("latchkey_operator_publishes", "Rendered Apps written", publishes.clone());
        registry.register("latchkey_operator_status_writes", "Statuses written", status_writes.clone());
        registry.register("latchkey_operator_server_pods", "Server pods as the probe sees them", server_pods.clone());
        // Series that are there from the start: their first increase is seen.
        for controller in ["app", "provider"] {
            let labels = ControllerLabels { controller };
            drop(reconciles.get_or_create(&ReconcileLabels { controller, result: "success" }));
            drop(reconcile_errors.get_or_create(&labels));
            drop(reconcile_panics.get_or_create(&labels));
            drop(reconcile_seconds.get_or_create(&labels));
            drop(active.get_or_create(&labels));
        }
        Self(Arc::new(Inner {
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
    /// The page of `/metrics`, in OpenMetrics.
    pub(crate) fn page(&self) -> Result<String, std::fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.0.registry)?;
        Ok(page)
    }

    pub(crate) fn published(&self) {
        self.0.publishes.inc();
    }

    pub(crate) fn status_written(&self) {
        self.0.status_writes.inc();
    }

    pub(crate) fn leader(&self, lease: &str, leads: bool) {
        self.0.leader.get_or_create(&LeaseLabels { name: lease.to_owned() }).set(leads.into());
    }

    pub(crate) fn max_concurrent(&self, controller: &'static str, most: u16) {
        self.0.max_concurrent.get_or_create(&ControllerLabels { controller }).set(most.into());
    }

    /// Counts one more until the answer is dropped.
    pub(crate) fn active(&self, controller: &'static str) -> Active {
        let gauge = self.0.active.get_or_create_owned(&ControllerLabels { controller });
        gauge.inc();
        Active(gauge)
    }

    pub(crate) fn reconciled(&self, controller: &'static str, result: &'static str, took: Duration) {
        self.0.reconciles.get_or_create(&ReconcileLabels { controller, result }).inc();
        let labels = ControllerLabels { controller };
        if result != "success" {
            self.0.reconcile_errors.get_or_create(&labels).inc();
        }
        self.0.reconcile_seconds.get_or_create(&labels).observe(took.as_secs_f64());
    }

    pub(crate) fn panicked(&self, controller: &'static str) {
        self.0.reconcile_panics.get_or_create(&ControllerLabels { controller }).inc();
    }

    pub(crate) fn server_pods(&self, counting: usize, silent: usize) {
        for (state, number) in [("counting", counting), ("silent", silent)] {
            self.0.server_pods.get_or_create(&PodLabels { state }).set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }
}

impl Drop for Active {
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
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, metrics: self.0.clone() }
    }
}

impl<S, B, A> Service<Request<B>> for Counted<S>
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
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code =
                answer.as_ref().map_or_else(|_| "<error>".to_owned(), |answer| answer.status().as_str().to_owned());
            requests.get_or_create(&RequestLabels { code, method }).inc();
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_usual_names() {
        let metrics = Metrics::default();
        metrics.reconciled("app", "forbidden", Duration::from_millis(3));
        let running = metrics.active("app");
        metrics.leader("latchkey-operator", true);
        metrics.server_pods(2, 1);
        let page = metrics.page().unwrap();
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
        assert!(metrics.page().unwrap().contains("controller_runtime_active_workers{controller=\"app\"} 0"));
    }
}
