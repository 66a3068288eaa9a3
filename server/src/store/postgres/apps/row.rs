//! The row of an App: its owner, and whether its users are being deleted.

use latchkey_crds::types::AppId;
use sqlx::PgConnection;

use super::OwnershipClaim;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AppRowState {
    Active,
    Deleting,
    Deleted,
}

pub(super) struct AppRow {
    pub(super) app_id: String,
    pub(super) namespace: String,
    pub(super) state: String,
    pub(super) incarnation: Option<String>,
    pub(super) handover: i64,
    pub(super) has_users: bool,
}

// === impl AppRow ===

impl AppRow {
    /// Returns the row's state. The table allows no states except these three.
    pub(super) fn state(&self) -> AppRowState {
        match self.state.as_str() {
            "active" => AppRowState::Active,
            "deleting" => AppRowState::Deleting,
            _ => AppRowState::Deleted,
        }
    }

    /// Whether the claim's namespace owns the row, or the appID was handed over to this namespace after the row was
    /// written. A handover keeps the keys. So a claim with other keys is never a handover, even if its `handover` is
    /// greater than that of the row: it is an old claim of an App that had the appID before the current App.
    pub(super) fn is_owned_by(&self, claim: &OwnershipClaim) -> bool {
        let same_keys = self.incarnation.is_none() || self.incarnation == claim.incarnation;
        self.namespace == claim.namespace || same_keys && i64::from(claim.handover) > self.handover
    }

    /// Whether the App has users, and their codes and refresh tokens need keys that the claim does not have.
    pub(super) fn has_lost_keys(&self, claim: &OwnershipClaim) -> bool {
        self.has_users && i64::from(claim.handover) <= self.handover && self.has_other_keys(claim)
    }

    pub(super) fn has_other_keys(&self, claim: &OwnershipClaim) -> bool {
        let incarnations = self.incarnation.as_ref().zip(claim.incarnation.as_ref());
        incarnations.is_some_and(|(known, claimed)| known != claimed)
    }
}

/// Whether users can be written: the App's users are not being deleted. Locks the App's row. Therefore the deletion of
/// the users either comes first, and this transaction sees it, or comes after the commit of this transaction, and
/// deletes what the transaction wrote. An App that no server has claimed has no row, and is active.
pub(in crate::store::postgres) async fn is_active(
    connection: &mut PgConnection,
    app: &AppId,
) -> Result<bool, sqlx::Error> {
    let state = sqlx::query_scalar!("SELECT state FROM apps WHERE app_id = $1 FOR SHARE", app.as_str())
        .fetch_optional(connection)
        .await?;
    Ok(state.is_none_or(|state| state == "active"))
}

/// Locks the App's row until the transaction ends. Returns `None` if there is no row, or another transaction has locked
/// it. `has_users` is not read from the database, and is always true.
pub(super) async fn try_lock(
    connection: &mut PgConnection,
    claim: &OwnershipClaim,
) -> Result<Option<AppRow>, sqlx::Error> {
    sqlx::query_as!(
        AppRow,
        r#"SELECT app_id, namespace, state, incarnation, handover, true AS "has_users!" FROM apps
         WHERE app_id = $1 FOR UPDATE SKIP LOCKED"#,
        claim.app.as_str()
    )
    .fetch_optional(connection)
    .await
}
