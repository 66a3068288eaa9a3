//! The row of a user as administrators see it, and queries that return it.

use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    domain::{
        administration::{AdminIdentity, AdminUser, CreatedBy, ExternalId, Metadata, Version},
        email::Email,
        password::PasswordHash,
        user::{Epoch, UserId},
    },
    store::postgres::CallError,
};

/// The columns that `admin_user_query!` returns.
pub(super) struct AdminUserRow {
    pub(super) id: Uuid,
    pub(super) email: Option<String>,
    pub(super) email_verified_at: Option<OffsetDateTime>,
    pub(super) pending_email: Option<String>,
    pub(super) name: String,
    /// The name in lower case, as converted by Postgres. Names are sorted by this column.
    pub(super) lower_name: String,
    pub(super) password_hash: Option<String>,
    pub(super) contested: bool,
    pub(super) epoch: i64,
    pub(super) version: i64,
    pub(super) disabled_at: Option<OffsetDateTime>,
    pub(super) created_at: OffsetDateTime,
    pub(super) external_id: Option<String>,
    pub(super) metadata: Option<String>,
    pub(super) created_by: String,
}

/// A query that returns `AdminUserRow`s: `admin_user_query!(["FROM users …"], arguments)`.
macro_rules! admin_user_query {
    ([$($from:tt)*] $($arguments:tt)*) => {
        sqlx::query_as!(
            $crate::store::postgres::administration::row::AdminUserRow,
            "SELECT users.id, users.email, email_verified_at, pending_email, name, lower(name) AS \"lower_name!\", "
                + "password_hash, contested, epoch, version, disabled_at, created_at, external_id, "
                + "metadata::text AS metadata, "
                + "created_by "
                + $($from)*
            $($arguments)*
        )
    };
}
pub(super) use admin_user_query;

// === impl AdminUserRow ===

impl AdminUserRow {
    pub(super) fn into_user(
        self,
        identities: Vec<AdminIdentity>,
        last_signed_in_at: Option<OffsetDateTime>,
    ) -> Result<AdminUser, CallError> {
        let email = |text: Option<String>| {
            text.map(|text| Email::parse(&text)).transpose().map_err(|_| CallError::unexpected_row())
        };
        let external_id = self.external_id.as_deref().map(ExternalId::parse).transpose();
        let metadata = match self.metadata {
            None => None,
            Some(text) => Some(Metadata::from_stored(text).ok_or(CallError::unexpected_row())?),
        };
        Ok(AdminUser {
            id: UserId(self.id),
            email: email(self.email)?,
            email_verified: self.email_verified_at.is_some(),
            pending_email: email(self.pending_email)?,
            name: self.name,
            disabled: self.disabled_at.is_some(),
            contested: self.contested,
            password_hash: self.password_hash.map(PasswordHash::new),
            external_id: external_id.map_err(|_| CallError::unexpected_row())?,
            metadata,
            created_by: CreatedBy::from_name(&self.created_by).ok_or(CallError::unexpected_row())?,
            created_at: self.created_at,
            epoch: Epoch(self.epoch),
            version: Version(self.version),
            last_signed_in_at,
            identities,
        })
    }
}
