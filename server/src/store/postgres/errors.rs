//! What went wrong with Postgres, by kind, without any value that a statement carried.

use std::io;

use crate::domain::ports::StoreError;

/// The kinds of faults; the name is the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The connection could not be made, or broke.
    Connection,
    Tls,
    /// The URL, or a file that it names, cannot be used.
    Configuration,
    /// Wrong password, no such role or database.
    Refused,
    /// No connection came free in time.
    PoolTimeout,
    /// The answer did not come in time.
    Deadline,
    /// Too many connections, no memory, no disk.
    Overloaded,
    /// It is shutting down, starting up or a standby.
    Away,
    /// Serialization failure or deadlock: the transaction is gone, and may be tried again.
    Conflict,
    /// Anything else: our fault.
    Unexpected,
}

/// A fault. Messages of Postgres quote values (`Key (email)=(…)`), so only its code is kept.
#[derive(Debug, thiserror::Error)]
#[error("{}{}", .kind.as_str(), .code.as_deref().map(|code| format!(", SQLSTATE {code}")).unwrap_or_default())]
pub struct Fault {
    pub kind: FaultKind,
    pub code: Option<String>,
    #[source]
    source: Option<io::Error>,
}

// === impl FaultKind ===

impl FaultKind {
    pub const ALL: [Self; 10] = [
        Self::Connection,
        Self::Tls,
        Self::Configuration,
        Self::Refused,
        Self::PoolTimeout,
        Self::Deadline,
        Self::Overloaded,
        Self::Away,
        Self::Conflict,
        Self::Unexpected,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connection => "connection",
            Self::Tls => "tls",
            Self::Configuration => "configuration",
            Self::Refused => "refused",
            Self::PoolTimeout => "pool_timeout",
            Self::Deadline => "deadline",
            Self::Overloaded => "overloaded",
            Self::Away => "away",
            Self::Conflict => "conflict",
            Self::Unexpected => "unexpected",
        }
    }

    /// By the code of PostgreSQL's Appendix A.
    fn of_code(code: &str) -> Self {
        match code {
            // query_canceled: by statement_timeout. lock_not_available, idle_in_transaction_session_timeout: held up.
            "57014" | "55P03" | "25P03" => Self::Deadline,
            // read_only_sql_transaction: a standby, or a former primary.
            "25006" => Self::Away,
            _ => match code.get(..2).unwrap_or(code) {
                "08" => Self::Connection,
                // invalid_authorization_specification, invalid_catalog_name (no such database).
                "28" | "3D" => Self::Refused,
                "40" => Self::Conflict,
                "53" => Self::Overloaded,
                // operator_intervention, system_error.
                "57" | "58" => Self::Away,
                _ => Self::Unexpected,
            },
        }
    }
}

// === impl Fault ===

impl Fault {
    pub(super) const fn deadline() -> Self {
        Self { kind: FaultKind::Deadline, code: None, source: None }
    }

    /// No connection came free, or too many wait for one.
    pub(super) const fn pool_timeout() -> Self {
        Self { kind: FaultKind::PoolTimeout, code: None, source: None }
    }

    /// The same for another caller.
    pub(super) fn duplicate(&self) -> Self {
        Self { kind: self.kind, code: self.code.clone(), source: self.source.as_ref().map(copy) }
    }

    /// A row holds what no rule of ours would have written.
    pub(super) const fn unreadable() -> Self {
        Self { kind: FaultKind::Unexpected, code: None, source: None }
    }

    /// Whether another URL might help.
    pub(super) fn is_about_the_url(&self) -> bool {
        matches!(self.kind, FaultKind::Refused | FaultKind::Connection | FaultKind::Tls | FaultKind::PoolTimeout)
    }

    /// Whether other connections may be broken too.
    pub(super) fn breaks_the_connection(&self) -> bool {
        matches!(self.kind, FaultKind::Connection | FaultKind::Away | FaultKind::Deadline)
    }
}

impl From<&sqlx::Error> for Fault {
    fn from(error: &sqlx::Error) -> Self {
        let plain = |kind| Self { kind, code: None, source: None };
        match error {
            sqlx::Error::Io(error) => Self { source: Some(copy(error)), ..plain(FaultKind::Connection) },
            sqlx::Error::Tls(_) => plain(FaultKind::Tls),
            sqlx::Error::Configuration(_) | sqlx::Error::ConfigFile(_) => plain(FaultKind::Configuration),
            sqlx::Error::PoolTimedOut => plain(FaultKind::PoolTimeout),
            sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => plain(FaultKind::Away),
            // The stream broke in the middle of a message.
            sqlx::Error::Protocol(_) | sqlx::Error::BeginFailed => plain(FaultKind::Connection),
            sqlx::Error::Database(error) => {
                let code = error.code().map(std::borrow::Cow::into_owned);
                let kind = code.as_deref().map_or(FaultKind::Unexpected, FaultKind::of_code);
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
            | sqlx::Error::InvalidSavePointStatement => plain(FaultKind::Unexpected),
            // The enum is non-exhaustive.
            _ => plain(FaultKind::Unexpected),
        }
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        let store = "Postgres";
        match fault.kind {
            FaultKind::Unexpected => Self::Unexpected { store, source: fault.into() },
            FaultKind::Connection
            | FaultKind::Tls
            | FaultKind::Configuration
            | FaultKind::Refused
            | FaultKind::PoolTimeout
            | FaultKind::Deadline
            | FaultKind::Overloaded
            | FaultKind::Away
            | FaultKind::Conflict => Self::Unavailable { store, source: fault.into() },
        }
    }
}

fn copy(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_a_server_that_is_away_or_full_are_not_our_fault() {
        for (code, kind) in [
            ("57P01", FaultKind::Away),
            ("57P03", FaultKind::Away),
            ("57014", FaultKind::Deadline),
            ("53300", FaultKind::Overloaded),
            ("40001", FaultKind::Conflict),
            ("40P01", FaultKind::Conflict),
            ("25006", FaultKind::Away),
            ("28P01", FaultKind::Refused),
            ("3D000", FaultKind::Refused),
            ("08006", FaultKind::Connection),
        ] {
            assert_eq!(FaultKind::of_code(code), kind, "{code}");
            let fault = Fault { kind, code: Some(code.to_owned()), source: None };
            assert!(matches!(StoreError::from(fault), StoreError::Unavailable { .. }), "{code}");
        }
    }

    #[test]
    fn a_broken_constraint_or_a_missing_table_is() {
        for code in ["23505", "23514", "42P01", "22P02", ""] {
            assert_eq!(FaultKind::of_code(code), FaultKind::Unexpected, "{code}");
        }
        let fault = Fault { kind: FaultKind::Unexpected, code: Some("23505".to_owned()), source: None };
        assert_eq!(fault.to_string(), "unexpected, SQLSTATE 23505");
    }
}
