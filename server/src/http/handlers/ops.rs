//! The operations listener: liveness, readiness, metrics, and the stream of revisions that this process serves.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::stream;
use http::{
    HeaderValue, Method, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use latchkey_crds::rendered::{ProviderReport, RevisionChange, RevisionsMessage};
use prometheus_client::{encoding::text, registry::Registry};
use serde::Serialize;
use tokio::{
    sync::broadcast,
    time::{Instant, Interval, MissedTickBehavior, interval_at},
};
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

/// Lets an operator distinguish a silent stream from a broken one (specification: Delivery of configuration, Revisions
/// and acknowledgement).
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// The state behind `readyz`. It never asks the stores: a short outage of Redis must not empty the Service.
#[derive(Debug, Default)]
pub struct Readiness {
    configuration_loaded: AtomicBool,
    schema_ready: AtomicBool,
    draining: AtomicBool,
    configuration_error: Mutex<Option<String>>,
    schema_error: Mutex<Option<String>>,
}

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
    /// The reasons why it is not ready; empty when ready.
    missing: Vec<String>,
}

pub(in crate::http) struct OpsEndpoints {
    apps: Arc<Apps>,
    pod_uid: String,
    readiness: Arc<Readiness>,
    registry: Arc<Registry>,
    reports: Arc<ProviderReports>,
    /// Ends the stream of revisions, which has no end of its own.
    closing: CancellationToken,
}

/// The state of a revision stream between two lines.
struct RevisionStream {
    apps: Arc<Apps>,
    pod_uid: String,
    /// Lines to send before anything else.
    pending: VecDeque<RevisionsMessage>,
    changes: broadcast::Receiver<RevisionChange>,
    reports: Arc<ProviderReports>,
    provider_updates: broadcast::Receiver<ProviderReport>,
    heartbeat: Interval,
    heartbeats: u64,
    closing: CancellationToken,
}

// === impl Readiness ===

impl Readiness {
    /// The Apps were loaded once.
    pub fn set_configuration_loaded(&self) {
        self.configuration_loaded.store(true, Ordering::Release);
    }

    /// The Apps cannot be read; the reason says what to do.
    pub fn set_configuration_error(&self, reason: impl Into<String>) {
        *self.configuration_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
    }

    /// The database schema was found to be new enough, once.
    pub fn set_schema_ready(&self) {
        self.schema_ready.store(true, Ordering::Release);
    }

    /// The schema was checked and is too old; the reason says what to do.
    pub fn set_schema_error(&self, reason: impl Into<String>) {
        *self.schema_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
    }

    /// The process was asked to end.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// The reasons why this process is not ready.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if !self.configuration_loaded.load(Ordering::Acquire) {
            let refused = self.configuration_error.lock().unwrap_or_else(PoisonError::into_inner);
            let reason = refused.as_deref().unwrap_or("the Apps are not loaded yet");
            missing.push(format!("configuration: {reason}"));
        }
        if !self.schema_ready.load(Ordering::Acquire) {
            let refused = self.schema_error.lock().unwrap_or_else(PoisonError::into_inner);
            let reason = refused.as_deref().unwrap_or("the database schema was not checked yet");
            missing.push(format!("schema: {reason}"));
        }
        if self.draining.load(Ordering::Acquire) {
            missing.push("draining: the process is about to end".to_owned());
        }
        missing
    }
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

    fn ready(&self) -> Result<Response, Problem> {
        let missing = self.readiness.missing();
        let ready = missing.is_empty();
        let mut response = response::json(&ReadyResponse { ready, missing })?;
        if !ready {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        Ok(response)
    }

    fn metrics(&self) -> Result<Response, Problem> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry).map_err(|error| Problem::server_error().with_cause(error))?;
        let mut response = http::Response::new(response::full_body(page));
        let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        Ok(response)
    }

    fn revisions(&self) -> Response {
        let (apps, reports) = (Arc::clone(&self.apps), Arc::clone(&self.reports));
        let telling = RevisionStream::start(apps, reports, self.pod_uid.clone(), self.closing.clone());
        let lines = stream::unfold(telling, |mut telling| async move {
            let line = telling.next_line().await?;
            let mut bytes = serde_json::to_vec(&line).ok()?;
            bytes.push(b'\n');
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(bytes))), telling))
        });
        let mut response = http::Response::new(StreamBody::new(lines).boxed_unsync());
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}

impl Endpoints for OpsEndpoints {
    type Route = OpsRoute;

    const LISTENER: &'static str = "ops";
    /// Probes and scrapes come every few seconds, and a stream of revisions has no end.
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
            Lookup::Route { route, app: None, path_parameter: None }
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
            OpsRoute::Ready => self.ready(),
            OpsRoute::Metrics => self.metrics(),
            OpsRoute::Revisions => Ok(self.revisions()),
        }
    }
}

// === impl RevisionStream ===

impl RevisionStream {
    /// Starts with the hello, followed by the known state of providers.
    fn start(apps: Arc<Apps>, reports: Arc<ProviderReports>, pod_uid: String, closing: CancellationToken) -> Self {
        let (hello, changes) = apps.subscribe(pod_uid.clone());
        let (known, findings) = reports.subscribe();
        let mut heartbeat = interval_at(Instant::now() + HEARTBEAT_INTERVAL, HEARTBEAT_INTERVAL);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut waiting = VecDeque::from([RevisionsMessage::Hello { hello }]);
        waiting.extend(known.into_iter().map(|provider| RevisionsMessage::Provider { provider }));
        Self {
            apps,
            pod_uid,
            pending: waiting,
            changes,
            reports,
            provider_updates: findings,
            heartbeat,
            heartbeats: 0,
            closing,
        }
    }

    async fn next_line(&mut self) -> Option<RevisionsMessage> {
        loop {
            if let Some(line) = self.pending.pop_front() {
                return Some(line);
            }
            tokio::select! {
                biased;
                () = self.closing.cancelled() => return None,
                change = self.changes.recv() => match change {
                    Ok(change) => return Some(RevisionsMessage::Change(change)),
                    // Too slow to receive every change: send the whole set again and continue from there.
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (hello, changes) = self.apps.subscribe(self.pod_uid.clone());
                        self.changes = changes;
                        return Some(RevisionsMessage::Hello { hello });
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                finding = self.provider_updates.recv() => match finding {
                    Ok(provider) => return Some(RevisionsMessage::Provider { provider }),
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (known, findings) = self.reports.subscribe();
                        self.provider_updates = findings;
                        self.pending.extend(known.into_iter().map(|provider| RevisionsMessage::Provider { provider }));
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                _ = self.heartbeat.tick() => {
                    self.heartbeats += 1;
                    return Some(RevisionsMessage::Heartbeat { heartbeat: self.heartbeats });
                }
            }
        }
    }
}
