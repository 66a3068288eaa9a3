//! Rendered Apps from the Secrets of one namespace: listed in pages, then watched.

use std::{
    pin::pin,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client,
    runtime::watcher::{self, Event, watcher},
};
use latchkey_crds::{
    names::{RENDERED_APP_KEY, RENDERED_APP_TYPE, rendered_app_secret},
    types::AppId,
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, warn};

use super::{Apps, RejectError};
use crate::domain::clock::Env;

/// The number of documents per page. A document has at most 512 KiB, so a page has at most 12.5 MiB. With base64 in
/// JSON and the decoded bytes, reading a page needs 30 MiB.
const PAGE_SIZE: u32 = 25;
/// Seconds after which the API server ends a watch. A watch that is silent for longer has lost its connection.
const WATCH_SECONDS: u32 = 30;
/// The timeouts outside tests. `read` is longer than the time for which a working watch can be silent. If a watch is
/// silently dropped, the documents are current again within 40 s, including a retry delay and a new connection.
const TIMEOUTS: Timeouts = Timeouts { read: Duration::from_secs(33), list: Duration::from_secs(20) };
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// After this time without a failure, the retry delays start again at [`MIN_BACKOFF`]. After a complete list or a
/// change of a Secret, they start again immediately.
const BACKOFF_RESET: Duration = Duration::from_secs(60);

/// Timeouts of calls to the API server.
#[derive(Clone, Copy)]
struct Timeouts {
    /// How long a connection can be silent before it counts as lost.
    read: Duration,
    /// The maximum time for reading one page of the list.
    list: Duration,
}

/// Keeps the watch running until this value is dropped.
pub struct WatchGuard {
    _stop: DropGuard,
}

/// The watch cannot start.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("the client of the API server cannot be made")]
    Client(#[source] kube::Error),
    #[error("the thread that watches cannot be started")]
    Thread(#[source] std::io::Error),
}

/// Why the list or the watch failed. The texts contain no secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum ListWatchError {
    /// `message`: the text from the API server, for example about a missing permission.
    #[error("the API server refused the request: {message}")]
    Refused { code: u16, message: String },
    #[error("the API server cannot be reached")]
    Unreachable,
    #[error("the API server does not answer")]
    Timeout,
    #[error("the list of the API server has no resourceVersion to watch from")]
    NoResourceVersion,
}

struct SecretWatcher<T> {
    api: Api<Secret>,
    apps: Arc<Apps>,
    /// Called with `Ok` after all Secrets were read, and with the reason after each failure.
    on_result: T,
    env: Env,
    timeouts: Timeouts,
    failures: u32,
    last_failure: Option<(Instant, ListWatchError)>,
}

/// Watches the Secrets until the returned value is dropped. This happens in a separate thread, so that thousands of
/// documents do not delay requests. `on_result` is called with `Ok` after all Secrets were read, and with the reason
/// after each failure.
pub fn watch<T>(config: kube::Config, namespace: &str, apps: Arc<Apps>, on_result: T) -> Result<WatchGuard, WatchError>
where
    T: FnMut(Result<(), String>) + Send + 'static,
{
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(WatchError::Thread)?;
    let api = {
        let _guard = runtime.enter();
        api(config, namespace, TIMEOUTS).map_err(WatchError::Client)?
    };
    thread::Builder::new()
        .name("kubernetes".to_owned())
        .spawn(move || {
            let watching = SecretWatcher::new(api, apps, on_result, TIMEOUTS).run();
            runtime.block_on(stopped.run_until_cancelled(watching));
        })
        .map_err(WatchError::Thread)?;
    Ok(WatchGuard { _stop: stop.drop_guard() })
}

fn api(mut config: kube::Config, namespace: &str, timeouts: Timeouts) -> Result<Api<Secret>, kube::Error> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(WRITE_TIMEOUT);
    config.read_timeout = Some(timeouts.read);
    // Without this setting, the read timeout would include the time for which a connection was idle.
    config.reset_reader_on_write = true;
    Ok(Api::namespaced(Client::try_from(config)?, namespace))
}

// === impl SecretWatcher ===

impl<T: FnMut(Result<(), String>)> SecretWatcher<T> {
    fn new(api: Api<Secret>, apps: Arc<Apps>, on_result: T, timeouts: Timeouts) -> Self {
        Self { api, apps, on_result, env: Env::system(), timeouts, failures: 0, last_failure: None }
    }

    async fn run(mut self) {
        loop {
            self.list_and_watch().await;
        }
    }

    /// Lists the Secrets, then watches them until a new list is needed.
    async fn list_and_watch(&mut self) {
        let config = watcher::Config::default()
            .fields(&format!("type={RENDERED_APP_TYPE}"))
            .page_size(PAGE_SIZE)
            .timeout(WATCH_SECONDS);
        let mut events = pin!(watcher(self.api.clone(), config));
        let apps = Arc::clone(&self.apps);
        let mut sync = None;
        loop {
            let next = events.next();
            // Only the list has this timeout: a watch can be silent for long, and has a separate timeout.
            let next = if sync.is_some() { timeout(self.timeouts.list, next).await } else { Ok(next.await) };
            let event = match next {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(_) => return self.back_off(ListWatchError::Timeout).await,
            };
            match event {
                Ok(Event::Init) => sync = Some(apps.start_full_sync()),
                Ok(Event::InitApply(secret)) => {
                    if let (Some(sync), Some(id)) = (&mut sync, app_id_from_secret(&secret)) {
                        match document_of(&secret) {
                            Some(document) => sync.put(&id, document),
                            None => sync.reject_unreadable(&id, RejectError::NoDocument),
                        }
                    }
                }
                Ok(Event::InitDone) => {
                    if let Some(sync) = sync.take() {
                        sync.commit();
                        (self.on_result)(Ok(()));
                    }
                    self.record_success();
                }
                Ok(Event::Apply(secret)) => {
                    self.record_success();
                    if let Some(id) = app_id_from_secret(&secret) {
                        match document_of(&secret) {
                            Some(document) => apps.put(&id, document),
                            None => apps.reject_unreadable(&id, RejectError::NoDocument),
                        }
                    }
                }
                Ok(Event::Delete(secret)) => {
                    self.record_success();
                    if let Some(id) = app_id_from_secret(&secret) {
                        apps.remove(&id);
                    }
                }
                Err(error) => {
                    let failure = ListWatchError::from(&error);
                    let needs_list = failure.needs_new_list();
                    sync = None;
                    self.back_off(failure).await;
                    if needs_list {
                        return;
                    }
                }
            }
        }
    }

    fn record_success(&mut self) {
        self.failures = 0;
        if self.last_failure.take().is_some() {
            info!("the API server answers again");
        }
    }

    async fn back_off(&mut self, failure: ListWatchError) {
        self.apps.metrics().count_failure();
        let already_logged = match self.last_failure.take() {
            Some((at, _)) if at.elapsed() > BACKOFF_RESET => {
                self.failures = 0;
                false
            }
            Some((_, last)) => last == failure,
            None => false,
        };
        if already_logged {
            debug!(error = %failure, "the rendered Apps still cannot be read");
        } else {
            warn!(error = %failure, "the rendered Apps cannot be read; the current ones stay in service");
        }
        (self.on_result)(Err(failure.to_string()));
        self.last_failure = Some((Instant::now(), failure));
        let delay = backoff_delay(self.failures, self.env.random_unit());
        self.failures = self.failures.saturating_add(1);
        sleep(delay).await;
    }
}

/// Exponential backoff. Half of the delay is random, so that servers that lost their connections at the same time do
/// not reconnect at the same time.
fn backoff_delay(failures: u32, unit: f64) -> Duration {
    MIN_BACKOFF.saturating_mul(1 << failures.min(16)).min(MAX_BACKOFF).mul_f64(0.5 + 0.5 * unit.clamp(0.0, 1.0))
}

/// The appID in the name of a Secret.
fn app_id_from_secret(secret: &Secret) -> Option<AppId> {
    let name = secret.metadata.name.as_deref().unwrap_or_default();
    let id = name.strip_prefix("latchkey-app-").and_then(|id| id.parse().ok());
    let id = id.filter(|id| rendered_app_secret(id) == name);
    if id.is_none() {
        warn!(secret = name, "a Secret with a rendered App has a name that refers to no App; it is ignored");
    }
    id
}

fn document_of(secret: &Secret) -> Option<&[u8]> {
    Some(&secret.data.as_ref()?.get(RENDERED_APP_KEY)?.0)
}

// === impl ListWatchError ===

impl ListWatchError {
    /// Whether a new list is needed. The watch cannot continue if the API server does not have the resourceVersion
    /// (410: too old, 400 or 504: in the future) or has sent none.
    fn needs_new_list(&self) -> bool {
        matches!(self, Self::Refused { code: 400 | 410 | 504, .. } | Self::NoResourceVersion)
    }

    fn from_status(status: &kube::core::Status) -> Self {
        Self::Refused { code: status.code, message: status.message.clone() }
    }
}

impl From<&watcher::Error> for ListWatchError {
    fn from(error: &watcher::Error) -> Self {
        match error {
            watcher::Error::WatchError(status) => Self::from_status(status),
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status))
            | watcher::Error::WatchFailed(kube::Error::Api(status)) => Self::from_status(status),
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => {
                debug!(error = error as &dyn std::error::Error, "a call of the API server failed");
                Self::Unreachable
            }
            watcher::Error::NoResourceVersion => Self::NoResourceVersion,
        }
    }
}

#[cfg(test)]
mod tests;
