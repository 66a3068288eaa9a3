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

    /// The script is not there: Redis was restarted or emptied of scripts.
    pub(super) fn is_script_unknown(&self) -> bool {
        self.code.as_deref() == Some("NOSCRIPT")
    }

    /// Whether a new connection may do better: to a server that came up, another primary, with another password.
    pub(super) fn breaks_the_connection(&self) -> bool {
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
        Self { kind, code: error.code().map(str::to_owned) }
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
