//! Errors of calls to Postgres, by kind. They contain no values from statements.

use std::io;

use crate::domain::ports::StoreError;

/// The kinds of errors. `as_str` is the value of the metric label `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallErrorKind {
    /// The connection could not be opened, or broke.
    Connection,
    Tls,
    /// The URL, or a file that it names, cannot be used.
    Configuration,
    /// Wrong password, unknown role or unknown database.
    AccessDenied,
    /// No connection became free in time.
    PoolTimeout,
    /// The result did not arrive in time.
    Deadline,
    /// Postgres has too many connections, or has no memory or disk space left.
    Overloaded,
    /// Postgres is starting up, shutting down, or a standby.
    Unavailable,
    /// Serialization failure or deadlock: the transaction was rolled back and can be retried.
    Conflict,
    /// Everything else: a bug of Latchkey.
    Unexpected,
}

/// Why a call failed. Messages from Postgres quote values (`Key (email)=(…)`), so only the SQLSTATE is kept.
#[derive(Debug, thiserror::Error)]
#[error("{}{}", .kind.as_str(), .code.as_deref().map(|code| format!(", SQLSTATE {code}")).unwrap_or_default())]
pub struct CallError {
    pub kind: CallErrorKind,
    pub code: Option<String>,
    #[source]
    source: Option<io::Error>,
}

// === impl CallErrorKind ===

impl CallErrorKind {
    pub const ALL: [Self; 10] = [
        Self::Connection,
        Self::Tls,
        Self::Configuration,
        Self::AccessDenied,
        Self::PoolTimeout,
        Self::Deadline,
        Self::Overloaded,
        Self::Unavailable,
        Self::Conflict,
        Self::Unexpected,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Tls => "tls",
            Self::Configuration => "configuration",
            Self::AccessDenied => "refused",
            Self::PoolTimeout => "pool_timeout",
            Self::Deadline => "deadline",
            Self::Overloaded => "overloaded",
            Self::Unavailable => "away",
            Self::Conflict => "conflict",
            Self::Unexpected => "unexpected",
        }
    }

    /// Returns the kind of an error with this SQLSTATE (PostgreSQL documentation, Appendix A).
    fn from_code(code: &str) -> Self {
        match code {
            // query_canceled (by statement_timeout), lock_not_available, idle_in_transaction_session_timeout.
            "57014" | "55P03" | "25P03" => Self::Deadline,
            // read_only_sql_transaction: a standby, or a former primary.
            "25006" => Self::Unavailable,
            _ => match code.get(..2).unwrap_or(code) {
                "08" => Self::Connection,
                // invalid_authorization_specification, invalid_catalog_name (no such database).
                "28" | "3D" => Self::AccessDenied,
                "40" => Self::Conflict,
                "53" => Self::Overloaded,
                // operator_intervention, system_error.
                "57" | "58" => Self::Unavailable,
                _ => Self::Unexpected,
            },
        }
    }
}

// === impl CallError ===

impl CallError {
    pub(super) const fn deadline() -> Self {
        Self { kind: CallErrorKind::Deadline, code: None, source: None }
    }

    /// The error if no connection became free, or if too many calls wait for one.
    pub(super) const fn pool_timeout() -> Self {
        Self { kind: CallErrorKind::PoolTimeout, code: None, source: None }
    }

    /// Returns a copy of the error. `Clone` cannot be derived, because `io::Error` is not `Clone`.
    pub(super) fn duplicate(&self) -> Self {
        Self { kind: self.kind, code: self.code.clone(), source: self.source.as_ref().map(copy_io_error) }
    }

    /// The error if a row contains a value that Latchkey never writes.
    pub(super) const fn unexpected_row() -> Self {
        Self { kind: CallErrorKind::Unexpected, code: None, source: None }
    }

    /// Whether the call may succeed with a new URL.
    pub(super) fn may_succeed_with_new_url(&self) -> bool {
        matches!(
            self.kind,
            CallErrorKind::AccessDenied | CallErrorKind::Connection | CallErrorKind::Tls | CallErrorKind::PoolTimeout
        )
    }

    /// Whether other connections may be broken too.
    pub(super) fn makes_connections_suspect(&self) -> bool {
        matches!(self.kind, CallErrorKind::Connection | CallErrorKind::Unavailable | CallErrorKind::Deadline)
    }
}

impl From<&sqlx::Error> for CallError {
    fn from(error: &sqlx::Error) -> Self {
        let plain = |kind| Self { kind, code: None, source: None };
        match error {
            sqlx::Error::Io(error) => Self { source: Some(copy_io_error(error)), ..plain(CallErrorKind::Connection) },
            sqlx::Error::Tls(_) => plain(CallErrorKind::Tls),
            sqlx::Error::Configuration(_) | sqlx::Error::ConfigFile(_) => plain(CallErrorKind::Configuration),
            sqlx::Error::PoolTimedOut => plain(CallErrorKind::PoolTimeout),
            sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => plain(CallErrorKind::Unavailable),
            // The connection broke in the middle of a message.
            sqlx::Error::Protocol(_) | sqlx::Error::BeginFailed => plain(CallErrorKind::Connection),
            sqlx::Error::Database(error) => {
                let code = error.code().map(std::borrow::Cow::into_owned);
                let kind = code.as_deref().map_or(CallErrorKind::Unexpected, CallErrorKind::from_code);
                Self { code, ..plain(kind) }
            }
            sqlx::Error::Migrate(_)
            | sqlx::Error::InvalidArgument(_)
            | sqlx::Error::RowNotFound
            | sqlx::Error::TypeNotFound { .. }
            | sqlx::Error::ColumnIndexOutOfBounds { .. }
            | sqlx::Error::ColumnNotFound(_)
            | sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::Encode(_)
            | sqlx::Error::Decode(_)
            | sqlx::Error::AnyDriverError(_)
            | sqlx::Error::InvalidSavePointStatement => plain(CallErrorKind::Unexpected),
            // The enum is non-exhaustive.
            _ => plain(CallErrorKind::Unexpected),
        }
    }
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        let store = "Postgres";
        match error.kind {
            CallErrorKind::Unexpected => Self::Unexpected { store, source: error.into() },
            CallErrorKind::Connection
            | CallErrorKind::Tls
            | CallErrorKind::Configuration
            | CallErrorKind::AccessDenied
            | CallErrorKind::PoolTimeout
            | CallErrorKind::Deadline
            | CallErrorKind::Overloaded
            | CallErrorKind::Unavailable
            | CallErrorKind::Conflict => Self::Unavailable { store, source: error.into() },
        }
    }
}

fn copy_io_error(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_sqlstate_that_does_not_indicate_a_bug_means_unavailable() {
        for (code, kind) in [
            ("57P01", CallErrorKind::Unavailable),
            ("57P03", CallErrorKind::Unavailable),
            ("57014", CallErrorKind::Deadline),
            ("53300", CallErrorKind::Overloaded),
            ("40001", CallErrorKind::Conflict),
            ("40P01", CallErrorKind::Conflict),
            ("25006", CallErrorKind::Unavailable),
            ("28P01", CallErrorKind::AccessDenied),
            ("3D000", CallErrorKind::AccessDenied),
            ("08006", CallErrorKind::Connection),
        ] {
            assert_eq!(CallErrorKind::from_code(code), kind, "{code}");
            let error = CallError { kind, code: Some(code.to_owned()), source: None };
            assert!(matches!(StoreError::from(error), StoreError::Unavailable { .. }), "{code}");
        }
    }

    #[test]
    fn a_violated_constraint_or_a_missing_table_is_unexpected() {
        for code in ["23505", "23514", "42P01", "22P02", ""] {
            assert_eq!(CallErrorKind::from_code(code), CallErrorKind::Unexpected, "{code}");
        }
        let error = CallError { kind: CallErrorKind::Unexpected, code: Some("23505".to_owned()), source: None };
        assert_eq!(error.to_string(), "unexpected, SQLSTATE 23505");
    }
}
