//! The operations listener: liveness, readiness, metrics, and the stream of revisions that this process serves.

use std::sync::Arc;

use http::{HeaderValue, Method, StatusCode, header::CONTENT_TYPE};
use prometheus_client::{encoding::text, registry::Registry};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{
    config::Apps,
    domain::app::App,
    http::{
        error::Problem,
        pipeline::{Endpoints, Lookup},
        request::InboundRequest,
        response::{self, Response},
    },
    providers::ProviderReports,
};

mod readiness;
mod revisions;

pub use readiness::Readiness;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpsRoute {
    Live,
    Ready,
    Metrics,
    Revisions,
}

/// The response of `readyz`.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct ReadyResponse {
    ready: bool,
    /// The reasons why the process is not ready; empty when it is ready.
    missing: Vec<String>,
}

pub(in crate::http) struct OpsEndpoints {
    apps: Arc<Apps>,
    pod_uid: String,
    readiness: Arc<Readiness>,
    registry: Arc<Registry>,
    reports: Arc<ProviderReports>,
    /// Cancelling this token ends the streams of revisions. They never end otherwise.
    closing: CancellationToken,
}

// === impl OpsEndpoints ===

impl OpsEndpoints {
    pub(in crate::http) fn new(
        apps: Arc<Apps>,
        pod_uid: String,
        readiness: Arc<Readiness>,
        registry: Arc<Registry>,
        reports: Arc<ProviderReports>,
        closing: CancellationToken,
    ) -> Self {
        Self { apps, pod_uid, readiness, registry, reports, closing }
    }

    fn ready_response(&self) -> Result<Response, Problem> {
        let missing = self.readiness.missing();
        let ready = missing.is_empty();
        let mut response = response::json(&ReadyResponse { ready, missing })?;
        if !ready {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        Ok(response)
    }

    fn metrics_response(&self) -> Result<Response, Problem> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry).map_err(|error| Problem::server_error().with_cause(error))?;
        let mut response = http::Response::new(response::full_body(page));
        let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        Ok(response)
    }
}

impl Endpoints for OpsEndpoints {
    type Route = OpsRoute;

    const LISTENER: &'static str = "ops";
    /// Requests to this listener are not traced: probes and scrapes come every few seconds, and a stream of revisions
    /// never ends.
    const TRACED: bool = false;

    fn find(&self, method: &Method, path: &str) -> Lookup<OpsRoute> {
        let route = match path {
            "/livez" => OpsRoute::Live,
            "/readyz" => OpsRoute::Ready,
            "/metrics" => OpsRoute::Metrics,
            "/revisions" => OpsRoute::Revisions,
            _ => return Lookup::NotFound,
        };
        if method == Method::GET || method == Method::HEAD {
            Lookup::Route { route, app: None, path_parameters: Vec::new() }
        } else {
            Lookup::WrongMethod { route, app: None, allow: "GET, HEAD" }
        }
    }

    fn name(route: OpsRoute) -> &'static str {
        match route {
            OpsRoute::Live => "livez",
            OpsRoute::Ready => "readyz",
            OpsRoute::Metrics => "metrics",
            OpsRoute::Revisions => "revisions",
        }
    }

    fn is_logged_at_debug(route: OpsRoute) -> bool {
        match route {
            OpsRoute::Live | OpsRoute::Ready | OpsRoute::Metrics => true,
            OpsRoute::Revisions => false,
        }
    }

    async fn call(&self, route: OpsRoute, _: Option<Arc<App>>, _: InboundRequest) -> Result<Response, Problem> {
        match route {
            OpsRoute::Live => response::json(&serde_json::json!({})),
            OpsRoute::Ready => self.ready_response(),
            OpsRoute::Metrics => self.metrics_response(),
            OpsRoute::Revisions => {
                let (apps, reports) = (Arc::clone(&self.apps), Arc::clone(&self.reports));
                Ok(revisions::stream_response(apps, reports, self.pod_uid.clone(), self.closing.clone()))
            }
        }
    }
}
