//! Connections to Redis: made when needed, dropped when broken, never a queue while it is away.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, Pipeline, RedisError, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::{
    sync::{Mutex as AsyncMutex, Semaphore},
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

use super::{CALL_LIMIT, ConnectError, Scripts, UrlSource, errors::Fault, errors::FaultKind};
use crate::domain::ports::Carried;

/// After an attempt to connect failed, calls fail with it for so long.
const PAUSE: Duration = Duration::from_millis(100);
/// How many calls may wait for a replica at a time; more go on without.
const WAITERS: usize = 8;
/// The longest wait for a replica (contract, 4).
const REPLICA_LIMIT: Duration = Duration::from_millis(100);
/// How often the number of replicas is looked up.
const REPLICAS_INTERVAL: Duration = Duration::from_secs(5);

/// One connection that many calls share, made anew from the URL as it then is.
pub(super) struct Link {
    url: UrlSource,
    scripts: Arc<Scripts>,
    state: AsyncMutex<State>,
}

#[derive(Default)]
struct State {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that a call drops the one it used and no later one.
    number: u64,
    failed: Option<(Instant, Fault)>,
}

/// Connections for calls that wait for a replica, each used by one call at a time.
pub(super) struct Replicated {
    free: Mutex<Vec<Arc<Link>>>,
    places: Semaphore,
    replicas: Mutex<Option<(Instant, bool)>>,
}

pub(super) fn client(url: &UrlSource) -> Result<Client, ConnectError> {
    let url = url.read()?;
    if url.starts_with("rediss:") {
        // Fails where there is one already, which is as good.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    }
    Client::open(url.as_str()).map_err(|_| ConnectError::Malformed)
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
        Self { url, scripts, state: AsyncMutex::default() }
    }

    /// Sends commands in one go; an answer for each, or the first error among them.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, Fault> {
        match self.send_once(commands, until).await {
            // Nothing was done by a script that is not there, and all of one pipeline are the same or none.
            Err(fault) if fault.is_script_unknown() => {
                self.send_once(&self.scripts.load(), until).await?;
                self.send_once(commands, until).await
            }
            answer => answer,
        }
    }

    async fn send_once(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, Fault> {
        let (mut connection, number) = match timeout_at(until, self.connection(until)).await {
            Ok(connection) => connection?,
            Err(_) => return Err(Fault::of(FaultKind::Deadline)),
        };
        let count = commands.len();
        let answer = match timeout_at(until, connection.req_packed_commands(commands, 0, count)).await {
            Ok(answer) => answer.and_then(|values| values.into_iter().map(Value::extract_error).collect()),
            Err(_) => {
                self.drop_connection(number).await;
                return Err(Fault::of(FaultKind::Deadline));
            }
        };
        let fault = match answer {
            Ok(values) => return Ok(values),
            Err(error) => Fault::from(&error as &RedisError),
        };
        if fault.breaks_the_connection() {
            self.drop_connection(number).await;
        }
        Err(fault)
    }

    async fn connection(&self, until: Instant) -> Result<(MultiplexedConnection, u64), Fault> {
        let mut state = self.state.lock().await;
        if let Some(connection) = &state.connection {
            return Ok((connection.clone(), state.number));
        }
        if let Some((at, fault)) = &state.failed
            && at.elapsed() < PAUSE
        {
            return Err(fault.clone());
        }
        match timeout_at(until, self.make()).await.unwrap_or(Err(Fault::of(FaultKind::Deadline))) {
            Ok(connection) => {
                if state.failed.take().is_some() {
                    info!("connected to Redis again");
                }
                state.number += 1;
                state.connection = Some(connection.clone());
                Ok((connection, state.number))
            }
            Err(fault) => {
                if state.failed.is_none() {
                    warn!(error = &fault as &dyn std::error::Error, "Redis is not reached");
                }
                state.failed = Some((Instant::now(), fault.clone()));
                Err(fault)
            }
        }
    }

    async fn make(&self) -> Result<MultiplexedConnection, Fault> {
        let client = client(&self.url).map_err(|error| {
            warn!(error = &error as &dyn std::error::Error, "the URL of Redis cannot be used");
            Fault::of(FaultKind::Configuration)
        })?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CALL_LIMIT))
            .set_response_timeout(Some(CALL_LIMIT));
        let mut connection =
            client.get_multiplexed_async_connection_with_config(&config).await.map_err(|error| Fault::from(&error))?;
        let load = self.scripts.load();
        let count = load.len();
        let loaded = connection.req_packed_commands(&load, 0, count).await;
        let loaded: Result<Vec<_>, _> =
            loaded.and_then(|values| values.into_iter().map(Value::extract_error).collect());
        loaded.map_err(|error| Fault::from(&error))?;
        Ok(connection)
    }

    async fn drop_connection(&self, number: u64) {
        let mut state = self.state.lock().await;
        if state.number == number {
            state.connection = None;
        }
    }
}

// === impl Replicated ===

impl Replicated {
    pub(super) fn new(url: &UrlSource, scripts: &Arc<Scripts>) -> Self {
        let links = (0..WAITERS).map(|_| Arc::new(Link::new(url.clone(), Arc::clone(scripts)))).collect();
        Self { free: Mutex::new(links), places: Semaphore::new(WAITERS), replicas: Mutex::new(None) }
    }

    /// Sends one command and, where Redis has replicas, waits a while for one to have it.
    pub(super) async fn send(&self, link: &Link, command: Cmd, until: Instant) -> Result<(Value, Carried), Fault> {
        let mut commands = Pipeline::new();
        commands.add_command(command);
        if !self.has_replicas(link, until).await? {
            return Ok((first(link.send(&commands, until).await?)?, Carried::Safely));
        }
        let soon = Instant::now() + REPLICA_LIMIT;
        let Ok(Ok(_place)) = timeout_at(soon, self.places.acquire()).await else {
            // All who may wait do already: a replica lags. The write itself does not suffer.
            return Ok((first(link.send(&commands, until).await?)?, Carried::Unconfirmed));
        };
        let own = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(own) = own else { return Err(Fault::unreadable()) };
        commands.cmd("WAIT").arg(1).arg(REPLICA_LIMIT.as_millis().to_string());
        let guard = Returned { replicated: self, link: Some(own) };
        let answer = match &guard.link {
            Some(own) => own.send(&commands, until).await?,
            None => return Err(Fault::unreadable()),
        };
        let mut answers = answer.into_iter();
        let value = answers.next().ok_or_else(Fault::unreadable)?;
        let acknowledged = matches!(answers.next(), Some(Value::Int(replicas)) if replicas > 0);
        Ok((value, if acknowledged { Carried::Safely } else { Carried::Unconfirmed }))
    }

    async fn has_replicas(&self, link: &Link, until: Instant) -> Result<bool, Fault> {
        let known = *self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, replicas)) = known
            && at.elapsed() < REPLICAS_INTERVAL
        {
            return Ok(replicas);
        }
        let mut commands = Pipeline::new();
        commands.cmd("INFO").arg("replication");
        let info = text(first(link.send(&commands, until).await?)?).ok_or_else(Fault::unreadable)?;
        let count = field(&info, "connected_slaves").and_then(|count| count.parse::<u32>().ok()).unwrap_or(0);
        *self.replicas.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), count > 0));
        Ok(count > 0)
    }
}

/// Puts a connection back, also when the call went away.
struct Returned<'a> {
    replicated: &'a Replicated,
    link: Option<Arc<Link>>,
}

impl Drop for Returned<'_> {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            self.replicated.free.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        }
    }
}

fn first(values: Vec<Value>) -> Result<Value, Fault> {
    values.into_iter().next().ok_or_else(Fault::unreadable)
}
