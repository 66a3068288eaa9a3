//! The client of Redis: selects the backend by the URL, and reads the URL again when calls fail.

use std::sync::{Arc, Mutex, PoisonError};

use redis::{Cmd, Pipeline, Value};
use tokio::time::Instant;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::{ConnectError, RETRY_PAUSE, Scripts, UrlSource};
use crate::domain::ports::Replication;

mod cluster;
mod connection;
pub(super) mod error;
mod node;
mod sentinel;
pub(super) mod url;

use cluster::Cluster;
use connection::{Peer, Reply};
use error::{CallError, CallErrorKind};
use node::Node;
use sentinel::SentinelGroup;
use url::RedisUrl;

/// Sends commands to the backend that the current URL names.
pub(super) struct RedisClient {
    url: UrlSource,
    scripts: Arc<Scripts>,
    state: Mutex<ClientState>,
}

#[derive(Default)]
struct ClientState {
    /// The backend, and the URL it was made from.
    backend: Option<(Zeroizing<String>, Backend)>,
    /// A call has failed since the URL was read.
    stale: bool,
    read_at: Option<Instant>,
    is_reported: bool,
}

#[derive(Clone)]
enum Backend {
    Single(Arc<Node>),
    Sentinel(Arc<SentinelGroup>),
    Cluster(Arc<Cluster>),
}

/// Reads and parses the URL, so that the start fails if it is invalid.
pub(super) fn check_url(url: &UrlSource) -> Result<(), ConnectError> {
    RedisUrl::parse(&url.read()?)?;
    Ok(())
}

/// A value as text; `None` if it is not text.
pub(super) fn text(value: Value) -> Option<String> {
    redis::from_redis_value(value).ok()
}

/// The value of the line `name:value` in the reply to INFO.
pub(super) fn info_field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

// === impl RedisClient ===

impl RedisClient {
    pub(super) fn new(url: UrlSource, scripts: Arc<Scripts>) -> Self {
        Self { url, scripts, state: Mutex::default() }
    }

    /// Sends commands as one pipeline. Returns a value for each, or the first error.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, CallError> {
        let way = self.backend()?;
        let outcome = match &way {
            Backend::Single(node) => node.send(commands, until).await.and_then(values),
            Backend::Sentinel(sentinel) => match sentinel.primary(until).await {
                Ok(node) => node.send(commands, until).await.and_then(values),
                Err(fault) => Err(fault),
            },
            Backend::Cluster(cluster) => cluster.send(commands, until).await,
        };
        self.note_outcome(&way, outcome)
    }

    /// Sends one command. If the server has replicas, waits up to 100 ms for one to acknowledge the write.
    pub(super) async fn send_replicated(
        &self,
        command: Cmd,
        until: Instant,
    ) -> Result<(Value, Replication), CallError> {
        let way = self.backend()?;
        let outcome = match &way {
            Backend::Single(node) => send_replicated(node, command, until).await,
            Backend::Sentinel(sentinel) => match sentinel.primary(until).await {
                Ok(node) => send_replicated(&node, command, until).await,
                Err(fault) => Err(fault),
            },
            Backend::Cluster(cluster) => cluster.send_replicated(command, until).await,
        };
        self.note_outcome(&way, outcome)
    }

    /// Sends commands to every primary. Returns the values of each.
    pub(super) async fn send_to_all(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Vec<Value>>, CallError> {
        match self.backend()? {
            Backend::Cluster(cluster) => {
                let answers = cluster.send_to_all(commands, until).await?;
                answers.into_iter().map(values).collect()
            }
            Backend::Single(_) | Backend::Sentinel(_) => self.send(commands, until).await.map(|values| vec![values]),
        }
    }

    fn note_outcome<T>(&self, way: &Backend, outcome: Result<T, CallError>) -> Result<T, CallError> {
        if outcome.as_ref().is_err_and(CallError::needs_rediscovery) {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).stale = true;
            match way {
                Backend::Single(_) => {}
                Backend::Sentinel(sentinel) => sentinel.mark_stale(),
                Backend::Cluster(cluster) => cluster.mark_stale(),
            }
        }
        outcome
    }

    /// The backend of the current URL. Reads the URL again if a call failed, at most once per `RETRY_PAUSE`.
    fn backend(&self) -> Result<Backend, CallError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = state.read_at.is_some_and(|at| at.elapsed() < RETRY_PAUSE);
        match &state.backend {
            Some((_, way)) if !state.stale || is_recent => return Ok(way.clone()),
            None if is_recent => return Err(CallError::from_kind(CallErrorKind::Configuration)),
            Some(_) | None => {}
        }
        state.read_at = Some(Instant::now());
        state.stale = false;
        let read = self.url.read().map_err(ConnectError::from);
        let read = read.and_then(|url| match &state.backend {
            // The URL has not changed. The backend reconnects by itself.
            Some((before, _)) if *before == url => Ok(None),
            Some(_) | None => Ok(Some((RedisUrl::parse(&url)?, url))),
        });
        match read {
            Ok(None) => state.is_reported = false,
            Ok(Some((form, url))) => {
                if state.backend.is_some() {
                    info!("the URL of Redis has changed");
                }
                state.is_reported = false;
                state.backend = Some((url, Backend::from_url(form, &self.scripts)));
            }
            Err(error) => {
                if !state.is_reported {
                    warn!(error = &error as &dyn std::error::Error, "the URL of Redis cannot be used");
                }
                state.is_reported = true;
                state.stale = true;
            }
        }
        state.backend.as_ref().map(|(_, way)| way.clone()).ok_or(CallError::from_kind(CallErrorKind::Configuration))
    }
}

fn values(answers: Vec<Reply>) -> Result<Vec<Value>, CallError> {
    answers.into_iter().map(|answer| answer.map_err(|error| CallError::from(&error))).collect()
}

async fn send_replicated(node: &Node, command: Cmd, until: Instant) -> Result<(Value, Replication), CallError> {
    let mut commands = Pipeline::new();
    commands.add_command(command);
    let (answers, carried) = node.send_replicated(commands, until).await?;
    let value = values(answers)?.into_iter().next().ok_or_else(CallError::unexpected_reply)?;
    Ok((value, carried))
}

// === impl Backend ===

impl Backend {
    fn from_url(form: RedisUrl, scripts: &Arc<Scripts>) -> Self {
        match form {
            RedisUrl::Single(server) => {
                Self::Single(Arc::new(Node::new(*server, Peer::Server(Arc::clone(scripts)), scripts)))
            }
            RedisUrl::Sentinel { master_name: name, sentinels, primary_settings: primary } => {
                Self::Sentinel(SentinelGroup::start(name, sentinels, *primary, scripts))
            }
            RedisUrl::Cluster { seeds, node_settings: node } => {
                Self::Cluster(Arc::new(Cluster::new(seeds, *node, scripts)))
            }
        }
    }
}
