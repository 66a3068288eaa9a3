//! Ownership of appIDs in the database, and the deletion of an App's users.

use latchkey_crds::{
    rendered::{DeletedApp, DeletionProgress, RenderedApp},
    types::AppId,
};
use sqlx::{Connection, PgConnection};
use tokio::time::timeout_at;
use uuid::Uuid;

use super::PostgresStore;
use crate::{
    domain::{ports::StoreError, user::UserId},
    store::Stores,
};

/// Mails and events that one transaction deletes when an App is released.
const RELEASE_BATCH: u32 = 500;

/// The owner of an App, by its rendered document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipClaim {
    pub app: AppId,
    pub namespace: String,
    pub incarnation: Option<String>,
    pub handover: u32,
}

/// The outcome of a claim: whether a namespace can serve an App from this database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The claim holds. It is recorded if the App had no owner.
    Held,
    /// The users belong to an App in another namespace.
    OtherNamespace,
    /// The users belong to an earlier incarnation of the App, which had other keys.
    KeysLost,
    /// The users of this incarnation of the App were deleted.
    Deleted,
}

/// The outcome of one batch of the deletion of an App's users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    /// Some were deleted. There may be more.
    Partial,
    /// All are deleted, and the App's row records it.
    Done,
    /// Another server is deleting, or a registration is in progress. Try again.
    Contended,
    /// The users belong to an App in another namespace.
    OtherNamespace,
    /// The users belong to another App with this appID.
    OtherApp,
}

/// The outcome of `release_app`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// The App had no users. The appID is free.
    Freed,
    /// The appID stays reserved: the App has `users` users, or has events of deleted users, or the database does not
    /// know the App. `users` is at least 1.
    Reserved { users: u64 },
    /// Another server works on it, or a registration is in progress. Try again.
    Contended,
    /// The users belong to an App in another namespace.
    OtherNamespace,
    /// The users belong to another App with this appID, or this App is served again.
    OtherApp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AppRowState {
    Active,
    Deleting,
    Deleted,
}

struct AppRow {
    app_id: String,
    namespace: String,
    state: String,
    incarnation: Option<String>,
    handover: i64,
    has_users: bool,
}

/// The decision on a claim.
enum ClaimDecision {
    Decided(ClaimOutcome),
    /// The claim holds once it is written to the row.
    Write,
}

// === impl OwnershipClaim ===

impl From<&RenderedApp> for OwnershipClaim {
    fn from(doc: &RenderedApp) -> Self {
        Self {
            app: doc.app_id.clone(),
            namespace: doc.namespace.clone(),
            incarnation: doc.incarnation.clone(),
            handover: doc.handover.unwrap_or(0),
        }
    }
}

impl From<&DeletedApp> for OwnershipClaim {
    fn from(doc: &DeletedApp) -> Self {
        Self {
            app: doc.app_id.clone(),
            namespace: doc.namespace.clone(),
            incarnation: doc.incarnation.clone(),
            handover: doc.handover.unwrap_or(0),
        }
    }
}

// === impl AppRow ===

impl AppRow {
    /// The table allows no other states.
    fn state(&self) -> AppRowState {
        match self.state.as_str() {
            "active" => AppRowState::Active,
            "deleting" => AppRowState::Deleting,
            _ => AppRowState::Deleted,
        }
    }

    /// Whether the claim's namespace owns the row, or the appID was handed over to it since. A handover keeps the keys.
    /// A claim with other keys is of an App that had the appID before it became free. Its `handover` can be greater.
    fn is_owned_by(&self, claim: &OwnershipClaim) -> bool {
        let same_keys = self.incarnation.is_none() || self.incarnation == claim.incarnation;
        self.namespace == claim.namespace || same_keys && i64::from(claim.handover) > self.handover
    }

    /// Whether there are users with codes and refresh tokens under keys that the claim does not have.
    fn has_lost_keys(&self, claim: &OwnershipClaim) -> bool {
        self.has_users && i64::from(claim.handover) <= self.handover && self.has_other_keys(claim)
    }

    fn has_other_keys(&self, claim: &OwnershipClaim) -> bool {
        let incarnations = self.incarnation.as_ref().zip(claim.incarnation.as_ref());
        incarnations.is_some_and(|(known, claimed)| known != claimed)
    }

    /// `write_claims` contains the same rule in SQL.
    fn decide(&self, claim: &OwnershipClaim) -> ClaimDecision {
        let is_new_incarnation = claim.incarnation.is_some() && claim.incarnation != self.incarnation;
        match self.state() {
            AppRowState::Deleted if is_new_incarnation => ClaimDecision::Write,
            AppRowState::Deleted => ClaimDecision::Decided(ClaimOutcome::Deleted),
            AppRowState::Active | AppRowState::Deleting if !self.is_owned_by(claim) => {
                ClaimDecision::Decided(ClaimOutcome::OtherNamespace)
            }
            AppRowState::Active | AppRowState::Deleting if self.has_lost_keys(claim) => {
                ClaimDecision::Decided(ClaimOutcome::KeysLost)
            }
            // The deletion was cancelled.
            AppRowState::Deleting => ClaimDecision::Write,
            AppRowState::Active if is_new_incarnation || i64::from(claim.handover) > self.handover => {
                ClaimDecision::Write
            }
            AppRowState::Active => ClaimDecision::Decided(ClaimOutcome::Held),
        }
    }
}

// === impl PostgresStore ===

impl PostgresStore {
    /// Records claims on Apps without an owner, and returns the outcome of each claim in order. Writes nothing if
    /// nothing changed since the last call.
    pub async fn claim_apps(&self, claims: &[OwnershipClaim]) -> Result<Vec<ClaimOutcome>, StoreError> {
        let mut held = self.begin_call("claim_apps").await?;
        let (connection, until) = held.parts();
        let query = async {
            let rows = app_rows(connection, claims).await?;
            let decision = |rows: &[AppRow], claim: &OwnershipClaim| match rows
                .iter()
                .find(|row| row.app_id == claim.app.as_str())
            {
                Some(row) => row.decide(claim),
                None => ClaimDecision::Write,
            };
            let writes: Vec<_> =
                claims.iter().filter(|claim| matches!(decision(&rows, claim), ClaimDecision::Write)).cloned().collect();
            let rows = if writes.is_empty() {
                rows
            } else {
                write_claims(connection, &writes).await?;
                // A separate statement: it sees what another server wrote in the meantime.
                app_rows(connection, claims).await?
            };
            let answer = |claim| match decision(&rows, claim) {
                ClaimDecision::Decided(answer) => answer,
                // Another server is writing a claim on the same App, by a newer or an older document.
                ClaimDecision::Write => ClaimOutcome::Held,
            };
            Ok(claims.iter().map(answer).collect())
        };
        let answer = timeout_at(until, query).await;
        held.end_call(answer)
    }

    /// The progress of the deletion of an App's users.
    pub async fn deletion_progress(&self, claim: &OwnershipClaim) -> Result<DeletionProgress, StoreError> {
        let mut held = self.begin_call("deletion").await?;
        let (connection, until) = held.parts();
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
        let answer = timeout_at(until, query.fetch_one(connection)).await;
        let row = held.end_call(answer)?;
        Ok(DeletionProgress { users_left: u64::try_from(row.users_left).unwrap_or(0), done: row.done })
    }
}

async fn app_rows(connection: &mut PgConnection, claims: &[OwnershipClaim]) -> Result<Vec<AppRow>, sqlx::Error> {
    let ids: Vec<String> = claims.iter().map(|claim| claim.app.to_string()).collect();
    sqlx::query_as!(
        AppRow,
        r#"
        SELECT app_id, namespace, state, incarnation, handover,
            EXISTS (SELECT FROM users WHERE users.app_id = apps.app_id) AS "has_users!"
        FROM apps WHERE app_id = ANY ($1)
        "#,
        &ids
    )
    .fetch_all(connection)
    .await
}

async fn write_claims(connection: &mut PgConnection, claims: &[OwnershipClaim]) -> Result<(), sqlx::Error> {
    let ids: Vec<String> = claims.iter().map(|claim| claim.app.to_string()).collect();
    let namespaces: Vec<String> = claims.iter().map(|claim| claim.namespace.clone()).collect();
    let incarnations: Vec<Option<String>> = claims.iter().map(|claim| claim.incarnation.clone()).collect();
    let handovers: Vec<i64> = claims.iter().map(|claim| i64::from(claim.handover)).collect();
    // In a fixed order, so that two servers do not deadlock. The rule is that of `AppRow::decide`.
    sqlx::query!(
        r#"
        INSERT INTO apps AS known (app_id, namespace, incarnation, handover)
        SELECT app_id, namespace, incarnation, handover
        FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[])
            AS claim (app_id, namespace, incarnation, handover)
        ORDER BY app_id
        ON CONFLICT (app_id) DO UPDATE
        SET namespace = excluded.namespace,
            incarnation = coalesce(excluded.incarnation, known.incarnation),
            handover = CASE
                WHEN known.state = 'deleted' THEN excluded.handover
                ELSE greatest(known.handover, excluded.handover)
            END,
            state = 'active',
            updated_at = now()
        WHERE CASE
            WHEN known.state = 'deleted'
                THEN excluded.incarnation IS NOT NULL AND excluded.incarnation IS DISTINCT FROM known.incarnation
            WHEN excluded.handover > known.handover
                THEN known.namespace = excluded.namespace OR known.incarnation IS NULL
                    OR known.incarnation = excluded.incarnation
            ELSE known.namespace = excluded.namespace AND (
                known.incarnation IS NULL OR excluded.incarnation IS NULL
                OR known.incarnation = excluded.incarnation
                OR NOT EXISTS (SELECT FROM users WHERE users.app_id = known.app_id)
            )
        END
        "#,
        &ids,
        &namespaces,
        &incarnations as &[Option<String>],
        &handovers,
    )
    .execute(connection)
    .await
    .map(drop)
}

impl PostgresStore {
    /// Frees the appID of a deleted App if it has no users. Deletes no user. The App's row is locked: a registration
    /// that began before is seen here, and a later one is refused by the row. An App that the database does not know is
    /// not freed. `wanted` is called when the row is locked: the App may be served again by then.
    pub async fn release_app(
        &self,
        claim: &OwnershipClaim,
        wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<ReleaseOutcome, StoreError> {
        let mut held = self.begin_call("release_app").await?;
        let (connection, until) = held.parts();
        let releasing = timeout_at(until, release_in_transaction(connection, claim, wanted)).await;
        held.end_call(releasing)
    }
}

async fn release_in_transaction(
    connection: &mut PgConnection,
    claim: &OwnershipClaim,
    wanted: impl Fn() -> bool + Send + Sync,
) -> Result<ReleaseOutcome, sqlx::Error> {
    // An empty or wrong database does not contain the App, which does not mean that the App has no users.
    let known =
        sqlx::query_scalar!(r#"SELECT EXISTS (SELECT FROM apps WHERE app_id = $1) AS "known!""#, claim.app.as_str())
            .fetch_one(&mut *connection)
            .await?;
    if !known {
        return Ok(ReleaseOutcome::Reserved { users: 1 });
    }
    let mut transaction = connection.begin().await?;
    let row = sqlx::query_as!(
        AppRow,
        r#"SELECT app_id, namespace, state, incarnation, handover, true AS "has_users!" FROM apps
         WHERE app_id = $1 FOR UPDATE SKIP LOCKED"#,
        claim.app.as_str()
    )
    .fetch_optional(&mut *transaction)
    .await?;
    let ends = match row.filter(|_| wanted()) {
        None => Some(ReleaseOutcome::Contended),
        Some(row) => match row.state() {
            AppRowState::Deleted if row.incarnation.is_none() || row.incarnation == claim.incarnation => {
                Some(ReleaseOutcome::Freed)
            }
            // The row is of an earlier App. This one was never served.
            AppRowState::Deleted => None,
            AppRowState::Active | AppRowState::Deleting if row.namespace != claim.namespace => {
                Some(ReleaseOutcome::OtherNamespace)
            }
            // The document is outdated: the App was created again since. The operator raises `handover` before it
            // publishes the release, so every later document has a greater one.
            AppRowState::Active | AppRowState::Deleting
                if row.handover > i64::from(claim.handover) || row.has_other_keys(claim) =>
            {
                Some(ReleaseOutcome::OtherApp)
            }
            AppRowState::Active | AppRowState::Deleting => None,
        },
    };
    if let Some(ends) = ends {
        transaction.rollback().await?;
        return Ok(ends);
    }
    // A separate statement: it sees everything that was committed before the lock was granted.
    let left = sqlx::query!(
        r#"
        SELECT (SELECT count(*) FROM users WHERE app_id = $1) AS "users!",
            EXISTS (SELECT FROM audit_events WHERE app_id = $1 AND user_id IS NOT NULL) AS "has_events!"
        "#,
        claim.app.as_str(),
    )
    .fetch_one(&mut *transaction)
    .await?;
    let users = u64::try_from(left.users).unwrap_or(0);
    if users > 0 || left.has_events {
        transaction.rollback().await?;
        return Ok(ReleaseOutcome::Reserved { users: users.max(1) });
    }
    // The remaining rows belong to no user: mails without a recipient and refusals without an account.
    let more = delete_batch(&mut transaction, &claim.app, &[], RELEASE_BATCH).await?;
    if !more {
        // Without an incarnation, so that the next claim holds, also by the same App if it is created again.
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
    Ok(if more { ReleaseOutcome::Contended } else { ReleaseOutcome::Freed })
}

impl Stores {
    /// Deletes up to `most` of an App's users with their sessions, and as many of its mails and events. Several servers
    /// can call this at once; one of them deletes. The App's row is locked, so registrations wait and are then refused.
    /// `wanted` is called when the row is locked, which can be long after the call: the deletion may have been
    /// cancelled.
    pub async fn delete_users(
        &self,
        claim: &OwnershipClaim,
        most: u32,
        wanted: impl Fn() -> bool + Send + Sync,
    ) -> Result<DeleteOutcome, StoreError> {
        let mut held = self.postgres.begin_call("delete_users").await?;
        let (connection, until) = held.parts();
        let deleting = async {
            // Also for an App that no server ever claimed, for example because Postgres was unavailable.
            sqlx::query!(
                "INSERT INTO apps (app_id, namespace, incarnation, handover, state)
                 VALUES ($1, $2, $3, $4, 'deleting') ON CONFLICT DO NOTHING",
                claim.app.as_str(),
                claim.namespace,
                claim.incarnation.as_deref(),
                i64::from(claim.handover),
            )
            .execute(&mut *connection)
            .await?;
            let mut transaction = connection.begin().await?;
            let row = sqlx::query_as!(
                AppRow,
                r#"SELECT app_id, namespace, state, incarnation, handover, true AS "has_users!" FROM apps
                 WHERE app_id = $1 FOR UPDATE SKIP LOCKED"#,
                claim.app.as_str()
            )
            .fetch_optional(&mut *transaction)
            .await?;
            let row = row.filter(|_| wanted());
            let ends = row.map_or(Some(DeleteOutcome::Contended), |row| {
                let same = row.incarnation == claim.incarnation;
                match row.state() {
                    AppRowState::Deleted if same || claim.incarnation.is_none() => Some(DeleteOutcome::Done),
                    // The row is of an earlier App. This one was never served.
                    AppRowState::Deleted => None,
                    AppRowState::Active | AppRowState::Deleting if !row.is_owned_by(claim) => {
                        Some(DeleteOutcome::OtherNamespace)
                    }
                    AppRowState::Active | AppRowState::Deleting if !same && row.incarnation.is_some() => {
                        Some(DeleteOutcome::OtherApp)
                    }
                    AppRowState::Active | AppRowState::Deleting => None,
                }
            });
            if let Some(ends) = ends {
                // Explicit: dropping the transaction would hold the lock until the connection is used again.
                transaction.rollback().await?;
                return Ok(Ok(ends));
            }
            let users = sqlx::query_scalar!(
                "SELECT id FROM users WHERE app_id = $1 ORDER BY id LIMIT $2",
                claim.app.as_str(),
                i64::from(most)
            )
            .fetch_all(&mut *transaction)
            .await?;
            let ids: Vec<UserId> = users.iter().copied().map(UserId).collect();
            // Before the rows are deleted: a failed call is repeated, and needs the rows to find the sessions.
            if let Err(error) = self.redis.purge_users(&claim.app, &ids).await {
                return Ok(Err(error));
            }
            let more = delete_batch(&mut transaction, &claim.app, &users, most).await?;
            let state = if more { "deleting" } else { "deleted" };
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
            Ok(Ok(if more { DeleteOutcome::Partial } else { DeleteOutcome::Done }))
        };
        let answer = timeout_at(until, deleting).await;
        held.end_call(answer)?
    }
}

/// Deletes users, mails and events of an App. Returns whether there were any. Identities are deleted with their users.
async fn delete_batch(
    connection: &mut PgConnection,
    app: &AppId,
    users: &[Uuid],
    most: u32,
) -> Result<bool, sqlx::Error> {
    let most = i64::from(most);
    let users = sqlx::query!("DELETE FROM users WHERE app_id = $1 AND id = ANY ($2)", app.as_str(), users)
        .execute(&mut *connection)
        .await?;
    let mails = sqlx::query!(
        "DELETE FROM outbox WHERE app_id = $1 AND id IN (SELECT id FROM outbox WHERE app_id = $1 LIMIT $2)",
        app.as_str(),
        most
    )
    .execute(&mut *connection)
    .await?;
    let events = sqlx::query!(
        "DELETE FROM audit_events USING (SELECT at, id FROM audit_events WHERE app_id = $1 LIMIT $2) AS batch
         WHERE audit_events.app_id = $1 AND audit_events.at = batch.at AND audit_events.id = batch.id",
        app.as_str(),
        most
    )
    .execute(&mut *connection)
    .await?;
    Ok(users.rows_affected() + mails.rows_affected() + events.rows_affected() > 0)
}
