//! One Redis server: a connection that calls share, and a few more connections for calls that wait for the server's
//! replicas.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use redis::{ConnectionInfo, Pipeline, Value};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};

use super::{
    super::scripts::Scripts,
    connection::{Connection, Peer},
    error::CallError,
    reply::{Reply, info_field, text},
};
use crate::domain::ports::Replication;

/// How many calls can wait for a replica at the same time. A further call first waits until one of these calls has
/// finished, at most `REPLICA_TIMEOUT`. If none finishes in this time, the further call does not wait for a replica.
const MAX_WAITERS: usize = 8;
/// The maximum wait for a replica (specification: Sessions and tokens, Revocation).
const REPLICA_TIMEOUT: Duration = Duration::from_millis(100);
/// After this time, the server is asked again whether it has replicas.
const REPLICA_COUNT_TTL: Duration = Duration::from_secs(5);

/// One Redis server.
pub(super) struct Node {
    shared: Connection,
    /// The idle connections for calls that wait for a replica. Only one call at a time uses such a connection, because
    /// WAIT blocks the commands after it.
    idle: Mutex<Vec<Arc<Connection>>>,
    permits: Semaphore,
    /// Whether the server has replicas, and when it reported that.
    has_replicas: Mutex<Option<(Instant, bool)>>,
}

/// A connection that was taken from `idle`. It is put back on drop, even if the call is cancelled.
struct BorrowedConnection<'a> {
    node: &'a Node,
    connection: Arc<Connection>,
}

// === impl Node ===

impl Node {
    pub(super) fn new(server: ConnectionInfo, peer: Peer, scripts: &Arc<Scripts>) -> Self {
        let additional = || Arc::new(Connection::new(server.clone(), Peer::Additional(Arc::clone(scripts))));
        Self {
            idle: Mutex::new((0..MAX_WAITERS).map(|_| additional()).collect()),
            shared: Connection::new(server, peer),
            permits: Semaphore::new(MAX_WAITERS),
            has_replicas: Mutex::new(None),
        }
    }

    pub(super) const fn shared(&self) -> &Connection {
        &self.shared
    }

    /// Sends commands as one pipeline. Returns the reply to each command.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Reply>, CallError> {
        self.shared.send(commands, until).await
    }

    /// Like `send`. If the server has replicas, waits up to `REPLICA_TIMEOUT` for one of them to acknowledge the write.
    pub(super) async fn send_replicated(
        &self,
        mut commands: Pipeline,
        until: Instant,
    ) -> Result<(Vec<Reply>, Replication), CallError> {
        if !self.has_replicas(until).await? {
            return Ok((self.shared.send(&commands, until).await?, Replication::Complete));
        }
        let replica_deadline = Instant::now() + REPLICA_TIMEOUT;
        let permit = timeout_at(replica_deadline, self.permits.acquire()).await;
        let borrowed = match &permit {
            Ok(Ok(_)) => self.borrow_idle(),
            Ok(Err(_)) | Err(_) => None,
        };
        let Some(borrowed) = borrowed else {
            // `MAX_WAITERS` calls wait already: a replica lags. The write is sent without waiting for a replica.
            return Ok((self.shared.send(&commands, until).await?, Replication::Unconfirmed));
        };
        commands.cmd("WAIT").arg(1).arg(REPLICA_TIMEOUT.as_millis().to_string());
        let mut replies = borrowed.connection.send(&commands, until).await?;
        let acknowledged = matches!(replies.pop(), Some(Ok(Value::Int(replicas))) if replicas > 0);
        Ok((replies, if acknowledged { Replication::Complete } else { Replication::Unconfirmed }))
    }

    fn borrow_idle(&self) -> Option<BorrowedConnection<'_>> {
        self.idle.lock().pop().map(|connection| BorrowedConnection { node: self, connection })
    }

    async fn has_replicas(&self, until: Instant) -> Result<bool, CallError> {
        let last_report = *self.has_replicas.lock();
        if let Some((at, has_replicas)) = last_report
            && at.elapsed() < REPLICA_COUNT_TTL
        {
            return Ok(has_replicas);
        }
        let mut command = redis::cmd("INFO");
        command.arg("replication");
        let reply = self.shared.send_one(command, until).await?;
        let info = text(reply.map_err(|error| CallError::from(&error))?).ok_or_else(CallError::unexpected_reply)?;
        let count = info_field(&info, "connected_slaves").and_then(|count| count.parse::<u32>().ok()).unwrap_or(0);
        *self.has_replicas.lock() = Some((Instant::now(), count > 0));
        Ok(count > 0)
    }
}

impl Drop for BorrowedConnection<'_> {
    fn drop(&mut self) {
        self.node.idle.lock().push(Arc::clone(&self.connection));
    }
}
