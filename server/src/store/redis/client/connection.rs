//! A connection that many calls share: opened on first use, dropped when it breaks. While it cannot be opened, calls
//! fail immediately.

use std::sync::Arc;

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, Pipeline, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

use super::{
    super::scripts::Scripts,
    error::{CallError, CallErrorKind},
    reply::{Reply, text},
    timeouts::{CALL_TIMEOUT, RETRY_PAUSE},
};

/// A connection to one server, reopened after it breaks.
pub(super) struct Connection {
    info: ConnectionInfo,
    peer: Peer,
    state: AsyncMutex<ConnectionState>,
}

/// The kind of peer, which decides how a new connection is set up.
#[derive(Clone)]
pub(super) enum Peer {
    Server(Arc<Scripts>),
    /// A server that must report the role of a primary.
    Primary(Arc<Scripts>),
    /// An additional connection to a server. Its failures are not logged.
    Additional(Arc<Scripts>),
    /// A sentinel, or a seed node of a cluster. It is only asked where servers are.
    Discovery,
}

#[derive(Default)]
struct ConnectionState {
    connection: Option<MultiplexedConnection>,
    /// The number of the latest connection. A call that failed on an earlier connection, which had a smaller number,
    /// does not drop the latest connection.
    number: u64,
    /// When and why the last attempt to connect failed, if it failed.
    last_failure: Option<(Instant, CallError)>,
}

// === impl Peer ===

impl Peer {
    const fn scripts(&self) -> Option<&Arc<Scripts>> {
        match self {
            Self::Server(scripts) | Self::Primary(scripts) | Self::Additional(scripts) => Some(scripts),
            Self::Discovery => None,
        }
    }
}

// === impl Connection ===

impl Connection {
    pub(super) fn new(info: ConnectionInfo, peer: Peer) -> Self {
        Self { info, peer, state: AsyncMutex::default() }
    }

    pub(super) const fn info(&self) -> &ConnectionInfo {
        &self.info
    }

    /// Sends commands as one pipeline. Returns the reply to each command.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Reply>, CallError> {
        let mut replies = self.send_once(commands, until).await?;
        let first_unknown = replies.iter().position(is_script_unknown);
        let (Some(first_unknown), Some(scripts)) = (first_unknown, self.peer.scripts()) else { return Ok(replies) };
        // Redis did nothing for a script that it does not know. Redis does not know the later scripts of the pipeline
        // either, because all scripts are loaded together. The other later commands (DEL, ASKING, WAIT) run a second
        // time, which is harmless.
        for reply in self.send_once(&scripts.load(), until).await? {
            reply.map_err(|error| CallError::from(&error))?;
        }
        let mut retry = Pipeline::new();
        for command in commands.cmd_iter().skip(first_unknown) {
            retry.add_command(command.clone());
        }
        replies.truncate(first_unknown);
        replies.extend(self.send_once(&retry, until).await?);
        Ok(replies)
    }

    /// Sends one command.
    pub(super) async fn send_one(&self, command: Cmd, until: Instant) -> Result<Reply, CallError> {
        let mut commands = Pipeline::new();
        commands.add_command(command);
        self.send(&commands, until).await?.pop().ok_or_else(CallError::unexpected_reply)
    }

    async fn send_once(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Reply>, CallError> {
        let (mut connection, number) = match timeout_at(until, self.connection(until)).await {
            Ok(connection) => connection?,
            Err(_) => return Err(CallError::from_kind(CallErrorKind::Deadline)),
        };
        let count = commands.len();
        let replies = match timeout_at(until, connection.req_packed_commands(commands, 0, count)).await {
            Ok(Ok(values)) if values.len() == count => values.into_iter().map(Value::extract_error).collect::<Vec<_>>(),
            Ok(Ok(_)) => {
                self.drop_connection(number).await;
                return Err(CallError::unexpected_reply());
            }
            Ok(Err(error)) => {
                let error = CallError::from(&error);
                if error.breaks_the_connection() {
                    self.drop_connection(number).await;
                }
                return Err(error);
            }
            Err(_) => {
                self.drop_connection(number).await;
                return Err(CallError::from_kind(CallErrorKind::Deadline));
            }
        };
        let breaks = |reply: &Reply| reply.as_ref().is_err_and(|error| CallError::from(error).breaks_the_connection());
        if replies.iter().any(breaks) {
            self.drop_connection(number).await;
        }
        Ok(replies)
    }

    /// Returns the open connection and its number. If no connection is open, opens one.
    async fn connection(&self, until: Instant) -> Result<(MultiplexedConnection, u64), CallError> {
        let mut state = self.state.lock().await;
        if let Some(connection) = &state.connection {
            return Ok((connection.clone(), state.number));
        }
        if let Some((at, error)) = &state.last_failure
            && at.elapsed() < RETRY_PAUSE
        {
            return Err(error.clone());
        }
        // Boxed, because the future is large and rarely needed. Otherwise every call would need space for it.
        let opened = timeout_at(until, Box::pin(self.open())).await;
        match opened.unwrap_or(Err(CallError::from_kind(CallErrorKind::Deadline))) {
            Ok(connection) => {
                if state.last_failure.take().is_some() {
                    self.log_recovery();
                }
                state.number += 1;
                state.connection = Some(connection.clone());
                Ok((connection, state.number))
            }
            Err(error) => {
                if state.last_failure.is_none() {
                    self.log_failure(&error);
                }
                state.last_failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Connects, loads the scripts and checks the role.
    async fn open(&self) -> Result<MultiplexedConnection, CallError> {
        let client = Client::open(self.info.clone()).map_err(|error| CallError::from(&error))?;
        // Calls have their own deadline, so the connection has no response timeout.
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CALL_TIMEOUT)).set_response_timeout(None);
        let mut connection = client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .map_err(|error| CallError::from(&error))?;
        let mut setup = self.peer.scripts().map(|scripts| scripts.load()).unwrap_or_default();
        let must_be_primary = matches!(self.peer, Peer::Primary(_));
        if must_be_primary {
            setup.cmd("ROLE");
        }
        let count = setup.len();
        if count == 0 {
            return Ok(connection);
        }
        let replies = connection.req_packed_commands(&setup, 0, count).await;
        let replies: Result<Vec<_>, _> =
            replies.and_then(|values| values.into_iter().map(Value::extract_error).collect());
        let last = replies.map_err(|error| CallError::from(&error))?.pop();
        if must_be_primary && !last.is_some_and(is_primary) {
            return Err(CallError::not_primary());
        }
        Ok(connection)
    }

    /// Drops the connection with this number. A later connection stays open.
    async fn drop_connection(&self, number: u64) {
        let mut state = self.state.lock().await;
        if state.number == number {
            state.connection = None;
        }
    }

    fn log_failure(&self, error: &CallError) {
        let (at, error) = (self.info.addr(), error as &dyn std::error::Error);
        match self.peer {
            Peer::Server(_) | Peer::Primary(_) => warn!(%at, error, "cannot reach Redis"),
            Peer::Discovery => warn!(%at, error, "cannot reach a sentinel or cluster node that locates Redis"),
            Peer::Additional(_) => {}
        }
    }

    fn log_recovery(&self) {
        let at = self.info.addr();
        match self.peer {
            Peer::Server(_) | Peer::Primary(_) => info!(%at, "reconnected to Redis"),
            Peer::Discovery => info!(%at, "reconnected to a sentinel or cluster node that locates Redis"),
            Peer::Additional(_) => {}
        }
    }
}

/// Whether Redis does not have the script, for example after a restart or SCRIPT FLUSH.
fn is_script_unknown(reply: &Reply) -> bool {
    reply.as_ref().is_err_and(|error| error.code() == Some("NOSCRIPT"))
}

/// Whether the reply to ROLE is that of a primary.
fn is_primary(role: Value) -> bool {
    let Value::Array(role) = role else { return false };
    role.into_iter().next().and_then(text).is_some_and(|role| role == "master")
}
