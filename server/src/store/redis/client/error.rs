//! Errors of calls to Redis, by kind. They contain no key and no value.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::domain::ports::StoreError;

/// The kinds of errors. `as_str` is the value of the metric label `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallErrorKind {
    /// The connection could not be opened, or broke.
    Connection,
    /// The URL cannot be read or used.
    Configuration,
    /// Wrong password, or a command that the user's ACL does not allow.
    AccessDenied,
    /// The reply did not arrive in time.
    Deadline,
    /// The server cannot execute the command now: it loads data, runs a long script, is a replica, or has too few
    /// replicas or a failing disk. Another cause is a cluster that is down or moves slots.
    Unavailable,
    /// Redis's memory is full.
    OutOfMemory,
    /// Everything else: a bug of Latchkey.
    Unexpected,
}

/// Why a call failed. Messages from Redis can quote arguments, so an error contains only the code of the message.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}{}", .kind.as_str(), .code.as_deref().map(|code| format!(", {code}")).unwrap_or_default())]
pub struct CallError {
    pub kind: CallErrorKind,
    pub code: Option<String>,
}

// === impl CallErrorKind ===

impl CallErrorKind {
    pub const ALL: [Self; 7] = [
        Self::Connection,
        Self::Configuration,
        Self::AccessDenied,
        Self::Deadline,
        Self::Unavailable,
        Self::OutOfMemory,
        Self::Unexpected,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Configuration => "configuration",
            Self::AccessDenied => "refused",
            Self::Deadline => "deadline",
            Self::Unavailable => "away",
            Self::OutOfMemory => "full",
            Self::Unexpected => "unexpected",
        }
    }

    /// Returns the kind of an error reply. `code` is the first word of the reply.
    fn from_code(code: &str) -> Self {
        match code {
            "NOAUTH" | "WRONGPASS" | "NOPERM" => Self::AccessDenied,
            "OOM" => Self::OutOfMemory,
            "LOADING" | "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "NOREPLICAS" | "MISCONF" | "BUSY"
            | "UNBLOCKED" | "MOVED" | "ASK" => Self::Unavailable,
            _ => Self::Unexpected,
        }
    }
}

// === impl CallError ===

impl CallError {
    pub(super) const fn from_kind(kind: CallErrorKind) -> Self {
        Self { kind, code: None }
    }

    pub(in crate::store::redis) const fn unexpected_reply() -> Self {
        Self::from_kind(CallErrorKind::Unexpected)
    }

    /// The error if the servers do not support the topology of the URL. `code` names the command or the problem.
    pub(super) fn configuration(code: &str) -> Self {
        Self { kind: CallErrorKind::Configuration, code: Some(code.to_owned()) }
    }

    pub(super) fn not_primary() -> Self {
        Self { kind: CallErrorKind::Unavailable, code: Some("not a primary".to_owned()) }
    }

    /// The error if no node serves the slot, or the slot does not stop migrating.
    pub(super) fn slot_unserved() -> Self {
        Self { kind: CallErrorKind::Unavailable, code: Some("CLUSTERDOWN".to_owned()) }
    }

    /// Converts the error of a command that only sentinels or cluster nodes support. An unexpected error means that the
    /// peer is neither a sentinel nor a cluster node, so the URL names the wrong topology.
    pub(super) fn for_discovery(self, command: &str) -> Self {
        if self.kind == CallErrorKind::Unexpected { Self::configuration(command) } else { self }
    }

    /// Whether to drop the connection: a new connection can succeed, for example to a restarted server, to a new
    /// primary or with a new password.
    pub(super) fn breaks_the_connection(&self) -> bool {
        // A cluster node returns these codes on a working connection.
        let is_cluster_reply = matches!(self.code.as_deref(), Some("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN"));
        !is_cluster_reply && self.needs_rediscovery()
    }

    /// Whether Redis may have a new primary or a new URL.
    pub(super) fn needs_rediscovery(&self) -> bool {
        match self.kind {
            CallErrorKind::Connection
            | CallErrorKind::Configuration
            | CallErrorKind::AccessDenied
            | CallErrorKind::Deadline
            | CallErrorKind::Unavailable => true,
            CallErrorKind::OutOfMemory | CallErrorKind::Unexpected => false,
        }
    }
}

impl From<&RedisError> for CallError {
    fn from(error: &RedisError) -> Self {
        if error.is_timeout() {
            return Self::from_kind(CallErrorKind::Deadline);
        }
        let kind = match error.kind() {
            ErrorKind::Io => CallErrorKind::Connection,
            ErrorKind::AuthenticationFailed => CallErrorKind::AccessDenied,
            ErrorKind::InvalidClientConfig => CallErrorKind::Configuration,
            ErrorKind::Server(kind) => match kind {
                ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::TryAgain => CallErrorKind::Unavailable,
                _ => error.code().map_or(CallErrorKind::Unexpected, CallErrorKind::from_code),
            },
            ErrorKind::Extension => error.code().map_or(CallErrorKind::Unexpected, CallErrorKind::from_code),
            _ => CallErrorKind::Unexpected,
        };
        // The client library drops the code of a failed AUTH.
        let auth = (kind == CallErrorKind::AccessDenied).then_some("AUTH");
        Self { kind, code: error.code().or(auth).map(str::to_owned) }
    }
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        let store = "Redis";
        match error.kind {
            CallErrorKind::Unexpected => Self::Unexpected { store, source: error.into() },
            CallErrorKind::Connection
            | CallErrorKind::Configuration
            | CallErrorKind::AccessDenied
            | CallErrorKind::Deadline
            | CallErrorKind::Unavailable
            | CallErrorKind::OutOfMemory => Self::Unavailable { store, source: error.into() },
        }
    }
}
