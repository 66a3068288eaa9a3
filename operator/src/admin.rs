//! The operator's own HTTP listener: liveness, readiness and metrics.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use kube::runtime::watcher;
use parking_lot::{Mutex, MutexGuard};
use serde_json::json;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{error::ErrorChain, metrics::Metrics};

/// A client that has not sent a complete request header within this time is disconnected.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// A handle to the state that `/readyz` reports. Cloning it is cheap.
#[derive(Clone)]
pub(crate) struct Health(Arc<HealthState>);

struct HealthState {
    /// The watches that have not finished their first list of objects, each with the reason.
    unsynced: Mutex<BTreeMap<&'static str, String>>,
    is_leader: Mutex<bool>,
    /// Whether every watch has finished its first list of objects.
    all_synced: watch::Sender<bool>,
}

// === impl Health ===

impl Health {
    pub(crate) fn new(watches: &[&'static str]) -> Self {
        let unsynced = watches.iter().map(|watch| (*watch, "not listed yet".to_owned())).collect();
        Self(Arc::new(HealthState {
            unsynced: Mutex::new(unsynced),
            is_leader: Mutex::new(false),
            all_synced: watch::Sender::new(false),
        }))
    }

    fn unsynced(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        self.0.unsynced.lock()
    }

    /// Records that a watch has finished its first list.
    pub(crate) fn set_synced(&self, watch: &'static str) {
        let mut unsynced = self.unsynced();
        unsynced.remove(watch);
        self.0.all_synced.send_replace(unsynced.is_empty());
    }

    /// Records a failure of a watch. After the first list, a failure does not make the operator unready, because the
    /// watch retries.
    pub(crate) fn record_watch_failure(&self, watch: &'static str, error: &watcher::Error) {
        if let Some(reason) = self.unsynced().get_mut(watch) {
            *reason = error_message(error);
        }
    }

    pub(crate) fn set_leader(&self, is_leader: bool) {
        *self.0.is_leader.lock() = is_leader;
    }

    /// Waits until every watch has finished its first list.
    pub(crate) async fn wait_synced(&self) {
        // The wait cannot fail, because the sender lives as long as this handle.
        let _ = self.0.all_synced.subscribe().wait_for(|all_synced| *all_synced).await;
    }

    fn readiness(&self) -> (StatusCode, serde_json::Value) {
        let missing: Vec<_> = self.unsynced().iter().map(|(watch, reason)| format!("{watch}: {reason}")).collect();
        let leader = *self.0.is_leader.lock();
        let status = if missing.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (status, json!({ "ready": missing.is_empty(), "leader": leader, "missing": missing }))
    }
}

/// Returns the API server's message if there is one (it names a missing permission, for example), otherwise the error
/// and its causes.
pub(crate) fn error_message(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => status.message.clone(),
        watcher::Error::WatchError(status) => status.message.clone(),
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => ErrorChain(error).to_string(),
        watcher::Error::NoResourceVersion => error.to_string(),
    }
}

/// Serves requests until `stop` is cancelled.
pub(crate) async fn serve(listener: TcpListener, health: Health, metrics: Metrics, stop: CancellationToken) {
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(error = %ErrorChain(&error), "failed to accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (health, metrics, stop) = (health.clone(), metrics.clone(), stop.clone());
        tokio::spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let response = respond(request.method(), request.uri().path(), &health, &metrics);
                async move { Ok::<_, Infallible>(response) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            // An error means that the client has disconnected or was too slow.
            let _ = stop.run_until_cancelled(connection).await;
        });
    }
}

fn respond(method: &Method, path: &str, health: &Health, metrics: &Metrics) -> Response<Full<Bytes>> {
    const JSON: &str = "application/json";
    let (status, content_type, body) = match path {
        "/livez" | "/readyz" | "/metrics" if method != Method::GET && method != Method::HEAD => {
            (StatusCode::METHOD_NOT_ALLOWED, JSON, json!({ "error": "method_not_allowed" }).to_string())
        }
        "/livez" => (StatusCode::OK, JSON, "{}".to_owned()),
        "/readyz" => {
            let (status, body) = health.readiness();
            (status, JSON, body.to_string())
        }
        "/metrics" => match metrics.encode() {
            Ok(page) => (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", page),
            Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, JSON, json!({ "error": "server_error" }).to_string()),
        },
        _ => (StatusCode::NOT_FOUND, JSON, json!({ "error": "not_found" }).to_string()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[tokio::test]
    async fn the_operator_is_ready_after_every_watch_is_synced() {
        let health = Health::new(&["apps", "secrets"]);
        health.set_synced("apps");
        let forbidden =
            Status::failure("secrets is forbidden: User \"x\" cannot list resource", "Forbidden").with_code(403);
        health
            .record_watch_failure("secrets", &watcher::Error::InitialListFailed(kube::Error::Api(Box::new(forbidden))));
        let (status, body) = health.readiness();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(body["missing"], json!(["secrets: secrets is forbidden: User \"x\" cannot list resource"]));
        health.set_synced("secrets");
        health.wait_synced().await;
        health.record_watch_failure("secrets", &watcher::Error::NoResourceVersion);
        assert_eq!(health.readiness(), (StatusCode::OK, json!({ "ready": true, "leader": false, "missing": [] })));
    }

    #[test]
    fn unknown_paths_and_post_requests_are_rejected() {
        let (health, metrics) = (Health::new(&[]), Metrics::default());
        let status = |method, path| respond(&method, path, &health, &metrics).status();
        assert_eq!(status(Method::GET, "/livez"), StatusCode::OK);
        assert_eq!(status(Method::GET, "/metrics"), StatusCode::OK);
        assert_eq!(status(Method::POST, "/readyz"), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(status(Method::GET, "/"), StatusCode::NOT_FOUND);
    }
}
