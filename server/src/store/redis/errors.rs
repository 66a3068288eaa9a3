//! What went wrong with Redis, by kind, without any key or value.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::domain::ports::StoreError;

/// The kinds of faults; the name is the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The connection could not be made, or broke.
    Connection,
    /// The URL cannot be read or used.
    Configuration,
    /// Wrong password, or a command that the role may not call.
    Refused,
    /// The answer did not come in time.
    Deadline,
    /// Loading its data, a replica, or without its replicas or its disk.
    Away,
    /// Its memory is full.
    Full,
    /// Anything else: our fault.
    Unexpected,
}

/// A fault. Messages of Redis may quote arguments, so only the code is kept.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}{}", .kind.as_str(), .code.as_deref().map(|code| format!(", {code}")).unwrap_or_default())]
pub struct Fault {
    pub kind: FaultKind,
    pub code: Option<String>,
}

// === impl FaultKind ===

impl FaultKind {
    pub const ALL: [Self; 7] = [
        Self::Connection,
        Self::Configuration,
        Self::Refused,
        Self::Deadline,
        Self::Away,
        Self::Full,
        Self::Unexpected,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Configuration => "configuration",
            Self::Refused => "refused",
            Self::Deadline => "deadline",
            Self::Away => "away",
            Self::Full => "full",
            Self::Unexpected => "unexpected",
        }
    }

    /// By the first word of an error that the server answers.
    fn of_code(code: &str) -> Self {
        match code {
            "NOAUTH" | "WRONGPASS" | "NOPERM" => Self::Refused,
            "OOM" => Self::Full,
            "LOADING" | "READONLY" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "NOREPLICAS" | "MISCONF" | "BUSY"
            | "UNBLOCKED" | "MOVED" | "ASK" => Self::Away,
            _ => Self::Unexpected,
        }
    }
}

// === impl Fault ===

impl Fault {
    pub(super) const fn of(kind: FaultKind) -> Self {
        Self { kind, code: None }
    }

    pub(super) const fn unreadable() -> Self {
        Self::of(FaultKind::Unexpected)
    }

    /// The server does not know what its form of Redis does; `code` says of what.
    pub(super) fn configuration(code: &str) -> Self {
        Self { kind: FaultKind::Configuration, code: Some(code.to_owned()) }
    }

    pub(super) fn not_primary() -> Self {
        Self { kind: FaultKind::Away, code: Some("not a primary".to_owned()) }
    }

    /// No node has a slot, or it does not stop moving.
    pub(super) fn slot_unserved() -> Self {
        Self { kind: FaultKind::Away, code: Some("CLUSTERDOWN".to_owned()) }
    }

    /// Of a command that sentinels or nodes of a cluster know, and other servers do not.
    pub(super) fn of_guide(self, command: &str) -> Self {
        if self.kind == FaultKind::Unexpected { Self::configuration(command) } else { self }
    }

    /// Whether a new connection may do better: to a server that came up, another primary, with another password.
    pub(super) fn breaks_the_connection(&self) -> bool {
        // A node of a cluster says these on a connection that is as it should be.
        let is_of_cluster = matches!(self.code.as_deref(), Some("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN"));
        !is_of_cluster && self.calls_for_another_look()
    }

    /// Whether Redis may be elsewhere by now, or its URL another.
    pub(super) fn calls_for_another_look(&self) -> bool {
        match self.kind {
            FaultKind::Connection
            | FaultKind::Configuration
            | FaultKind::Refused
            | FaultKind::Deadline
            | FaultKind::Away => true,
            FaultKind::Full | FaultKind::Unexpected => false,
        }
    }
}

impl From<&RedisError> for Fault {
    fn from(error: &RedisError) -> Self {
        if error.is_timeout() {
            return Self::of(FaultKind::Deadline);
        }
        let kind = match error.kind() {
            ErrorKind::Io => FaultKind::Connection,
            ErrorKind::AuthenticationFailed => FaultKind::Refused,
            ErrorKind::InvalidClientConfig => FaultKind::Configuration,
            ErrorKind::Server(kind) => match kind {
                ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::TryAgain => FaultKind::Away,
                _ => error.code().map_or(FaultKind::Unexpected, FaultKind::of_code),
            },
            ErrorKind::Extension => error.code().map_or(FaultKind::Unexpected, FaultKind::of_code),
            _ => FaultKind::Unexpected,
        };
        // The client does not say why a login failed.
        let login = (kind == FaultKind::Refused).then_some("AUTH");
        Self { kind, code: error.code().or(login).map(str::to_owned) }
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        let store = "Redis";
        match fault.kind {
            FaultKind::Unexpected => Self::Unexpected { store, source: fault.into() },
            FaultKind::Connection
            | FaultKind::Configuration
            | FaultKind::Refused
            | FaultKind::Deadline
            | FaultKind::Away
            | FaultKind::Full => Self::Unavailable { store, source: fault.into() },
        }
    }
}
