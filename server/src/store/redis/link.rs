//! The way to Redis, in whichever form its URL tells; the URL is read again when calls fail.

use std::sync::{Arc, Mutex, PoisonError};

use redis::{Cmd, Pipeline, Value};
use tokio::time::Instant;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::{
    ConnectError, PAUSE, Scripts, UrlSource,
    cluster::Cluster,
    errors::{Fault, FaultKind},
    form::Form,
    line::{Answer, End},
    node::Node,
    sentinel::Sentinel,
};
use crate::domain::ports::Carried;

/// To Redis, by the URL as it is.
pub(super) struct Link {
    url: UrlSource,
    scripts: Arc<Scripts>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// With the URL that told it.
    way: Option<(Zeroizing<String>, Way)>,
    /// A call failed since the URL was read.
    doubtful: bool,
    read: Option<Instant>,
    told: bool,
}

#[derive(Clone)]
enum Way {
    Single(Arc<Node>),
    Sentinel(Arc<Sentinel>),
    Cluster(Arc<Cluster>),
}

/// Reads the URL, to tell early what is wrong with it.
pub(super) fn check(url: &UrlSource) -> Result<(), ConnectError> {
    Form::parse(&url.read()?)?;
    Ok(())
}

/// An answer that is text.
pub(super) fn text(value: Value) -> Option<String> {
    redis::from_redis_value(value).ok()
}

/// The value of a line `name:value` of INFO.
pub(super) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

// === impl Link ===

impl Link {
    pub(super) fn new(url: UrlSource, scripts: Arc<Scripts>) -> Self {
        Self { url, scripts, state: Mutex::default() }
    }

    /// Sends commands in one go; an answer for each, or the first error among them.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, Fault> {
        let way = self.way()?;
        let outcome = match &way {
            Way::Single(node) => node.send(commands, until).await.and_then(values),
            Way::Sentinel(sentinel) => match sentinel.primary(until).await {
                Ok(node) => node.send(commands, until).await.and_then(values),
                Err(fault) => Err(fault),
            },
            Way::Cluster(cluster) => cluster.send(commands, until).await,
        };
        self.noted(&way, outcome)
    }

    /// Sends one command; where the server has replicas, waits a while for one to have what it did.
    pub(super) async fn send_replicated(&self, command: Cmd, until: Instant) -> Result<(Value, Carried), Fault> {
        let way = self.way()?;
        let outcome = match &way {
            Way::Single(node) => send_replicated(node, command, until).await,
            Way::Sentinel(sentinel) => match sentinel.primary(until).await {
                Ok(node) => send_replicated(&node, command, until).await,
                Err(fault) => Err(fault),
            },
            Way::Cluster(cluster) => cluster.send_replicated(command, until).await,
        };
        self.noted(&way, outcome)
    }

    /// Sends commands to every primary; what each says.
    pub(super) async fn send_to_all(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Vec<Value>>, Fault> {
        match self.way()? {
            Way::Cluster(cluster) => {
                let answers = cluster.send_to_all(commands, until).await?;
                answers.into_iter().map(values).collect()
            }
            Way::Single(_) | Way::Sentinel(_) => self.send(commands, until).await.map(|values| vec![values]),
        }
    }

    fn noted<T>(&self, way: &Way, outcome: Result<T, Fault>) -> Result<T, Fault> {
        if outcome.as_ref().is_err_and(Fault::calls_for_another_look) {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).doubtful = true;
            match way {
                Way::Single(_) => {}
                Way::Sentinel(sentinel) => sentinel.doubt(),
                Way::Cluster(cluster) => cluster.doubt(),
            }
        }
        outcome
    }

    /// By the URL as it was when it was last read, which it is again now and then while calls fail.
    fn way(&self) -> Result<Way, Fault> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = state.read.is_some_and(|at| at.elapsed() < PAUSE);
        match &state.way {
            Some((_, way)) if !state.doubtful || is_recent => return Ok(way.clone()),
            None if is_recent => return Err(Fault::of(FaultKind::Configuration)),
            Some(_) | None => {}
        }
        state.read = Some(Instant::now());
        state.doubtful = false;
        let read = self.url.read().map_err(ConnectError::from);
        let read = read.and_then(|url| match &state.way {
            // It makes its connections anew by itself.
            Some((before, _)) if *before == url => Ok(None),
            Some(_) | None => Ok(Some((Form::parse(&url)?, url))),
        });
        match read {
            Ok(None) => state.told = false,
            Ok(Some((form, url))) => {
                if state.way.is_some() {
                    info!("Redis has another URL");
                }
                state.told = false;
                state.way = Some((url, Way::by(form, &self.scripts)));
            }
            Err(error) => {
                if !state.told {
                    warn!(error = &error as &dyn std::error::Error, "the URL of Redis cannot be used");
                }
                state.told = true;
                state.doubtful = true;
            }
        }
        state.way.as_ref().map(|(_, way)| way.clone()).ok_or(Fault::of(FaultKind::Configuration))
    }
}

fn values(answers: Vec<Answer>) -> Result<Vec<Value>, Fault> {
    answers.into_iter().map(|answer| answer.map_err(|error| Fault::from(&error))).collect()
}

async fn send_replicated(node: &Node, command: Cmd, until: Instant) -> Result<(Value, Carried), Fault> {
    let mut commands = Pipeline::new();
    commands.add_command(command);
    let (answers, carried) = node.send_replicated(commands, until).await?;
    let value = values(answers)?.into_iter().next().ok_or_else(Fault::unreadable)?;
    Ok((value, carried))
}

// === impl Way ===

impl Way {
    fn by(form: Form, scripts: &Arc<Scripts>) -> Self {
        match form {
            Form::Single(server) => {
                Self::Single(Arc::new(Node::new(*server, End::Server(Arc::clone(scripts)), scripts)))
            }
            Form::Sentinel { name, sentinels, primary } => {
                Self::Sentinel(Sentinel::start(name, sentinels, *primary, scripts))
            }
            Form::Cluster { seeds, node } => Self::Cluster(Arc::new(Cluster::new(seeds, *node, scripts))),
        }
    }
}
