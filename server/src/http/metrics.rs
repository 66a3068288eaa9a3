//! Rate, errors and duration of requests, by route. Labels are bounded: names of routes, never paths.

use std::time::Duration;

use http::{Method, StatusCode};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// From a JWKS out of memory to a login that waited for the hashing queue.
const BUCKETS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// The metrics of every listener.
#[derive(Clone)]
pub struct HttpMetrics {
    requests: Family<RequestLabels, Counter>,
    duration: Family<RouteLabels, Histogram, fn() -> Histogram>,
    in_flight: Family<ListenerLabels, Gauge>,
    connections: Family<ListenerLabels, Gauge>,
    head_timeouts: Family<ListenerLabels, Counter>,
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

/// Counts one while it lives.
pub struct Held(Gauge);

// === impl HttpMetrics ===

impl HttpMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            in_flight: Family::default(),
            connections: Family::default(),
            head_timeouts: Family::default(),
        };
        for listener in ["public", "admin", "ops"] {
            drop(metrics.head_timeouts.get_or_create(&ListenerLabels { listener }));
        }
        registry.register("http_requests", "Requests answered", metrics.requests.clone());
        registry.register_with_unit(
            "http_request_duration",
            "Time from a request's headers to its answer",
            Unit::Seconds,
            metrics.duration.clone(),
        );
        registry.register("http_requests_in_flight", "Requests not yet answered", metrics.in_flight.clone());
        registry.register("http_connections", "Open connections", metrics.connections.clone());
        registry.register(
            "http_head_timeouts",
            "Connections ended because a request's headers did not come in time",
            metrics.head_timeouts.clone(),
        );
        metrics
    }

    pub fn answered(
        &self,
        listener: &'static str,
        route: &'static str,
        method: &Method,
        status: StatusCode,
        took: Duration,
    ) {
        let labels = RequestLabels { listener, route, method: method_name(method), status: status.as_u16() };
        self.requests.get_or_create(&labels).inc();
        self.duration.get_or_create(&RouteLabels { listener, route }).observe(took.as_secs_f64());
    }

    pub fn request_in_flight(&self, listener: &'static str) -> Held {
        Held::of(self.in_flight.get_or_create_owned(&ListenerLabels { listener }))
    }

    pub fn connection(&self, listener: &'static str) -> Held {
        Held::of(self.connections.get_or_create_owned(&ListenerLabels { listener }))
    }

    pub fn head_timed_out(&self, listener: &'static str) {
        self.head_timeouts.get_or_create(&ListenerLabels { listener }).inc();
    }
}

/// A method's name; those that no endpoint takes share one, since a caller may make up any.
pub fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

// === impl Held ===

impl Held {
    fn of(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.dec();
    }
}
