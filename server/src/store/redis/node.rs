//! A server of Redis: the connection that calls share, and a few more for calls that wait for its replicas.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{ConnectionInfo, Pipeline, Value};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};

use super::{
    Scripts,
    errors::Fault,
    line::{Answer, End, Line},
    link::{field, text},
};
use crate::domain::ports::Carried;

/// How many calls may wait for a replica at a time; more go on without.
const WAITERS: usize = 8;
/// The longest wait for a replica (contract, 4).
const REPLICA_LIMIT: Duration = Duration::from_millis(100);
/// How often the number of replicas is looked up.
const REPLICAS_INTERVAL: Duration = Duration::from_secs(5);

/// One server.
pub(super) struct Node {
    shared: Line,
    /// For calls that wait for a replica, each used by one call at a time: WAIT holds up what comes after it.
    free: Mutex<Vec<Arc<Line>>>,
    places: Semaphore,
    replicas: Mutex<Option<(Instant, bool)>>,
}

/// Puts a connection back, also when the call went away.
struct Borrowed<'a> {
    node: &'a Node,
    line: Arc<Line>,
}

// === impl Node ===

impl Node {
    pub(super) fn new(to: ConnectionInfo, end: End, scripts: &Arc<Scripts>) -> Self {
        let further = || Arc::new(Line::new(to.clone(), End::Further(Arc::clone(scripts))));
        Self {
            free: Mutex::new((0..WAITERS).map(|_| further()).collect()),
            shared: Line::new(to, end),
            places: Semaphore::new(WAITERS),
            replicas: Mutex::new(None),
        }
    }

    pub(super) const fn shared(&self) -> &Line {
        &self.shared
    }

    /// Sends commands in one go; what the server says to each.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Answer>, Fault> {
        self.shared.send(commands, until).await
    }

    /// As `send`; where the server has replicas, waits a while for one to have what the last command did.
    pub(super) async fn send_replicated(
        &self,
        mut commands: Pipeline,
        until: Instant,
    ) -> Result<(Vec<Answer>, Carried), Fault> {
        if !self.has_replicas(until).await? {
            return Ok((self.shared.send(&commands, until).await?, Carried::Safely));
        }
        let soon = Instant::now() + REPLICA_LIMIT;
        let place = timeout_at(soon, self.places.acquire()).await;
        let line = || self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let borrowed = match &place {
            Ok(Ok(_)) => line().map(|line| Borrowed { node: self, line }),
            Ok(Err(_)) | Err(_) => None,
        };
        let Some(borrowed) = borrowed else {
            // All who may wait do already: a replica lags. The write itself does not suffer.
            return Ok((self.shared.send(&commands, until).await?, Carried::Unconfirmed));
        };
        commands.cmd("WAIT").arg(1).arg(REPLICA_LIMIT.as_millis().to_string());
        let mut answers = borrowed.line.send(&commands, until).await?;
        let acknowledged = matches!(answers.pop(), Some(Ok(Value::Int(replicas))) if replicas > 0);
        Ok((answers, if acknowledged { Carried::Safely } else { Carried::Unconfirmed }))
    }

    async fn has_replicas(&self, until: Instant) -> Result<bool, Fault> {
        let known = *self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, replicas)) = known
            && at.elapsed() < REPLICAS_INTERVAL
        {
            return Ok(replicas);
        }
        let mut commands = Pipeline::new();
        commands.cmd("INFO").arg("replication");
        let answer = self.shared.send(&commands, until).await?.pop().ok_or_else(Fault::unreadable)?;
        let info = text(answer.map_err(|error| Fault::from(&error))?).ok_or_else(Fault::unreadable)?;
        let count = field(&info, "connected_slaves").and_then(|count| count.parse::<u32>().ok()).unwrap_or(0);
        *self.replicas.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), count > 0));
        Ok(count > 0)
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.node.free.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&self.line));
    }
}
