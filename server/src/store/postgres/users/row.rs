//! The row of a user, and queries that return it.

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    domain::{
        email::Email,
        mail::EpochChange,
        password::PasswordHash,
        ports::StoreError,
        session::SessionId,
        user::{Epoch, User, UserId},
    },
    store::postgres::CallError,
};

/// The columns that `user_query!` returns.
pub(in crate::store::postgres) struct UserRow {
    pub(in crate::store::postgres) id: Uuid,
    pub(in crate::store::postgres) email: Option<String>,
    pub(in crate::store::postgres) email_verified_at: Option<OffsetDateTime>,
    pub(in crate::store::postgres) pending_email: Option<String>,
    pub(in crate::store::postgres) name: String,
    pub(in crate::store::postgres) password_hash: Option<String>,
    pub(in crate::store::postgres) password_session: Option<Uuid>,
    pub(in crate::store::postgres) contested: bool,
    pub(in crate::store::postgres) epoch: i64,
    pub(in crate::store::postgres) version: i64,
    pub(in crate::store::postgres) disabled_at: Option<OffsetDateTime>,
    pub(in crate::store::postgres) created_at: OffsetDateTime,
    pub(in crate::store::postgres) updated_at: OffsetDateTime,
}

/// A query that returns `UserRow`s: `user_query!(SELECT "FROM users …", arguments)` or
/// `user_query!(RETURNING "UPDATE users …", arguments)`.
macro_rules! user_query {
    (SELECT $from:tt $($arguments:tt)*) => {
        user_query!(@ "SELECT", $from $($arguments)*)
    };
    (RETURNING $change:tt $($arguments:tt)*) => {
        user_query!(@ $change + " RETURNING", "" $($arguments)*)
    };
    (@ $before:tt $(+ $keyword:tt)?, $after:tt $($arguments:tt)*) => {
        sqlx::query_as!(
            $crate::store::postgres::users::UserRow,
            $before $(+ $keyword)?
                + " users.id, users.email, email_verified_at, pending_email, name, password_hash, password_session, "
                + "contested, epoch, version, disabled_at, created_at, updated_at "
                + $after
            $($arguments)*
        )
    };
}
pub(in crate::store::postgres) use user_query;

// === impl UserRow ===

impl UserRow {
    /// Returns the raised epoch, to be written to the outbox and to Redis. `self` is the row after the change.
    pub(in crate::store::postgres) fn epoch_change(&self, kept_session: Option<SessionId>) -> EpochChange {
        EpochChange { user: UserId(self.id), epoch: Epoch(self.epoch), kept_session }
    }
}

impl TryFrom<UserRow> for User {
    type Error = StoreError;

    fn try_from(row: UserRow) -> Result<Self, StoreError> {
        let email = |text: Option<String>| {
            text.map(|text| Email::parse(&text)).transpose().map_err(|_| StoreError::from(CallError::unexpected_row()))
        };
        Ok(Self {
            id: UserId(row.id),
            email: email(row.email)?,
            email_verified: row.email_verified_at.is_some(),
            pending_email: email(row.pending_email)?,
            name: row.name,
            password_hash: row.password_hash.map(PasswordHash::new),
            password_session: row.password_session.map(SessionId),
            contested: row.contested,
            disabled: row.disabled_at.is_some(),
            epoch: Epoch(row.epoch),
            version: row.version,
            created_at: row.created_at,
            updated_at: row.updated_at,
        })
    }
}
