//! The Redis client: selects the backend by the URL, and reads the URL again when calls fail.

use std::sync::Arc;

use parking_lot::Mutex;
use redis::{Cmd, Pipeline, Value};
use tokio::time::Instant;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::scripts::Scripts;
use crate::{domain::ports::Replication, store::source::UrlSource};

mod address;
mod backend;
mod cluster;
mod connection;
pub(super) mod error;
mod node;
pub(super) mod reply;
mod sentinel;
mod slots;
pub(super) mod timeouts;
pub(super) mod url;

use backend::Backend;
use error::{CallError, CallErrorKind};
use reply::values;
use timeouts::RETRY_PAUSE;
use url::{ConnectError, RedisUrl};

/// Sends commands to the backend that the current URL names.
pub(super) struct RedisClient {
    url: UrlSource,
    scripts: Arc<Scripts>,
    state: Mutex<ClientState>,
}

#[derive(Default)]
struct ClientState {
    /// The URL that was last read, and its backend.
    backend: Option<(Zeroizing<String>, Backend)>,
    /// Whether the URL must be read again: since it was last read, a call has failed in a way that a new URL can fix,
    /// or the URL could not be used.
    must_reread_url: bool,
    read_at: Option<Instant>,
    /// Whether the log already says that the current URL cannot be read or used.
    is_reported: bool,
}

// === impl RedisClient ===

impl RedisClient {
    pub(super) fn new(url: UrlSource, scripts: Arc<Scripts>) -> Self {
        Self { url, scripts, state: Mutex::default() }
    }

    /// Sends commands as one pipeline. Returns a value for each command, or the first error.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, CallError> {
        let backend = self.backend()?;
        let outcome = backend.send(commands, until).await;
        self.note_outcome(&backend, outcome)
    }

    /// Sends one command. If the server has replicas, waits up to 100 ms for one of them to acknowledge the write.
    pub(super) async fn send_replicated(
        &self,
        command: Cmd,
        until: Instant,
    ) -> Result<(Value, Replication), CallError> {
        let backend = self.backend()?;
        let outcome = backend.send_replicated(command, until).await;
        self.note_outcome(&backend, outcome)
    }

    /// Sends commands to every primary. Returns the values of each primary.
    pub(super) async fn send_to_all(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Vec<Value>>, CallError> {
        match self.backend()? {
            Backend::Cluster(cluster) => {
                let replies = cluster.send_to_all(commands, until).await?;
                replies.into_iter().map(values).collect()
            }
            Backend::Single(_) | Backend::Sentinel(_) => self.send(commands, until).await.map(|values| vec![values]),
        }
    }

    fn note_outcome<T>(&self, backend: &Backend, outcome: Result<T, CallError>) -> Result<T, CallError> {
        if outcome.as_ref().is_err_and(CallError::needs_rediscovery) {
            self.state.lock().must_reread_url = true;
            backend.mark_stale();
        }
        outcome
    }

    /// Returns the backend of the current URL. Reads the URL again if a call failed, at most once per `RETRY_PAUSE`.
    fn backend(&self) -> Result<Backend, CallError> {
        let mut state = self.state.lock();
        let is_recent = state.read_at.is_some_and(|at| at.elapsed() < RETRY_PAUSE);
        match &state.backend {
            Some((_, backend)) if !state.must_reread_url || is_recent => return Ok(backend.clone()),
            None if is_recent => return Err(CallError::from_kind(CallErrorKind::Configuration)),
            Some(_) | None => {}
        }
        state.read_at = Some(Instant::now());
        state.must_reread_url = false;
        match self.read_changed_url(&state) {
            Ok(None) => state.is_reported = false,
            Ok(Some((parsed, url))) => {
                if state.backend.is_some() {
                    info!("the URL of Redis has changed");
                }
                state.is_reported = false;
                state.backend = Some((url, Backend::from_url(parsed, &self.scripts)));
            }
            Err(error) => {
                if !state.is_reported {
                    warn!(error = &error as &dyn std::error::Error, "the URL of Redis cannot be used");
                }
                state.is_reported = true;
                state.must_reread_url = true;
            }
        }
        let backend = state.backend.as_ref().map(|(_, backend)| backend.clone());
        backend.ok_or(CallError::from_kind(CallErrorKind::Configuration))
    }

    /// Reads the URL. Returns `None` if the URL has not changed. In this case the backend stays, because it reconnects
    /// without help.
    fn read_changed_url(&self, state: &ClientState) -> Result<Option<(RedisUrl, Zeroizing<String>)>, ConnectError> {
        let url = self.url.read()?;
        if state.backend.as_ref().is_some_and(|(current, _)| *current == url) {
            return Ok(None);
        }
        Ok(Some((RedisUrl::parse(&url)?, url)))
    }
}
