//! Claims of Apps: which namespace can serve an App from this database.

use sqlx::PgConnection;
use tokio::time::timeout_at;

use super::{
    OwnershipClaim,
    row::{AppRow, AppRowState},
};
use crate::{domain::ports::StoreError, store::postgres::PostgresStore};

/// The outcome of a claim: whether a namespace can serve an App from this database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The claim is valid: the namespace can serve the App.
    Held,
    /// The users belong to an App in another namespace.
    OtherNamespace,
    /// The users belong to an earlier incarnation of the App, which had other keys.
    KeysLost,
    /// The users of this incarnation of the App were deleted.
    Deleted,
}

/// The decision on a claim.
enum ClaimDecision {
    Decided(ClaimOutcome),
    /// The claim must be written to the App's row, and is then valid.
    Write,
}

// === impl AppRow ===

impl AppRow {
    /// Compares the claim with the App's row, and decides on the claim. `write_claims` contains the same rule in SQL.
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
            // The App is served again, so its deletion was cancelled.
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
    /// Records claims that are valid and not recorded yet, and returns the outcome of each claim, in the order of
    /// `claims`. Writes nothing if all valid claims are recorded already.
    pub async fn claim_apps(&self, claims: &[OwnershipClaim]) -> Result<Vec<ClaimOutcome>, StoreError> {
        let mut call = self.begin_call("claim_apps").await?;
        let (connection, deadline) = call.parts();
        let claiming = async {
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
                // This is a separate statement, so that it sees what another server wrote in the meantime.
                app_rows(connection, claims).await?
            };
            let outcome = |claim| match decision(&rows, claim) {
                ClaimDecision::Decided(outcome) => outcome,
                // The claim is valid, although the row does not record it: between the write and the second read,
                // another server has written a claim on the same App, from a newer or an older document.
                ClaimDecision::Write => ClaimOutcome::Held,
            };
            Ok(claims.iter().map(outcome).collect())
        };
        let outcomes = timeout_at(deadline, claiming).await;
        call.end_call(outcomes)
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
    // Rows are written in a fixed order, so that two servers do not deadlock. The condition is the rule of
    // `AppRow::decide`.
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
