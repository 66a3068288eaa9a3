//! Rate, errors and duration of requests, by route. Labels are bounded: names of routes, never paths.

use std::{fmt, sync::Arc, time::Duration};

use http::{Method, StatusCode};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::{Registry, Unit},
};

use super::budgets::Budgets;

/// Upper bounds of the buckets for durations, in seconds. The smallest is for the JWKS from memory, and the largest for
/// a login that waits in the hashing queue.
const BUCKETS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// The metrics of every listener.
#[derive(Clone)]
pub struct HttpMetrics {
    requests: Family<RequestLabels, Counter>,
    duration: Family<RouteLabels, Histogram, fn() -> Histogram>,
    in_flight: Family<ListenerLabels, Gauge>,
    connections: Family<ListenerLabels, Gauge>,
    head_timeouts: Family<ListenerLabels, Counter>,
    connections_refused: Family<ReasonLabels, Counter>,
    over_budget: Family<ReasonLabels, Counter>,
    pages: Family<PageLabels, Counter>,
    authorizations: Family<OutcomeLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    listener: &'static str,
    route: &'static str,
    method: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    listener: &'static str,
    route: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListenerLabels {
    listener: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    listener: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PageLabels {
    page: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// Gauges that are read from the budgets on each scrape.
#[derive(Debug)]
struct BudgetGauges(Arc<Budgets>);

/// Adds one to a gauge until this guard is dropped.
pub struct GaugeGuard(Gauge);

// === impl HttpMetrics ===

impl HttpMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            in_flight: Family::default(),
            connections: Family::default(),
            head_timeouts: Family::default(),
            connections_refused: Family::default(),
            over_budget: Family::default(),
            pages: Family::default(),
            authorizations: Family::default(),
        };
        for listener in ["public", "admin", "ops"] {
            drop(metrics.head_timeouts.get_or_create(&ListenerLabels { listener }));
            for reason in ["client", "http2", "waiting"] {
                drop(metrics.connections_refused.get_or_create(&ReasonLabels { listener, reason }));
            }
            for reason in ["head", "request"] {
                drop(metrics.over_budget.get_or_create(&ReasonLabels { listener, reason }));
            }
        }
        registry.register("http_requests", "Requests that got a response", metrics.requests.clone());
        registry.register_with_unit(
            "http_request_duration",
            "Time from the headers of a request to its response",
            Unit::Seconds,
            metrics.duration.clone(),
        );
        registry.register("http_requests_in_flight", "Requests that have no response yet", metrics.in_flight.clone());
        registry.register("http_connections", "Open connections", metrics.connections.clone());
        registry.register(
            "http_head_timeouts",
            "Connections closed because the headers of a request were not received in time",
            metrics.head_timeouts.clone(),
        );
        registry.register(
            "http_connections_refused",
            "Connections closed because the client address has its maximum, or because slots are needed",
            metrics.connections_refused.clone(),
        );
        registry.register(
            "http_over_budget",
            "Requests refused with 503 before they were read because their memory does not fit the budget",
            metrics.over_budget.clone(),
        );
        registry.register("pages", "Requests for hosted pages", metrics.pages.clone());
        registry.register("authorizations", "Responses to authorization requests", metrics.authorizations.clone());
        metrics
    }

    /// Registers the gauges of the budgets.
    pub fn register_budgets(registry: &mut Registry, budgets: &Arc<Budgets>) {
        registry.register_collector(Box::new(BudgetGauges(Arc::clone(budgets))));
    }

    pub fn record_connection_refused(&self, listener: &'static str, reason: &'static str) {
        self.connections_refused.get_or_create(&ReasonLabels { listener, reason }).inc();
    }

    pub fn record_over_budget(&self, listener: &'static str, reason: &'static str) {
        self.over_budget.get_or_create(&ReasonLabels { listener, reason }).inc();
    }

    /// `outcome` is `shown`, `done`, `refused` or `error`.
    pub fn record_page(&self, page: &'static str, outcome: &'static str) {
        self.pages.get_or_create(&PageLabels { page, outcome }).inc();
    }

    /// `outcome` is a label of `AuthorizationResponseKind`, or `limited`, `unavailable` or `invalid`.
    pub fn record_authorization(&self, outcome: &'static str) {
        self.authorizations.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub fn record_response(
        &self,
        listener: &'static str,
        route: &'static str,
        method: &Method,
        status: StatusCode,
        took: Duration,
    ) {
        let labels = RequestLabels { listener, route, method: method_label(method), status: status.as_u16() };
        self.requests.get_or_create(&labels).inc();
        self.duration.get_or_create(&RouteLabels { listener, route }).observe(took.as_secs_f64());
    }

    pub fn track_request(&self, listener: &'static str) -> GaugeGuard {
        GaugeGuard::new(self.in_flight.get_or_create_owned(&ListenerLabels { listener }))
    }

    pub fn track_connection(&self, listener: &'static str) -> GaugeGuard {
        GaugeGuard::new(self.connections.get_or_create_owned(&ListenerLabels { listener }))
    }

    pub fn record_head_timeout(&self, listener: &'static str) {
        self.head_timeouts.get_or_create(&ListenerLabels { listener }).inc();
    }
}

/// The label of a method. Methods that are not listed here share the label `other`, because clients can invent methods.
pub fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

// === impl BudgetGauges ===

impl Collector for BudgetGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let gauge = |units: usize| ConstGauge::new(i64::try_from(units).unwrap_or(i64::MAX));
        for (name, help, gauge) in [
            ("http_request_memory", "Request bytes that count against the budget", gauge(self.0.counted_bytes())),
            (
                "http_refusals_held",
                "Refusals that are held before they are sent",
                gauge(self.0.refusals().held_count()),
            ),
        ] {
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        Ok(())
    }
}

// === impl GaugeGuard ===

impl GaugeGuard {
    fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}
