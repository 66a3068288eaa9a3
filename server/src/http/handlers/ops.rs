//! The operations listener: whether this process lives and is ready, its metrics, and the revisions it serves.

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
use latchkey_crds::rendered::{Change, ProviderReport, RevisionsLine};
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
        door::{Endpoints, Lookup},
        error::Problem,
        request::Inbound,
        response::{self, Response},
    },
    providers::Reports,
};

/// So that an operator knows a stream that is silent from one that is dead (design, Acknowledgement).
const HEARTBEAT: Duration = Duration::from_secs(2);

/// What `readyz` says. It never asks the stores: a blink of Redis must not empty the Service.
#[derive(Debug, Default)]
pub struct Readiness {
    configuration: AtomicBool,
    schema: AtomicBool,
    draining: AtomicBool,
    configuration_refused: Mutex<Option<String>>,
    schema_refused: Mutex<Option<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpsRoute {
    Live,
    Ready,
    Metrics,
    Revisions,
}

/// What `readyz` answers.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Ready {
    ready: bool,
    /// What is missing; empty when ready.
    missing: Vec<String>,
}

pub(in crate::http) struct Ops {
    apps: Arc<Apps>,
    pod_uid: String,
    readiness: Arc<Readiness>,
    registry: Arc<Registry>,
    reports: Arc<Reports>,
    /// The stream of revisions has no end of its own.
    closing: CancellationToken,
}

/// The stream of revisions between two lines.
struct Telling {
    apps: Arc<Apps>,
    pod_uid: String,
    /// To be told before anything else.
    waiting: VecDeque<RevisionsLine>,
    changes: broadcast::Receiver<Change>,
    reports: Arc<Reports>,
    findings: broadcast::Receiver<ProviderReport>,
    heartbeat: Interval,
    beats: u64,
    closing: CancellationToken,
}

// === impl Readiness ===

impl Readiness {
    /// The Apps were read once.
    pub fn configuration_loaded(&self) {
        self.configuration.store(true, Ordering::Release);
    }

    /// The Apps cannot be read; the text says what to do.
    pub fn configuration_refused(&self, reason: impl Into<String>) {
        *self.configuration_refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
    }

    /// The database's schema was seen, once, to be new enough.
    pub fn schema_seen(&self) {
        self.schema.store(true, Ordering::Release);
    }

    /// The schema was looked at and is too old; the text says what to do.
    pub fn schema_refused(&self, reason: impl Into<String>) {
        *self.schema_refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
    }

    /// The process was asked to end.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// What keeps this process from being ready.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if !self.configuration.load(Ordering::Acquire) {
            let refused = self.configuration_refused.lock().unwrap_or_else(PoisonError::into_inner);
            let reason = refused.as_deref().unwrap_or("the Apps are not loaded yet");
            missing.push(format!("configuration: {reason}"));
        }
        if !self.schema.load(Ordering::Acquire) {
            let refused = self.schema_refused.lock().unwrap_or_else(PoisonError::into_inner);
            let reason = refused.as_deref().unwrap_or("the database's schema was not seen yet");
            missing.push(format!("schema: {reason}"));
        }
        if self.draining.load(Ordering::Acquire) {
            missing.push("draining: the process is about to end".to_owned());
        }
        missing
    }
}

// === impl Ops ===

impl Ops {
    pub(in crate::http) fn new(
        apps: Arc<Apps>,
        pod_uid: String,
        readiness: Arc<Readiness>,
        registry: Arc<Registry>,
        reports: Arc<Reports>,
        closing: CancellationToken,
    ) -> Self {
        Self { apps, pod_uid, readiness, registry, reports, closing }
    }

    fn ready(&self) -> Result<Response, Problem> {
        let missing = self.readiness.missing();
        let ready = missing.is_empty();
        let mut response = response::json(&Ready { ready, missing })?;
        if !ready {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        Ok(response)
    }

    fn metrics(&self) -> Result<Response, Problem> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry).map_err(|error| Problem::server_error().because(error))?;
        let mut response = http::Response::new(response::full(page));
        let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        Ok(response)
    }

    fn revisions(&self) -> Response {
        let (apps, reports) = (Arc::clone(&self.apps), Arc::clone(&self.reports));
        let telling = Telling::begin(apps, reports, self.pod_uid.clone(), self.closing.clone());
        let lines = stream::unfold(telling, |mut telling| async move {
            let line = telling.next().await?;
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

impl Endpoints for Ops {
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
            _ => return Lookup::Nothing,
        };
        if method == Method::GET || method == Method::HEAD {
            Lookup::Route { route, app: None, item: None }
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

    fn is_noise(route: OpsRoute) -> bool {
        match route {
            OpsRoute::Live | OpsRoute::Ready | OpsRoute::Metrics => true,
            OpsRoute::Revisions => false,
        }
    }

    async fn call(&self, route: OpsRoute, _: Option<Arc<App>>, _: Inbound) -> Result<Response, Problem> {
        match route {
            OpsRoute::Live => response::json(&serde_json::json!({})),
            OpsRoute::Ready => self.ready(),
            OpsRoute::Metrics => self.metrics(),
            OpsRoute::Revisions => Ok(self.revisions()),
        }
    }
}

// === impl Telling ===

impl Telling {
    /// With the hello first, then what is known of providers.
    fn begin(apps: Arc<Apps>, reports: Arc<Reports>, pod_uid: String, closing: CancellationToken) -> Self {
        let (hello, changes) = apps.subscribe(pod_uid.clone());
        let (known, findings) = reports.subscribe();
        let mut heartbeat = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut waiting = VecDeque::from([RevisionsLine::Hello { hello }]);
        waiting.extend(known.into_iter().map(|provider| RevisionsLine::Provider { provider }));
        Self { apps, pod_uid, waiting, changes, reports, findings, heartbeat, beats: 0, closing }
    }

    async fn next(&mut self) -> Option<RevisionsLine> {
        loop {
            if let Some(line) = self.waiting.pop_front() {
                return Some(line);
            }
            tokio::select! {
                biased;
                () = self.closing.cancelled() => return None,
                change = self.changes.recv() => match change {
                    Ok(change) => return Some(RevisionsLine::Change(change)),
                    // Too slow to hear every change: the whole set again, and from there on.
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (hello, changes) = self.apps.subscribe(self.pod_uid.clone());
                        self.changes = changes;
                        return Some(RevisionsLine::Hello { hello });
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                finding = self.findings.recv() => match finding {
                    Ok(provider) => return Some(RevisionsLine::Provider { provider }),
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let (known, findings) = self.reports.subscribe();
                        self.findings = findings;
                        self.waiting.extend(known.into_iter().map(|provider| RevisionsLine::Provider { provider }));
                    }
                    Err(broadcast::error::RecvError::Closed) => return None,
                },
                _ = self.heartbeat.tick() => {
                    self.beats += 1;
                    return Some(RevisionsLine::Heartbeat { heartbeat: self.beats });
                }
            }
        }
    }
}
