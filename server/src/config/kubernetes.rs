//! Rendered Apps from the Secrets of one namespace: listed by pages, then watched.

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

use super::{Apps, Refused};
use crate::domain::clock::Env;

/// Of at most 512 KiB each, so 12.5 MiB, which base64 in JSON and the decoded bytes make 30 MiB while a page is read.
const PAGE: u32 = 25;
/// After so many seconds the API server ends a watch: one that was dropped silently is unseen no longer than that.
const WATCH_SECONDS: u32 = 30;
/// A silence that no watch has: with a wait and a new connection what was dropped silently is current within 40 s. And
/// what a page of the list may take.
const LIMITS: Limits = Limits { silence: Duration::from_secs(33), list: Duration::from_secs(20) };
const CONNECT: Duration = Duration::from_secs(3);
const WRITE: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// After so long without a failure the waits begin anew.
const CALM: Duration = Duration::from_secs(60);

/// How long is waited for the API server.
#[derive(Clone, Copy)]
struct Limits {
    silence: Duration,
    list: Duration,
}

/// Ends the watching when dropped.
pub struct Watching {
    _stop: DropGuard,
}

/// The watching cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum CannotWatch {
    #[error("the client of the API server cannot be made")]
    Client(#[source] kube::Error),
    #[error("there is no room for the thread that watches")]
    Thread(#[source] std::io::Error),
}

/// Why what is read of the documents stopped; the texts can be shown, they hold no secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Failure {
    /// The API server's own words, such as those for a permission that is missing.
    #[error("the API server refuses: {message}")]
    Refused { code: u16, message: String },
    #[error("the API server cannot be reached")]
    Away,
    #[error("the API server does not answer")]
    Silent,
    #[error("the API server's list has no version to watch from")]
    NoVersion,
}

struct Source<T> {
    api: Api<Secret>,
    apps: Arc<Apps>,
    /// Hears that the set is there, or why it is not.
    told: T,
    env: Env,
    limits: Limits,
    failures: u32,
    failed: Option<(Instant, Failure)>,
}

/// Watches in a thread of its own, so that thousands of documents hold up no request, until the returned value is
/// dropped. `told` hears when the whole set is there and, before that, why it is not.
pub fn watch<T>(config: kube::Config, namespace: &str, apps: Arc<Apps>, told: T) -> Result<Watching, CannotWatch>
where
    T: FnMut(Result<(), String>) + Send + 'static,
{
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CannotWatch::Thread)?;
    let api = {
        let _inside = runtime.enter();
        api(config, namespace, LIMITS).map_err(CannotWatch::Client)?
    };
    thread::Builder::new()
        .name("kubernetes".to_owned())
        .spawn(move || {
            let watching = Source::new(api, apps, told, LIMITS).run();
            runtime.block_on(stopped.run_until_cancelled(watching));
        })
        .map_err(CannotWatch::Thread)?;
    Ok(Watching { _stop: stop.drop_guard() })
}

fn api(mut config: kube::Config, namespace: &str, limits: Limits) -> Result<Api<Secret>, kube::Error> {
    config.connect_timeout = Some(CONNECT);
    config.write_timeout = Some(WRITE);
    config.read_timeout = Some(limits.silence);
    // Else the time for which a connection rested would count.
    config.reset_reader_on_write = true;
    Ok(Api::namespaced(Client::try_from(config)?, namespace))
}

// === impl Source ===

impl<T: FnMut(Result<(), String>)> Source<T> {
    fn new(api: Api<Secret>, apps: Arc<Apps>, told: T, limits: Limits) -> Self {
        Self { api, apps, told, env: Env::system(), limits, failures: 0, failed: None }
    }

    async fn run(mut self) {
        loop {
            self.follow().await;
        }
    }

    /// Lists, then watches, until both must begin anew.
    async fn follow(&mut self) {
        let config = watcher::Config::default()
            .fields(&format!("type={RENDERED_APP_TYPE}"))
            .page_size(PAGE)
            .timeout(WATCH_SECONDS);
        let mut events = pin!(watcher(self.api.clone(), config));
        let apps = Arc::clone(&self.apps);
        let mut whole = None;
        loop {
            let next = events.next();
            // A watch may be silent, and has its own limit.
            let next = if whole.is_some() { timeout(self.limits.list, next).await } else { Ok(next.await) };
            let event = match next {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(_) => return self.wait(Failure::Silent).await,
            };
            match event {
                Ok(Event::Init) => whole = Some(apps.whole()),
                Ok(Event::InitApply(secret)) => {
                    if let (Some(whole), Some(id)) = (&mut whole, app_of(&secret)) {
                        match document(&secret) {
                            Some(document) => whole.put(&id, document),
                            None => whole.refuse(&id, Refused::NoDocument),
                        }
                    }
                }
                Ok(Event::InitDone) => {
                    if let Some(whole) = whole.take() {
                        whole.commit();
                        (self.told)(Ok(()));
                    }
                    self.answered();
                }
                Ok(Event::Apply(secret)) => {
                    self.answered();
                    if let Some(id) = app_of(&secret) {
                        match document(&secret) {
                            Some(document) => apps.put(&id, document),
                            None => apps.refuse(&id, Refused::NoDocument),
                        }
                    }
                }
                Ok(Event::Delete(secret)) => {
                    self.answered();
                    if let Some(id) = app_of(&secret) {
                        apps.remove(&id);
                    }
                }
                Err(error) => {
                    let failure = Failure::from(&error);
                    let anew = failure.needs_a_list();
                    whole = None;
                    self.wait(failure).await;
                    if anew {
                        return;
                    }
                }
            }
        }
    }

    fn answered(&mut self) {
        self.failures = 0;
        if self.failed.take().is_some() {
            info!("the API server answers again");
        }
    }

    async fn wait(&mut self, failure: Failure) {
        self.apps.metrics().failed();
        let told = match self.failed.take() {
            Some((at, _)) if at.elapsed() > CALM => {
                self.failures = 0;
                false
            }
            Some((_, known)) => known == failure,
            None => false,
        };
        if told {
            debug!(error = %failure, "the rendered Apps still cannot be read");
        } else {
            warn!(error = %failure, "the rendered Apps cannot be read; what is served goes on");
        }
        (self.told)(Err(failure.to_string()));
        self.failed = Some((Instant::now(), failure));
        let delay = delay(self.failures, self.env.unit());
        self.failures = self.failures.saturating_add(1);
        sleep(delay).await;
    }
}

/// Half of it is left to chance, so that servers that lost the API server together do not come back together.
fn delay(failures: u32, unit: f64) -> Duration {
    FIRST_WAIT.saturating_mul(1 << failures.min(16)).min(LONGEST_WAIT).mul_f64(0.5 + 0.5 * unit.clamp(0.0, 1.0))
}

/// The App that a Secret's name stands for.
fn app_of(secret: &Secret) -> Option<AppId> {
    let name = secret.metadata.name.as_deref().unwrap_or_default();
    let id = name.strip_prefix("latchkey-app-").and_then(|id| id.parse().ok());
    let id = id.filter(|id| rendered_app_secret(id) == name);
    if id.is_none() {
        warn!(secret = name, "a Secret with a rendered App has a name that is of no App; it is passed over");
    }
    id
}

fn document(secret: &Secret) -> Option<&[u8]> {
    Some(&secret.data.as_ref()?.get(RENDERED_APP_KEY)?.0)
}

// === impl Failure ===

impl Failure {
    /// Versions that the API server does not have (any more): 410 for an old one, 400 or 504 for one of its future.
    fn needs_a_list(&self) -> bool {
        matches!(self, Self::Refused { code: 400 | 410 | 504, .. } | Self::NoVersion)
    }

    fn of_status(status: &kube::core::Status) -> Self {
        Self::Refused { code: status.code, message: status.message.clone() }
    }
}

impl From<&watcher::Error> for Failure {
    fn from(error: &watcher::Error) -> Self {
        match error {
            watcher::Error::WatchError(status) => Self::of_status(status),
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status))
            | watcher::Error::WatchFailed(kube::Error::Api(status)) => Self::of_status(status),
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => {
                debug!(error = error as &dyn std::error::Error, "a call of the API server failed");
                Self::Away
            }
            watcher::Error::NoResourceVersion => Self::NoVersion,
        }
    }
}

#[cfg(test)]
mod tests;
