//! A connection that many calls share: made when it is needed, dropped when it is broken, never a queue while it is away.

use std::sync::Arc;

use redis::{
    AsyncConnectionConfig, Client, ConnectionInfo, Pipeline, RedisError, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

use super::{
    CALL_LIMIT, PAUSE, Scripts,
    errors::{Fault, FaultKind},
};

/// What a server says to one command.
pub(super) type Answer = Result<Value, RedisError>;

/// One connection, made anew to the same address.
pub(super) struct Line {
    to: ConnectionInfo,
    end: End,
    state: AsyncMutex<State>,
}

/// Who is at the other end, and so what a new connection begins with.
#[derive(Clone)]
pub(super) enum End {
    Server(Arc<Scripts>),
    /// As a server, but only where it says that it is a primary.
    Primary(Arc<Scripts>),
    /// One more to a server or primary, of which nothing is told.
    Further(Arc<Scripts>),
    /// Whoever knows where servers are: it keeps no keys of ours.
    Guide,
}

#[derive(Default)]
struct State {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that a call drops the one it used and no later one.
    number: u64,
    failed: Option<(Instant, Fault)>,
}

// === impl End ===

impl End {
    const fn scripts(&self) -> Option<&Arc<Scripts>> {
        match self {
            Self::Server(scripts) | Self::Primary(scripts) | Self::Further(scripts) => Some(scripts),
            Self::Guide => None,
        }
    }
}

// === impl Line ===

impl Line {
    pub(super) fn new(to: ConnectionInfo, end: End) -> Self {
        Self { to, end, state: AsyncMutex::default() }
    }

    pub(super) const fn to(&self) -> &ConnectionInfo {
        &self.to
    }

    /// Sends commands in one go; what the server says to each.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Answer>, Fault> {
        let mut answers = self.send_once(commands, until).await?;
        let unknown = answers.iter().position(is_script_unknown);
        let (Some(unknown), Some(scripts)) = (unknown, self.end.scripts()) else { return Ok(answers) };
        // Nothing was done by a script that is not there, and what follows one is no script or not there either.
        for answer in self.send_once(&scripts.load(), until).await? {
            answer.map_err(|error| Fault::from(&error))?;
        }
        let mut again = Pipeline::new();
        for command in commands.cmd_iter().skip(unknown) {
            again.add_command(command.clone());
        }
        answers.truncate(unknown);
        answers.extend(self.send_once(&again, until).await?);
        Ok(answers)
    }

    async fn send_once(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Answer>, Fault> {
        let (mut connection, number) = match timeout_at(until, self.connection(until)).await {
            Ok(connection) => connection?,
            Err(_) => return Err(Fault::of(FaultKind::Deadline)),
        };
        let count = commands.len();
        let answers = match timeout_at(until, connection.req_packed_commands(commands, 0, count)).await {
            Ok(Ok(values)) if values.len() == count => values.into_iter().map(Value::extract_error).collect::<Vec<_>>(),
            Ok(Ok(_)) => {
                self.drop_connection(number).await;
                return Err(Fault::unreadable());
            }
            Ok(Err(error)) => {
                let fault = Fault::from(&error);
                if fault.breaks_the_connection() {
                    self.drop_connection(number).await;
                }
                return Err(fault);
            }
            Err(_) => {
                self.drop_connection(number).await;
                return Err(Fault::of(FaultKind::Deadline));
            }
        };
        let breaks = |answer: &Answer| answer.as_ref().is_err_and(|error| Fault::from(error).breaks_the_connection());
        if answers.iter().any(breaks) {
            self.drop_connection(number).await;
        }
        Ok(answers)
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
        // Rarer than a call and much larger, which every call would have room for.
        let made = timeout_at(until, Box::pin(self.make())).await;
        match made.unwrap_or(Err(Fault::of(FaultKind::Deadline))) {
            Ok(connection) => {
                if state.failed.take().is_some() {
                    self.tell_of_return();
                }
                state.number += 1;
                state.connection = Some(connection.clone());
                Ok((connection, state.number))
            }
            Err(fault) => {
                if state.failed.is_none() {
                    self.tell_of(&fault);
                }
                state.failed = Some((Instant::now(), fault.clone()));
                Err(fault)
            }
        }
    }

    async fn make(&self) -> Result<MultiplexedConnection, Fault> {
        let client = Client::open(self.to.clone()).map_err(|error| Fault::from(&error))?;
        // Each call has its own deadline.
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CALL_LIMIT)).set_response_timeout(None);
        let mut connection =
            client.get_multiplexed_async_connection_with_config(&config).await.map_err(|error| Fault::from(&error))?;
        let mut begin = self.end.scripts().map(|scripts| scripts.load()).unwrap_or_default();
        let is_to_be_primary = matches!(self.end, End::Primary(_));
        if is_to_be_primary {
            begin.cmd("ROLE");
        }
        let count = begin.len();
        if count == 0 {
            return Ok(connection);
        }
        let begun = connection.req_packed_commands(&begin, 0, count).await;
        let begun: Result<Vec<_>, _> = begun.and_then(|values| values.into_iter().map(Value::extract_error).collect());
        let last = begun.map_err(|error| Fault::from(&error))?.pop();
        if is_to_be_primary && !last.is_some_and(is_primary) {
            return Err(Fault::not_primary());
        }
        Ok(connection)
    }

    async fn drop_connection(&self, number: u64) {
        let mut state = self.state.lock().await;
        if state.number == number {
            state.connection = None;
        }
    }

    fn tell_of(&self, fault: &Fault) {
        let (at, error) = (self.to.addr(), fault as &dyn std::error::Error);
        match self.end {
            End::Server(_) | End::Primary(_) => warn!(%at, error, "Redis is not reached"),
            End::Guide => warn!(%at, error, "who knows where Redis is, is not reached"),
            End::Further(_) => {}
        }
    }

    fn tell_of_return(&self) {
        let at = self.to.addr();
        match self.end {
            End::Server(_) | End::Primary(_) => info!(%at, "connected to Redis again"),
            End::Guide => info!(%at, "connected again to who knows where Redis is"),
            End::Further(_) => {}
        }
    }
}

/// The script is not there: Redis was restarted or emptied of scripts.
fn is_script_unknown(answer: &Answer) -> bool {
    answer.as_ref().is_err_and(|error| error.code() == Some("NOSCRIPT"))
}

/// By the answer to ROLE.
fn is_primary(role: Value) -> bool {
    let Value::Array(role) = role else { return false };
    role.into_iter().next().and_then(super::link::text).is_some_and(|role| role == "master")
}
