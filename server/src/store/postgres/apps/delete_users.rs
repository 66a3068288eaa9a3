//! The deletion of an App's users, in batches.

use latchkey_crds::{rendered::DeletionProgress, types::AppId};
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use uuid::Uuid;

use super::{
    OwnershipClaim,
    row::{AppRow, AppRowState, try_lock},
};
use crate::{
    domain::{ports::StoreError, user::UserId},
    store::{
        Stores,
        postgres::{PostgresStore, webhooks},
    },
};

/// The outcome of one batch of the deletion of an App's users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// Some users, groups, mails or events were deleted. There may be more.
    Partial,
    /// All users, groups, mails and events are deleted, and the App's row records that.
    Done,
    /// Nothing was deleted: another transaction has locked the App's row (another server's deletion, or a
    /// registration), or the deletion is no longer wanted. Try again.
    Contended,
    /// The users belong to an App in another namespace.
    OtherNamespace,
    /// The users belong to another App with this appID.
    OtherApp,
}

// === impl AppRow ===

impl AppRow {
    /// Returns the outcome if the row is enough to decide it: no users can be deleted, or all users are deleted
    /// already. Returns `None` if there may be users to delete.
    fn delete_outcome(&self, claim: &OwnershipClaim) -> Option<DeleteOutcome> {
        let is_same_incarnation = self.incarnation == claim.incarnation;
        match self.state() {
            AppRowState::Deleted if is_same_incarnation || claim.incarnation.is_none() => Some(DeleteOutcome::Done),
            // The row records the deletion of an earlier App with this appID. The App of the claim was never served,
            // and its deletion is not recorded yet.
            AppRowState::Deleted => None,
            AppRowState::Active | AppRowState::Deleting if !self.is_owned_by(claim) => {
                Some(DeleteOutcome::OtherNamespace)
            }
            AppRowState::Active | AppRowState::Deleting if !is_same_incarnation && self.incarnation.is_some() => {
                Some(DeleteOutcome::OtherApp)
            }
            AppRowState::Active | AppRowState::Deleting => None,
        }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Returns the progress of the deletion of an App's users.
    pub async fn deletion_progress(&self, claim: &OwnershipClaim) -> Result<DeletionProgress, StoreError> {
        let mut call = self.begin_call("deletion").await?;
        let (connection, deadline) = call.parts();
        let query = sqlx::query!(
            r#"
            SELECT
                (SELECT count(*) FROM users WHERE app_id = $1) AS "users_left!",
                EXISTS (
                    SELECT FROM apps
                    WHERE app_id = $1 AND state = 'deleted' AND ($2::text IS NULL OR incarnation = $2)
                ) AS "done!"
            "#,
            claim.app.as_str(),
            claim.incarnation.as_deref(),
        );
        let row = timeout_at(deadline, query.fetch_one(connection)).await;
        let row = call.end_call(row)?;
        Ok(DeletionProgress { users_left: u64::try_from(row.users_left).unwrap_or(0), done: row.done })
    }
}

// === impl Stores ===

impl Stores {
    /// Deletes up to `max_rows` users of an App with their sessions, and up to `max_rows` each of its groups, mails,
    /// audit events and webhook events. If several servers call this at the same time, only one of them deletes. The
    /// App's row is locked, so registrations wait and then fail. `is_wanted` is called after the row was locked,
    /// because the deletion may have been cancelled by then.
    pub async fn delete_users(
        &self,
        claim: &OwnershipClaim,
        max_rows: u32,
        is_wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<DeleteOutcome, StoreError> {
        let mut call = self.postgres.begin_call("delete_users").await?;
        let (connection, deadline) = call.parts();
        let outcome =
            timeout_at(deadline, self.delete_users_in_transaction(connection, claim, max_rows, is_wanted)).await;
        call.end_call(outcome)?
    }

    /// Runs the transaction of `delete_users`. The outer error is an error of Postgres, the inner error is an error of
    /// Redis.
    async fn delete_users_in_transaction(
        &self,
        connection: &mut PgConnection,
        claim: &OwnershipClaim,
        max_rows: u32,
        is_wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<Result<DeleteOutcome, StoreError>, sqlx::Error> {
        insert_deleting_app(connection, claim).await?;
        let mut transaction = connection.begin().await?;
        let row = try_lock(&mut transaction, claim).await?;
        let known_outcome =
            row.filter(|_| is_wanted()).map_or(Some(DeleteOutcome::Contended), |row| row.delete_outcome(claim));
        if let Some(known_outcome) = known_outcome {
            // The rollback is explicit: if the transaction were only dropped, the lock would last until the connection
            // is used again.
            transaction.rollback().await?;
            return Ok(Ok(known_outcome));
        }
        let users = sqlx::query_scalar!(
            "SELECT id FROM users WHERE app_id = $1 ORDER BY id LIMIT $2",
            claim.app.as_str(),
            i64::from(max_rows)
        )
        .fetch_all(&mut *transaction)
        .await?;
        let ids: Vec<UserId> = users.iter().copied().map(UserId).collect();
        // The sessions are ended before the rows are deleted: a failed call is repeated, and the repetition needs the
        // rows to find the sessions.
        if let Err(error) = self.redis.purge_users(&claim.app, &ids).await {
            transaction.rollback().await?;
            return Ok(Err(error));
        }
        let may_have_more = delete_batch(&mut transaction, &claim.app, &users, max_rows).await?;
        let state = if may_have_more { "deleting" } else { "deleted" };
        sqlx::query!(
            "UPDATE apps SET state = $2, namespace = $3, incarnation = coalesce($4, incarnation), \
             handover = greatest(handover, $5), updated_at = now()
             WHERE app_id = $1",
            claim.app.as_str(),
            state,
            claim.namespace,
            claim.incarnation.as_deref(),
            i64::from(claim.handover),
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Ok(if may_have_more { DeleteOutcome::Partial } else { DeleteOutcome::Done }))
    }
}

/// Inserts a row if the App has none: no server ever claimed the App, for example because Postgres was unavailable.
async fn insert_deleting_app(connection: &mut PgConnection, claim: &OwnershipClaim) -> Result<(), sqlx::Error> {
    sqlx::query!(
        "INSERT INTO apps (app_id, namespace, incarnation, handover, state)
         VALUES ($1, $2, $3, $4, 'deleting') ON CONFLICT DO NOTHING",
        claim.app.as_str(),
        claim.namespace,
        claim.incarnation.as_deref(),
        i64::from(claim.handover),
    )
    .execute(connection)
    .await
    .map(drop)
}

/// Deletes rows of an App: these users with their identities and memberships, all classes of foreign hashes, and at
/// most `max_rows` each of groups, mails, audit events and webhook events. Returns whether there may be more to delete.
pub(super) async fn delete_batch(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
    max_rows: u32,
) -> Result<bool, sqlx::Error> {
    let max_rows = i64::from(max_rows);
    let users = sqlx::query!("DELETE FROM users WHERE app_id = $1 AND id = ANY ($2)", app.as_str(), users)
        .execute(&mut *connection)
        .await?;
    // The memberships need no statement: they were deleted with their users.
    let groups = sqlx::query!(
        "DELETE FROM groups WHERE app_id = $1 AND name IN (SELECT name FROM groups WHERE app_id = $1 LIMIT $2)",
        app.as_str(),
        max_rows
    )
    .execute(&mut *connection)
    .await?;
    let mails = sqlx::query!(
        "DELETE FROM outbox WHERE app_id = $1 AND id IN (SELECT id FROM outbox WHERE app_id = $1 LIMIT $2)",
        app.as_str(),
        max_rows
    )
    .execute(&mut *connection)
    .await?;
    let events = sqlx::query!(
        "DELETE FROM audit_events USING (SELECT at, id FROM audit_events WHERE app_id = $1 LIMIT $2) AS batch
         WHERE audit_events.app_id = $1 AND audit_events.at = batch.at AND audit_events.id = batch.id",
        app.as_str(),
        max_rows
    )
    .execute(&mut *connection)
    .await?;
    let webhook_events = webhooks::delete_of_app(connection, app, max_rows).await?;
    // No limit is needed: an App has at most a few rows in this table.
    sqlx::query!("DELETE FROM hash_classes WHERE app_id = $1", app.as_str()).execute(&mut *connection).await?;
    let deleted = users.rows_affected() + groups.rows_affected() + mails.rows_affected() + events.rows_affected();
    Ok(deleted + webhook_events > 0)
}
