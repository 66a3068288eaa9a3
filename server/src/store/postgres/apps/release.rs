//! The release of a deleted App: frees its appID if it has no users.

use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;

use super::{
    OwnershipClaim,
    delete_users::delete_batch,
    row::{AppRow, AppRowState, try_lock},
};
use crate::{domain::ports::StoreError, store::postgres::PostgresStore};

/// Maximum number of rows of each kind (groups, mails, audit events, webhook events) that one transaction deletes when
/// an App is released.
const RELEASE_BATCH: u32 = 500;

/// The outcome of `release_app`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// The App had no users. The appID is free.
    Freed,
    /// The appID stays reserved: the App has users, or has events of deleted users, or the database does not know the
    /// App. `users` is the number of users, but at least 1.
    Reserved { users: u64 },
    /// The appID is not free yet: another transaction has locked the App's row, the release is no longer wanted, or
    /// there are more rows to delete. Try again.
    Contended,
    /// The users belong to an App in another namespace.
    OtherNamespace,
    /// The users belong to another App with this appID, or this App is served again.
    OtherApp,
}

// === impl AppRow ===

impl AppRow {
    /// Returns the outcome if the row is enough to decide it: the appID cannot be freed, or is free already. Returns
    /// `None` if the appID can be freed on the condition that the App has no users.
    fn release_outcome(&self, claim: &OwnershipClaim) -> Option<ReleaseOutcome> {
        match self.state() {
            AppRowState::Deleted if self.incarnation.is_none() || self.incarnation == claim.incarnation => {
                Some(ReleaseOutcome::Freed)
            }
            // The row records the deletion of an earlier App with this appID. The App of the claim was never served,
            // and its release is not recorded yet.
            AppRowState::Deleted => None,
            AppRowState::Active | AppRowState::Deleting if self.namespace != claim.namespace => {
                Some(ReleaseOutcome::OtherNamespace)
            }
            // The document of the release is outdated: the App was published again later. The operator raises
            // `handover` in the App's key Secret before it publishes the release. The release carries the `handover`
            // from before the raise, so every later document of the App has a greater `handover` than the release.
            AppRowState::Active | AppRowState::Deleting
                if self.handover > i64::from(claim.handover) || self.has_other_keys(claim) =>
            {
                Some(ReleaseOutcome::OtherApp)
            }
            AppRowState::Active | AppRowState::Deleting => None,
        }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Frees the appID of a deleted App if the App has no users. Deletes no user. The App's row is locked: this
    /// function sees the users of earlier registrations, and later registrations fail because of the row's state. The
    /// appID of an App that the database does not know is not freed. `is_wanted` is called after the row was locked,
    /// because the App may be served again by then.
    pub async fn release_app(
        &self,
        claim: &OwnershipClaim,
        is_wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<ReleaseOutcome, StoreError> {
        let mut call = self.begin_call("release_app").await?;
        let (connection, deadline) = call.parts();
        let outcome = timeout_at(deadline, release_in_transaction(connection, claim, is_wanted)).await;
        call.end_call(outcome)
    }
}

async fn release_in_transaction(
    connection: &mut PgConnection,
    claim: &OwnershipClaim,
    is_wanted: impl Fn() -> bool + Send + Sync,
) -> Result<ReleaseOutcome, sqlx::Error> {
    // If the database does not know the App, the database may be empty or the wrong one. The App may have users in the
    // right database.
    let is_known =
        sqlx::query_scalar!(r#"SELECT EXISTS (SELECT FROM apps WHERE app_id = $1) AS "known!""#, claim.app.as_str())
            .fetch_one(&mut *connection)
            .await?;
    if !is_known {
        return Ok(ReleaseOutcome::Reserved { users: 1 });
    }
    let mut transaction = connection.begin().await?;
    let row = try_lock(&mut transaction, claim).await?;
    let known_outcome =
        row.filter(|_| is_wanted()).map_or(Some(ReleaseOutcome::Contended), |row| row.release_outcome(claim));
    if let Some(known_outcome) = known_outcome {
        transaction.rollback().await?;
        return Ok(known_outcome);
    }
    // This is a separate statement, so that it sees everything that was committed before the lock was granted.
    let remaining = sqlx::query!(
        r#"
        SELECT (SELECT count(*) FROM users WHERE app_id = $1) AS "users!",
            EXISTS (SELECT FROM audit_events WHERE app_id = $1 AND user_id IS NOT NULL) AS "has_events!"
        "#,
        claim.app.as_str(),
    )
    .fetch_one(&mut *transaction)
    .await?;
    let users = u64::try_from(remaining.users).unwrap_or(0);
    if users > 0 || remaining.has_events {
        transaction.rollback().await?;
        return Ok(ReleaseOutcome::Reserved { users: users.max(1) });
    }
    // The remaining rows belong to no user, for example groups, mails without a recipient, and refusals without a user.
    let may_have_more = delete_batch(&mut transaction, &claim.app, &[], RELEASE_BATCH).await?;
    if !may_have_more {
        // The row gets no incarnation, so that the next claim succeeds, even a claim of the same App if it is created
        // again.
        sqlx::query!(
            "UPDATE apps SET state = 'deleted', namespace = $2, incarnation = NULL,
                handover = greatest(handover, $3), updated_at = now()
             WHERE app_id = $1",
            claim.app.as_str(),
            claim.namespace,
            i64::from(claim.handover),
        )
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await?;
    Ok(if may_have_more { ReleaseOutcome::Contended } else { ReleaseOutcome::Freed })
}
