//! Reads identities, and users by their identity.

use latchkey_crds::types::AppId;
use time::OffsetDateTime;
use tokio::time::timeout_at;

use crate::{
    domain::{
        identity::Identity,
        ports::StoreError,
        user::{User, UserId},
    },
    store::postgres::{PostgresStore, users::user_query},
};

struct IdentityRow {
    provider: String,
    subject: String,
    email: Option<String>,
    linked_at: OffsetDateTime,
}

// === impl IdentityRow ===

impl From<IdentityRow> for Identity {
    fn from(row: IdentityRow) -> Self {
        Self { provider: row.provider, subject: row.subject, email: row.email, linked_at: row.linked_at }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    pub(super) async fn user_by_identity(
        &self,
        app: &AppId,
        authority: &str,
        subject: &str,
    ) -> Result<Option<User>, StoreError> {
        let mut call = self.begin_call("user_by_identity").await?;
        let (connection, deadline) = call.parts();
        let query = user_query!(
            SELECT
            "FROM identities JOIN users ON users.app_id = identities.app_id AND users.id = identities.user_id
             WHERE identities.app_id = $1 AND authority = $2 AND subject = $3",
            app.as_str(),
            authority,
            subject,
        );
        let row = timeout_at(deadline, query.fetch_optional(connection)).await;
        call.end_call(row)?.map(User::try_from).transpose()
    }

    pub(super) async fn identities(&self, app: &AppId, user: UserId) -> Result<Vec<Identity>, StoreError> {
        let mut call = self.begin_call("identities").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_as!(
            IdentityRow,
            "SELECT provider, subject, email, linked_at FROM identities
             WHERE app_id = $1 AND user_id = $2
             ORDER BY linked_at, authority, subject",
            app.as_str(),
            user.0,
        );
        let rows = timeout_at(deadline, query.fetch_all(connection)).await;
        Ok(call.end_call(rows)?.into_iter().map(Identity::from).collect())
    }
}
