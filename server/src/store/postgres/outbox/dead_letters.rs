//! Dead letters: lists them, and queues a dead letter for delivery again.

use std::fmt;

use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::{domain::ports::StoreError, store::postgres::PostgresStore};

/// Maximum number of dead letters in a list. A list contains the newest dead letters.
const MAX_LISTED: i64 = 10_000;

/// A mail that Latchkey no longer tries to deliver.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    pub app: String,
    pub id: Uuid,
    pub kind: String,
    pub user: Option<Uuid>,
    pub attempts: i32,
    pub created_at: OffsetDateTime,
    pub dead_at: OffsetDateTime,
    /// Why the last attempt failed: a message from Latchkey, never text from the relay.
    pub error: Option<String>,
}

// === impl DeadLetter ===

impl fmt::Display for DeadLetter {
    /// Writes one line, with tabs between the columns.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |time: OffsetDateTime| time.format(&Rfc3339).map_err(|_| fmt::Error);
        let user = self.user.map_or_else(|| "-".to_owned(), |user| user.to_string());
        let (created, dead) = (text(self.created_at)?, text(self.dead_at)?);
        let error = self.error.as_deref().unwrap_or("-");
        write!(
            f,
            "{}\t{}\t{}\t{user}\tattempts={}\tcreated={created}\tdead={dead}\t{error}",
            self.id, self.app, self.kind, self.attempts
        )
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Lists the dead letters, newest first.
    pub async fn dead_letters(&self) -> Result<Vec<DeadLetter>, StoreError> {
        let mut call = self.begin_call("dead_letters").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query_as!(
            DeadLetter,
            r#"
            SELECT app_id AS app, id, kind, user_id AS user, attempts, created_at, dead_at AS "dead_at!", error
            FROM outbox
            WHERE dead_at IS NOT NULL
            ORDER BY dead_at DESC, app_id, id
            LIMIT $1
            "#,
            MAX_LISTED,
        );
        let letters = timeout_at(deadline, query.fetch_all(connection)).await;
        call.end_call(letters)
    }

    /// Queues a dead letter for delivery again, and resets its number of attempts. Returns whether there was a dead
    /// letter with this id.
    pub async fn retry_dead_letter(&self, id: Uuid) -> Result<bool, StoreError> {
        let mut call = self.begin_call("retry_dead_letter").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            "UPDATE outbox SET dead_at = NULL, error = NULL, attempts = 0, due_at = statement_timestamp(), \
             lease_until = NULL
             WHERE dead_at IS NOT NULL AND id = $1",
            id
        );
        let updated = timeout_at(deadline, query.execute(connection)).await;
        let retried = call.end_call(updated)?.rows_affected() > 0;
        if retried {
            self.notify_deliverer();
        }
        Ok(retried)
    }
}
