//! The backend that a URL names: one server, the primary that sentinels name, or a cluster.

use std::sync::Arc;

use redis::{Cmd, Pipeline, Value};
use tokio::time::Instant;

use super::{
    super::scripts::Scripts, cluster::Cluster, connection::Peer, error::CallError, node::Node, reply::values,
    sentinel::SentinelGroup, url::RedisUrl,
};
use crate::domain::ports::Replication;

/// The Redis servers behind a URL. Clones share connections.
#[derive(Clone)]
pub(super) enum Backend {
    Single(Arc<Node>),
    Sentinel(Arc<SentinelGroup>),
    Cluster(Arc<Cluster>),
}

// === impl Backend ===

impl Backend {
    /// Creates the backend that a URL names. Must be called in a tokio runtime.
    pub(super) fn from_url(url: RedisUrl, scripts: &Arc<Scripts>) -> Self {
        match url {
            RedisUrl::Single(server) => {
                Self::Single(Arc::new(Node::new(*server, Peer::Server(Arc::clone(scripts)), scripts)))
            }
            RedisUrl::Sentinel { master_name, sentinels, primary_settings } => {
                Self::Sentinel(SentinelGroup::start(master_name, sentinels, *primary_settings, scripts))
            }
            RedisUrl::Cluster { seeds, node_settings } => {
                Self::Cluster(Arc::new(Cluster::new(seeds, *node_settings, scripts)))
            }
        }
    }

    /// Sends commands as one pipeline. Returns a value for each command, or the first error.
    pub(super) async fn send(&self, commands: &Pipeline, until: Instant) -> Result<Vec<Value>, CallError> {
        match self {
            Self::Single(node) => values(node.send(commands, until).await?),
            Self::Sentinel(group) => values(group.primary(until).await?.send(commands, until).await?),
            Self::Cluster(cluster) => cluster.send(commands, until).await,
        }
    }

    /// Sends one command. If the server has replicas, waits up to 100 ms for one of them to acknowledge the write.
    pub(super) async fn send_replicated(
        &self,
        command: Cmd,
        until: Instant,
    ) -> Result<(Value, Replication), CallError> {
        match self {
            Self::Single(node) => send_replicated(node, command, until).await,
            Self::Sentinel(group) => send_replicated(&*group.primary(until).await?, command, until).await,
            Self::Cluster(cluster) => cluster.send_replicated(command, until).await,
        }
    }

    /// Records that a call failed: servers may have other roles or slots now.
    pub(super) fn mark_stale(&self) {
        match self {
            Self::Single(_) => {}
            Self::Sentinel(group) => group.mark_stale(),
            Self::Cluster(cluster) => cluster.mark_stale(),
        }
    }
}

async fn send_replicated(node: &Node, command: Cmd, until: Instant) -> Result<(Value, Replication), CallError> {
    let mut commands = Pipeline::new();
    commands.add_command(command);
    let (replies, replication) = node.send_replicated(commands, until).await?;
    let value = values(replies)?.into_iter().next().ok_or_else(CallError::unexpected_reply)?;
    Ok((value, replication))
}
